"""The backend of torch.compile: a traced model, cut into forward and backward, lowered and sent."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from shardwise.graph import torch_private
from shardwise.graph.lower import replace_graph
from shardwise.graph.runtime import send_by_groups

if TYPE_CHECKING:
    from shardwise.graph.compile import CompiledModel


class Backend:
    """What torch.compile hands a traced model to. torch keeps it where Python's collector cannot
    look, so it holds the model by a weak reference.
    """

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = weakref.ref(compiled)

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = self._compiled
        model = compiled()
        assert model is not None
        lowering, inductor = model.lowering(), model.inductor

        def partition(
            joint: GraphModule, inputs: Sequence[Any], **given: Any
        ) -> tuple[GraphModule, GraphModule]:
            lowering.tag(joint.graph)
            forward, backward = torch_private.cut_joint_graph(joint, inputs, inductor, **given)
            graphs = lowering.forward(forward.graph), lowering.backward(backward.graph)
            model = compiled()
            assert model is not None
            graphs = model.improve(*graphs)
            return replace_graph(forward, graphs[0]), replace_graph(backward, graphs[1])

        def whole(module: GraphModule) -> GraphModule:
            return replace_graph(module, lowering.forward(module.graph))

        def finish(module: GraphModule, is_backward: bool) -> GraphModule:
            model = compiled()
            if model is not None and not is_backward:
                model.agree()
            return replace_graph(module, send_by_groups(module.graph))

        return torch_private.compile_graphs(
            module, inputs, partition=partition, whole=whole, finish=finish, inductor=inductor
        )
