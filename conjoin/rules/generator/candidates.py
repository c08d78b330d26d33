"""From values with several graphs to distinct candidates: pruning by names and by common subgraphs (TASO, section 2.5).

There are millions of pairs, so that they are compared as rows of small numbers. A candidate is written as its
*skeleton*, the operators of both sides in order, and its *names*, a number for each place of an input in order of first
appearance: `add(x, mul(y, x))` has names 0 1 0. Renaming leaves one candidate of each skeleton and names; and of those
with one skeleton only those whose names are not another's with some made equal.

Operators that both sides apply to the same operands become an input (first form of a common subgraph). The second form,
both sides applying the same operator to operands that are equal, is not met: equal operands are one value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from conjoin.rules.generator.enumeration import Found, first_uses
from conjoin.rules.generator.pruning import INPUT, Equation, Term
from conjoin.rules.patterns import Apply, Expr, Input

Graph = tuple[int, int, int]
"""An application that is no value's smallest graph: choice, left and right operand."""
Skeleton = tuple[int, ...]
Names = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two graphs with the same values: their outputs as ids of values, or as applications."""

    left: tuple[Graph, ...]
    right: tuple[int, ...]
    cut: frozenset[int] = frozenset()
    """Values that are inputs of the candidate."""


class Reader:
    """Reads expressions off the columns of an enumeration."""

    def __init__(self, found: Found) -> None:
        nodes = found.values.nodes
        self.found = found
        self.num_inputs = len(found.vocabulary.inputs)
        self._choice, self._left, self._right = nodes.choice.tolist(), nodes.left.tolist(), nodes.right.tolist()
        self._below: dict[int, frozenset[int]] = {}
        self._whole: dict[int, tuple[Skeleton, Names]] = {}
        """Smallest graphs as they are written, where nothing is cut: millions of candidates share them."""
        masks = found.values.masks(found.others) | found.values.mask[found.other_of]
        self._kept = np.flatnonzero(first_uses(found.vocabulary.inputs)[masks])
        self._splits = list(found.splits())

    def __len__(self) -> int:
        return len(self._kept) + len(self._splits)

    def pair(self, place: int) -> Pair:
        """A candidate; those of two outputs are last."""
        if place >= len(self._kept):
            (choices, whole), parts = self._splits[place - len(self._kept)]
            return Pair(tuple((choice, whole, -1) for choice in choices), parts)
        at, others = self._kept[place], self.found.others
        graph = (others.choice.item(at), others.left.item(at), others.right.item(at))
        return Pair((graph,), (self.found.other_of.item(at),))

    def below(self, value: int) -> frozenset[int]:
        """All values in the smallest graph of a value, itself among them, except inputs."""
        known = self._below.get(value)
        if known is None:
            own = frozenset({value} if value >= self.num_inputs else ())
            known = own.union(*(self.below(arg) for arg in self.operands(value)))
            self._below[value] = known
        return known

    def operands(self, value: int) -> Iterable[int]:
        return (arg for arg in (self._left[value], self._right[value]) if arg >= 0)

    def generalized(self, pair: Pair) -> Pair:
        """With what both sides compute as an input."""
        left = frozenset[int]().union(*(self.below(arg) for graph in pair.left for arg in graph[1:] if arg >= 0))
        right = frozenset[int]().union(*(self.below(value) for value in pair.right))
        return Pair(pair.left, pair.right, left & right)

    def written(self, pair: Pair) -> tuple[Skeleton, Names]:
        if not pair.cut:
            return self._written_whole(pair)
        skeleton: list[int] = []
        places: list[int] = []
        for choice, left, right in pair.left:
            skeleton.append(choice)
            self._write(left, pair.cut, skeleton, places)
            if right >= 0:
                self._write(right, pair.cut, skeleton, places)
        for value in pair.right:
            self._write(value, pair.cut, skeleton, places)
        names: dict[int, int] = {}
        return tuple(skeleton), tuple([names.setdefault(place, len(names)) for place in places])

    def _written_whole(self, pair: Pair) -> tuple[Skeleton, Names]:
        skeleton: Skeleton = ()
        places: Names = ()
        for choice, *operands in pair.left:
            parts = [self._value_written(value) for value in operands if value >= 0]
            skeleton = sum((part[0] for part in parts), (*skeleton, choice))
            places = sum((part[1] for part in parts), places)
        for value in pair.right:
            part = self._value_written(value)
            skeleton, places = skeleton + part[0], places + part[1]
        names: dict[int, int] = {}
        return skeleton, tuple([names.setdefault(place, len(names)) for place in places])

    def _value_written(self, value: int) -> tuple[Skeleton, Names]:
        known = self._whole.get(value)
        if known is None:
            skeleton: list[int] = []
            places: list[int] = []
            self._write(value, frozenset(), skeleton, places)
            known = self._whole[value] = tuple(skeleton), tuple(places)
        return known

    def _write(self, value: int, cut: frozenset[int], skeleton: list[int], places: list[int]) -> None:
        if value < self.num_inputs or value in cut:
            skeleton.append(INPUT)
            places.append(value)
            return
        choice = self._choice[value]
        skeleton.append(choice if choice >= 0 else INPUT - 1 - value)
        if choice >= 0:
            self._write(self._left[value], cut, skeleton, places)
            if self._right[value] >= 0:
                self._write(self._right[value], cut, skeleton, places)

    def application(self, value: int) -> tuple[int, ...]:
        """The operator (-1: none) and the operands of a value's smallest graph."""
        return (self._choice[value], *self.operands(value))

    def equation(self, pair: Pair) -> Equation:
        """The candidate as terms, in which inputs are named by the values they are."""
        left = tuple(
            (choice, *(self._term(arg, pair.cut) for arg in operands if arg >= 0)) for choice, *operands in pair.left
        )
        return Equation(left, tuple(self._term(value, pair.cut) for value in pair.right))

    def _term(self, value: int, cut: frozenset[int]) -> Term:
        if value < self.num_inputs or value in cut:
            return (INPUT, value)
        choice, *operands = self.application(value)
        return (choice if choice >= 0 else INPUT - 1 - value, *(self._term(arg, cut) for arg in operands))

    def expr(self, term: Term, names: Mapping[int, str]) -> Expr:
        """A term as the expression of a rule."""
        head, *operands = term
        if head == INPUT:
            return Input(names[term[1]])
        if head < INPUT:
            return self.found.vocabulary.constants[int(INPUT - 1 - head) - self.num_inputs].expr
        made = self.found.vocabulary.choices[head]
        return Apply(made.op, made.params, tuple(self.expr(operand, names) for operand in operands))


@dataclass(frozen=True, slots=True)
class Counts:
    """How many candidates are left after each step."""

    initial: int
    renamed: int
    without_common: int

    def __str__(self) -> str:
        common = f"{self.without_common:,} without common subgraphs"
        return f"{self.initial:,} candidates, {self.renamed:,} but for names, {common}"


def distinct_candidates(reader: Reader) -> tuple[Counts, list[Pair]]:
    """Candidates that differ by more than names and common subgraphs."""
    by_skeleton: dict[Skeleton, dict[Names, int]] = {}
    for place in range(len(reader)):
        skeleton, names = reader.written(reader.pair(place))
        by_skeleton.setdefault(skeleton, {}).setdefault(names, place)
    renamed = [place for group in by_skeleton.values() for place in most_general(group)]
    by_skeleton.clear()
    cut: dict[Skeleton, dict[Names, Pair]] = {}
    for place in renamed:
        general = reader.generalized(reader.pair(place))
        skeleton, names = reader.written(general)
        cut.setdefault(skeleton, {}).setdefault(names, general)
    left = [pair for group in cut.values() for pair in most_general(group)]
    return Counts(len(reader), len(renamed), len(left)), left


Kept = TypeVar("Kept")


def most_general(group: Mapping[Names, Kept]) -> list[Kept]:
    """Those that are not another one with some names made equal."""
    return [
        kept
        for names, kept in group.items()
        if not any(other != names and is_instance(names, other) for other in group)
    ]


def is_instance(names: Names, general: Names) -> bool:
    """Whether equal names of the general one are equal here too."""
    return len(set(zip(general, names, strict=True))) == len(set(general))
