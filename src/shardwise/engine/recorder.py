"""Records a step as a CUDA graph: the stream and the memory of the graphs of one captured step, a
rehearsal that finds what could not be recorded, and what is put right after a recording that
failed.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy
import torch

from shardwise.engine import torch_private

Result = TypeVar("Result")

_SYNCHRONIZES = "synchronizing CUDA operation"
_ABOUT_THE_MODE = "Synchronization debug mode"


class Uncapturable(Exception):
    """Why a step is not captured. `result`: what the step gave, where it has run all the same."""

    def __init__(self, reason: str, result: tuple[Any] | None = None) -> None:
        super().__init__(reason)
        self.result = result


_of_thread = threading.local()


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Where a thread warms up and records all its steps: libraries keep memory for every stream
    that they meet, and do not give it back when a step is let go.
    """
    streams: dict[int, torch.cuda.Stream]
    streams = _of_thread.__dict__.setdefault("streams", {})
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in streams:
        streams[index] = torch.cuda.Stream(device)
    return streams[index]


def warm_up(run: Callable[[], Result], stream: torch.cuda.Stream | None = None) -> Result:
    """Run a step on the stream that graphs are recorded on, of the current device if none is given:
    what libraries keep for a stream is there then, and what stays after the step is not in another
    stream's memory. As the program called it where no device has been used.
    """
    if not torch.cuda.is_initialized():
        return run()
    stream = stream or _stream_of(torch.device("cuda", torch.cuda.current_device()))
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            return run()
    finally:
        current.wait_stream(stream)


class Span:
    """From when the device comes to now until it comes to `end`."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def end(self) -> None:
        self._end.record()

    @property
    def ms(self) -> float:
        """Waits for the device."""
        self._end.synchronize()
        return self._start.elapsed_time(self._end)


class Recorder:
    """The graphs of one captured step, in one pool of memory: only one of them runs at a time, and
    nothing but its gradients, which are held, outlives it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _stream_of(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._has_warmed = False
        self.refusal: str | None = None  # what the last rehearsal found
        # The same, where the step may do without: it asks whether it is being recorded.
        self._doubt: str | None = None
        self.start_span = Span
        self._draws = True  # the step draws random numbers on the device

    def warm(self, run: Callable[[], Result]) -> Result:
        """Run a step on the graphs' stream. The allocator gives no stream what it keeps for another
        one, so that is given back first.
        """
        if not self._has_warmed:
            self._has_warmed = True
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        return warm_up(run, self._stream)

    def rehearse(self, run: Callable[[], Result]) -> Result:
        """The same, and see whether the step reads from the device or draws random numbers on the
        host.
        """
        generator = self._generator
        offset, host = generator.get_offset(), _host_random()
        mode = torch.cuda.get_sync_debug_mode()
        answers = torch_private.answers_about_recording(denied=False)
        with warnings.catch_warnings(record=True) as caught, answers as asked:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = self.warm(run)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        self._draws = generator.get_offset() != offset
        reads = [each for each in caught if _SYNCHRONIZES in str(each.message)]
        self.refusal = self._doubt = None
        if reads:
            place = f"{reads[0].filename}:{reads[0].lineno}"
            found = f"the host reads a value of the device at {place}"
            if asked:
                self._doubt = found
            else:
                self.refusal = found
        if _host_random() != host and self.refusal is None:
            self.refusal = "random numbers are drawn on the host, and would be the same ever after"
        for each in caught:
            if each not in reads and _ABOUT_THE_MODE not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return result

    def record(
        self, run: Callable[[], Result], lanes: Sequence[torch.cuda.Stream]
    ) -> tuple[Result, Callable[[], None]]:
        """The step's outputs, in the graph's memory, and what replays it. Nothing runs on the
        device. `lanes` are streams that the step may leave without waiting for them.

        A step that asks whether it is being recorded hears no, and goes the way that it rehearsed;
        unless that way reads from the device, and the other may not.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        generator = self._generator
        spare, state = generator.clone_state(), generator.get_state()
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        collects = gc.isenabled()
        gc.disable()  # what it would free meanwhile may not be freed inside of a recording
        try:
            # Other threads (NCCL's, a loader's) go about their business meanwhile.
            recording = torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            )
            plain_checkpoints = torch_private.checkpoints_without_random_state(not self._draws)
            answers = torch_private.answers_about_recording(denied=self._doubt is None)
            with plain_checkpoints, recording, _joined(lanes), answers:
                outputs = run()
        except Exception as error:
            self._heal(graph, spare, state)
            raise Uncapturable(self._doubt or _explain(error)) from error
        except BaseException:
            self._heal(graph, spare, state)
            raise
        finally:
            torch.cuda.set_stream(current)  # a recording that fails leaves its own behind
            if collects:
                gc.enable()
        return outputs, graph.replay

    def give_back(self) -> None:
        """What eager steps had, and graphs do not use."""
        torch.cuda.empty_cache()

    @property
    def _generator(self) -> torch.Generator:
        index = self.device.index
        return torch.cuda.default_generators[
            torch.cuda.current_device() if index is None else index
        ]

    def _heal(
        self, graph: torch.cuda.CUDAGraph, spare: torch.Generator, state: torch.Tensor
    ) -> None:
        """After a recording that failed: torch's allocator and generator may still take part in it,
        because torch ends them only after what can fail. Its stream is no other step's.
        """
        _of_thread.__dict__.get("streams", {}).pop(self._stream.device_index, None)
        # The allocator asks it which streams are being recorded, even then.
        _failed.append(graph)
        torch_private.end_recorded_memory(self.device, self._pool)
        try:
            torch.empty(1, device=self.device).uniform_()
            self._generator.set_state(state)
        except RuntimeError:
            self._generator.graphsafe_set_state(spare)


_failed: list[torch.cuda.CUDAGraph] = []


@contextlib.contextmanager
def _joined(lanes: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Let the recording stream wait, at the end, for those that work was recorded on."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            _join(lanes)
        raise
    _join(lanes)


def _join(lanes: Sequence[torch.cuda.Stream]) -> None:
    current = torch.cuda.current_stream()
    for lane in lanes:
        with torch.cuda.stream(lane):
            recorded = torch.cuda.is_current_stream_capturing()
        if recorded:
            current.wait_stream(lane)


def _host_random() -> tuple[Any, ...]:
    name, keys, *rest = numpy.random.get_state()
    numbers = numpy.asarray(keys).tobytes()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), name, numbers, rest


def _explain(error: BaseException) -> str:
    """The first error of a recording; those that follow from it say less."""
    while error.__context__ is not None:
        error = error.__context__
    said = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {said[0] if said else ''}"
    if "CUDAGeneratorImpl" in text:
        text += " (random numbers inside of activation checkpointing: preserve_rng_state=False)"
    return f"recording it failed with {text}"
