"""What the devices of the running ranks can do: peak rates, memory, and how near to the peaks operators come."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from conjoin.cli.host_speed import HostSpeed
from conjoin.cost import Measurement, Outcome, fit_efficiencies, mean_outcomes, measure
from conjoin.machine import DeviceType, Machine
from conjoin.ops import Call, TensorType, find_spec, flops, signature
from conjoin.runtime import Pace
from conjoin.sim import Wanted, measure_wanted

Measured = tuple[Call, tuple[int, ...]]
"""A call, and which of its operands get a gradient."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
"""Larger than caches: a copy reads and writes memory."""
_COPY_BLOCKS = 5
_RUNS = 24
"""What measuring takes, in forward passes: a warm-up and seven blocks, each with a backward pass twice as long."""
_SHARE = 0.05
"""Of the time, that one product may take before every family has had its turn."""
_FAST = 0.8
"""A half-precision type whose products are slower than this part of float32's is emulated, and nobody trains in it."""
_EFFICIENCY_BOUNDS = (1e-6, 10.0)
_HOST_BOUNDS = (0.05, 20.0)
_MATRICES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (128, 512, 2048, 4096, 8192)}
_SCALE = {"cpu": 1, "cuda": 16}
"""How much larger than on a CPU core the batches are that keep a device busy."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What one rank measured of its device, while all others measured theirs."""

    device: DeviceType
    """Without efficiencies."""
    measurements: tuple[Measurement, ...]
    host_factor: float = 1.0
    """How much longer the host of a GPU takes for the calls of a model than prices say."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The devices of a machine as measured: one of each rank, and how far their rooflines are off in the median."""

    devices: tuple[DeviceType, ...]
    error: float


def probe_devices(machine: Machine, pace: Pace, seconds: float) -> Speeds:
    """Measure all devices at once, in about the time given; all ranks call it and get the same answer."""
    return combine_probes(machine, _gather(_probe(machine, pace, seconds)))


def probe_wanted(wanted: Wanted, optimizer: str, machine: Machine, pace: Pace) -> dict[str, list[Outcome]]:
    """Measure calls and updates on all ranks at once: what was found, by the name of the device it is of."""
    by_device: dict[str, list[list[Outcome]]] = defaultdict(list)
    for rank, outcomes in enumerate(_gather(measure_wanted(wanted, optimizer, pace.device, pace))):
        by_device[machine.device_type(rank).name].append(outcomes)
    return {name: mean_outcomes(alike) for name, alike in by_device.items()}


def _gather(mine: Any) -> list[Any]:
    """What every rank has, on every rank."""
    if not dist.is_initialized():
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def combine_probes(machine: Machine, probes: Sequence[Probe]) -> Speeds:
    """The devices of all ranks; those of one kind are given what the median of them measured.

    Where the machine already says what its devices are, their peaks stay, and only efficiencies are new.
    """
    stated = [machine.device_type(rank) if machine.nodes else None for rank in range(machine.num_devices)]
    names = [probe.device.name if kind is None else kind.name for kind, probe in zip(stated, probes, strict=True)]
    fitted: dict[str, tuple[DeviceType, float]] = {}
    for name in dict.fromkeys(names):
        alike = [probe for found, probe in zip(names, probes, strict=True) if found == name]
        fitted[name] = _fit(stated[names.index(name)] or _middle_device(alike), alike)
    return Speeds(tuple(fitted[name][0] for name in names), max(error for _, error in fitted.values()))


def _fit(bare: DeviceType, probes: Sequence[Probe]) -> tuple[DeviceType, float]:
    found = fit_efficiencies(_middle_measurements(probes), bare)
    low, high = _EFFICIENCY_BOUNDS
    efficiency = tuple((family, min(max(share, low), high)) for family, share in found.efficiency)
    fitted = replace(bare, efficiency=efficiency, overhead_seconds=found.overhead_seconds)
    low, high = _HOST_BOUNDS
    host = min(max(median(probe.host_factor for probe in probes), low), high)
    return replace(fitted, host_factor=host), found.error


def _middle_device(probes: Sequence[Probe]) -> DeviceType:
    devices = [probe.device for probe in probes]
    rates = [dict(device.peak_flops) for device in devices]
    return replace(
        devices[0],
        memory_bytes=min(device.memory_bytes for device in devices),
        memory_bandwidth=median(device.memory_bandwidth for device in devices),
        peak_flops=tuple((dtype, median(rate[dtype] for rate in rates if dtype in rate)) for dtype in rates[0]),
    )


def _middle_measurements(probes: Sequence[Probe]) -> list[Measurement]:
    by_key: dict[str, list[Measurement]] = {}
    for measurement in (measurement for probe in probes for measurement in probe.measurements):
        by_key.setdefault(measurement.key, []).append(measurement)
    fields = ("forward", "backward", "host_forward", "host_backward", "spread")
    return [
        Measurement(key, *(median(getattr(measurement, field) for measurement in found) for field in fields))
        for key, found in by_key.items()
    ]


# One rank.


def _probe(machine: Machine, pace: Pace, seconds: float) -> Probe:
    kind = pace.device.type
    bandwidth = _copy_bandwidth(pace)
    timer = _Timer(pace, seconds)
    products = [_product(size, dtype) for dtype in _DTYPES for size in _MATRICES[kind]]
    late = timer.measure(products, _SHARE * seconds)
    halves = [torch.bfloat16] if timer.is_fast(torch.bfloat16) else []
    late += timer.measure(
        (call for dtype in (torch.float32, *halves) for call in _others(_SCALE[kind], dtype)), seconds
    )
    timer.measure(late, seconds)
    peaks = tuple((_name(dtype), timer.best_rates[dtype]) for dtype in _DTYPES if dtype in timer.best_rates)
    memory = _memory_bytes(machine, pace.device)
    device = DeviceType(_device_name(machine, pace.device), kind, memory, bandwidth, peaks)
    host_factor = HostSpeed(device, pace.device).read() if kind == "cuda" else 1.0
    return Probe(device, tuple(timer.measurements), host_factor)


class _Timer:
    """Measures calls while there is time; which ones are left out is the same on all ranks."""

    def __init__(self, pace: Pace, seconds: float) -> None:
        self._pace, self._end = pace, pace.elapsed() + seconds
        self._common_rates: dict[torch.dtype, float] = {}
        """Of the slowest rank, so that all foresee the same."""
        self.measurements: list[Measurement] = []
        self.best_rates: dict[torch.dtype, float] = {}
        """Floating-point operations per second in the best product of matrices."""

    def is_fast(self, dtype: torch.dtype) -> bool:
        return self._common_rates.get(dtype, 0.0) >= _FAST * self._common_rates[torch.float32]

    def measure(self, calls: Iterable[Measured], most_seconds: float) -> list[Measured]:
        """Measure the calls that take no longer than that and end in time; those that take longer are handed back."""
        late: list[Measured] = []
        for call, needs in calls:
            rate = self._common_rates.get(call.tensors[0].dtype)
            foreseen = _RUNS * _flops(call) / rate if rate else 0.0
            if foreseen > most_seconds:
                late.append((call, needs))
            elif rate is None or self._pace.elapsed() + foreseen < self._end:  # the first of a dtype in any case
                self._measure(call, needs)
        return late

    def _measure(self, call: Call, needs: tuple[int, ...]) -> None:
        outcome = measure(call, needs, self._pace.device, barrier=self._pace.together, slowest=self._pace.largest)
        seconds = outcome.forward if isinstance(outcome, Measurement) else 0.0
        slowest = self._pace.largest(seconds)[0]
        if isinstance(outcome, Measurement):
            self.measurements.append(outcome)
        if call.op == "mm" and seconds > 0:
            dtype, work = call.tensors[0].dtype, _flops(call)
            self.best_rates[dtype] = max(self.best_rates.get(dtype, 0.0), work / seconds)
            self._common_rates[dtype] = max(self._common_rates.get(dtype, 0.0), work / slowest)


def _flops(call: Call) -> float:
    spec = find_spec(call.op)
    assert spec is not None, call.op
    return flops(spec, call)


def _copy_bandwidth(pace: Pace) -> float:
    """Bytes read and written per second, all ranks copying at once."""
    source = torch.zeros(_COPY_BYTES[pace.device.type] // 4, device=pace.device)
    target = torch.ones_like(source)
    best = min(pace.time(lambda: target.copy_(source)) for _ in range(_COPY_BLOCKS))
    return 2 * source.nbytes / best


def _memory_bytes(machine: Machine, device: torch.device) -> int:
    """A GPU has its own memory; ranks on the CPU of one node share the node's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // machine.devices_per_node


def _device_name(machine: Machine, device: torch.device) -> str:
    """What tells devices of different speeds apart; ranks that share cores are slower than ranks that do not."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads, ranks = torch.get_num_threads(), machine.devices_per_node
    return f"{platform.machine() or 'unknown'} CPU, {os.cpu_count()} cores for {ranks} × {threads} threads"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# What is measured.


def _call(op: str, **given: Any) -> Call:
    """A call with the defaults of the operator for what is not given."""
    return Call(op, tuple(given.get(parameter.name, parameter.default) for parameter in signature(op).parameters))


def _product(size: int, dtype: torch.dtype) -> Measured:
    square = TensorType((size, size), dtype)
    return _call("mm", self=square, mat2=square), (0, 1)


def _others(scale: int, dtype: torch.dtype) -> Iterator[Measured]:
    """Some of every family, small first; enough of each for a median forward and one backward."""

    def tensor(*shape: int) -> TensorType:
        return TensorType(shape, dtype)

    for rows in (16 * scale, 128 * scale, 1024 * scale):
        row = tensor(rows, 512)
        yield _call("gelu", self=row), (0,)
        yield _call("add.Tensor", self=row, other=row), (0, 1)
        norm = tensor(512)
        yield _call("layer_norm", input=row, normalized_shape=(512,), weight=norm, bias=norm), (0, 1, 2)
        yield _call("softmax.int", self=row, dim=-1), (0,)
        indices = TensorType((rows,), torch.int64)
        yield _call("embedding", weight=tensor(4096, 512), indices=indices), (0,)
        yield _call("linear", input=row, weight=tensor(512, 512), bias=norm), (0, 1, 2)
    for batch in (scale, 4 * scale, 16 * scale):
        heads = tensor(batch, 4, 128, 32)
        yield _call("scaled_dot_product_attention", query=heads, key=heads, value=heads), (0, 1, 2)
        image, kernel = tensor(batch, 32, 28, 28), tensor(32, 32, 3, 3)
        yield _call("conv2d", input=image, weight=kernel, padding=(1, 1)), (0, 1)
