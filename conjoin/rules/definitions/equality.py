"""Whether two sums are equal for every size: their terms are brought to a common form and cancelled.

1. `simplify`: indices that an equation fixes are put in; terms whose guard cannot hold go; functions of values that
   differ from place to place are told apart by the conditions that decide (`relu([g] a + [not g] b)` is
   `[g] relu(a) + [not g] relu(b)`); indices over which nothing varies are counted.
2. `equal`: terms with the same factors, up to a renaming and shifting of summed indices, are gathered, and their
   coefficients must add up to 0 wherever their guards hold.

What is found equal is equal. What is not found equal may still be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from conjoin.rules.definitions.affine import Affine, symbol
from conjoin.rules.definitions.functions import known_better
from conjoin.rules.definitions.linear_arithmetic import Facts
from conjoin.rules.definitions.sums import (
    Access,
    Atom,
    Factor,
    Function,
    Guard,
    Largest,
    Size,
    Sum,
    Term,
    fresh,
    renamed,
    replace_in,
    substitute,
    symbols_of,
)

Renaming = dict[str, Affine]
_MOST_TERMS = 400
"""More than these and the sums are too large to be compared; no rule of four operators comes near."""


class TooLarge(Exception):
    """A sum with too many terms to go on."""


def simplify(value: Sum, facts: Facts, given: Guard = frozenset()) -> Sum:
    """An equal sum in which no index is fixed by an equation and no function has a guard inside that could stand out.

    Equal where the given guard holds; conditions that follow from it are left out inside functions.
    """
    found: list[Term] = []
    pending = list(value.terms)
    while pending:
        if len(pending) + len(found) > _MOST_TERMS:
            raise TooLarge
        term = _solve(pending.pop())
        if not facts.possible(term.guard | given):
            continue
        atom = _deciding(term, facts, given)
        if atom is not None:
            pending += [replace(term, guard=term.guard | {case}) for case in (atom, *atom.negated())]
            continue
        found.append(_count(_cancel_sizes(_simplify_factors(term, facts, given)), facts, given))
    return Sum(tuple(found))


def _solve(term: Term) -> Term:
    """Put in what equations say of summed indices."""
    for atom in term.guard:
        for name in term.bound:
            c = atom.expr.coefficient(name) if atom.exact else None
            if c in (1, -1):
                solution = symbol(name) - atom.expr * c
                rest = replace(term, guard=term.guard - {atom}, bound=tuple(b for b in term.bound if b != name))
                return _solve(substitute(rest, {name: solution}))
    return term


def _deciding(term: Term, facts: Facts, given: Guard) -> Atom | None:
    """A condition inside a function that does not depend on indices bound there, and is not decided yet."""
    for factor in term.factors:
        for atom in _inner_atoms(factor):
            known = term.guard | given
            if facts.possible(known | {atom}) and any(facts.possible(known | {o}) for o in atom.negated()):
                return atom
    return None


def _inner_atoms(factor: Factor) -> Iterator[Atom]:
    match factor:
        case Function(_, args):
            for arg in args:
                for term in arg.terms:
                    yield from (atom for atom in term.guard if not atom.expr.symbols & set(term.bound))
                    for inner in term.factors:
                        yield from (a for a in _inner_atoms(inner) if not a.expr.symbols & set(term.bound))
        case Largest(bound, _, arg):
            yield from (a for a in _inner_atoms(Function("", (arg,))) if not a.expr.symbols & set(bound))
        case _:
            return


def _simplify_factors(term: Term, facts: Facts, given: Guard) -> Term:
    known = term.guard | given

    def simpler(value: Sum, under: Guard) -> Sum:
        short = simplify(value, facts, under)
        kept = (replace(t, guard=frozenset(a for a in t.guard if not facts.implies(under, a))) for t in short.terms)
        return Sum(tuple(kept))

    factors: list[Factor] = []
    for factor in term.factors:
        match factor:
            case Function(name, args):
                factors.append(known_better(Function(name, tuple(simpler(arg, known) for arg in args))))
            case Largest(bound, guard, arg):
                factors.append(known_better(Largest(bound, guard, simpler(arg, known | guard))))
            case _:
                factors.append(factor)
    return replace(term, factors=tuple(factors))


def _cancel_sizes(term: Term) -> Term:
    """A size over itself is 1; a size that is a product counts as its factors, numbers go into the coefficient."""
    powers: Counter[Affine] = Counter()
    coefficient = term.coefficient
    others: list[Factor] = []
    for factor in term.factors:
        if not isinstance(factor, Size):
            others.append(factor)
            continue
        count, unknown = factor.size.factors()
        coefficient *= Fraction(1, count) if factor.inverse else count
        for size in unknown:
            powers[size] += -1 if factor.inverse else 1
    sizes = [Size(size, power < 0) for size, power in powers.items() for _ in range(abs(power))]
    return replace(term, coefficient=coefficient, factors=(*others, *sizes))


def _count(term: Term, facts: Facts, given: Guard) -> Term:
    """Sums of something that does not vary: how many times it is added."""
    used = frozenset[str]().union(*(symbols_of(factor) for factor in term.factors))
    for name in term.bound:
        about = [atom for atom in term.guard if name in atom.expr.symbols]
        lows = [a.expr for a in about if a.expr.coefficient(name) == 1 and not a.exact]
        highs = [a.expr for a in about if a.expr.coefficient(name) == -1 and not a.exact]
        if name in used or len(about) != 2 or len(lows) != 1 or len(highs) != 1:
            continue
        length = lows[0] + highs[0] + 1
        rest = term.guard - set(about)
        if length.symbols & set(term.bound) or not facts.implies(rest | given, Atom(length)):
            continue
        bound = tuple(b for b in term.bound if b != name)
        counted = replace(term, bound=bound, guard=rest, factors=(*term.factors, Size(length, inverse=False)))
        return _count(_cancel_sizes(counted), facts, given)
    return term


def equal(one: Sum, other: Sum, facts: Facts, given: Guard = frozenset()) -> bool:
    """Whether two sums were found equal wherever the guard holds."""
    left, right = simplify(one, facts, given), simplify(other, facts, given)
    terms = [*left.terms, *right.scaled(-1).terms]
    while terms:
        first = terms.pop()
        parts, terms = _gather(first, terms, facts, given)
        if not facts.cancel([(c, guard | given) for c, guard in parts]):
            return False
    return True


Part = tuple[Fraction, Guard]


def _gather(first: Term, others: Sequence[Term], facts: Facts, given: Guard) -> tuple[list[Part], list[Term]]:
    """The coefficients and guards of all terms with the factors of the first, in its indices; and the rest."""
    parts: list[Part] = [(first.coefficient, first.guard)]
    rest: list[Term] = []
    for term in others:
        candidates = list(_mappings(first, term, facts, given))
        if not candidates:
            rest.append(term)
            continue
        guards = [frozenset(atom.replace(mapping) for atom in term.guard) for mapping in candidates]
        alike = [g for g in guards if facts.equivalent(g | given, first.guard | given)]
        parts.append((term.coefficient, (alike or guards)[0]))
    return parts, rest


def _mappings(first: Term, term: Term, facts: Facts, given: Guard) -> Iterator[Renaming]:
    """Every way found to read the summed indices of a term in those of the first, so that all factors are the same."""
    if len(first.bound) != len(term.bound) or _heads(first.factors) != _heads(term.factors):
        return
    names = {name: fresh(name.split("'")[0]) for name in term.bound}
    apart = renamed(term, names)
    seen: list[Renaming] = []
    for found in _match_all(first.factors, apart.factors, {}, frozenset(apart.bound)):
        mapping = _completed(found, apart.bound, first.bound)
        if mapping in seen or set(mapping) != set(apart.bound) or not _is_invertible(mapping, first.bound):
            continue
        seen.append(mapping)
        moved = [replace_in(factor, mapping) for factor in apart.factors]
        places = (first.guard, frozenset(atom.replace(mapping) for atom in apart.guard))
        if all(_same_factors(first.factors, moved, facts, place | given) for place in places):
            yield {old: mapping[new] for old, new in names.items()}


def _completed(mapping: Renaming, bound: Sequence[str], targets: Sequence[str]) -> Renaming:
    """What positions do not tell, as windows of windows do not, is tried in the order in which it is summed over."""
    missing = [name for name in bound if name not in mapping]
    used = frozenset[str]().union(*(value.symbols for value in mapping.values()))
    rest = [symbol(name) for name in targets if name not in used]
    return {**mapping, **dict(zip(missing, rest, strict=False))} if missing else mapping


def _heads(factors: Sequence[Factor]) -> Counter[object]:
    return Counter(_head(factor) for factor in factors)


def _head(factor: Factor) -> object:
    match factor:
        case Access(tensor, indices):
            return "access", tensor, len(indices)
        case Function(name, args):
            return "function", name, len(args)
        case Largest(bound, _, _):
            return "largest", len(bound)
        case Size(size, inverse):
            return "size", size, inverse


def _match_all(
    wanted: Sequence[Factor], given: Sequence[Factor], mapping: Renaming, free: frozenset[str]
) -> Iterator[Renaming]:
    """Ways to choose the free indices of some factors so that each becomes one of those wanted."""
    if not given:
        yield mapping
        return
    first, *rest = given
    for i, candidate in enumerate(wanted):
        if _head(candidate) == _head(first):
            for extended in _match(candidate, first, mapping, free):
                yield from _match_all([*wanted[:i], *wanted[i + 1 :]], rest, extended, free)


def _match(wanted: Factor, given: Factor, mapping: Renaming, free: frozenset[str]) -> Iterator[Renaming]:
    match wanted, given:
        case Access(_, wants), Access(_, has):
            found = _match_indices(wants, has, mapping, free)
            if found is not None:
                yield found
        case Function(_, wants), Function(_, has):
            yield from _match_sums(list(zip(wants, has, strict=True)), mapping, free)
        case Largest(_, _, want), Largest(bound, _, own):
            for inner in _match_sums([(want, own)], mapping, free | set(bound)):
                yield {name: value for name, value in inner.items() if name in free}
        case _:
            yield mapping


def _match_sums(pairs: Sequence[tuple[Sum, Sum]], mapping: Renaming, free: frozenset[str]) -> Iterator[Renaming]:
    """Indices that make one term of each sum like one of the other; whether all are is looked at afterwards."""
    if not pairs:
        yield mapping
        return
    (wanted, given), *rest = pairs
    if not wanted.terms or not given.terms:
        yield from _match_sums(rest, mapping, free)
        return
    for term in given.terms[:1]:
        for candidate in wanted.terms:
            if _heads(candidate.factors) == _heads(term.factors):
                inner = free | set(term.bound)
                for found in _match_all(candidate.factors, term.factors, mapping, inner):
                    yield from _match_sums(rest, {k: v for k, v in found.items() if k in free}, free)


def _match_indices(
    wanted: Sequence[Affine | Access], given: Sequence[Affine | Access], mapping: Renaming, free: frozenset[str]
) -> Renaming | None:
    """Choose free indices so that positions become those wanted; what is not determined yet is left for later."""
    pending = list(zip(wanted, given, strict=True))
    while pending:
        later: list[tuple[Affine | Access, Affine | Access]] = []
        for want, has in pending:
            found = _match_index(want, has, mapping, free)
            if found is None:
                return None
            if found is _LATER:
                later.append((want, has))
            else:
                mapping = found
        if len(later) == len(pending):
            return mapping
        pending = later
    return mapping


_LATER: Renaming = {}
"""What stands for: another position must be read first. Told by identity."""


def _match_index(
    want: Affine | Access, has: Affine | Access, mapping: Renaming, free: frozenset[str]
) -> Renaming | None:
    if isinstance(want, Access) or isinstance(has, Access):
        if not isinstance(want, Access) or not isinstance(has, Access) or want.tensor != has.tensor:
            return None
        return _match_indices(want.indices, has.indices, mapping, free)
    now = has.replace(mapping)
    unknown = [name for name in now.symbols & free if name not in mapping]
    if not unknown:
        return dict(mapping) if now == want else None
    c = now.coefficient(unknown[0])
    if len(unknown) > 1 or c not in (1, -1):
        return _LATER
    return {**mapping, unknown[0]: (want - (now - symbol(unknown[0]) * c)) * c}


def _is_invertible(mapping: Mapping[str, Affine], bound: Sequence[str]) -> bool:
    """Whether every choice of the one's indices belongs to exactly one of the other's."""
    rows: list[list[Fraction]] = []
    for value in mapping.values():
        coefficients = [value.coefficient(name) for name in bound]
        if any(c is None for c in coefficients):
            return False
        rows.append([Fraction(c or 0) for c in coefficients])
    return abs(_determinant(rows)) == 1


def _determinant(rows: list[list[Fraction]]) -> Fraction:
    if not rows:
        return Fraction(1)
    total = Fraction(0)
    for i, row in enumerate(rows):
        if row[0]:
            minor = [other[1:] for k, other in enumerate(rows) if k != i]
            total += (-1) ** i * row[0] * _determinant(minor)
    return total


def _same_factors(wanted: Sequence[Factor], given: Sequence[Factor], facts: Facts, known: Guard) -> bool:
    """Whether each factor is one of those wanted, in some order."""
    left = list(wanted)
    for factor in given:
        place = next((i for i, w in enumerate(left) if _same_factor(w, factor, facts, known)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _same_factor(wanted: Factor, given: Factor, facts: Facts, known: Guard) -> bool:
    if wanted == given:
        return True
    match wanted, given:
        case Function(name, wants), Function(other, has):
            same = name == other and len(wants) == len(has)
            return same and all(equal(w, h, facts, known) for w, h in zip(wants, has, strict=True))
        case Largest(), Largest():
            one, two = (Term(Fraction(1), f.bound, f.guard, (Function("", (f.arg,)),)) for f in (wanted, given))
            for mapping in _mappings(one, two, facts, known):
                moved = frozenset(atom.replace(mapping) for atom in two.guard)
                if facts.equivalent(moved | known, one.guard | known):
                    return True
            return False
        case _:
            return False
