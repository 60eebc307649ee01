"""Ranks of torch.distributed as ranks of MLX's ring, which joins processes by TCP."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    import mlx.core as mx


def join_ring() -> mx.distributed.Group:
    """MLX's group of the ranks that torch's default group has, all on this machine; made once."""
    import mlx.core as mx

    if mx.distributed.init().size() == dist.get_world_size():
        return mx.distributed.init()
    hosts: list[Any] = [None]
    if dist.get_rank() == 0:
        with ExitStack() as opened:
            probes = [opened.enter_context(socket.socket()) for _ in range(dist.get_world_size())]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            hosts = [[[f"127.0.0.1:{probe.getsockname()[1]}"] for probe in probes]]
    dist.broadcast_object_list(hosts)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(hosts[0], file)
        file.flush()
        os.environ |= {"MLX_RANK": str(dist.get_rank()), "MLX_HOSTFILE": file.name}
        return mx.distributed.init(strict=True, backend="ring")
