"""What trials think that operators ask of sizes is what torch asks: on random shapes both say yes, or both say no."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from operator import attrgetter
from random import Random

import pytest
import torch

from conjoin.rules.operators import OPS, RuleOp
from conjoin.rules.patterns import Apply, Input, Parameter
from conjoin.rules.trials.evaluation import Setting, Value, evaluate
from conjoin.rules.trials.forms import Forms, choose_ranks, spread_of
from conjoin.rules.trials.operator_sizes import Shaping
from conjoin.rules.trials.puzzles import Contradiction, Puzzle
from conjoin.rules.trials.references import Misfit

CHOICES: dict[str, tuple[Parameter, ...]] = {
    "axis": ("a", -1), "part": (0, 1), "stride": (1, 2), "pad": ("same", "valid", 1), "act": ("none",),
    "groups": ("?", 1, 2), "kernel": (2, 3), "mesh": (2,), "parts": (2, 3), "vertices": (2, 3),
}  # fmt: skip
LARGEST = 4


def applications(op: RuleOp) -> Iterator[Apply]:
    args = tuple(Input(f"x{i}") for i in range(op.num_args))
    for values in product(*(CHOICES[name] for name, _ in op.params)):
        yield Apply(op.name, tuple(zip((name for name, _ in op.params), values, strict=True)), args)


def shape_that_is_thought(shaping: Shaping, expr: Apply, random: Random) -> tuple[int, ...] | None:
    """The shape of a result by the relations of sizes alone; None where they contradict each other."""
    try:
        shaping.add(expr)
        shaping.puzzle.solve(random, LARGEST)
    except Contradiction:
        return None
    return tuple(shaping.puzzle.value(size) or 0 for size in shaping.sizes[expr])


def shape_that_torch_gives(shaping: Shaping, expr: Apply, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    spread = spread_of((*expr.args, expr), Random(0))
    inputs = {
        name: Value(torch.ones([2] * len(spread[Input(name)]) + list(shape), dtype=torch.float64), spread[Input(name)])
        for name, shape in shapes.items()
    }
    on = expr.args[0] if expr.op in ("sum", "mean") else expr
    axis = expr.param("axis")
    places = {expr: shaping.ranks.place(on, axis)} if isinstance(axis, str) and axis else {}
    known = {split: shaping.puzzle.value(first) for split, first in shaping.firsts.items()}
    firsts = {split: first for split, first in known.items() if first is not None}
    if not expr.args:
        return tuple(shaping.puzzle.value(size) or 0 for size in shaping.sizes[expr])
    try:
        return evaluate((expr,), inputs, Setting(meshes={"2": 2}, places=places, firsts=firsts))[0].shape
    except Misfit:
        return None


@pytest.mark.parametrize("op", [op for op in OPS if op.num_args], ids=attrgetter("name"))
def test_sizes_fit_where_torch_runs(op: RuleOp) -> None:
    random, answers = Random(0), Counter[bool]()
    for expr in applications(op):
        forms = Forms(expr)
        for _ in range(12 if op.params else 60):
            shaping, shapes = Shaping(choose_ranks(forms, random)), {}
            for arg in expr.args:
                shaping.add(arg)
                shape = tuple(random.randint(1, LARGEST) for _ in shaping.sizes[arg])
                alike = [other for other in shapes.values() if len(other) == len(shape)]
                if random.random() < 0.6 and alike:
                    shape = alike[0]  # or else they would never fit
                shapes[str(arg)] = shape
                for size, number in zip(shaping.sizes[arg], shape, strict=True):
                    shaping.puzzle.learn(size, number)
            if op.name.startswith(("embedding", "aggregate")):
                shapes["x0"] = (LARGEST, *shapes["x0"][1:])  # rows that the indices, all 1, have
            thought = shape_that_is_thought(shaping, expr, random)
            assert thought == shape_that_torch_gives(shaping, expr, shapes), f"{expr} of {shapes}"
            answers[thought is not None] += 1
    always = op.num_args == 1 and not {"parts", "kernel", "part"} & {name for name, _ in op.params}
    assert answers[True] >= 3
    assert answers[False] >= 1 or always or op.name in ("scale", "embedding", "embedding_bag")


def test_factors_are_not_the_same_because_products_are() -> None:
    found = set()
    for seed in range(40):
        puzzle = Puzzle()
        a, b, c, d = (puzzle.new() for _ in range(4))
        puzzle.same(puzzle.relate("product", (a, b)), puzzle.relate("product", (c, d)))
        with suppress(Contradiction):  # 3 · 3 is no multiple of 2
            puzzle.solve(Random(seed), 4)
            found.add((puzzle.value(a), puzzle.value(b), puzzle.value(c), puzzle.value(d)))
    assert all(a * b == c * d for a, b, c, d in found)
    assert any(a != c for a, _, c, _ in found)


def test_what_cannot_be_is_told() -> None:
    puzzle = Puzzle()
    whole, part = puzzle.number(3), puzzle.new()
    puzzle.state("sum", whole, (part, part))
    with pytest.raises(Contradiction):
        puzzle.solve(Random(0), 4)
