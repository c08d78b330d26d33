"""Does a rule follow from others? A chain of rewrites from its left side to its right side.

Each step replaces one subexpression of an output by an instance of a rule's other side. Steps go both ways: a proven
rule is an equation. How chains are found: `derivations/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from conjoin.rules.derivations.equalities import Change
from conjoin.rules.derivations.rewrites import Rewrite, rewrites_of
from conjoin.rules.derivations.saturation import Saturation
from conjoin.rules.derivations.worlds import find_world
from conjoin.rules.patterns import Expr, Rule

Roots = tuple[Expr, ...]
"""The outputs of one side."""
MOST_EXPRESSIONS = 1500
"""Met on the way; a few seconds."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rewrite of a derivation."""

    rule: str
    backwards: bool
    result: Roots


Derivation = tuple[Step, ...]


@lru_cache(maxsize=4096)
def _rewrites(rule: Rule, each_output: bool) -> tuple[Rewrite, ...]:
    """Of a rule; libraries are made from many sets of the same rules."""
    return tuple(rewrites_of(rule, each_output))


class Deriver:
    """Finds derivations from a set of rules."""

    def __init__(self, rules: Iterable[Rule], each_output: bool = True) -> None:
        """With `each_output=False` rules of several outputs are applied to all of them at once only."""
        self._rewrites = tuple(rewrite for rule in rules for rewrite in _rewrites(rule, each_output))

    def derive(self, goal: Rule, most: int = MOST_EXPRESSIONS, when: Sequence[str] = ()) -> Derivation | None:
        """A chain of steps from the left side of the goal to its right side, or None where none was found.

        Steps may need more than the goal and its conditions say: `judging.derive_checked` tells what.
        """
        world = find_world(goal, when)
        if world is None:
            return None
        changes = Saturation(goal, world, self._rewrites, most).run()
        return None if changes is None else tuple(_steps(goal, changes))


def _steps(goal: Rule, changes: Sequence[Sequence[Change]]) -> Iterator[Step]:
    """The rewrites of all outputs one after the other; the last one gives the right side as the goal writes it."""
    current = list(goal.left)
    steps: list[Step] = []
    for output, rewrites in enumerate(changes):
        for change in rewrites:
            current[output] = change.result
            steps.append(Step(change.reason.rule or "", change.reason.backwards, tuple(current)))
    if steps:
        steps[-1] = replace(steps[-1], result=goal.right)
    return iter(steps)
