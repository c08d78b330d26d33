"""Every message to the user has three sentences: what was asked, why it cannot be, what to change."""

from __future__ import annotations

import re

_END = re.compile(r"[.?!](?=\s|$)|:(?=\n)")
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")


def num_sentences(message: str) -> int:
    """How many sentences a message has; dots in numbers, paths and quotes end none, a colon before a list ends one.

    >>> num_sentences("There is no file a.b/c.py:f. It takes 1.5 GiB of 'a. b'. Change these:\\n  the first")
    3
    """
    return len(_END.findall(_QUOTED.sub("_", message)))


def assert_three_sentences(error: object) -> None:
    """An error says what was asked, why it cannot be, and what to change."""
    assert num_sentences(str(error)) >= 3, str(error)
