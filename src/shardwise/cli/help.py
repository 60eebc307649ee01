"""Help texts, which are written for 100 columns, in a terminal that has fewer."""

from __future__ import annotations

import argparse
import re
import textwrap

# An entry of a list: what it is about, two spaces or more, what is said of it.
_ENTRY = re.compile(r" +\S.*  (?=\S)")
_COMMANDS = ("shardwise ", "torchrun ")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Lines as they were written, where they fit; paragraphs, entries and commands that do not are
    broken anew, each in its own way.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for part in _parts(text.splitlines()):
            fits = max(map(len, part)) <= width
            lines += part if fits else _break(part, width)
        return "".join(f"{indent}{line}\n" for line in lines)


def _parts(lines: list[str]) -> list[list[str]]:
    """Lines that are one paragraph, or one entry with its continuation."""
    parts: list[list[str]] = []
    hang = 0  # where the last part goes on
    for line in lines:
        depth = len(line) - len(line.lstrip())
        goes_on = bool(parts) and bool(parts[-1][-1]) and depth == hang
        if not depth:
            starts = line.startswith("--") or (bool(parts) and parts[-1][-1].endswith(":"))
            goes_on &= bool(line) and not starts
        if goes_on:
            parts[-1].append(line)
            continue
        parts.append([line])
        found = _ENTRY.match(line)
        hang = found.end() if found else 0 if not depth else -1
    return parts


def _break(part: list[str], width: int) -> list[str]:
    first = part[0]
    depth = len(first) - len(first.lstrip())
    said = " ".join([first.rstrip(), *(line.strip() for line in part[1:])])
    hang, found = depth + 2 if depth else 0, _ENTRY.match(first)
    if found is not None:
        hang = found.end()
        if hang > width - 20:  # no room beside it
            return [found[0].rstrip(), *_wrap(said[hang:], width, " " * (depth + 4))]
    elif depth and first.lstrip().startswith(_COMMANDS):
        return _break_command(said, width)
    return _wrap(said, width, " " * hang, said[:depth])


def _wrap(text: str, width: int, indent: str, first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text.lstrip(),
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _break_command(command: str, width: int) -> list[str]:
    """Before an option, so that what is copied still runs."""
    lines: list[str] = []
    for words in re.split(r" (?=-)", command):
        if lines and len(lines[-1]) + len(words) + 3 <= width:
            lines[-1] += f" {words}"
        else:
            lines.append(f"      {words}" if lines else words)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
