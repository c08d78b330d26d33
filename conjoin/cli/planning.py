"""The commands that find plans and show them: `plan`, `compare`, `explain`, `diff`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from conjoin.api import compare, search_plan
from conjoin.cli.models import ModelArgument, load_model_graph
from conjoin.cli.output import JsonOption, check_output, print_json
from conjoin.cli.quantities import parse_bytes, parse_seconds
from conjoin.cli.searching import comparison_lines, costs_mark, progress_line, result_lines, result_to_json
from conjoin.environment import cache_directory, machines_directory
from conjoin.ir import Graph, Plan, load_plan
from conjoin.machine import Machine, parse_machine
from conjoin.report import diff_plans, explain, explanation_summary, explanation_text
from conjoin.search import Remembered, SearchResult, Wish, make_plan, search_names

_PLAN_HELP = "A plan file."


def plan_command(
    model: ModelArgument,
    machine: Annotated[str, typer.Option("--machine", help="local:4, a preset as summit:4, or machine.toml.")],
    strategy: Annotated[str | None, typer.Option("--strategy", help="NAME or NAME:degrees, as megatron:tp=2.")] = None,
    search: Annotated[str, typer.Option("--search", help="How to look for a plan.")] = "joint",
    budget: Annotated[str, typer.Option("--budget", help="Time to look for one: 60s, 5m.")] = "60s",
    memory: Annotated[str | None, typer.Option("--memory", help="Memory to use of a device: 40GiB.")] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, sgd-momentum, adam, adamw; or -fused.")] = "adam",
    start: Annotated[Path | None, typer.Option("--start", help="A plan to be no worse than.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Search, also where a plan is remembered.")] = False,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")] = None,
    as_json: JsonOption = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan here.")] = None,
) -> None:
    """Find the fastest plan for training a model on a machine, or make that of a named strategy."""
    check_output(output, "plan")
    wish = Wish(search, parse_seconds(budget), optimizer, None if memory is None else parse_bytes(memory))
    chosen = parse_machine(machine, machines_directory())
    before = () if start is None else (load_plan(start),)
    graph = load_model_graph(model, batch_size=batch, training=None)
    if strategy is not None:
        made = make_plan(graph, chosen, strategy)
        if output is not None:
            made.save(output)
        _show_summary(made, output, as_json)
        return
    answer = _look_for(Question(graph, chosen, wish, before), fresh)
    if output is not None:
        answer.result.plan.save(output)
    _show_answer(answer, output, as_json)


@dataclass(frozen=True, slots=True)
class Question:
    """What a search is asked."""

    graph: Graph
    machine: Machine
    wish: Wish
    start: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What it answers, and whether it was remembered."""

    result: SearchResult
    remembered: bool


def _look_for(question: Question, fresh: bool) -> Answer:
    """Search, unless the same was asked before."""
    memory, costs = Remembered(cache_directory() / "plans"), costs_mark()
    asked = question.graph, question.machine, question.wish, costs
    found = None if fresh or question.start else memory.find(*asked)
    if found is not None:
        return Answer(found, True)
    with progress_line() as show:
        graph, machine, wish, start = question.graph, question.machine, question.wish, question.start
        result = search_plan(graph, machine, wish, start=start, progress=show)
    if not question.start:
        memory.keep(*asked, result)
    return Answer(result, False)


def _show_answer(answer: Answer, output: Path | None, as_json: bool) -> None:
    result = answer.result
    if as_json:
        print_json({**result_to_json(result), "cache": "HIT" if answer.remembered else "MISS", "saved": _text(output)})
        return
    for line in explanation_summary(explain(result.plan)):
        typer.echo(line)
    for line in result_lines(result):
        typer.echo(line)
    remembered = "HIT: the same was asked before; --fresh searches again" if answer.remembered else "MISS"
    typer.echo(f"{'cache':<12} {remembered}")
    typer.echo(f"{'saved':<12} {output if output is not None else 'no; -o plan.json saves the plan'}")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def compare_command(
    model: ModelArgument,
    machine: Annotated[str, typer.Option("--machine", help="A preset as summit:4, or machine.toml.")],
    search: Annotated[list[str] | None, typer.Option("--search", help="A search; all where none is.")] = None,
    budget: Annotated[str, typer.Option("--budget", help="Time for each search: 60s, 5m.")] = "60s",
    memory: Annotated[str | None, typer.Option("--memory", help="Memory to use of a device: 40GiB.")] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, sgd-momentum, adam, adamw; or -fused.")] = "adam",
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare all named strategies and searches: predicted step, where it goes, memory, seconds of search."""
    wish = Wish("named", parse_seconds(budget), optimizer, None if memory is None else parse_bytes(memory))
    chosen = parse_machine(machine, machines_directory())
    graph = load_model_graph(model, batch_size=batch, training=None)
    searches = tuple(search or (name for name in search_names() if name != "named"))
    with progress_line() as show:
        rows = compare(graph, chosen, wish, searches=searches, progress=show)
    if as_json:
        print_json([row.to_json() for row in rows])
        return
    for line in comparison_lines(rows):
        typer.echo(line)


def _show_summary(plan: Plan, output: Path | None, as_json: bool) -> None:
    found = explain(plan)
    if as_json:
        print_json({"saved": _text(output), **found.summary_to_json()})
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
