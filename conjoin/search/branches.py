"""Branches of a model: parts between a fork and a join that do not read each other, and could run at the same time.

Between a tensor's fork and the operator after which all its ways have met again (the nearest post-dominator), and
between a join and the operator from which all its ways come (the nearest dominator), or the inputs, the operators fall
apart into connected components. Where there are at least two, these are branches (FlexFlow's operator dimension, thesis
section 3.3; Unity's parallel splits, section 5.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conjoin.sim import Skeleton

Bits = int
"""A set of operators: bit i stands for operator i."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Branches beside each other: the operators of each, in the order they run."""

    branches: tuple[tuple[int, ...], ...]


def find_forks(skeleton: Skeleton) -> tuple[Fork, ...]:
    """All places where a model falls apart into branches, each once, those with the most operators first."""
    ways = _Ways(skeleton)
    found: dict[Fork, None] = {}
    for inside in ways.between():
        branches = ways.components(inside)
        if len(branches) > 1:
            found[Fork(branches)] = None
    return tuple(sorted(found, key=lambda fork: -sum(map(len, fork.branches))))


class _Ways:
    """Who comes before and after whom."""

    def __init__(self, skeleton: Skeleton) -> None:
        operators = skeleton.operators
        self.count = len(operators)
        makers = [[skeleton.roots[root].maker for root in op.reads] for op in operators]
        self.before = [sorted({maker for maker in found if maker >= 0}) for found in makers]
        self.after: list[list[int]] = [[] for _ in operators]
        for place, found in enumerate(self.before):
            for maker in found:
                self.after[maker].append(place)
        self.movable = [any(skeleton.roots[root].type.shape for root in op.makes) for op in operators]
        self.above = _closure(range(self.count), self.before)
        self.below = _closure(range(self.count - 1, -1, -1), self.after)

    def between(self) -> Iterator[Bits]:
        """The operators between every fork and the join that belongs to it, or join and fork."""
        over, under = _dominators(range(self.count), self.before), _dominators(
            range(self.count - 1, -1, -1), self.after
        )
        for place in range(self.count):
            if len(self.before[place]) > 1:
                nearest = (over[place] & ~(1 << place)).bit_length() - 1
                yield self.above[place] & (self.below[nearest] if nearest >= 0 else ~0)
            if len(self.after[place]) > 1:
                later = under[place] & ~(1 << place)
                nearest = (later & -later).bit_length() - 1
                yield self.below[place] & (self.above[nearest] if nearest >= 0 else ~0)

    def components(self, inside: Bits) -> tuple[tuple[int, ...], ...]:
        """The operators of a set that tensors of more than one number connect, each component in order."""
        left = {place for place in _members(inside) if self.movable[place]}
        found: list[tuple[int, ...]] = []
        while left:
            part, edge = set[int](), [min(left)]
            while edge:
                place = edge.pop()
                if place in left:
                    left.discard(place)
                    part.add(place)
                    edge += [*self.before[place], *self.after[place]]
            found.append(tuple(sorted(part)))
        return tuple(sorted(found))


def _closure(order: Sequence[int], neighbours: Sequence[Sequence[int]]) -> list[Bits]:
    """For every operator all that its neighbours lead to, itself left out."""
    found = [0] * len(neighbours)
    for place in order:
        for other in neighbours[place]:
            found[place] |= found[other] | 1 << other
    return found


def _dominators(order: Sequence[int], neighbours: Sequence[Sequence[int]]) -> list[Bits]:
    """For every operator those through which all its ways lead, itself included."""
    found = [0] * len(neighbours)
    for place in order:
        shared = ~0 if neighbours[place] else 0
        for other in neighbours[place]:
            shared &= found[other]
        found[place] = shared | 1 << place
    return found


def _members(bits: Bits) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
