"""What measurements say of a device, by medians: up to half of those of a kind may be wild."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, log, log2
from statistics import median
from typing import NamedTuple

from conjoin.cost.classes import classes_of
from conjoin.cost.curves import Knots, Sample, fit_curves
from conjoin.cost.keys import read_key
from conjoin.cost.measurement import Measurement
from conjoin.cost.roofline import Roofline, efficiency_names
from conjoin.cost.timed_calls import MAX_BLOCK, block_size
from conjoin.cost.work import CallWork, Work, is_composed, is_in_eight_bits, kernel_counts, work_of
from conjoin.machine import DeviceType
from conjoin.ops import Call

_MIN_POINTS = 3
_TINY = 0.1
"""A call whose ideal seconds are below this share of what quick calls take shows little but overhead."""
_BOUNDS = (1e-3, 20.0)


class HostTime(NamedTuple):
    """Seconds of the host for a call that gives so many gradients, and for its backward."""

    name: str
    num_gradients: int
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What measurements say of a device."""

    efficiency: tuple[tuple[str, float], ...]
    overhead_seconds: float
    host_forward: float
    host_backward: float
    error: float
    """Median of how far the fitted roofline is off, as a factor less one: 0.2 is 20 % too high or too low."""
    curves: tuple[tuple[str, Knots], ...] = ()
    """What measured calls correct of the fitted roofline, by class."""
    host: tuple[HostTime, ...] = ()
    """What the host takes for calls, by operator, and by family for others."""


class _Known(NamedTuple):
    """A measured call and its work."""

    call: Call
    needs: tuple[int, ...]
    work: CallWork
    measured: Measurement


class _Point(NamedTuple):
    """One direction of a measured call."""

    known: _Known
    backward: bool
    work: Work
    seconds: float


def fit_efficiencies(measurements: Iterable[Measurement], device: DeviceType) -> Fit:
    """The overhead of tiny calls, for each family what share of the roofline it reaches, and what corrects that.

    The overhead is the median of the calls so small that their ideal seconds are a tenth of the lower quartile of all
    measured ones. An efficiency is the median of ideal seconds over measured ones less overhead, among the calls whose
    ideal seconds exceed the overhead. Calls are chosen by their work, never by what was measured. Operators that are
    many kernels are left out there: of one kernel they say nothing. Products in eight bits with their casts are
    compared with each other alone.
    """
    read = [one for one in map(_read, measurements) if one is not None]
    every = [one for one in read if not is_in_eight_bits(one.call)]
    known = [one for one in every if not is_composed(one.call.op)]
    points = [point for one in known for point in _points(one)]
    bare = Roofline.of(device)
    overhead = _fit_overhead(points, bare)
    shares: dict[str, list[float]] = defaultdict(list)
    for point in points:
        family, dtype = point.known.work.family, point.known.work.dtype
        ideal = bare.ideal(point.work, family, dtype)
        if ideal > overhead:
            share = ideal / max(point.seconds - overhead, ideal / _BOUNDS[1])
            names = efficiency_names(family, dtype, backward=point.backward)
            for name in islice(names, 2):  # those of its own direction
                shares[name].append(max(share, _BOUNDS[0]))
    efficiency = {name: median(found) for name, found in sorted(shares.items()) if len(found) >= _MIN_POINTS}
    fitted = Roofline(device, {**bare.efficiency, **efficiency}, overhead)
    forward = _middle(one.measured.host_forward for one in known)
    backward = _middle(one.measured.host_backward for one in known)
    error, reached = _error(points, fitted), tuple(efficiency.items())
    curves = fit_curves([_sample(point, fitted) for one in every for point in _points(one)])
    times = tuple(_host_times(read)) if device.kind == "cuda" else ()
    return Fit(reached, overhead, forward, backward, error, tuple(curves.items()), times)


def join_fits(before: Fit, own: Fit) -> Fit:
    """What own measurements say, and what was known before of families and operators that they say nothing of."""
    told = {_head(name) for name, _ in (*own.efficiency, *own.curves)}
    timed = {(time.name, time.num_gradients) for time in own.host}
    return replace(
        own,
        efficiency=(*(each for each in before.efficiency if _head(each[0]) not in told), *own.efficiency),
        curves=(*(each for each in before.curves if _head(each[0]) not in told), *own.curves),
        host=(*(time for time in before.host if (time.name, time.num_gradients) not in timed), *own.host),
        host_forward=own.host_forward or before.host_forward,
        host_backward=own.host_backward or before.host_backward,
    )


def _head(name: str) -> str:
    """The family or operator that an efficiency or a class is of.

    >>> _head("batch norm backward bfloat16 of 64 blocks by bytes")
    'batch norm'
    """
    return re.split(r" (?:backward|b?float\d+|complex\d+)\b", name)[0]


def _middle(seconds: Iterable[float]) -> float:
    return median([x for x in seconds if x > 0] or [0.0])


def _read(measurement: Measurement) -> _Known | None:
    read = read_key(measurement.key)
    return None if read is None else _Known(*read, work_of(*read), measurement)


def _points(known: _Known) -> list[_Point]:
    work, found = known.work, known.measured
    both = ((False, work.forward, found.forward), (True, work.backward, found.backward))
    return [_Point(known, way, each, seconds) for way, each, seconds in both if each and seconds > 0]


def _sample(point: _Point, fitted: Roofline) -> Sample:
    work = point.known.work
    what = point.work, work.family, work.dtype
    by_flops, rate = fitted.is_by_flops(*what), fitted.computed_in(work.dtype)
    classes = classes_of(point.known.call, work, rate, backward=point.backward, by_flops=by_flops)
    estimate = fitted.seconds(*what, backward=point.backward)
    return Sample(classes, log2(fitted.ideal(*what)), log2(point.seconds / estimate))


def _host_times(every: Iterable[_Known]) -> Iterator[HostTime]:
    """Medians by operator and number of gradients, and by family.

    Only of calls that were measured many together: one alone pays for the start of a backward pass, which whole models
    start once, and large ones wait for memory.
    """
    found: dict[tuple[str, int], list[Measurement]] = defaultdict(list)
    for call, needs, work, measured in every:
        if block_size(call, work, "cuda") == MAX_BLOCK:
            found[call.op, len(needs)].append(measured)
            if kernel_counts(call) == (1, 1):
                found[any_of(work.family), len(needs)].append(measured)
    for (name, count), those in sorted(found.items()):
        yield HostTime(name, count, median(m.host_forward for m in those), median(m.host_backward for m in those))


def any_of(family: str) -> str:
    """The name of operators of a family that nobody measured."""
    return f"any {family}"


def _fit_overhead(points: list[_Point], roofline: Roofline) -> float:
    if not points:
        return roofline.overhead
    low = sorted(point.seconds for point in points)[len(points) // 4]
    tiny = [p.seconds for p in points if roofline.ideal(p.work, p.known.work.family, p.known.work.dtype) <= _TINY * low]
    return median(tiny) if len(tiny) >= _MIN_POINTS else min(roofline.overhead, low)


def _error(points: list[_Point], roofline: Roofline) -> float:
    factors = [
        abs(log(roofline.seconds(p.work, p.known.work.family, p.known.work.dtype, backward=p.backward) / p.seconds))
        for p in points
    ]
    return exp(median(factors)) - 1 if factors else 0.0
