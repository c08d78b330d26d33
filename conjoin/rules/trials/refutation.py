"""Try to refute a rule: run both sides with torch on random instances, small ones first, and compare.

Shapes are those at which the left side runs (`instances.py`), whatever a proof thinks of them. A rule that cannot be
refuted may still be false.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import torch

from conjoin.rules.conditions import tensors_in
from conjoin.rules.patterns import Rule, operators_in
from conjoin.rules.trials.evaluation import Value, evaluate
from conjoin.rules.trials.instances import Instance, NoInstance, Right, Sampler
from conjoin.rules.trials.references import Misfit, Shape

_LARGEST = 5
"""Size of a dim in the last trials; kernels and windows add to it."""
_GIVES_UP = 12
"""Times in a row that no sizes are found at all, or the left side does not run."""
_MORE = 12
"""Trials after the first counterexample, for a smaller one."""
_TOLERANCE = 1e-6
"""Of float64 results next to their magnitude: what is different is different by far more."""
_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Counterexample:
    """Where the two sides of a rule differ."""

    instance: Instance
    output: int
    """Which of the outputs, counted from 0."""
    shapes: tuple[Shape, Shape]
    """Of the output on each side."""
    place: tuple[int, ...] = ()
    """The first element that differs; devices first where there are any."""
    left: float = 0.0
    right: float = 0.0
    misfit: str = ""
    """Why the right side does not run."""

    @property
    def reason(self) -> str:
        """How they differ."""
        if self.misfit:
            return f"the left side runs and the right side does not: {self.misfit}"
        which = f"output {self.output} " if len(self.instance.rule.left) > 1 else ""
        if self.shapes[0] != self.shapes[1]:
            return f"{which}has shape {_shown(self.shapes[0])} on the left and {_shown(self.shapes[1])} on the right"
        where = f"at {_shown(self.place)} " if self.place else ""
        return f"{which}{where}is {self.left:.6g} on the left and {self.right:.6g} on the right"

    def __str__(self) -> str:
        setting = self.instance.setting
        chosen = {**setting.numbers, **setting.functions, **{f"{k} (devices)": n for k, n in setting.meshes.items()}}
        lines = [f"{name} = {value}" for name, value in chosen.items()]
        for expr, place in setting.places.items():
            if isinstance(expr.param("axis"), str):
                lines.append(f"axis {expr.param('axis')} of {expr} = dim {place}")
        lines += [f"{expr} has shape {_shown(shape)}" for expr, shape in setting.shapes.items()]
        lines += [f"{expr} has a first part of {first}" for expr, first in setting.firsts.items()]
        lines += [f"{name}: {_described(value)}" for name, value in self.instance.inputs.items()]
        return "\n".join([str(self.instance.rule), *(f"  {line}" for line in dict.fromkeys(lines)), f"  {self.reason}"])


@dataclass(frozen=True, slots=True)
class Trials:
    """What became of trying a rule out."""

    num_run: int
    """Instances on which both sides ran."""
    counterexample: Counterexample | None
    """The smallest that was found."""


def refute(
    rule: Rule, num_trials: int = 100, seed: int = 0, when: Sequence[str] | None = None, any_shapes: bool = False
) -> Counterexample | None:
    """The smallest counterexample found, or None; NoInstance where the left side, or both sides, can never run.

    With conditions (`when`, none of them is `()`) a rule says that wherever its left side runs and they hold, the right
    side runs and is the same. Without (None) it speaks only of shapes at which both sides run; with `any_shapes` only
    of those at which they have the same shapes too.

    >>> from conjoin.rules.text import parse_rule
    >>> refute(parse_rule("commutes", "add(a, b)", "add(b, a)"), when=()) is None
    True
    >>> refute(parse_rule("false", "sub(a, b)", "sub(b, a)")).reason
    '...is ... on the left and ... on the right'
    """
    return try_out(rule, num_trials, seed, when, any_shapes).counterexample


def try_out(
    rule: Rule, num_trials: int = 100, seed: int = 0, when: Sequence[str] | None = None, any_shapes: bool = False
) -> Trials:
    """Compare both sides on random instances, as `refute` does, and count them."""
    sampler, ran, found = Sampler(rule, when or ()), 0, list[Counterexample]()
    with _one_thread():
        for instance in _instances(sampler, num_trials, Random(seed), Right.ANY if when is not None else Right.RUNS):
            difference = _difference(instance, when, any_shapes)
            if isinstance(difference, str):
                continue
            ran += 1
            found += [difference] if difference else []
            if len(found) > _MORE:
                break
    if not ran:
        raise NoInstance("no sizes were found on which both sides run and have the same shapes")
    return Trials(ran, min(found, key=lambda one: one.instance.num_elements, default=None))


def find_beyond(
    rule: Rule, conditions: Sequence[str], when: Sequence[str] = (), num_trials: int = 40
) -> Instance | None:
    """An instance on which both sides give the same shapes and conditions do not hold: what they tell, is not known."""
    sampler = Sampler(rule, when, tensors_in(conditions))
    drawn = _instances(sampler, num_trials, Random(0), Right.RUNS) if conditions else ()
    beyond = (instance for instance in drawn if not sampler.is_within(instance, conditions))
    return next((instance for instance in beyond if _gives_same_shapes(instance)), None)


def _gives_same_shapes(instance: Instance) -> bool:
    try:
        found = compare(instance)
    except Misfit:
        return False
    return found is None or (not found.misfit and found.shapes[0] == found.shapes[1])


def _instances(sampler: Sampler, num_trials: int, random: Random, other: Right) -> Iterator[Instance]:
    """Instances of growing size: of three two on which both sides fit, and one on which they need not."""
    is_made_up = any(not expr.args or expr.op == "split" for expr in operators_in(*sampler.rule.right))
    kinds = [Right.SAME, Right.ANY if is_made_up else other]
    failures = dict.fromkeys(kinds, 0)
    for trial in range(num_trials):
        for kind in kinds[: 2 - trial % 2]:
            if failures[kind] > _GIVES_UP:
                continue
            instance = sampler.draw(random, 2 + trial * (_LARGEST - 1) // num_trials, kind)
            failures[kind] = 0 if instance else failures[kind] + 1
            if instance is not None:
                yield instance


def _difference(instance: Instance, when: Sequence[str] | None, any_shapes: bool) -> Counterexample | str | None:
    """Where the sides differ, None where they do not, or why the instance does not count."""
    try:
        found = compare(instance)
    except Misfit as error:
        return str(error)
    if found is not None and when is None:
        if found.misfit:
            return found.misfit
        if any_shapes and found.shapes[0] != found.shapes[1]:
            return "shapes differ"
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads cost more than these small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(instance: Instance) -> Counterexample | None:
    """Where the two sides differ on an instance; Misfit where the left one cannot run."""
    rule, setting = instance.rule, instance.setting
    lefts = evaluate(rule.left, instance.inputs, setting)
    try:
        rights = evaluate(rule.right, instance.inputs, setting)
    except Misfit as error:
        return Counterexample(instance, 0, (lefts[0].shape, ()), misfit=str(error))
    for output, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        shapes = (left.shape, right.shape)
        if left.axes != right.axes or left.data.shape != right.data.shape:
            return Counterexample(instance, output, shapes)
        place = _first_difference(left.data, right.data)
        if place is not None:
            return Counterexample(instance, output, shapes, place, left.data[place].item(), right.data[place].item())
    return None


def _first_difference(left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...] | None:
    """Among elements that are finite on both sides: elsewhere a function was asked for a value it does not have."""
    if torch.equal(left, right):
        return None
    near = (left - right).abs() <= _TOLERANCE * (1 + left.abs() + right.abs())
    if near.all():
        return None
    differs = (~near & left.isfinite() & right.isfinite()).nonzero()
    return tuple(differs[0].tolist()) if len(differs) else None


def _shown(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "()"


def _described(value: Value) -> str:
    spread = f" on each device along {', '.join(value.axes)}" if value.axes else ""
    if value.data.numel() > _MOST_SHOWN:
        return f"{_shown(value.shape)}{spread}"
    numbers = [f"{number:.4g}" for number in value.data.flatten().tolist()]
    return f"{_shown(value.shape)}{spread}, {' '.join(numbers)}"
