"""Parameters of applications: all of them, which are names that stand for any value, and rules with others."""

from __future__ import annotations

from dataclasses import replace

from conjoin.rules.operators import BY_NAME, FUNCTIONS
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, walk

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


def with_groups(rule: Rule, groups: Parameter) -> Rule:
    """The rule for convolutions of so many groups, where it does not say how many they have."""

    def changed(expr: Expr) -> Expr:
        if isinstance(expr, Input):
            return expr
        args = tuple(changed(arg) for arg in expr.args)
        params = expr.params
        if expr.op == "conv" and expr.param("groups", "?") == "?":
            params = (*((name, value) for name, value in params if name != "groups"), ("groups", groups))
        return Apply(expr.op, params, args)

    return replace(rule, left=tuple(map(changed, rule.left)), right=tuple(map(changed, rule.right)))
