"""From timed collectives to α and β: the line `seconds = α + β · bytes sent` that no stray measurement moves.

Small messages cost microseconds and large ones milliseconds, so errors count relative to the time measured: the line
minimises Σ √yᵢ ρ((α + β·xᵢ) / yᵢ − 1) over α, β ≥ 0, where ρ is Huber's loss (`_robust_line`, by reweighted least
squares, each solved in `_weighted_line`). Times of one size are first reduced to their median (`reduce_repeats`): what
disturbs half of the measurements disturbs training too. Libraries switch protocols between small and large messages;
where one line misses a point by more than a fifth, two lines with a break between them are tried (`fit_collective`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median

COLLECTIVE_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "exchange")
"""What is calibrated; an exchange is an all-to-all in which only neighbours send to each other."""
_HUBER = 1.345
"""In units of the spread: 95 % as sharp as plain least squares where the noise is normal (Huber 1964)."""
_MAD_TO_SPREAD = 1.4826
_LEAST_SPREAD = 1e-3
"""Clocks and schedulers leave at least a thousandth of noise; below it no point is called an outlier."""
_ROUNDS = 50
_TOLERATED_ERROR = 0.2
_LEAST_POINTS = 3
"""Sizes on each side of a break: two points always lie on a line, and would prove nothing."""
_WORTHWHILE = 0.5
"""A break has to halve the mean error, else it follows the noise."""


@dataclass(frozen=True, slots=True)
class LineFit:
    """A line through timed sizes: `latency` + `seconds_per_byte` · size, and how well it holds."""

    latency: float
    seconds_per_byte: float
    r_squared: float
    errors: tuple[float, ...]
    """Fitted over measured, minus 1, for each distinct size in ascending order."""

    def seconds(self, size: float) -> float:
        """The time the line gives for a size."""
        return self.latency + self.seconds_per_byte * size

    @property
    def worst_error(self) -> float:
        """The largest relative distance from a measured point."""
        return max(map(abs, self.errors))


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """What one collective over one set of mesh axes costs: α + β · bytes sent by the busiest rank.

    Messages of fewer than `break_bytes` go by a line of their own; 0 means that one line holds for all sizes.

    >>> fit = CollectiveFit("all-reduce", ("d0",), 1e-4, 1e-9, 0.99, break_bytes=1000, small_latency=2e-5)
    >>> fit.seconds(999), fit.seconds(1_000_000)
    (2e-05, 0.0011)
    """

    kind: str
    axes: tuple[str, ...]
    latency: float
    seconds_per_byte: float
    r_squared: float
    break_bytes: int = 0
    small_latency: float = 0.0
    small_seconds_per_byte: float = 0.0

    def seconds(self, sent: float) -> float:
        """How long it takes when the busiest rank sends this many bytes."""
        if sent < self.break_bytes:
            return self.small_latency + self.small_seconds_per_byte * sent
        return self.latency + self.seconds_per_byte * sent


def reduce_repeats(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Each distinct size once, in ascending order, with the median of its times.

    >>> reduce_repeats([(8, 5.0), (4, 1.0), (8, 3.0), (8, 90.0)])
    ((4, 1.0), (8, 5.0))
    """
    times: dict[float, list[float]] = {}
    for size, seconds in points:
        times.setdefault(size, []).append(seconds)
    return tuple((size, median(found)) for size, found in sorted(times.items()))


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """The line that most of the measurements lie on, both ends of it at or above zero; sizes may repeat.

    >>> fit = fit_line([0, 1000, 2000, 3000], [1e-3, 2e-3, 3e-3, 4e-3])
    >>> round(fit.latency, 9), round(fit.seconds_per_byte, 12), round(fit.worst_error, 9)
    (0.001, 1e-06, 0.0)
    """
    assert len(sizes) == len(seconds) > 0, (len(sizes), len(seconds))
    assert min(seconds) > 0 and min(sizes) >= 0
    points = reduce_repeats(zip(sizes, seconds, strict=True))
    latency, slope = _robust_line(points)
    errors = tuple((latency + slope * x) / y - 1 for x, y in points)
    return LineFit(latency, slope, _r_squared([(latency + slope * x, y) for x, y in points]), errors)


def _robust_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Relative errors count, those of long transfers more: they are most of a step, and are disturbed least."""
    importance = [sqrt(y) for _, y in points]
    line = _weighted_line(points, importance)
    for _ in range(_ROUNDS):
        errors = [abs((line[0] + line[1] * x) / y - 1) for x, y in points]
        near = _HUBER * max(_MAD_TO_SPREAD * median(errors), _LEAST_SPREAD)
        weights = [w if error <= near else w * near / error for w, error in zip(importance, errors, strict=True)]
        line = _weighted_line(points, weights)
    return line


def _weighted_line(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Minimise Σ w ((α + β·x) / y − 1)² over α, β ≥ 0: inside, else on the better of the two borders."""
    rows = [(1 / y, x / y, w) for (x, y), w in zip(points, weights, strict=True)]
    aa, ab, bb = (sum(w * p * q for p, q, w in ((r[i], r[j], r[2]) for r in rows)) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency, slope = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if latency >= 0 and slope >= 0:
            return latency, slope
    borders = [(a1 / aa, 0.0), (0.0, b1 / bb if bb else 0.0)]
    return min(borders, key=lambda line: sum(w * (line[0] * p + line[1] * q - 1) ** 2 for p, q, w in rows))


def _r_squared(pairs: Sequence[tuple[float, float]]) -> float:
    """The share of the variation of the times that the fitted ones explain, at least 0; 1 where nothing varies."""
    mean = fmean(y for _, y in pairs)
    left, total = sum((f - y) ** 2 for f, y in pairs), sum((y - mean) ** 2 for _, y in pairs)
    if total <= (1e-9 * mean) ** 2 * len(pairs):
        return 1.0
    return max(0.0, 1 - left / total)


def fit_collective(kind: str, axes: tuple[str, ...], points: Sequence[tuple[float, float]]) -> CollectiveFit:
    """α and β of a collective from (bytes sent, seconds); small messages get a line of their own where one misses them.

    >>> fit = fit_collective("all-gather", ("n0",), [(x, 1e-5 + x * 1e-9) for x in (256, 4096, 65536)])
    >>> f"{fit.latency:.1e} {fit.seconds_per_byte:.1e} {fit.break_bytes}"
    '1.0e-05 1.0e-09 0'
    """
    reduced = reduce_repeats(points)
    whole = _line_through(reduced)
    if whole.worst_error <= _TOLERATED_ERROR:
        return CollectiveFit(kind, axes, whole.latency, whole.seconds_per_byte, whole.r_squared)
    found = _best_break(reduced)
    if found is None or _mean_error(*found) > _WORTHWHILE * _mean_error(whole):
        return CollectiveFit(kind, axes, whole.latency, whole.seconds_per_byte, whole.r_squared)
    small, large = found
    first_large = reduced[len(small.errors)][0]
    fitted = [(small.seconds(x) if x < first_large else large.seconds(x), y) for x, y in reduced]
    return CollectiveFit(
        kind, axes, large.latency, large.seconds_per_byte, _r_squared(fitted),
        int(first_large), small.latency, small.seconds_per_byte,
    )  # fmt: skip


def _line_through(points: Sequence[tuple[float, float]]) -> LineFit:
    return fit_line([x for x, _ in points], [y for _, y in points])


def _best_break(points: Sequence[tuple[float, float]]) -> tuple[LineFit, LineFit] | None:
    """The two lines that together lie closest, each through enough sizes; None where there are too few for two.

    The two largest sizes may stand alone where bytes get slower: memory runs short there, and no larger ones are timed.
    """
    best, least = None, inf
    for cut in range(_LEAST_POINTS, len(points) - 1):
        small, large = _line_through(points[:cut]), _line_through(points[cut:])
        enough = len(large.errors) >= _LEAST_POINTS or large.seconds_per_byte > small.seconds_per_byte
        if enough and _mean_error(small, large) < least:
            best, least = (small, large), _mean_error(small, large)
    return best


def _mean_error(*lines: LineFit) -> float:
    return fmean(abs(error) for line in lines for error in line.errors)
