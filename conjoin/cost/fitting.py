"""Efficiencies of a device from measurements of it, by medians: up to half of those of a kind may be wild."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from math import exp, log
from statistics import median

from conjoin.cost.keys import read_key
from conjoin.cost.measurement import Measurement
from conjoin.cost.roofline import Roofline, efficiency_names
from conjoin.cost.work import LAUNCHES, Work, work_of
from conjoin.machine import DeviceType

_MIN_POINTS = 3
_TINY = 0.1
"""A call whose ideal seconds are below this share of what quick calls take shows little but overhead."""
_BOUNDS = (1e-3, 20.0)


@dataclass(frozen=True, slots=True)
class Fit:
    """What measurements say of a device."""

    efficiency: tuple[tuple[str, float], ...]
    overhead_seconds: float
    host_forward: float
    host_backward: float
    error: float
    """Median of how far the fitted roofline is off, as a factor less one: 0.2 is 20 % too high or too low."""


@dataclass(frozen=True, slots=True)
class _Point:
    family: str
    dtype: str
    backward: bool
    work: Work
    seconds: float


def fit_efficiencies(measurements: Iterable[Measurement], device: DeviceType) -> Fit:
    """The overhead of tiny calls, and for each family what share of the roofline it reaches.

    The overhead is the median of the calls so small that their ideal seconds are a tenth of the lower quartile of all
    measured ones. An efficiency is the median of ideal seconds over measured ones less overhead, among the calls whose
    ideal seconds exceed the overhead. Calls are chosen by their work, never by what was measured. Operators that are
    many kernels are left out: of one kernel they say nothing.
    """
    known = [measurement for measurement in measurements if _is_one_kernel(measurement)]
    points = [point for measurement in known for point in _points(measurement)]
    bare = Roofline.of(device)
    overhead = _fit_overhead(points, bare)
    shares: dict[str, list[float]] = defaultdict(list)
    for point in points:
        ideal = bare.ideal(point.work, point.family, point.dtype)
        if ideal > overhead:
            share = ideal / max(point.seconds - overhead, ideal / _BOUNDS[1])
            names = efficiency_names(point.family, point.dtype, backward=point.backward)
            for name in islice(names, 2):  # those of its own direction
                shares[name].append(max(share, _BOUNDS[0]))
    efficiency = {name: median(found) for name, found in sorted(shares.items()) if len(found) >= _MIN_POINTS}
    fitted = Roofline(device, {**bare.efficiency, **efficiency}, overhead)
    host = [[getattr(m, name) for m in known if getattr(m, name) > 0] for name in ("host_forward", "host_backward")]
    forward, backward = (median(found) if found else 0.0 for found in host)
    return Fit(tuple(efficiency.items()), overhead, forward, backward, _error(points, fitted))


def _is_one_kernel(measurement: Measurement) -> bool:
    read = read_key(measurement.key)
    return read is None or read[0].op not in LAUNCHES


def _points(measurement: Measurement) -> list[_Point]:
    read = read_key(measurement.key)
    if read is None:
        return []
    work = work_of(*read)
    both = ((False, work.forward, measurement.forward), (True, work.backward, measurement.backward))
    return [_Point(work.family, work.dtype, way, each, seconds) for way, each, seconds in both if each and seconds > 0]


def _fit_overhead(points: list[_Point], roofline: Roofline) -> float:
    if not points:
        return roofline.overhead
    low = sorted(point.seconds for point in points)[len(points) // 4]
    tiny = [p.seconds for p in points if roofline.ideal(p.work, p.family, p.dtype) <= _TINY * low]
    return median(tiny) if len(tiny) >= _MIN_POINTS else min(roofline.overhead, low)


def _error(points: list[_Point], roofline: Roofline) -> float:
    estimates = ((roofline.seconds(p.work, p.family, p.dtype, backward=p.backward), p.seconds) for p in points)
    factors = [abs(log(estimate / seconds)) for estimate, seconds in estimates]
    return exp(median(factors)) - 1 if factors else 0.0
