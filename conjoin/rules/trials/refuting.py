"""Try to refute a rule: run both sides on random instances, small ones first, and compare.

A rule that cannot be refuted may still be false, and one that holds only sometimes is refuted only where the prover's
frame does not already ask for what it needs (`instances.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import torch

from conjoin.rules.patterns import Rule, operators_in
from conjoin.rules.trials.evaluating import Value, evaluate
from conjoin.rules.trials.instances import Instance, NoInstance, Sampler
from conjoin.rules.trials.references import Misfit, Shape

_LARGEST = 4
"""Size of a dim in the last trials; kernels and windows add to it."""
_MISFITS = 10
"""Instances for each trial that may not run, where sizes are drawn without knowing that they fit."""
_GIVES_UP = 10
"""Times that no sizes are found at all."""
_MORE = 20
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

    @property
    def reason(self) -> str:
        """How they differ."""
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


def refute(rule: Rule, num_trials: int = 100, seed: int = 0, under_conditions: bool = False) -> Counterexample | None:
    """The smallest counterexample found, or None; NoInstance where the two sides can never both run.

    A rule also fails where both sides run and have different shapes, unless it is meant only for sizes for which they
    have the same (`under_conditions`), as a proven rule is that comes with such conditions.

    >>> from conjoin.rules.text import parse_rule
    >>> refute(parse_rule("commutes", "add(a, b)", "add(b, a)")) is None
    True
    >>> refute(parse_rule("false", "sub(a, b)", "sub(b, a)")).reason
    '...is ... on the left and ... on the right'
    """
    return try_out(rule, num_trials, seed, under_conditions).counterexample


def try_out(rule: Rule, num_trials: int = 100, seed: int = 0, under_conditions: bool = False) -> Trials:
    """Compare both sides on random instances, as `refute` does, and count them."""
    random, ran = Random(seed), list[Counterexample | None]()
    with _one_thread():
        for difference in _trials(Sampler(rule), num_trials, random, same_shapes=True):
            ran.append(difference)
            if len(ran) - _index_of_first(ran) > _MORE:
                break
        has_constants = any(not expr.args for expr in operators_in(*rule.outputs))  # of whatever shapes fit
        if not (any(ran) or has_constants or under_conditions):
            ran += _other_shapes(rule, max(num_trials // 5, 1), random)
    if not ran:
        raise NoInstance("no sizes were found on which both sides run and have the same shapes")
    found = [difference for difference in ran if difference]
    return Trials(len(ran), min(found, key=lambda one: one.instance.num_elements, default=None))


def _index_of_first(ran: Sequence[Counterexample | None]) -> int:
    return next((i for i, difference in enumerate(ran) if difference), len(ran))


def _other_shapes(rule: Rule, num_trials: int, random: Random) -> Iterator[Counterexample]:
    """Instances on which both sides run, and have different shapes."""
    sampler = Sampler(rule, same_outputs=False)
    if not sampler.is_framed and any(expr.op == "split" for expr in operators_in(*rule.outputs)):
        return  # where the two sides are split is not known to be the same place
    for difference in _trials(sampler, num_trials, random, same_shapes=False):
        if difference and difference.shapes[0] != difference.shapes[1]:
            yield difference


def _trials(sampler: Sampler, num_trials: int, random: Random, same_shapes: bool) -> Iterator[Counterexample | None]:
    """One comparison after another, of growing size; what does not run is drawn again."""
    misfits_left = _MISFITS * num_trials
    for trial in range(num_trials):
        largest = 1 + trial * _LARGEST // num_trials
        while misfits_left > 0:
            instance = sampler.draw(random, largest)
            if instance is None:
                misfits_left -= _MISFITS * num_trials // _GIVES_UP
                continue
            try:
                difference = compare(instance)
            except Misfit:
                misfits_left -= 1
                continue
            if same_shapes and difference is not None and difference.shapes[0] != difference.shapes[1]:
                misfits_left -= 1
                continue
            yield difference
            break


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
    """Where the two sides differ on an instance; Misfit where one of them cannot run."""
    rule, setting = instance.rule, instance.setting
    values = evaluate((*rule.left, *rule.right), instance.inputs, setting)
    for output, (left, right) in enumerate(zip(values[: len(rule.left)], values[len(rule.left) :], strict=True)):
        shapes = (left.shape, right.shape)
        if left.axes != right.axes or left.data.shape != right.data.shape:
            return Counterexample(instance, output, shapes)
        place = _first_difference(left.data, right.data)
        if place is not None:
            return Counterexample(instance, output, shapes, place, left.data[place].item(), right.data[place].item())
    return None


def _first_difference(left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...] | None:
    """Among elements that are finite on both sides: elsewhere a function was asked for a value it does not have."""
    near = (left - right).abs() <= _TOLERANCE * (1 + left.abs() + right.abs())
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
