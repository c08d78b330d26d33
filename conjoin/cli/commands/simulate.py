"""The command that tells the price of a plan before it is paid: `simulate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, JsonOption
from conjoin.cli.output import check_output, print_json
from conjoin.environment import machines_directory

if TYPE_CHECKING:
    from conjoin.ir import Plan
    from conjoin.machine import Machine
    from conjoin.report import Event
    from conjoin.sim import PipelinePrediction, Prediction


@dataclass(frozen=True, slots=True)
class _OneStage:
    """What is told of a plan of one stage."""

    found: Prediction
    plan: Plan

    def events(self) -> Iterator[Event]:
        return rooms.report.simulated_events(self.found.simulation)

    def to_json(self, machine: Machine) -> dict[str, Any]:
        return rooms.report.prediction_to_json(self.found, self.plan, machine)

    def text(self, machine: Machine) -> str:
        return rooms.report.prediction_text(self.found, self.plan, machine)


@dataclass(frozen=True, slots=True)
class _Stages:
    """What is told of a pipeline."""

    found: PipelinePrediction

    def events(self) -> Iterator[Event]:
        return rooms.report.pipeline_events(self.found)

    def to_json(self, machine: Machine) -> dict[str, Any]:
        return rooms.report.pipeline_prediction_to_json(self.found, machine)

    def text(self, machine: Machine) -> str:
        return rooms.report.pipeline_prediction_text(self.found, machine)


def simulate_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    machine: Annotated[str, typer.Option("--machine", help="A preset as summit:4, or machine.toml.")],
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, sgd-momentum, adam, adamw; or -fused.")] = "adam",
    trace: Annotated[Path | None, typer.Option("--trace", help="Save a trace for Perfetto here.")] = None,
    imports: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict a training step of a plan: how long it takes, where the time goes, and how much memory it needs.

    The precision is the plan's, whose graph has its casts; `conjoin plan --precision` makes a plan in another one.
    """
    check_output(trace, "trace")
    read, where = rooms.models.read_plan(plan, imports), rooms.machine.parse_machine(machine, machines_directory())
    found = rooms.api.simulate_plan(read, where, optimizer=optimizer)
    told: _OneStage | _Stages
    if isinstance(found, rooms.sim.PipelinePrediction):
        told = _Stages(found)
    else:
        told = _OneStage(found, rooms.models.read_plan_of_one_stage(plan, imports))
    if trace is not None:
        rooms.report.save_trace(told.events(), trace)
    if as_json:
        print_json({**told.to_json(where), "trace": None if trace is None else str(trace)})
        return
    typer.echo(told.text(where), nl=False)
    if trace is not None:
        typer.echo(f"{'trace':<12} {trace}; open it in ui.perfetto.dev")
