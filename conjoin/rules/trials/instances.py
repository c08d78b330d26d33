"""Random concrete instances of a rule: ranks, sizes, parameters and tensors on which its left side runs.

Shapes come from what each operator asks of its operands (`operator_sizes.py`), never from how a proof sees them. A rule
is a claim about all shapes at which its left side runs and its conditions hold; so those are what is drawn, and whether
the right side runs there is found by running it. Where both sides must run, the right one has a say in the sizes too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from random import Random

import torch

from conjoin.rules.conditions import ONE_GROUP, parse_conditions
from conjoin.rules.operators import BY_NAME
from conjoin.rules.parameters import is_any, with_groups
from conjoin.rules.patterns import Apply, Expr, Input, Rule, inputs_of, operators_in, walk
from conjoin.rules.trials.condition_sizes import post
from conjoin.rules.trials.evaluation import Setting, Value
from conjoin.rules.trials.forms import Forms, Meaningless, choose_ranks, meshes_in, spread_of
from conjoin.rules.trials.operator_sizes import Shaping
from conjoin.rules.trials.puzzles import Contradiction
from conjoin.rules.trials.references import Shape

_PLANS = 16
"""Choices of ranks of which sizes are drawn."""
_TRIES = 40
"""Of sizes until they come out; a try takes less than a millisecond."""
_RIGHT_TRIES = 8
_MOST_ELEMENTS = 20_000
_PARTIAL = ("div", "sqrt", "rsqrt")
"""Operators that are not defined for all numbers."""
_MOVING = ("concat", "split", "transpose", "swap", "flatten", "unflatten", "partition", "combine", "replicate")
"""Operators that only move elements: what they are applied to may be rows of a table."""
_FUNCTIONS = ("none", "relu", "tanh", "square")


class Right(Enum):
    """What sizes are drawn for the right side."""

    ANY = "any"
    """As the left side has them."""
    RUNS = "runs"
    SAME = "same"
    """It runs and gives the shapes of the left side, as far as sizes say."""


class NoInstance(Exception):
    """A rule whose sides cannot run, whatever the sizes."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A rule with everything it leaves open chosen."""

    rule: Rule
    setting: Setting
    inputs: Mapping[str, Value]
    shapes: Mapping[Expr, Shape]
    """Of all expressions for which they are known, on each device."""
    shaping: Shaping = field(compare=False, repr=False)
    """What they were chosen from."""

    @property
    def num_elements(self) -> int:
        """How large it is."""
        return sum(value.data.numel() for value in self.inputs.values())


@dataclass(frozen=True, slots=True)
class _Plan:
    """The sizes of a rule at some ranks, not yet chosen."""

    shaping: Shaping
    spread: Mapping[Expr, tuple[str, ...]]


class Sampler:
    """Draws instances of a rule under conditions."""

    def __init__(self, rule: Rule, when: Sequence[str] = (), others: Iterable[Expr] = ()) -> None:
        """With other expressions over its inputs, of which something may be asked."""
        self.rule = with_groups(rule, 1) if ONE_GROUP in when else rule
        self._conditions = parse_conditions(when)
        self._pairs = tuple(Apply("sub", (), pair) for pair in zip(self.rule.left, self.rule.right, strict=True))
        try:
            self._forms = Forms(*self._pairs, *others)
            spread_of(walk(*self._pairs), Random(0))
        except Meaningless as error:
            raise NoInstance(str(error)) from None
        self._plans: dict[Right, list[_Plan]] = {right: [] for right in Right}
        self._asked = dict.fromkeys(Right, 0)
        self._signed = not any(expr.op in _PARTIAL for expr in operators_in(*rule.outputs))

    def draw(self, random: Random, largest: int, right: Right = Right.SAME) -> Instance | None:
        """An instance with sizes up to about so large, or None where none was found."""
        plan = self._plan(random, right)
        if plan is None:
            return None
        for _ in range(_TRIES):
            shaping = plan.shaping.copy()
            try:
                shaping.puzzle.solve(random, largest, self._made_up(shaping) if right is Right.ANY else ())
            except Contradiction:
                continue
            if right is Right.ANY:
                shaping = self._with_right(shaping, random, largest)
            instance = self._instance(shaping, plan.spread, random)
            if instance is not None:
                return instance
        return None

    def _plan(self, random: Random, right: Right) -> _Plan | None:
        """One of some choices of ranks, each looked at once."""
        plans = self._plans[right]
        if self._asked[right] < 3 * _PLANS and len(plans) < _PLANS:
            self._asked[right] += 1
            made = self._new_plan(random, right)
            if made is not None:
                plans.append(made)
                return made
        return random.choice(plans) if plans else None

    def _new_plan(self, random: Random, right: Right) -> _Plan | None:
        try:
            shaping = Shaping(choose_ranks(self._forms, random))
            for expr in walk(*self.rule.left):
                shaping.add(expr)
            for condition in self._conditions:
                post(shaping, condition)
            if right is not Right.ANY:
                self._add_right(shaping)
            if right is Right.SAME:
                self._same_outputs(shaping)
            shaping.puzzle.settle()
            return _Plan(shaping, spread_of(walk(*self._pairs), random))
        except (Contradiction, Meaningless):
            return None

    def _add_right(self, shaping: Shaping) -> None:
        for expr in walk(*self.rule.right):
            shaping.add(expr)

    def _same_outputs(self, shaping: Shaping) -> None:
        for left, right in zip(self.rule.left, self.rule.right, strict=True):
            shaping.same(shaping.sizes[left], shaping.sizes[right])

    def _with_right(self, left: Shaping, random: Random, largest: int) -> Shaping:
        """The right side at sizes of the left one; without it where it does not fit."""
        for _ in range(_RIGHT_TRIES):
            found = left.copy()
            try:
                self._add_right(found)
                found.puzzle.settle()
                if self._is_free(found):
                    self._same_outputs(found)
                found.puzzle.solve(random, largest)
                return found
            except (Contradiction, Meaningless):
                continue
        return left

    def _is_free(self, shaping: Shaping) -> bool:
        """Whether the right side makes up constants, or splits where nothing says, so that they may be made to fit."""
        open_ones = (*self._made_up(shaping), *shaping.firsts.values())
        return any(shaping.puzzle.value(size) is None for size in open_ones)

    def _made_up(self, shaping: Shaping) -> list[int]:
        """The sizes of constants that only the right side has."""
        left = frozenset(walk(*self.rule.left))
        made = (shaping.sizes.get(e, ()) for e in operators_in(*self.rule.right) if not e.args and e not in left)
        return [size for sizes in made for size in sizes]

    def _instance(self, shaping: Shaping, spread: Mapping[Expr, tuple[str, ...]], random: Random) -> Instance | None:
        found = {expr: [shaping.puzzle.value(size) for size in sizes] for expr, sizes in shaping.sizes.items()}
        shapes = {expr: tuple(sizes) for expr, sizes in found.items() if None not in sizes}
        numbers = {name: value for name, at in shaping.named.items() if (value := shaping.puzzle.value(at)) is not None}
        if any(prod(shape) > _MOST_ELEMENTS for shape in shapes.values()):  # type: ignore[arg-type]
            return None
        setting = self._setting(shaping, shapes, numbers, random)  # type: ignore[arg-type]
        is_whole, signed = random.random() < 0.5, self._signed or random.random() < 0.25
        rows, inputs = _rows(self.rule, shapes), dict[str, Value]()  # type: ignore[arg-type]
        for name in inputs_of(*self.rule.outputs):
            given = Input(name)
            if given not in shapes:  # of a right side that does not fit
                continue
            axes = spread[given]
            shape = (*(numbers[axis] for axis in axes), *shapes[given])
            inputs[name] = Value(_tensor(random, shape, rows.get(name), is_whole, signed), axes)  # type: ignore[arg-type]
        return Instance(self.rule, setting, inputs, shapes, shaping)  # type: ignore[arg-type]

    def is_within(self, instance: Instance, when: Sequence[str]) -> bool:
        """Whether conditions hold for an instance; False where they are about tensors that it does not have."""
        convs = (e for e in operators_in(*self.rule.left) if e.op == "conv" and e.param("groups", "?") == "?")
        operands = ([instance.shapes[arg] for arg in conv.args] for conv in convs)
        if ONE_GROUP in when and any(x[1] != kernel[1] for x, kernel in operands):
            return False
        for seed in range(_RIGHT_TRIES):
            shaping = instance.shaping.copy()
            try:
                for condition in parse_conditions(when):
                    post(shaping, condition)
                shaping.puzzle.solve(Random(seed), _RIGHT_TRIES)
                return True
            except (Contradiction, Meaningless, KeyError):
                continue
        return False

    def _setting(
        self, shaping: Shaping, shapes: Mapping[Expr, Shape], numbers: Mapping[str, int], random: Random
    ) -> Setting:
        """Everything that the expressions leave open."""
        exprs = operators_in(*self.rule.outputs)
        acts = sorted({str(e.param("act")) for e in exprs if is_any("act", e.param("act")) and e.param("act")})
        places = {}
        for expr in exprs:
            on = expr.args[0] if expr.op in ("sum", "mean") else expr
            if isinstance(expr.param("axis"), str) and expr.param("axis"):
                places[expr] = shaping.ranks.place(on, expr.param("axis"))
        firsts = {expr: at for expr, first in shaping.firsts.items() if (at := shaping.puzzle.value(first)) is not None}
        constants = {expr: shapes[expr] for expr in exprs if not expr.args and expr in shapes}
        functions = {name: random.choice(_FUNCTIONS) for name in acts}
        meshes = {name: numbers[name] for name in meshes_in(*exprs) if name in numbers}
        others = {name: number for name, number in numbers.items() if name not in meshes}
        return Setting(others, functions, meshes, places, firsts, constants)


def _rows(rule: Rule, shapes: Mapping[Expr, Shape]) -> Mapping[str, int]:
    """The inputs that are rows of a table, or of a result, and how many rows there are."""
    found: dict[str, int] = {}
    for expr in operators_in(*rule.outputs):
        for addressing, rows in _addressed(expr):
            if rows in shapes:
                count = shapes[rows][0]
                for name in _moved(addressing):
                    found[name] = min(count, found.get(name, count))
    return found


def _addressed(expr: Apply) -> Iterator[tuple[Expr, Expr]]:
    """Operands that say which rows are meant, and whose rows those are."""
    if expr.op in ("embedding", "embedding_bag"):
        yield expr.args[1], expr.args[0]
    elif BY_NAME[expr.op].kind == "edges":
        yield expr.args[1], expr.args[0]
        yield expr.args[2], expr


def _moved(expr: Expr) -> Iterator[str]:
    """The inputs whose elements an expression only moves."""
    if all(isinstance(e, Input) or e.op in _MOVING for e in walk(expr)):
        yield from inputs_of(expr)


def _tensor(random: Random, shape: Sequence[int], rows: int | None, is_whole: bool, signed: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    if rows is not None:
        return torch.randint(0, rows, tuple(shape), generator=generator).double()
    if is_whole:
        return torch.randint(-3 if signed else 1, 4, tuple(shape), generator=generator).double()
    made = torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
    return made * 4 - 2 if signed else made + 0.25
