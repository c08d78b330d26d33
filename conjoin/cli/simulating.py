"""The command that tells the price of a plan before it is paid: `simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, JsonOption
from conjoin.cli.output import check_output, print_json
from conjoin.environment import machines_directory


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
    if trace is not None:
        rooms.report.save_trace(rooms.report.simulated_events(found.simulation), trace)
    if as_json:
        print_json(
            {**rooms.report.prediction_to_json(found, read, where), "trace": None if trace is None else str(trace)}
        )
        return
    typer.echo(rooms.report.prediction_text(found, read, where), nl=False)
    if trace is not None:
        typer.echo(f"{'trace':<12} {trace}; open it in ui.perfetto.dev")
