"""A pipeline: stages of a model, each a plan on ranks of its own, and the schedule in which they run micro-batches.

Inside a stage everything is as in a plan of one stage. Between stages a tensor has the layout in which the one makes it
on its ranks, and the layout in which the other takes it on its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conjoin.errors import PlanError
from conjoin.ir.accumulation import Accumulation, check_accumulation
from conjoin.ir.computation import computation_digest
from conjoin.ir.custom_operators import statements_to_json
from conjoin.ir.files import write_file
from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Leaf, LeafKind, Value
from conjoin.ir.plan import (
    FORMAT,
    VERSION,
    Mark,
    Plan,
    accumulation_to_json,
    check_plan,
    decisions_to_json,
    mesh_to_json,
    plan_fingerprint,
)
from conjoin.ir.stages import Arrival
from conjoin.ir.verifier import verify
from conjoin.ir.widening import widen, widen_plan
from conjoin.machine import Mesh
from conjoin.ops import Invariant, Split, TensorType
from conjoin.schedules import Edge, Kind, Schedule, check

MAX_CHUNKS = 1 << 16
"""Of what goes between stages: more would be smaller than what is sent beside them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a model and where it runs."""

    plan: Plan
    """Of a micro-batch, on a mesh of its own."""
    ranks: tuple[int, ...]
    """Of the machine, in the order of the plan's mesh."""
    arrivals: tuple[Arrival, ...] = ()
    borrowed: tuple[str, ...] = ()
    """Parameters that belong to another stage: they come from there before a step, and their gradients go back."""

    def input(self, name: str) -> Leaf:
        """The input of that name."""
        return next(leaf for leaf in self.plan.graph.leaves_of(LeafKind.INPUT) if leaf.name == name)

    def parameter(self, name: str) -> Leaf:
        """The parameter of that name."""
        return next(leaf for leaf in self.plan.graph.leaves_of(LeafKind.PARAMETER) if leaf.name == name)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that one stage makes and another reads."""

    source: int
    output: int
    target: int
    input: str
    made: TensorType
    """As the source makes it, on its ranks."""
    taken: TensorType
    """As the target takes it, on its own."""
    has_gradient: bool
    chunks: tuple[int, int] | None = None
    """As in `Arrival`."""

    def __str__(self) -> str:
        return f"output {self.output} of stage {self.source} as {self.input} of stage {self.target}"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages of a model with the schedule of a step."""

    graph: Graph
    """Of a micro-batch on one device: what the stages compute together, and how they are called."""
    stages: tuple[Stage, ...]
    schedule: Schedule
    mesh: Mesh
    """Of all ranks."""
    model: Mark
    machine: Mark
    strategy: str
    accumulation: Accumulation | None = None
    """How a batch is cut into micro-batches; None where it is one."""
    predictions: tuple[tuple[str, float], ...] = ()
    precision: str = ""

    def __str__(self) -> str:
        return f"{self.strategy} plan of {self.model.name} for {self.mesh.size} ranks in {len(self.stages)} stages"

    @property
    def num_micro_batches(self) -> int:
        return 1 if self.accumulation is None else self.accumulation.steps

    @property
    def loss_stage(self) -> int:
        """The stage that makes the loss."""
        return next(i for i, stage in enumerate(self.stages) if stage.plan.graph.loss is not None)

    def transfers(self) -> Iterator[Transfer]:
        """All that goes between stages in a micro-batch, in the order of the stages that read it."""
        for target, stage in enumerate(self.stages):
            for arrival in stage.arrivals:
                made = self.stages[arrival.stage].plan.graph.outputs[arrival.output]
                assert isinstance(made, Value)
                leaf = stage.input(arrival.input)
                ends = arrival.stage, arrival.output, target, arrival.input
                yield Transfer(*ends, made.type, leaf.type, leaf.trainable, arrival.chunks)

    def owner_of(self, parameter: str) -> int:
        """The stage that a parameter belongs to."""
        names = ((i, stage) for i, stage in enumerate(self.stages) if parameter not in stage.borrowed)
        return next(
            i for i, s in names if any(leaf.name == parameter for leaf in s.plan.graph.leaves_of(LeafKind.PARAMETER))
        )

    def save(self, path: str | Path) -> None:
        """Write the pipeline to a file."""
        write_file(path, json.dumps(pipeline_to_json(self), indent=1, ensure_ascii=False) + "\n", "plan", PlanError)


def pipeline_to_json(pipeline: Pipeline) -> dict[str, Any]:
    """The pipeline as plain data, in the format of plans; the graph of every stage as its text form, line by line."""
    operators = statements_to_json(pipeline.graph)
    accumulation = pipeline.accumulation
    return {
        "format": FORMAT,
        "version": VERSION,
        "strategy": pipeline.strategy,
        "model": {"name": pipeline.model.name, "fingerprint": pipeline.model.fingerprint},
        "machine": {"name": pipeline.machine.name, "fingerprint": pipeline.machine.fingerprint},
        "mesh": mesh_to_json(pipeline.mesh),
        "schedule": {
            "name": pipeline.schedule.name,
            "owners": list(pipeline.schedule.owners),
            "rows": [" ".join(map(str, rows)) for rows in pipeline.schedule.rows],
        },
        "predictions": dict(pipeline.predictions),
        **({} if accumulation is None else {"accumulate": accumulation_to_json(accumulation)}),
        **({"precision": pipeline.precision} if pipeline.precision else {}),
        **({"operators": operators} if operators else {}),
        "computes": composition_digest(pipeline),
        "graph": str(pipeline.graph).splitlines(),
        "stages": [_stage_to_json(stage) for stage in pipeline.stages],
    }


def _stage_to_json(stage: Stage) -> dict[str, Any]:
    return {
        "ranks": list(stage.ranks),
        "mesh": mesh_to_json(stage.plan.mesh),
        "strategy": stage.plan.strategy,
        "takes": [_arrival_to_json(arrival) for arrival in stage.arrivals],
        "borrows": list(stage.borrowed),
        **decisions_to_json(stage.plan),
        "graph": str(stage.plan.graph).splitlines(),
    }


def _arrival_to_json(arrival: Arrival) -> dict[str, Any]:
    chunks = {} if arrival.chunks is None else {"chunks": list(arrival.chunks)}
    return {"input": arrival.input, "stage": arrival.stage, "output": arrival.output, **chunks}


def composition_digest(pipeline: Pipeline) -> str:
    """What the stages compute together, and what goes from which to which: a digest that no decision has a part in."""
    stages = [
        [stage.plan.computes, sorted((a.input, a.stage, a.output) for a in stage.arrivals), sorted(stage.borrowed)]
        for stage in pipeline.stages
    ]
    data = [computation_digest(pipeline.graph, pipeline.accumulation), stages]
    return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()


def pipeline_fingerprint(pipeline: Pipeline) -> str:
    """What must be equal on all ranks: everything that decides what runs."""
    data = {k: v for k, v in pipeline_to_json(pipeline).items() if k not in ("predictions", "strategy", "operators")}
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fingerprint_of(plan: Plan | Pipeline) -> str:
    """What must be equal on all ranks, of a plan of one stage or several."""
    return plan_fingerprint(plan) if isinstance(plan, Plan) else pipeline_fingerprint(plan)


def widen_pipeline(pipeline: Pipeline) -> Pipeline:
    """The pipeline in double precision."""
    stages = tuple(replace(stage, plan=widen_plan(stage.plan)) for stage in pipeline.stages)
    return replace(pipeline, graph=widen(pipeline.graph), stages=stages)


def check_pipeline(pipeline: Pipeline) -> Pipeline:
    """The pipeline itself when it is legal; otherwise PlanError says what is not."""
    verify(pipeline.graph)
    for stage in pipeline.stages:
        check_plan(stage.plan)
    fault = next(_faults(pipeline), None)
    if fault is not None:
        raise PlanError(
            f"The pipeline of {pipeline.model.name} in {len(pipeline.stages)} stages is not legal: {fault}. It was "
            f"edited, or its parts are those of different pipelines. Correct that or make the plan again."
        )
    check(pipeline.schedule)
    return pipeline


def _faults(pipeline: Pipeline) -> Iterator[str]:
    yield from _rank_faults(pipeline)
    yield from _arrival_faults(pipeline)
    yield from _parameter_faults(pipeline)
    yield from _schedule_faults(pipeline)
    if pipeline.accumulation is not None:
        try:
            check_accumulation(pipeline.graph, pipeline.accumulation, own_statistics=True)
        except ValueError as error:
            yield str(error)


def _rank_faults(pipeline: Pipeline) -> Iterator[str]:
    owners: dict[int, tuple[int, ...]] = {}
    for i, stage in enumerate(pipeline.stages):
        if len(stage.ranks) != stage.plan.mesh.size or len(set(stage.ranks)) != len(stage.ranks):
            yield f"stage {i} has the ranks {stage.ranks[:8]} for a mesh of {stage.plan.mesh.size} devices"
        for rank in stage.ranks:
            if not 0 <= rank < pipeline.mesh.size:
                yield f"rank {rank} of stage {i} is none of {pipeline.mesh.size}"
            if owners.setdefault(rank, stage.ranks) != stage.ranks:
                yield f"rank {rank} is one of {owners[rank][:8]} for one stage and of {stage.ranks[:8]} for another"
    if len(owners) < pipeline.mesh.size:
        idle = min(set(range(pipeline.mesh.size)) - set(owners))
        yield f"rank {idle} of {pipeline.mesh.size} has no stage"
    losses = [i for i, stage in enumerate(pipeline.stages) if stage.plan.graph.loss is not None]
    if len(losses) != 1:
        yield f"{len(losses)} of its stages make the loss"


def _arrival_faults(pipeline: Pipeline) -> Iterator[str]:
    given = {leaf.name: leaf for leaf in pipeline.graph.leaves_of(LeafKind.INPUT)}
    for i, stage in enumerate(pipeline.stages):
        arriving = {arrival.input for arrival in stage.arrivals}
        inputs = {leaf.name: leaf for leaf in stage.plan.graph.leaves_of(LeafKind.INPUT)}
        for name, leaf in inputs.items():
            if name not in arriving and (name not in given or given[name].type != leaf.type.laid_out(())):
                yield f"stage {i} reads {name}, which neither the batch nor another stage gives"
        for arrival in stage.arrivals:
            if arrival.input not in inputs:
                yield f"stage {i} has no input {arrival.input}"
                continue
            outputs = pipeline.stages[arrival.stage].plan.graph.outputs if 0 <= arrival.stage < i else ()
            made = outputs[arrival.output] if 0 <= arrival.output < len(outputs) else None
            wanted = inputs[arrival.input].type
            if not isinstance(made, Value) or made.type.laid_out(()) != wanted.laid_out(()):
                yield f"stage {i} takes {arrival.input} as {wanted} from stage {arrival.stage}, which does not give it"
                continue
            if not all(1 <= count <= MAX_CHUNKS for count in arrival.chunks or ()):
                yield f"stage {i} takes {arrival.input} in {arrival.chunks} chunks, which are 1 to {MAX_CHUNKS:,}"
            for layout in (made.type.layout, wanted.layout):
                wrong = [axis for axis, placement in layout if not isinstance(placement, Split | Invariant)]
                if wrong:
                    yield f"what stage {i} takes as {arrival.input} is neither whole nor split on axis {wrong[0]}"


def _parameter_faults(pipeline: Pipeline) -> Iterator[str]:
    owners: dict[str, int] = {}
    borrowed: dict[str, int] = {}
    for i, stage in enumerate(pipeline.stages):
        for leaf in stage.plan.graph.leaves_of(LeafKind.PARAMETER):
            if leaf.name in stage.borrowed:
                borrowed[leaf.name] = i
            elif owners.setdefault(leaf.names[0], i) != i:
                yield f"the parameter {leaf.names[0]} belongs to stage {owners[leaf.names[0]]} and to stage {i}"
    for name, i in borrowed.items():
        if name not in owners:
            yield f"stage {i} borrows the parameter {name}, which belongs to none"
    for leaf in pipeline.graph.leaves_of(LeafKind.PARAMETER):
        if leaf.name not in owners:
            yield f"the parameter {leaf.name} belongs to no stage"


def _schedule_faults(pipeline: Pipeline) -> Iterator[str]:
    schedule = pipeline.schedule
    if schedule.num_stages != len(pipeline.stages) or schedule.num_micro_batches != pipeline.num_micro_batches:
        yield (
            f"its schedule is for {schedule.num_stages} stages and {schedule.num_micro_batches} micro-batches, and it "
            f"has {len(pipeline.stages)} and {pipeline.num_micro_batches}"
        )
        return
    if sorted(set(schedule.owners)) != list(range(len(schedule.rows))):
        yield f"its schedule has {len(schedule.rows)} rows of tasks, and the stages' owners are {schedule.owners[:8]}"
        return
    edges = set(stage_edges(pipeline.stages))
    if missing := edges - set(schedule.edges):
        yield f"its schedule knows nothing of what goes from stage {min(missing)[0]} to stage {min(missing)[1]}"
    groups = {owner: stage.ranks for owner, stage in zip(schedule.owners, pipeline.stages, strict=True)}
    for owner, stage in zip(schedule.owners, pipeline.stages, strict=True):
        if stage.ranks != groups[owner]:
            yield f"its schedule gives one owner stages on the ranks {groups[owner][:8]} and {stage.ranks[:8]}"
    for i, stage in enumerate(pipeline.stages):
        rows = [
            row.micro_batch for row in schedule.rows[schedule.owners[i]] if row.stage == i and row.kind is Kind.FORWARD
        ]
        if stage.plan.graph.updates and rows != sorted(rows):
            yield f"stage {i} changes buffers, and its schedule runs micro-batches out of order"


def stage_edges(stages: tuple[Stage, ...]) -> tuple[Edge, ...]:
    """From which stage to which something goes."""
    return tuple(sorted({(arrival.stage, i) for i, stage in enumerate(stages) for arrival in stage.arrivals}))
