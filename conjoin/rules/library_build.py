"""Make a library: candidates of all vocabularies, proven, and only what does not follow from the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conjoin.rules.definitions.proof import prove
from conjoin.rules.derivations.rewrites import rewrites_of
from conjoin.rules.generalization import padded_alike
from conjoin.rules.generator.forks import forked
from conjoin.rules.generator.generation import Selection, generate
from conjoin.rules.generator.model_vocabularies import OF_MODELS
from conjoin.rules.generator.more_vocabularies import MORE
from conjoin.rules.generator.selection import drop_derived, drop_instances, prove_all
from conjoin.rules.generator.vocabulary import MODELS, MULTILINEAR, TASO, Vocabulary
from conjoin.rules.library import Entry, Library, make_entry, method_of
from conjoin.rules.parameters import with_groups
from conjoin.rules.parser import print_expressions
from conjoin.rules.patterns import Apply, Expr, Input, Rule, operators_in
from conjoin.rules.shortcuts import drop_replaceable
from conjoin.rules.text import parse_rule
from conjoin.rules.trials.instances import NoInstance
from conjoin.rules.trials.refutation import try_out

SIZES: Sequence[tuple[Vocabulary, int]] = (
    *((vocabulary, 3) for vocabulary in TASO), (MULTILINEAR, 3), (MODELS, 2),
    *((vocabulary, 3) for vocabulary in (*MORE, *OF_MODELS)),
)  # fmt: skip
"""How many operators each side has in the library that ships."""
NUM_TRIALS = 100
_EXCHANGES = 2
"""Operators of the largest rules that only exchange inputs."""
_MOST_DERIVED = 60
"""Expressions met when a rule is derived from others."""


@dataclass(frozen=True, slots=True)
class Made:
    """A library, and what was left out on the way."""

    library: Library
    selections: tuple[Selection, ...]
    num_proven: int
    unproven: tuple[tuple[Rule, str], ...]
    refuted: tuple[str, ...]
    """Proven rules that a trial contradicts, and how: they are in no library, and the prover is wrong."""


def make_library(
    sizes: Sequence[tuple[Vocabulary, int]] = SIZES,
    directory: Path | None = None,
    workers: int = 1,
    progress: Callable[[str], None] = print,
    more: Sequence[Rule] = (),
) -> Made:
    """Generate, prove, try out, prune and name; `more` are candidates from elsewhere."""
    found = tuple(generate(v, n, directory=directory, workers=workers, progress=progress) for v, n in sizes)
    candidates = [rule for selection in found for rule in selection.rules if _is_of_use(rule)]
    proven = prove_all([*candidates, *more], prove, progress, workers)
    alike = (padded_alike(rule, prove) for rule in proven.rules)
    general = drop_instances([*filter(_is_of_use, proven.rules), *(rule for rule in alike if rule is not None)])
    refuted = dict(zip(general, forked(refuted_by, general, workers), strict=True))
    true = [rule for rule in general if not refuted[rule]]  # before others are dropped because they follow from these
    kept = [_named(rule) for rule in drop_derived(true, _MOST_DERIVED, progress, workers)]
    kept = _with_own_names(sorted(kept, key=lambda rule: rule.name))
    entries = drop_replaceable(forked(_entry, kept, workers), progress, workers)
    false = tuple(f"{rule}: {reason}" for rule, reason in refuted.items() if reason)
    return Made(Library(entries), found, len(proven.rules), proven.unproven, false)


def certify(rule: Rule) -> Entry | str:
    """The entry of a rule that is proven and that no trial contradicts; of any other why it has none."""
    verdict = prove(rule)
    reason = refuted_by(rule) if verdict.proven else verdict.reason
    return reason or _entry(rule)


def refuted_by(rule: Rule) -> str:
    """How a trial contradicts a rule that is proven, under its conditions; empty where none does."""
    try:
        found = try_out(rule, NUM_TRIALS, when=prove(rule).conditions).counterexample
    except NoInstance as error:
        return str(error)
    return "" if found is None else f"refuted, {found.reason}"


def _entry(rule: Rule) -> Entry:
    return make_entry(rule, prove(rule).conditions, method_of(rule))


def _is_of_use(rule: Rule) -> bool:
    """Not about zeros, which are all the same, nor of sides that differ in the places of inputs only.

    Of the latter those of one or two operators say that operands may be exchanged or grouped otherwise; larger ones
    rearrange what costs the same. Nor such that no graph has either side: constants are written and not found, and what
    the other side does not say cannot be made up. But what a constant is, is said by a side without operators.
    """
    zeros = any(expr.op == "sub" and expr.args[0] == expr.args[1] for expr in operators_in(*rule.outputs))
    alike = all(_is_alike(one, other) for one, other in zip(rule.left, rule.right, strict=True))
    ways = rewrites_of(rule, each_output=False)
    found = any(all(expr.args for expr in operators_in(*way.sources)) for way in ways)
    found |= any(not expr.args for side in (rule.left, rule.right) for expr in side if isinstance(expr, Apply))
    found |= any(isinstance(expr, Input) for expr in rule.right)
    return found and not zeros and not (alike and len(operators_in(*rule.left)) > _EXCHANGES)


def _is_alike(one: Expr, other: Expr) -> bool:
    """Whether two expressions are the same but for their inputs."""
    if isinstance(one, Input) or isinstance(other, Input):
        return isinstance(one, Input) and isinstance(other, Input)
    same = (one.op, one.params, len(one.args)) == (other.op, other.params, len(other.args))
    return same and all(_is_alike(a, b) for a, b in zip(one.args, other.args, strict=True))


def _named(rule: Rule) -> Rule:
    """Named by its operators; one that holds for one group only says so."""
    verdict = prove(rule)
    settled = with_groups(rule, 1) if "groups = 1" in verdict.conditions else rule
    sides = (print_expressions(side) for side in (settled.left, settled.right))
    return parse_rule(f"{_words(rule.left[0])}-to-{_words(rule.right[0])}", *sides)  # as it is read from the file


def _words(expr: object) -> str:
    """The operators of an expression from the outside in, a few of them."""
    if not isinstance(expr, Apply):
        return "itself"
    inner = [arg.op for arg in expr.args if isinstance(arg, Apply)]
    return "-".join([expr.op, *dict.fromkeys(inner)])


def _with_own_names(rules: Sequence[Rule]) -> list[Rule]:
    """Rules of the same name numbered."""
    often, seen = Counter(rule.name for rule in rules), Counter[str]()
    made = []
    for rule in rules:
        seen[rule.name] += 1
        made.append(replace(rule, name=f"{rule.name}-{seen[rule.name]}") if often[rule.name] > 1 else rule)
    return made


def reasons_of(made: Made) -> Mapping[str, int]:
    """Why candidates were not proven, and how many each."""
    return Counter(reason if "not found equal" not in reason else "not found equal" for _, reason in made.unproven)
