"""torch's private names that graphs need, each with why and what breaks without it.

No other file of this room touches one (`tests/unit/test_torch_private.py`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

# Collectives that return tensors, and the wait for them: what a traced graph holds. They are how
# torch's own tensor parallelism appears in graphs, and what its compiler knows how to run.
collectives: Any = torch.ops._c10d_functional
_differentiable: Any = _functional_collectives  # takes a group's name, whatever its types say


def is_operator(target: Any) -> bool:
    """Whether a node calls one of torch's operators, whose schema says what it costs."""
    return isinstance(target, torch._ops.OpOverload)


def gather_rows(x: Tensor, group: str) -> Tensor:
    """All ranks' rows, one rank's after the other's; backward scatters the sum of their gradients.
    Without these two tensor parallelism would need rules of autograd of its own.
    """
    gathered: Tensor = _differentiable.all_gather_tensor_autograd(x, 0, group)
    return gathered


def scatter_rows(x: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum over all ranks; backward gathers."""
    scattered: Tensor = _differentiable.reduce_scatter_tensor_autograd(x, "sum", 0, group)
    return scattered


def join_imagined_world(ranks: int) -> None:
    """Be rank 0 of a world whose collectives do nothing. Without it a graph of many ranks could be
    traced on many ranks only.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def name_of_group(group: dist.ProcessGroup) -> str:
    """What the nodes of a graph call it."""
    return str(group.group_name)


def compile_graphs(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[..., tuple[GraphModule, GraphModule]],
    whole: Callable[[GraphModule], GraphModule],
    finish: Callable[[GraphModule, bool], GraphModule],
    inductor: bool,
) -> Callable[..., Any]:
    """What torch.compile runs for a traced `module`: its graphs without autograd in them. A joint
    graph goes through `partition`, one without backward through `whole`; `finish` hears of each
    before it is compiled (and whether it is a backward).

    Without aot_autograd there is no graph of the backward; compile_fx, which is the public way to
    the compiler behind it, has no place for another partition.
    """
    from torch._dynamo.backends.common import aot_autograd

    def compiler(is_backward: bool, alone: bool = False) -> Callable[..., Any]:
        def compile_one(module: GraphModule, inputs: Sequence[Any]) -> Any:
            module = finish(whole(module) if alone else module, is_backward)
            if not inductor:
                from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

                return make_boxed_func(module.forward)
            return _inductor(module, inputs, is_backward, alone)

        return compile_one

    decompositions = None
    if inductor:
        from torch._inductor.decomposition import select_decomp_table

        decompositions = select_decomp_table
    backend = aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(True),
        inference_compiler=compiler(False, alone=True),
        partition_fn=partition,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    return backend(module, inputs)


def _inductor(
    module: GraphModule, inputs: Sequence[Any], is_backward: bool, is_inference: bool
) -> Any:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    # The order of the nodes is the schedule: nobody moves them for memory's sake.
    with config.patch(reorder_for_peak_memory=False):
        return compile_fx_inner(module, inputs, is_backward=is_backward, is_inference=is_inference)


def cut_joint_graph(
    joint: GraphModule, inputs: Sequence[Any], inductor: bool, **given: Any
) -> tuple[GraphModule, GraphModule]:
    """torch's own cut of a joint graph into forward and backward, which recomputes what is cheap
    and what is tagged. The compiler's first passes come before it.
    """
    from functorch.compile import (
        min_cut_rematerialization_partition,
    )

    if inductor:
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        joint_graph_passes(joint)
    forward, backward = min_cut_rematerialization_partition(
        joint, inputs, compiler="inductor", **given
    )
    return forward, backward


def trace_errors() -> tuple[type[BaseException], ...]:
    """What torch.compile raises for a model that it cannot trace."""
    from torch._dynamo import exc
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (exc.TorchDynamoException, GuardOnDataDependentSymNode)


def place_of(error: BaseException) -> str:
    """The line of the user's program that an error of tracing is about; empty if it says none."""
    stack = list(getattr(error, "real_stack", None) or ())
    return f"{stack[-1].filename}:{stack[-1].lineno}, `{stack[-1].line}`" if stack else ""


def tracing_settings() -> AbstractContextManager[Any]:
    """Tracing leaves out what a model's forward tells a logger, as torch.export does: such a call
    (Transformers' say something once) would break the graph. And the guards that it makes do not
    look modules over by their dicts' versions: torch's code for that read freed memory, so 2.12
    turned it off (pytorch/pytorch 181873).
    """
    from torch._dynamo import config

    new = "ignore_logging_functions"  # in torch 2.11 they were methods
    name = new if hasattr(config, new) else "ignore_logger_methods"
    changes: dict[str, Any] = {name: _logger_methods(len(vars(logging.Logger)))}
    by_version = "use_recursive_dict_tags_for_guards"
    if hasattr(config, by_version):
        changes[by_version] = False
    return config.patch(**changes)


@contextmanager
def before_tracing(begin: Callable[[], object]) -> Iterator[None]:
    """Call `begin` when torch.compile starts to trace something inside: at the first call, and
    whenever its guards find that something is another thing now. Without it what tracing needs
    would have to be made ready before every call.
    """
    from torch._dynamo.callback import callback_handler

    def start(*_: Any) -> None:
        begin()

    callback_handler.register_start_callback(start)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)


def without_collecting() -> AbstractContextManager[Any]:
    """torch looks for garbage when it has compiled: seconds where a graph is large, for memory
    that a process that only traces keeps until its end anyway.
    """
    from torch._dynamo import config

    return config.patch(run_gc_after_compile=False)


@functools.cache
def _logger_methods(count: int) -> set[Any]:
    """Libraries add some of their own when they are imported: there are `count` by now."""
    return _Methods(method for method in vars(logging.Logger).values() if callable(method))


class _Methods(set[Any]):
    """Functions, that are words where one asks for all: torch 2.11 sorts its settings to write them
    down, and logs an error where it cannot.
    """

    def __iter__(self) -> Iterator[str]:
        return iter([str(method) for method in super().__iter__()])
