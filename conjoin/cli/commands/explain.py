"""The command that shows a plan: `explain`, and with `--why` what else was possible for a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, JsonOption
from conjoin.cli.output import print_json
from conjoin.environment import machines_directory
from conjoin.errors import UsageError

if TYPE_CHECKING:
    from conjoin.ir import Pipeline, Plan
    from conjoin.machine import Machine
    from conjoin.search import Alternative, Why

_WHY_HELP = (
    "What else was possible for this operator (%12, relu, model.py:9, a module's path) or parameter; 1:%12 in stage 1."
)
_MACHINE_HELP = "With --why: the machine, where its name in the plan does not say which."


def explain_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    why: Annotated[str | None, typer.Option("--why", metavar="NAME", help=_WHY_HELP)] = None,
    machine: Annotated[str | None, typer.Option("--machine", help=_MACHINE_HELP)] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="With --why: as simulate takes it.")] = "adam",
    imports: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a plan as annotated code: how each operator is split, and every collective with the bytes it sends."""
    read = rooms.models.read_plan(plan, imports)
    if why is not None:
        where = _machine_of(read, machine)
        found = rooms.search.find_alternatives(read, where, rooms.api.known_costs(), why, optimizer)
        if as_json:
            print_json(_why_to_json(found))
            return
        for line in _why_lines(found):
            typer.echo(line)
        return
    explained = rooms.api.explain(read)
    if as_json:
        print_json(explained.to_json())
    elif isinstance(explained, rooms.report.Explanation):
        typer.echo(rooms.report.explanation_text(explained), nl=False)
    else:
        typer.echo(rooms.report.pipeline_text(explained), nl=False)


def _machine_of(plan: Plan | Pipeline, named: str | None) -> Machine:
    """The machine that was named, or the one that the plan was made for where its name still says which."""
    if named is not None:
        return rooms.machine.parse_machine(named, machines_directory())
    nodes = prod(axis.size for axis in plan.mesh.axes if axis.between_nodes)
    for name in (plan.machine.name, f"{plan.machine.name}:{nodes}"):
        try:
            found = rooms.machine.parse_machine(name, machines_directory())
        except UsageError:
            continue
        if found.mesh == plan.mesh and found.fingerprint() == plan.machine.fingerprint:
            return found
    raise UsageError(
        f"What else was possible was asked of a plan for {plan.machine.name}. Its prices are not known by that name: "
        f"there is no such machine here, or it is another one now. Name it with --machine."
    )


def _why_to_json(found: Why) -> dict[str, Any]:
    return {
        "name": found.name,
        "present": [{"axes": list(axes), "way": way} for axes, way in found.present],
        "seconds_per_step": found.prediction.seconds,
        "peak_bytes": found.prediction.memory.peak,
        "alternatives": [_alternative_to_json(found, one) for one in found.alternatives],
    }


def _alternative_to_json(found: Why, one: Alternative) -> dict[str, Any]:
    facts: dict[str, Any] = {"axes": list(one.axes), "way": one.way, "index": one.index, "possible": not one.reason}
    if one.prediction is None:
        return {**facts, "reason": one.reason}
    return {
        **facts,
        "seconds_per_step": one.prediction.seconds,
        "change_of_seconds": one.prediction.seconds - found.prediction.seconds,
        "change_of_peak_bytes": one.prediction.memory.peak - found.prediction.memory.peak,
        "fits": one.prediction.fits,
    }


def _why_lines(found: Why) -> Iterator[str]:
    before = found.prediction
    step, memory = rooms.report.format_seconds(before.seconds), rooms.report.format_bytes(before.memory.peak)
    yield found.name
    for axes, way in found.present:
        yield f"  {' '.join(axes):<16} {way:<36} now: {step} a step, {memory}"
    for one in found.alternatives:
        what = f"  {' '.join(one.axes):<16} {one.way:<36}"
        if one.prediction is None:
            yield f"{what} cannot be: {one.reason}"
            continue
        seconds = one.prediction.seconds - before.seconds
        more = one.prediction.memory.peak - before.memory.peak
        sign, heavier = "+" if seconds >= 0 else "-", "+" if more >= 0 else "-"
        share = seconds / before.seconds if before.seconds else 0.0
        told = f"{sign}{rooms.report.format_seconds(abs(seconds))} ({share:+.1%}), "
        told += f"{heavier}{rooms.report.format_bytes(abs(more))}"
        yield f"{what} {told}{'' if one.prediction.fits else ', does not fit'}"
