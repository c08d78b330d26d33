"""Nodes of the known machines, from the papers and the vendors' pages.

Links carry as much in each direction at once. Data sheets say little about latencies: those are round numbers of the
size that is commonly measured, in one place, and calibration replaces them.
"""

from __future__ import annotations

from collections.abc import Iterable

from conjoin.machine.devices import DeviceType
from conjoin.machine.links import NETWORK, Link, NodeKind
from conjoin.machine.preset_devices import (
    A10G,
    A100_40,
    A100_80,
    B200,
    GB,
    GB200,
    H100,
    H100_NVL,
    H100_PCIE,
    H200,
    K80,
    L40S,
    LAPTOP,
    MI300X,
    P100,
    P100_PCIE,
    T4,
    V100,
)

NVLINK_LATENCY = 1e-6
PCIE_LATENCY = 0.5e-6
CPU_BUS_LATENCY = 0.5e-6
INFINIBAND_LATENCY = 0.75e-6
"""From a network card to the middle of the network: 1.5 µs from card to card."""
EFA_LATENCY = 7.5e-6
"""The same for Amazon's fabric adapter: about 15 µs from card to card."""
ETHERNET_LATENCY = 12e-6
"""The same for TCP between virtual machines: 24 µs from card to card."""


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


def _dgx(
    name: str,
    count: int,
    device: DeviceType,
    rates: tuple[float, float, float],
    network: tuple[float, str] = (INFINIBAND_LATENCY, "InfiniBand"),
    num_devices: int = 8,
) -> NodeKind:
    """GPUs on NVSwitch, with a network card for each at the same PCIe switches."""
    nvlink, pcie, gigabits = rates
    gpus = range(num_devices)
    links = [_nvswitch(gpu, nvlink) for gpu in gpus]
    links += [_pcie(str(gpu), f"nic{gpu}", pcie) for gpu in gpus]
    return _node(name, count, device, num_devices, [*links, *(_network(f"nic{i}", gigabits, *network) for i in gpus)])


def dgx_a100_40(count: int) -> NodeKind:
    """The first of them, with less memory."""
    return _dgx("dgx-a100-40", count, A100_40, (300 * GB, 32 * GB, 200))


def dgx_b200(count: int) -> NodeKind:
    """NVLink twice as fast as its predecessor's."""
    return _dgx("dgx-b200", count, B200, (900 * GB, 64 * GB, 400))


def gb200_nvl72(count: int) -> NodeKind:
    """A rack: all GPUs on one NVSwitch, with a network card of 400 Gb/s for each."""
    return _dgx("gb200-nvl72", count, GB200, (900 * GB, 64 * GB, 400), num_devices=72)


def mi300x(count: int) -> NodeKind:
    """Eight GPUs, each pair joined by a link of Infinity Fabric; a network card for each."""
    pairs = [(a, b) for a in range(8) for b in range(a + 1, 8)]
    links = [Link((str(a), str(b)), 64 * GB, NVLINK_LATENCY, "Infinity Fabric") for a, b in pairs]
    links += [_pcie(str(gpu), f"nic{gpu}", 64 * GB) for gpu in range(8)]
    return _node("mi300x", count, MI300X, 8, [*links, *(_network(f"nic{gpu}", 400) for gpu in range(8))])


def h100_pcie(count: int) -> NodeKind:
    """Pairs with a bridge of NVLink; all others, and the network card, by PCIe."""
    return _bridged("h100-pcie", count, H100_PCIE)


def h100_nvl(count: int) -> NodeKind:
    """As with the other cards, of faster memory."""
    return _bridged("h100-nvl", count, H100_NVL)


def _bridged(name: str, count: int, device: DeviceType) -> NodeKind:
    links = [_nvlink(2 * pair, 2 * pair + 1, 300 * GB) for pair in range(4)]
    links += [_pcie(str(gpu), "host", 64 * GB) for gpu in range(8)]
    return _node(name, count, device, 8, [*links, _pcie("host", "nic", 64 * GB), _network("nic", 400)])


def p4d(count: int) -> NodeKind:
    """Two GPUs at each of four network cards."""
    links = [_nvswitch(gpu, 300 * GB) for gpu in range(8)]
    links += [_pcie(str(gpu), f"nic{gpu // 2}", 32 * GB) for gpu in range(8)]
    cards = (_network(f"nic{i}", 100, EFA_LATENCY, "EFA") for i in range(4))
    return _node("p4d.24xlarge", count, A100_40, 8, [*links, *cards])


def p5(count: int) -> NodeKind:
    """Four network cards of 100 Gb/s at each GPU, taken as one of 400."""
    return _dgx("p5.48xlarge", count, H100, (450 * GB, 64 * GB, 400), (EFA_LATENCY, "EFA"))


def a3_high(count: int) -> NodeKind:
    """Two GPUs at each of four network cards of 200 Gb/s; a fifth serves the host."""
    links = [_nvswitch(gpu, 450 * GB) for gpu in range(8)]
    links += [_pcie(str(gpu), f"nic{gpu // 2}", 64 * GB) for gpu in range(8)]
    cards = (_network(f"nic{i}", 200, ETHERNET_LATENCY, "Ethernet") for i in range(4))
    return _node("a3-highgpu-8g", count, H100, 8, [*links, *cards])


def a3_mega(count: int) -> NodeKind:
    """A network card of 200 Gb/s at each GPU; a ninth serves the host."""
    return _dgx("a3-megagpu-8g", count, H100, (450 * GB, 64 * GB, 200), (ETHERNET_LATENCY, "Ethernet"))


def nd_a100(count: int) -> NodeKind:
    return _dgx("nd96asr-a100-v4", count, A100_40, (300 * GB, 32 * GB, 200))


def nd_h100(count: int) -> NodeKind:
    return _dgx("nd96isr-h100-v5", count, H100, (450 * GB, 64 * GB, 400))


def g6e(count: int) -> NodeKind:
    return _by_host("g6e.48xlarge", count, L40S, (8, 32 * GB, 400))


def g5(count: int) -> NodeKind:
    return _by_host("g5.48xlarge", count, A10G, (8, 32 * GB, 100))


def g4dn(count: int) -> NodeKind:
    return _by_host("g4dn.12xlarge", count, T4, (4, 16 * GB, 50))


def _by_host(name: str, count: int, device: DeviceType, rates: tuple[int, float, float]) -> NodeKind:
    """GPUs that meet, and the network card, where their PCIe does."""
    num_devices, pcie, gigabits = rates
    links = [_pcie(str(gpu), "host", pcie) for gpu in range(num_devices)]
    links += [_pcie("host", "nic", 2 * pcie), _network("nic", gigabits, ETHERNET_LATENCY, "Ethernet")]
    return _node(name, count, device, num_devices, links)


def one_node(name: str, device: DeviceType, num_devices: int) -> NodeKind:
    """GPUs of one host, joined as such GPUs are: by NVSwitch those that are made for it, else by PCIe."""
    switched = {A100_40: 300, A100_80: 300, H100: 450, H200: 450, B200: 900, GB200: 900}
    alike = next((gigabytes for known, gigabytes in switched.items() if known.name == device.name), None)
    if alike is not None:
        links = [_nvswitch(gpu, alike * GB) for gpu in range(num_devices)]
    else:
        links = [_pcie(str(gpu), "host", 16 * GB) for gpu in range(num_devices)]
    return _node(name, 1, device, num_devices, links if num_devices > 1 else [])


def _nvswitch(gpu: int, bandwidth: float) -> Link:
    """Half the latency of NVLink: two of these make a way."""
    return Link((str(gpu), "nvswitch"), bandwidth, NVLINK_LATENCY / 2, "NVLink")


def laptop(count: int) -> NodeKind:
    """One process: nothing is sent."""
    return _node("laptop", count, LAPTOP, 1, [])
