"""Candidates become as general as can be proven."""

from __future__ import annotations

import pytest

from conjoin.rules import parse_rule, prove
from conjoin.rules.generalization import generalize


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("add(matmul(x, y), matmul(x, y))", "matmul(x, add(y, y))",
         "add(matmul(x, y), matmul(x, z)) => matmul(x, add(y, z))"),
        ("add(linear(x, x), linear(y, y))", "linear(concat[axis=-1](x, y), concat[axis=-1](x, y))",
         "add(linear(x, y), linear(z, w)) => linear(concat[axis=-1](x, z), concat[axis=-1](y, w))"),
        ("concat[axis=-1](relu(x), relu(x))", "relu(concat[axis=-1](x, x))",
         "concat[axis=a](relu(x), relu(y)) => relu(concat[axis=a](x, y))"),
        ("sum[axis=-2](combine[axis=-1](x))", "combine[axis=-1](sum[axis=-2](x))",
         "sum[axis=b](combine[axis=a](x)) => combine[axis=a](sum[axis=b](x))"),
        ("embedding(replicate(x), partition[axis=-1](y))", "partition[axis=-2](embedding(x, y))",
         "embedding(replicate(x), partition[axis=a](y)) => partition[axis=a](embedding(x, y))"),
        ("conv(replicate(x), replicate(y))", "replicate(conv(x, y))",
         "conv[stride=s, pad=p, act=f](replicate(x), replicate(y)) => "
         "replicate(conv[stride=s, pad=p, act=f](x, y))"),
        ("conv(x, add(y, y))", "add(conv(x, y), conv(x, y))",
         "conv[stride=s, pad=p](x, add(y, z)) => add(conv[stride=s, pad=p](x, y), conv[stride=s, pad=p](x, z))"),
    ],
)  # fmt: skip
def test_what_is_left_open(left: str, right: str, expected: str) -> None:
    rule, verdict = generalize(parse_rule("r", left, right), prove)
    assert verdict.proven and str(rule) == f"r: {expected}"


def test_what_is_not_true_in_general_stays_as_it_is() -> None:
    rule = parse_rule("r", "transpose(concat[axis=-1](x, x))", "concat[axis=-2](transpose(x), transpose(x))")
    general, _ = generalize(rule, prove)
    assert str(general) == "r: transpose(concat[axis=-1](x, y)) => concat[axis=-2](transpose(x), transpose(y))"


def test_what_is_false_is_not_proven() -> None:
    rule = parse_rule("r", "sub(x, y)", "sub(y, x)")
    general, verdict = generalize(rule, prove)
    assert general == rule and not verdict.proven
