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
    about: dict[int, list[Relation]] | None = None
    """The relations of every class, in classes; None where they have to be looked up again."""
    news: list[int] = field(default_factory=list)
    """Classes that were learned, from which nothing was concluded yet."""

    def copy(self) -> Puzzle:
        lists = (self.parents[:], self.least[:], self.most[:])
        return Puzzle(*lists, dict(self.values), self.relations[:], self.about, self.news[:])

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
        self.parents[a], self.about = b, None
        self.least[b], self.most[b] = max(self.least[a], self.least[b]), min(self.most[a], self.most[b])
        if value is not None:
            self.learn(b, value)
        elif b in self.values:
            self.learn(b, self.values[b])

    def learn(self, unknown: int, value: int) -> None:
        """An unknown is a number."""
        at = self.find(unknown)
        if at not in self.values:
            self.news.append(at)
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
        self.state(kind, whole, parts)
        return whole

    def state(self, kind: str, whole: int, parts: Sequence[int]) -> None:
        """An unknown is what others make."""
        self.relations.append(Relation(kind, whole, tuple(parts)))
        self.about = None

    def settle(self) -> None:
        """Learn whatever follows from what is known."""
        if self.about is None:
            self._index()
            self.news = list(self.about or ())
        assert self.about is not None
        while self.news:
            for relation in self.about.get(self.news.pop(), ()):
                self._settle(relation)

    def _index(self) -> None:
        """The relations of every class of unknowns, in classes."""
        found: dict[int, list[Relation]] = {}
        for kind, whole, parts in self.relations:
            own = Relation(kind, self.find(whole), tuple(map(self.find, parts)))
            for unknown in dict.fromkeys((own.whole, *own.parts)):
                found.setdefault(unknown, []).append(own)
        self.about = found

    def _settle(self, relation: Relation) -> None:
        """Learn the one unknown of a relation, in classes, that is not known yet."""
        values = self.values
        whole, parts = values.get(relation.whole), [values.get(part) for part in relation.parts]
        missing = parts.count(None)
        if missing == 0:
            at, made = relation.whole, _MADE[relation.kind](*parts)
        elif missing == 1 and whole is not None and relation.kind in _LEFT:
            at = relation.parts[parts.index(None)]
            made = _LEFT[relation.kind](whole, *(part for part in parts if part is not None))
        else:
            return
        if made is None:
            raise Contradiction(f"no {relation.kind} of {parts} is {whole}")
        self.learn(at, made)

    # Solutions.

    def solve(self, random: Random, largest: int, leave: Iterable[int] = ()) -> None:
        """Choose all numbers that are still open, up to about so large; Contradiction where that does not come out.

        Those to be left are not chosen, only found where they follow.
        """
        self.settle()
        left = frozenset(map(self.find, leave))
        for unknown in self._order(random):
            if unknown not in self.values and unknown not in left:
                choices = self._choices(unknown, largest)
                if not choices:
                    raise Contradiction("nothing is left to choose from")
                self.learn(unknown, random.choice(choices))
                self.settle()

    def _order(self, random: Random) -> Iterable[int]:
        """What others are made of first, in any order."""
        roots = [unknown for unknown, parent in enumerate(self.parents) if parent == unknown]
        wholes = {relation.whole for relations in (self.about or {}).values() for relation in relations}
        random.shuffle(roots)
        return sorted(roots, key=wholes.__contains__)

    def _choices(self, at: int, largest: int) -> Sequence[int]:
        """The numbers that an unknown may be, as far as single relations tell."""
        about = [relation for relation in (self.about or {}).get(at, ()) if at in relation.parts]
        reaches = (self._reach(relation) for relation in about if relation.parts[0] == at)
        least, most = max([self.least[at], *reaches]), self.most[at]
        choices: Iterable[int] = range(least, min(most, least + largest - 1) + 1)
        for relation in about:
            whole = self.values.get(relation.whole)
            if whole is not None and relation.kind == "product":
                choices = [n for n in range(1, min(whole, most) + 1) if whole % n == 0 and n >= least]
        for relation in about:
            whole = self.values.get(relation.whole)
            if whole is not None and relation.kind == "sum":
                others = sum(self.least[part] for part in relation.parts) - self.least[at]
                choices = [n for n in choices if n <= whole - others]
            elif relation.kind == "windows":
                choices = [n for n in choices if self._has_windows(relation, at, n)]
        return list(choices)

    def _reach(self, relation: Relation) -> int:
        """The smallest size into which a window fits."""
        if relation.kind != "windows":
            return 0
        _, kernel, _, padding = map(self.values.get, relation.parts)
        return (kernel or 1) - 2 * (padding or 0)

    def _has_windows(self, relation: Relation, at: int, number: int) -> bool:
        """Whether there are windows, as many as there must be, where an unknown is a number."""
        parts = [number if part == at else self.values.get(part) for part in relation.parts]
        if None in parts:
            return True
        made, whole = _windows(*parts), self.values.get(relation.whole)  # type: ignore[arg-type]
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
