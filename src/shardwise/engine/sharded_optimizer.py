"""Optimizer state sharding for any replicated model: each rank steps its share, then everyone gets
the result.

The model and its gradients stay whole on every rank (torch's DistributedDataParallel, or anything
that leaves equal gradients everywhere). Optimizers that treat every element alike split each
parameter by rows, so the state is 1/n; any other class gets whole parameters, spread so that the
largest share is as small as it can easily be.

A step goes by groups of parameters of about `message_bytes` (32 MiB; a quarter of a small model).
torch's own elementwise classes update one group while the last one's parameters are gathered;
another class, whose step may count or look at all of its parameters, updates them in one call, and
only the gathers follow each other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.collectives import Group, Handle
from shardwise.engine.parameter_runs import ELEMENTWISE
from shardwise.engine.state import cut_messages
from shardwise.engine.torch_private import foreach_copy_
from shardwise.planning.rows import Rows
from shardwise.planning.units import MIB

Share = dict[int, slice]  # one rank's rows of each parameter that it steps, by the index of that
MESSAGE_BYTES, LEAST_MESSAGES = 32 * MIB, 4
IN_FLIGHT = 2  # gathers under way: each has a buffer of about `message_bytes`


@dataclass(frozen=True)
class Gathering:
    """A gather under way: what arrives, and where each rank's pieces of it go."""

    handle: Handle
    everyone: torch.Tensor
    by_rank: list[list[torch.Tensor]]

    def finish(self, rank: int) -> None:
        """Wait, and copy out all but this rank's own pieces."""
        self.handle.wait()
        for other, pieces in enumerate(self.by_rank):
            if other != rank and pieces:
                sizes = [piece.numel() for piece in pieces]
                foreach_copy_(pieces, list(self.everyone[other, : sum(sizes)].split(sizes)))


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
        message_bytes: int | None = None,
        **defaults: Any,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "ShardedOptimizer needs torch.distributed: start with torchrun and call "
                "init_process_group first"
            )
        _check_class(optimizer_class)
        super().__init__(params, defaults)
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.message_bytes = group, message_bytes
        self._class = optimizer_class
        self._parameters: list[torch.Tensor] = []
        self.shares: list[Share] = [{} for _ in range(self.world)]
        self._pieces: dict[int, torch.Tensor] = {}
        self._places: dict[int, int] = {}  # where in memory their parameters are
        self.inner = optimizer_class(self._take(self.param_groups), **defaults)
        self._ranks = Group.of("shard", group, self._parameters[0].device)
        self._cut()
        self.state = self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Split the new parameters as those that the constructor was given."""
        super().add_param_group(param_group)
        if "inner" in self.__dict__:  # else the constructor's are being added
            (added,) = self._take(self.param_groups[-1:])
            self.inner.add_param_group(added)
            self._cut()

    def _take(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Split the parameters of all these groups; the same groups of this rank's pieces."""
        taken = [p for group in groups for p in group["params"]]
        first = len(self._parameters)
        if issubclass(self._class, ELEMENTWISE):
            split = _split_rows(taken, self.world)
        else:
            split = _split_whole(
                taken, [sum(self._parameters[i].numel() for i in share) for share in self.shares]
            )
        self._parameters += taken
        for share, more in zip(self.shares, split, strict=True):
            share.update({first + i: rows for i, rows in more.items()})
        for i, rows in self.shares[self.rank].items():
            if i >= first:
                self._pieces[i] = _rows(self._parameters[i], rows).detach()
                self._places[i] = self._parameters[i].data_ptr()
        indices = count(first)
        return [
            {**group, "params": self._pieces_of([next(indices) for _ in group["params"]])}
            for group in groups
        ]

    def _cut(self) -> None:
        """What travels together, and what each message's update steps."""
        nbytes = self.message_bytes
        if nbytes is None:
            # A small model still needs groups that overlap each other.
            held = sum(p.nbytes for p in self._parameters)
            nbytes = min(MESSAGE_BYTES, held // LEAST_MESSAGES)
        self._messages = list(cut_messages(self._parameters, nbytes))
        # Of each message, by the inner optimizer's groups; None: all at once.
        self._updates: list[list[list[torch.Tensor]]] | None = None
        if self._class in ELEMENTWISE and self.world > 1:
            indices = [numbered["params"] for numbered in self._numbered_groups()]
            self._updates = [
                [self._pieces_of(i for i in members if i in message) for members in indices]
                for message in map(set, self._messages)
            ]
        # The inner optimizer knows settings that the caller left at their defaults.
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update(_settings(theirs))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step this rank's share and gather everybody's, message by message."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update(_settings(ours))
        for i, rows in self.shares[self.rank].items():
            parameter, piece = self._parameters[i], self._pieces[i]
            if parameter.data_ptr() != self._places[i]:  # `parameter.data = ...`, `model.to(...)`
                piece.data = _rows(parameter.detach(), rows)
                self._places[i] = parameter.data_ptr()
            piece.grad = None if parameter.grad is None else _rows(parameter.grad, rows)
        if self._updates is None:
            self.inner.step()
        self._go_by_messages()
        for piece in self._pieces.values():
            piece.grad = None
        return loss

    def _go_by_messages(self) -> None:
        """Message by message: update what it carries, unless that is done, and start its gather.
        Each arrives under the updates that follow.
        """
        under_way: deque[Gathering] = deque()
        for number, members in enumerate(self._messages if self.world > 1 else ()):
            if self._updates is not None:
                self._update(self._updates[number])
            if len(under_way) == IN_FLIGHT:
                under_way.popleft().finish(self.rank)
            under_way.extend(self._start_gather(members))
        for gathering in under_way:
            gathering.finish(self.rank)

    def _update(self, pieces: list[list[torch.Tensor]]) -> None:
        """The inner optimizer's own step, of these pieces of each of its groups."""
        groups = self.inner.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, chosen in zip(groups, pieces, strict=True):
                group["params"] = chosen
            self.inner.param_groups = [group for group in groups if group["params"]]
            if self.inner.param_groups:
                self.inner.step()
        finally:
            self.inner.param_groups = groups
            for group, everything in zip(groups, whole, strict=True):
                group["params"] = everything

    def _start_gather(self, members: list[int]) -> list[Gathering]:
        """Send this rank's pieces of the members to all; nothing where nobody has any."""
        by_rank = [
            [_rows(self._parameters[i].detach(), share[i]).view(-1) for i in members if i in share]
            for share in self.shares
        ]
        lengths = [sum(piece.numel() for piece in pieces) for pieces in by_rank]
        if not any(lengths):
            return []
        everyone = self._parameters[members[0]].new_empty((self.world, max(lengths)))
        mine = everyone[self.rank]
        if by_rank[self.rank]:
            torch.cat(by_rank[self.rank], out=mine[: lengths[self.rank]])
        handle = self._ranks.all_gather(everyone.view(-1), mine)
        return [Gathering(handle, everyone, by_rank)]

    def _pieces_of(self, indices: Iterable[int]) -> list[torch.Tensor]:
        """This rank's pieces of these parameters, of those that it has one of."""
        return [self._pieces[i] for i in indices if i in self._pieces]

    def share_of(self, i: int) -> tuple[torch.Tensor, slice | None, torch.Tensor | None]:
        """The i-th parameter, which of its rows this rank steps, if any, and as which tensor."""
        return self._parameters[i], self.shares[self.rank].get(i), self._pieces.get(i)

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


def _split_whole(parameters: list[torch.Tensor], held: list[int]) -> list[Share]:
    """Whole parameters, the largest first, each to the rank that holds least; `held` is counted
    on.
    """
    shares: list[Share] = [{} for _ in held]
    for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        rank = held.index(min(held))
        held[rank] += parameters[i].numel()
        shares[rank][i] = slice(*Rows(tuple(parameters[i].shape), 1).span(0))
    return [dict(sorted(share.items())) for share in shares]


def _check_class(optimizer_class: Any) -> None:
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"optimizer_class is {optimizer_class!r:.60}, expected a class of optimizers, such as "
            "torch.optim.AdamW"
        )
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS looks for a step along all parameters at once, so ranks cannot step shares: "
            "use it unsharded"
        )
