"""Memory and values for a model that was built on the meta device."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine import torch_private
from shardwise.engine.mesh import default_device


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device | str | None = None) -> list[str]:
    """Give memory to what is still on the meta device, and nothing else, and initialise it.

    Each module that held such tensors is asked to `reset_parameters`. Returns the names of the
    tensors that nobody wrote since: non-persistent buffers that only a constructor fills,
    parameters of modules without that method. Those are yours to fill. A sharded model takes memory
    for its own rows only.
    """
    if device is None:
        device = _device_of(model)
    made: dict[str, torch.Tensor] = {}
    emptied: dict[int, torch.Tensor] = {}  # a tied tensor is made once
    for prefix, module in model.named_modules():
        touched = False
        for tensors in (module._parameters, module._buffers):
            for key, tensor in list(tensors.items()):
                if tensor is None or not torch_private.local_of(tensor).is_meta:
                    continue
                if id(tensor) not in emptied:
                    emptied[id(tensor)] = _empty(tensor, torch.device(device))
                tensors[key] = emptied[id(tensor)]
                made[f"{prefix}.{key}" if prefix else key] = emptied[id(tensor)]
                touched = True
        reset = getattr(module, "reset_parameters", None)
        if touched and callable(reset):
            reset()
    # Memory from `empty` that nobody has written keeps the version of its birth.
    return [name for name, tensor in made.items() if tensor._version == 0]


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cpu":
            return torch.device("cpu")
    return default_device()
