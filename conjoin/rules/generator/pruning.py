"""Beyond the paper's pruning: drop candidates that follow from smaller ones by rewriting.

Candidates are taken by size. One is dropped when accepted rules, applied at or just below the root of a side, leave
two expressions of the same operator whose operands have equal values: these equalities are about fewer operators, and
so were met before. What is accepted must pass the second test.

Expressions are nested tuples here: an operator's number and its operands, `(-1, i)` for the input i.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from conjoin.rules.pattern_matching import Pairs, matches

Term = tuple[Any, ...]
"""`(operator, *operands)`, or `(-1, i)` for an input."""
Terms = tuple[Term, ...]
Equal = Callable[[Term, Term], bool]
Heads = tuple[int, ...]
"""The operator at the root and those of its operands."""
Directed = dict[Heads, list[tuple[Term, Term]]]
"""Equations read one way, by the heads of the side to match; an input there is met by any operator."""
Rules = Sequence[Directed]
INPUT = -1
_MOST_REWRITES = 100
"""Of one side of a candidate."""


def is_input(term: Term) -> bool:
    return bool(term[0] == INPUT)


def inputs_in(*terms: Term) -> frozenset[int]:
    found: set[int] = set()
    stack = list(terms)
    while stack:
        term = stack.pop()
        if term[0] == INPUT:
            found.add(term[1])
        else:
            stack.extend(term[1:])
    return frozenset(found)


def constants_in(term: Term) -> frozenset[int]:
    """Constants: a step that makes one up proves much and explains little, so that rules are not read that way."""
    if term[0] == INPUT:
        return frozenset()
    own = frozenset({term[0]} if term[0] < INPUT else ())
    return own.union(*map(constants_in, term[1:]))


def num_operators(*terms: Term) -> int:
    """Distinct applications, constants not counted."""
    found: set[Term] = set()
    stack = list(terms)
    while stack:
        term = stack.pop()
        if term[0] >= 0 and term not in found:
            found.add(term)
            stack.extend(term[1:])
    return len(found)


def num_special(*terms: Term) -> int:
    """Distinct applications to twice the same, and constants."""
    found: set[Term] = set()
    stack = list(terms)
    while stack:
        term = stack.pop()
        if term[0] != INPUT and term not in found:
            found.add(term)
            stack.extend(term[1:])
    return sum(term[0] < INPUT or (len(term) == 3 and term[1] == term[2]) for term in found)


@dataclass(frozen=True, slots=True)
class Equation:
    """Two lists of outputs that are equal one by one."""

    left: Terms
    right: Terms

    @property
    def size(self) -> tuple[int, int]:
        """By the larger side, then by both."""
        sides = num_operators(*self.left), num_operators(*self.right)
        return max(sides), sum(sides)


def rename_inputs(equation: Equation) -> Equation:
    """With inputs numbered in order of first appearance."""
    names: dict[int, int] = {}

    def rename(term: Term) -> Term:
        if term[0] == INPUT:
            return (INPUT, names.setdefault(term[1], len(names)))
        return (term[0], *map(rename, term[1:]))

    return Equation(tuple(map(rename, equation.left)), tuple(map(rename, equation.right)))


def with_input(equation: Equation, old: int, new: int) -> Equation:
    """With another input in place of one."""

    def change(term: Term) -> Term:
        if term[0] == INPUT:
            return (INPUT, new if term[1] == old else term[1])
        return (term[0], *map(change, term[1:]))

    return Equation(tuple(map(change, equation.left)), tuple(map(change, equation.right)))


@dataclass(slots=True)
class Rewriter:
    """Accepted equations, by the operators on top of a side."""

    commutes: frozenset[int] = frozenset()
    _keeping: Directed = field(default_factory=lambda: defaultdict(list))
    """With the same inputs on both sides."""
    _losing: Directed = field(default_factory=lambda: defaultdict(list))
    _several: list[Equation] = field(default_factory=list)
    """With several outputs."""

    def add(self, equation: Equation) -> None:
        if len(equation.left) > 1:
            self._several.append(equation)
            return
        (left,), (right,) = equation.left, equation.right
        for source, target in ((left, right), (right, left)):
            have, need = inputs_in(source), inputs_in(target)
            if need <= have and constants_in(target) <= constants_in(source) and not is_input(source):
                kind = self._keeping if need == have else self._losing
                kind[_heads(source)].append((source, target))

    def remove(self, equation: Equation) -> None:
        if len(equation.left) > 1:
            self._several.remove(equation)
            return
        (left,), (right,) = equation.left, equation.right
        for source, target in ((left, right), (right, left)):
            for kind in (self._keeping, self._losing):
                known = [] if is_input(source) else kind.get(_heads(source), [])
                if (source, target) in known:
                    known.remove((source, target))

    def normal(self, term: Term) -> Term:
        """With operands of operators that commute in a fixed order."""
        if term[0] == INPUT or len(term) == 1:
            return term
        args = [self.normal(arg) for arg in term[1:]]
        return (term[0], *(sorted(args) if term[0] in self.commutes else args))

    def follows(self, equation: Equation, equal: Equal) -> bool:
        """Whether an equation follows from accepted ones and from equations of fewer operators.

        One with several outputs does not where what is left says that any two inputs are the parts of their
        concatenation: that is true, but starts a search at every pair of tensors.
        """
        if len(equation.left) > 1:
            if any(self._is_instance(equation, known) for known in self._several):
                return True
            pairs = zip(equation.left, equation.right, strict=True)
            proper = lambda a, b: not is_input(a) and not is_input(b) and equal(a, b)
            return all(self._joins(one, other, proper, self._keeping) for one, other in pairs)
        (left,), (right,) = equation.left, equation.right
        return self._joins(left, right, equal, self._keeping, self._losing)

    def _joins(self, left: Term, right: Term, equal: Equal, *rules: Directed) -> bool:
        """Whether both sides, each rewritten a little, meet up to operands of equal value."""
        most = num_operators(left) + num_operators(right)
        near = [list(self._rewrites(side, rules)) for side in (left, right)]
        if self._meet(near[0], near[1], equal, most):
            return True
        far = [self._further(some, rules) for some in near]
        return self._meet(far[0], far[1], equal, most)

    def _meet(self, lefts: list[Term], rights: list[Term], equal: Equal, most: int) -> bool:
        by_operator: dict[int, list[Term]] = defaultdict(list)
        for other in rights:
            by_operator[other[0]].append(other)
        for one in lefts:
            for other in by_operator[one[0]]:
                if (one is lefts[0] and other is rights[0]) or not self._is_congruent(one, other, equal, most):
                    continue
                return True
        return False

    def _further(self, near: list[Term], rules: Rules) -> list[Term]:
        """What a step at an operand of the first or at the root of any, and then one at the root, give as well."""
        found = dict.fromkeys(near)
        first = near[0]
        for place in range(1, len(first)):
            if not is_input(first):
                for operand in self._rewrites(first[place], rules):
                    found[self.normal((*first[:place], operand, *first[place + 1 :]))] = None
        for term in list(found):
            if len(found) > _MOST_REWRITES:
                break
            found.update(dict.fromkeys(self._rewrites(term, rules)))
        return list(found)

    def _is_congruent(self, one: Term, other: Term, equal: Equal, most: int) -> bool:
        if one == other:
            return True
        if is_input(one) or len(one) == 1:
            return False
        orders = [other[1:]]
        if one[0] in self.commutes:
            orders.append(other[:0:-1])
        for args in orders:
            pairs = [(a, b) for a, b in zip(one[1:], args, strict=True) if a != b]
            smaller = all(num_operators(a) + num_operators(b) < most for a, b in pairs)
            if smaller and all(equal(a, b) for a, b in pairs):
                return True
        return False

    def _rewrites(self, term: Term, rules: Rules) -> Iterator[Term]:
        yield term
        heads = self._heads_that_match(term)
        for some in rules:
            for each in heads:
                for source, target in some.get(each, ()):
                    for bound, _ in matches(((source, term),), {}, None, self._open):
                        yield self.normal(_instance(target, bound))

    def _heads_that_match(self, term: Term) -> list[Heads]:
        if is_input(term):
            return []
        found = list(product((term[0],), *({operand[0], INPUT} for operand in term[1:])))
        if term[0] in self.commutes:
            found += [(each[0], *each[:0:-1]) for each in found]
        return sorted(set(found))

    def _open(self, pattern: Term, term: Term, state: None) -> Iterator[tuple[Pairs[Term, Term], None]]:
        if pattern[0] == INPUT:
            yield (), None
        elif pattern[0] == term[0]:
            yield tuple(zip(pattern[1:], term[1:], strict=True)), None
            if len(pattern) == 3 and pattern[0] in self.commutes:
                yield ((pattern[1], term[2]), (pattern[2], term[1])), None

    def _is_instance(self, equation: Equation, known: Equation) -> bool:
        if len(known.left) != len(equation.left):
            return False
        pairs = (*zip(known.left, equation.left, strict=True), *zip(known.right, equation.right, strict=True))
        return any(True for _ in matches(pairs, {}, None, self._open))


def _heads(term: Term) -> Heads:
    return (term[0], *(operand[0] for operand in term[1:]))


def _instance(pattern: Term, bound: Mapping[Term, Term]) -> Term:
    if pattern[0] == INPUT:
        return bound[pattern]
    return (pattern[0], *(_instance(arg, bound) for arg in pattern[1:]))
