"""Optimizer state sharding for any replicated model: each rank steps its share, then everyone gets
the result.

The model and its gradients stay whole on every rank (torch's DistributedDataParallel, or anything
that leaves equal gradients everywhere). Optimizers that treat every element alike split each
parameter by rows, so the state is 1/n; any other class gets whole parameters, spread so that the
largest share is as small as it can easily be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.local_step import ELEMENTWISE
from shardwise.engine.torch_private import all_gather
from shardwise.planning.buckets import group_by_bytes
from shardwise.planning.rows import Rows
from shardwise.planning.units import MIB

Share = tuple[int, int, int]  # parameter index, first row, one past the last row


class ShardedOptimizer(torch.optim.Optimizer):
    """`ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)` steps like AdamW with 1/n
    of its state.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        message_bytes: int = 32 * MIB,
        **defaults: Any,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "ShardedOptimizer needs torch.distributed: start with torchrun and call "
                "init_process_group first"
            )
        super().__init__(params, defaults)
        self.group, self.message_bytes = group, message_bytes
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._parameters = [p for g in self.param_groups for p in g["params"]]
        by_rows = issubclass(optimizer_class, ELEMENTWISE)
        split = _split_rows if by_rows else _split_whole
        self.shares = split(self._parameters, self.world)
        self._pieces = {
            index: _rows(self._parameters[index], first, stop).detach()
            for index, first, stop in self.shares[self.rank]
        }
        groups, at = [], 0
        for g in self.param_groups:
            owned = [self._pieces[i] for i in range(at, at + len(g["params"])) if i in self._pieces]
            at += len(g["params"])
            groups.append({**_settings(g), "params": owned})
        self.inner = optimizer_class(groups, **defaults)
        # The inner optimizer knows settings that the caller left at their defaults.
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update(_settings(theirs))
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step this rank's share, then gather everybody's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update(_settings(ours))
        for index, first, stop in self.shares[self.rank]:
            grad = self._parameters[index].grad
            self._pieces[index].grad = None if grad is None else _rows(grad, first, stop)
        self.inner.step()
        for piece in self._pieces.values():
            piece.grad = None
        self._gather()
        return loss

    def _gather(self) -> None:
        """Bring the stepped parameters to every rank, in messages of about `message_bytes` per
        dtype.
        """
        if self.world == 1:
            return
        dtypes = dict.fromkeys(p.dtype for p in self._parameters)
        for dtype in dtypes:
            indices = [i for i, p in enumerate(self._parameters) if p.dtype == dtype]
            size = lambda i: self._parameters[i].numel() * self._parameters[i].element_size()  # noqa: E731
            for message in group_by_bytes(indices, size, self.message_bytes):
                self._gather_message(set(message), dtype)

    def _gather_message(self, members: set[int], dtype: torch.dtype) -> None:
        views = [
            [
                _rows(self._parameters[i], first, stop).detach().view(-1)
                for i, first, stop in shares
                if i in members
            ]
            for shares in self.shares
        ]
        lengths = [sum(view.numel() for view in mine) for mine in views]
        longest = max(lengths)
        if longest == 0:
            return
        device = self._parameters[0].device
        mine = torch.zeros(longest, dtype=dtype, device=device)
        if lengths[self.rank]:
            torch.cat(views[self.rank], out=mine[: lengths[self.rank]])
        everyone = torch.empty(self.world * longest, dtype=dtype, device=device)
        all_gather(everyone, mine, self.group).wait()
        for rank, theirs in enumerate(views):
            if rank != self.rank and theirs:
                start = rank * longest
                pieces = everyone[start : start + lengths[rank]].split([v.numel() for v in theirs])
                torch._foreach_copy_(theirs, list(pieces))

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the state, by parameter index, with the rows it covers."""
        state = {
            index: {"rows": (first, stop), **self.inner.state.get(self._pieces[index], {})}
            for index, first, stop in self.shares[self.rank]
        }
        return {"state": state, "param_groups": self._plain_groups(), "world": self.world}

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state on every rank, as the plain optimizer gives it; a collective call."""
        shares: list[Any] = [None] * self.world
        dist.all_gather_object(shares, self.state_dict()["state"], group=self.group)
        whole: dict[int, dict[str, Any]] = {}
        for share in shares:
            for index, state in share.items():
                first, stop = state.pop("rows")
                target = whole.setdefault(index, {})
                for key, value in state.items():
                    parameter = self._parameters[index]
                    if _is_rows(value, parameter, first, stop):
                        tensor = target.setdefault(
                            key, torch.zeros_like(parameter, dtype=value.dtype)
                        )
                        _rows(tensor, first, stop).copy_(value)
                    else:
                        target.setdefault(key, value)
        return {
            "state": {index: state for index, state in sorted(whole.items()) if state},
            "param_groups": self._plain_groups(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share from a whole state (`full_state_dict`, or a plain optimizer's), or
        its own share.
        """
        if state_dict.get("world", self.world) != self.world:
            raise ValueError(
                f"this is one rank's share of {state_dict['world']} ranks, but {self.world} are "
                "running; "
                "save full_state_dict() to load at another size"
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(_settings(saved))
        for index, first, stop in self.shares[self.rank]:
            saved = dict(state_dict["state"].get(index, {}))
            rows = saved.pop("rows", None)
            piece, parameter = self._pieces[index], self._parameters[index]
            for key, value in saved.items():
                if isinstance(value, torch.Tensor):
                    if rows is None and value.shape == parameter.shape:
                        value = _rows(value, first, stop)
                    value = value.clone()
                self.inner.state[piece][key] = value

    def _plain_groups(self) -> list[dict[str, Any]]:
        groups, at = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            groups.append({**_settings(group), "params": list(range(at, at + count))})
            at += count
        return groups


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _rows(tensor: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    return tensor if tensor.dim() == 0 else tensor[first:stop]


def _is_rows(value: Any, parameter: torch.Tensor, first: int, stop: int) -> bool:
    if not isinstance(value, torch.Tensor) or parameter.dim() == 0:
        return False
    return value.shape == (stop - first, *parameter.shape[1:])


def _split_rows(parameters: list[torch.Tensor], world: int) -> list[list[Share]]:
    """Every rank's rows of every parameter; 0-d ones go round the ranks."""
    shares: list[list[Share]] = [[] for _ in range(world)]
    for index, parameter in enumerate(parameters):
        if parameter.dim() == 0:
            shares[index % world].append((index, 0, 1))
            continue
        cut = Rows(tuple(parameter.shape), world)
        for rank in range(world):
            first, stop = cut.span(rank)
            if stop > first:
                shares[rank].append((index, first, stop))
    return shares


def _split_whole(parameters: list[torch.Tensor], world: int) -> list[list[Share]]:
    """Whole parameters, the largest first, each to the rank that has least."""
    shares: list[list[Share]] = [[] for _ in range(world)]
    held = [0] * world
    for index in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        rank = held.index(min(held))
        held[rank] += parameters[index].numel()
        rows = parameters[index].shape[0] if parameters[index].dim() else 1
        shares[rank].append((index, 0, rows))
    return [sorted(share) for share in shares]
