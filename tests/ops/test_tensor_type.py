"""Types of tensors and the short names of dtypes."""

from __future__ import annotations

import pytest
import torch

from conjoin.ir import parse_type
from conjoin.ir.literals import literal_text, parse_word
from conjoin.ops import Invariant, Split, TensorType, dtype_name, parse_dtype

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_name_of_every_dtype_leads_back(dtype: torch.dtype) -> None:
    assert parse_dtype(dtype_name(dtype)) == dtype
    assert parse_type(str(TensorType((2, 3), dtype))) == TensorType((2, 3), dtype)
    assert parse_word(literal_text(dtype)) == dtype


def test_names_that_stand_in_files_stay_as_they_are() -> None:
    names = ["f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i64", "i32", "i16", "i8", "u8", "b1", "c64", "c128"]
    dtypes = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )  # fmt: skip
    assert list(map(dtype_name, dtypes)) == names


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'f128' is not a dtype; known are .*f32, f64"):
        parse_dtype("f128")


def test_sizes_and_text() -> None:
    x = TensorType((2, 3), torch.bfloat16, (("a", Split(0)),))
    assert (x.num_elements, x.bytes, str(x)) == (6, 12, "bf16[2,3]{a:S(0)}")
    assert TensorType((), torch.float32).num_elements == 1


def test_invariant_is_written_by_leaving_it_out() -> None:
    with pytest.raises(AssertionError):
        TensorType((2,), torch.float32, (("a", Invariant()),))
