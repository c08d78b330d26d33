"""Whole numbers that hang together, and random solutions: the sizes of tensors that operators can be run on.

An unknown is a number of at least some size. Unknowns are the same, or one is the sum or the product of two others, or
as many windows as fit into one. Nothing else is known of what they stand for: that a product is the product of two
others in another way does not make the factors the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

_LARGEST = 400
"""Of any number: larger tensors tell no more."""


class Contradiction(Exception):
    """Numbers that cannot be."""


class Relation(NamedTuple):
    """Some unknowns that hang together: `whole` is the sum, the product, or what `parts` say."""

    kind: str
    whole: int
    parts: tuple[int, ...]


@dataclass(slots=True)
class Puzzle:
    """Unknowns by number, and what is known of them."""

    parents: list[int] = field(default_factory=list)
    least: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    values: dict[int, int] = field(default_factory=dict)
    """Of classes of unknowns that are the same, by `find`."""
    relations: list[Relation] = field(default_factory=list)

    def copy(self) -> Puzzle:
        lists = (self.parents[:], self.least[:], self.most[:])
        return Puzzle(*lists, dict(self.values), self.relations[:])

    def new(self, least: int = 1, most: int = _LARGEST) -> int:
        """An unknown."""
        self.parents.append(len(self.parents))
        self.least.append(least)
        self.most.append(most)
        return len(self.parents) - 1

    def number(self, value: int) -> int:
        """A number that is known."""
        found = self.new(value, value)
        self.values[found] = value
        return found

    def find(self, unknown: int) -> int:
        while self.parents[unknown] != unknown:
            unknown = self.parents[unknown]
        return unknown

    def value(self, unknown: int) -> int | None:
        return self.values.get(self.find(unknown))

    def same(self, one: int, other: int) -> None:
        """Two unknowns are one."""
        a, b = self.find(one), self.find(other)
        if a == b:
            return
        value = self.values.pop(a, None)
        self.parents[a] = b
        self.least[b], self.most[b] = max(self.least[a], self.least[b]), min(self.most[a], self.most[b])
        if value is not None:
            self.learn(b, value)
        elif b in self.values:
            self.learn(b, self.values[b])

    def learn(self, unknown: int, value: int) -> None:
        """An unknown is a number."""
        at = self.find(unknown)
        if self.values.setdefault(at, value) != value or not self.least[at] <= value <= self.most[at]:
            raise Contradiction(f"{value} where {self.values[at]} from {self.least[at]} to {self.most[at]} is needed")

    # Relations.

    def relate(self, kind: str, parts: Sequence[int], least: int = 1) -> int:
        """The unknown that others make; the same one where the same others made it before."""
        own = tuple(map(self.find, parts))
        for relation in self.relations:
            if relation.kind == kind and tuple(map(self.find, relation.parts)) == own:
                return relation.whole
        whole = self.new(least)
        self.relations.append(Relation(kind, whole, tuple(parts)))
        return whole

    def state(self, kind: str, whole: int, parts: Sequence[int]) -> None:
        """An unknown is what others make."""
        self.relations.append(Relation(kind, whole, tuple(parts)))

    def settle(self) -> None:
        """Learn whatever follows from what is known."""
        before = -1
        while len(self.values) != before:
            before = len(self.values)
            for relation in self.relations:
                self._settle(relation)

    def _settle(self, relation: Relation) -> None:
        whole, parts = self.value(relation.whole), [self.value(part) for part in relation.parts]
        if None not in parts:
            made = _MADE[relation.kind](*parts)  # type: ignore[arg-type]
            if made is None:
                raise Contradiction(f"no {relation.kind} of {parts}")
            self.learn(relation.whole, made)
        elif whole is not None and parts.count(None) == 1 and relation.kind in _LEFT:
            place = parts.index(None)
            rest = _LEFT[relation.kind](whole, *(part for part in parts if part is not None))
            if rest is None:
                raise Contradiction(f"{whole} is no {relation.kind} with {parts}")
            self.learn(relation.parts[place], rest)

    # Solutions.

    def solve(self, random: Random, largest: int, leave: Iterable[int] = ()) -> None:
        """Choose all numbers that are still open, up to about so large; Contradiction where that does not come out.

        Those to be left are not chosen, only found where they follow.
        """
        self.settle()
        left = frozenset(map(self.find, leave))
        for unknown in self._order(random):
            if self.value(unknown) is None and unknown not in left:
                choices = self._choices(unknown, largest)
                if not choices:
                    raise Contradiction("nothing is left to choose from")
                self.learn(unknown, random.choice(choices))
                self.settle()

    def _order(self, random: Random) -> Iterable[int]:
        """What others are made of first, in any order."""
        roots = list(dict.fromkeys(map(self.find, range(len(self.parents)))))
        wholes = {self.find(relation.whole) for relation in self.relations}
        random.shuffle(roots)
        return sorted(roots, key=wholes.__contains__)

    def _choices(self, unknown: int, largest: int) -> Sequence[int]:
        """The numbers that an unknown may be, as far as single relations tell."""
        at = self.find(unknown)
        about = [relation for relation in self.relations if at in map(self.find, relation.parts)]
        reaches = (self._reach(relation) for relation in about if self.find(relation.parts[0]) == at)
        least, most = max([self.least[at], *reaches]), self.most[at]
        choices: Iterable[int] = range(least, min(most, least + largest - 1) + 1)
        for relation in about:
            whole = self.value(relation.whole)
            if whole is not None and relation.kind == "product":
                choices = [n for n in range(1, min(whole, most) + 1) if whole % n == 0 and n >= least]
        for relation in about:
            whole = self.value(relation.whole)
            if whole is not None and relation.kind == "sum":
                others = sum(self.least[self.find(part)] for part in relation.parts) - self.least[at]
                choices = [n for n in choices if n <= whole - others]
            elif relation.kind == "windows":
                choices = [n for n in choices if self._has_windows(relation, at, n)]
        return list(choices)

    def _reach(self, relation: Relation) -> int:
        """The smallest size into which a window fits."""
        if relation.kind != "windows":
            return 0
        _, kernel, _, padding = map(self.value, relation.parts)
        return (kernel or 1) - 2 * (padding or 0)

    def _has_windows(self, relation: Relation, at: int, number: int) -> bool:
        """Whether there are windows, as many as there must be, where an unknown is a number."""
        parts = [number if self.find(part) == at else self.value(part) for part in relation.parts]
        if None in parts:
            return True
        made, whole = _windows(*parts), self.value(relation.whole)  # type: ignore[arg-type]
        return made is not None and whole in (None, made)


def _windows(size: int, kernel: int, stride: int, padding: int) -> int | None:
    reach = size + 2 * padding - kernel
    return reach // stride + 1 if reach >= 0 else None


_MADE: dict[str, Callable[..., int | None]] = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "odd": lambda half: 2 * half + 1,
    "windows": _windows,
}
"""What the parts make; None where they cannot."""
_LEFT: dict[str, Callable[..., int | None]] = {
    "sum": lambda whole, part: whole - part,
    "product": lambda whole, part: whole // part if part and whole % part == 0 else None,
    "odd": lambda whole: whole // 2 if whole % 2 else None,
}
"""The one part that is not known."""
