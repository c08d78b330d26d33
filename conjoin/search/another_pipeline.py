"""A pipeline for another shape or mode of the same model: the stages of the one that was found, over the same weights.

An operator is in the stage whose weights it reads, or which one before it is in. So every weight stays where it lies.
Inside a stage layouts are those of its plan (`another_shape.py`); a batch is cut into micro-batches that are no larger
than before, and their number has a schedule of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from conjoin.errors import StrategyError
from conjoin.ir import (
    Accumulation,
    Arrival,
    Graph,
    LeafKind,
    Pipeline,
    Stage,
    StageGraph,
    Value,
    check_pipeline,
    cut_in_micro_batches,
    cut_in_stages,
    model_mark,
    stage_edges,
)
from conjoin.schedules import Kind, Row, Schedule, chain
from conjoin.search.another_shape import Alike, plan_alike
from conjoin.search.named_pipelines import SCHEDULES, check_outputs

_STORED = (LeafKind.PARAMETER, LeafKind.BUFFER)


def pipeline_alike(pipeline: Pipeline, captured: Graph) -> Alike[Pipeline]:
    """The pipeline of another graph of the same model, after one that was found; what is stored lies in both alike."""
    check_outputs(captured)
    graph, accumulation = _in_micro_batches(pipeline, captured)
    homes = _homes(pipeline)
    cuts = cut_in_stages(graph, _stages_of(homes, graph), homes)
    _check_stored(pipeline, captured, cuts)
    made = [plan_alike(stage.plan, cut.graph) for stage, cut in zip(pipeline.stages, cuts, strict=True)]
    plans = (replace(m.plan, model=stage.plan.model) for m, stage in zip(made, pipeline.stages, strict=True))
    stages = tuple(
        Stage(plan, stage.ranks, _in_chunks_of(stage, cut.arrivals), cut.borrowed)
        for plan, stage, cut in zip(plans, pipeline.stages, cuts, strict=True)
    )
    steps = 1 if accumulation is None else accumulation.steps
    edges = tuple(sorted({*chain(len(stages)), *stage_edges(stages)}))
    found = replace(
        pipeline,
        graph=graph,
        stages=stages,
        schedule=replace(schedule_alike(pipeline.schedule, steps), edges=edges),
        model=model_mark(captured),
        accumulation=accumulation,
        predictions=(),
    )
    sums = (sum(m.num_operators for m in made), sum(m.shortened for m in made), sum(m.fresh for m in made))
    return Alike(check_pipeline(found), *sums)


def _in_chunks_of(stage: Stage, arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """What a stage takes, in as many chunks as what it takes under the same name."""
    chunks = {arrival.input: arrival.chunks for arrival in stage.arrivals}
    return tuple(replace(arrival, chunks=chunks.get(arrival.input)) for arrival in arrivals)


def _in_micro_batches(pipeline: Pipeline, captured: Graph) -> tuple[Graph, Accumulation | None]:
    """The graph of a micro-batch that is no larger than the pipeline's; the whole where it cannot be cut."""
    before = {leaf.name: leaf.type.shape for leaf in pipeline.graph.leaves_of(LeafKind.INPUT)}
    cut = () if pipeline.accumulation is None or not captured.training else pipeline.accumulation.cut
    sizes = {leaf.name: leaf.type.shape for leaf in captured.leaves_of(LeafKind.INPUT) if leaf.type.shape}
    name = next((name for name in cut if name in sizes), None)
    if name is None:
        return captured, None
    size = sizes[name][0]
    steps = next(n for n in range(1, size + 1) if size % n == 0 and size // n <= before[name][0])
    if steps == 1:
        return captured, None
    return cut_in_micro_batches(captured, steps, own_statistics=True)


def _homes(pipeline: Pipeline) -> dict[str, int]:
    """By weight or buffer, the first stage that holds it."""
    homes: dict[str, int] = {}
    for number, stage in enumerate(pipeline.stages):
        for leaf in stage.plan.graph.leaves:
            if leaf.kind in _STORED and leaf.name not in stage.borrowed:
                homes.setdefault(leaf.names[0], number)
    return homes


def _stages_of(homes: Mapping[str, int], graph: Graph) -> list[int]:
    """The stage of every operator: that of the weights it reads, or the last of those it reads from."""
    stage_of = {Value(leaf): homes.get(leaf.name, 0) if leaf.kind in _STORED else 0 for leaf in graph.leaves}
    found = []
    for node in graph.nodes:
        last = max((stage_of[value] for value in node.inputs), default=0)
        stage_of.update(dict.fromkeys(node.outputs(), last))
        found.append(last)
    return found


def _check_stored(pipeline: Pipeline, captured: Graph, cuts: Sequence[StageGraph]) -> None:
    """Every stage is still there, and reads what it holds."""
    if len(cuts) != len(pipeline.stages):
        raise StrategyError(
            f"A pipeline of {captured.name} for another shape or mode was to be made after one of "
            f"{len(pipeline.stages)} stages. In it {len(cuts)} of them have something to do. Make a plan of its own "
            f"for this shape and mode."
        )
    for number, (stage, cut) in enumerate(zip(pipeline.stages, cuts, strict=True)):
        held = {leaf.names[0]: leaf for leaf in stage.plan.graph.leaves if leaf.kind in _STORED}
        for leaf in cut.graph.leaves:
            is_lent = leaf.name in cut.shared and (leaf.name not in held or held[leaf.name].section is None)
            if leaf.kind in _STORED and (leaf.name not in held or leaf.name in cut.shared) and not is_lent:
                raise StrategyError(
                    f"A pipeline of {captured.name} for another shape or mode was to be made after another. In it "
                    f"stage {number} reads {leaf.name}, which lies with another one. Make a plan for this shape and "
                    f"mode of its own."
                )


def schedule_alike(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """The same kind of schedule for another number of micro-batches; else all forward passes before all backward."""
    owners, count = schedule.owners, schedule.num_owners
    maker = SCHEDULES.get(schedule.name, SCHEDULES["1f1b"])
    made = maker(count, schedule.num_stages // count, num_micro_batches)
    if made.owners == owners:
        return made
    rows = tuple(tuple(_all_then_back(schedule, owner, num_micro_batches)) for owner in range(count))
    return Schedule(owners, num_micro_batches, rows, schedule.edges, "gpipe")


def _all_then_back(schedule: Schedule, owner: int, num_micro_batches: int) -> Iterator[Row]:
    mine = [stage for stage, other in enumerate(schedule.owners) if other == owner]
    for kind, stages in ((Kind.FORWARD, mine), (Kind.BACKWARD, mine[::-1])):
        for stage in stages:
            for micro_batch in range(num_micro_batches):
                yield Row(kind, stage, micro_batch)
