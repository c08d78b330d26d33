"""The commands about substitutions: `rules list`, `show`, `test`, `prove`, `why`, `generate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, JsonOption, ModelArgument
from conjoin.cli.output import check_directory, check_output, print_json
from conjoin.errors import UsageError

if TYPE_CHECKING:
    from conjoin.rules import Judgement, Made, Rule, WrittenRule

rules_app = typer.Typer(help="Show, test, prove and generate substitutions.", no_args_is_help=True)
LibraryOption = Annotated[Path | None, typer.Option("--library", help="Another library than the one shipped.")]


def _library(path: Path | None) -> rooms.rules.Library:
    return rooms.rules.Library.shipped() if path is None else rooms.rules.Library.load(path)


@rules_app.command("list")
def list_command(library: LibraryOption = None, as_json: JsonOption = False) -> None:
    """List the rules of the library."""
    entries = _library(library).entries
    if as_json:
        print_json([_facts(entry) for entry in entries])
        return
    for entry in entries:
        typer.echo(str(entry.rule))
    typer.echo(f"\n{len(entries)} rules, each proven and read both ways; `conjoin rules show NAME` tells more.")


def _facts(entry: rooms.rules.Entry) -> dict[str, Any]:
    left, right = (list(map(str, side)) for side in (entry.rule.left, entry.rule.right))
    facts = {"name": entry.name, "left": left, "right": right, "conditions": list(entry.conditions)}
    return {**facts, "method": entry.method, "stamp": entry.stamp, "shortcut": entry.shortcut}


@rules_app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a rule.")],
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one rule: both sides, what it needs, and how it was proven."""
    entry = _find(_library(library), name)
    if as_json:
        print_json(_facts(entry))
        return
    typer.echo(f"{entry.name}\n  left     {'; '.join(map(str, entry.rule.left))}")
    typer.echo(f"  right    {'; '.join(map(str, entry.rule.right))}")
    for condition in entry.conditions:
        typer.echo(f"  needs    {condition}")
    typer.echo(f"  proven   from {entry.method}, for every size and rank; stamp {entry.stamp}")
    if entry.shortcut:
        typer.echo(f"  spares   {entry.shortcut} by other rules")


def _find(library: rooms.rules.Library, name: str) -> rooms.rules.Entry:
    if name not in library.by_name:
        raise UsageError(
            f"Rule {name[:60]!r} was asked for. The library has {len(library.entries)} rules and none of that name. "
            f"`conjoin rules list` names them."
        )
    return library.by_name[name]


@rules_app.command("test")
def test_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of rules, as docs/rules.md describes it.")],
    library: LibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide about rules of your own: derived from the library, proven, refuted, or unknown; exit code 1 if refuted."""
    written = rooms.rules.load_rules(file).rules
    deriver = rooms.rules.Deriver(_library(library).rules)
    found = []
    for one in written:
        found.append(rooms.rules.judge(one.rule, deriver, one.when or None))
        if not as_json:
            _show(found[-1])
    if as_json:
        print_json([_judgement_facts(one) for one in found])
    else:
        counts = [(kind.value, sum(one.standing is kind for one in found)) for kind in rooms.rules.Standing]
        typer.echo(f"{len(found)} rules: {', '.join(f'{number} {word}' for word, number in counts if number)}")
    if any(one.standing is rooms.rules.Standing.REFUTED for one in found):
        raise typer.Exit(1)


def _show(found: Judgement) -> None:
    typer.echo(f"{found.standing.value:<9} {found.rule}")
    for step in found.derivation or ():
        typer.echo(f"{'':<12}{step.rule}{' backwards' if step.backwards else ''}: {'; '.join(map(str, step.result))}")
    if found.counterexample is not None:
        typer.echo("\n".join(f"{'':<12}{line}" for line in str(found.counterexample).splitlines()[1:]))
    if found.verdict.proven and found.verdict.conditions:
        typer.echo(f"{'':<12}holds where {', '.join(found.verdict.conditions)}")
    if found.reason:
        typer.echo(f"{'':<12}{found.reason}")


def _judgement_facts(found: Judgement) -> dict[str, Any]:
    return {
        "rule": str(found.rule),
        "standing": found.standing.value,
        "proven_from_definitions": found.verdict.proven,
        "conditions": list(found.verdict.conditions),
        "trials": found.num_trials,
        "derivation": [
            {"rule": step.rule, "backwards": step.backwards, "result": list(map(str, step.result))}
            for step in found.derivation or ()
        ],
        "counterexample": None if found.counterexample is None else str(found.counterexample),
        "reason": found.reason,
    }


@rules_app.command("prove")
def prove_command(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A file of rules; otherwise the library.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save those proven as a library here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove every rule again from the definitions and try it out; exit code 1 if one is not proven or is refuted."""
    check_output(output, "library")
    written = rooms.rules.load_rules(file or rooms.rules.SHIPPED).rules
    start = time.perf_counter()
    proven, unproven = _prove(written)
    seconds = time.perf_counter() - start
    if output is not None:
        rooms.rules.Library(tuple(proven)).save(output)
    saved = None if output is None else str(output)
    if as_json:
        others = [{"rule": str(rule), "reason": reason} for rule, reason in unproven]
        facts = {"proven": len(proven), "rules": len(written), "unproven": others}
        print_json({**facts, "seconds": seconds, "saved": saved})
    else:
        for rule, reason in unproven:
            typer.echo(f"NOT PROVEN  {rule}\n            {reason}")
        typer.echo(f"{len(proven)} of {len(written)} rules proven in {seconds:.1f} s")
        if saved is not None:
            typer.echo(f"saved       {saved}")
    if unproven:
        raise typer.Exit(1)


def _prove(written: tuple[WrittenRule, ...]) -> tuple[list[rooms.rules.Entry], list[tuple[Rule, str]]]:
    proven: list[rooms.rules.Entry] = []
    unproven: list[tuple[Rule, str]] = []
    for one in written:
        found = rooms.rules.certify(one.rule)
        if isinstance(found, rooms.rules.Entry):
            proven.append(found)
        else:
            unproven.append((one.rule, found))
    return proven, unproven


@rules_app.command("why")
def why_command(
    model: ModelArgument,
    name: Annotated[str, typer.Argument(metavar="RULE", help="The name of a rule.")],
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")] = None,
    library: LibraryOption = None,
    imports: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where a rule applies in a model, and why it does not where it almost does."""
    rooms.models.import_modules(imports)
    rule = _find(_library(library), name).rule
    graph = rooms.models.load_model_graph(model, batch_size=batch, training=True)
    matches = rooms.rules.find_matches(graph, rule)
    misses = [str(miss) for miss in rooms.rules.why(graph, rule)]
    if as_json:
        print_json({"rule": str(rule), "model": graph.name, "applies": len(matches), "not_at": misses})
        return
    typer.echo(f"{rule}\napplies at {len(matches)} places of {graph.name}")
    for miss in misses:
        typer.echo(f"  not at {miss}")


@rules_app.command("generate")
def generate_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Save the library here, as .toml.")],
    state: Annotated[Path | None, typer.Option("--state", help="Keep what was enumerated here.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Processes that enumerate.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Generate, prove and prune a library from the definitions of the operators alone."""
    check_output(output, "library")
    check_directory(state, "state of the enumeration")
    start = time.perf_counter()
    more = rooms.rules.edge_candidates()
    made = rooms.rules.make_library(
        directory=state, workers=workers, progress=lambda line: typer.echo(line, err=True), more=more
    )
    made.library.save(output)
    if as_json:
        print_json(_made_facts(made, output, time.perf_counter() - start))
    else:
        _tell_made(made, output, time.perf_counter() - start)
    if made.refuted:
        raise typer.Exit(1)


def _tell_made(made: Made, output: Path, seconds: float) -> None:
    for selection in made.selections:
        counts = selection.counts
        typer.echo(
            f"{selection.vocabulary:<16} {selection.num_graphs:>10,} graphs {counts.initial:>10,} candidates "
            f"{counts.renamed:>9,} renamed {counts.without_common:>8,} pruned {len(selection.rules):>6,} left"
        )
    typer.echo(f"{made.num_proven} proven, {len(made.unproven)} not: {dict(rooms.rules.reasons_of(made))}")
    for rule in made.refuted:
        typer.echo(f"REFUTED     {rule}")
    typer.echo(f"saved       {output}: {len(made.library.entries)} rules in {seconds:.0f} s")


def _made_facts(made: Made, output: Path, seconds: float) -> dict[str, Any]:
    return {
        "vocabularies": [
            {
                "name": selection.vocabulary,
                "graphs": selection.num_graphs,
                "candidates": selection.counts.initial,
                "left": len(selection.rules),
            }
            for selection in made.selections
        ],
        "proven": made.num_proven,
        "unproven": dict(rooms.rules.reasons_of(made)),
        "refuted": [str(rule) for rule in made.refuted],
        "rules": len(made.library.entries),
        "seconds": seconds,
        "saved": str(output),
    }
