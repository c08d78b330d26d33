"""Conditions are read as they are written, and what is no condition is refused."""

from __future__ import annotations

import pytest

from conjoin.errors import UsageError
from conjoin.rules import Library
from conjoin.rules.conditions import (
    ONE_GROUP,
    Condition,
    DimSize,
    Made,
    Named,
    Number,
    Others,
    parse_condition,
    tensors_in,
)
from conjoin.rules.patterns import Apply, Input
from tests.ir.wording import assert_three_sentences

X, Y = Input("x"), Input("y")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x.1 = y.-2", Condition("=", DimSize(X, 1), DimSize(Y, -2))),
        ("x.a is odd", Condition("is odd", DimSize(X, "a"))),
        ("x.a is split", Condition("is split", DimSize(X, "a"))),
        ("2 * p <= kernel k", Condition("<=", Made("*", (Number(2), Named("p"))), Named("k"))),
        ("kernel 3 = x.2", Condition("=", Number(3), DimSize(X, 2))),
        ("x.1 is a multiple of m", Condition("is a multiple of", DimSize(X, 1), Named("m"))),
        ("first part of x.-2 * x.-1 = y.0",
         Condition("=", Made("*", (Made("first", (DimSize(X, -2),)), DimSize(X, -1))), DimSize(Y, 0))),
        ("half of (x.1 + y.1) = 1",
         Condition("=", Made("half", (Made("+", (DimSize(X, 1), DimSize(Y, 1))),)), Number(1))),
        ("y.0 / groups(x.1, y.1) = groups g",
         Condition("=", Made("/", (DimSize(Y, 0), Made("groups", (DimSize(X, 1), DimSize(Y, 1))))), Named("g"))),
        ("dims of x before -2 but a but b = dims of y",
         Condition("=", Others(X, 2, ("a", "b")), Others(Y, 0, ()))),
        ("neg(x).-1 = identity.-2", Condition("=", DimSize(Apply("neg", (), (X,)), -1),
                                              DimSize(Apply("identity", (), ()), -2))),
        ("windows(x.2, 3, s, 0) = 4",
         Condition("=", Made("windows", (DimSize(X, 2), Number(3), Named("s"), Number(0))), Number(4))),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, expected: Condition) -> None:
    assert parse_condition(text) == expected


NO_CONDITIONS = [
    "", "x.1", "x.1 =", "= x.1", "x. = y.1", "x.1 = (y.1", "x.1 == y.1", "x.1 is odd 3", "frob(x).1 = 2", "x.1 = y.1)",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_CONDITIONS)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_condition(text)
    assert_three_sentences(str(error.value))


def test_all_conditions_of_the_library_are_read() -> None:
    texts = {text for entry in Library.shipped().entries for text in entry.conditions}
    assert len(texts) > 50
    assert all(parse_condition(text).relation for text in texts - {ONE_GROUP})
    assert list(tensors_in(["y.0 / groups(neg(x).1, y.1) = 1", ONE_GROUP])) != []
