"""Where the time of a step goes, on the device that is done last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjoin.cost import Source
from conjoin.sim.engine import COMPUTE, TICKS_PER_SECOND, Instruction, Phase, Ticks, Timeline


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one device; forward, backward, recompute, update, exposed and waiting make up the step."""

    forward: float
    backward: float
    recompute: float
    """Forward once more, for what was not kept."""
    update: float
    exposed: float
    """Communication during which nothing is computed."""
    waiting: float
    """Neither computing nor communicating: for a slower device, or for the host that launches."""
    hidden: float
    """Communication behind computation; not part of the sum."""
    collectives: tuple[tuple[str, tuple[str, ...], int, float, int], ...]
    """For every kind and axes: how many, their seconds, and the bytes that the busiest rank sends."""
    sources: tuple[tuple[Source, float], ...]
    """How many of the seconds computed, communicated and waited for the host come from where; hosts are estimated."""

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.recompute + self.update + self.exposed + self.waiting


def break_down(timeline: Timeline) -> Breakdown:
    """Where the time goes."""
    last = timeline.end
    which = tuple(map(int, np.unravel_index(np.argmax(last), np.shape(last))))
    spans = [(task, _of(start, which), _of(end, which)) for task, start, end in timeline.times()]
    computed = _union((start, end) for task, start, end in spans if task.stream == COMPUTE)
    communicated = _union((start, end) for task, start, end in spans if task.stream != COMPUTE)
    either = _union([*computed, *communicated])
    busy, talking, any_of_them = map(_length, (computed, communicated, either))
    phases = {phase: 0 for phase in Phase}
    for task, start, end in spans:
        if task.stream == COMPUTE:
            phases[task.phase] += end - start
    return Breakdown(
        forward=_seconds(phases[Phase.FORWARD]),
        backward=_seconds(phases[Phase.BACKWARD]),
        recompute=_seconds(phases[Phase.RECOMPUTE]),
        update=_seconds(phases[Phase.UPDATE]),
        exposed=_seconds(any_of_them - busy),
        waiting=_seconds(timeline.ticks - any_of_them),
        hidden=_seconds(talking - (any_of_them - busy)),
        collectives=_collectives(spans),
        sources=_sources(spans, _held_up(spans, either, which, timeline)),
    )


def computing_shares(timeline: Timeline) -> NDArray[np.float64]:
    """The share of the step in which a device computes, for every class of devices.

    >>> from conjoin.sim.engine import run
    >>> work = Instruction("work", COMPUTE, np.array([4, 1], np.int64))
    >>> computing_shares(run([(work,)], shape=(2,))).tolist()
    [1.0, 0.25]
    """
    total = np.zeros(np.shape(timeline.end), np.int64)
    for task, start, end in timeline.times():
        if task.stream == COMPUTE:
            total = total + (end - start)
    shares: NDArray[np.float64] = total / max(timeline.ticks, 1)
    return shares


Span = tuple[Instruction, int, int]


def _of(ticks: Ticks, which: tuple[int, ...]) -> int:
    """The time of one class of devices; an axis along which all have the same time has one entry.

    >>> _of(np.array([[3, 4]]), (1, 1)), _of(7, (1, 1))
    (4, 7)
    """
    if not isinstance(ticks, np.ndarray) or not ticks.ndim:
        return int(ticks)
    return int(ticks[tuple(at if size > 1 else 0 for at, size in zip(which, ticks.shape, strict=True))])


def _seconds(ticks: int) -> float:
    return ticks / TICKS_PER_SECOND


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same stretch of time as disjoint spans in order.

    >>> _union([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    found: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def _collectives(spans: Sequence[Span]) -> tuple[tuple[str, tuple[str, ...], int, float, int], ...]:
    totals: dict[tuple[str, tuple[str, ...]], list[Any]] = {}
    for task, start, end in spans:
        if task.stream != COMPUTE:
            entry = totals.setdefault((task.name, task.axes), [0, 0, 0])
            entry[0] += 1
            entry[1] += end - start
            entry[2] += task.sent
    return tuple((kind, axes, n, _seconds(ticks), sent) for (kind, axes), (n, ticks, sent) in totals.items())


def _held_up(spans: Sequence[Span], busy: Sequence[tuple[int, int]], which: tuple[int, ...], timeline: Timeline) -> int:
    """How long a device has nothing to do until its host has launched the next task, or is done."""
    launched, ends = 0, {timeline.ticks}
    for task, start, _ in spans:
        launched += _of(task.host, which)
        if start == launched:
            ends.add(start)
    gaps = zip((0, *(end for _, end in busy)), (*(start for start, _ in busy), timeline.ticks), strict=True)
    return sum(end - start for start, end in gaps if end in ends)


def _sources(spans: Sequence[Span], held_up: int) -> tuple[tuple[Source, float], ...]:
    """By source; the times of the host are of another host than the user's, or of none."""
    totals = dict.fromkeys(Source, 0)
    totals[Source.ESTIMATED] = held_up
    for task, start, end in spans:
        totals[task.source] += end - start
    return tuple((source, _seconds(ticks)) for source, ticks in totals.items())
