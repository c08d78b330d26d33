"""Whole numbers with unknowns: `2*h + r - p`; products of unknowns such as `s*h` count as unknowns of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from math import gcd
from operator import and_
from zlib import crc32

Monomial = tuple[str, ...]
"""A product of unknowns, sorted; `()` is 1."""


@dataclass(frozen=True)
class Affine:
    """A sum of monomials with whole coefficients, sorted, none of them 0.

    >>> h, s = symbol("h"), symbol("s")
    >>> str(h * s + 2 * h - 1)
    '2*h + h*s - 1'
    """

    terms: tuple[tuple[Monomial, int], ...]

    @cached_property
    def _hash(self) -> int:
        """The same in every process, so that sets of conditions are gone through in the same order."""
        return crc32(repr(self.terms).encode())

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Affine | int) -> Affine:
        return _collect((*self.terms, *_affine(other).terms))

    __radd__ = __add__

    def __neg__(self) -> Affine:
        return Affine(tuple((monomial, -c) for monomial, c in self.terms))

    def __sub__(self, other: Affine | int) -> Affine:
        return self + -_affine(other)

    def __rsub__(self, other: int) -> Affine:
        return _affine(other) - self

    def __mul__(self, other: Affine | int) -> Affine:
        pairs = ((m, c, n, d) for m, c in self.terms for n, d in _affine(other).terms)
        return _collect((tuple(sorted((*m, *n))), c * d) for m, c, n, d in pairs)

    __rmul__ = __mul__

    @property
    def symbols(self) -> frozenset[str]:
        """All unknowns."""
        return frozenset(name for monomial, _ in self.terms for name in monomial)

    def factors(self) -> tuple[int, tuple[Affine, ...]]:
        """A number and unknowns that can be taken out of every term, and what is then left, if it is not 1.

        >>> count, rest = (symbol("h") * symbol("s") * 2 + symbol("h") * 4).factors()
        >>> count, list(map(str, rest))
        (2, ['h', 's + 2'])
        """
        count = gcd(*(c for _, c in self.terms))
        common = reduce(and_, (Counter(monomial) for monomial, _ in self.terms))
        rest = _collect((tuple((Counter(monomial) - common).elements()), c // count) for monomial, c in self.terms)
        found = tuple(symbol(name) for name in sorted(common.elements()))
        return count, found if rest == number(1) else (*found, rest)

    def coefficient(self, name: str) -> int | None:
        """How often an unknown is added; None where it is also multiplied with another one."""
        if any(name in monomial and len(monomial) > 1 for monomial, _ in self.terms):
            return None
        return dict(self.terms).get((name,), 0)

    def replace(self, values: Mapping[str, Affine]) -> Affine:
        """With unknowns replaced, all at once."""
        if not self.symbols & values.keys():
            return self
        total = number(0)
        for monomial, c in self.terms:
            product = number(c)
            for name in monomial:
                product = product * values.get(name, symbol(name))
            total = total + product
        return total

    def value(self, values: Mapping[str, int]) -> int:
        """The number it is when all unknowns are known."""
        total = 0
        for monomial, c in self.terms:
            for name in monomial:
                c *= values[name]
            total += c
        return total

    def __str__(self) -> str:
        parts = [(c, "*".join(m)) for m, c in self.terms if m] + [(c, "") for m, c in self.terms if not m]
        words = [f"{'-' if c < 0 else '+'} {_spell(abs(c), name)}" for c, name in parts] or ["+ 0"]
        return " ".join(words).removeprefix("+ ").replace("- ", "-", 1 if words[0][0] == "-" else 0)


def _spell(count: int, name: str) -> str:
    if not name:
        return str(count)
    return name if count == 1 else f"{count}*{name}"


def symbol(name: str) -> Affine:
    """One unknown."""
    return Affine((((name,), 1),))


def number(value: int) -> Affine:
    """A number that is known.

    >>> str(number(3) - 3)
    '0'
    """
    return Affine((((), value),) if value else ())


def _affine(value: Affine | int) -> Affine:
    return value if isinstance(value, Affine) else number(value)


def _collect(terms: Iterable[tuple[Monomial, int]]) -> Affine:
    totals: dict[Monomial, int] = {}
    for monomial, c in terms:
        totals[monomial] = totals.get(monomial, 0) + c
    return Affine(tuple(sorted((m, c) for m, c in totals.items() if c)))
