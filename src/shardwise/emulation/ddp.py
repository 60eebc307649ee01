"""torch's DistributedDataParallel over an emulated network.

Its reducer calls the process group from C++, below everything Python can put in the way. So a
communication hook sends each bucket through `torch.distributed.all_reduce` as Python sees it; the
waits follow at the end of backward, where the reducer's own are.
"""

# No postponed annotations: torch reads the hook's.
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.torch_private import call_after_backward

_open = 0  # emulations


class _Buckets:
    """The buckets of one model that are under way."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.under_way: list[tuple[Any, torch.futures.Future[torch.Tensor], torch.Tensor]] = []

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if not _open:
            # Fabricated gradients need no average. Real ones do.
            buffer.div_(dist.get_world_size(self.group))
        devices: list[Any] = [buffer.device] if buffer.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        self.under_way.append((work, future, buffer))
        if bucket.is_last():
            call_after_backward(self.wait)  # the reducer queues its own waits after this
        return future

    def wait(self) -> None:
        for work, future, buffer in self.under_way:
            work.wait()
            future.set_result(buffer)
        self.under_way.clear()


def _send(buckets: _Buckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return buckets.send(bucket)


@contextmanager
def hook_ddp() -> Iterator[None]:
    """Give every model that runs meanwhile the hook, unless it has one already."""
    global _open
    original = DistributedDataParallel.forward

    def forward(model: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        if not model._comm_hooks:
            model.register_comm_hook(_Buckets(model.process_group), _send)
        return original(model, *inputs, **kwargs)

    DistributedDataParallel.forward = forward  # type: ignore[method-assign, assignment]
    _open += 1
    try:
        yield
    finally:
        _open -= 1
        DistributedDataParallel.forward = original  # type: ignore[method-assign]
