"""Rules as data: two lists of expressions over inputs, equal wherever the conditions hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

Parameter = int | str
"""A number, or the name of one: `conv[stride=s]` is a convolution of any stride."""


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a rule is about."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator applied to expressions; parameters at their defaults are left out."""

    op: str
    params: tuple[tuple[str, Parameter], ...]
    args: tuple[Expr, ...]
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)
    """Kept: that of all expressions inside would be found again each time."""

    def __hash__(self) -> int:
        if self._hash is None:
            object.__setattr__(self, "_hash", hash((self.op, self.params, self.args)))
        return self._hash  # type: ignore[return-value] # just set

    def __reduce__(self) -> tuple[type[Apply], tuple[object, ...]]:
        """Without what is kept: hashes are other ones in another process."""
        return Apply, (self.op, self.params, self.args)

    def param(self, name: str, default: Parameter = "") -> Parameter:
        return dict(self.params).get(name, default)

    def __str__(self) -> str:
        params = ", ".join(f"{key}={value}" for key, value in self.params)
        args = f"({', '.join(map(str, self.args))})" if self.args else ""
        return f"{self.op}{f'[{params}]' if params else ''}{args}"


Expr = Input | Apply


@dataclass(frozen=True, slots=True)
class Rule:
    """A substitution: the left side may be replaced by the right one, output by output.

    >>> a, b = Input("a"), Input("b")
    >>> print(Rule("add-commutes", (Apply("add", (), (a, b)),), (Apply("add", (), (b, a)),)))
    add-commutes: add(a, b) => add(b, a)
    """

    name: str
    left: tuple[Expr, ...]
    right: tuple[Expr, ...]

    def __str__(self) -> str:
        left, right = (", ".join(map(str, side)) for side in (self.left, self.right))
        return f"{self.name}: {left} => {right}"

    @property
    def outputs(self) -> tuple[Expr, ...]:
        return (*self.left, *self.right)

    def reversed(self) -> Rule:
        return replace(self, left=self.right, right=self.left)


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every expression in the roots once, operands before what uses them."""
    return iter(_in_order(roots))


@lru_cache(maxsize=1 << 14)
def _in_order(roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
    found: dict[Expr, None] = {}

    def visit(expr: Expr) -> None:
        if expr in found:
            return
        if isinstance(expr, Apply):
            for arg in expr.args:
                visit(arg)
        found[expr] = None

    for root in roots:
        visit(root)
    return tuple(found)


def inputs_of(*roots: Expr) -> tuple[str, ...]:
    """The names of the inputs in order of first appearance."""
    return tuple(expr.name for expr in walk(*roots) if isinstance(expr, Input))


def operators_in(*roots: Expr) -> tuple[Apply, ...]:
    """Every distinct application."""
    return tuple(expr for expr in walk(*roots) if isinstance(expr, Apply))


def with_inputs(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """The expression with inputs replaced."""
    if isinstance(expr, Input):
        return values.get(expr.name, expr)
    args = tuple(with_inputs(arg, values) for arg in expr.args)
    return expr if args == expr.args else replace(expr, args=args)
