"""Plan files: a plan of one stage, or a pipeline of several, as data that people can read, diff and edit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from conjoin.errors import PlanError, ScheduleError
from conjoin.ir.custom_operators import import_operators, read_statements
from conjoin.ir.files import read_json
from conjoin.ir.nodes import LeafKind
from conjoin.ir.pipeline import Pipeline, Stage, check_pipeline, composition_digest, stage_edges
from conjoin.ir.plan import Mark, Plan, check_plan
from conjoin.ir.plan_reading import (
    KEYS,
    accumulation_from_json,
    check_declared,
    check_keys,
    figures_from_json,
    graph_from_json,
    items_of,
    line_from_json,
    mark_from_json,
    mesh_from_json,
    plan_from_json,
    read_decisions,
    read_plan,
)
from conjoin.ir.stages import Arrival
from conjoin.schedules import Schedule, chain, read_rows

_STAGE_KEYS = frozenset({
    "ranks", "mesh", "strategy", "takes", "borrows", "memory", "substitutions", "computes", "bundle_bytes", "graph",
})  # fmt: skip
_PIPELINE_KEYS = KEYS - {"memory", "substitutions", "bundle_bytes", "chunks"}
_MAX_STAGES = 4096


def load_plan(path: str | Path, imports: Iterable[str] = ()) -> Plan | Pipeline:
    """Read a plan file and check that it is legal.

    Nothing is imported but the modules that are named here, for the custom operators that they register. Without them a
    plan can be read and shown: their operators are taken as the plan states them.
    """
    if not isinstance(path, str | PathLike):
        raise PlanError(
            f"A {type(path).__name__} was given instead of the path of a plan file. Only a file can be read as a plan. "
            f"Pass its path."
        )
    import_operators(imports)
    data = read_json(path, "plan", PlanError)
    try:
        if isinstance(data, dict) and data.get("stages"):
            return _check_composition(check_pipeline(pipeline_from_json(data)), data.get("computes"))
        return check_plan(plan_from_json(data))
    except PlanError as error:
        raise PlanError(f"{error}\n  in {path}") from error.__cause__


def _check_composition(pipeline: Pipeline, computes: object) -> Pipeline:
    """Refuse stages that compute something else together than when they were written; older files do not say."""
    if computes not in (None, composition_digest(pipeline)):
        raise PlanError(
            f"The stages of the plan of {pipeline.model.name} do not compute together what they did when it was made: "
            f"its graph, or what goes from which stage to which, was edited. It would train another model than the one "
            f'it is for. Undo that edit; where it is meant, write "computes": null into the plan.'
        )
    return pipeline


def pipeline_from_json(data: Any) -> Pipeline:
    """Rebuild a pipeline from plain data; PlanError says what is wrong with it."""
    return read_plan(data, _load)


def _load(data: dict[str, Any]) -> Pipeline:
    check_keys(data, _PIPELINE_KEYS)
    undeclared = read_statements(data.get("operators", []))
    graph, machine = graph_from_json(data), mark_from_json(data["machine"], "machine")
    entries = items_of(data, "stages")
    if len(entries) > _MAX_STAGES:
        raise ValueError(f"{len(entries):,} stages are more than {_MAX_STAGES:,}")
    stages = tuple(_stage(entry, i, machine) for i, entry in enumerate(entries))
    for stage in stages:
        check_declared(stage.plan.graph, undeclared)
    accumulation = (
        accumulation_from_json(data["accumulate"], graph, own_statistics=True) if "accumulate" in data else None
    )
    return Pipeline(
        graph=graph,
        stages=stages,
        schedule=_schedule(data["schedule"], stages, 1 if accumulation is None else accumulation.steps),
        mesh=mesh_from_json(items_of(data, "mesh")),
        model=mark_from_json(data["model"], "model"),
        machine=machine,
        strategy=line_from_json(data["strategy"], "strategy"),
        accumulation=accumulation,
        predictions=figures_from_json(data["predictions"]),
        precision=line_from_json(data.get("precision", ""), "its precision"),
    )


def _stage(entry: Any, number: int, machine: Mark) -> Stage:
    if not isinstance(entry, dict):
        raise ValueError(f"{str(entry)[:60]} is no stage")
    check_keys(entry, _STAGE_KEYS)
    plan = read_decisions(entry, Mark(f"stage {number}", ""), machine)
    borrowed = tuple(line_from_json(name, "a parameter") for name in items_of(entry, "borrows"))
    parameters = {leaf.name for leaf in plan.graph.leaves_of(LeafKind.PARAMETER)}
    if unknown := set(borrowed) - parameters:
        raise ValueError(f"stage {number} borrows {min(unknown)[:60]!r}, which it does not read")
    return Stage(
        plan,
        tuple(_count(rank, "a rank") for rank in items_of(entry, "ranks")),
        tuple(_arrival(taken) for taken in items_of(entry, "takes")),
        borrowed,
    )


def _arrival(entry: Any) -> Arrival:
    match entry:
        case {"input": str(name), "stage": int(stage), "output": int(output), **rest} if rest.keys() <= {"chunks"}:
            chunks = _chunks(rest["chunks"]) if rest else None
            return Arrival(name, _count(stage, "a stage"), _count(output, "an output"), chunks)
    raise ValueError(f"{str(entry)[:60]} does not say which output of which stage an input is")


def _chunks(entry: Any) -> tuple[int, int]:
    match entry:
        case [there, back]:
            return _count(there, "a number of chunks"), _count(back, "a number of chunks")
    raise ValueError(f"{str(entry)[:60]} does not say in how many chunks a tensor comes, and its gradient goes back")


def _count(entry: Any, what: str) -> int:
    if type(entry) is not int or not 0 <= entry < 2**31:
        raise ValueError(f"{str(entry)[:40]} is not {what}")
    return entry


def _schedule(entry: Any, stages: tuple[Stage, ...], num_micro_batches: int) -> Schedule:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{str(entry)[:60]} is no schedule")
    check_keys(dict(entry), ("name", "owners", "rows"))
    owners = tuple(_count(owner, "an owner of stages") for owner in items_of(entry, "owners"))
    try:
        rows = tuple(read_rows(line_from_json(text, "a row of the schedule")) for text in items_of(entry, "rows"))
    except ScheduleError as error:
        raise ValueError(str(error)) from None
    edges = tuple(sorted({*chain(len(stages)), *stage_edges(stages)}))
    return Schedule(owners, num_micro_batches, rows, edges, line_from_json(entry["name"], "the name of the schedule"))
