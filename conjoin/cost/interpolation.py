"""Seconds of a call between measured calls of its kind: log-log, along the roofline.

Measured seconds over estimated ones vary slowly with size, so the logarithm of this ratio is interpolated: between the
nearest measured call that should be faster and the nearest that should be slower, each weighed by the inverse of its
distance. Where calls differ in one size only, this is linear interpolation of log seconds against log roofline seconds.
Distance is counted in doublings: the sum over the sizes of the index space of |log2|. Beyond the measured range the
ratio of the nearest one is kept, and not far beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from operator import sub

BETWEEN = 6.0
"""Doublings from either side, where the call lies between two measured ones."""
BEYOND = 2.0
"""Doublings from the nearest measured call, where all lie on one side."""
_SAME = 1e-9
"""Sizes nearer than this, in doublings, are the same."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured call: log2 of its sizes, its estimated and its measured seconds."""

    sizes: tuple[float, ...]
    estimate: float
    seconds: float


def interpolate(points: Sequence[Point], sizes: tuple[float, ...], estimate: float) -> float | None:
    """Seconds of a call of these sizes and that estimate; None where nothing near enough was measured.

    >>> points = [Point((3.0,), 1.0, 2.0), Point((5.0,), 4.0, 32.0)]
    >>> interpolate(points, (4.0,), 2.0)
    8.0
    >>> interpolate(points, (10.0,), 128.0)
    """
    below = _nearest(points, sizes, estimate, -1)
    above = _nearest(points, sizes, estimate, 1)
    if below is not None and above is not None:
        near = [anchor for anchor in (below, above) if anchor[0] <= BETWEEN]
    else:
        near = [anchor for anchor in (below, above) if anchor is not None and anchor[0] <= BEYOND]
    if not near:
        return None
    exact = [anchor for anchor in near if anchor[0] < _SAME]
    weights = [1.0 if exact else 1.0 / distance for distance, _ in exact or near]
    ratios = [log(point.seconds / point.estimate) for _, point in exact or near]
    mean = sum(w * r for w, r in zip(weights, ratios, strict=True)) / sum(weights)
    return round(estimate * exp(mean), 15)


def _nearest(
    points: Sequence[Point], sizes: tuple[float, ...], estimate: float, side: int
) -> tuple[float, Point] | None:
    """The nearest point whose estimate is at most (-1) or at least (1) the one given, and how far it is."""
    best: tuple[float, Point] | None = None
    for point in points:
        if (point.estimate - estimate) * side >= 0 and point.seconds > 0 and point.estimate > 0:
            distance = sum(map(abs, map(sub, point.sizes, sizes)))
            if best is None or distance < best[0]:
                best = (distance, point)
    return best
