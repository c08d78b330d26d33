"""Devices that people have, from the vendors' data sheets.

Rates are dense peaks, without sparsity, at boost clocks, of the fastest units that torch uses unasked: tensor cores for
float64 from the A100 on, for float32 only as tfloat32. Memory is what torch sees, which is less than the data sheet's
figure: of 141 GB 139.8 GiB; the least that error messages about full memory show in public issues is taken ("GPU 0 has
a total capacity of 79.14 GiB"). What a call costs no data sheet says: that is a round number, which calibration
replaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2

from conjoin.machine.devices import DeviceType

GB = 1e9
GIB = 2**30
CUDA_CALL_SECONDS = 3e-6
CPU_CALL_SECONDS = 2e-6


def _gpu(name: str, memory_gib: float, bandwidth: float, **teraflops: float) -> DeviceType:
    rates = tuple((dtype, rate * 1e12) for dtype, rate in teraflops.items())
    return DeviceType(name, "cuda", round(memory_gib * GIB), bandwidth, rates, overhead_seconds=CUDA_CALL_SECONDS)


V100 = _gpu("V100-SXM2-16GB", 15.77, 900 * GB, float64=7.8, float32=15.7, float16=125.0)
P100 = _gpu("P100-SXM2-16GB", 15.9, 732 * GB, float64=5.3, float32=10.6, float16=21.2)
P100_PCIE = _gpu("P100-PCIe-16GB", 15.9, 732 * GB, float64=4.7, float32=9.3, float16=18.7)
# The data sheet gives a board of two GPUs; a device is one, so half of it.
K80 = _gpu("K80-12GB", 11.17, 240 * GB, float64=1.455, float32=4.365)
T4 = _gpu("T4-16GB", 14.56, 320 * GB, float64=0.253, float32=8.1, float16=65.0, int8=130.0)
A10G = _gpu(
    "A10G-24GB", 22.03, 600 * GB, float64=0.547, float32=35.0, tfloat32=35.0, bfloat16=70.0, float16=70.0, int8=140.0
)
L40S = _gpu(
    "L40S-48GB", 44.34, 864 * GB, float64=1.431, float32=91.6, tfloat32=183.0, bfloat16=362.05, float16=362.05,
    float8=733.0, int8=733.0,
)  # fmt: skip
_A100_RATES = {"float64": 19.5, "float32": 19.5, "tfloat32": 156.0, "bfloat16": 312.0, "float16": 312.0, "int8": 624.0}
A100_40 = _gpu("A100-SXM4-40GB", 39.38, 1555 * GB, **_A100_RATES)
A100_80 = _gpu("A100-SXM4-80GB", 79.14, 2039 * GB, **_A100_RATES)
_H100_RATES = {
    "float64": 67.0, "float32": 67.0, "tfloat32": 494.5, "bfloat16": 989.5, "float16": 989.5, "float8": 1979.0,
    "int8": 1979.0,
}  # fmt: skip
H100 = _gpu("H100-SXM5-80GB", 79.1, 3350 * GB, **_H100_RATES)
H200 = _gpu("H200-SXM5-141GB", 139.8, 4800 * GB, **_H100_RATES)
H100_PCIE = _gpu(
    "H100-PCIe-80GB", 79.1, 2000 * GB, float64=51.0, float32=51.0, tfloat32=378.0, bfloat16=756.5, float16=756.5,
    float8=1513.0, int8=1513.0,
)  # fmt: skip
H100_NVL = _gpu(
    "H100-NVL-94GB", 93.0, 3900 * GB, float64=60.0, float32=60.0, tfloat32=417.5, bfloat16=835.5, float16=835.5,
    float8=1670.5, int8=1670.5,
)  # fmt: skip
B200 = _gpu(
    "B200-SXM6-180GB", 178.35, 8000 * GB, float64=37.0, float32=75.0, tfloat32=1125.0, bfloat16=2250.0, float16=2250.0,
    float8=4500.0, int8=4500.0,
)  # fmt: skip
GB200 = _gpu(
    "GB200-186GB", 184.31, 8000 * GB, float64=40.0, float32=80.0, tfloat32=1250.0, bfloat16=2500.0, float16=2500.0,
    float8=5000.0, int8=5000.0,
)  # fmt: skip
MI300X = _gpu(
    "MI300X-192GB", 191.69, 5300 * GB, float64=163.4, float32=163.4, tfloat32=653.7, bfloat16=1307.4, float16=1307.4,
    float8=2614.9, int8=2614.9,
)  # fmt: skip
LAPTOP = DeviceType(
    "laptop-cpu", "cpu", 16 * GIB, 40 * GB, (("float64", 0.1e12), ("float32", 0.2e12)),
    overhead_seconds=CPU_CALL_SECONDS,
)  # fmt: skip

_TOLD = {
    "Tesla V100-SXM2-16GB": V100, "Tesla P100-SXM2-16GB": P100, "Tesla P100-PCIE-16GB": P100_PCIE, "Tesla K80": K80,
    "Tesla T4": T4, "NVIDIA A10G": A10G, "NVIDIA L40S": L40S, "NVIDIA A100-SXM4-40GB": A100_40,
    "NVIDIA A100-SXM4-80GB": A100_80, "NVIDIA H100 80GB HBM3": H100, "NVIDIA H200": H200, "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H100 NVL": H100_NVL, "NVIDIA B200": B200, "NVIDIA GB200": GB200, "AMD Instinct MI300X": MI300X,
}  # fmt: skip
"""What drivers call them."""
PRESET_DEVICES = {each.name: each for each in _TOLD.values()}
"""By name."""


def known_device(told: str) -> DeviceType | None:
    """The device of that name, as `torch.cuda.get_device_name` tells it; None where its speeds are not known.

    >>> known_device("NVIDIA H200").name
    'H200-SXM5-141GB'
    """
    return _TOLD.get(told) or _TOLD.get(f"NVIDIA {told}")


def preset_name(device: DeviceType) -> str:
    """The name under which a device is known here: by what drivers call it, else by its rates and its kind.

    >>> preset_name(DeviceType("mine", "cuda", 2**36, H200.memory_bandwidth, H200.peak_flops))
    'H200-SXM5-141GB'
    """
    if device.name in PRESET_DEVICES or device.kind == "cpu":
        return device.name
    told = known_device(device.name)
    rates = [each for each in PRESET_DEVICES.values() if _rates(each) == _rates(device)]
    return told.name if told else rates[0].name if rates else device.name


def _rates(device: DeviceType) -> tuple[object, ...]:
    return device.memory_bandwidth, *sorted(device.peak_flops)


_ARCHITECTURES = {
    "Kepler": (K80,), "Pascal": (P100, P100_PCIE), "Volta": (V100,), "Turing": (T4,),
    "Ampere": (A100_40, A100_80, A10G), "Ada": (L40S,), "Hopper": (H100, H100_PCIE, H100_NVL, H200),
    "Blackwell": (B200, GB200), "CDNA 3": (MI300X,),
}  # fmt: skip


def architecture_of(name: str) -> str:
    """The generation of a device, by its name; empty where it is not known.

    >>> architecture_of("H200-SXM5-141GB")
    'Hopper'
    """
    return next((title for title, members in _ARCHITECTURES.items() if name in {each.name for each in members}), "")


def nearest_device(device: DeviceType, names: Iterable[str]) -> str | None:
    """Which of these devices has rates and memory most like another one's; None where none of them is known here.

    >>> nearest_device(A100_80, ["H200-SXM5-141GB", "T4-16GB", "my own"])
    'H200-SXM5-141GB'
    """
    known = {name: each for name, each in PRESET_DEVICES.items() if each.kind == device.kind}
    return min((name for name in names if name in known), key=lambda name: _distance(known[name], device), default=None)


def _distance(one: DeviceType, other: DeviceType) -> float:
    """In doublings, of both rates."""
    flops = abs(log2(one.flops_of("float16") / other.flops_of("float16")))
    return flops + abs(log2(one.memory_bandwidth / other.memory_bandwidth))
