"""Whether conditions on whole numbers can hold together: linear arithmetic, decided by Z3.

Products of unknowns are taken for unknowns of their own. What cannot hold then cannot hold at all; what is said to be
possible may be impossible, which costs a proof and never makes a false one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

import z3

from conjoin.rules.definitions.sums import Atom, Guard

_STEPS = 1_000_000
"""Of Z3 for one question, most of which take a few hundred: steps, so that proofs are the same on a busy machine."""
_MILLISECONDS = 60_000
"""For what Z3 does not count."""


class Facts:
    """What is taken for granted, and answers to questions under it."""

    def __init__(self, assumed: Iterable[Atom]) -> None:
        self.assumed = frozenset(assumed)
        self._solver = z3.SolverFor("QF_LIA")
        self._solver.set(rlimit=_STEPS, timeout=_MILLISECONDS)
        self._answers: dict[Guard, bool] = {}
        for atom in self.assumed:
            self._solver.add(_formula(atom))

    def possible(self, guard: Guard) -> bool:
        """Whether conditions may hold together; True where it is not known."""
        if guard not in self._answers:
            self._answers[guard] = self._ask([_formula(atom) for atom in guard])
        return self._answers[guard]

    def implies(self, guard: Guard, atom: Atom) -> bool:
        """Whether a condition holds wherever a guard does."""
        if atom in guard or atom in self.assumed:
            return True
        return not any(self.possible(guard | {opposite}) for opposite in atom.negated())

    def equivalent(self, one: Guard, other: Guard) -> bool:
        """Whether two guards hold at the same places."""
        if one == other:
            return True
        return all(self.implies(one, atom) for atom in other) and all(self.implies(other, atom) for atom in one)

    def cancel(self, parts: Sequence[tuple[Fraction, Guard]]) -> bool:
        """Whether numbers, each counted where its guard holds, add up to 0 everywhere."""
        if not parts:
            return True
        total = z3.Sum([
            z3.If(z3.And([_formula(atom) for atom in guard]), z3.RealVal(str(number)), z3.RealVal(0))
            for number, guard in parts
        ])
        return not self._ask([total != 0])

    def _ask(self, formulas: list[z3.BoolRef]) -> bool:
        self._solver.push()
        try:
            self._solver.add(*formulas)
            return bool(self._solver.check() != z3.unsat)
        finally:
            self._solver.pop()


@lru_cache(maxsize=1 << 14)
def _formula(atom: Atom) -> z3.BoolRef:
    """A condition as Z3 has it; proofs name their unknowns alike, so the same ones come again and again."""
    value = z3.Sum([z3.IntVal(0), *(c * _unknown(m) if m else z3.IntVal(c) for m, c in atom.expr.terms)])
    return value == 0 if atom.exact else value >= 0


@lru_cache(maxsize=1 << 12)
def _unknown(monomial: tuple[str, ...]) -> z3.ArithRef:
    return z3.Int("*".join(monomial))
