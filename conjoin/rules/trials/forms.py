"""How many dims the tensors of a rule may have, where its named dims lie, and which tensors differ between devices.

Only what the text of a rule means: a dim counted from the end is there, a name is one and the same dim in all tensors
and none of those counted from the end, two names are two dims, and a dim counted from the beginning lies where it is
counted; where operators count from the end too, the tensors are then matrices. All else about shapes, torch is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from conjoin.rules.operators import BY_NAME
from conjoin.rules.patterns import Apply, Expr, Input, walk

_COUNTED: Mapping[str, int] = {"matrix": 2, "identity": 2, "cube": 3, "bias": 1, "linear": 1, "bag": 1}
"""Dims at the end that operators of some kinds tell apart."""
_SECOND: Mapping[str, int] = {"scale": 0, "bias": 1, "linear": 2}
"""Ranks of second operands."""
_FIXED: Mapping[str, tuple[int, ...]] = {"image": (4, 4, 4), "edges": (2, 2, 1, 1, 1)}
"""Ranks of the result and of all operands."""
_MOST_OTHERS = 2
"""Dims that no operator tells apart."""
_ROUNDS = 50


class Meaningless(Exception):
    """A rule whose operators cannot be applied to tensors of any ranks."""


@dataclass(slots=True)
class Form:
    """What is known of the dims of a tensor."""

    counted: int = 0
    """Dims at the end that are told apart."""
    names: set[str] = field(default_factory=set)
    exact: int | None = None
    front: set[int] = field(default_factory=set)
    """Dims that are counted from the beginning."""

    def facts(self) -> tuple[int, int, int | None]:
        return self.counted, len(self.names), self.exact


class Forms:
    """The forms of all tensors of a rule: one round after another, until nothing new follows."""

    def __init__(self, *roots: Expr) -> None:
        self.exprs = tuple(walk(*roots))
        self.of: dict[Expr, Form] = {expr: Form() for expr in self.exprs}
        self.applied = [expr for expr in self.exprs if isinstance(expr, Apply)]
        for look_at_front in (False, True):
            self._settle(look_at_front)
        self.group = self._groups()
        """For every tensor the one that stands for its group."""
        self.names = sorted(set().union(*(form.names for form in self.of.values())))
        self.least = self._least()

    def _settle(self, look_at_front: bool) -> None:
        for _ in range(_ROUNDS):
            before = [form.facts() for form in self.of.values()]
            for expr in self.applied:
                self._apply(expr)
                if look_at_front:
                    self._look_at_front(expr)
            if before == [form.facts() for form in self.of.values()]:
                return
        raise Meaningless("its tensors would have ever more dims")

    def _same(self, *exprs: Expr) -> None:
        """Tensors of one form."""
        forms = [self.of[expr] for expr in exprs]
        names = set().union(*(form.names for form in forms))
        counted = max(form.counted for form in forms)
        for form in forms:
            form.names |= names
            form.counted = counted
        exact = {form.exact for form in forms} - {None}
        for number in exact:
            for expr in exprs:
                self._fix(expr, number)

    def _fix(self, expr: Expr, rank: int | None) -> None:
        form = self.of[expr]
        if rank is None:
            return
        if form.exact not in (None, rank) or form.counted > rank or rank < 0:
            raise Meaningless(f"{expr} would have {rank} dims, and {form.exact or form.counted} elsewhere")
        form.exact = rank

    def _count(self, expr: Expr, least: int) -> None:
        self.of[expr].counted = max(self.of[expr].counted, least)
        self._fix(expr, self.of[expr].exact)

    def _apply(self, expr: Apply) -> None:
        kind, axis = BY_NAME[expr.op].kind, expr.param("axis")
        on = expr.args[0] if kind == "reduce" else expr
        if isinstance(axis, str) and axis:
            self.of[on].names.add(axis)
        elif isinstance(axis, int) and axis < 0:
            self._count(on, -axis)
        self._count(expr, _COUNTED.get(kind, 0))
        if kind in ("reduce", "flat"):
            self._count(expr, int(kind == "flat"))
            self._one_less(expr, expr.args[0], axis if kind == "reduce" else -1)
        elif kind == "unflat":
            self._count(expr.args[0], 1)
            self._one_less(expr.args[0], expr, -1)
        elif kind in _FIXED:
            for one, rank in zip((expr, *expr.args), _FIXED[kind], strict=False):
                self._fix(one, rank)
        elif kind == "embedding":
            self._fix(expr.args[0], 2)
            self._one_less(expr.args[1], expr, -1)
        elif kind == "bag":
            self._fix(expr.args[0], 2)
            self._same(expr, expr.args[1])
        elif kind in _SECOND:
            self._fix(expr.args[1], _SECOND[kind])
            self._same(expr, expr.args[0])
        else:
            self._same(expr, *expr.args)

    def _one_less(self, less: Expr, more: Expr, axis: int | str) -> None:
        """One tensor has a dim less than another: one with a name, or one at the end."""
        small, large = self.of[less], self.of[more]
        gone = {axis} if isinstance(axis, str) else set()
        if gone & small.names:
            raise Meaningless(f"the dim {axis} is asked for where it was summed over")
        at_end = 0 if gone else 1
        names = (small.names | large.names) - gone
        self._count(more, small.counted + at_end)
        self._count(less, large.counted - at_end)
        large.names, small.names = names | gone, set(names)
        self._fix(less, None if large.exact is None else large.exact - 1)
        self._fix(more, None if small.exact is None else small.exact + 1)

    def _look_at_front(self, expr: Apply) -> None:
        """Dims counted from the beginning: of matrices, where dims are counted from the end as well."""
        axis = expr.param("axis")
        on = expr.args[0] if BY_NAME[expr.op].kind == "reduce" else expr
        form = self.of[on]
        if not isinstance(axis, int) or axis < 0:
            return
        if form.exact is None and form.counted:
            self._fix(on, 2)
        form.front.add(axis)
        if form.exact is not None and axis >= form.exact:
            raise Meaningless(f"{on} has {form.exact} dims and no dim {axis}")

    def _groups(self) -> Mapping[Expr, Expr]:
        """Which tensors have as many dims that no operator tells apart: all that some operator puts together."""
        parents: dict[Expr, Expr] = {expr: expr for expr in self.exprs}

        def first(expr: Expr) -> Expr:
            while parents[expr] is not expr:
                expr = parents[expr]
            return expr

        for expr in self.applied:
            kind = BY_NAME[expr.op].kind
            if kind == "edges":  # all of a fixed rank
                continue
            args = expr.args[1:] if kind in ("embedding", "bag") else expr.args[:1] if kind in _SECOND else expr.args
            for arg in args:
                parents[first(expr)] = first(arg)
        return {expr: first(expr) for expr in self.exprs}

    def _least(self) -> Mapping[Expr, int]:
        """How many dims that no operator tells apart there must be in each group."""
        found: dict[Expr, int] = {}
        for expr, form in self.of.items():
            missing = max(form.front, default=-1) + 1 - len(form.names) - form.counted
            found[self.group[expr]] = max(missing, found.get(self.group[expr], 0))
        return found


@dataclass(frozen=True, slots=True)
class Ranks:
    """A choice of ranks, and of where dims with a name lie."""

    forms: Forms
    others: Mapping[Expr, int]
    """How many dims no operator tells apart, for each group of tensors."""
    slots: Mapping[str, int]
    """How many of these lie before a name, in the order in which the names lie."""
    literal: Mapping[str, int]
    """Where a name lies in tensors of a fixed rank."""

    def rank(self, expr: Expr) -> int:
        form = self.forms.of[expr]
        if form.exact is not None:
            return form.exact
        return self.others[self.forms.group[expr]] + len(form.names) + form.counted

    def place(self, expr: Expr, axis: int | str) -> int:
        """The position of a dim of a tensor."""
        form, rank = self.forms.of[expr], self.rank(expr)
        if isinstance(axis, int):
            if not -rank <= axis < rank:
                raise Meaningless(f"{expr} has {rank} dims and no dim {axis}")
            return axis % rank
        if form.exact is not None:
            return self.literal[axis] % form.exact
        return self.slots[axis] + [name for name in self.slots if name in form.names].index(axis)

    def others_of(self, expr: Expr, before: int, names: Iterable[str]) -> tuple[int, ...]:
        """The positions of a tensor's dims but some at the end and some with a name."""
        gone = {self.place(expr, int(name) if name.isdecimal() else name) for name in names}
        return tuple(i for i in range(self.rank(expr) - before) if i not in gone)


def choose_ranks(forms: Forms, random: Random) -> Ranks:
    """Any ranks that the text of a rule allows."""
    others = {group: random.randint(low, max(low, _MOST_OTHERS)) for group, low in forms.least.items()}
    fewest = min((others[forms.group[expr]] for expr, form in forms.of.items() if form.names), default=0)
    slots = sorted((random.randint(0, fewest), random.random(), name) for name in forms.names)
    literal = dict(zip(forms.names, random.sample(range(4), 4), strict=False))
    found = Ranks(forms, others, {name: slot for slot, _, name in slots}, literal)
    for expr, form in forms.of.items():
        if any(found.place(expr, name) in form.front for name in form.names if form.exact is None):
            raise Meaningless("a dim has a name and is counted, too")
    return found


def meshes_in(*exprs: Expr) -> list[str]:
    """The mesh axes that operators are along."""
    found = {str(e.param("mesh", "m")) for e in exprs if isinstance(e, Apply) and BY_NAME[e.op].parallel}
    return sorted(found)


def spread_of(exprs: Iterable[Expr], random: Random) -> Mapping[Expr, tuple[str, ...]]:
    """The mesh axes along which each tensor differs from device to device; any, where a rule does not tell."""
    every = tuple(exprs)
    found: dict[Expr, list[str]] = {expr: [] for expr in every}
    for axis in meshes_in(*every):
        known = _spread_along(axis, every)
        while len(known) < len(every):
            free = next(expr for expr in every if expr not in known)
            known = _spread_along(axis, every, {**known, free: random.random() < 0.2})
        for expr in every:
            found[expr] += [axis] * known[expr]
    return {expr: tuple(axes) for expr, axes in found.items()}


def _spread_along(axis: str, exprs: tuple[Expr, ...], known: Mapping[Expr, bool] | None = None) -> dict[Expr, bool]:
    """Whether tensors differ along an axis, as far as it follows."""
    found = dict(known or {})
    before = -1

    def learn(expr: Expr, value: bool) -> None:
        if found.setdefault(expr, value) != value:
            raise Meaningless(f"{expr} is the same on all devices for one operator and not for another")

    while len(found) != before:
        before = len(found)
        for expr in exprs:
            if not isinstance(expr, Apply) or not expr.args:
                found.setdefault(expr, False) if isinstance(expr, Apply) else None
            elif BY_NAME[expr.op].parallel and str(expr.param("mesh", "m")) == axis:
                spreads = expr.op in ("partition", "replicate")
                learn(expr, spreads)
                learn(expr.args[0], not spreads)
            else:
                group = [one for one in (expr, *expr.args) if isinstance(one, Input) or one.args]
                for value in {found[one] for one in group if one in found}:
                    for one in group:
                        learn(one, value)
    return found
