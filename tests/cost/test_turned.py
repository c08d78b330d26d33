"""What numbers that lie apart cost, against kernels timed on an H200: torch 2.11, 2026-11-19, microseconds."""

from __future__ import annotations

import statistics
from dataclasses import replace
from math import prod

import pytest
import torch

from conjoin.cost import CostModel, OperatorCost
from conjoin.machine import parse_machine
from conjoin.ops import Call, TensorType, bind_args

H200 = parse_machine("dgx-h200").device_type(0)
F32, BF16 = torch.float32, torch.bfloat16
IMAGES, DEEP, TOKENS, ROWS = (64, 56, 56, 96), (64, 14, 14, 384), (64, 196, 768), (16384, 1024)
COPIES = [
    (F32, IMAGES, 95.9), (F32, DEEP, 35.4), (F32, TOKENS, 67.9), (F32, ROWS, 126.2), (F32, (400_000, 256), 950.0),
    (BF16, IMAGES, 90.1), (BF16, DEEP, 31.3), (BF16, TOKENS, 60.6), (BF16, ROWS, 110.9), (BF16, (400_000, 256), 645.0),
]  # fmt: skip
MORE = [
    ("layer_norm", F32, IMAGES, 96.7, 95.1), ("layer_norm", F32, TOKENS, 67.2, 43.6),
    ("layer_norm", BF16, IMAGES, 90.3, 99.3), ("layer_norm", BF16, TOKENS, 61.8, 58.6),
    ("softmax.int", F32, TOKENS, 66.2, 0.0), ("softmax.int", BF16, ROWS, 109.4, 0.0),
    ("rms_norm", F32, TOKENS, 67.0, None), ("rms_norm", BF16, IMAGES, 90.2, None),
]  # fmt: skip
"""How much longer a call and its backward took where its rows did not lie in one piece."""


def cost(call: Call, *, turned: bool) -> OperatorCost:
    needs = (0,) if call.op != "clone" else ()
    return CostModel([]).operator(replace(call, turned=turned), needs, H200)


def called(op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Call:
    x, one = TensorType(shape, dtype), TensorType(shape[-1:], dtype)
    more = {"layer_norm": (shape[-1:], one, one), "rms_norm": (shape[-1:], one), "softmax.int": (-1,)}
    return Call(op, bind_args(op, (x, *more.get(op, ())), {}))


def test_copies_of_numbers_that_lie_apart() -> None:
    ratios = [1e6 * cost(called("clone", *what), turned=True).forward.value / took for *what, took in COPIES]
    assert 0.8 <= statistics.median(ratios) <= 1.2 and all(0.6 <= ratio <= 1.6 for ratio in ratios), ratios


@pytest.mark.parametrize(("op", "dtype", "shape", "ahead", "back"), MORE)
def test_calls_that_copy_first(
    op: str, dtype: torch.dtype, shape: tuple[int, ...], ahead: float, back: float | None
) -> None:
    apart, together = (cost(called(op, dtype, shape), turned=turned) for turned in (True, False))
    assert 1e6 * (apart.forward.value - together.forward.value) == pytest.approx(ahead, rel=0.6)
    if back is not None:
        more = 1e6 * (apart.backward.value - together.backward.value)
        assert more == 0 if back == 0 else 0.4 * back <= more <= 2.5 * back


def test_others_read_them_as_they_lie() -> None:
    """A sum of tensors in both orders took 71.0 where one of tensors alike took 30.1; a view that must be a copy takes
    what the copy does."""
    x = TensorType(TOKENS, F32)
    sum_of = Call("add.Tensor", bind_args("add.Tensor", (x, x), {}))
    assert 1e6 * cost(sum_of, turned=True).forward.value == pytest.approx(71.0, rel=0.4)
    assert cost(sum_of, turned=True).host_forward == cost(sum_of, turned=False).host_forward
    flat = Call("reshape", bind_args("reshape", (x, [prod(TOKENS)]), {}))
    assert cost(flat, turned=False).forward.value == 0
    assert cost(flat, turned=True).forward == cost(called("clone", F32, TOKENS), turned=False).forward
