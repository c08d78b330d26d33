"""The way a message takes through a few links: the widest, among those the quickest, the same in every run.

For a large message the seconds are its bytes over the narrowest bandwidth on the way. So, from widest to narrowest
bandwidth, the quickest way over links at least that wide is searched (Dijkstra on the latencies, then on the number of
links, then in the order of the links), and a vertex gets the first way that is found to it. Devices pass nothing on,
unless there is no other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from conjoin.machine.links import Link


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """A link in one direction; what moves over links of the same `wire` takes turns if it is shared."""

    source: str
    target: str
    wire: str
    bandwidth: float
    latency: float
    shared: bool
    kind: str = ""


Route = tuple[DirectedLink, ...]
_Hops = Mapping[str, Sequence[DirectedLink]]
_CameBy = Mapping[str, DirectedLink | None]
"""The last link on the way to every vertex that a search reached; None where it started."""


class Wiring:
    """Links with their ways, each searched when it is first asked for.

    >>> pcie = [Link((end, "switch"), 16e9, 1e-6) for end in ("0", "1")]
    >>> [hop.wire for hop in Wiring(pcie, frozenset({"0", "1"})).route("0", "1")]
    ['0>', '1<']
    """

    def __init__(self, links: Sequence[Link], ends: frozenset[str]) -> None:
        self._links = links
        self._ends = ends
        self._searched: dict[str, dict[str, _CameBy]] = {}

    def route(self, source: str, target: str) -> Route:
        """The links from one vertex to another, which must be connected."""
        if source not in self._searched:
            self._searched[source] = self._search(source)
        return _walk_back(target, self._searched[source][target])

    @cached_property
    def _levels(self) -> list[_Hops]:
        """For each bandwidth, widest first, the links at least that wide, by where they start."""
        widths = sorted({link.bandwidth for link in self._links}, reverse=True)
        hops = [hop for index, link in enumerate(self._links) for hop in _both_ways(index, link)]
        return [_by_source(hop for hop in hops if hop.bandwidth >= width) for width in widths]

    def _search(self, source: str) -> dict[str, _CameBy]:
        """For every vertex, the search that reached it first."""
        found: dict[str, _CameBy] = {source: {source: None}}
        for silent in (self._ends, frozenset[str]()):
            for hops in self._levels:
                came_by = _quickest(source, hops, silent)
                found.update((vertex, came_by) for vertex in came_by if vertex not in found)
        return found


def _both_ways(index: int, link: Link) -> Iterable[DirectedLink]:
    for (source, target), sign in ((link.ends, ">"), (link.ends[::-1], "<")):
        wire = f"{index}{sign if link.duplex else ''}"
        yield DirectedLink(source, target, wire, link.bandwidth, link.latency, link.shared, link.kind)


def _by_source(hops: Iterable[DirectedLink]) -> _Hops:
    starting: dict[str, list[DirectedLink]] = {}
    for hop in hops:
        starting.setdefault(hop.source, []).append(hop)
    return starting


def _quickest(source: str, hops: _Hops, silent: frozenset[str]) -> _CameBy:
    """The ways of the least latency to every vertex that can be reached without passing through a silent one."""
    came_by: dict[str, DirectedLink | None] = {}
    order = 0  # equal ways are left in the order in which they were found
    ahead: list[tuple[float, int, int, str, DirectedLink | None]] = [(0.0, 0, order, source, None)]
    while ahead:
        latency, length, _, vertex, last = heappop(ahead)
        if vertex in came_by:
            continue
        came_by[vertex] = last
        if vertex in silent and vertex != source:
            continue
        for hop in hops.get(vertex, ()):
            if hop.target not in came_by:
                order += 1
                heappush(ahead, (latency + hop.latency, length + 1, order, hop.target, hop))
    return came_by


def _walk_back(vertex: str, came_by: _CameBy) -> Route:
    way: list[DirectedLink] = []
    while (hop := came_by[vertex]) is not None:
        way.append(hop)
        vertex = hop.source
    return tuple(reversed(way))
