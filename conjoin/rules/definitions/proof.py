"""Prove a rule from the definitions of its operators, for every size and rank; no law is taken for granted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from conjoin.rules.conditions import ONE_GROUP
from conjoin.rules.definitions.affine import number, symbol
from conjoin.rules.definitions.calls import Call, Devices, Digits, Index, Tensor, positions
from conjoin.rules.definitions.dims import Dim, Dims, IllFormed, NotCovered
from conjoin.rules.definitions.equality import TooLarge, equal
from conjoin.rules.definitions.linear_arithmetic import Facts
from conjoin.rules.definitions.ranks import Ranks, devices_of
from conjoin.rules.definitions.sums import Atom, Sum, access, between, count_names_anew
from conjoin.rules.operators import BY_NAME
from conjoin.rules.parameters import parameters, with_groups
from conjoin.rules.patterns import Apply, Expr, Input, Rule, walk


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an attempt."""

    proven: bool
    reason: str = ""
    """Why it was not proven."""
    conditions: tuple[str, ...] = ()
    """What sizes must satisfy beyond what makes the left side fit together: see `conditions.py`."""
    frame: Frame | None = field(default=None, compare=False, repr=False)
    """The sizes it was proven for."""


def prove(rule: Rule) -> Verdict:
    """Try to prove a rule; not proven does not mean false.

    A convolution that does not say how many groups it has may have any; where a rule cannot be proven so, it is tried
    for one group, and that is then a condition.

    >>> a, b = Input("a"), Input("b")
    >>> prove(Rule("", (Apply("add", (), (a, b)),), (Apply("add", (), (b, a)),))).proven
    True
    """
    found = _attempt(rule)
    ungrouped = with_groups(rule, 1)
    if found.proven or ungrouped == rule:
        return found
    narrow = _attempt(ungrouped)
    return replace(narrow, conditions=(ONE_GROUP, *narrow.conditions)) if narrow.proven else found


def _attempt(rule: Rule) -> Verdict:
    """Sizes are settled from the left side, or else from the right one: which divides a dim first may matter."""
    found = _attempt_from(rule, right_first=False)
    if found.proven:
        return found
    other = _attempt_from(rule, right_first=True)
    return other if other.proven else found


def _attempt_from(rule: Rule, right_first: bool) -> Verdict:
    count_names_anew()
    try:
        return Frame(rule).run(right_first)
    except (IllFormed, NotCovered) as error:
        return Verdict(False, str(error))
    except TooLarge:
        return Verdict(False, "its sums are too large")


class Frame:
    """The ranks, sizes and tensors of a rule with unknown sizes: what a proof and random instances are made in."""

    def __init__(self, rule: Rule, dims: Dims | None = None) -> None:
        self.rule = rule
        if len(rule.left) != len(rule.right):
            raise IllFormed(f"the left side has {len(rule.left)} outputs and the right side {len(rule.right)}")
        self.dims = Dims() if dims is None else dims
        # Both sides of an output are one tensor: what is known of the rank of one is known of the other.
        self.pairs = tuple(Apply("sub", (), pair) for pair in zip(rule.left, rule.right, strict=True))
        self.ranks, self.devices = Ranks(*self.pairs), devices_of(*self.pairs)
        self._left = frozenset(walk(*rule.left))
        self.tensors: dict[Expr, Tensor] = {}
        self.named: dict[str, Dim] = {}

    def build(self, same_outputs: bool = True, right_first: bool = False) -> tuple[str, ...]:
        """Define all tensors and make both sides of each output one; what had to be assumed for the right side.

        With the right side first all that had to be assumed for either side.
        """
        if right_first:
            for expr in walk(*self.rule.right):
                self._tensor(expr)
        for expr in walk(*self.rule.left):
            self._tensor(expr)
        self.dims.close()
        if not right_first:
            self.dims.needed.clear()
        for expr in walk(*self.rule.right):
            self._tensor(expr)
        for left, right in zip(self.rule.left, self.rule.right, strict=True) if same_outputs else ():
            for a, b in zip(self.tensors[left].dims, self.tensors[right].dims, strict=True):
                self.dims.unify(a, b)
        self.dims.close()
        return tuple(dict.fromkeys((*self.dims.assumed, *self.dims.needed)))

    def run(self, right_first: bool = False) -> Verdict:
        """Build it, and compare both sides of every output."""
        conditions = self.build(right_first=right_first)
        if not Facts([*self.dims.facts(), *_parameter_facts(self.rule)]).possible(frozenset()):
            return Verdict(False, "no sizes satisfy what it needs")
        for left, right in zip(self.rule.left, self.rule.right, strict=True):
            if not self._equal(left, right):
                return Verdict(False, f"{left} and {right} were not found equal")
        return Verdict(True, "", conditions, self)

    def _equal(self, left: Expr, right: Expr) -> bool:
        one, other = self.tensors[left], self.tensors[right]
        facts = [*self.dims.facts(), *_parameter_facts(self.rule)]
        index: list[Digits] = []
        for dim in one.dims:
            position, where = positions(self.dims, dim, "o")
            index.append(position)
            facts += where
        devices = {axis: symbol(f"at {axis}") for axis in self.devices[left]}
        for axis, device in devices.items():
            facts += between(0, device, self.dims.size(self._named(axis)))
        return equal(one.at(tuple(index), devices), other.at(tuple(index), devices), Facts(facts))

    def _tensor(self, expr: Expr) -> Tensor:
        if expr not in self.tensors:
            made = self._input(expr) if isinstance(expr, Input) else self._apply(expr)
            self.tensors[expr] = made
        return self.tensors[expr]

    def _input(self, expr: Input) -> Tensor:
        dims = self._new_dims(expr)
        axes = sorted(self.devices[expr])

        def at(index: Index, devices: Devices) -> Sum:
            return access(expr.name, (*(devices[axis] for axis in axes), *(digit for dim in index for digit in dim)))

        return Tensor(dims, at)

    def _new_dims(self, expr: Expr) -> tuple[Dim, ...]:
        rank = self.ranks[expr]
        others = "".join([f" before {-rank.least}"] * (rank.least > 0) + [f" but {n}" for n in sorted(rank.names)])
        words = (f"{expr}.{label}" if label != "…" else f"dims of {expr}{others}" for label in rank.labels)
        is_made_up = isinstance(expr, Apply) and expr not in self._left
        return tuple(self.dims.new(word, is_made_up=is_made_up) for word in words)

    def _apply(self, expr: Apply) -> Tensor:
        for name in ("kernel", "groups", "parts", "vertices"):
            if expr.param(name) not in ("", "?"):
                self._named(f"{name} {expr.param(name)}")
        if BY_NAME[expr.op].parallel:
            self.dims.meshes.add(self._named(str(expr.param("mesh", "m"))))
        result = self._new_dims(expr) if not expr.args else ()
        return BY_NAME[expr.op].define(self.call(expr, result))

    def call(self, expr: Apply, result: tuple[Dim, ...] = ()) -> Call:
        """What the definition of an operator is given; its operands are defined before."""
        params = parameters(expr)
        if expr.param("axis") != "":
            on = expr.args[0] if BY_NAME[expr.op].kind == "reduce" else expr
            params = (*params, ("place", self.ranks[on].place(expr.param("axis"))))
        args = tuple(self.tensors[arg] for arg in expr.args)
        return Call(self.dims, replace(expr, params=params), args, result, self.named)

    def _named(self, name: str) -> Dim:
        if name not in self.named:
            word = name.split()[-1]
            known = {"known": int(word)} if word.isdecimal() else {}
            self.named[name] = self.dims.new(name, **known)
        return self.named[name]


def _parameter_facts(rule: Rule) -> list[Atom]:
    """Strides are at least 1 and padding at least 0."""
    found = []
    for expr in walk(*rule.outputs):
        if isinstance(expr, Apply):
            for name, least in (("stride", 1), ("pad", 0)):
                value = expr.param(name)
                if isinstance(value, str) and value not in ("", "same", "valid"):
                    found.append(Atom(symbol(value) - number(least)))
    return found
