"""Learning rates of a captured step: a graph reads them on the device, a program writes numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.engine import torch_private
from shardwise.engine.torch_private import local_of, writes_of


@dataclass
class Rate:
    """One parameter group's learning rate as the device has it."""

    group: dict[str, Any]
    tensor: torch.Tensor
    number: float
    given: Any = None  # what the program has in the tensor's place, while a step runs
    installed: bool = False
    writes: int = 0

    def refresh(self) -> None:
        """Bring what the program has written to the device."""
        number = float(self.group["lr"])
        if number != self.number:
            self.tensor.fill_(number)
            self.number = number


class Rates:
    """Makes optimizers ready for graphs: their counts of steps on the device, and their rates too,
    inside of a step. Outside of it the program sees the number that it wrote.
    """

    def __init__(self) -> None:
        self._rates: dict[int, Rate] = {}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Groups whose rate a graph reads."""
        return [rate.group for rate in self._rates.values()]

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Before its step, inside of a captured one."""
        for group in optimizer.param_groups:
            self._make_capturable(optimizer, group)
            rate = self._rate_of(group)
            if rate is None or rate.installed:
                continue
            rate.refresh()
            rate.given, rate.installed, rate.writes = group["lr"], True, writes_of(rate.tensor)
            group["lr"] = rate.tensor

    def uninstall(self) -> str | None:
        """After the step: what it did to a rate, if it did anything."""
        changed = None
        for rate in self._rates.values():
            if not rate.installed:
                continue
            rate.installed = False
            if rate.group["lr"] is not rate.tensor:
                changed = _CHANGED
            else:
                if writes_of(rate.tensor) != rate.writes:
                    changed, rate.given = _CHANGED, float(rate.tensor)
                    rate.number = rate.given
                rate.group["lr"] = rate.given
            rate.given = None
        return changed

    def refresh(self) -> None:
        """Before a replay."""
        for rate in self._rates.values():
            rate.refresh()

    def _rate_of(self, group: dict[str, Any]) -> Rate | None:
        """None where the optimizer reads its rate as a number, or it is on the device already."""
        found = self._rates.get(id(group))
        if found is not None:
            return found
        rate, device = group.get("lr"), _device_of(group)
        reads_tensors = group.get("capturable") or group.get("fused")
        if rate is None or not reads_tensors or device is None:
            return None
        if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
            return None
        number = float(rate)
        made = torch.full((), number, dtype=torch.float32, device=device)
        self._rates[id(group)] = found = Rate(group, made, number)
        return found

    @staticmethod
    def _make_capturable(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Count steps on the device from now on, with what was counted so far."""
        if group.get("capturable", True) or _device_of(group) is None:
            return
        group["capturable"] = True
        torch_private.expect_capture(optimizer)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_cpu:
                    state[key] = value.to(local_of(parameter).device, torch.float32)


_CHANGED = "the learning rate is changed inside the step: call the scheduler after it"


def _device_of(group: dict[str, Any]) -> torch.device | None:
    """Where the group's parameters are; None on the host."""
    devices = {local_of(parameter).device for parameter in group["params"]}
    return None if any(device.type == "cpu" for device in devices) else next(iter(devices), None)
