"""torch's type promotion, without tensors."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from conjoin.ops import Dtype, TensorType
from conjoin.ops.dtypes import output_dtype

KINDS = (torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
RANKS = ((), (2,))


@pytest.mark.parametrize(("one", "other"), list(product(KINDS, KINDS)))
def test_two_operands_promote_as_torch_does(one: torch.dtype, other: torch.dtype) -> None:
    for left, right in product(RANKS, RANKS):
        want = torch.result_type(torch.empty(left, dtype=one), torch.empty(right, dtype=other))
        assert output_dtype(Dtype.PROMOTE, [TensorType(left, one), TensorType(right, other)], []) == want


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("number", [True, 2, 0.5, 1j])
def test_a_number_lifts_only_the_category(dtype: torch.dtype, number: complex) -> None:
    want = torch.result_type(torch.empty(2, dtype=dtype), number)
    assert output_dtype(Dtype.PROMOTE, [TensorType((2,), dtype)], [number]) == want


def test_three_operands_promote_by_class_not_by_order() -> None:
    mask, scalar, x = TensorType((3,), torch.bool), TensorType((), torch.float64), TensorType((3,), torch.float32)
    assert output_dtype(Dtype.PROMOTE, [mask, scalar, x], []) == torch.float32


def test_numbers_alone() -> None:
    assert output_dtype(Dtype.NUMBER, [], [1, 2]) == torch.int64
    assert output_dtype(Dtype.NUMBER, [], [1, 2.0]) == torch.get_default_dtype()
    assert output_dtype(Dtype.NUMBER, [], [True]) == torch.bool
    assert output_dtype(Dtype.NUMBER, [], [1j]) == torch.complex64
