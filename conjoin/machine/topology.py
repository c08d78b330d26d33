"""The links of a whole machine, made of one node of each kind and of what stands between nodes.

A message inside a node keeps to that node's links. One to another node leaves by the way from its device to `network`,
crosses what is between the nodes, and enters by the way from `network` to the other device. Without links between
nodes, `network` is one vertex for all of them and holds nobody up. Ways are searched once for each kind of node, so
thousands of nodes cost no more than one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from conjoin.machine.links import NETWORK, Link, NodeKind
from conjoin.machine.wiring import Route, Wiring

Location = Callable[[int], tuple[int, int]]
MAX_KEPT_PATHS = 2**17
"""Paths between ranks that are kept: all those among 362 devices."""


class Topology:
    """Ways between the devices of a machine; `location` says in which node and at which position a rank is."""

    def __init__(self, kinds: Sequence[NodeKind], links: Sequence[Link], location: Location) -> None:
        self.kinds = tuple(kinds)
        self.is_flat = not links
        """Whether `network` is one vertex that holds nobody up."""
        self._ends_of_kinds = list(accumulate(kind.count for kind in kinds))
        self._location = location
        self._inside = [Wiring(kind.links, _numbers(len(kind.devices))) for kind in kinds]
        self._between = Wiring(links, _numbers(self._ends_of_kinds[-1]) if links else frozenset())
        self._paths: dict[tuple[int, int], Route] = {}

    def kind_of(self, node: int) -> int:
        """Which of `kinds` a node is."""
        return bisect_right(self._ends_of_kinds, node)

    def inside(self, kind: int, sender: int, receiver: int) -> Route:
        """The way between two devices of one node of a kind."""
        return self._inside[kind].route(str(sender), str(receiver))

    def leaving(self, kind: int, device: int) -> Route:
        """The way from a device out of a node of a kind."""
        return self._inside[kind].route(str(device), NETWORK)

    def entering(self, kind: int, device: int) -> Route:
        """The way into a node of a kind to a device."""
        return self._inside[kind].route(NETWORK, str(device))

    def between(self, sender: int, receiver: int) -> Route:
        """The way between two nodes, from `network` of the one to that of the other."""
        return () if self.is_flat else self._between.route(str(sender), str(receiver))

    def path(self, sender: int, receiver: int) -> Route:
        """The way between two ranks; every link has a wire of its own in the whole machine."""
        found = self._paths.get((sender, receiver))
        if found is None:
            if len(self._paths) >= MAX_KEPT_PATHS:
                self._paths.clear()
            found = self._paths[sender, receiver] = self._find_path(sender, receiver)
        return found

    def _find_path(self, sender: int, receiver: int) -> Route:
        (node, device), (other, target) = self._location(sender), self._location(receiver)
        if node == other:
            return _placed(self.inside(self.kind_of(node), device, target), f"node {node}")
        return (
            *_placed(self.leaving(self.kind_of(node), device), f"node {node}"),
            *_placed(self.between(node, other), NETWORK),
            *_placed(self.entering(self.kind_of(other), target), f"node {other}"),
        )


def _numbers(count: int) -> frozenset[str]:
    return frozenset(map(str, range(count)))


def _placed(route: Route, where: str) -> Route:
    return tuple(replace(hop, wire=f"{where}: {hop.wire}") for hop in route)
