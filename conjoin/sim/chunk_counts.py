"""In how many chunks it is fastest to pass on what goes between the stages of a pipeline.

More chunks let the hosts of a chain work at the same time, and cost a latency each. How much depends on the links: the
numbers 1, 4, 16 ... are tried on the simulator, then those between the best and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from conjoin.comm import Grid, TransferPlan, plan_crossing, stage_grid, streams_of
from conjoin.ir import Pipeline
from conjoin.machine import Machine
from conjoin.ops import Layout, TensorType
from conjoin.sim.message_times import followed_seconds
from conjoin.sim.pair_classes import PairClasses, Pairs

MOST = 256
"""Chunks: a chain of 64 hosts then takes a quarter longer than what its busiest host sends."""
LEAST_BYTES = 2**12
"""Of a usual chunk: with smaller ones latencies are all there is."""
NEAR = 1.01
"""Of numbers that are as fast the least is taken."""
MANY, WORSE = 64, 1.2
"""From as many chunks on more of them are not tried where that is so much slower. Fewer may be slower than one and more
than they are faster: a rank is ready only for some rounds ahead."""

_MOST_FOLLOWED = 50_000
"""Messages: about a second. Hundreds of devices with uneven pieces have more that are not alike."""

_Side = tuple[Layout, Grid]


def with_fastest_chunks(pipeline: Pipeline, machine: Machine) -> Pipeline:
    """The pipeline with the number of chunks of all that is passed on between its stages, if links are known."""
    if not machine.has_links:
        return pipeline
    chunks: dict[tuple[int, str], tuple[int, int]] = {}
    for transfer in pipeline.transfers():
        source = transfer.made.layout, stage_grid(pipeline, transfer.source)
        target = transfer.taken.layout, stage_grid(pipeline, transfer.target)
        type, ends = transfer.made.laid_out(()), _on_first_nodes(source, target, machine)
        there, back = (_fastest_between(type, *way, machine) for way in (ends, ends[::-1]))
        if there or back:
            chunks[transfer.target, transfer.input] = there or 1, back or 1
    stages = (
        replace(stage, arrivals=tuple(replace(each, chunks=chunks.get((i, each.input))) for each in stage.arrivals))
        for i, stage in enumerate(pipeline.stages)
    )
    return replace(pipeline, stages=tuple(stages))


def _on_first_nodes(source: _Side, target: _Side, machine: Machine) -> tuple[_Side, _Side]:
    """The same ends nearer to the first node, where all nodes are alike: equal stages are tried once."""
    if len(machine.nodes) > 1 or machine.links or machine.axes:
        return source, target
    first = min(*source[1].devices, *target[1].devices)
    first -= first % machine.devices_per_node
    moved = [
        (layout, Grid(grid.mesh, tuple(d - first for d in grid.devices), tuple(host - first for host in grid.hosts)))
        for layout, grid in (source, target)
    ]
    return moved[0], moved[1]


@lru_cache(maxsize=1024)
def _fastest_between(type: TensorType, source: _Side, target: _Side, machine: Machine) -> int | None:
    plan = plan_crossing(type, source, target)
    return fastest_chunks(plan, machine) if plan.longest_chain > 1 else None


def fastest_chunks(plan: TransferPlan, machine: Machine) -> int:
    """In how many chunks a transfer takes least on a machine, or about as little; as it is where that takes too long
    to find."""
    if plan.longest_chain <= 1:
        return 1
    sizes = plan.cells.y - plan.cells.x
    most = max(1, min(MOST, int(sizes.mean()) * plan.itemsize // LEAST_BYTES))
    seconds: dict[int, float] = {}

    def best_of(counts: Iterable[int]) -> int:
        for count in counts:
            if 1 <= count <= most and count not in seconds:
                classes = PairClasses.of(Pairs.of(streams_of(replace(plan, chunks=count), plan.itemsize), machine))
                if len(classes.messages) > _MOST_FOLLOWED:
                    break
                seconds[count] = followed_seconds(classes)
                if count >= MANY and seconds[count] > WORSE * min(seconds.values()):
                    break
        return min(seconds, key=lambda count: seconds[count], default=plan.chunks)

    best = best_of((1, 4, 16, 64, 256))
    best = best_of((best // 2, best * 2))
    best = best_of((best * 3 // 4, best * 3 // 2))
    return min((count for count in seconds if seconds[count] <= seconds[best] * NEAR), default=best)
