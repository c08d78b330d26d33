"""How many dims the tensors of a rule have, and on which mesh axes they have values of their own.

A rule is proven for every rank: dims that no operator tells apart are one dim in the proof, whose positions may be
read as positions in any number of dims. Of the others some are counted from the end (`axis=-1`), some have a name
(`axis=a`: any dim, the same for all operators of the rule), and where an operator takes a fixed rank all are counted
from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from conjoin.rules.definitions.dims import IllFormed
from conjoin.rules.operators import BY_NAME
from conjoin.rules.patterns import Apply, Expr, Input, walk

_MOST_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Rank:
    """What is known of a tensor's dims: at least some at the end, or exactly so many; names of further ones."""

    least: int = 0
    exact: int | None = None
    names: frozenset[str] = frozenset()

    def join(self, other: Rank) -> Rank:
        exact = self.exact if other.exact is None else other.exact
        if None not in (self.exact, other.exact) and self.exact != other.exact:
            raise IllFormed(f"a tensor has both {self.exact} and {other.exact} dims")
        joined = Rank(max(self.least, other.least), exact, self.names | other.names)
        if exact is not None and (joined.least > exact or joined.names):
            raise IllFormed(f"a tensor of {exact} dims is asked for more or for dims by name")
        return joined

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for every dim of the proof; the first stands for any number where the rank is not exact."""
        if self.exact is not None:
            return tuple(str(i) for i in range(self.exact))
        return ("…", *sorted(self.names), *(str(i - self.least) for i in range(self.least)))

    def place(self, axis: int | str) -> int:
        """The position of a dim among the labels."""
        if isinstance(axis, str) or (axis >= 0 and self.exact is None):
            return self.labels.index(str(axis))
        return range(len(self.labels))[axis]


class Ranks:
    """The ranks of all expressions of a rule, found by going round until nothing changes."""

    def __init__(self, *roots: Expr) -> None:
        self._exprs = tuple(walk(*roots))
        self._found: dict[Expr, Rank] = dict.fromkeys(self._exprs, Rank())
        self._counts_dims = False
        """Whether dims counted from the beginning are looked at: only when it is known whose rank is fixed."""
        self._settle()
        self._counts_dims = True
        self._settle()

    def _settle(self) -> None:
        for _ in range(_MOST_ROUNDS):
            before = dict(self._found)
            for expr in self._exprs:
                if isinstance(expr, Apply):
                    self._apply(expr)
            if before == self._found:
                return
        raise IllFormed("the ranks of the tensors do not settle")

    def __getitem__(self, expr: Expr) -> Rank:
        return self._found[expr]

    def same(self, *exprs: Expr) -> None:
        """Expressions of one rank."""
        joined = Rank()
        for expr in exprs:
            joined = joined.join(self._found[expr])
        self._found.update(dict.fromkeys(exprs, joined))

    def _demand(self, expr: Expr, rank: Rank) -> None:
        self._found[expr] = self._found[expr].join(rank)

    def _apply(self, expr: Apply) -> None:
        match BY_NAME[expr.op].kind:
            case "same" | "constant":
                self.same(expr, *expr.args)
                self._demand_axis(expr, expr)
                self.same(expr, *expr.args)
            case "matrix" | "identity" | "cube" as kind:
                self._demand(expr, Rank(least=3 if kind == "cube" else 2))
                self.same(expr, *expr.args)
            case "image" | "edges" as kind:
                exact = (4, 4, 4) if kind == "image" else (2, 2, 1, 1, 1)
                for one, rank in zip((expr, *expr.args), exact, strict=False):
                    self._demand(one, Rank(exact=rank))
            case "scale" | "bias" | "linear" as kind:
                self._with_second(expr, {"scale": 0, "bias": 1, "linear": 2}[kind])
            case "reduce" | "flat" | "unflat" as kind:
                less, more = (expr.args[0], expr) if kind == "unflat" else (expr, expr.args[0])
                self._demand(less, Rank(least=int(kind != "reduce")))
                self._demand_axis(expr, more)
                self._one_less(less, more)
            case "embedding":
                self._demand(expr.args[0], Rank(exact=2))
                self._one_less(expr.args[1], expr)
            case "bag":
                self._demand(expr.args[0], Rank(exact=2))
                self._demand(expr, Rank(least=1))
                self.same(expr, expr.args[1])
            case other:
                assert_never(other)  # type: ignore[arg-type]

    def _with_second(self, expr: Apply, rank: int) -> None:
        """Operators that keep the first operand's rank, and whose second has a fixed one."""
        self._demand(expr, Rank(least=min(rank, 1)))
        self.same(expr, expr.args[0])
        self._demand(expr.args[1], Rank(exact=rank))

    def _one_less(self, less: Expr, more: Expr) -> None:
        """One expression has a dim less than another: the one that is reduced, or the last."""
        axis = less.param("axis") if isinstance(less, Apply) and less.args == (more,) else ""
        named = frozenset({str(axis)}) if isinstance(axis, str) and axis else frozenset()
        small, large = self._found[less], self._found[more]
        if named & small.names:
            raise IllFormed(f"the dim {axis} is asked for where it was summed over")
        if named and any(name.isdecimal() for name in small.names):
            raise IllFormed(f"a dim is counted from the beginning where the dim {axis}, wherever it was, is gone")
        gap = 0 if named else 1
        exact = large.exact if small.exact is None else small.exact + 1
        large = large.join(Rank(small.least + gap, exact, small.names | named))
        shorter = None if large.exact is None else large.exact - 1
        self._found[more] = large
        self._found[less] = small.join(Rank(max(large.least - gap, 0), shorter, large.names - named))

    def _demand_axis(self, expr: Apply, on: Expr) -> None:
        axis = expr.param("axis")
        if axis == "":
            return
        rank = self._found[on]
        if isinstance(axis, int) and rank.exact is not None and not -rank.exact <= axis < rank.exact:
            raise IllFormed(f"a tensor of {rank.exact} dims has no dim {axis}")
        if isinstance(axis, str):
            self._demand(on, Rank(names=frozenset({axis})))
        elif axis < 0:
            self._demand(on, Rank(least=-axis))
        elif rank.exact is not None or not self._counts_dims:
            return
        elif rank.least == 0:
            self._demand(on, Rank(names=frozenset({str(axis)})))
        else:  # matrices without leading dims: their dims are 0 and 1
            self._demand(on, Rank(exact=2))


def devices_of(*roots: Expr) -> Mapping[Expr, frozenset[str]]:
    """The mesh axes on which each expression has values of its own; IllFormed where operands differ in them."""
    found: dict[Expr, frozenset[str]] = {}
    for axis in sorted(_meshes(roots)):
        for expr in _on_axis(axis, roots):
            found[expr] = found.get(expr, frozenset()) | {axis}
    return {expr: found.get(expr, frozenset()) for expr in walk(*roots)}


def _meshes(roots: Iterable[Expr]) -> set[str]:
    parallel = (e for e in walk(*roots) if isinstance(e, Apply) and BY_NAME[e.op].parallel)
    return {str(expr.param("mesh", "m")) for expr in parallel}


def _on_axis(axis: str, roots: tuple[Expr, ...]) -> list[Expr]:
    """The expressions with values of their own along one axis."""
    exprs = list(walk(*roots))
    known: dict[Expr, bool] = {}

    def learn(expr: Expr, value: bool) -> bool:
        if known.setdefault(expr, value) != value:
            raise IllFormed("operands that are the same on all devices meet others that are not")
        return value

    before = -1
    while len(known) != before:
        before = len(known)
        for expr in exprs:
            if not isinstance(expr, Apply) or not expr.args:
                continue
            if BY_NAME[expr.op].parallel and str(expr.param("mesh", "m")) == axis:
                spreads = expr.op in ("partition", "replicate")
                learn(expr, spreads)
                learn(expr.args[0], not spreads)
                continue
            group = [e for e in (expr, *expr.args) if isinstance(e, Input) or e.args]
            values = {known[e] for e in group if e in known}
            for value in values:
                for each in group:
                    learn(each, value)
    return [expr for expr in exprs if known.get(expr)]
