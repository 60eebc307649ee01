"""The timeline of one training step: what every rank's streams did when, and what was in memory.

Predicted by the simulator or measured by a profiler, it is the same type, so that a report is a
difference of two. Times are whole nanoseconds: parts then sum to the whole exactly.

Every moment of a rank's step is one of these, told from its compute stream (first match wins):

    compute            it runs; the part beyond what the kernels take alone is contention
    copies             it runs a copy (pack, cast, copy-out)
    exposed transfer   it is idle while a collective moves bytes
    waiting for peers  it is idle while a collective waits for a late rank
    copies             it is idle while another stream runs a copy
    host idle          it is idle and nothing runs: the host has not issued the next work yet
                       (on a CPU, where both are one: the host's own work between the kernels)

so that step = compute + contention + exposed transfer + waiting for peers + copies + host idle.
"""

from shardwise.timeline.breakdown import Breakdown, Overlap, Segment
from shardwise.timeline.busy import Busy
from shardwise.timeline.spans import (
    COMPUTE,
    HOST,
    MEMORY_ROLES,
    SPAN_ROLES,
    MemoryCurve,
    MemoryPeak,
    Span,
)
from shardwise.timeline.step import Timeline

__all__ = [
    "COMPUTE",
    "HOST",
    "MEMORY_ROLES",
    "SPAN_ROLES",
    "Breakdown",
    "Busy",
    "MemoryCurve",
    "MemoryPeak",
    "Overlap",
    "Segment",
    "Span",
    "Timeline",
]
