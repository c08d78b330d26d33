"""Seconds of a call estimated from its work: the roofline of a device, corrected by what each family reaches of it.

    seconds = max(flops / peak, bytes / bandwidth) / efficiency + overhead

Efficiencies have names from the general to the special: `contraction`, `contraction backward`, `contraction float32`,
`contraction backward float32`; the most special one that is known counts. They may exceed 1 where tensors fit the
device's caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from conjoin.cost.work import (
    ATTENTION,
    CONTRACTION,
    CONVOLUTION,
    ELEMENTWISE,
    LOOKUP,
    MOVEMENT,
    OPAQUE,
    RECURRENT,
    REDUCTION,
    VIEW,
    Work,
)
from conjoin.machine import DeviceType

DEFAULT_EFFICIENCY = {
    # Round figures of what library kernels commonly reach on large tensors; every fitted profile replaces them.
    CONTRACTION: 0.7, CONVOLUTION: 0.5, ATTENTION: 0.5, RECURRENT: 0.3, ELEMENTWISE: 0.8, REDUCTION: 0.6, LOOKUP: 0.4,
    MOVEMENT: 0.7, VIEW: 0.7, OPAQUE: 0.5,
}  # fmt: skip
DEFAULT_OVERHEAD = {"cuda": 2e-6, "cpu": 3e-6}
"""Seconds of a call on tiny tensors, where the device type does not say: a kernel's start and end; torch's dispatch."""
DEFAULT_HOST = {"cuda": (8e-6, 12e-6), "cpu": (0.0, 0.0)}
"""Seconds to launch one call and its backward from Python, where nothing was measured."""


_TENSOR_CORES = frozenset({CONVOLUTION, RECURRENT})
"""Families that torch by default runs on tensor cores in float32; matrix products only when the user allows it."""


AS_HALVES = {"tfloat32": "bfloat16", "float8": "bfloat16"}
"""Rates of tensor cores of which kernels reach such shares as they do of that for bfloat16, where they are products."""


def rate_name(family: str, dtype: str) -> str:
    """The name of the peak rate of a device that calls of a family are held against.

    >>> rate_name(CONVOLUTION, "float32"), rate_name(CONTRACTION, "float32")
    ('tfloat32', 'float32')
    """
    return "tfloat32" if dtype == "float32" and family in _TENSOR_CORES else dtype


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device's limits, and how near to them kernels come."""

    device: DeviceType
    efficiency: Mapping[str, float]
    overhead: float

    @classmethod
    def of(
        cls, device: DeviceType, efficiency: Mapping[str, float] | None = None, overhead: float | None = None
    ) -> Roofline:
        """That of a device type: by its own efficiencies and overhead where it was calibrated, else those given."""
        known = dict(device.efficiency) or efficiency or {}
        given = (device.overhead_seconds, overhead) if device.efficiency else (overhead, device.overhead_seconds)
        tiny = given[0] or given[1] or DEFAULT_OVERHEAD[device.kind]
        return cls(device, {**DEFAULT_EFFICIENCY, **known}, tiny)

    def computed_in(self, dtype: str) -> str:
        """The dtype in which a device computes: halves that it has no rate for it takes as float32."""
        return dtype if dtype in dict(self.device.peak_flops) or not dtype.endswith("float16") else "float32"

    def ideal(self, work: Work, family: str, dtype: str) -> float:
        """Seconds at full peak and bandwidth."""
        return max(self._limits(work, family, dtype))

    def is_by_flops(self, work: Work, family: str, dtype: str) -> bool:
        """Whether computing takes longer than moving."""
        computing, moving = self._limits(work, family, dtype)
        return computing > moving

    def _kernels(self, family: str, dtype: str) -> str:
        """The family, or that of plain products where a device has no tensor cores for it."""
        plain = dtype == "float32" and family in _TENSOR_CORES and "tfloat32" not in dict(self.device.peak_flops)
        return CONTRACTION if plain and self.device.kind == "cuda" else family

    def _limits(self, work: Work, family: str, dtype: str) -> tuple[float, float]:
        peak = self.device.flops_of(rate_name(family, dtype))
        return work.flops / peak, work.bytes / self.device.memory_bandwidth

    def seconds(self, work: Work, family: str, dtype: str, *, backward: bool = False) -> float:
        """Estimated seconds; no work takes none but what a CPU needs to make the call."""
        if not work:
            return self.overhead if self.device.kind == "cpu" else 0.0
        names = efficiency_names(self._kernels(family, dtype), AS_HALVES.get(dtype, dtype), backward=backward)
        reached = next(self.efficiency[name] for name in names if name in self.efficiency)
        return self.ideal(work, family, dtype) / reached + self.overhead


def efficiency_names(family: str, dtype: str, *, backward: bool) -> Iterator[str]:
    """The names under which an efficiency may be known, the most special one first.

    >>> list(efficiency_names("attention", "bfloat16", backward=True))
    ['attention backward bfloat16', 'attention backward', 'attention bfloat16', 'attention']
    """
    if backward:
        yield f"{family} backward {dtype}"
        yield f"{family} backward"
    yield f"{family} {dtype}"
    yield family
