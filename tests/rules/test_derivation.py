"""What follows from rules: chains of rewrites, and what does not follow."""

from __future__ import annotations

from conjoin.rules import Deriver, parse_rule, prove
from conjoin.rules.patterns import Rule

RULES = [
    parse_rule("associative", "matmul(a, matmul(b, c))", "matmul(matmul(a, b), c)"),
    parse_rule("columns", "matmul(a, concat[axis=-1](b, c))", "concat[axis=-1](matmul(a, b), matmul(a, c))"),
    parse_rule("first", "split[axis=a, part=0](concat[axis=a](x, y))", "x"),
    parse_rule("second", "split[axis=a, part=1](concat[axis=a](x, y))", "y"),
    parse_rule("geometry", "concat[axis=a](concat[axis=b](x, y), concat[axis=b](z, w))",
               "concat[axis=b](concat[axis=a](x, z), concat[axis=a](y, w))"),
    parse_rule("strides", "conv[stride=s, groups=1](x, add(y, z))",
               "add(conv[stride=s, groups=1](x, y), conv[stride=s, groups=1](x, z))"),
]  # fmt: skip


def derive(left: str, right: str) -> list[str] | None:
    found = Deriver(RULES).derive(parse_rule("goal", left, right))
    return None if found is None else [step.rule for step in found]


def test_a_chain_goes_through_both_sides() -> None:
    assert derive("matmul(a, matmul(b, matmul(c, d)))", "matmul(matmul(matmul(a, b), c), d)") == ["associative"] * 2


def test_several_outputs_at_once() -> None:
    merged = "matmul(a, concat[axis=-1](b, c))"
    steps = derive("matmul(a, b); matmul(a, c)", f"split[axis=-1, part=0]({merged}); split[axis=-1, part=1]({merged})")
    assert steps is not None and sorted(steps) == ["columns", "columns", "first", "second"]


def test_every_step_is_an_equation() -> None:
    goal = parse_rule("goal", "matmul(a, matmul(b, matmul(c, d)))", "matmul(matmul(matmul(a, b), c), d)")
    before = goal.left
    for step in Deriver(RULES).derive(goal) or ():
        assert prove(Rule(step.rule, before, step.result)).proven
        before = step.result
    assert before == goal.right


def test_parameters_at_their_defaults_are_bound_too() -> None:
    assert derive("conv[groups=1](x, add(y, z))", "add(conv[groups=1](x, y), conv[groups=1](x, z))") == ["strides"]


def test_two_names_are_two_dims() -> None:
    left = "concat[axis=0](concat[axis=0](x, y), concat[axis=0](z, w))"
    assert derive(left, "concat[axis=0](concat[axis=0](x, z), concat[axis=0](y, w))") is None


def test_what_does_not_follow() -> None:
    assert derive("matmul(a, b)", "matmul(b, a)") is None
