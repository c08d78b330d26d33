"""Names and signatures of ATen overloads."""

from __future__ import annotations

import pytest
import torch

from conjoin.ops import (
    EMBEDDING_BAG,
    Kind,
    bind_args,
    find_operator,
    map_tensors,
    operator_name,
    signature,
    walk_tensors,
)


@pytest.mark.parametrize("name", ["linear", "sum.dim_IntList", "add.Tensor", "_native_batch_norm_legit.no_stats"])
def test_a_name_leads_to_its_overload_and_back(name: str) -> None:
    found = find_operator(name)
    assert isinstance(found, torch._ops.OpOverload) and operator_name(found) == name


@pytest.mark.parametrize(
    "name", ["no_such_operator", "linear.no_such_overload", "a b", "", "linear.__class__", "mylib::f"]
)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(LookupError):
        find_operator(name)


def test_parameters_are_told_apart() -> None:
    assert [(p.name, p.kind, p.has_default) for p in signature("cat").parameters] == [
        ("tensors", Kind.TENSORS, False),
        ("dim", Kind.ATTRIBUTE, True),
    ]
    assert signature("linear").parameters[2].kind is Kind.TENSOR
    assert signature("index.Tensor").parameters[1].kind is Kind.TENSORS
    assert signature("full_like").parameters[2].keyword_only
    assert signature("add_.Tensor").mutates and not signature("add.Tensor").mutates
    assert signature("dropout").random and not signature("relu").random
    assert signature("max.dim").num_outputs == 2
    assert signature("relu").position("no_such") == -1


def test_our_own_operators_have_signatures_too() -> None:
    assert [p.kind is Kind.TENSOR for p in signature(EMBEDDING_BAG).parameters] == [True, True, True, False, False]


def test_arguments_line_up_with_the_signature() -> None:
    assert bind_args("sum.dim_IntList", ("x", [0, 1]), {"dtype": torch.float64}) == ("x", (0, 1), False, torch.float64)
    assert bind_args("zeros", ([2],), {"device": "cuda", "dtype": torch.int64}) == ((2,), torch.int64, None, None, None)


def test_tensors_are_found_wherever_they_stand() -> None:
    args = bind_args("index.Tensor", ("x", [None, "i"]), {})
    assert list(walk_tensors("index.Tensor", args)) == [("self", "x"), ("indices", "i")]
    assert map_tensors("index.Tensor", args, str.upper) == ("X", (None, "I"))
    assert list(walk_tensors("add.Tensor", ("x", 2.0, 1))) == [("self", "x")], "a number is no operand"
