"""Kinds of devices: how fast they compute and read memory, and how much of it they have."""

from __future__ import annotations

from dataclasses import dataclass

from conjoin.errors import UsageError
from conjoin.machine.limits import check_device, check_label, shown, suggestion
from conjoin.machine.quantities import FACTOR, FRACTION, GIGABYTES, GIGABYTES_PER_SECOND, MICROSECONDS, TERAFLOPS

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "int8")
"""Types that data sheets give rates for; tfloat32 is float32 on tensor cores."""
MAX_FAMILIES = 100


@dataclass(frozen=True, slots=True)
class DeviceType:
    """One kind of device; rates are peaks, `efficiency` says which part of them an operator family reaches.

    >>> device = DeviceType("V100-SXM2-16GB", "cuda", 16 * 2**30, 900e9, (("float32", 15.7e12),))
    >>> device.flops_of("float32"), device.flops_of("float64")
    (15700000000000.0, 7850000000000.0)
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bandwidth: float
    """Bytes per second."""
    peak_flops: tuple[tuple[str, float], ...]
    """Floating-point operations per second by the name of the type."""
    efficiency: tuple[tuple[str, float], ...] = ()
    overhead_seconds: float = 0.0
    """What a call costs however small it is."""
    host_factor: float = 1.0
    """How long its host takes to make a call, of what the host takes that prices of such devices were measured with."""

    def __post_init__(self) -> None:
        check_label("name of a device type", self.name)
        check_device(self.kind)
        _check_whole(self.name, self.memory_bytes)
        GIGABYTES.check(f"memory of {self.name}", self.memory_bytes)
        GIGABYTES_PER_SECOND.check(f"memory bandwidth of {self.name}", self.memory_bandwidth)
        MICROSECONDS.check(f"overhead of {self.name}", self.overhead_seconds)
        FACTOR.check(f"host factor of {self.name}", self.host_factor)
        check_dtypes(self.name, [dtype for dtype, _ in self.peak_flops])
        for dtype, flops in self.peak_flops:
            TERAFLOPS.check(f"rate of {self.name} for {dtype}", flops)
        for family, fraction in self.efficiency:
            check_label(f"operator family in the efficiency of {self.name}", family)
            FRACTION.check(f"efficiency of {self.name} for {family}", fraction)

    def flops_of(self, dtype_name: str) -> float:
        """The peak rate for a type; one that is not listed runs like float32, of 64 bits or more at half of that."""
        rates = dict(self.peak_flops)
        name = "float8" if dtype_name.startswith("float8") else dtype_name
        if name in rates:
            return rates[name]
        return rates["float32"] / 2 if name.endswith("64") or name.endswith("128") else rates["float32"]


def check_dtypes(name: str, dtypes: list[str]) -> None:
    """Refuse types without a known name, twice the same one, and a device without a rate for float32."""
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown:
        raise UsageError(
            f"The device type {name} has a rate for {shown(unknown[0])}. Rates are given for {', '.join(DTYPES)}. "
            f"{suggestion(unknown[0], DTYPES)}"
        )
    if len(set(dtypes)) < len(dtypes):
        raise UsageError(
            f"The device type {name} gives a rate twice. Every type has one rate. Leave out all but one of them."
        )
    if "float32" not in dtypes:
        raise UsageError(
            f"The device type {name} has no rate for float32. Types that are not listed are reckoned from it. "
            f"Add one, as teraflops = {{float32 = 19.5}}."
        )


def _check_whole(name: str, memory_bytes: object) -> None:
    if type(memory_bytes) is not int:
        raise UsageError(
            f"The memory of {name} is {shown(memory_bytes)}. It is counted in bytes. Give a whole number of them."
        )
