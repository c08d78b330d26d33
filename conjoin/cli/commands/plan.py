"""The commands that find plans and show them: `plan`, `compare`, `explain`, `diff`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.launch_lines import Asked, next_commands, next_lines
from conjoin.cli.options import (
    ImportOption,
    JsonOption,
    LengthOption,
    ModelArgument,
    PrecisionOption,
    SizeOption,
)
from conjoin.cli.output import check_output, print_json
from conjoin.cli.quantities import parse_bytes, parse_fixed, parse_seconds, parse_sizes
from conjoin.cli.search_answer import (
    Notes,
    comparison_lines,
    costs_mark,
    progress_line,
    result_lines,
    result_to_json,
    row_to_json,
    take_notes,
    top_lines,
)
from conjoin.environment import cache_directory, machines_directory
from conjoin.errors import ConjoinError, UsageError

if TYPE_CHECKING:
    from conjoin.frontends import Precision
    from conjoin.ir import Graph, Pipeline, Plan
    from conjoin.machine import Machine
    from conjoin.report import Explanation, PipelineExplanation
    from conjoin.search import SearchResult

_PLAN_HELP = "A plan file."
_OPTIMIZER_HELP = "sgd, sgd-momentum, adam, adamw; or -fused. Without it adam."
_SEARCH_HELP = (
    "How to look for a plan: joint, unity, sequential, taso-then-flexflow, mcmc, coordinate, exhaustive, random, "
    "named. Without it joint."
)
_STRATEGY_HELP = (
    "NAME or NAME:degrees, as megatron:tp=2,sp. Names: single, data-parallel (ddp), zero1 (zero2), fsdp (zero3), hsdp, "
    "megatron, context, expert, one-weird-trick, table-parallel, spatial, vertex-parallel, reduction, pipeline, sbp3d. "
    "Joined by +, as in hsdp:shard=8,replicate=4+megatron:tp=8+recompute=full+micro=4; recompute: none, selective, "
    "full, every-2; offload: activations, optimizer, both, inputs; statistics: all, rank."
)
_STRATEGIES_HELP = "Compare this one, as plan takes it; may be given several times. Then --search says which searches."
_RULES_HELP = "Substitutions of your own (docs/rules.md), to search with; they are proven first."
_BUDGET_HELP = "Time to look for one: 90s, 5m. Without it 60s, or --cpu-budget alone."


def plan_command(
    model: ModelArgument,
    machine: Annotated[str, typer.Option("--machine", help="local:4, a preset as summit:4, or machine.toml.")],
    strategy: Annotated[str | None, typer.Option("--strategy", help=_STRATEGY_HELP)] = None,
    search: Annotated[str | None, typer.Option("--search", help=_SEARCH_HELP)] = None,
    budget: Annotated[str | None, typer.Option("--budget", help=_BUDGET_HELP)] = None,
    cpu_budget: Annotated[str | None, typer.Option("--cpu-budget", help="The same in CPU time.")] = None,
    objective: Annotated[str, typer.Option("--objective", help="time, or cost: time times devices used.")] = "time",
    memory: Annotated[str | None, typer.Option("--memory", help="What tensors may take of a device: 40GiB.")] = None,
    at_most: Annotated[str | None, typer.Option("--at-most", help="What a step may take: 200ms.")] = None,
    fix: Annotated[list[str] | None, typer.Option("--fix", help="A tensor's layout: fc.weight=d0:S(0).")] = None,
    forbid_axis: Annotated[list[str] | None, typer.Option("--forbid-axis", help="Split nothing over it.")] = None,
    stages: Annotated[int | None, typer.Option("--stages", help="How many; 1: no pipeline.")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help=_OPTIMIZER_HELP)] = None,
    start: Annotated[Path | None, typer.Option("--start", help="A plan to be no worse than.")] = None,
    rules: Annotated[Path | None, typer.Option("--rules", help=_RULES_HELP)] = None,
    imports: ImportOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Search, also where a plan is remembered.")] = False,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")] = None,
    length: LengthOption = None,
    size: SizeOption = None,
    precision: PrecisionOption = None,
    as_json: JsonOption = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan here.")] = None,
) -> None:
    """Find the fastest plan for training a model on a machine, or make that of a named strategy."""
    check_output(output, "plan")
    rooms.models.import_modules(imports)
    usual = rooms.search.Wish()
    wish = rooms.search.Wish(
        search or usual.search,
        _wall_budget(budget, cpu_budget),
        optimizer or usual.optimizer,
        None if memory is None else parse_bytes(memory),
        cpu_budget=None if cpu_budget is None else parse_seconds(cpu_budget),
        at_most=None if at_most is None else parse_seconds(at_most),
        objective=objective,
        fixed=parse_fixed(fix or ()),
        forbidden_axes=tuple(dict.fromkeys(forbid_axis or ())),
        rules=None if rules is None or strategy is not None else rooms.rules.prove_rules(rules),
        stages=stages,
    )
    rooms.search.check_wish(wish, rooms.search.search_names())
    chosen = rooms.machine.parse_machine(machine, machines_directory())
    before = () if start is None else (rooms.models.read_plan(start, imports),)
    if strategy is not None:
        given: dict[str, object] = {
            "--search": search, "--budget": budget, "--cpu-budget": cpu_budget, "--memory": memory, "--fix": fix,
            "--at-most": at_most, "--forbid-axis": forbid_axis, "--stages": stages, "--optimizer": optimizer,
            "--start": start, "--objective": objective != usual.objective, "--fresh": fresh, "--rules": rules,
        }  # fmt: skip
        _check_alone(strategy, [name for name, value in given.items() if value])
        rooms.search.read_request(strategy)  # a slip in it is told before a large model is built
    asked = rooms.api.precision_on(chosen, precision)
    sizes = parse_sizes(length, size)
    load = partial(rooms.models.load_model_graph, model, batch_size=batch, training=None, sizes=sizes)
    launch = Launch(output, Asked(model, batch, sizes, tuple(imports or ())))
    graph = load(precision=asked)
    if strategy is not None:
        made = replace(rooms.api.make_named(graph, chosen, strategy), precision=_text(asked) or "")
        if output is not None:
            made.save(output)
        _show_summary(made, launch, as_json)
        return
    answer = _look_for(Question(graph, chosen, wish, before), fresh)
    answer = replace(answer, plan=replace(answer.result.plan, precision=_text(asked) or ""))
    if output is not None:
        answer.made.save(output)
    hints = _stages_left_out(graph, chosen, wish)
    if asked is None and not as_json and not model.endswith(".json"):
        narrow = lambda wanted: load(precision=wanted)
        hints += _in_bf16(graph, answer.result, chosen, wish.optimizer, narrow)
    answer = replace(answer, hints=hints)
    _show_answer(answer, _notes(answer, graph, chosen, wish.optimizer), launch, as_json)


@dataclass(frozen=True, slots=True)
class Launch:
    """Where a plan was saved, and what was named that running it needs again."""

    output: Path | None
    asked: Asked

    def lines(self, plan: Plan | Pipeline) -> list[str]:
        """Where the plan is, and the next command."""
        saved = self.output if self.output is not None else "no; -o plan.json saves the plan"
        return [f"{'saved':<12} {saved}", *next_lines(next_commands(plan, self.output, self.asked))]

    def to_json(self, plan: Plan | Pipeline) -> dict[str, Any]:
        """The same as plain data."""
        return {"saved": _text(self.output), "next": next_commands(plan, self.output, self.asked)}


_NARROW = "bf16-mixed"


def _stages_left_out(graph: Graph, machine: Machine, wish: rooms.search.Wish) -> tuple[str, ...]:
    """Why a search that would look for pipelines did not, where the model's function or the user can change that."""
    others = rooms.search.num_beside_loss(graph)
    if machine.num_devices == 1 or wish.search != "joint" or wish.stages is not None or not graph.training:
        return ()
    if wish.fixed or wish.forbidden_axes:
        named = " and ".join(
            name for name, given in (("--fix", wish.fixed), ("--forbid-axis", wish.forbidden_axes)) if given
        )
        return (
            f"{'stages':<12} none were looked for: a stage has devices and axes of its own, and {named} "
            f"{'ask' if ' and ' in named else 'asks'} for layouts on those of the machine",
        )
    if not others:
        return ()
    told = "1 tensor" if others == 1 else f"{others} tensors"
    return (
        f"{'stages':<12} none were looked for: the model gives {told} beside its loss, a pipeline the loss alone; "
        f"with a function that gives the loss, as loss=lambda output: output.loss, they are",
    )


def _in_bf16(
    graph: Graph, found: SearchResult, machine: Machine, optimizer: str, capture: Callable[[Precision | None], Graph]
) -> tuple[str, ...]:
    """What the best named strategy would take in mixed precision, where a model is computed in float32 on GPUs."""
    if machine.device != "cuda" or rooms.report.main_dtype(graph) != "float32" or not found.baseline:
        return ()
    try:
        asked = rooms.api.precision_on(machine, _NARROW)
        plan = rooms.search.make_plan(capture(asked), machine, found.baseline)
        seconds = rooms.api.simulate_plan(plan, machine, optimizer=optimizer).seconds
    except ConjoinError:  # devices without such a rate, or a strategy that does not fit then
        return ()
    told = rooms.report.format_seconds(seconds)
    return (f"{_NARROW:<12} {found.baseline} would take {told} a step; --precision {_NARROW} searches for that",)


def _notes(answer: Answer, graph: Graph, machine: Machine, optimizer: str) -> Notes:
    """What to know of a plan that a search found; one for a part of the machine has no notes."""
    plan, whole = answer.result.plan, answer.result.plan.mesh == machine.mesh
    found = rooms.api.simulate_plan(plan, machine, optimizer=optimizer) if whole else None
    return take_notes(graph, machine, found, optimizer)


def _wall_budget(budget: str | None, cpu_budget: str | None) -> float:
    """The time to look for a plan: what is given, else no limit beside one of CPU time."""
    if budget is not None:
        return parse_seconds(budget)
    return rooms.search.DEFAULT_BUDGET if cpu_budget is None else inf


def _check_alone(strategy: str, given: Sequence[str]) -> None:
    """Refuse what is asked of a search together with a named strategy, which decides all by itself."""
    if given:
        raise UsageError(
            f"The strategy {strategy[:40]!r} was asked for together with what is asked of a search, "
            f"{', '.join(given)}. A strategy decides all by itself. Leave out --strategy, or these."
        )


@dataclass(frozen=True, slots=True)
class Question:
    """What a search is asked."""

    graph: Graph
    machine: Machine
    wish: rooms.search.Wish
    start: tuple[Plan | Pipeline, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What it answers, and what was known of it before."""

    result: SearchResult
    before: SearchResult | None = None
    plan: Plan | Pipeline | None = None
    """The plan with the precision that was asked for."""
    hints: tuple[str, ...] = ()
    """What else may be asked for, in lines."""

    @property
    def made(self) -> Plan | Pipeline:
        return self.plan or self.result.plan

    @property
    def cache(self) -> str:
        """HIT where it was known, RESUMED where a search went on, else MISS."""
        if self.before is None:
            return "MISS"
        return "HIT" if self.before is self.result else "RESUMED"


def _look_for(question: Question, fresh: bool) -> Answer:
    """Search, unless the same was asked before; a search that was not at its end goes on."""
    memory, costs = rooms.search.Remembered(cache_directory() / "plans"), costs_mark()
    graph, machine, wish, start = question.graph, question.machine, question.wish, question.start
    asked = graph, machine, wish, costs
    before = None if fresh or start else memory.find(*asked)
    if before is not None and rooms.search.is_answer(before, wish):
        return Answer(before, before)
    try:
        with progress_line() as show:
            result = rooms.api.search_plan(
                graph, machine, wish, start=start if before is None else before, progress=show
            )
    except rooms.search.TooSlow as error:
        if not start:
            memory.keep(*asked, error.result)
        raise
    if not start:
        memory.keep(*asked, result)
    return Answer(result, before)


def _show_answer(answer: Answer, notes: Notes, launch: Launch, as_json: bool) -> None:
    result = answer.result
    if as_json:
        print_json({**result_to_json(result, notes), "cache": answer.cache, **launch.to_json(answer.made)})
        return
    for line in (*top_lines(notes), *_summary(rooms.api.explain(answer.made))):
        typer.echo(line)
    for line in (*result_lines(result, notes), *answer.hints):
        typer.echo(line)
    for line in (f"{'cache':<12} {_cache_text(answer)}", *launch.lines(answer.made)):
        typer.echo(line)


def _cache_text(answer: Answer) -> str:
    if answer.before is None:
        return "MISS"
    if answer.cache == "HIT":
        return "HIT: the same was asked before; --fresh searches again"
    return f"RESUMED: after {answer.before.search_seconds:.1f} s that were spent before; --fresh begins anew"


def _text(given: object) -> str | None:
    return None if given is None else str(given)


def compare_command(
    model: ModelArgument,
    machine: Annotated[str, typer.Option("--machine", help="A preset as summit:4, or machine.toml.")],
    strategy: Annotated[list[str] | None, typer.Option("--strategy", help=_STRATEGIES_HELP)] = None,
    search: Annotated[list[str] | None, typer.Option("--search", help="A search; all where none is.")] = None,
    budget: Annotated[str, typer.Option("--budget", help="Time for each search: 60s, 5m.")] = "60s",
    memory: Annotated[str | None, typer.Option("--memory", help="What tensors may take of a device: 40GiB.")] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help=_OPTIMIZER_HELP)] = "adam",
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")] = None,
    length: LengthOption = None,
    size: SizeOption = None,
    precision: PrecisionOption = None,
    imports: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare named strategies and searches, or all: predicted step, where it goes, memory, seconds of search."""
    rooms.models.import_modules(imports)
    wish = rooms.search.Wish("named", parse_seconds(budget), optimizer, None if memory is None else parse_bytes(memory))
    every = () if strategy else (name for name in rooms.search.search_names() if name != "named")
    searches = tuple(search or every)
    for name in searches:
        rooms.search.check_wish(replace(wish, search=name), rooms.search.search_names())
    for name in strategy or ():
        rooms.search.read_request(name)
    chosen = rooms.machine.parse_machine(machine, machines_directory())
    asked = rooms.api.precision_on(chosen, precision)
    sizes = parse_sizes(length, size)
    graph = rooms.models.load_model_graph(model, batch_size=batch, training=None, precision=asked, sizes=sizes)
    with progress_line() as show:
        rows = rooms.api.compare(graph, chosen, wish, searches=searches, strategies=strategy, progress=show)
    if as_json:
        print_json([row_to_json(row, chosen) for row in rows])
        return
    best = next((row.prediction for row in rows if row.prediction is not None), None)
    for line in comparison_lines(rows, take_notes(graph, chosen, best, optimizer)):
        typer.echo(line)


def _show_summary(plan: Plan | Pipeline, launch: Launch, as_json: bool) -> None:
    found = rooms.api.explain(plan)
    if as_json:
        print_json({**launch.to_json(plan), **found.summary_to_json()})
        return
    for line in (*_summary(found), *launch.lines(plan)):
        typer.echo(line)


def _summary(found: Explanation | PipelineExplanation) -> list[str]:
    one, several = rooms.report.explanation_summary, rooms.report.pipeline_summary
    return one(found) if isinstance(found, rooms.report.Explanation) else several(found)


def diff_command(
    before: Annotated[Path, typer.Argument(metavar="A", help=_PLAN_HELP)],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    imports: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two plans; the exit code is 0 when they are the same, 1 when not."""
    both = (rooms.models.read_plan(path, imports) for path in (before, after))
    found = rooms.report.diff_plans(*both)
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(str(found), nl=False)
    if not found.equal:
        raise typer.Exit(1)
