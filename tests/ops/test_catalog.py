"""The catalog: every name exists in this torch, is declared once, and is found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from conjoin.ops import Call, Kind, TensorType, all_ops, find_operator, find_spec, signature, spec_for, why_opaque
from tests.cases import each_of

OVERLOADS = [name for spec in all_ops() for name in spec.names]


def test_no_operator_is_declared_twice() -> None:
    assert not [name for name, count in Counter(OVERLOADS).items() if count > 1]


@each_of(OVERLOADS, at_once=64)
def test_every_overload_exists_and_writes_to_nothing(op: str) -> None:
    spec = find_spec(op)
    assert find_operator(op) is not None and not signature(op).mutates
    assert spec is not None and op in spec.names


@each_of(OVERLOADS, at_once=64)
def test_declarations_name_parameters_that_exist(op: str) -> None:
    spec = find_spec(op)
    assert spec is not None
    names = {parameter.name for name in spec.names for parameter in signature(name).parameters}
    terms = spec.terms if isinstance(spec.terms, str) else ""
    assert {word.strip("*") for word in terms.replace("+", " ").split()} <= names
    assert set(spec.follows) <= names | {"size", "shape"} and set(spec.constants) <= names
    assert callable(spec.sample) or set(spec.sample) <= names


def test_what_is_not_declared_is_opaque() -> None:
    assert find_spec("nonzero") is None and find_spec("no::such") is None


def test_a_form_that_is_not_covered_is_opaque() -> None:
    x, mask = TensorType((4,), torch.float32), TensorType((4,), torch.bool)
    assert spec_for(Call("index.Tensor", (x, (mask,)))) is None
    assert spec_for(Call("index.Tensor", (x, (TensorType((2,), torch.int64),)))) is find_spec("index.Tensor")


def test_a_family_is_large_enough_for_ordinary_models() -> None:
    """A floor, so that a declaration lost by accident is seen."""
    assert len(OVERLOADS) >= 520
    assert sum(parameter.kind is not Kind.ATTRIBUTE for op in OVERLOADS for parameter in signature(op).parameters) > 700


NUMBERS: tuple[Any, ...] = (1, 1.0, True, 0, 0.0, -0.0, False, 1 + 0j)


def test_calls_whose_numbers_are_of_other_types_are_other_calls() -> None:
    """What is found out of a call is kept: 1, 1.0 and True are equal, and give sums of other dtypes."""
    x = TensorType((3,), torch.int64)
    calls = [Call("mul.Tensor", (x, number)) for number in NUMBERS]
    assert len(dict.fromkeys(calls)) == len(NUMBERS)
    nested = [Call("pad", (x, (number, 0), "constant", None)) for number in NUMBERS]
    assert len(dict.fromkeys(nested)) == len(NUMBERS)
    assert Call("mul.Tensor", (x, 1.5)) == Call("mul.Tensor", (x, 1.5))


def test_a_declaration_that_fails_is_told_why() -> None:
    strange = Call("diag_embed", (TensorType((3,), torch.float32), 0, 7, 7))
    assert spec_for(strange) is None
    assert "its declaration cannot read this form: " in str(why_opaque(strange))
