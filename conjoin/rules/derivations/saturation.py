"""Find a chain of rewrites between the sides of a goal: both go into an e-graph, and rules are applied until they meet.

Rewrites whose every part has a value that some expression has already come first: they make nothing new but equalities.
Only where these are used up does one enter that brings new values, the fewest and smallest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, product
from math import isfinite

from conjoin.rules.derivations.equalities import Change, Equalities, Node, Reason
from conjoin.rules.derivations.rewrites import BoundClasses, Matcher, Rewrite
from conjoin.rules.derivations.worlds import Key, Known, World, agree
from conjoin.rules.operators import BY_NAME
from conjoin.rules.parameters import is_any, parameters
from conjoin.rules.pattern_matching import named
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, walk
from conjoin.rules.trials.evaluation import Value

_ROOM = 4
"""Operators by which an expression on the way may be larger than the sides of the goal."""
_BATCH = 12
"""Rewrites with new values that are tried before the others are looked for again."""
_TRIES = 12
"""For each expression that may be met, so many applications may be run."""


@dataclass(frozen=True, slots=True)
class _Built:
    """An expression that a rewrite makes, not yet in the e-graph."""

    known: Known
    key: Key
    args: tuple[_Built | int, ...]
    size: int
    new: int
    """Values in it that nothing had before."""


_Match = tuple[Rewrite, tuple[int, ...], BoundClasses]
"""A rewrite, the classes it rewrites, and what its names stand for."""


@dataclass(order=True, slots=True)
class _Waiting:
    cost: tuple[int, int, int]
    match: _Match = field(compare=False)


class Saturation:
    """One goal, in one world."""

    def __init__(self, goal: Rule, world: World, rewrites: Sequence[Rewrite], most: int) -> None:
        self._world, self._rewrites, self._most = world, rewrites, most
        self._graph = Equalities()
        self._values: dict[tuple[object, ...], list[Value]] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._queue: list[_Waiting] = []
        self._ticket = count()
        self._tries = _TRIES * most
        for expr in walk(*goal.outputs):
            self._enter(expr)
        roots = [[self._graph.number_of[expr] for expr in side] for side in (goal.left, goal.right)]
        self._pairs = list(zip(*roots, strict=True))
        self._limit = max(self._graph.sizes[number] for side in roots for number in side) + _ROOM

    def run(self) -> list[list[Change]] | None:
        """For every output the rewrites from its left side to its right side."""
        while not self._met():
            if self._apply_all() or self._met():
                continue
            if not self._apply_some():
                return None
        return [self._shortened(one, other) for one, other in self._pairs]

    def _shortened(self, one: int, other: int) -> list[Change]:
        """The rewrites without those that lead back to where they were."""
        place = {self._graph.known[one].expr: 0}
        kept: list[Change] = []
        for change in self._graph.explain(one, other):
            kept.append(change)
            before = place.get(change.result)
            if before is not None:
                for dropped in kept[before:]:
                    place.pop(dropped.result, None)
                del kept[before:]
            place[change.result] = len(kept)
        return kept

    def _met(self) -> bool:
        return all(self._graph.find(one) == self._graph.find(other) for one, other in self._pairs)

    def _spent(self) -> bool:
        return len(self._graph) > self._most or self._tries < 0

    def _enter(self, expr: Expr) -> None:
        """An expression of the goal."""
        if isinstance(expr, Input):
            known = Known(expr, self._world.input(expr.name))
            self._graph.add(known)
        else:
            args = [self._graph.number_of[arg] for arg in expr.args]
            operands = [self._graph.known[arg] for arg in args]
            known = Known(expr, next(self._world.values(expr, operands)))
            self._world.learn(expr, operands, known.value)
            self._graph.add(known, Node(self._world.key(expr, operands, known.value), tuple(args)))
        self._note(known.value)

    # Values.

    def _note(self, value: Value) -> None:
        self._values.setdefault(_kind(value), []).append(value)

    def _is_new(self, value: Value) -> bool:
        return not any(agree(value, other) for other in self._values.get(_kind(value), ()))

    # Rewrites.

    def _apply_all(self) -> bool:
        """Apply every rewrite that makes no new value; whether any merged two classes. The others wait."""
        matcher = Matcher(self._graph.classes())
        changed = False
        for match in matcher.matches(self._rewrites):
            if self._spent():
                return False
            rewrite, numbers, bound = match
            ticket = (id(rewrite), *numbers, *bound.inputs.values(), *bound.params.values())
            if ticket in self._seen:
                continue
            self._seen.add(ticket)
            built = self._build_roots(match)
            new = sum(one.new for one in built or () if isinstance(one, _Built))
            if built is not None and new:
                size = sum(one.size for one in built if isinstance(one, _Built))
                heappush(self._queue, _Waiting((new, size, next(self._ticket)), match))
            elif built is not None and self._take(match, built):
                changed = True
                if self._met():
                    return True
        return changed

    def _apply_some(self) -> bool:
        """Apply the cheapest rewrites that wait; whether there were any."""
        for done in range(_BATCH):
            if not self._queue or self._spent():
                return done > 0 and not self._spent()
            match = heappop(self._queue).match
            built = self._build_roots(match)
            if built is not None:
                self._take(match, built)
        return True

    def _take(self, match: _Match, built: Sequence[_Built | int]) -> bool:
        """Merge what a rewrite makes with what it was made of."""
        rewrite, numbers, bound = match
        merged = False
        for number, source, one in zip(numbers, rewrite.sources, built, strict=True):
            target = self._add(one)
            if self._graph.find(target) == self._graph.find(number):
                continue
            before = next(self._build(source, bound), None)
            if before is not None:
                reason = Reason(rewrite.rule, rewrite.backwards)
                merged |= self._graph.merge(self._add(before), target, reason)
        return merged

    def _build_roots(self, match: _Match) -> list[_Built | int] | None:
        """What a rewrite makes, if all of it has the values it should have and is not too large."""
        rewrite, numbers, bound = match
        found: list[_Built | int] = []
        for number, target in zip(numbers, rewrite.targets, strict=True):
            value = self._graph.known[self._graph.find(number)].value
            for built in self._build(target, bound):
                known = self._graph.known[built] if isinstance(built, int) else built.known
                if agree(known.value, value):
                    found.append(built)
                    break
            else:
                return None
        too_large = any(isinstance(built, _Built) and built.size > self._limit for built in found)
        return None if too_large else found

    def _add(self, built: _Built | int) -> int:
        if isinstance(built, int):
            return built
        args = tuple(self._add(arg) for arg in built.args)
        if self._is_new(built.known.value):
            self._note(built.known.value)
        return self._graph.add(built.known, Node(built.key, args))

    def _build(self, pattern: Expr, bound: BoundClasses) -> Iterator[_Built | int]:
        """The pattern with what its inputs and parameters stand for; nothing where that does not run."""
        if isinstance(pattern, Input):
            yield self._graph.smallest(bound.inputs[pattern.name])
            return
        for args in self._build_args(pattern.args, bound):
            yield from self._build_apply(pattern, bound, args)

    def _build_args(self, patterns: Sequence[Expr], bound: BoundClasses) -> Iterator[tuple[_Built | int, ...]]:
        if not patterns:
            yield ()
            return
        for first in self._build(patterns[0], bound):
            for rest in self._build_args(patterns[1:], bound):
                yield (first, *rest)

    def _build_apply(
        self, pattern: Apply, bound: BoundClasses, args: tuple[_Built | int, ...]
    ) -> Iterator[_Built | int]:
        operands = [self._graph.known[arg] if isinstance(arg, int) else arg.known for arg in args]
        for expr in self._written(pattern, bound, operands):
            yield from self._valued(expr, operands, args)

    def _valued(self, expr: Apply, operands: Sequence[Known], args: tuple[_Built | int, ...]) -> Iterator[_Built | int]:
        """An application with its value, or with each that it may have."""
        number = self._graph.number_of.get(expr)
        if number is not None:
            yield number
            return
        self._tries -= 1
        for value in self._world.values(expr, operands):
            key = self._world.key(expr, operands, value)
            size = 1 + sum(self._graph.sizes[arg] if isinstance(arg, int) else arg.size for arg in args)
            new = sum(arg.new for arg in args if isinstance(arg, _Built)) + self._is_new(value)
            yield _Built(Known(expr, value), key, args, size, new)

    def _written(self, pattern: Apply, bound: BoundClasses, operands: Sequence[Known]) -> Iterator[Apply]:
        """The application as the goal would write its parameters; more than one where a dim may be one of two."""
        defaults = dict(BY_NAME[pattern.op].params)
        choices: list[Sequence[tuple[str, Parameter]]] = []
        for name, word in parameters(pattern):
            meant = bound.params.get(named(name, word), word) if is_any(name, word) else word
            choices.append([(name, value) for value in self._world.written(name, meant, operands)])
        args = tuple(operand.expr for operand in operands)
        for params in product(*choices):
            yield Apply(pattern.op, tuple((name, value) for name, value in params if value != defaults[name]), args)


def _kind(value: Value) -> tuple[object, ...]:
    """Values that are the same are of one kind."""
    total = float(value.data.sum())
    return value.axes, tuple(value.data.shape), f"{total:.5g}" if isfinite(total) else "0"
