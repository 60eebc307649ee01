"""The files of a run's directory: the trainer and the profiler write them, reports read them."""

METRICS = "metrics.jsonl"  # one JSON object per logged step
CONFIG = "config.toml"  # the resolved configuration
PLAN = "plan.json"
CHOICE = "choice.json"  # what `--plan auto` said of the plan, and what it took
FACTS = "run.json"  # versions, world, device, what the plan explains
TIMELINE = "timeline.json"  # one measured step of every rank, with memory by role (a Timeline)
PREDICTED = "predicted.json"  # the same step as the plan's simulation has it (a Timeline)
MEMORY = "memory.json"  # what the allocator says: allocated, reserved, active, the limit
MESSAGES = "messages.json"  # this step's collectives, and the size-to-time curve they should follow
KERNELS = "kernels.json"  # the traced step's kernels, or a host's operators, by phase and name
TRACE = "trace.json"  # the measured step for Perfetto and chrome://tracing
REPORT = "report.html"
CHECKPOINTS = "checkpoints"  # a folder of them, as `sw.save` makes it
MISS = 0.1  # of what CHOICE says of a step or of memory: a difference above it is a miss
# A timeline's label `timing`: whether the step that it shows paid for its trace.
TRACED, UNTRACED = "traced", "untraced"
FILES = (
    METRICS, CONFIG, PLAN, CHOICE, FACTS, TIMELINE, PREDICTED, MEMORY, MESSAGES, KERNELS, TRACE,
    REPORT,
)  # fmt: skip
