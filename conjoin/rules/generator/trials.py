"""Candidates tried on concrete values: residues at the sizes they were found with, and for a second test floats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conjoin.rules.generator.arithmetic import PRIME, Array, Field, Floats, Residues, constant, evaluate
from conjoin.rules.generator.candidates import Reader
from conjoin.rules.generator.pruning import INPUT, Equation, Term
from conjoin.rules.generator.shapes import Type, result_type
from conjoin.rules.generator.vocabulary import Choice, Sizes

Value = tuple[Type, Array]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]
_TOLERANCE = 1e-5
"""Of TASO (section 2.3.2)."""
_MOST_KEPT = 100_000
_SEED = 11
_DRAWS = 6
"""Of floats at once: a single number tells little."""


class Trial:
    """All inputs at some sizes; an input that stands for a value of the enumeration is drawn with that value's type."""

    def __init__(self, reader: Reader, sizes: Sizes, field: Field, draw: Draw) -> None:
        self._reader, self._sizes, self._field, self._draw = reader, sizes, field, draw
        self._many = 1 if isinstance(field, Residues) else _DRAWS
        self._vocabulary = reader.found.vocabulary
        self._params = [choice.numbers(sizes) for choice in self._vocabulary.choices]
        self._types: dict[int, Type | None] = {}
        self._values: dict[Term, Value | None] = {}

    def agree(self, one: Term, other: Term) -> bool:
        """Whether two expressions can be evaluated and are equal."""
        first, second = self.value(one), self.value(other)
        if first is None or second is None or first[1].shape != second[1].shape or first[0].spread != second[0].spread:
            return False
        return _are_close(first[1], second[1])

    def holds(self, equation: Equation) -> bool:
        return all(self.agree(one, other) for one, other in zip(equation.left, equation.right, strict=True))

    def value(self, term: Term) -> Value | None:
        if len(self._values) > _MOST_KEPT:
            self._values.clear()
        if term not in self._values:
            self._values[term] = self._input(term[1]) if term[0] == INPUT else self._apply(term)
        return self._values[term]

    def type_of(self, term: Term) -> Type | None:
        found = self.value(term)
        return None if found is None else found[0]

    def is_of_same_rank(self, one: Term, other: Term) -> bool:
        """Whether both can be evaluated and have as many dims, on as many devices, for the same use."""
        first, second = self.type_of(one), self.type_of(other)
        if first is None or second is None:
            return False
        return (len(first.dims), first.spread, first.role) == (len(second.dims), second.spread, second.role)

    def _input(self, value: int) -> Value | None:
        of = self._type(value)
        if of is None:
            return None
        random = np.random.default_rng((_SEED, value))
        if of.role == "index":
            return of, random.integers(0, 2 * self._sizes["v"], (self._many, *of.stored))
        return of, self._draw(random, (self._many, *of.stored))

    def _type(self, value: int) -> Type | None:
        """The type that a value of the enumeration has at these sizes."""
        if value not in self._types:
            self._types[value] = self._find_type(value)
        return self._types[value]

    def _find_type(self, value: int) -> Type | None:
        if value < self._reader.num_inputs:
            return self._vocabulary.inputs[value].type(self._sizes)
        choice, *operands = self._reader.application(value)
        if choice < 0:
            return self._vocabulary.constants[value - self._reader.num_inputs].type(self._sizes)
        types = [self._type(operand) for operand in operands]
        if None in types:
            return None
        return result_type(self._vocabulary.choices[choice].op, self._params[choice], types)  # type: ignore[arg-type]

    def _apply(self, term: Term) -> Value | None:
        choice, *operands = term
        if choice < INPUT:
            return self._constant(INPUT - 1 - choice)
        args = [self.value(operand) for operand in operands]
        known = [arg for arg in args if arg is not None]
        if len(known) < len(args):
            return None
        op, types = self._vocabulary.choices[choice].op, [of for of, _ in known]
        made = result_type(op, self._params[choice], types)
        if made is None:
            return None
        with np.errstate(all="ignore"):  # where a function is not defined both sides have to be so
            return made, evaluate(self._field, op, self._params[choice], types, [content for _, content in known])

    def _constant(self, value: int) -> Value:
        known = self._vocabulary.constants[value - self._reader.num_inputs]
        of = known.type(self._sizes)
        params = Choice(known.expr.op, known.expr.params).numbers(self._sizes)
        dtype = np.int64 if isinstance(self._field, Residues) else np.float64
        return of, np.repeat(constant(self._field, known.expr, params, of.shape, dtype), self._many, 0)


def _are_close(one: Array, other: Array) -> bool:
    """Residues are equal or not; of floats those that both sides leave undefined do not count."""
    if one.dtype != np.float64:
        return np.array_equal(one, other)
    with np.errstate(all="ignore"):
        is_close = np.abs(one - other) <= _TOLERANCE * (1 + np.abs(other))
    return bool(np.all(is_close | (one == other) | (np.isnan(one) & np.isnan(other))))


def residue_trial(reader: Reader) -> Trial:
    sizes = reader.found.vocabulary.sizes
    return Trial(reader, sizes, Residues(), lambda random, shape: random.integers(0, PRIME, shape, np.int64))


def float_trials(reader: Reader, sizes: Sizes) -> tuple[Trial, ...]:
    """Numbers between -1 and 1, and positive ones for functions that are defined for these only."""
    around = Trial(reader, sizes, Floats(), lambda random, shape: random.uniform(-1.0, 1.0, shape))
    positive = Trial(reader, sizes, Floats(), lambda random, shape: random.uniform(0.1, 1.0, shape))
    return around, positive
