"""The classes of faults as a table, one row each, and the faults that are drawn from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# A job's steps (`program.py` draws them): it saves after these, evaluates after that.
SAVES, EVALUATED, LAST = (2, 4), 3, 5
BLOCKS = 4  # of its model, all alike

TRAINING = ("forward", "backward", "step", "evaluation")
SAVING = ("save", "asynchronous save")
EVERYWHERE = (*TRAINING, *SAVING, "load")

STRATEGIES = ("zero3", "zero2", "zero1", "ddp", "hsdp")

# What is to become of a job. After every one of them: no process of it is alive, and what is on the
# disk loads to exactly a state that was saved, the last committed one.
ENDS = "ends"  # all ranks end in time, with a message that names rank and cause
REFUSED = "refused"  # the call is an error, the same on every rank, and the job goes on
CONTINUES = "continues"  # nothing is said; the job ends as it would have
DIES = "dies"  # all ranks are gone at once: only the disk is left to be judged
OUTCOMES = (ENDS, REFUSED, CONTINUES, DIES)


@dataclass(frozen=True)
class Kind:
    """One class of faults. `says`: each is searched in what was said, line by line; `{rank}` is the
    struck rank, `{world}` the number of ranks, `{number}` and `{place}` the fault's.
    """

    name: str
    what: str  # is done
    places: tuple[str, ...]
    expected: str  # of OUTCOMES
    says: tuple[str, ...] = ()
    weight: float = 1.0  # of a long run's faults; less for what takes seconds
    hosts: bool = False  # ranks on two hosts: network namespaces
    disk: bool = False  # the checkpoints are on a small file system of their own
    jobs: int = 1
    damages: bool = False  # the newest checkpoint stays damaged
    strategies: tuple[str, ...] = STRATEGIES
    steps: tuple[int, ...] = tuple(range(1, LAST + 1))
    older: bool = False  # what the job then loads is not its newest checkpoint, but the one before
    diverges: bool = False  # until the job is ended it computes something else; nobody keeps that


# The one message of a job that ends: who, and how.
_WHO = r"^shardwise: rank {rank} of {world}\b( \([^)]*\))? "
# Of two ranks that differ nobody can say which is wrong; both are named, with their units.
_ORDER = (
    _WHO + r"runs another order than rank \d in step {step}: forward of unit blocks\.{unit} "
    r"where rank \d has forward of unit blocks\.{other}\b"
    r"|^shardwise: rank \d of 2 runs another order than rank {rank} in step {step}: forward of "
    r"unit blocks\.{other} where rank {rank} has forward of unit blocks\.{unit}\b"
    # Or a save has come first.
    r"|CheckpointError: .*: ranks (\d and {rank}|{rank} and \d) have run units in different orders"
)
_REFUSED = r"rank {rank}\b"
_FILE = r"\brank-0000{rank}\.safetensors|\bmanifest\.json"
_SHARD = r"\brank-\d+\.safetensors"

KINDS: tuple[Kind, ...] = (
    Kind("none", "nothing: what other jobs are compared with", ("step",), CONTINUES),
    # A rank ends.
    Kind("kill", "SIGKILL", EVERYWHERE, ENDS, (_WHO + "was killed by SIGKILL",), 4),
    Kind("terminate", "SIGTERM", EVERYWHERE, ENDS, (_WHO + "was killed by SIGTERM",), 2),
    Kind("segfault", "a read at address 0", EVERYWHERE, ENDS,
         (_WHO + "was killed by SIGSEGV",), 2),
    Kind("exception", "a RuntimeError", EVERYWHERE, ENDS,
         (_WHO + "failed", r"^[\w.]*InjectedError: injected fault {number} in {place}$"), 3),
    Kind("memory", "an allocation over a limit of its address space", EVERYWHERE, ENDS,
         (_WHO + "failed", r"^MemoryError|can't allocate memory"), 2),
    Kind("exit", "sys.exit(3)", EVERYWHERE, ENDS, (_WHO + "exited with code 3",), 2),
    Kind("early end", "sys.exit(0)", EVERYWHERE, ENDS,
         (_WHO + r"ended \(its program was over\) while rank \d",), 1),
    # A rank goes on, or could.
    Kind("stop", "SIGSTOP", EVERYWHERE, ENDS, (_WHO + r"was stopped \(SIGSTOP",), 1),
    Kind("pause", "SIGSTOP, and SIGCONT 0.8 s later", (*TRAINING, *SAVING), CONTINUES),
    Kind("slow", "4 s of sleep", EVERYWHERE, CONTINUES, weight=0.5),
    Kind("lock held", "4 s in a call that keeps the interpreter's lock", EVERYWHERE, CONTINUES,
         weight=0.5),
    # Connections.
    Kind("store", "this rank's connection to the store is shut down", TRAINING, ENDS,
         (_WHO + "failed", r"[Ss]tore")),
    Kind("link cut", "the link between two hosts goes down", (*TRAINING, "save"), ENDS,
         (r"^shardwise: rank 1 of 2 \(host-b\) is lost",
          r"^shardwise: rank 0 of 2 \(host-a\) cannot be reached from host-b"), 0.5, hosts=True),
    Kind("link slow", "the link between two hosts at 2 Mbit/s", TRAINING, CONTINUES, weight=0.3,
         hosts=True),
    Kind("taken port", "somebody wants the port at which ranks are about to meet", ("start",),
         CONTINUES, steps=(0,)),
    # Ranks disagree.
    Kind("plan", "a rank shards by another plan", ("shard",), ENDS,
         (r"RuntimeError: rank {rank} shards by another plan than rank \d"
          r"|RuntimeError: rank \d shards by another plan than rank {rank}\b",)),
    # Only where each block is gathered by itself do ranks meet in it.
    Kind("order", "two equal blocks change places in one step", ("forward",), ENDS, (_ORDER,),
         1, strategies=("zero3",), steps=(2, 3, 4, 5), diverges=True),
    Kind("left out", "a block is left out in one step", ("forward",), ENDS, (_ORDER,),
         1, strategies=("zero3",), steps=(2, 3, 4, 5), diverges=True),
    Kind("first order", "two equal blocks change places in the first step", ("forward",), ENDS,
         (r"rank {rank}\b.*blocks\.{unit}",), 1, strategies=("zero3",), steps=(1,)),
    # A save fails.
    Kind("disk full", "ENOSPC at a write, of which half may have gone", SAVING, REFUSED,
         (_REFUSED, _FILE, "No space left on device"), 3),
    Kind("full disk", "a file system without room", SAVING, REFUSED,
         ("No space left on device",), 1, disk=True),
    Kind("i/o error", "EIO at a write or fsync, or at a read", (*SAVING, "load"), REFUSED,
         (_REFUSED, _SHARD + r"|\bmanifest\.json", "Input/output error"), 3, older=True),
    Kind("short write", "a write takes half of what it is given", SAVING, CONTINUES, (), 2),
    Kind("permission", "the folder cannot be written to", SAVING, REFUSED,
         ("Permission denied",), 2),
    Kind("power cut", "all ranks are killed at once, somewhere in a save", SAVING, DIES, (), 4),
    Kind("two jobs", "another job saves into the same folder", SAVING, CONTINUES, (), 1, jobs=2),
    # What was saved is damaged.
    Kind("flipped byte", "in a file of data", ("load",), REFUSED, (_SHARD,), 3, older=True,
         damages=True),
    Kind("flipped manifest", "a byte of manifest.json", ("load",), REFUSED,
         (r"manifest\.json",), 3, older=True, damages=True),
    Kind("truncated", "a file loses its end", ("load",), REFUSED,
         (_SHARD + r"|manifest\.json",), 3, older=True, damages=True),
    Kind("deleted shard", "a file of data", ("load",), REFUSED, (_SHARD,), 2, older=True,
         damages=True),
    Kind("deleted manifest", "so that it is no checkpoint", ("load",), CONTINUES, (), 1,
         older=True),
    Kind("stale pointer", "`latest` names the checkpoint before", ("load",), CONTINUES, (), 1),
    Kind("lost pointer", "`latest` names nothing that is there", ("load",), CONTINUES, (), 1),
    # Numbers.
    Kind("nonfinite", "an infinite loss on one rank; then saves that keep one checkpoint",
         ("forward",), CONTINUES, (), 1, steps=(3, 4)),
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class Fault:
    """One fault: which, where, when, in which job."""

    number: int
    kind: str
    place: str
    rank: int  # the struck one
    step: int
    world: int
    strategy: str
    seed: int  # of model and data
    chance: float  # in [0, 1): which file operation, byte or moment

    @property
    def changes_places(self) -> int:
        """The block that runs after the next one, or not at all."""
        return int(self.chance * (BLOCKS - 1))

    @property
    def keep(self) -> int | None:
        """`keep_latest_k` of the job's saves."""
        return 1 if self.kind == "nonfinite" else None


def draw(seed: int, count: int, kinds: Sequence[Kind]) -> list[Fault]:
    """`count` faults, the same for the same seed: each kind once, then as their weights say, each
    kind at all its places in turn.
    """
    chooser = random.Random(seed)
    names = [kind.name for kind in kinds]
    more = max(0, count - len(names))
    total = sum(kind.weight for kind in kinds)
    due = {kind.name: kind.weight * more / total for kind in kinds}
    for _ in range(more):  # the one that is furthest behind
        name = max(due, key=lambda each: due[each])
        due[name] -= 1
        names.append(name)
    seen: dict[str, int] = {}
    faults = []
    for number, name in enumerate(names[:count]):
        kind = BY_NAME[name]
        turn = seen[name] = seen.get(name, -1) + 1
        if turn == 0:  # so that a run of one of each does not strike all at the first place
            turn = seen[name] = chooser.randrange(len(kind.places))
        faults.append(_draw_one(number, kind, kind.places[turn % len(kind.places)], chooser))
    return faults


def _draw_one(number: int, kind: Kind, place: str, chooser: random.Random) -> Fault:
    world = 2 if kind.hosts else chooser.choices((2, 3, 4), (80, 10, 10))[0]
    strategies = [name for name in kind.strategies if name != "hsdp" or world == 4]
    if place in SAVING:
        step = chooser.choice(SAVES)
    elif place == "evaluation":
        step = EVALUATED
    else:
        step = chooser.choice(kind.steps)
    return Fault(
        number=number,
        kind=kind.name,
        place=place,
        rank=chooser.randrange(world),
        step=step,
        world=world,
        strategy=chooser.choice(strategies),
        seed=chooser.randrange(3),
        chance=chooser.random(),
    )
