"""Which backend is fastest for a shape: timed once, then kept.

The first call of a shape on a GPU times all backends that can serve, on random tensors of that
shape. What was found is kept for the process, and for later ones in the user's cache folder
($XDG_CACHE_HOME or ~/.cache, shardwise/attention): a file for each shape, by GPU, versions and the
kernels' source. A choice never changes within a process: what is recomputed in backward has to save
what forward saved. Where nothing can be timed (a graph is being captured, a backward pass runs, too
little memory is free) the table's choice is taken, and stays. SHARDWISE_ATTENTION=table takes it
always: the same on every rank and in every run.

Ranks decide each for itself, so two may take different backends where those are about equally fast;
their results then differ as those of two backends do. Ranks of one host find each other's files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import UserError, nearest
from shardwise.kernels.torch_private import backward_pass, spin

if TYPE_CHECKING:
    from shardwise.kernels.attention.backends import Request

VARIABLE = "SHARDWISE_ATTENTION"
MODES = ("measure", "table")
EXACT = 128  # multiples of it are shapes of their own; other lengths share an eighth of an octave
MOST_TIMED = 256  # shapes that one process times
BUDGET_MS = 40.0  # of one shape's rounds; two rounds are always made
FAR = 1.5  # what took so many times the shortest once is not timed again
CLOSE = 1.01  # within it the table's order counts
AHEAD = 1.5  # of the host's time for a call: so long the device is kept from it, to time it alone
MOST_AHEAD_MS = 20.0
CYCLES_PER_MS = 2_000_000  # about a GPU's clock
STASH_BYTES = 2 << 30  # the most that a backward of these kernels takes for itself

Call = Callable[[], object]
_decided: dict[str, str] = {}
_timed: dict[str, dict[str, float]] = {}
_lock = threading.Lock()


def decide(request: Request, names: Sequence[str]) -> str:
    """The fastest of `names`, which come in the table's order."""
    if len(names) == 1:
        return names[0]
    signature = _sign(request)
    with _lock:
        if signature not in _decided:
            _decided[signature] = recall(request, names) or _measure(request, names) or names[0]
        chosen = _decided[signature]
    return chosen if chosen in names else names[0]  # lengths that are rounded need not be equal


def recall(request: Request, names: Sequence[str]) -> str | None:
    """What was measured before, in this process or another; None if nothing, or not wanted."""
    if _mode() == "table" or len(names) == 1:
        return None
    chosen = _decided.get(_sign(request)) or _read(_file(request))
    return chosen if chosen in names else None


def _mode() -> str:
    mode = os.environ.get(VARIABLE, MODES[0])
    if mode not in MODES:
        raise UserError(f"{VARIABLE} is {mode!r}{nearest(mode, MODES)}")
    return mode


def _sign(request: Request) -> str:
    """What shares one choice."""
    rounded = request._replace(queries=_round(request.queries), keys=_round(request.keys))
    return repr(tuple(rounded))


def _round(length: int) -> int:
    """Itself for a multiple of EXACT; for others, below zero, where its eighth of an octave
    begins: lengths that change with every batch are not timed one by one.
    """
    if length % EXACT == 0:
        return length
    step = max(EXACT, 1 << max(0, length.bit_length() - 4))
    return -(length // step) * step


def _measure(request: Request, names: Sequence[str]) -> str | None:
    """Time them here and now, if that can be done, and keep the fastest; None if it cannot."""
    if not _can_measure(request):
        return None
    trials = _time(request, names)
    medians = _timed[_sign(request)] = trials.medians()
    chosen = pick(names, medians)
    if chosen is None:
        return None
    file = _file(request)
    other = _read(file)  # another rank of this host may have been first
    if other in names:
        return other
    _write(file, {"backend": chosen, "ms": medians, "failed": trials.failed, "of": _sign(request)})
    return chosen


def _time(request: Request, names: Sequence[str]) -> Trials:
    """On the program's stream, but in a thread of its own: there no mode, hook, autocast or
    transform of the program is on.
    """
    trials = Trials()
    stream = torch.cuda.current_stream(request.device)

    def work() -> None:
        try:
            with torch.cuda.device(request.device), torch.cuda.stream(stream):
                trials.run(make_calls(request, names), request.device, BUDGET_MS)
        except RuntimeError as error:  # no memory for the tensors themselves
            trials.failed["all"] = str(error)

    thread = threading.Thread(target=work, name="attention-trial", daemon=True)
    thread.start()
    thread.join()
    return trials


def pick(names: Sequence[str], medians: Mapping[str, float]) -> str | None:
    """The first of `names` that is close to the shortest time; None if nothing was timed."""
    if not medians:
        return None
    bound = CLOSE * min(medians.values())
    return next(name for name in names if medians.get(name, bound * 2) <= bound)


def _can_measure(request: Request) -> bool:
    if _mode() == "table" or len(_timed) >= MOST_TIMED:
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    # A trial's backward would wait for the thread that waits for the trial.
    return backward_pass() == -1 and _bytes_needed(request) <= _bytes_free(request.device) // 2


def _bytes_needed(request: Request) -> int:
    """A bound: inputs, results and gradients, some of them in fp32 or for every query head."""
    rows = request.batch * request.heads * (request.queries + request.keys)
    tensors = rows * request.width * request.dtype.itemsize
    return 10 * tensors + STASH_BYTES if request.grad else 4 * tensors


def _bytes_free(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def make_calls(request: Request, names: Sequence[str]) -> dict[str, Call]:
    """A call of each backend on the same random tensors, with its backward if that is wanted."""
    from shardwise.kernels.attention.interface import attention  # which imports this

    random = torch.Generator(request.device).manual_seed(0)  # not the program's

    def make(heads: int, length: int, grad: bool) -> Tensor:
        sizes = [request.batch, heads, length, request.width]
        if request.transposed:
            sizes[1], sizes[2] = sizes[2], sizes[1]
        x = torch.empty(sizes, device=request.device, dtype=request.dtype)
        x = x.normal_(generator=random)
        return (x.transpose(1, 2) if request.transposed else x).requires_grad_(grad)

    q = make(request.heads, request.queries, request.grad)
    k, v = (make(request.kv_heads, request.keys, request.grad) for _ in range(2))
    do = make(request.heads, request.queries, False) if request.grad else None

    def call_of(name: str) -> Call:
        def call() -> None:
            with torch.set_grad_enabled(request.grad):
                o = attention(
                    q, k, v, causal=request.causal, precision=request.precision, backend=name
                )
                if do is not None:
                    torch.autograd.grad(o, (q, k, v), do)

        return call

    return {name: call_of(name) for name in names}


@dataclass
class Trials:
    """Times in ms of calls that take turns, and why some could not run."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        calls: Mapping[str, Call],
        device: torch.device,
        budget_ms: float,
        far: float = FAR,
        rounds: tuple[int, int] = (2, 60),
    ) -> None:
        """Each once untimed (kernels are compiled, plans made) and once timed; then those that did
        not take `far` times the shortest, in turn: as many rounds as the budget allows, between the
        two numbers of `rounds`.
        """
        able = {}
        clock = _Clock(device)
        for name, call in calls.items():
            try:
                call()
                clock.get_ahead(call)
                self.ms[name] = [clock.start(call)()]
                able[name] = call
            except Exception as error:  # whatever a backend says of a shape, others may do it
                self.failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        if not able:
            return
        bound = far * min(times[0] for times in self.ms.values())
        near = {name: call for name, call in able.items() if self.ms[name][0] <= bound}
        expected = sum(self.ms[name][0] + clock.ahead_ms for name in near)
        least, most = rounds
        count = int(min(max(budget_ms / max(expected, 1e-6), least), most))
        # The first time may have been of a GPU at rest: it decides nothing where there are others.
        stops = [(name, clock.start(call)) for _ in range(count) for name, call in near.items()]
        for name in near:
            self.ms[name] = []
        for name, stop in stops:
            self.ms[name].append(stop())

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.ms.items()}


class _Clock:
    """Times a call on its device, with a cold L2 cache on a GPU and without the host: a program
    that waits for its host gains nothing by any backend.
    """

    def __init__(self, device: torch.device) -> None:
        self.flush: Tensor | None = None
        self.ahead_ms = 0.0
        if device.type == "cuda":
            # Not the device: communication on other streams may wait for a rank that waits for us.
            torch.cuda.current_stream(device).synchronize()
            size = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.empty(max(size, 1 << 20), dtype=torch.uint8, device=device)

    def get_ahead(self, call: Call) -> None:
        """Learn how long the host takes for a call."""
        if self.flush is not None:
            began = time.perf_counter()
            call()
            took = 1e3 * (time.perf_counter() - began)
            self.ahead_ms = min(max(self.ahead_ms, AHEAD * took), MOST_AHEAD_MS)

    def start(self, call: Call) -> Callable[[], float]:
        """Call; the ms that it took are asked for later, so that the host need not wait."""
        if self.flush is None:
            began = time.perf_counter()
            call()
            ms = 1e3 * (time.perf_counter() - began)
            return lambda: ms
        spin(int(self.ahead_ms * CYCLES_PER_MS))
        self.flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()

        def stop() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end))

        return stop


def _file(request: Request) -> Path | None:
    """Where the choice for this shape is kept; None where there is no GPU, or no folder."""
    facts = _facts(request.device)
    if facts is None:
        return None
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home
        return None
    signature = _sign(request._replace(device=torch.device("cuda")))  # of one kind, all alike
    name = _digest(f"{facts} {signature}".encode())
    return Path(root) / "shardwise" / "attention" / f"{name}.json"


@cache
def _facts(device: torch.device) -> str | None:
    """What a measured choice holds for, beside the shape; None where there is no such GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    sources = sorted(Path(__file__).parent.glob("*.py"))
    kernels = _digest(b"".join(path.read_bytes() for path in sources))
    versions = (torch.__version__, torch.backends.cudnn.version(), _version("triton"))
    return repr((torch.cuda.get_device_name(device), *versions, kernels))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _read(file: Path | None) -> str | None:
    """The choice that a file holds; None if there is none, or no sense in it."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["backend"] if file else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _write(file: Path | None, content: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(content), encoding="utf-8")
        whole.replace(file)
    except OSError:
        pass  # it is only measured again then
