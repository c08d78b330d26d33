"""Conditions of rules as a reader would say them: `half of y.2 = half of z.2` is `y.2 = z.2`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SAME_OF = re.compile(r"(?P<what>half|piece) of (?P<one>.+) = (?P=what) of (?P<other>.+)")
_LEADING = re.compile(r"(?P<name>\w+)\.…")
_SAID = {
    "groups = groups": "as many groups on both sides",
    "piece of pool_kernel.0 = one": "each channel is a group",
}


def in_words(conditions: Iterable[str]) -> tuple[str, ...]:
    """The conditions in better words, each once.

    >>> in_words(["half of y.2 = half of z.2", "y.2 = z.2", "x.… = y.…"])
    ('y.2 = z.2', 'leading dims of x = leading dims of y')
    """
    return tuple(dict.fromkeys(map(_in_words, conditions)))


def _in_words(condition: str) -> str:
    found = _SAME_OF.fullmatch(condition)
    plain = f"{found['one']} = {found['other']}" if found else condition
    return _LEADING.sub(r"leading dims of \g<name>", _SAID.get(plain, plain))
