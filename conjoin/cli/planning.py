"""The commands that make plans and show them: `plan`, `explain`, `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conjoin.api import UsageError
from conjoin.cli.models import ModelArgument, load_model_graph
from conjoin.cli.output import JsonOption, check_output, print_json
from conjoin.environment import machines_directory
from conjoin.ir import Plan, load_plan
from conjoin.machine import parse_machine
from conjoin.report import diff_plans, explain, explanation_summary, explanation_text
from conjoin.search import make_plan, strategy_names

_PLAN_HELP = "A plan file."


def plan_command(
    model: ModelArgument,
    machine: Annotated[str, typer.Option("--machine", help="local:4, a preset as summit:4, or machine.toml.")],
    strategy: Annotated[str | None, typer.Option("--strategy", help="NAME or NAME:degrees, as megatron:tp=2.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")] = None,
    as_json: JsonOption = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan here.")] = None,
) -> None:
    """Make a plan for training a model on a machine, and show what it stores and sends."""
    if strategy is None:
        raise UsageError(
            f"A plan of {model} was asked for without --strategy. Conjoin cannot yet choose one by itself; the "
            f"strategies are {', '.join(strategy_names())}. Add --strategy with one of these names."
        )
    check_output(output, "plan")
    chosen = parse_machine(machine, machines_directory())
    made = make_plan(load_model_graph(model, batch_size=batch, training=None), chosen, strategy)
    if output is not None:
        made.save(output)
    _show_summary(made, output, as_json)


def _show_summary(plan: Plan, output: Path | None, as_json: bool) -> None:
    found = explain(plan)
    if as_json:
        print_json({"saved": None if output is None else str(output), **found.summary_to_json()})
        return
    for line in explanation_summary(found):
        typer.echo(line)
    typer.echo(f"{'saved':<12} {output if output is not None else 'no; -o plan.json saves the plan'}")


def explain_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help=_PLAN_HELP)], as_json: JsonOption = False
) -> None:
    """Show a plan as annotated code: how each operator is split, and every collective with the bytes it sends."""
    found = explain(load_plan(plan))
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(explanation_text(found), nl=False)


def diff_command(
    before: Annotated[Path, typer.Argument(metavar="A", help=_PLAN_HELP)],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two plans; the exit code is 0 when they are the same, 1 when not."""
    found = diff_plans(load_plan(before), load_plan(after))
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(str(found), nl=False)
    if not found.equal:
        raise typer.Exit(1)
