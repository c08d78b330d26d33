"""What one device runs: types alone give the calls that tensors would."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from conjoin.cost import local_calls, write_key
from conjoin.ops import Call, TensorType, all_ops, find_spec, indices_by_place, random_call, sharding_rules, space_of


def f32(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


CONV = Call("conv2d", (f32(2, 3, 8, 8), f32(4, 3, 3, 3), None, (1, 1), (1, 1), (1, 1), 1))


@pytest.mark.parametrize(
    ("call", "pieces", "expected"),
    [
        (Call("linear", (f32(8, 4), f32(6, 4), f32(6))), (("n", (0, 2)),), ["linear f32[8,4] f32[2,4] f32[2]"]),
        (CONV, (("n", (0, 1)),), ["conv2d f32[1,3,8,8] f32[4,3,3,3] none [1, 1] [1, 1] [1, 1] 1"]),
    ],
    ids=["linear", "batch of a convolution"],
)
def test_the_calls_of_a_piece(call: Call, pieces: tuple[Any, ...], expected: list[str]) -> None:
    assert [write_key(local.call, ()) for local in local_calls(call, pieces)] == expected


def test_a_split_window_pads_what_lies_outside_itself() -> None:
    spec = find_spec("conv2d")
    assert spec is not None
    rows = next(name for name, size in space_of(spec, CONV).sizes.items() if size == 8)
    pad, conv = (local.call for local in local_calls(CONV, ((rows, (0, 4)),)))
    assert (pad.op, conv.op) == ("constant_pad_nd", "conv2d")
    assert conv["padding"] == (0, 0) and conv.tensors[0].shape == (2, 3, 6, 10)


def test_a_causal_mask_that_starts_later_is_made_where_something_is_dropped() -> None:
    q = f32(1, 2, 8, 4)
    calls = [Call("scaled_dot_product_attention", (q, q, q, None, rate, True, None, False)) for rate in (0.0, 0.5)]
    made = [[local.call.op for local in local_calls(call, (("l", (4, 8)),))] for call in calls]
    assert made == [["conjoin::attention_from_row"], ["new_ones", "tril", "scaled_dot_product_attention"]]


def test_an_opaque_call_has_no_pieces() -> None:
    with pytest.raises(AssertionError, match="opaque"):
        local_calls(Call("nonzero", (f32(4),)), (("n", (0, 2)),))


def test_only_what_leads_to_an_operand_in_need_gets_a_gradient() -> None:
    table, addresses = f32(10, 4), TensorType((6,), torch.int64)
    call = Call("embedding", (table, addresses, -1, False, False))
    spec = find_spec("embedding")
    assert spec is not None
    (rows,) = [name for name, size in space_of(spec, call).sizes.items() if size == 10]
    found = local_calls(call, ((rows, (5, 10)),), (0,))
    passed = {local.call.op: local.needs for local in found if local.needs}
    assert passed == {"embedding": (0,), "masked_fill.Scalar": (0,)}


def test_of_other_indices_the_length_of_a_piece_says_it_all() -> None:
    """For all declarations: a piece that lies elsewhere is computed by the same calls."""
    compared = set()
    for spec in all_ops():
        for seed in range(4):
            call = random_call(spec, Random(seed))
            sizes, by_place = space_of(spec, call).sizes, indices_by_place(spec, call)
            for index in {rule.index for rule in sharding_rules(spec, call)} - by_place - {None}:
                assert index is not None
                for size in {1, sizes[index] // 2, sizes[index] - 1} - {0}:
                    found = {local_calls(call, ((index, (start, start + size)),)) for start in (0, sizes[index] - size)}
                    assert len(found) == 1, f"{call} by pieces of {index}"
                    compared.add(spec.name)
    assert {"linear", "scaled_dot_product_attention", "slice.Tensor", "squeeze.dim", "view"} <= compared


def test_where_a_piece_of_causal_queries_lies_tells_its_calls_apart() -> None:
    q = f32(1, 2, 8, 4)
    call = Call("scaled_dot_product_attention", (q, q, q, None, 0.0, True, None, False))
    spec = find_spec(call.op)
    assert spec is not None and {"l", "s"} <= indices_by_place(spec, call)
    assert local_calls(call, (("l", (0, 4)),)) != local_calls(call, (("l", (4, 8)),))
