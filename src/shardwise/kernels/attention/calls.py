# mypy: disable-error-code="import-not-found,import-untyped"
"""The launches that an attention call is made of, and the workspaces they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from shardwise.kernels.launches import Launch

SPACE = 256  # bytes to which a workspace is aligned


@dataclass
class Plan:
    """Launches in order, and the workspaces they share, which follow the call's tensors."""

    launches: list[Launch] = field(default_factory=list)
    spaces: list[Tensor] = field(default_factory=list)  # on the meta device: their layout
    offsets: list[int] = field(default_factory=list)  # in one allocation
    bytes: int = 0
    ready: bool = False  # all launches are compiled

    def add_space(self, layout: Tensor) -> None:
        self.spaces.append(layout)
        self.offsets.append(self.bytes)
        self.bytes += triton.cdiv(layout.untyped_storage().nbytes(), SPACE) * SPACE

    def run(self, tensors: Sequence[Tensor | None], addresses: list[int | None]) -> None:
        """`addresses` are the tensors' own."""
        q = tensors[0]
        assert q is not None
        space = q.new_empty(self.bytes, dtype=torch.uint8) if self.bytes else None
        if not self.ready:
            self.run_first(tensors, space)
            return
        if space is not None:
            start = space.data_ptr()
            addresses += [start + offset for offset in self.offsets]
        stream = triton.runtime.driver.active.get_current_stream(q.device.index)
        for launch in self.launches:
            launch.again(addresses, stream)

    def run_first(self, tensors: Sequence[Tensor | None], space: Tensor | None) -> None:
        made = []
        for layout, offset in zip(self.spaces, self.offsets, strict=True):
            assert space is not None
            part = space[offset : offset + layout.untyped_storage().nbytes()].view(layout.dtype)
            made.append(part.as_strided(layout.shape, layout.stride()))
        for launch in self.launches:
            launch.first((*tensors, *made))
        self.ready = all(launch.run is not None for launch in self.launches)
