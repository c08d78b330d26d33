"""Devices and nodes of the known machines, from the papers and the vendors' data sheets.

Rates are dense peaks, without sparsity, at boost clocks, of the fastest units that torch uses unasked: tensor cores for
float64 from the A100 on, for float32 only as tfloat32. Gigabytes of memory are binary, which data sheets do not say (of
141 GB torch sees 139.8 GiB). Links carry as much in each direction at once. Data sheets say little about latencies and
nothing about what a call costs: those are round numbers of the size that is commonly measured, in one place, and
calibration replaces them.
"""

from __future__ import annotations

from collections.abc import Iterable

from conjoin.machine.devices import DeviceType
from conjoin.machine.links import NETWORK, Link, NodeKind

GB = 1e9
GIB = 2**30
NVLINK_LATENCY = 1e-6
PCIE_LATENCY = 0.5e-6
CPU_BUS_LATENCY = 0.5e-6
INFINIBAND_LATENCY = 0.75e-6
"""From a network card to the middle of the network: 1.5 µs from card to card."""
ETHERNET_LATENCY = 12e-6
"""The same for TCP between virtual machines: 24 µs from card to card."""
CUDA_CALL_SECONDS = 3e-6
CPU_CALL_SECONDS = 2e-6


def _gpu(name: str, memory_gib: int, bandwidth: float, **teraflops: float) -> DeviceType:
    rates = tuple((dtype, rate * 1e12) for dtype, rate in teraflops.items())
    return DeviceType(name, "cuda", memory_gib * GIB, bandwidth, rates, overhead_seconds=CUDA_CALL_SECONDS)


V100 = _gpu("V100-SXM2-16GB", 16, 900 * GB, float64=7.8, float32=15.7, float16=125.0)
P100 = _gpu("P100-SXM2-16GB", 16, 732 * GB, float64=5.3, float32=10.6, float16=21.2)
P100_PCIE = _gpu("P100-PCIe-16GB", 16, 732 * GB, float64=4.7, float32=9.3, float16=18.7)
# The data sheet gives a board of two GPUs; a device is one, so half of it.
K80 = _gpu("K80-12GB", 12, 240 * GB, float64=1.455, float32=4.365)
_A100_RATES = {"float64": 19.5, "float32": 19.5, "tfloat32": 156.0, "bfloat16": 312.0, "float16": 312.0, "int8": 624.0}
A100_40 = _gpu("A100-SXM4-40GB", 40, 1555 * GB, **_A100_RATES)
A100_80 = _gpu("A100-SXM4-80GB", 80, 2039 * GB, **_A100_RATES)
_H100_RATES = {
    "float64": 67.0, "float32": 67.0, "tfloat32": 494.5, "bfloat16": 989.5, "float16": 989.5, "float8": 1979.0,
    "int8": 1979.0,
}  # fmt: skip
H100 = _gpu("H100-SXM5-80GB", 80, 3350 * GB, **_H100_RATES)
H200 = _gpu("H200-SXM5-141GB", 141, 4800 * GB, **_H100_RATES)
LAPTOP = DeviceType(
    "laptop-cpu", "cpu", 16 * GIB, 40 * GB, (("float64", 0.1e12), ("float32", 0.2e12)),
    overhead_seconds=CPU_CALL_SECONDS,
)  # fmt: skip


def _nvlink(first: int, second: int, bandwidth: float) -> Link:
    return Link((str(first), str(second)), bandwidth, NVLINK_LATENCY, "NVLink")


def _pcie(end: str, other: str, bandwidth: float) -> Link:
    return Link((end, other), bandwidth, PCIE_LATENCY, "PCIe")


def _network(card: str, gigabits: float, latency: float = INFINIBAND_LATENCY, kind: str = "InfiniBand") -> Link:
    return Link((card, NETWORK), gigabits / 8 * GB, latency, kind)


def _node(name: str, count: int, device: DeviceType, num_devices: int, links: Iterable[Link]) -> NodeKind:
    """A node whose switches are what its links name beside devices and network."""
    wires = tuple(links)
    ends = dict.fromkeys(end for link in wires for end in link.ends)
    switches = tuple(end for end in ends if not end.isdecimal() and end != NETWORK)
    return NodeKind(name, count, (device,) * num_devices, wires, switches)


def summit(count: int) -> NodeKind:
    """Three GPUs at each of two CPUs; the network card has a port at each CPU."""
    links: list[Link] = []
    for cpu, gpus in (("cpu0", (0, 1, 2)), ("cpu1", (3, 4, 5))):
        links += [_nvlink(a, b, 50 * GB) for a in gpus for b in gpus if a < b]
        links += [Link((str(gpu), cpu), 50 * GB, NVLINK_LATENCY, "NVLink") for gpu in gpus]
    links.append(Link(("cpu0", "cpu1"), 32 * GB, CPU_BUS_LATENCY, "X-Bus"))
    # PCIe 4.0 with 8 lanes to each port: 16 GB/s, wider than the port.
    links += [_pcie(f"cpu{i}", f"rail{i}", 16 * GB) for i in range(2)]
    return _node("summit", count, V100, 6, [*links, _network("rail0", 100), _network("rail1", 100)])


def p3_8xlarge(count: int) -> NodeKind:
    """Half a DGX-1 with V100: pairs are joined by one NVLink of 25 GB/s or by two."""
    doubled = {(0, 3), (1, 2), (2, 3)}
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    links = [_nvlink(a, b, (50 if (a, b) in doubled else 25) * GB) for a, b in pairs]
    links += [_pcie(str(gpu), "host", 16 * GB) for gpu in range(4)]
    links += [_pcie("host", "nic", 16 * GB), _network("nic", 10, ETHERNET_LATENCY, "Ethernet")]
    return _node("p3.8xlarge", count, V100, 4, links)


def p100_cluster(count: int) -> NodeKind:
    """Every pair of four P100 is joined by one NVLink."""
    links = [_nvlink(a, b, 20 * GB) for a in range(4) for b in range(a + 1, 4)]
    links += [_pcie(str(gpu), "host", 16 * GB) for gpu in range(4)]
    return _node("p100", count, P100, 4, [*links, _pcie("host", "nic", 16 * GB), _network("nic", 100)])


def k80_cluster(count: int) -> NodeKind:
    """Two pairs, each on a PCIe switch of its own; the two switches and the network card meet at a shared one."""
    links = [_pcie(str(gpu), f"pair{gpu // 2}", 16 * GB) for gpu in range(4)]
    links += [_pcie(f"pair{i}", "root", 16 * GB) for i in range(2)]
    return _node("k80", count, K80, 4, [*links, _pcie("root", "nic", 8 * GB), _network("nic", 56)])


def piz_daint(count: int) -> NodeKind:
    """One GPU, and a share of the Aries network."""
    links = [_pcie("0", "nic", 16 * GB), _network("nic", 8 * 8.5, kind="Aries")]
    return _node("piz-daint", count, P100_PCIE, 1, links)


def a100_16(count: int) -> NodeKind:
    """Sixteen GPUs on NVSwitch, one network card for all."""
    links = [_nvswitch(gpu, 300 * GB) for gpu in range(16)]
    links += [_pcie(str(gpu), "host", 32 * GB) for gpu in range(16)]
    links += [_pcie("host", "nic", 32 * GB), _network("nic", 100, ETHERNET_LATENCY, "Ethernet")]
    return _node("a100-16", count, A100_40, 16, links)


def dgx_a100(count: int) -> NodeKind:
    """PCIe 4.0: 32 GB/s to a card of 200 Gb/s."""
    return _dgx("dgx-a100", count, A100_80, (300 * GB, 32 * GB, 200))


def dgx_h100(count: int) -> NodeKind:
    """PCIe 5.0: 64 GB/s to a card of 400 Gb/s."""
    return _dgx("dgx-h100", count, H100, (450 * GB, 64 * GB, 400))


def dgx_h200(count: int) -> NodeKind:
    """Wired as its predecessor."""
    return _dgx("dgx-h200", count, H200, (450 * GB, 64 * GB, 400))


def _dgx(name: str, count: int, device: DeviceType, rates: tuple[float, float, float]) -> NodeKind:
    """Eight GPUs on NVSwitch, with a network card for each at the same PCIe switches."""
    nvlink, pcie, gigabits = rates
    links = [_nvswitch(gpu, nvlink) for gpu in range(8)]
    links += [_pcie(str(gpu), f"nic{gpu}", pcie) for gpu in range(8)]
    return _node(name, count, device, 8, [*links, *(_network(f"nic{gpu}", gigabits) for gpu in range(8))])


def _nvswitch(gpu: int, bandwidth: float) -> Link:
    """Half the latency of NVLink: two of these make a way."""
    return Link((str(gpu), "nvswitch"), bandwidth, NVLINK_LATENCY / 2, "NVLink")


def laptop(count: int) -> NodeKind:
    """One process: nothing is sent."""
    return _node("laptop", count, LAPTOP, 1, [])
