"""Who sends to whom when all groups along some axes communicate at once, and what that puts on the links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations
from math import prod

from conjoin.cost.ring_packing import Pair, joined, rings_rate
from conjoin.machine import DirectedLink, Machine, Mesh, Route, Topology

SOFTWARE_SECONDS = {"cuda": 3e-6, "cpu": 25e-6}
"""What a library adds to each message beside the links: NCCL hands a chunk on within a few microseconds, Gloo wakes
threads for it. Round numbers, for machines that were not calibrated."""

SHARES = {"NVLink": 0.82, "PCIe": 0.75, "X-Bus": 0.85, "InfiniBand": 0.95, "Aries": 0.95, "Ethernet": 0.9}
"""What the protocol of a link leaves of its line rate to NCCL: NVLink 20.6 of 25 GB/s, PCIe 12 of 16
(`src/graph/topo.h`); 370 of 450 GB/s a GPU, whatever is sent, is what NVIDIA says of DGX H100 (nccl-tests, issue 212).
Other kinds are taken as measured."""


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups along some axes; every group is one of `node_sets` times one of `position_sets`."""

    topology: Topology
    nodes: Mesh
    positions: Mesh
    axes: tuple[str, ...]

    @classmethod
    def along(cls, machine: Machine, axes: Iterable[str]) -> Groups:
        mesh = machine.mesh
        nodes = Mesh(tuple(axis for axis in mesh.axes if axis.between_nodes))
        positions = Mesh(tuple(axis for axis in mesh.axes if not axis.between_nodes))
        return cls(machine.topology, nodes, positions, mesh.in_order(axes))

    def only(self, axes: tuple[str, ...]) -> Groups:
        return Groups(self.topology, self.nodes, self.positions, axes)

    @property
    def between(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis in self.nodes.sizes)

    @property
    def inside(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis in self.positions.sizes)

    @property
    def num_nodes(self) -> int:
        return prod(self.nodes.sizes[axis] for axis in self.between)

    @property
    def size(self) -> int:
        return self.num_nodes * prod(self.positions.sizes[axis] for axis in self.inside)

    def position_sets(self) -> tuple[tuple[int, ...], ...]:
        return self.positions.groups(self.inside)

    def node_sets(self) -> tuple[tuple[int, ...], ...]:
        return self.nodes.groups(self.between)


@dataclass(frozen=True, slots=True)
class Phase:
    """A pattern over all groups: the latency of its rounds, the seconds for each byte of a piece, its group size."""

    latency: float
    load: float
    size: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Rings that leave a node by every card: seconds for each byte that a member sends on; what nodes send outward."""

    load: float
    outward_load: float
    """Seconds for each byte that a node sends to the next one, over all its cards; zero on one node."""
    outward_latency: float


def data_rate(link: DirectedLink) -> float:
    """Bytes of data per second that a link carries between GPUs."""
    return link.bandwidth * SHARES.get(link.kind, 1.0)


def line_rate(link: DirectedLink) -> float:
    """Bytes per second of a link."""
    return link.bandwidth


def rate_between(device: str) -> Callable[[DirectedLink], float]:
    """What links carry between devices of a kind: line rates are told of GPUs, and measured of CPUs."""
    return data_rate if device == "cuda" else line_rate


@dataclass(slots=True)
class _Loads:
    """What messages of one byte put on the wires, in seconds."""

    rate: Callable[[DirectedLink], float]
    shared: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    alone: float = 0.0
    """The most on a link that is not shared, where every message is alone."""

    def add(self, route: Route, count: float) -> None:
        for link in route:
            if link.shared:
                self.shared[link.wire] += count / self.rate(link)
            else:
                self.alone = max(self.alone, 1 / self.rate(link))

    @property
    def most(self) -> float:
        return max(self.alone, max(self.shared.values(), default=0.0))


Inside = Callable[[int], Iterator[tuple[int | None, int | None, float]]]
"""For a kind of node: sender, receiver and number of messages; None stands for members in other nodes."""
Between = Callable[[], Iterator[tuple[int, int, float]]]
"""Sending node, receiving node and number of messages."""


def _measure(groups: Groups, inside: Inside, between: Between) -> tuple[float, float]:
    """Seconds for each byte of a message on the most loaded link, and α: the largest latency of a message.

    Nodes of one kind carry the same, so each kind is looked at once, and the network only where it can hold up.
    """
    topology, most = groups.topology, 0.0
    device = topology.kinds[0].devices[0].kind
    slowest = {"within": 0.0, "leaving": 0.0, "entering": 0.0, "across": 0.0}
    for kind in range(len(topology.kinds)):
        loads = _Loads(rate_between(device))
        for sender, receiver, count in inside(kind):
            part, route = _route(topology, kind, sender, receiver)
            loads.add(route, count)
            slowest[part] = max(slowest[part], _latency(route))
        most = max(most, loads.most)
    if groups.num_nodes > 1 and not topology.is_flat:
        loads = _Loads(rate_between(device))
        for node, other, count in between():
            route = topology.between(node, other)
            loads.add(route, count)
            slowest["across"] = max(slowest["across"], _latency(route))
        most = max(most, loads.most)
    away = slowest["leaving"] + slowest["across"] + slowest["entering"]
    return most, max(slowest["within"], away) + SOFTWARE_SECONDS[device]


def _route(topology: Topology, kind: int, sender: int | None, receiver: int | None) -> tuple[str, Route]:
    if sender is None:
        assert receiver is not None
        return "entering", topology.entering(kind, receiver)
    if receiver is None:
        return "leaving", topology.leaving(kind, sender)
    return "within", topology.inside(kind, sender, receiver)


def _latency(route: Route) -> float:
    return sum(link.latency for link in route)


def direct(groups: Groups) -> Phase:
    """Everyone sends a piece to every other member of its group, all at once."""
    sets = groups.position_sets()
    elsewhere = (groups.num_nodes - 1) * len(sets[0])

    def inside(_: int) -> Iterator[tuple[int | None, int | None, float]]:
        for positions in sets:
            yield from ((a, b, 1) for a, b in permutations(positions, 2))
            if elsewhere:
                yield from ((a, None, elsewhere) for a in positions)
                yield from ((None, a, elsewhere) for a in positions)

    def between() -> Iterator[tuple[int, int, float]]:
        pieces = len(sets) * len(sets[0]) ** 2
        yield from ((a, b, pieces) for nodes in groups.node_sets() for a, b in permutations(nodes, 2))

    load, latency = _measure(groups, inside, between)
    return Phase((groups.size - 1) * latency, load, groups.size)


def from_one(groups: Groups) -> Phase:
    """The first member of every group sends a piece to every other, all at once; or each of them sends one to it."""
    sets = groups.position_sets()
    elsewhere = (groups.num_nodes - 1) * len(sets[0])

    def inside(_: int) -> Iterator[tuple[int | None, int | None, float]]:
        for first, *others in sets:
            yield from ((first, b, 1) for b in others)
            if elsewhere:
                yield first, None, elsewhere
                yield from ((None, b, 1) for b in (first, *others))

    def between() -> Iterator[tuple[int, int, float]]:
        pieces = len(sets) * len(sets[0])
        yield from ((nodes[0], b, pieces) for nodes in groups.node_sets() for b in nodes[1:])

    load, latency = _measure(groups, inside, between)
    return Phase((groups.size - 1) * latency, load, groups.size)


def ring(groups: Groups) -> Phase:
    """Everyone sends a piece to the next member of its group, as often as there are others."""
    sets = groups.position_sets()

    def inside(kind: int) -> Iterator[tuple[int | None, int | None, float]]:
        for positions in sets:
            order = _nearest_next(groups.topology, kind, positions)
            yield from ((a, b, 1) for a, b in pairwise(order))
            if groups.num_nodes > 1:
                yield from ((order[-1], None, 1), (None, order[0], 1))
            else:
                yield order[-1], order[0], 1

    def between() -> Iterator[tuple[int, int, float]]:
        for nodes in groups.node_sets():
            yield from ((a, b, len(sets)) for a, b in pairwise((*nodes, nodes[0])))

    load, latency = _measure(groups, inside, between)
    return Phase((groups.size - 1) * latency, (groups.size - 1) * load, groups.size)


def spread_ring(groups: Groups, rate: Callable[[DirectedLink], float]) -> Spread:
    """Rings of which each enters and leaves its nodes at another member: together they use every card alike.

    Where members are joined by links of their own, as many rings lie side by side as these carry.
    """
    topology, sets, most, outward, latency = groups.topology, groups.position_sets(), 0.0, 0.0, 0.0
    for kind in range(len(topology.kinds)):
        loads, leaving = _Loads(rate), _Loads(rate)
        for positions in sets:
            order = _nearest_next(topology, kind, positions)
            side_by_side = rings_rate(positions, _own_links(topology, kind, positions, rate))
            loads.alone = max(loads.alone, 1 / side_by_side if side_by_side else 0.0)
            for first in range(len(order)):
                turned = (*order[first:], *order[:first])
                hops = pairwise(turned if groups.num_nodes > 1 else (*turned, turned[0]))
                for a, b in () if side_by_side else hops:
                    loads.add(topology.inside(kind, a, b), 1 / len(order))
                if groups.num_nodes > 1:
                    for route in (topology.leaving(kind, turned[-1]), topology.entering(kind, turned[0])):
                        loads.add(route, 1 / len(order))
                        leaving.add(route, 1 / len(order))
                        latency = max(latency, _latency(route))
        most, outward = max(most, loads.most), max(outward, leaving.most)
    if groups.num_nodes > 1 and not topology.is_flat:
        loads = _Loads(rate)
        for nodes in groups.node_sets():
            for a, b in pairwise((*nodes, nodes[0])):
                loads.add(topology.between(a, b), len(sets))
        most, outward = max(most, loads.most), max(outward, loads.most)
    return Spread(most, outward, 2 * latency)


def _own_links(
    topology: Topology, kind: int, positions: Sequence[int], rate: Callable[[DirectedLink], float]
) -> dict[Pair, float]:
    """What the links carry, each way, that join two of some positions and nothing else."""
    routes = {joined(a, b): topology.inside(kind, a, b) for a, b in combinations(positions, 2)}
    return {pair: rate(route[0]) for pair, route in routes.items() if len(route) == 1}


def _nearest_next(topology: Topology, kind: int, positions: Sequence[int]) -> tuple[int, ...]:
    """The positions in an order in which each is followed by the one it reaches best among those left."""
    order, left = [positions[0]], list(positions[1:])
    while left:
        routes = {position: topology.inside(kind, order[-1], position) for position in left}
        order.append(min(left, key=lambda position: (*_distance(routes[position]), position)))
        left.remove(order[-1])
    return tuple(order)


def _distance(route: Route) -> tuple[float, float]:
    return -min(link.bandwidth for link in route), _latency(route)


def neighbours(groups: Groups) -> Phase:
    """Everyone sends a piece to the member before it and one to the member after it."""
    sets, num_messages = groups.position_sets(), min(2, groups.size - 1)

    def between() -> Iterator[tuple[int, int, float]]:
        for nodes in groups.node_sets():
            yield from ((a, b, len(sets)) for pair in pairwise(nodes) for a, b in permutations(pair, 2))

    # Of two nodes the first sends and receives at its last position and the second at its first; in the middle of more
    # nodes it is both.
    few: dict[int, list[tuple[int, ...]]] = {1: [()], 2: [(0,), (-1,)]}
    ends = few.get(groups.num_nodes, [(0, -1)])
    found = [_measure(groups, _inside_neighbours(sets, which), between) for which in ends]
    return Phase(num_messages * max(alpha for _, alpha in found), max(load for load, _ in found), groups.size)


def _inside_neighbours(sets: Sequence[tuple[int, ...]], ends: tuple[int, ...]) -> Inside:
    def inside(_: int) -> Iterator[tuple[int | None, int | None, float]]:
        for positions in sets:
            yield from ((a, b, 1) for pair in pairwise(positions) for a, b in permutations(pair, 2))
            yield from ((positions[end], None, 1) for end in ends)
            yield from ((None, positions[end], 1) for end in ends)

    return inside
