"""One step on a rank with a CUDA device: a kernel is of the mark in which the host launched it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from shardwise.description.cluster import COLLECTIVES
from shardwise.engine.marks import CallMark, Marks, RangeMark
from shardwise.profiling.merge import RankTransfer, number_transfers
from shardwise.profiling.pieces import HostPieces, Piece, join_spans
from shardwise.profiling.trace import Kernel, TorchTrace
from shardwise.timeline import COMPUTE, HOST, Span

# Between kernels that were launched in time, a device needs up to this long by itself.
BETWEEN_KERNELS_NS = 10_000


def device_spans(
    trace: TorchTrace, marks: Marks, start: int, end: int, rank: int
) -> tuple[list[Span], list[RankTransfer], int, int]:
    """Kernels and transfers that the host launched from `start` to `end`, and when the device began
    and ended with them.
    """
    known = HostPieces(marks, start, end)
    opened, closed = device_end(trace.kernels, start), device_end(trace.kernels, end)
    mine = [kernel for kernel in trace.kernels if start <= kernel.launched < end]
    by_call: dict[int, tuple[CallMark, list[Kernel]]] = {}
    plain: list[tuple[Kernel, Piece]] = []
    for kernel in mine:
        piece = known.at(kernel.launched)
        call = piece.mark if isinstance(piece.mark, CallMark) else None
        if call is None and "nccl" in kernel.name.lower():
            call = _last_call(marks, kernel, piece) or _unmarked_call(kernel, piece)
        if call is not None:
            by_call.setdefault(id(call), (call, []))[1].append(kernel)
        else:
            plain.append((kernel, piece))
    compute_stream = _compute_stream(mine, known)
    lanes = _name_lanes(plain, compute_stream)
    calls = sorted(call.start for call in marks.calls)
    spans = _kernel_spans(plain, lanes, compute_stream, rank, calls)
    spans += _late_spans(plain, compute_stream, rank, opened)
    # What the host was at, beside the device.
    spans += join_spans([p.span(HOST, rank, HOST, p.start, p.end) for p in known.pieces])
    spans.append(Span("step", "", "forward", HOST, rank, HOST, opened, closed))
    clipped = [
        replace(span, start=max(span.start, opened), end=min(span.end, closed))
        for span in spans
        if span.end > opened and span.start < closed
    ]
    found = [
        (call, min(kernel.start for kernel in ran), max(kernel.end for kernel in ran))
        for call, ran in sorted(by_call.values(), key=lambda each: each[0].start)
    ]
    return clipped, number_transfers(rank, found), opened, closed


def device_end(kernels: Iterable[Kernel], moment: int) -> int:
    """When the device had done all that was launched before `moment`."""
    return max([moment, *(k.end for k in kernels if k.launched < moment)])


def _compute_stream(kernels: list[Kernel], known: HostPieces) -> int:
    """The stream that modules compute on: kernels outside any mark are longest on it."""
    times: Counter[int] = Counter()
    for kernel in kernels:
        if known.at(kernel.launched).mark is None:
            times[kernel.stream] += kernel.end - kernel.start
    return times.most_common(1)[0][0] if times else -1


def _last_call(marks: Marks, kernel: Kernel, piece: Piece) -> CallMark | None:
    """A grouped call launches its kernel after its parts were issued, inside the same range."""
    if piece.mark is None:
        return None
    inside = [c for c in marks.calls if piece.mark.start <= c.start <= kernel.launched]
    return inside[-1] if inside else None


def _unmarked_call(kernel: Kernel, piece: Piece) -> CallMark:
    """A collective that no mark tells of: DistributedDataParallel's, or the user's own."""
    lowered = kernel.name.lower().replace("_", "")
    name = next((name for name in COLLECTIVES if name.replace("_", "") in lowered), "collective")
    return CallMark(name, piece.unit, piece.phase, "unmarked", 0, (), kernel.launched)


def _name_lanes(plain: list[tuple[Kernel, Piece]], compute_stream: int) -> dict[int, str]:
    """Streams by what mostly runs on them."""
    seen: dict[int, Counter[str]] = defaultdict(Counter)
    for kernel, piece in plain:
        seen[kernel.stream][piece.name] += 1
    lanes = {compute_stream: COMPUTE}
    for stream, names in sorted(seen.items()):
        if stream != compute_stream:
            kind = names.most_common(1)[0][0]
            name = {"gather": "gather", "copy-out": "gather", "pack": "scatter"}.get(kind, kind)
            lanes[stream] = name if name not in lanes.values() else f"{name} {stream}"
    return lanes


def _kernel_spans(
    plain: list[tuple[Kernel, Piece]],
    lanes: dict[int, str],
    compute_stream: int,
    rank: int,
    calls: list[int],
) -> list[Span]:
    """Kernels of one mark that follow each other on a stream are one span. `calls`: when the host
    issued its collectives.
    """
    spans: list[Span] = []
    last: dict[int, int] = {}  # where the last span of a stream stands
    for kernel, piece in plain:
        moves = kernel.kind == "gpu_memcpy" and "DtoD" not in kernel.name
        role = "copy" if moves or kernel.stream != compute_stream else piece.role
        span = piece.span(role, rank, lanes[kernel.stream], kernel.start, kernel.end)
        if span.name == "gather" and isinstance(piece.mark, RangeMark):
            issued = bisect_left(calls, kernel.launched)
            ahead = issued < len(calls) and calls[issued] <= piece.mark.end
            span = replace(span, name="cast" if ahead else "copy-out")
        at = last.get(kernel.stream)
        if at is not None and _continues(spans[at], span, kernel):
            spans[at] = replace(spans[at], end=max(spans[at].end, span.end))
        else:
            last[kernel.stream] = len(spans)
            spans.append(span)
    return spans


def _continues(before: Span, span: Span, kernel: Kernel) -> bool:
    """The same work goes on, and the device was not kept waiting by the host."""
    gap = span.start - before.end
    same = replace(before, start=span.start, end=span.end) == span
    return same and gap <= BETWEEN_KERNELS_NS and (gap <= 0 or kernel.launched <= before.end)


def _late_spans(
    plain: list[tuple[Kernel, Piece]], compute_stream: int, rank: int, opened: int
) -> list[Span]:
    """When compute had nothing because the host had not launched it yet. The rest of such a gap is
    not the host's: the kernel was launched by then and waited for another stream.
    """
    spans, at = [], opened
    for kernel, piece in plain:
        if kernel.stream == compute_stream:
            until = min(kernel.launched + BETWEEN_KERNELS_NS, kernel.start)
            if kernel.launched > at and until > at:
                late = piece.span(HOST, rank, COMPUTE, at, until)
                spans.append(replace(late, name="host late"))
            at = max(at, kernel.end)
    return spans


def when_needed(kernels: list[Kernel], times: list[int], start: int, end: int) -> list[int]:
    """Moments of the host as moments of the device, which follows behind: the start of the first
    kernel that was launched from then on.
    """
    mine = sorted((k for k in kernels if start <= k.launched < end), key=lambda k: k.launched)
    launches = [kernel.launched for kernel in mine]
    closed = device_end(kernels, end)
    found, latest = [], 0
    for time in times:
        at = bisect_left(launches, time)
        moment = mine[at].start if at < len(mine) else closed
        # Streams run beside each other; the curve goes forward.
        latest = max(latest, time, moment)
        found.append(min(latest, closed))
    return found
