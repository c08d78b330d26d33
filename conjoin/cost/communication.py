"""Seconds of a collective on a machine: as it was measured there, else as NCCL runs it, else from the links.

On GPUs an all-reduce, all-gather or reduce-scatter takes what NCCL's choice among its algorithms takes (`nccl`). All
else is reckoned from the links.

Along some axes of the mesh stand many groups, and in one program for all ranks they communicate at the same time. A
group is some nodes times some positions in a node, so two patterns of messages make up everything:

- *ring*: each member to the next, nodes one after the other, inside a node the nearest next (`patterns.ring`);
- *direct*: each member to every other (`patterns.direct`).

What all groups together put on the most loaded link decides. For pieces of s bytes among p members

    seconds = (p - 1) · α + s · load,    α = software + the largest latency of a way,

with load = (p - 1) · max over links of (messages on it / bandwidth) for a ring, which takes p - 1 rounds, and
max over links of (messages on it / bandwidth) when all are sent at once; on GPUs the bandwidth is what the protocol of
a link leaves to data (`patterns.SHARES`). A reduce-scatter of S bytes is a chain of such
phases over parts of the axes, each leaving 1/p of what it found: all axes at once (flat), one after the other
(recursive halving), or first those inside a node and then those between nodes (hierarchical); an all-gather is the
same backward, an all-reduce both (`_chains`, `_scatter`). On a flat network the ring gives AutoDDL's table 2 (its
latency corrected to 2 (p - 1) α). The cheapest way is taken: every one is a line in the bytes sent, so the lines are
found once for each set of axes and kept.

Between one member of a group and all others (`FROM_ONE`) the bytes are those that this one sends, or receives. The
runtime carries these out as an all-to-all in which most parts are empty, and where that was measured it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from conjoin.cost.nccl import Way, nccl_ways
from conjoin.cost.patterns import SOFTWARE_SECONDS, Groups, Phase, direct, from_one, neighbours, rate_between, ring
from conjoin.cost.seconds import NO_SECONDS, Seconds, Source
from conjoin.errors import UsageError
from conjoin.machine import COLLECTIVE_KINDS, Machine

FROM_ONE = ("broadcast", "gather", "reduce", "scatter", "send")
"""Collectives in which one member of each group sends to, or receives from, the others."""
NCCL_KINDS = ("all-reduce", "all-gather", "reduce-scatter")
"""What NCCL chooses the algorithm of; all else is sent from one to another."""
MAX_DIRECT = 64
"""Members of a group up to which everyone may send to everyone; beyond, only an all-to-all does."""


@dataclass(frozen=True, slots=True)
class Line:
    """One way to carry a collective out: `latency` + `seconds_per_byte` · bytes sent by the busiest rank."""

    name: str
    latency: float
    seconds_per_byte: float

    def seconds(self, sent: float) -> float:
        return self.latency + self.seconds_per_byte * sent


def collective_seconds(machine: Machine, kind: str, axes: tuple[str, ...], sent: int) -> Seconds:
    """How long a collective takes over all groups along some axes, when the busiest rank sends so many bytes.

    >>> machine = Machine.preset("dgx-h100", nodes=2)
    >>> found = collective_seconds(machine, "all-reduce", ("d0", "d1", "d2"), 2**30)
    >>> f"{found.value * 1e3:.2f} ms, {found.source.value}"
    '2.13 ms, estimated'
    """
    fit = machine.fit_of(kind, axes)
    if fit is not None:
        return Seconds(fit.seconds(sent), Source.MEASURED)
    alike = machine.fit_of("all-to-all", axes) if kind in FROM_ONE else None
    if alike is not None:
        return Seconds(alike.seconds(sent), Source.INTERPOLATED)
    if machine.device == "cuda" and kind in NCCL_KINDS:
        ways, scale = _nccl(machine, kind, axes)
        return Seconds(min([way.seconds(sent * scale) for way in ways]), Source.ESTIMATED) if ways else NO_SECONDS
    lines = _best_lines(machine, kind, axes)
    if not lines:
        return NO_SECONDS
    return Seconds(min([line.latency + line.seconds_per_byte * sent for line in lines]), Source.ESTIMATED)


@lru_cache(maxsize=4096)
def _nccl(machine: Machine, kind: str, axes: tuple[str, ...]) -> tuple[tuple[Way, ...], float]:
    """The ways of NCCL, and how many bytes the collective has for each that a rank sends in a ring."""
    _check(machine, kind, axes)
    groups = Groups.along(machine, axes)
    if groups.size == 1:
        return (), 0.0
    rounds = 2 if kind == "all-reduce" else 1
    return nccl_ways(groups, kind), groups.size / (rounds * (groups.size - 1))


@lru_cache(maxsize=4096)
def _best_lines(machine: Machine, kind: str, axes: tuple[str, ...]) -> tuple[Line, ...]:
    """The lines that are the lowest for some size of message."""
    best: list[Line] = []
    for line in sorted(collective_lines(machine, kind, axes), key=lambda line: (line.latency, line.seconds_per_byte)):
        if not best or line.seconds_per_byte < best[-1].seconds_per_byte:
            best.append(line)
    return tuple(best)


def point_to_point_seconds(machine: Machine, sender_rank: int, receiver_rank: int, num_bytes: int) -> Seconds:
    """How long a message takes from one rank to another while nothing else is on the way.

    >>> machine = Machine.preset("piz-daint", nodes=2)
    >>> f"{point_to_point_seconds(machine, 0, 1, 8_500_000).value * 1e3:.4f} ms"
    '1.0581 ms'
    """
    route = machine.topology.path(sender_rank, receiver_rank)
    if not route:
        return NO_SECONDS
    latency = SOFTWARE_SECONDS[machine.device] + sum(link.latency for link in route)
    return Seconds(latency + num_bytes / min(map(rate_between(machine.device), route)), Source.ESTIMATED)


def collective_lines(machine: Machine, kind: str, axes: tuple[str, ...]) -> tuple[Line, ...]:
    """Every way that is considered to carry a collective out, from the links; none for a group of one.

    >>> [line.name for line in collective_lines(Machine.preset("dgx-h100"), "all-to-all", ("d0", "d1"))]
    ['direct']
    """
    _check(machine, kind, axes)
    groups = Groups.along(machine, axes)
    if groups.size == 1:
        return ()
    match kind:
        case "all-to-all":
            phase = direct(groups)
            return (Line("direct", phase.latency, phase.load / (groups.size - 1)),)
        case _ if kind in FROM_ONE:
            phase = from_one(groups)
            return (Line("from one", phase.latency, phase.load / (groups.size - 1)),)
        case "exchange":
            phase = neighbours(groups)
            return (Line("neighbours", phase.latency, phase.load / min(2, groups.size - 1)),)
        case "all-reduce":
            both = [_scatter(name, phases, groups.size) for name, phases in _chains(groups)]
            return (*(Line(one.name, 2 * one.latency, one.seconds_per_byte) for one in both), _doubling(groups))
    return tuple(_scatter(name, phases, groups.size) for name, phases in _chains(groups))


def _check(machine: Machine, kind: str, axes: Sequence[str]) -> None:
    if kind not in (*COLLECTIVE_KINDS, *FROM_ONE):
        known = ", ".join((*COLLECTIVE_KINDS, *FROM_ONE))
        raise UsageError(
            f"The time of {kind!r} was asked for. Collectives are {known}. Name one of them."
        )
    unknown = [axis for axis in axes if axis not in machine.mesh.sizes]
    if unknown:
        raise UsageError(
            f"The time of {kind} over the axis {unknown[0]!r} was asked for. The machine {machine.name} has the axes "
            f"{machine.mesh}. Name some of them."
        )


def _chains(groups: Groups) -> Iterator[tuple[str, list[Phase]]]:
    """Ways to cut a reduce-scatter into phases: flat, axis by axis, and first inside nodes, then between them."""
    yield from _ways(groups)
    inside, between = groups.only(groups.inside), groups.only(groups.between)
    if inside.size > 1 and between.size > 1:
        outer = list(_ways(between))
        yield from ((f"{a} inside, {b} between", x + y) for a, x in _ways(inside) for b, y in outer)


def _ways(groups: Groups) -> Iterator[tuple[str, list[Phase]]]:
    yield "ring", [ring(groups)]
    if groups.size <= MAX_DIRECT:
        yield "direct", [direct(groups)]
    if len(groups.axes) > 1:
        yield "recursive", _one_by_one(groups)


def _one_by_one(groups: Groups) -> list[Phase]:
    """A phase for each axis, those inside nodes first: what is left for the slower links is then the least."""
    return [direct(groups.only((axis,))) for axis in (*reversed(groups.inside), *reversed(groups.between))]


def _scatter(name: str, phases: Sequence[Phase], size: int) -> Line:
    """The phases one after the other, each on what the one before left: its members send pieces of 1/p of that."""
    latency, load, left = 0.0, 0.0, 1.0
    for phase in phases:
        left /= phase.size
        latency += phase.latency
        load += left * phase.load
    return Line(name, latency, load * size / (size - 1))


def _doubling(groups: Groups) -> Line:
    """An all-reduce of half the latency: axis by axis, everyone sends the whole to everyone and adds up."""
    phases = _one_by_one(groups)
    load = sum(phase.load for phase in phases)
    return Line("doubling", sum(phase.latency for phase in phases), load * groups.size / (2 * (groups.size - 1)))
