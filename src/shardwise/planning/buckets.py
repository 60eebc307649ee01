"""Grouping by bytes: small things travel together until they are worth a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def group_by_bytes(
    items: Iterable[Item], size: Callable[[Item], int], limit: int
) -> list[list[Item]]:
    """Cut `items`, in order, into runs of at most `limit` bytes. An item above the limit is a run
    of its own.
    """
    groups: list[list[Item]] = []
    held = 0
    for item in items:
        nbytes = size(item)
        if groups and held + nbytes <= limit:
            groups[-1].append(item)
            held += nbytes
        else:
            groups.append([item])
            held = nbytes
    return groups
