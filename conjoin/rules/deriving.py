"""Does a rule follow from others? A chain of rewrites from its left side to its right side.

Each step replaces one subexpression of an output by an instance of a rule's other side. Steps go both ways: a proven
rule is an equation. How chains are found: `derivations/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from conjoin.rules.derivations.equalities import Change
from conjoin.rules.derivations.rewrites import Rewrite, rewrites_of
from conjoin.rules.derivations.saturating import Saturation
from conjoin.rules.derivations.worlds import find_world
from conjoin.rules.parameters import is_any, parameters
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule

Roots = tuple[Expr, ...]
"""The outputs of one side."""
MOST_EXPRESSIONS = 1500
"""Met on the way; a few seconds."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What inputs and named parameters of a rule stand for."""

    inputs: Mapping[str, Expr]
    params: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Step:
    """One rewrite of a derivation."""

    rule: str
    backwards: bool
    result: Roots


Derivation = tuple[Step, ...]


def match(pattern: Expr, expr: Expr, binding: Binding) -> Binding | None:
    """Extend a binding so that the pattern becomes the expression."""
    if isinstance(pattern, Input):
        known = binding.inputs.get(pattern.name)
        if known is None:
            return replace(binding, inputs={**binding.inputs, pattern.name: expr})
        return binding if known == expr else None
    if isinstance(expr, Input) or pattern.op != expr.op or len(pattern.args) != len(expr.args):
        return None
    found = _match_params(pattern, expr, binding)
    for one, other in zip(pattern.args, expr.args, strict=True):
        if found is None:
            return None
        found = match(one, other, found)
    return found


def _match_params(pattern: Apply, expr: Apply, binding: Binding) -> Binding | None:
    params = dict(binding.params)
    for (name, wanted), (_, value) in zip(parameters(pattern), parameters(expr), strict=True):
        if is_any(name, wanted) or wanted == "?":
            if (name, value) == ("pad", "same"):
                return None  # as much as the kernel asks for, in each dim: no number
            if params.setdefault(_named(name, wanted), value) != value:
                return None
        elif wanted != value:
            return None
    return replace(binding, params=params) if _are_apart(params) else None


def _named(name: str, value: Parameter) -> str:
    """Names of dims, of mesh axes and of numbers are kept apart; groups that are not said may be any, all the same."""
    return f"{name if name in _DISTINCT else ''}:{value}"


_DISTINCT = ("axis", "mesh")


def _are_apart(params: Mapping[str, Parameter]) -> bool:
    """Two names of dims are two dims, and two names of mesh axes two axes."""
    for kind in _DISTINCT:
        values = [value for name, value in params.items() if name.startswith(f"{kind}:")]
        if len(set(values)) < len(values):
            return False
    return True


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
