"""Types of tensors and the short names of dtypes."""

from __future__ import annotations

import pytest
import torch

from conjoin.ops import Invariant, Split, TensorType, dtype_name, parse_dtype


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
def test_the_name_of_a_dtype_leads_back(dtype: torch.dtype) -> None:
    assert parse_dtype(dtype_name(dtype)) == dtype


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="'f128' is not a dtype; known are f64, f32"):
        parse_dtype("f128")
    with pytest.raises(ValueError, match="quint8 has no short name"):
        dtype_name(torch.quint8)


def test_sizes_and_text() -> None:
    x = TensorType((2, 3), torch.bfloat16, (("a", Split(0)),))
    assert (x.num_elements, x.bytes, str(x)) == (6, 12, "bf16[2,3]{a:S(0)}")
    assert TensorType((), torch.float32).num_elements == 1


def test_invariant_is_written_by_leaving_it_out() -> None:
    with pytest.raises(AssertionError):
        TensorType((2,), torch.float32, (("a", Invariant()),))
