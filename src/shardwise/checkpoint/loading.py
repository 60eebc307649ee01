"""Loading: compare, read everything that is needed into memory beside, agree, and only then change
the model.

Each rank reads the pieces that overlap what it holds, whoever wrote them: another number of ranks,
another strategy or other units are the same to it. Pieces of what is loaded that no tensor of this
rank needs are read too, by one rank each, so that damage anywhere is found by all.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.collect import class_name, is_stateful, restore_random
from shardwise.checkpoint.manifest import (
    CheckpointError,
    CorruptCheckpoint,
    Manifest,
    SavedOptimizer,
)
from shardwise.checkpoint.pieces import (
    OpenModel,
    Slot,
    check_kind,
    clean_name,
    name_groups,
    open_model,
    place_of,
    slots_of,
)
from shardwise.checkpoint.read import Checkpoint, Want, locate, read_all
from shardwise.checkpoint.saving import finish_last
from shardwise.checkpoint.talk import Talk, talk
from shardwise.checkpoint.trees import decode, keys_in
from shardwise.description.parameters import dtype_name
from shardwise.engine.state import device_of
from shardwise.engine.torch_private import give_memory, local_of

# Settings that say how an optimizer runs, not what it computes: the program's own stay.
_RUNNING = frozenset({"foreach", "fused", "capturable", "differentiable"})
_ON_HOST = frozenset({"step", "mu_product"})  # unless the optimizer is capturable or fused
_MOST_ROWS = 20


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and from where."""

    path: str
    step: int
    extra: dict[str, Any]
    plan: dict[str, Any] | None
    missing: list[str]  # of the model's tensors, those that the checkpoint does not have
    unexpected: list[str]  # the other way round


@dataclass
class Differences:
    """Between a checkpoint and what it is loaded into, on this rank."""

    names: list[str] = field(default_factory=list)  # of the checkpoint's tensors that are used
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # whatever `strict` says
    loose: list[str] = field(default_factory=list)  # wrong only if strict


@dataclass
class _Copy:
    """A tensor of the model and the values that it is to get."""

    target: torch.Tensor
    staged: torch.Tensor


@dataclass
class _Staged:
    """All that a load will write, read into memory of its own."""

    wants: list[Want] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)
    same: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # ties
    states: list[_State] = field(default_factory=list)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors inside of JSON

    def want(self, manifest: Manifest, key: str, tensor: torch.Tensor, place: Any) -> None:
        self.wants.append(Want(manifest.tensors[key], place.parts(tensor)))

    def whole_of(self, manifest: Manifest, key: str) -> torch.Tensor:
        """Memory for a whole tensor, which is asked for."""
        if key not in manifest.tensors:
            raise CorruptCheckpoint(f"a checkpoint's JSON names {key!r:.80}, which it has not")
        if key not in self.whole:
            saved = manifest.tensors[key]
            tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
            self.whole[key] = tensor
            self.want(manifest, key, tensor, place_of(tensor))
        return self.whole[key]


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    random: bool = True,
) -> Loaded:
    """Load a checkpoint into model and optimizer, whatever they are sharded like now; a collective
    call.

    `path` is one checkpoint's folder, or that of many: its newest. Objects in `extra` get their
    state by `load_state_dict`. All is read, compared and checked first: an error leaves everything
    as it was. `strict=False` allows tensors that only one side has, and casts floating dtypes. A
    parameter on the meta device gets memory for this rank's rows.
    """
    finish_last()
    ranks, doing = talk(), f"cannot load {os.fspath(path)}"
    found = ranks.first(doing, lambda: locate(path))
    opened: list[Checkpoint] = []

    def open_it() -> str:
        opened.append(Checkpoint.open(found))
        return opened[0].digest

    if len(set(ranks.agree(doing, open_it))) > 1:
        raise CheckpointError(f"{doing}: ranks see different files at {found}")
    loading = Loading(opened[0], model, optimizer, extra or {}, random, ranks)
    missing, unexpected = loading.compare(doing, strict)
    ranks.agree(doing, loading.read)
    ranks.agree(f"{doing}: the checkpoint is right, but taking it over failed", loading.apply)
    ranks.part()
    manifest = opened[0].manifest
    return Loaded(found, manifest.step, loading.extra_values, manifest.plan, missing, unexpected)


class Loading:
    """One load on one rank: `compare`, `read`, then `apply`, which alone changes anything."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        random: bool,
        ranks: Talk,
    ) -> None:
        self.checkpoint, self.manifest, self.ranks = checkpoint, checkpoint.manifest, ranks
        self.model, self.optimizer, self.extra, self.random = model, optimizer, extra, random
        self.staged = _Staged()
        self.opened: OpenModel
        self.groups: list[dict[str, Any]] = []  # settings of each parameter group
        self.extra_values: dict[str, Any] = {}
        self._decoders: list[Callable[[], None]] = []  # to run once all is read
        self._module_states: dict[str, Any] = {}
        self._random_states: dict[str, Any] | None = None

    # Comparing

    def compare(self, doing: str, strict: bool) -> tuple[list[str], list[str]]:
        """Error, on all ranks, where the checkpoint does not fit; else which names only one side
        has.
        """
        everybody = self.ranks.agree(doing, lambda: self._find_differences(strict))
        used = {name for each in everybody for name in each.names}
        missing = list(dict.fromkeys(name for each in everybody for name in each.missing))
        groups = ("model/",) if self.optimizer is None else ("model/", "optimizer/")
        nested = set(keys_in(list(self.manifest.modules.values())))
        if self.manifest.optimizer is not None:
            nested.update(keys_in(self.manifest.optimizer.to_json()))
        unexpected = [
            key
            for key in self.manifest.tensors
            if key.startswith(groups) and key not in used and key not in nested
        ]
        rows = list(dict.fromkeys(row for each in everybody for row in each.wrong))
        if strict:
            rows += dict.fromkeys(row for each in everybody for row in each.loose)
            rows += [f"{name}: not in the checkpoint" for name in missing]
            rows += [f"{name}: only in the checkpoint" for name in unexpected]
        if rows:
            shown = rows[:_MOST_ROWS]
            if len(rows) > len(shown):
                shown.append(f"and {len(rows) - len(shown)} more")
            raise CheckpointError(
                f"{doing}: {self.checkpoint.path} does not fit, and nothing was loaded:\n  "
                + "\n  ".join(shown)
                + ("\nstrict=False loads what both have" if strict else "")
            )
        short = [key.removeprefix("model/") for key in unexpected]
        return [name.removeprefix("model/") for name in missing], short

    def _find_differences(self, strict: bool) -> Differences:
        found = Differences()
        self.opened = open_model(self.model)
        self._compare_model(found, strict)
        if self.optimizer is not None:
            self._compare_optimizer(found)
        self._want_extra(found)
        self._want_spare()
        return found

    def _compare_model(self, found: Differences, strict: bool) -> None:
        manifest = self.manifest
        for names in self.opened.names.values():
            tensor = self.opened.tensors[names[0]]
            check_kind(names[0], tensor)
            resolved = [f"model/{manifest.aliases.get(name, name)}" for name in names]
            keys = [key for key in dict.fromkeys(resolved) if key in manifest.tensors]
            if not keys:
                found.missing.append(f"model/{names[0]}")
                continue
            found.names += keys
            if all([self._compare_tensor(key, tensor, found) for key in keys]):
                first, *others = [self._stage_tensor(key, tensor) for key in keys]
                self.staged.copies.append(_Copy(tensor, first))
                for key, other in zip(keys[1:], others, strict=True):
                    self.staged.same.append((f"{key} and {keys[0]}", first, other))
        for name in self.opened.states.keys() ^ manifest.modules.keys():
            text = "not in the checkpoint" if name in self.opened.states else "only in it"
            found.loose.append(f"extra state of module {name!r}: {text}")
        for name in self.opened.states.keys() & manifest.modules.keys():
            self._decode_later(manifest.modules[name], self._module_states, name)

    def _compare_tensor(self, key: str, tensor: torch.Tensor, found: Differences) -> bool:
        saved, dtype = self.manifest.tensors[key], dtype_name(tensor.dtype)
        if saved.shape != tuple(tensor.shape):
            found.wrong.append(
                f"{key}: shape {list(saved.shape)} in the checkpoint, {list(tensor.shape)} here"
            )
            return False
        if saved.dtype != dtype:
            floats = getattr(torch, saved.dtype).is_floating_point and tensor.is_floating_point()
            rows = found.loose if floats else found.wrong
            rows.append(f"{key}: {saved.dtype} in the checkpoint, {dtype} here")
            return floats
        return True

    def _stage_tensor(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        place = place_of(tensor)
        dtype = getattr(torch, self.manifest.tensors[key].dtype)
        staged = torch.empty(place.local_shape, dtype=dtype)
        self.staged.want(self.manifest, key, staged, place)
        return staged

    def _compare_optimizer(self, found: Differences) -> None:
        assert self.optimizer is not None
        saved = self.manifest.optimizer
        if saved is None:
            found.loose.append("the checkpoint has no optimizer; load without one")
            return
        mine = class_name(self.optimizer)
        if saved.class_name != mine:
            found.loose.append(f"optimizer: {saved.class_name} in the checkpoint, {mine} here")
            return
        groups = name_groups(self.optimizer, self.opened)
        if len(saved.param_groups) != len(groups):
            found.loose.append(
                f"optimizer: {len(saved.param_groups)} parameter groups in the checkpoint, "
                f"{len(groups)} here"
            )
        renamed = self._saved_names(saved)
        for number, (group, kept) in enumerate(zip(groups, saved.param_groups, strict=False)):
            known = set(kept.params)
            for name, parameter in group:
                # One that is not trained has no state, and may be in an optimizer or not.
                if parameter.requires_grad and renamed.get(name, name) not in known:
                    found.loose.append(
                        f"optimizer: {name} is not in group {number} of the checkpoint"
                    )
            decoded: dict[str, Any] = {}
            self.groups.append(decoded)
            for key, value in kept.settings.items():
                self._decode_later(value, decoded, key)
        self._stage_states(saved, renamed, slots_of(self.optimizer, groups, saving=False), found)

    def _saved_names(self, saved: SavedOptimizer) -> dict[str, str]:
        """How the checkpoint calls parameters here: tied ones by their first name there."""
        known = {name for group in saved.param_groups for name in group.params}
        renamed = {}
        for names in self.opened.names.values():
            others = [*names, *(self.manifest.aliases.get(name, name) for name in names)]
            renamed[names[0]] = next((name for name in others if name in known), names[0])
        return renamed

    def _stage_states(
        self,
        saved: SavedOptimizer,
        renamed: dict[str, str],
        slots: list[Slot],
        found: Differences,
    ) -> None:
        keys_of: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for key in self.manifest.tensors:
            if key.startswith("optimizer/"):
                name, _, state = key.removeprefix("optimizer/").rpartition("/")
                keys_of[name][state] = key
        for slot in slots:
            own = _State(slot)
            name = renamed.get(slot.name, slot.name)
            found.names += keys_of[name].values()
            if slot.key is None:
                continue
            for state, key in keys_of[name].items():
                tensor = self.manifest.tensors[key]
                like = slot.is_like(state, tensor.shape)
                shape = slot.place.local_shape if like else tensor.shape
                staged = torch.empty(shape, dtype=getattr(torch, tensor.dtype))
                place = slot.place if like else place_of(staged)
                self.staged.want(self.manifest, key, staged, place)
                own.tensors[state] = staged, like
            for state, value in saved.values.get(name, {}).items():
                self._decode_later(value, own.values, state)
            self.staged.states.append(own)

    def _want_extra(self, found: Differences) -> None:
        """What ranks saved as `extra`: this rank's own, if there are as many ranks, else the
        first's.
        """
        manifest, rank = self.manifest, self.ranks.rank
        same_world = manifest.world == self.ranks.world
        if manifest.extra_of:
            own = manifest.extra[manifest.extra_of[rank if same_world else 0]]
            if not isinstance(own, dict):
                raise CorruptCheckpoint(f"a checkpoint's extra is {own!r:.80}, expected a table")
            for name, value in own.items():
                self._decode_later(value, self.extra_values, name)
            objects = [name for name, each in self.extra.items() if is_stateful(each)]
            found.missing += [f"extra/{name}" for name in objects if name not in own]
            for name in objects if not same_world else ():
                if len({json.dumps(each.get(name)) for each in manifest.extra}) > 1:
                    found.loose.append(
                        f"extra/{name}: saved by {manifest.world} ranks, on each another; "
                        f"{self.ranks.world} are running"
                    )
        if self.random and rank < len(manifest.random):
            decoded: dict[str, Any] = {}
            self._decode_later(manifest.random[rank], decoded, "random")
            self._random_states = decoded

    def _want_spare(self) -> None:
        """Check what this rank has no use for: each tensor by one rank."""
        wanted = {id(want.saved) for want in self.staged.wants}
        groups = ["model/", "extra/", "random/", *(["optimizer/"] if self.optimizer else [])]
        spare = [
            saved
            for key, saved in self.manifest.tensors.items()
            if key.startswith(tuple(groups)) and id(saved) not in wanted
        ]
        for saved in spare[self.ranks.rank :: self.ranks.world]:
            self.staged.wants.append(Want(saved, (), saved.pieces))
        for file in self.manifest.files:
            self.checkpoint.places(file)

    def _decode_later(self, value: Any, into: dict[str, Any], name: str) -> None:
        """Ask for the tensors of an encoded value; once they are read, put it into a table."""
        for key in keys_in(value):
            self.staged.whole_of(self.manifest, key)

        def run() -> None:
            into[name] = decode(value, lambda key: self.staged.whole_of(self.manifest, key))

        self._decoders.append(run)

    # Reading

    def read(self) -> None:
        """Everything into memory of its own, checked. Changes nothing."""
        read_all(self.checkpoint, self.staged.wants)
        for names, first, other in self.staged.same:
            if not torch.equal(first.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
                raise CheckpointError(
                    f"{names} are one parameter here, but differ in the checkpoint; untie them, or "
                    "load into a model without the tie"
                )
        for run in self._decoders:
            run()

    # Taking over

    @torch.no_grad()
    def apply(self) -> None:
        for copy in self.staged.copies:
            if local_of(copy.target).is_meta:
                give_memory(copy.target, device_of(self.opened.module))
            local_of(copy.target).copy_(copy.staged)
        for prefix, module in self.opened.module.named_modules():
            clean = clean_name(f"{prefix}.").removesuffix(".")
            has_state = type(module).set_extra_state is not nn.Module.set_extra_state
            if has_state and clean in self._module_states:
                module.set_extra_state(self._module_states[clean])
        if self.optimizer is not None and self.groups:
            self._apply_optimizer(self.optimizer)
        for name, each in self.extra.items():
            if is_stateful(each) and name in self.extra_values:
                each.load_state_dict(self.extra_values[name])
        if self._random_states is not None:
            restore_random(self._random_states["random"])

    def _apply_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group, settings in zip(optimizer.param_groups, self.groups, strict=False):
            for key, value in settings.items():
                if key in _RUNNING:
                    continue
                now = group.get(key)
                if isinstance(now, torch.Tensor):  # a rate that others may hold
                    now.copy_(torch.as_tensor(value))
                else:
                    group[key] = value
        on_device = {
            id(parameter)
            for group in optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for parameter in group["params"]
        }
        for state in self.staged.states:
            state.put_into(optimizer, id(state.slot.parameter) in on_device)


@dataclass
class _State:
    """The state of one parameter of an optimizer: tensors, each with whether it has an element for
    each of the parameter's, and other values.
    """

    slot: Slot
    tensors: dict[str, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def put_into(self, optimizer: torch.optim.Optimizer, on_device: bool) -> None:
        """Replace what the optimizer has: new tensors, as after its own `load_state_dict`."""
        assert self.slot.key is not None
        device = local_of(self.slot.parameter).device
        state: dict[str, Any] = dict(self.values)
        for name, (tensor, like) in self.tensors.items():
            stays = name in _ON_HOST and not like and not on_device
            moved = tensor if stays else tensor.to(device)
            state[name] = self.slot.wrap(moved) if like else moved
        if state:
            optimizer.state[self.slot.key] = state
        else:
            optimizer.state.pop(self.slot.key, None)
