"""Parameters of applications: all of them, and which are names that stand for any value."""

from __future__ import annotations

from conjoin.rules.operators import BY_NAME, FUNCTIONS
from conjoin.rules.patterns import Apply, Expr, Parameter, walk

_WORDS: dict[str, frozenset[str]] = {
    "pad": frozenset({"same", "valid"}),
    "act": frozenset({"none", *FUNCTIONS}),
    "groups": frozenset({"?"}),
}
"""Values of parameters that are words, and no names for any value."""


def is_any(name: str, value: Parameter) -> bool:
    """Whether the value of a parameter stands for any.

    >>> is_any("pad", "p"), is_any("pad", "same"), is_any("stride", 2)
    (True, False, False)
    """
    return isinstance(value, str) and value not in _WORDS.get(name, ())


def parameters(expr: Apply) -> tuple[tuple[str, Parameter], ...]:
    """All parameters of an application in the order they are declared, those at their defaults too."""
    given = dict(expr.params)
    return tuple((name, given.get(name, default)) for name, default in BY_NAME[expr.op].params)


def names_in(*roots: Expr) -> dict[str, str]:
    """The names that stand for any value, and of which parameter each is one."""
    applied = (expr for expr in walk(*roots) if isinstance(expr, Apply))
    return {str(v): name for expr in applied for name, v in parameters(expr) if is_any(name, v)}
