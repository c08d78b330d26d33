"""Which patterns a program has, and small programs that have them all: `python -m tests.fuzz --cover 2400`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from tests.fuzz.programs import Program
from tests.fuzz.random_models import CASTS, CHECKS, HEADS, PATTERNS, WRITES

LEAST = 8
"""A line that nobody wrote down as a pattern is asked for where so many programs have one of its form."""
LENGTH = 1.6
"""A program counts as this power of its lines: so twice as many take a fifth longer than the fewest that have them."""


def form(line: str) -> str:
    """A line without its names and numbers.

    >>> form("h3 = self.l1(h2).narrow(-1, 0, 2)")
    '_(_).narrow(#)'
    """
    line = re.sub(r"^h\d+ = ", "", line.strip())
    line = re.sub(r"\bself\.[a-z]\d+|\b[hx]\d+\b", "_", line)
    line = re.sub(r"torch\.(float32|float64|bfloat16)", "dtype", re.sub(r"-?\b\d+(\.\d+)?\b", "#", line))
    return re.sub(r"(#, )+#", "#", line)


def forms(program: Program) -> frozenset[str]:
    """Of all lines of a model, those that make its parts too."""
    made, called = program.text.split("super().__init__()")[1].split("def forward(")
    body = called.split("def batch()")[0].splitlines()[1:]
    return frozenset(form(line) for line in (*made.splitlines(), *body) if line.strip())


def patterns() -> dict[str, str]:
    """The form of every pattern, by the pattern."""
    filled = {"x": "x1", "y": "x1", "h": "h1", "b": "h1", "i": "h1", "c": "1", "d": "1", "e": "1", "n": "1"}
    filled |= {"l": "self.l1", "o": "self.l1", "w": "self.w1"}
    listed = (*(pattern for _, family in PATTERNS for pattern in family), *CASTS, *CHECKS, *WRITES, *HEADS)
    return {pattern: form(pattern.format(**filled)) for pattern in listed}


def small_cover(drawn: Mapping[int, frozenset[str]]) -> list[int]:
    """Seeds that have every pattern that any has, and what many have beside; where more is new for a line, first."""
    often = Counter(found for has in drawn.values() for found in has)
    listed = set(patterns().values())
    missing = {found for found, count in often.items() if found in listed or count >= LEAST}
    taken: list[int] = []
    while missing:
        best = max(drawn, key=lambda seed: len(drawn[seed] & missing) / len(drawn[seed]) ** LENGTH)
        taken.append(best)
        missing -= drawn[best]
    return sorted(taken)
