"""The memory of messages: what comes and goes with them, and what is added up in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.engine import marks


class Buffer:
    """Tensors whose memory comes and goes, all together, while their views stay."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self._storages = [(s, s.nbytes()) for s in map(torch.Tensor.untyped_storage, tensors)]
        self.allocated = True

    def allocate(self) -> None:
        if not self.allocated:
            for storage, nbytes in self._storages:
                storage.resize_(nbytes)
                if marks.on is not None:
                    marks.on.buffer(self, storage.data_ptr(), nbytes)
            self.allocated = True

    def release(self) -> None:
        for storage, nbytes in self._storages if self.allocated else ():
            # numpy has a view: torch resizes that storage no more.
            if storage.resizable():
                if marks.on is not None:
                    marks.on.buffer(self, storage.data_ptr(), -nbytes)
                storage.resize_(0)
                self.allocated = False

    @contextmanager
    def present(self) -> Iterator[None]:
        """Memory is there inside; views can only be made while it is."""
        was = self.allocated
        self.allocate()
        yield
        if not was:
            self.release()


def allocate(custom: Any, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a collective; that of `custom`, if it is called instead of torch.distributed."""
    if custom is None:
        return torch.empty(numel, dtype=dtype, device=device)
    made: torch.Tensor = custom.allocate((numel,), dtype=dtype, device=device)
    return made


def let_go(message: torch.Tensor) -> None:
    """Give the memory of a message back, whose collective has ended: a thread of gloo's may hold
    the tensor for a moment longer, and what comes next would need as much again.
    """
    storage = message.untyped_storage()
    if storage.resizable():
        storage.resize_(0)


@torch.no_grad()
def add_up(pieces: torch.Tensor, into: torch.Tensor) -> None:
    """The sum of the rows of `pieces`, in the dtype of `into`. A GPU adds wider than it reads in
    one kernel; a host would first make a wider copy of everything, so it takes row after row.
    """
    if pieces.is_cuda:
        torch.sum(pieces, 0, dtype=into.dtype, out=into)
        return
    into.copy_(pieces[0])
    for piece in pieces[1:]:
        into.add_(piece)
