"""What became of a fault, against what should have."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardwise.chaos.faults import BY_NAME, CONTINUES, DIES, ENDS, REFUSED, Fault, Kind
from shardwise.chaos.job import Ended

Row = dict[str, Any]
Lines = list[dict[str, Any]]  # of one rank's record


def judge(fault: Fault, ended: Ended, disk: dict[str, Any]) -> Row:
    """The row of a fault: what was observed, how long it took, and all that is wrong with it."""
    kind = BY_NAME[fault.kind]
    outcome = _observe(kind, ended)
    struck = [line["time"] for lines in ended.records for line in lines if line["what"] == "fault"]
    wrong: list[str] = []
    if not struck and kind.name != "none":
        wrong.append("the fault did not strike")
    if outcome != kind.expected:
        wrong.append(f"{outcome}, expected {kind.expected}")
    if ended.orphans:
        wrong.append(f"outlived their ranks: {ended.orphans}")
    unnamed = _check_words(fault, kind, outcome, ended)
    loads = _check_loads(fault, kind, ended) + _check_disk(fault, kind, ended, disk)
    seconds = _measure(kind, outcome, struck, ended)
    row: Row = {
        **asdict(fault),
        "outcome": outcome,
        "wrong": wrong + unnamed + loads,
        "hang": ended.hang,
        "wrong_load": bool(loads),
        "seconds": None if seconds is None else round(seconds, 3),
    }
    if states := [line["hash"] for line in ended.records[0] if line["what"] == "state"]:
        row["state"] = states[0]
    if kind.says:
        row["named"] = outcome == kind.expected and not unnamed
    if row["wrong"]:
        row |= {"codes": ended.codes, "said": _without_folders(ended.said)[-6000:],
                "disk": disk}  # fmt: skip
        row["records"] = [_shorten(lines) for lines in ended.records]
    return row


def _without_folders(text: str) -> str:
    """A result is read on other machines, where the folders of this one say nothing."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text


def _shorten(lines: Lines) -> Lines:
    told = [line for line in lines[:-3] if line["what"] in ("fault", "refused")]
    return told + lines[-3:]


def _observe(kind: Kind, ended: Ended) -> str:
    if ended.hang:
        return "hangs"
    if any(code != 0 for code in ended.codes):
        return DIES if kind.expected == DIES else ENDS
    refused = any(line["what"] == "refused" for lines in ended.records for line in lines)
    return REFUSED if refused else CONTINUES


def _measure(kind: Kind, outcome: str, struck: list[float], ended: Ended) -> float | None:
    """From the fault to the end of the last rank, or to the last rank's error."""
    if not struck or outcome not in (ENDS, REFUSED):
        return None
    if outcome == ENDS:
        return max(at for at in ended.times if at is not None) - struck[0]
    refused = [line["time"] for lines in ended.records for line in lines
               if line["what"] == "refused"]  # fmt: skip
    return max(refused) - struck[0]


# What is said


def _check_words(fault: Fault, kind: Kind, outcome: str, ended: Ended) -> list[str]:
    if outcome == REFUSED:
        texts = [[line["text"] for line in lines if line["what"] == "refused"]
                 for lines in ended.records]  # fmt: skip
        if any(each != texts[0] for each in texts[1:]):
            return [f"refused in other words on another rank: {texts}"]
        said = "\n".join(texts[0])
    else:
        said = ended.said
    wrong = []
    for pattern in kind.says if outcome == kind.expected else ():
        at = fault.changes_places
        pattern = pattern.format(**asdict(fault), unit=at + 1, other=at)
        if not re.search(pattern, said, re.MULTILINE):
            wrong.append(f"nothing said matches {pattern!r}")
    alarm = re.search("^shardwise: (?!saving )", ended.said, re.MULTILINE)  # progress is none
    if outcome in (CONTINUES, REFUSED) and alarm:
        wrong.append("a false alarm")
    # Each side of a cut link tells; before a model is sharded nobody watches.
    messages = 2 if kind.hosts else 0 if fault.place == "shard" else 1
    found = len(re.findall(r"^shardwise: rank \d+ of ", ended.said, re.MULTILINE))
    if outcome == ENDS and found != messages:
        wrong.append(f"{found} messages instead of {messages}")
    return wrong


# What is loaded


def _check_loads(fault: Fault, kind: Kind, ended: Ended) -> list[str]:
    """What the job itself loaded, and that a refused call changed nothing."""
    wrong = []
    journal = _journal(ended)
    for rank, lines in enumerate(ended.records):
        for line in lines:
            if line["what"] == "refused" and not line["unchanged"]:
                wrong.append(f"rank {rank}: a refused {line['call']} changed the state")
            if line["what"] == "loaded" and line["hash"] not in journal.get(line["step"], ()):
                wrong.append(f"rank {rank} loaded a state of step {line['step']} never saved")
        states = {line["hash"] for line in lines if line["what"] == "state"}
        if kind.diverges:
            wrong += _check_kept(fault, rank, lines)
        elif len(states) > 1 and kind.name != "two jobs":
            wrong.append(f"rank {rank}: resumed, it came to another state")
    return wrong + _check_which(fault, kind, ended)


def _check_kept(fault: Fault, rank: int, lines: Sequence[dict[str, Any]]) -> list[str]:
    """No checkpoint is made of what came of the fault. What was saved before is loaded again, and
    sound from there on.
    """
    for line in lines:
        if line["what"] == "loaded":
            break
        if line["what"] == "saved" and line["step"] >= fault.step:
            return [f"rank {rank} saved what it had after the fault, in step {line['step']}"]
    return []


def _check_which(fault: Fault, kind: Kind, ended: Ended) -> list[str]:
    """Every rank loads the newest of the checkpoints that were there, or the one before."""
    wrong = []
    for rank, lines in enumerate(ended.records if kind.jobs == 1 else ()):
        saved: list[int] = []
        for line in lines:
            if line["what"] == "saved":
                saved.append(line["step"])
            elif line["what"] == "loaded":
                expected = saved[-2 if kind.older and fault.place == "load" else -1]
                if line["step"] != expected:
                    wrong.append(f"rank {rank} loaded step {line['step']}, expected {expected}")
                break
    return wrong


def _journal(ended: Ended) -> dict[int, set[str]]:
    journal: dict[int, set[str]] = {}
    for lines in ended.records:
        for line in lines:
            if line["what"] == "saving":
                journal.setdefault(line["step"], set()).add(line["hash"])
    return journal


def _check_disk(fault: Fault, kind: Kind, ended: Ended, disk: dict[str, Any]) -> list[str]:
    """What a new program finds: the last committed state, or the one that was just being saved."""
    if "failed" in disk:
        return [f"what is on the disk cannot be used: {disk['failed']}"]
    wrong = []
    damaged = ["step-00000004"] if kind.damages else []
    if list(disk["problems"]) != damaged:
        wrong.append(f"damaged are {disk['problems']}, expected {damaged}")
    if disk["refused"]:
        wrong.append(f"the newest does not load: {disk['refused']}")
    if disk["step"] is not None and not disk.get("finite"):
        wrong.append("no finite checkpoint is left")
    journal = _journal(ended)
    saved = max((line["step"] for lines in ended.records for line in lines
                 if line["what"] == "saved"), default=None)  # fmt: skip
    step = disk["step"]
    if step is None:
        if saved is not None:
            wrong.append(f"step {saved} was saved, and nothing is on the disk")
    elif saved is not None and step < saved:
        wrong.append(f"step {saved} was saved, and step {step} is what loads")
    elif disk["hash"] not in journal.get(step, ()):
        wrong.append(f"what loads as step {step} was never saved")
    if not disk["next"]:
        wrong.append("the next save does not load")
    if disk["left"]:
        wrong.append(f"left by dead saves, and not removed by the next: {disk['left']}")
    return wrong
