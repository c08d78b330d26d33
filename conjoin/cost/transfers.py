"""Optimizer steps and copies between host and device: measured at a few sizes, interpolated between, else estimated.

An optimizer step is told by how many tensors and elements it updates, not by their shapes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median
from typing import Any, NamedTuple

import torch

from conjoin.cost.device_costs import DeviceCosts
from conjoin.cost.interpolation import Point, interpolate
from conjoin.cost.keys import MAX_ELEMENTS
from conjoin.cost.measurement import Measurement
from conjoin.cost.roofline import Roofline
from conjoin.cost.seconds import NO_SECONDS, Seconds, Source
from conjoin.cost.work import ELEMENTWISE, Work
from conjoin.errors import UsageError
from conjoin.ops import TensorType, dtype_name, parse_dtype

_REPEATS = 7
_COPY_BANDWIDTH = 25e9
"""Bytes per second between pinned host memory and a device, where nothing was measured: PCIe 4.0 with 16 lanes
transfers 32e9, of which copies reach some 80 %."""
_COPY_LATENCY = 10e-6


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How torch makes it, and how often its step passes over a tensor of the parameters' size.

    Passes count each read and each write of each kernel: unfused AdamW decays the weights (2), updates both averages
    (3 and 5), takes the root, divides and adds (6), and steps (4).
    """

    make: Callable[..., torch.optim.Optimizer]
    options: tuple[tuple[str, Any], ...]
    passes: int
    kernels: int
    host: tuple[float, float]
    """Microseconds of a GPU's host for a step, and more for every tensor: it sorts them, and makes lists of addresses.

    Of steps over small tensors on an H200 (its profile of 2026-11-16): the median over those of one tensor, and the
    median over 64, 256 and 1,024 tensors of what each adds."""


OPTIMIZERS = {
    "sgd": Optimizer(torch.optim.SGD, (), 3, 1, (74, 1.9)),
    "sgd-momentum": Optimizer(torch.optim.SGD, (("momentum", 0.9),), 8, 3, (107, 2.6)),
    "adam": Optimizer(torch.optim.Adam, (), 18, 7, (181, 13.1)),
    "adamw": Optimizer(torch.optim.AdamW, (), 20, 8, (231, 12.4)),
    "sgd-fused": Optimizer(torch.optim.SGD, (("fused", True),), 3, 1, (62, 1.2)),
    "sgd-momentum-fused": Optimizer(torch.optim.SGD, (("momentum", 0.9), ("fused", True)), 5, 1, (56, 1.6)),
    "adam-fused": Optimizer(torch.optim.Adam, (("fused", True),), 7, 1, (86, 3.5)),
    "adamw-fused": Optimizer(torch.optim.AdamW, (("fused", True),), 7, 1, (106, 3.3)),
}
"""Steps that can be priced, as torch runs them by default, or (`fused`) by one kernel."""


def update_key(optimizer: str, dtype: torch.dtype, num_tensors: int, num_elements: int) -> str:
    """The key of one optimizer step.

    >>> update_key("adamw", torch.float32, 2, 4096)
    'update adamw f32 2 tensors 4096 elements'
    """
    return f"update {optimizer} {dtype_name(dtype)} {num_tensors} tensors {num_elements} elements"


def copy_key(num_bytes: int) -> str:
    """The key of one copy."""
    return f"copy {num_bytes} bytes"


class Update(NamedTuple):
    """An optimizer step that was measured."""

    optimizer: str
    dtype: torch.dtype
    num_tensors: int
    num_elements: int


def read_update(key: str) -> Update | None:
    """The step that a key names; None where it names none.

    >>> read_update("update adamw f32 2 tensors 4096 elements").num_elements
    4096
    """
    match key.split():
        case ["update", name, kind, tensors, "tensors", elements, "elements"]:
            counts, dtype = (_read_count(tensors), _read_count(elements)), _read_dtype(kind)
            if min(counts) >= 0 and dtype is not None:
                return Update(name, dtype, *counts)
    return None


def read_copy(key: str) -> int | None:
    """The bytes of the copy that a key names; None where it names none."""
    match key.split():
        case ["copy", count, "bytes"] if _read_count(count) >= 0:
            return _read_count(count)
    return None


def is_damaged(key: str) -> bool:
    """Whether a key begins as that of an optimizer step or a copy, and names none."""
    word = key.partition(" ")[0]
    return (word == "update" and read_update(key) is None) or (word == "copy" and read_copy(key) is None)


def _read_dtype(text: str) -> torch.dtype | None:
    try:
        return parse_dtype(text)
    except ValueError:
        return None


def _read_count(text: str) -> int:
    """A count of things that fit a machine; -1 for all else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ELEMENTS)) - 1 else -1


def update_seconds(parameters: Sequence[TensorType], optimizer: str, costs: DeviceCosts) -> Seconds:
    """Seconds of one step over the parameters, dtype by dtype."""
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"The seconds of a step of the optimizer {optimizer[:60]!r} were asked for. Known are "
            f"{', '.join(OPTIMIZERS)}. Name one of them."
        )
    groups: dict[torch.dtype, list[TensorType]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.dtype].append(parameter)
    total = NO_SECONDS
    for dtype, group in groups.items():
        total += _group_seconds(optimizer, dtype, len(group), sum(t.num_elements for t in group), costs)
    return total


def _group_seconds(
    optimizer: str, dtype: torch.dtype, num_tensors: int, num_elements: int, costs: DeviceCosts
) -> Seconds:
    key = update_key(optimizer, dtype, num_tensors, num_elements)
    estimate = _estimate(optimizer, dtype, num_tensors, num_elements, costs.roofline, costs.device.host_factor)
    points: list[Point] = []
    others: list[Point] = []
    for known in costs.keys_of("update"):
        step = read_update(known)
        if step is not None and step.optimizer == optimizer:
            near = _estimate(*step, costs.roofline)
            found = points if step.dtype == dtype else others
            found.append(Point(_logs(step.num_tensors, step.num_elements), near, costs.measured[known].forward))
    corrected = estimate * _ratio_of_largest(points or others)
    return _choose(costs, key, points, _logs(num_tensors, num_elements), estimate, corrected)


def _ratio_of_largest(points: Sequence[Point]) -> float:
    """How far the estimate is off for the largest that was measured: larger ones are as bound by memory."""
    largest = max(points, key=lambda point: (point.sizes[-1], point.estimate), default=None)
    return 1.0 if largest is None or not largest.estimate else largest.seconds / largest.estimate


def _estimate(
    optimizer: str, dtype: torch.dtype, num_tensors: int, num_elements: int, roofline: Roofline, host: float = 1.0
) -> float:
    """By bytes moved, and on a GPU no less than its host takes to launch it.

    A CPU makes every call for every tensor, a CUDA device takes tensors together.
    """
    how = OPTIMIZERS[optimizer]
    work = Work(float(how.kernels * num_elements), float(how.passes * num_elements * dtype.itemsize))
    calls = how.kernels * (num_tensors if roofline.device.kind == "cpu" else 1 + num_tensors // 64)
    name = str(dtype).removeprefix("torch.")
    seconds = roofline.seconds(work, ELEMENTWISE, name) + (calls - 1) * roofline.overhead
    fixed, each = how.host
    launching = 0.0 if roofline.device.kind == "cpu" else host * (fixed + each * num_tensors) * 1e-6
    return max(seconds, launching)


def copy_seconds(num_bytes: int, costs: DeviceCosts) -> Seconds:
    """Seconds of one copy between pinned host memory and the device."""
    points = []
    for known in costs.keys_of("copy"):
        count = read_copy(known)
        if count is not None:
            points.append(Point(_logs(count), _copy_estimate(count), costs.measured[known].forward))
    estimate = _copy_estimate(num_bytes)
    corrected = estimate * _ratio_of_largest(points)
    return _choose(costs, copy_key(num_bytes), points, _logs(num_bytes), estimate, corrected)


def _copy_estimate(num_bytes: int) -> float:
    return _COPY_LATENCY + num_bytes / _COPY_BANDWIDTH


def _logs(*counts: int) -> tuple[float, ...]:
    return tuple(log2(max(count, 1)) for count in counts)


def _choose(
    costs: DeviceCosts,
    key: str,
    points: list[Point],
    sizes: tuple[float, ...],
    estimate: float,
    otherwise: float,
) -> Seconds:
    if key in costs.measured:
        return Seconds(costs.measured[key].forward, Source.MEASURED)
    value = interpolate(points, sizes, estimate)
    return Seconds(otherwise, Source.ESTIMATED) if value is None else Seconds(value, Source.INTERPOLATED)


def measure_update(
    optimizer: str, dtype: torch.dtype, num_tensors: int, num_elements: int, device: str | torch.device
) -> Measurement:
    """Median seconds of a step over equal tensors, with all it does on the host: a step is made once an iteration."""
    how, place = OPTIMIZERS[optimizer], torch.device(device)
    sizes = [len(part) for part in torch.arange(num_elements).tensor_split(num_tensors)]
    parameters = [torch.zeros(size, dtype=dtype, device=place, requires_grad=True) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    step = how.make(parameters, lr=1e-3, **dict(how.options)).step
    seconds = _time(step, place)
    return Measurement(update_key(optimizer, dtype, num_tensors, num_elements), seconds, 0.0)


def measure_copy(num_bytes: int, device: str | torch.device) -> Measurement:
    """Median seconds of a copy from pinned memory to a CUDA device or back, the slower of the two."""
    place = torch.device(device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=place)
    there_seconds = _time(lambda: there.copy_(host, non_blocking=True), place)
    back_seconds = _time(lambda: host.copy_(there, non_blocking=True), place)
    return Measurement(copy_key(num_bytes), max(there_seconds, back_seconds), 0.0)


def _time(act: Callable[[], object], device: torch.device) -> float:
    """The median of some runs, each waited for."""
    times = []
    for _ in range(_REPEATS + 2):
        _settle(device)
        start = time.perf_counter()
        act()
        _settle(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
