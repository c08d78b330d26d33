"""What goes between the stages of a pipeline: how long it takes, and the links on which it waits for something else.

A stage in the middle sends activations on and gradients back over one and the same uplink, and two streams come to it.
Links that only one ordered pair of owners uses are left out: what goes from one owner to another has an order already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from conjoin.comm import InRounds, Streams, plan_of_transfer, streams_of
from conjoin.ir import Pipeline, Transfer
from conjoin.machine import Machine
from conjoin.schedules import Edge, SharedLinks
from conjoin.sim.message_times import arrival_seconds
from conjoin.sim.pair_classes import Pairs

_Way = tuple[int, int]
Crossing = tuple[_Way, Streams]
"""From a stage to another, and what is sent."""


class Crossings:
    """Seconds of what goes along each edge of a pipeline, and back, and the links that are shared."""

    def __init__(
        self, edges: Sequence[Edge], owners: Sequence[int], sent: Iterable[Crossing], machine: Machine
    ) -> None:
        seconds: dict[_Way, float] = defaultdict(float)
        wires: dict[_Way, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for way, streams in sent:
            pairs = Pairs.of(streams, machine)
            seconds[way] += arrival_seconds(pairs)
            for wire, taken in pairs.links.wire_seconds(pairs.num_bytes).items():
                wires[way][wire] += taken
        users: dict[str, set[_Way]] = defaultdict(set)
        for (source, target), taken_by in wires.items():
            for wire in taken_by if owners[source] != owners[target] else ():
                users[wire].add((owners[source], owners[target]))
        numbers = {wire: i for i, wire in enumerate(wire for wire, pairs in users.items() if len(pairs) > 1)}
        there, back_again = (
            [tuple((numbers[w], s) for w, s in wires[way].items() if w in numbers) for way in ways]
            for ways in (edges, [edge[::-1] for edge in edges])
        )
        self.activations = tuple(seconds[edge] for edge in edges)
        self.gradients = tuple(seconds[edge[::-1]] for edge in edges)
        self.links = SharedLinks(tuple(there), tuple(back_again)) if numbers else None

    @classmethod
    def of(cls, pipeline: Pipeline, machine: Machine) -> Crossings:
        """All that goes between the stages of a pipeline for a micro-batch."""
        return cls(pipeline.schedule.edges, pipeline.schedule.owners, _all_sent(pipeline), machine)


def _all_sent(pipeline: Pipeline) -> Iterator[Crossing]:
    for transfer in pipeline.transfers():
        for back in (False, True) if transfer.has_gradient else (False,):
            way = (transfer.target, transfer.source) if back else (transfer.source, transfer.target)
            yield way, _streams(pipeline, transfer, back)


def transfer_seconds(pipeline: Pipeline, transfer: Transfer, machine: Machine) -> float:
    """How long a tensor takes from the ranks of one stage to those of another: as long as the busiest link, and longer
    where some of it is passed on."""
    return streams_seconds(_streams(pipeline, transfer, back=False), machine)


def crossing_seconds(plan: InRounds, itemsize: int, machine: Machine) -> float:
    """How long a transfer takes in rounds of messages that somebody has planned."""
    return streams_seconds(streams_of(plan, itemsize), machine)


def streams_seconds(streams: Streams, machine: Machine) -> float:
    """How long some messages take."""
    return arrival_seconds(Pairs.of(streams, machine))


def _streams(pipeline: Pipeline, transfer: Transfer, back: bool) -> Streams:
    """What is sent between the ranks of two stages; back, they change places."""
    return streams_of(plan_of_transfer(pipeline, transfer, back), transfer.made.dtype.itemsize)
