"""What is thought of a stranger's rule."""

from __future__ import annotations

import pytest

from conjoin.rules import Deriver, Standing, judge, parse_rule

KNOWN = Deriver([parse_rule("associative", "matmul(a, matmul(b, c))", "matmul(matmul(a, b), c)")])


@pytest.mark.parametrize(
    ("left", "right", "standing"),
    [
        ("matmul(a, matmul(b, matmul(c, d)))", "matmul(matmul(matmul(a, b), c), d)", Standing.DERIVED),
        ("matmul(a, add(b, c))", "add(matmul(a, b), matmul(a, c))", Standing.PROVEN),
        ("matmul(a, b)", "matmul(b, a)", Standing.REFUTED),
        ("concat[axis=1](conv(x, y), conv(x, z))", "conv(x, concat[axis=0](y, z))", Standing.REFUTED),
        ("relu(relu(x))", "relu(x)", Standing.PROVEN),
    ],
)
def test_standings(left: str, right: str, standing: Standing) -> None:
    found = judge(parse_rule("rule", left, right), KNOWN)
    assert found.standing is standing
    assert (found.counterexample is not None) == (standing is Standing.REFUTED)
    assert (found.derivation is not None) == (standing is Standing.DERIVED)


def test_a_refuted_rule_says_where_it_holds() -> None:
    found = judge(parse_rule("rule", "concat[axis=1](conv(x, y), conv(x, z))", "conv(x, concat[axis=0](y, z))"), KNOWN)
    assert found.verdict.proven and "groups = 1" in found.verdict.conditions
