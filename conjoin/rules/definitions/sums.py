"""What an element of a tensor is: a sum of terms, each a product of accesses summed over indices under a guard.

    matmul      Σ_k [0 <= k < K] a[i, k] b[k, j]
    concat      [j < n] a[i, j] + [j >= n] b[i, j - n]
    conv        Σ_c,r [0 <= s*h + r - p < H] x[c, s*h + r - p] w[o, c, r]
    relu        relu(a[i, j])

Concatenation, splitting, padding and slicing only shift indices and add guards; elementwise functions are not
interpreted. Two tensors are equal when these sums are, up to the names of summed indices (`equality.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count

from conjoin.rules.definitions.affine import Affine, number, symbol


@dataclass(frozen=True, slots=True)
class Atom:
    """A condition: an expression is not negative, or (`exact`) is zero."""

    expr: Affine
    exact: bool = False

    def replace(self, values: Mapping[str, Affine]) -> Atom:
        return Atom(self.expr.replace(values), self.exact)

    def holds(self, values: Mapping[str, int]) -> bool:
        found = self.expr.value(values)
        return found == 0 if self.exact else found >= 0

    def negated(self) -> tuple[Atom, ...]:
        """Atoms one of which holds where this one does not."""
        below = Atom(-self.expr - 1)
        return (below, Atom(self.expr - 1)) if self.exact else (below,)

    def __str__(self) -> str:
        return f"{self.expr} {'=' if self.exact else '>='} 0"


Guard = frozenset[Atom]
"""Conditions that all hold."""
ALWAYS: Guard = frozenset()


def between(low: Affine | int, value: Affine, high: Affine) -> Guard:
    """low <= value < high."""
    return frozenset({Atom(value - low), Atom(high - value - 1)})


@dataclass(frozen=True, slots=True)
class Access:
    """An element of an input."""

    tensor: str
    indices: tuple[Affine | Access, ...]
    """An access among them is a number read from an input: a row of an embedding."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of numbers about which nothing is known but its name."""

    name: str
    """As in rules; one of two words is none of a rule's own."""
    args: tuple[Sum, ...]


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value over indices under a guard."""

    bound: tuple[str, ...]
    guard: Guard
    arg: Sum


@dataclass(frozen=True, slots=True)
class Size:
    """A size as a number, or one over it: what an average divides by."""

    size: Affine
    inverse: bool = True


Factor = Access | Function | Largest | Size


@dataclass(frozen=True, slots=True)
class Term:
    """coefficient · Σ_bound [guard] Π factors."""

    coefficient: Fraction
    bound: tuple[str, ...]
    guard: Guard
    factors: tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of terms; none of them: 0."""

    terms: tuple[Term, ...]

    def __add__(self, other: Sum) -> Sum:
        return Sum((*self.terms, *other.terms))

    def __mul__(self, other: Sum) -> Sum:
        return Sum(tuple(_product(one, _apart(one, another)) for one in self.terms for another in other.terms))

    def under(self, guard: Guard) -> Sum:
        """The same where a guard holds, else 0."""
        return Sum(tuple(replace(term, guard=term.guard | guard) for term in self.terms))

    def over(self, bound: Iterable[str], guard: Guard) -> Sum:
        """Summed over indices under a guard."""
        names = tuple(bound)
        return Sum(tuple(replace(t, bound=(*t.bound, *names), guard=t.guard | guard) for t in self.terms))

    def scaled(self, by: Fraction | int) -> Sum:
        return Sum(tuple(replace(term, coefficient=term.coefficient * by) for term in self.terms if by))


ZERO = Sum(())


def access(tensor: str, indices: Sequence[Affine | Access]) -> Sum:
    """One element of an input."""
    return Sum((Term(Fraction(1), (), ALWAYS, (Access(tensor, tuple(indices)),)),))


def of(factor: Factor) -> Sum:
    """A sum of one factor."""
    return Sum((Term(Fraction(1), (), ALWAYS, (factor,)),))


def constant(value: Fraction | int) -> Sum:
    """A number.

    >>> constant(0) == ZERO
    True
    """
    return Sum((Term(Fraction(value), (), ALWAYS, ()),)) if value else ZERO


class _Names:
    """Numbers for new names; every proof counts from the beginning, so that it does not depend on those before it."""

    def __init__(self) -> None:
        self.numbers = count()


_names = _Names()


def count_names_anew() -> None:
    """At the beginning of a proof: no name of another one is met in it."""
    _names.numbers = count()


def fresh(hint: str = "k") -> str:
    """A name that nobody has."""
    return f"{hint}'{next(_names.numbers)}"


def _product(one: Term, other: Term) -> Term:
    factors = (*one.factors, *other.factors)
    return Term(one.coefficient * other.coefficient, (*one.bound, *other.bound), one.guard | other.guard, factors)


def _apart(one: Term, other: Term) -> Term:
    """The other term with summed indices of its own where the names are the same."""
    shared = set(one.bound) & set(other.bound)
    return renamed(other, {name: fresh(name.split("'")[0]) for name in shared}) if shared else other


def renamed(term: Term, names: Mapping[str, str]) -> Term:
    """With summed indices renamed."""
    values = {old: symbol(new) for old, new in names.items()}
    return replace(substitute(term, values), bound=tuple(names.get(name, name) for name in term.bound))


def substitute(term: Term, values: Mapping[str, Affine]) -> Term:
    """With unknowns replaced; those that are summed over are left to the caller."""
    guard = frozenset(atom.replace(values) for atom in term.guard)
    return replace(term, guard=guard, factors=tuple(replace_in(factor, values) for factor in term.factors))


def replace_in(factor: Factor, values: Mapping[str, Affine]) -> Factor:
    """A factor with unknowns replaced."""
    match factor:
        case Access(tensor, indices):
            return Access(tensor, tuple(_replace_index(index, values) for index in indices))
        case Function(name, args):
            return Function(name, tuple(replace_in_sum(arg, values) for arg in args))
        case Largest(bound, guard, arg):
            return Largest(bound, frozenset(a.replace(values) for a in guard), replace_in_sum(arg, values))
        case Size(size, inverse):
            return Size(size.replace(values), inverse)


def _replace_index(index: Affine | Access, values: Mapping[str, Affine]) -> Affine | Access:
    if isinstance(index, Affine):
        return index.replace(values)
    return Access(index.tensor, tuple(_replace_index(i, values) for i in index.indices))


def replace_in_sum(value: Sum, values: Mapping[str, Affine]) -> Sum:
    return Sum(tuple(substitute(term, values) for term in value.terms))


def symbols_of(factor: Factor) -> frozenset[str]:
    """The unknowns in a factor that are not bound inside it."""
    match factor:
        case Access(_, indices):
            return frozenset().union(*(_symbols_of_index(index) for index in indices))
        case Function(_, args):
            return frozenset().union(*(symbols_of_sum(arg) for arg in args))
        case Largest(bound, guard, arg):
            inside = symbols_of_sum(arg).union(*(atom.expr.symbols for atom in guard))
            return inside - set(bound)
        case Size(size, _):
            return size.symbols


def _symbols_of_index(index: Affine | Access) -> frozenset[str]:
    return index.symbols if isinstance(index, Affine) else symbols_of(index)


def symbols_of_sum(value: Sum) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for term in value.terms:
        inside = frozenset().union(*(symbols_of(f) for f in term.factors), *(a.expr.symbols for a in term.guard))
        found |= inside - set(term.bound)
    return found


def average(size: Affine) -> Sum:
    """One over a size."""
    return of(Size(size)) if size.symbols else constant(Fraction(1, size.value({})))


def choose(guard: Guard, then: Sum, otherwise: Sum) -> Sum:
    """One sum where a single condition holds, another where it does not."""
    (atom,) = guard
    (opposite,) = atom.negated()
    return then.under(guard) + otherwise.under(frozenset({opposite}))


def below(value: Affine, limit: Affine) -> Guard:
    """value < limit."""
    return frozenset({Atom(limit - value - 1)})


def equal_to(value: Affine, other: Affine | int) -> Guard:
    """value = other."""
    return frozenset({Atom(value - (other if isinstance(other, Affine) else number(other)), exact=True)})
