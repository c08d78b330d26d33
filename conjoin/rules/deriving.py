"""Does a rule follow from others? A chain of rewrites from its left side to its right side, found from both ends.

Each step replaces one subexpression, or several outputs at once, by an instance of a rule's other side. Steps go both
ways: a proven rule is an equation. The search keeps the smallest expressions first and stops after a number of them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from conjoin.rules.operators import BY_NAME
from conjoin.rules.parameters import is_any, parameters
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, inputs_of, walk

Roots = tuple[Expr, ...]
"""The outputs of one side."""
MOST_EXPRESSIONS = 4000
"""Looked at from each end; a few seconds."""


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


def instantiate(pattern: Expr, binding: Binding) -> Expr:
    """The pattern with what its inputs and parameters stand for."""
    if isinstance(pattern, Input):
        return binding.inputs[pattern.name]
    defaults = dict(BY_NAME[pattern.op].params)
    params = ((name, binding.params.get(_named(name, value), value)) for name, value in parameters(pattern))
    kept = tuple((name, value) for name, value in params if value != defaults[name])
    return Apply(pattern.op, kept, tuple(instantiate(arg, binding) for arg in pattern.args))


@dataclass(frozen=True, slots=True)
class _Direction:
    """A rule read one way."""

    rule: Rule
    backwards: bool

    @property
    def source(self) -> Roots:
        return self.rule.right if self.backwards else self.rule.left

    @property
    def target(self) -> Roots:
        return self.rule.left if self.backwards else self.rule.right


class Deriver:
    """Finds derivations from a set of rules."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._by_op: dict[str, list[_Direction]] = defaultdict(list)
        for rule in rules:
            for direction in (_Direction(rule, False), _Direction(rule, True)):
                self._file(direction)

    def _file(self, direction: _Direction) -> None:
        """By the operator of the first output; what would make up inputs or parameters out of nothing is left out."""
        known = set(inputs_of(*direction.source)) >= set(inputs_of(*direction.target))
        first = direction.source[0]
        if known and isinstance(first, Apply) and not _names(direction.target) - _names(direction.source):
            self._by_op[first.op].append(direction)

    def derive(self, goal: Rule, most: int = MOST_EXPRESSIONS) -> Derivation | None:
        """A chain of steps from the left side of the goal to its right side, or None where none was found."""
        sides = (_Side(goal.left), _Side(goal.right))
        for _ in range(2 * most):
            side, other = sorted(sides, key=lambda side: len(side.reached))
            current = side.pop() or other.pop()
            if current is None:
                return None
            side = side if current in side.reached else other
            other = sides[1] if side is sides[0] else sides[0]
            if current in other.reached:
                return _join(sides, current)
            limit = max(map(_size, (goal.left, goal.right))) + 4
            for step in self._steps(current):
                if _size(step.result) <= limit and side.reach(step, current) and step.result in other.reached:
                    return _join(sides, step.result)
        return None

    def _steps(self, roots: Roots) -> Iterator[Step]:
        """Every rewrite of one place."""
        for place in walk(*roots):
            candidates = self._by_op[place.op] if isinstance(place, Apply) else []
            for direction in candidates:
                binding = match(direction.source[0], place, Binding({}, {}))
                if binding is not None:
                    yield from self._rewrite(roots, place, direction, binding)

    def _rewrite(self, roots: Roots, place: Expr, direction: _Direction, binding: Binding) -> Iterator[Step]:
        """Replace the place, and the other outputs of the rule where they are found."""
        for full, places in _others(roots, direction.source[1:], binding):
            pairs = zip((place, *places), direction.target, strict=True)
            replaced = {old: instantiate(new, full) for old, new in pairs}
            made = tuple(substitute(root, replaced) for root in roots)
            if made != roots:
                yield Step(direction.rule.name, direction.backwards, made)


def _others(roots: Roots, patterns: Sequence[Expr], binding: Binding) -> Iterator[tuple[Binding, tuple[Expr, ...]]]:
    """Places for the remaining outputs of a rule."""
    if not patterns:
        yield binding, ()
        return
    for place in walk(*roots):
        found = match(patterns[0], place, binding)
        if found is not None:
            for full, places in _others(roots, patterns[1:], found):
                yield full, (place, *places)


def substitute(expr: Expr, replaced: Mapping[Expr, Expr]) -> Expr:
    """The expression with some subexpressions replaced, outermost first."""
    if expr in replaced:
        return replaced[expr]
    if isinstance(expr, Input):
        return expr
    args = tuple(substitute(arg, replaced) for arg in expr.args)
    return expr if args == expr.args else replace(expr, args=args)


def _names(roots: Roots) -> set[str]:
    """Named parameters."""
    params = ((name, value) for e in walk(*roots) if isinstance(e, Apply) for name, value in parameters(e))
    return {_named(name, value) for name, value in params if is_any(name, value) and value != "m"}


def _size(roots: Roots) -> int:
    return sum(isinstance(expr, Apply) for expr in walk(*roots))


class _Side:
    """What was reached from one end, and how."""

    def __init__(self, start: Roots) -> None:
        self.reached: dict[Roots, tuple[Step, Roots] | None] = {start: None}
        self._ticket = count()
        self._queue = [(_size(start), next(self._ticket), start)]

    def pop(self) -> Roots | None:
        return heapq.heappop(self._queue)[2] if self._queue else None

    def reach(self, step: Step, before: Roots) -> bool:
        """Note a new expression; False where it was reached before."""
        if step.result in self.reached:
            return False
        self.reached[step.result] = (step, before)
        heapq.heappush(self._queue, (_size(step.result), next(self._ticket), step.result))
        return True


def _join(sides: tuple[_Side, _Side], middle: Roots) -> Derivation:
    """From the left to the middle, and from there the right side's steps undone."""
    forward: list[Step] = []
    current = middle
    while (came := sides[0].reached[current]) is not None:
        forward.append(came[0])
        current = came[1]
    forward.reverse()
    current = middle
    while (came := sides[1].reached[current]) is not None:
        step, before = came
        forward.append(Step(step.rule, not step.backwards, before))
        current = before
    return tuple(forward)
