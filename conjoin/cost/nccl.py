"""Seconds of collectives on GPUs as NCCL runs them: each algorithm with each protocol, of which it takes the quickest.

The runtime issues one call for a collective, and NCCL decides how to carry it out. It estimates each way by

    seconds = latency + bytes / bandwidth

and the figures below are those of that estimate (`src/graph/tuning.cc` of NCCL 2.27, NVIDIA): what a call costs before
anything moves, what a hop adds over NVLink, PCIe or the network, which part of the bandwidth a protocol leaves for
data. *LL* sends a flag with every four bytes, *LL128* one with every 120, *Simple* waits for whole chunks. *Rings*
leave a node through every card, one channel after the other, so that one with eight cards has the rate of eight; where
devices are joined by links of their own, several lie side by side (`ring_packing`).
*Trees* carry all-reduces alone; *NVLS* adds up in the switch of a node, and NVLS trees do so and go on between nodes;
*PAT* gathers and scatters in few rounds where a node has one member. The bandwidth of a way is what its most loaded
link leaves, all groups that communicate at once counted (`patterns.spread_ring`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2

from conjoin.cost.patterns import Groups, data_rate, spread_ring
from conjoin.machine import DeviceType, architecture_of

PROTOCOLS = ("LL", "LL128", "Simple")
_MICRO = 1e-6
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_PAT_BASE, _PAT_MEMBER = 8.0, 2.8
_HOPS = {
    "NVLink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "PCIe": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "network": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
_NVLS_HOP, _NVLS_TREE_NETWORK = 25.0, 20.9
_POST = (1.0, 1.0, 3.0)
"""What the CPU takes to post a step of a ring between nodes; whole chunks take three posts."""
_LL_MOST = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
"""GB/s of LL at most, by generation, on one node, two and more."""
_NVLS_SHARE = (0.0, 0.0, 0.85, 0.74)
_NVLS_LEAST = 3
"""Members in a node from which NVLS is in use: `ncclNvlsInit` leaves two GPUs to rings (`src/transport/nvls.cc`)."""
_NVLS_LINKS = 320 / 450 * 15 / 16
"""Of the line rate: sixteen channels of 20 GB/s on H100, one of which NVLS leaves free."""
_TREE_SHARES = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9),
)
"""Of its bandwidth that a tree reaches by protocol, for 64 bytes and each power of two beyond."""
_PLATEAU = 1.4
"""How much longer the rounds of large all-reduces in rings between nodes take."""


@dataclass(frozen=True, slots=True)
class Way:
    """An algorithm with a protocol: `latency` + bytes / `bandwidth`, the bytes being those of the whole result."""

    name: str
    latency: float
    bandwidth: float
    shares: tuple[float, ...] = ()
    plateau_from: float = inf
    """Bytes from which the latency is larger."""

    def seconds(self, num_bytes: float) -> float:
        bandwidth, latency = self.bandwidth, self.latency
        if self.shares and num_bytes >= 64:
            step = int(log2(num_bytes / 64))
            bandwidth *= self.shares[step] if step < len(self.shares) else 1.0
        if num_bytes >= self.plateau_from:
            latency *= _PLATEAU
        return latency + num_bytes / bandwidth


@dataclass(frozen=True, slots=True)
class _Group:
    """What NCCL asks of a communicator: sizes, generation, and the rates and latencies of its links."""

    size: int
    num_nodes: int
    generation: int
    inside: str
    """The kind of the links inside a node: NVLink or PCIe."""
    switched: bool
    ring: float
    """Bytes per second that every member of a ring can send on."""
    line: float
    """The line rate of a device's links inside its node."""
    wire: float
    """Bytes of data per second that these links carry."""
    outward: float
    """Bytes per second that a node sends to others, by all cards of its members; infinite on one node."""
    away: float
    """Seconds from one node to another on the wires."""

    @property
    def per_node(self) -> float:
        return self.size / self.num_nodes

    @property
    def extent(self) -> int:
        """0 on one node, 1 on two, 2 on more."""
        return min(self.num_nodes, 3) - 1


def nccl_ways(groups: Groups, kind: str) -> tuple[Way, ...]:
    """Every way that NCCL considers for an all-reduce, all-gather or reduce-scatter."""
    group = _describe(groups)
    found = [*_rings(group, kind)]
    if kind == "all-reduce":
        found += _trees(group)
    if group.switched and _NVLS_SHARE[group.generation] and group.per_node >= _NVLS_LEAST:
        found += _nvls(group, kind)
    if kind != "all-reduce" and group.size == group.num_nodes > 1:
        found.append(_pat(group))
    return tuple(found)


def _rings(group: _Group, kind: str) -> Iterator[Way]:
    rounds = 2 if kind == "all-reduce" else 1
    num_steps, away = rounds * (group.size - 1), rounds * (group.num_nodes - 1)
    limits = (_LL_MOST[group.generation][group.extent] * 1e9, inf, inf)
    for i, share in enumerate((0.5, 0.92, 1.0)):
        if _has(group, i):
            near = max(_HOPS[group.inside]["ring"][i], _POST[i] if away else 0.0)
            latency = _BASE["ring"][i] + (num_steps - away) * near + away * _network(group, "ring", i)
            bandwidth = min(group.ring * share, limits[i]) * group.size / num_steps
            whole = group.size * 16 * 64 if away and rounds == 2 and i == 2 else inf
            yield Way(f"ring {PROTOCOLS[i]}", latency * _MICRO, bandwidth, plateau_from=whole)


def _trees(group: _Group) -> Iterator[Way]:
    limit = _LL_MOST[group.generation][group.extent] * 1e9
    bus = 0.92 * min(group.ring, group.outward)
    bandwidths = (min(bus / 3.8, limit), bus * (7 / 9 if group.num_nodes == 1 else 120 / 128), bus)
    for i, bandwidth in enumerate(bandwidths):
        if _has(group, i):
            near, far = _HOPS[group.inside]["tree"][i], _network(group, "tree", i)
            depth = (group.per_node - 1) * near + int(log2(group.num_nodes)) * far
            latency = (_BASE["tree"][i] + 2 * depth) * _MICRO
            yield Way(f"tree {PROTOCOLS[i]}", latency, bandwidth / 2, _TREE_SHARES[i])


def _nvls(group: _Group, kind: str) -> Iterator[Way]:
    """Sums in the switch of a node.

    Of an all-reduce of S bytes among p members each sends S into the sums and its S/p of the result to all, and gets as
    much: S (1 + 1/p) over its links, which bounds what they carry.
    """
    rounds = 2 if kind == "all-reduce" else 1
    inside = group.line * _NVLS_LINKS * _NVLS_SHARE[group.generation]
    most = group.wire * group.per_node / (group.per_node + 1)
    if group.num_nodes == 1:
        bandwidth = inside if rounds == 1 else min(most, 2 * inside * group.size / (2 * (group.size - 1)))
        yield Way("NVLS", _NVLS_HOP * _MICRO, bandwidth * (1 if rounds == 2 else (group.size - 1) / group.size))
    elif rounds == 2:
        outward = group.outward * (2 if group.num_nodes == 2 else 1)
        far = _NVLS_TREE_NETWORK + 2 * group.away / _MICRO
        latency = _NVLS_HOP + 2 * int(log2(group.num_nodes)) * far
        bandwidth = min(2 * inside, outward) * group.size / (2 * (group.size - 1))
        yield Way("NVLS tree", latency * _MICRO, min(most, bandwidth))


def _pat(group: _Group) -> Way:
    latency = _PAT_BASE + log2(group.num_nodes) * _network(group, "tree", 2) / 3.5 + group.size * _PAT_MEMBER
    return Way("PAT", latency * _MICRO, 0.75 * group.ring)


def _has(group: _Group, protocol: int) -> bool:
    """LL128 needs stores of 128 bytes that stay whole: NVLink has them."""
    return PROTOCOLS[protocol] != "LL128" or group.inside == "NVLink"


def _network(group: _Group, algorithm: str, protocol: int) -> float:
    """Microseconds of a hop between nodes; whole chunks wait for the wires twice."""
    times = 2 if PROTOCOLS[protocol] == "Simple" else 1
    hidden = algorithm if group.per_node > 1 else "tree"  # with one member a node there is nothing to hide it behind
    return _HOPS["network"][hidden][protocol] + times * group.away / _MICRO


def _describe(groups: Groups) -> _Group:
    found = spread_ring(groups, data_rate)
    devices = {device for kind in groups.topology.kinds for device in kind.devices}
    routes = [
        groups.topology.inside(kind, a, b)
        for kind in range(len(groups.topology.kinds))
        for positions in groups.position_sets()
        for a, b in pairwise(positions)
    ]
    inside = "NVLink" if all(hop.kind == "NVLink" for route in routes for hop in route) else "PCIe"
    away = found.outward_latency if groups.num_nodes > 1 else 0.0
    return _Group(
        groups.size, groups.num_nodes, min(map(_generation, devices)), inside,
        bool(routes) and inside == "NVLink" and all(len(route) > 1 for route in routes),
        1 / found.load, min((hop.bandwidth for route in routes for hop in route), default=inf),
        min((data_rate(hop) for route in routes for hop in route), default=inf),
        1 / found.outward_load if found.outward_load else inf, away,
    )  # fmt: skip


def _generation(device: DeviceType) -> int:
    """Of NVIDIA's GPUs: 0 up to Volta, 1 Ampere and Ada, 2 Hopper, 3 Blackwell; of others by what they compute in."""
    named = {"Ampere": 1, "Ada": 1, "Hopper": 2, "Blackwell": 3}.get(architecture_of(device.name))
    dtypes = {dtype for dtype, _ in device.peak_flops}
    return named if named is not None else 2 if "float8" in dtypes else 1 if "bfloat16" in dtypes else 0
