"""Tensor types read back from text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from conjoin.ir import parse_type
from conjoin.ops import TensorType
from tests.ir.graphs import TYPES


@given(TYPES)
@settings(settings.get_profile("ir"))
def test_types_round_trip(type: TensorType) -> None:
    assert parse_type(str(type)) == type


def test_a_scalar_has_no_sizes() -> None:
    assert parse_type("b1[]") == TensorType((), torch.bool)


@pytest.mark.parametrize(
    "text",
    [
        "", "f32", "f32[", "f32[2", "f32[2,]", "f32[,]", "f32[-1]", "f32[2.0]", "f32[ 2]", "f99[2]", "f32[2]x",
        "f32[٣]", "f32[2]{}", "f32[2]{x}", "f32[2]{x:I}", "f32[2]{x:S(1)}{y:B}", "f32[2]{x:S(-1)}", "f32[2]{2x:B}",
        "f32[2]{x:B,}", "f32[9999999999999999999]", "f32[999999999999,999999999999]", f"f32[{','.join('1' * 17)}]",
    ],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_type(text)
