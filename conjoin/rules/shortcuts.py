"""Which rules earn their place in a library, and which of those are shortcuts.

A rule is dropped where others take its place: by at most `_MOST_REWRITES` of them one side becomes the other, none on
the way has more operators than the larger side, and a search can take every step. A search goes by what graphs cost,
gives up what costs a little more than the best, and tries every rule at every step, so that a longer way, or one
through larger graphs, is not found: a rule that spares it stays, and the library says what it spares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from conjoin.rules.definitions.functions import INTERPRETED
from conjoin.rules.derivation import Derivation, Deriver
from conjoin.rules.generator.forks import forked
from conjoin.rules.generator.selection import by_size_and_numbers, derive_everywhere
from conjoin.rules.library import Entry, of_each_function
from conjoin.rules.patterns import Rule, operators_in

_MOST_REWRITES = 3
"""Dozens of rules match in a model; of four in a row a search tries a small part. Exchanging operands is none of them:
graphs are read in both orders."""
_MOST_EXPRESSIONS = 300
"""Met when a rule is derived from the others: half a second."""


def drop_replaceable(
    entries: Sequence[Entry], progress: Callable[[str], None] = print, workers: int = 1
) -> tuple[Entry, ...]:
    """The entries that no others take the place of, shortcuts marked; of two that do so for each other the smaller."""
    kept = {entry.name: tuple(of_each_function(entry)) for entry in entries}
    rules = {rule.name: rule for variants in kept.values() for rule in variants}
    ordered = sorted(entries, key=lambda entry: by_size_and_numbers(entry.rule), reverse=True)
    ways = dict(zip(ordered, forked(lambda entry: _spared_by(entry, kept), ordered, workers), strict=True))
    for done, (entry, way) in enumerate(ways.items()):
        if way is not None and _is_short(entry, way, rules):  # as long as all others are there
            ways[entry] = now = _spared_by(entry, kept)
            if now is not None and _is_short(entry, now, rules):
                del kept[entry.name]
        if done % 96 == 0:
            progress(f"{done:,} of {len(ordered):,} rules, {len(ordered) - len(kept):,} replaceable")
    return tuple(_marked(entry, ways[entry], rules) for entry in entries if entry.name in kept)


def _spared_by(entry: Entry, kept: Mapping[str, Sequence[Rule]]) -> Derivation | None:
    """How others make one side of a rule the other, wherever it holds; a search rewrites all outputs at once."""
    others = (rule for name, rules in kept.items() if name != entry.name for rule in rules)
    return derive_everywhere(
        _open_form(entry), Deriver(others, each_output=False), _MOST_EXPRESSIONS, entry.conditions
    )


def _open_form(entry: Entry) -> Rule:
    """The rule about a function of which nothing is known, where it holds for every function."""
    for rule in of_each_function(entry):
        if not any(expr.op in INTERPRETED for expr in operators_in(*rule.outputs)):
            return rule
    return entry.rule


def _is_short(entry: Entry, way: Derivation, rules: Mapping[str, Rule]) -> bool:
    for step in way:
        rule = rules[step.rule]
        if any(not expr.args for expr in operators_in(*(rule.right if step.backwards else rule.left))):
            return False  # a constant is written, not found in a graph
    return _length(way, rules) <= _MOST_REWRITES and _largest(way) <= _size(entry.rule)


def _length(way: Derivation, rules: Mapping[str, Rule]) -> int:
    return sum(len(operators_in(*rules[step.rule].outputs)) > 2 for step in way)


def _size(rule: Rule) -> int:
    return max(len(operators_in(*side)) for side in (rule.left, rule.right))


def _largest(way: Derivation) -> int:
    return max(len(operators_in(*step.result)) for step in way)


def _marked(entry: Entry, way: Derivation | None, rules: Mapping[str, Rule]) -> Entry:
    if way is None:
        return entry
    larger = f" over {_largest(way)} operators" if _largest(way) > _size(entry.rule) else ""
    return replace(entry, shortcut=f"{_length(way, rules)} rewrites{larger}")
