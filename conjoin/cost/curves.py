"""What measured calls say about calls that nobody measured: how far seconds are from an estimate, as curves over size.

A call belongs to classes from the general to the special: its family, its dtype, the class of its shape and what bounds
it, its operator (`classes.py`). Every class has a curve over the size of calls, log2 of their ideal seconds: the median
in every octave of what the classes before it leave unexplained, and less of it where few measurements say so. An
operator's voice in that grows as the root of how often it was measured, and where a class has several operators an
octave of one alone says nothing, nor one of far fewer than other octaves have: it would tell what those few are like
and not what their size does. What is known of a class corrects an estimate; what is not known leaves it as it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import floor, sqrt
from statistics import median
from typing import NamedTuple

import numpy as np

_MIN_POINTS = 3
"""Measurements in an octave that are worth a knot of their own; a class with fewer in all has one knot."""
_FEW = 8
"""Of as many operators as the fullest octave has this part, at least, is to be heard in another."""
_DOUBT = 1
"""As many measurements as are added in favour of what was believed before."""

Knots = tuple[tuple[float, float], ...]
"""Log2 of ideal seconds, ascending, and log2 of the factor there."""


class Sample(NamedTuple):
    """A measured call: its classes from the general to the special, its size, and log2 of measured over estimated."""

    classes: tuple[str, ...]
    size: float
    off: float


class Curves:
    """Corrections of estimates by class.

    >>> curves = Curves({"relu": ((0.0, 1.0), (2.0, 0.0))})
    >>> curves.factor(("elementwise", "relu"), 1.0), curves.factor(("elementwise",), 1.0)
    (1.4142135623730951, 1.0)
    """

    def __init__(self, knots: Mapping[str, Knots]) -> None:
        self._lines = {name: tuple(np.array(line).T) for name, line in knots.items()}

    def know(self, classes: Iterable[str]) -> bool:
        """Whether there is anything to correct."""
        return any(name in self._lines for name in classes)

    def factor(self, classes: Iterable[str], size: float) -> float:
        """What to multiply the estimate of a call of this size by."""
        return float(2 ** sum(np.interp(size, *self._lines[name]) for name in classes if name in self._lines))


def fit_curves(samples: Sequence[Sample]) -> dict[str, Knots]:
    """The curves of all classes, the general ones first: each explains what those before it did not."""
    found: dict[str, Knots] = {}
    left = [sample.off for sample in samples]
    for level in range(max((len(sample.classes) for sample in samples), default=0)):
        members: dict[str, list[int]] = defaultdict(list)
        for i, sample in enumerate(samples):
            if level < len(sample.classes):
                members[sample.classes[level]].append(i)
        for name, those in members.items():
            found[name] = knots = _knots([_Point(samples[i].classes[-1], samples[i].size, left[i]) for i in those])
            line = np.array(knots).T
            for i in those:
                left[i] -= float(np.interp(samples[i].size, *line))
    return found


class _Point(NamedTuple):
    operator: str
    size: float
    left: float


def _knots(points: list[_Point]) -> Knots:
    octaves: dict[int, list[_Point]] = defaultdict(list)
    for point in points:
        octaves[floor(point.size)].append(point)
    several = len({point.operator for point in points}) > 1
    full = [octaves[key] for key in sorted(octaves) if len(octaves[key]) >= _MIN_POINTS]
    heard = [len({point.operator for point in part}) for part in full]
    least = max(2, max(heard, default=0) / _FEW) if several else 1
    told = [part for part, count in zip(full, heard, strict=True) if count >= least]
    return tuple(_knot(part) for part in told or full or [points])


def _knot(part: list[_Point]) -> tuple[float, float]:
    voices: dict[str, list[float]] = defaultdict(list)
    for point in part:
        voices[point.operator].append(point.left)
    middle = _weighted_median([(median(those), sqrt(len(those))) for those in voices.values()])
    return round(median(point.size for point in part), 3), round(middle * len(part) / (len(part) + _DOUBT), 4)


def _weighted_median(found: list[tuple[float, float]]) -> float:
    """The value below and above which there is half of the weight."""
    ordered = sorted(found)
    passed = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(passed, passed[-1] / 2)][0]
