"""Errors that are the user's to mend: shown as one message, without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Wrong input; the message says what, expected against got, and what to do."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Give the end of an unknown-name message: the nearest valid name, if any, then all."""
    names = list(valid)
    if not names:
        return ""
    close = difflib.get_close_matches(name, names, n=1)
    hint = f": did you mean {close[0]!r}?" if close else "."
    return f"{hint} Valid: {', '.join(names)}"
