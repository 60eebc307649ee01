"""Optimizer state sharding for any replicated model: each rank steps its share, then everyone gets
the result.

The model and its gradients stay whole on every rank (torch's DistributedDataParallel, or anything
that leaves equal gradients everywhere). Optimizers that treat every element alike split each
parameter by rows, so the state is 1/n; any other class gets whole parameters, spread so that the
largest share is as small as it can easily be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.collectives import Group
from shardwise.engine.parameter_runs import ELEMENTWISE
from shardwise.engine.state import cut_messages
from shardwise.engine.torch_private import foreach_copy_
from shardwise.planning.rows import Rows
from shardwise.planning.units import MIB

Share = dict[int, slice]  # one rank's rows of each parameter that it steps, by the index of that


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
        split = _split_rows if issubclass(optimizer_class, ELEMENTWISE) else _split_whole
        self.shares = split(self._parameters, self.world)
        self._pieces = {
            i: _rows(self._parameters[i], rows).detach()
            for i, rows in self.shares[self.rank].items()
        }
        groups = self._numbered_groups()
        for numbered in groups:
            numbered["params"] = [self._pieces[i] for i in numbered["params"] if i in self._pieces]
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
        for i, rows in self.shares[self.rank].items():
            grad = self._parameters[i].grad
            self._pieces[i].grad = None if grad is None else _rows(grad, rows)
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
        for message in cut_messages(self._parameters, self.message_bytes):
            self._gather_message(message)

    def _gather_message(self, members: list[int]) -> None:
        by_rank = [
            [_rows(self._parameters[i].detach(), share[i]).view(-1) for i in members if i in share]
            for share in self.shares
        ]
        lengths = [sum(piece.numel() for piece in pieces) for pieces in by_rank]
        if not any(lengths):
            return
        everyone = self._parameters[members[0]].new_empty((self.world, max(lengths)))
        mine = everyone[self.rank]
        if by_rank[self.rank]:
            torch.cat(by_rank[self.rank], out=mine[: lengths[self.rank]])
        ranks = Group("shard", self.group, self.world, self.rank, None)
        ranks.all_gather(everyone.view(-1), mine).wait()
        for rank, pieces in enumerate(by_rank):
            if rank != self.rank and pieces:
                found = everyone[rank, : lengths[rank]].split([piece.numel() for piece in pieces])
                foreach_copy_(pieces, list(found))

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the state, by parameter index, with the rows it covers."""
        state = {
            i: {"rows": (rows.start, rows.stop), **self.inner.state.get(self._pieces[i], {})}
            for i, rows in self.shares[self.rank].items()
        }
        return {"state": state, "param_groups": self._numbered_groups(), "world": self.world}

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state on every rank, as the plain optimizer gives it; a collective call."""
        shares: list[Any] = [None] * self.world
        dist.all_gather_object(shares, self.state_dict()["state"], group=self.group)
        whole: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        for i, state in (item for share in shares for item in share.items()):
            rows, parameter = slice(*state.pop("rows")), self._parameters[i]
            for key, value in state.items():
                is_tensor = isinstance(value, torch.Tensor) and parameter.dim() > 0
                if is_tensor and value.shape == parameter[rows].shape:
                    if key not in whole[i]:
                        whole[i][key] = torch.zeros_like(parameter, dtype=value.dtype)
                    _rows(whole[i][key], rows).copy_(value)
                else:
                    whole[i].setdefault(key, value)
        return {"state": dict(sorted(whole.items())), "param_groups": self._numbered_groups()}

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
        for i, rows in self.shares[self.rank].items():
            saved = dict(state_dict["state"].get(i, {}))
            whole = saved.pop("rows", None) is None
            for key, value in saved.items():
                if isinstance(value, torch.Tensor):
                    if whole and value.shape == self._parameters[i].shape:
                        value = _rows(value, rows)
                    value = value.clone()
                self.inner.state[self._pieces[i]][key] = value

    def _numbered_groups(self) -> list[dict[str, Any]]:
        """The parameter groups with the indices of their parameters instead of them."""
        indices = count()
        return [
            {**_settings(group), "params": [next(indices) for _ in group["params"]]}
            for group in self.param_groups
        ]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return tensor[rows] if tensor.dim() else tensor


def _split_rows(parameters: list[torch.Tensor], world: int) -> list[Share]:
    """Every rank's rows of every parameter; 0-d ones go round the ranks."""
    shares: list[Share] = [{} for _ in range(world)]
    for i, parameter in enumerate(parameters):
        cut = Rows(tuple(parameter.shape), world)
        for rank in range(world) if parameter.dim() else [i % world]:
            first, stop = cut.span(rank)
            if stop > first:
                shares[rank][i] = slice(first, stop)
    return shares


def _split_whole(parameters: list[torch.Tensor], world: int) -> list[Share]:
    """Whole parameters, the largest first, each to the rank that has least."""
    shares: list[Share] = [{} for _ in range(world)]
    held = [0] * world
    for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        rank = held.index(min(held))
        held[rank] += parameters[i].numel()
        shares[rank][i] = slice(*Rows(tuple(parameters[i].shape), 1).span(0))
    return [dict(sorted(share.items())) for share in shares]
