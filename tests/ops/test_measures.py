"""Flops and bytes of a call, and that those of its parts add up."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.ops import (
    Call,
    OpSpec,
    TensorType,
    all_ops,
    bind_args,
    bytes_read,
    bytes_written,
    find_spec,
    flops,
    map_tensors,
    operand_spans,
    random_call,
    random_cuts,
    sharding_rules,
    space_of,
)
from tests.cases import each_of

FEW = settings(settings.get_profile("ops"))


def f(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


def call_of(op: str, *args: Any, **kwargs: Any) -> tuple[OpSpec, Call]:
    spec = find_spec(op)
    assert spec is not None
    return spec, Call(op, bind_args(op, args, kwargs))


COUNTS = [
    (call_of("linear", f(4, 6), f(8, 6), f(8)), 2 * 4 * 6 * 8),
    (call_of("bmm", f(3, 4, 6), f(3, 6, 8)), 2 * 3 * 4 * 6 * 8),
    (call_of("conv2d", f(2, 4, 9, 9), f(6, 4, 3, 3)), 2 * (2 * 6 * 7 * 7) * (4 * 3 * 3)),
    (call_of("conv2d", f(2, 4, 9, 9), f(6, 2, 3, 3), None, (2, 2), (1, 1), (1, 1), 2), 2 * (2 * 6 * 5 * 5) * (2 * 9)),
    (
        call_of("convolution", f(2, 4, 9, 9), f(6, 4, 3, 3), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
        2 * 588 * 36,
    ),
    (call_of("conv_transpose2d.input", f(2, 4, 5, 5), f(4, 6, 3, 3)), 2 * (2 * 5 * 5) * (4 * 6 * 9)),
    (call_of("scaled_dot_product_attention", f(2, 4, 5, 8), f(2, 4, 6, 8), f(2, 4, 6, 7)), 240 * (2 * 8 + 2 * 7 + 12)),
    (
        call_of("scaled_dot_product_attention", f(1, 1, 4, 8), f(1, 1, 4, 8), f(1, 1, 4, 8), None, 0.0, True),
        16 * 44 / 2,
    ),
    (call_of("relu", f(3, 4)), 12),
    (call_of("gelu", f(3, 4)), 120),
    (call_of("sum", f(3, 4)), 12),
    (call_of("view", f(3, 4), (12,)), 0),
    (call_of("conjoin::embedding_bag", f(1000, 8), TensorType((4, 3), torch.int64), None, "sum", None), 4 * 3 * 8),
    (call_of("lstm_cell", f(4, 3), (f(4, 5), f(4, 5)), f(20, 3), f(20, 5)), 2 * 4 * (60 + 100)),
]


@pytest.mark.parametrize(("call", "count"), COUNTS, ids=[f"{call[1].op}-{n}" for n, (call, _) in enumerate(COUNTS)])
def test_flops(call: tuple[OpSpec, Call], count: float) -> None:
    assert flops(*call) == count


def test_bytes() -> None:
    linear = call_of("linear", f(4, 6), f(8, 6), f(8))
    assert (bytes_read(*linear), bytes_written(*linear)) == (4 * (24 + 48 + 8), 4 * 32)
    view = call_of("view", f(3, 4), (12,))
    assert (bytes_read(*view), bytes_written(*view)) == (0, 0)
    lookup = call_of("embedding", f(1000, 8), TensorType((3,), torch.int64))
    assert (bytes_read(*lookup), bytes_written(*lookup)) == (3 * 8 + 3 * 32, 3 * 32)
    halves = call_of("add.Tensor", TensorType((8,), torch.bfloat16), TensorType((8,), torch.bfloat16))
    assert (bytes_read(*halves), bytes_written(*halves)) == (32, 16)


@each_of([name for spec in all_ops() for name in spec.names], at_once=64)
def test_no_measure_is_negative(op: str) -> None:
    spec = find_spec(op)
    assert spec is not None
    for seed in range(6):
        call = random_call(spec, Random(seed), op)
        measures = flops(spec, call), bytes_read(spec, call), bytes_written(spec, call)
        assert min(measures) >= 0, seed
        assert not spec.view or measures == (0, 0, 0), seed


def local_call(spec: OpSpec, call: Call, index: str, piece: tuple[int, int]) -> Call:
    """The call that one device makes: operands cut, attributes that follow a size shrunk."""
    cuts = iter(operand_spans(spec, call, {index: piece}))

    def cut(tensor: TensorType) -> TensorType:
        shape = list(tensor.shape)
        for span in next(cuts):
            shape[span.dim] = span.stop - span.start
        return TensorType(tuple(shape), tensor.dtype)

    sizes = {name: (piece[1] - piece[0]) if name == index else n for name, n in space_of(spec, call).sizes.items()}
    args = list(map_tensors(call.op, call.args, cut))
    for name, source in spec.follows.items():
        args[call.signature.position(name)] = sizes[source]
    return Call(call.op, tuple(args))


CONTRACTIONS = ("linear", "matmul", "mm", "bmm", "mv", "dot", "einsum", "bilinear", "tensordot", "conv2d", "conv1d")


@pytest.mark.parametrize("op", CONTRACTIONS)
@settings(FEW, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_flops_of_the_parts_add_up(op: str, seed: int) -> None:
    spec, rng = find_spec(op), Random(seed)
    assert spec is not None
    call = random_call(spec, rng, op)
    space = space_of(spec, call)
    windows = {"y", "x", "w"}  # there the halo is computed on by nobody, but the parts need padding to be calls
    for rule in sharding_rules(spec, call):
        if rule.index is None or (op.startswith("conv") and rule.index in windows):
            continue
        pieces = pairwise(random_cuts(space.sizes[rule.index], 3, rng))
        parts = [flops(spec, local_call(spec, call, rule.index, piece)) for piece in pieces]
        assert sum(parts) == flops(spec, call)
