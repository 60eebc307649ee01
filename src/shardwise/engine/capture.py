"""`sw.capture(step)`: a whole training step, recorded once as a CUDA graph and replayed.

    first call      the step runs as it is; who runs in it is noted
    `warmup` more   the same, on the stream that will record it; the last one is a rehearsal
    next call       the step is recorded (nothing runs), then replayed
    later calls     inputs are copied into place, the graph is launched

A graph is for one signature of inputs and one look of the model and its optimizers
(`step_state.py`). docs/static_steps.md says what can be captured.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numpy
import torch

from shardwise.engine import marks, static, torch_private
from shardwise.engine.collectives import digest
from shardwise.engine.engine import Engine
from shardwise.engine.extended import ExtendedParameters
from shardwise.engine.hooks import tensors_in, transform
from shardwise.engine.rates import Rates
from shardwise.engine.recorder import Recorder, Span, Uncapturable, warm_up
from shardwise.engine.records import open_records
from shardwise.engine.step_state import Before, Left, Look, Watched, difference, host_state
from shardwise.watch import rank as watched_rank
from shardwise.watch.page import FORWARD

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

WARMUP = 2  # eager calls of a signature before it is recorded, beside the very first
GRAPHS = 8  # recorded at most
# What a call does.
REPLAY, RECORD, REHEARSE, WARM, EAGER = "replay", "record", "rehearse", "warm", "eager"
# A replay that takes more than so many times the device's time of the step as it is does not pay;
# asked once, after so many replays.
_SLOWER, _JUDGED = 1.1, 3
_LOOKS = 16  # so many looks that never came again: the step is not the same from call to call


def capture(
    step: Callable[Arguments, Result], *, warmup: int = WARMUP, graphs: int = GRAPHS
) -> CapturedStep[Arguments, Result]:
    """`step(*inputs)`, a whole training step of a sharded model (zero_grad, forward, backward,
    clipping, optimizer), as a callable that replays it as a CUDA graph.

    The first call, and `warmup` calls of each signature of inputs, run as they are. What cannot be
    captured is said once, and the step goes on as it is. `graphs` bounds how many are recorded.
    """
    if not callable(step):
        raise TypeError(
            f"sw.capture takes a function that runs one training step, got a {type(step).__name__}"
        )
    for name, value in (("warmup", warmup), ("graphs", graphs)):
        if type(value) is not int or value < 1:
            raise ValueError(f"sw.capture: {name} is {value!r}, expected a whole number >= 1")
    return CapturedStep(step, warmup, graphs, Recorder)


Signature = tuple[Any, ...]


def signature_of(value: Any, kept: list[Any], name: str = "input") -> Signature:
    """The shapes and kinds of all tensors in `value`, and everything else in it by value, or by
    which object it is: that goes into `kept`. An error for what is read by the host.
    """
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise Uncapturable(f"{name} holds a tensor that requires a gradient")
        return (value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, list | tuple):
        each = (signature_of(item, kept, f"{name}[{i}]") for i, item in enumerate(value))
        return (type(value), *each)
    if isinstance(value, Mapping):
        pairs = ((key, signature_of(item, kept, f"{name}[{key!r}]")) for key, item in value.items())
        return (type(value), *pairs)
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value)]
        each = (signature_of(getattr(value, key), kept, f"{name}.{key}") for key in names)
        return (type(value), *each)
    if isinstance(value, _BY_VALUE):
        return (type(value), value)
    if isinstance(value, numpy.ndarray | set) or hasattr(value, "__next__"):
        raise Uncapturable(
            f"{name} holds a {type(value).__name__}, whose content a replay would not read again: "
            "hand tensors of the device to the step"
        )
    kept.append(value)
    return (type(value), id(value))


_BY_VALUE = (
    str, bytes, int, float, complex, bool, type(None), Enum, numpy.generic,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip


@dataclass
class Recording:
    """One graph: what it reads, what it gives, and what it leaves."""

    inputs: list[torch.Tensor]
    outputs: Any
    replay: Callable[[], None]
    # Gradients that must hang on a parameter, or be missing there, when it begins.
    needs: list[tuple[torch.Tensor, torch.Tensor | None]]
    left: Left
    kept: list[Any]
    rehearsal: Span | None = None  # what the step took as it is; None: it need not be asked again
    replays: list[Span] = field(default_factory=list)

    @property
    def may_begin(self) -> bool:
        return all(parameter.grad is grad for parameter, grad in self.needs)

    def find_slower(self) -> str:
        """Why the step is better off as it is: what it asks, or what it runs on, may be other while
        it is recorded. Empty if it is not, or too early to say.
        """
        if self.rehearsal is None or len(self.replays) < _JUDGED:
            return ""
        eager, replayed = self.rehearsal.ms, min(span.ms for span in self.replays)
        self.rehearsal, self.replays = None, []
        if replayed <= _SLOWER * eager:
            return ""
        return (
            f"a replay takes {replayed:.1f} ms and the step as it is {eager:.1f}: something in it "
            "takes a slower way while it is recorded"
        )

    def run(self, inputs: list[torch.Tensor], recorder: Recorder) -> Any:
        span = None if self.rehearsal is None else recorder.start_span()
        if inputs:
            torch_private.foreach_copy_(self.inputs, inputs)
        self.replay()
        if span is not None:
            span.end()
            self.replays.append(span)
        self.left.put_back()
        return transform(self.outputs, lambda tensor: tensor.detach().clone())


class CapturedStep(Generic[Arguments, Result]):
    """A step that is captured; `reason` says why it is not, where it is not."""

    def __init__(
        self,
        step: Callable[Arguments, Result],
        warmup: int,
        graphs: int,
        make_recorder: Callable[[torch.device], Recorder],
    ) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step, self._warmup, self._graphs = step, warmup, graphs
        self._make_recorder = make_recorder
        self._recorder: Recorder | None = None
        self._watched, self._rates = Watched(), Rates()
        self._known: list[Any] = []  # objects among the inputs, by which signatures know them
        self._calls: dict[tuple[Signature, Look], int] = {}  # eager ones, of what is not recorded
        self._rehearsals: dict[tuple[Signature, Look], Span] = {}
        self.recordings: dict[tuple[Signature, Look], Recording] = {}
        self._full = False  # said that no more signatures are recorded
        self.reason: str | None = None

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if (
            self.reason is not None
            or static.on is not None
            or torch_private.is_recording(static.fixed)
        ):
            return self._step(*args, **kwargs)
        run = functools.partial(self._step, *args, **kwargs)
        try:
            return self._call(run, (args, kwargs))
        except Uncapturable as refusal:
            self._give_up(str(refusal))
            result = refusal.result
            return run() if result is None else result[0]

    def _give_up(self, reason: str) -> None:
        """From now on the step runs as it is."""
        self.reason = reason
        self.recordings.clear()
        warnings.warn(
            f"the step is not captured and goes on eagerly: {reason} (docs/static_steps.md)",
            stacklevel=3,
        )

    def _call(self, run: Callable[[], Result], inputs: Any) -> Result:
        kept: list[Any] = []
        signature: Signature = ()
        reason = ""
        try:
            signature = signature_of(inputs[0], kept), signature_of(inputs[1], kept)
        except Uncapturable as refusal:
            reason = str(refusal)
        self._known += [each for each in kept if not any(each is known for known in self._known)]
        if not self._watched.engines:
            return self._meet(run, inputs, reason)
        # A profile and a record of calls want to see what happens.
        listened = marks.on is not None or bool(open_records)
        reason = reason or self._misplaced(inputs)
        self._watched.settle()
        if reason or listened or not self._watched.at_rest:
            self._agree(EAGER, signature, reason)
            return run() if listened else self._eager(run)
        key = signature, self._watched.look(self._rates.groups)
        plan = self._plan(key)
        if plan == REPLAY:
            reason = self.recordings[key].find_slower()
        elif plan in (WARM, REHEARSE):
            reason = self._unsteady(key)
        if not self._agree(plan, signature, reason):
            plan = EAGER
        assert self._recorder is not None
        if plan == REPLAY:
            self._rates.refresh()
            self._tell_watch()
            return cast(Result, self.recordings[key].run(list(tensors_in(inputs)), self._recorder))
        if plan == RECORD:
            return self._record(key, inputs)
        if plan in (WARM, REHEARSE):
            self._calls[key] = self._calls.get(key, 0) + 1
        if plan != REHEARSE:
            return self._eager(run)
        self._rehearsals[key] = span = self._recorder.start_span()
        result = self._eager(run, rehearses=True)
        span.end()
        return result

    def _plan(self, key: tuple[Signature, Look]) -> str:
        """What this rank would do with a call."""
        recording, calls = self.recordings.get(key), self._calls.get(key, 0)
        if recording is not None:
            return REPLAY if recording.may_begin else EAGER
        if self._no_room(key[0]):
            return EAGER
        if calls >= self._warmup:
            return RECORD
        return REHEARSE if calls == self._warmup - 1 else WARM

    def _unsteady(self, key: tuple[Signature, Look]) -> str:
        """Why the step will never be recorded: nothing that was there comes again."""
        others = [known for known in self._calls if known != key]
        if len(others) < _LOOKS:
            return ""
        signature, look = others[-1]
        self._calls.clear()
        self._rehearsals.clear()
        if self.recordings:
            return ""
        what = "the shape of its inputs" if signature != key[0] else difference(look, key[1])
        return f"{what} changes from call to call"

    def _agree(self, plan: str, signature: Signature, reason: str = "") -> bool:
        """Whether all ranks do the same: all replay, or all record; a collective that is captured
        on one rank only may never end. An error on all of them for the reason of any.
        """
        agreement = self._watched.engines[0].agreement
        mine = [digest(plan), digest(_shape_of(signature)), int(bool(reason))]
        said = agreement.tell(mine)
        if any(refuses for _, _, refuses in said):
            self._share_refusal(agreement.everybody(reason))
        return all(each == mine for each in said)

    @staticmethod
    def _share_refusal(reasons: Sequence[str], result: tuple[Any] | None = None) -> None:
        for reason in filter(None, reasons):
            raise Uncapturable(reason, result)

    # Eagerly

    def _meet(self, run: Callable[[], Result], inputs: Any, reason: str) -> Result:
        """The first call: see who runs in the step."""
        result = self._eager(run)
        engines = self._watched.engines
        if not engines:
            raise Uncapturable(reason or "no sharded model ran in it", (result,))
        reasons = [reason, *map(find_refusal, engines), self._misplaced(inputs)]
        mine = next(filter(None, reasons), "")
        self._share_refusal(engines[0].agreement.everybody(mine), (result,))
        self._recorder = self._make_recorder(engines[0].mesh.device)
        return result

    def _misplaced(self, inputs: Any) -> str:
        """The input that a graph could not read, if there is one."""
        device = self._watched.engines[0].mesh.device
        elsewhere = next((t.device for t in tensors_in(inputs) if t.device != device), None)
        if elsewhere is None:
            return ""
        return f"an input is on {elsewhere}, the model on {device}: move it there before the step"

    def _eager(self, run: Callable[[], Result], rehearses: bool = False) -> Result:
        """Run the step as it is, on the stream that records it; in a rehearsal see what could not
        be recorded.
        """
        recorder = self._recorder
        static.on, static.fixed = self, rehearses
        try:
            if recorder is None:
                result = warm_up(run)
            else:
                result = recorder.rehearse(run) if rehearses else recorder.warm(run)
        finally:
            static.on, static.fixed = None, False
            changed = self._rates.uninstall()
        if rehearses and recorder is not None:
            refusal = recorder.refusal or changed or host_state(self._watched.optimizers)
            agreement = self._watched.engines[0].agreement
            self._share_refusal(agreement.everybody(refusal or ""), (result,))
        return result

    def meet_engine(self, engine: Engine) -> None:
        if engine not in self._watched.engines:
            self._watched.engines.append(engine)

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(optimizer is known for known in self._watched.optimizers):
            self._watched.optimizers.append(optimizer)
        self._rates.install(optimizer)

    def _no_room(self, signature: Signature) -> bool:
        """Whether all graphs are taken, by other signatures; the first of an earlier look of this
        one gives way.
        """
        if len(self.recordings) < self._graphs:
            return False
        for key in self.recordings:
            if key[0] == signature:
                del self.recordings[key]
                return False
        if not self._full:
            self._full = True
            warnings.warn(
                f"sw.capture has recorded {self._graphs} signatures of inputs; others run eagerly "
                "(sw.capture(step, graphs=...) allows more)",
                stacklevel=4,
            )
        return True

    # Recorded

    def _record(self, key: tuple[Signature, Look], given: Any) -> Result:
        """Record the step on inputs of its own, then run it for the first time."""
        assert self._recorder is not None
        watched = self._watched
        inputs = list(map(_copy_of, tensors_in(given)))
        at = iter(inputs)
        args, kwargs = transform(given, lambda _: next(at))
        lanes = [stream for engine in watched.engines for stream in engine.executor.streams]
        before, refusal = Before(watched), ""
        for optimizer in watched.optimizers:
            self._rates.install(optimizer)
        static.on, static.fixed = self, True
        try:
            recorded = self._recorder.record(lambda: self._step(*args, **kwargs), lanes)
        except Uncapturable as error:
            refusal = str(error)
        except BaseException:
            before.restore()
            raise
        finally:
            static.on, static.fixed = None, False
            self._rates.uninstall()
        try:
            self._share_refusal(watched.engines[0].agreement.everybody(refusal))
        except Uncapturable:
            before.restore()
            raise
        after = Left(watched)
        outputs, replay = recorded
        needs, kept = before.needs(after), watched.keep()
        rehearsal = self._rehearsals.pop(key, None)
        recording = Recording(inputs, outputs, replay, needs, after, kept, rehearsal)
        self.recordings[key] = recording
        self._calls.pop(key, None)
        del before  # with what it held of the last eager step
        self._recorder.give_back()
        return cast(Result, recording.run([], self._recorder))

    def _tell_watch(self) -> None:
        """One entry for a whole step: who is stuck in one is seen to be in it."""
        if watched_rank.on is not None:
            for engine in self._watched.engines:
                page = watched_rank.on.page
                page.enter(FORWARD, "captured step", engine.mesh.shard.runs)
                page.end_step()


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its like in memory of its own, where every replay reads."""
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.copy_(tensor)


def _shape_of(signature: Any) -> Any:
    """A signature without sizes, which ranks may have of their own."""
    if isinstance(signature, tuple) and signature and isinstance(signature[0], torch.Size):
        return "tensor"
    if isinstance(signature, tuple):
        return tuple(map(_shape_of, signature))
    return signature if isinstance(signature, str | int | float) else type(signature).__name__


def find_refusal(engine: Engine) -> str:
    """What of an engine no graph can hold; empty if there is nothing."""
    device = engine.mesh.device
    if device.type != "cuda":
        return f"the model is on {device}, and only CUDA has graphs"
    if engine.stand_in is not None:
        return "sw.compile runs the model as graphs of its own"
    if engine.policy.needs_equal_use:
        return "Plan.unused='error' lets ranks compare what they used in every step"
    for unit in engine.units:
        if unit.options.offload is not None:
            return f"unit {unit.name!r} is offloaded to the host"
        if isinstance(unit.parameters, ExtendedParameters):
            return f"unit {unit.name!r} brings an all-gather of its own"
        for group in (unit.mesh.shard, unit.mesh.replicate):
            backend = "" if group.size == 1 else torch_private.backend_name(group.group, device)
            if backend not in ("", "nccl", "fake"):
                return f"{backend} moves the data of unit {unit.name!r} through the host"
    return ""
