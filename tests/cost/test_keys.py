"""Keys: the exact text, the same in every process, bounded, and read back to the call they name."""

from __future__ import annotations

from random import Random

import pytest
import torch

from conjoin.cost import read_key, write_key
from conjoin.cost.keys import MAX_KEY_LENGTH
from conjoin.ops import Call, OpSpec, TensorType, all_ops, random_call
from tests.cases import each_of


def f32(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


EXACT = {
    "conv2d f32[2,3,8,8] f32[4,3,3,3] none [1, 1] [0, 0] [1, 1] 1 | channels last | grads 1": (
        Call("conv2d", (f32(2, 3, 8, 8), f32(4, 3, 3, 3), None, (1, 1), (0, 0), (1, 1), 1), turned=True),
        (1,),
    ),
    "linear f32[64,1024] f32[4096,1024] f32[4096] | grads 0,1,2": (
        Call("linear", (f32(64, 1024), f32(4096, 1024), f32(4096))),
        (0, 1, 2),
    ),
    "linear f32[64,1024] f32[4096,1024]": (Call("linear", (f32(64, 1024), f32(4096, 1024), None)), ()),
    "sum f32[]": (Call("sum", (f32(), None)), ()),
    "sum f32[] f64": (Call("sum", (f32(), torch.float64)), ()),
    "cat [f32[2,3], f32[4,3]] 0 | grads 1": (Call("cat", ((f32(2, 3), f32(4, 3)), 0)), (1,)),
    "mul.Tensor f32[8] 0.125 | grads 0": (Call("mul.Tensor", (f32(8), 0.125)), (0,)),
    "add.Tensor f32[8] true 1": (Call("add.Tensor", (f32(8), True, 1)), ()),
    'einsum "ij,jk" [f32[2,3], f32[3,4]]': (Call("einsum", ("ij,jk", (f32(2, 3), f32(3, 4)), None)), ()),
    "clone f32[2,3,4,5] channels_last": (Call("clone", (f32(2, 3, 4, 5), torch.channels_last)), ()),
    "index.Tensor f32[4,5] [none, i64[3]]": (
        Call("index.Tensor", (f32(4, 5), (None, TensorType((3,), torch.int64)))),
        (),
    ),
}


@pytest.mark.parametrize("text", EXACT)
def test_the_text_of_a_key_and_back(text: str) -> None:
    call, needs = EXACT[text]
    assert write_key(call, needs) == text
    assert read_key(text) == (call, needs)


def test_numbers_of_different_type_have_different_keys() -> None:
    keys = {write_key(Call("add.Tensor", (f32(8), number, 1)), ()) for number in (1, 1.0, True)}
    assert len(keys) == 3


def test_a_long_key_is_cut_to_a_digest_that_still_tells_calls_apart() -> None:
    many = tuple(f32(1000 + i, 64) for i in range(200))
    keys = [write_key(Call("cat", (many, 0)), needs) for needs in ((), (0,), (1,))]
    assert len(set(keys)) == 3
    for key in keys:
        assert len(key) <= MAX_KEY_LENGTH and key.startswith("cat #") and read_key(key) is None


@each_of(all_ops(), lambda spec: spec.name, at_once=64)
def test_the_key_of_every_operator_is_read_back(spec: OpSpec) -> None:
    for seed, name in enumerate(spec.names):
        call = random_call(spec, Random(seed), name)
        key = write_key(call, (0,) if call.tensors else ())
        read = read_key(key)
        assert read is not None and write_key(*read) == key
        assert read[0].op == name and read[0].tensors == call.tensors


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no_such_operator f32[2]",
        "linear f32[2,3",
        "linear f99[2]",
        "linear f32[2] | grads x",
        "relu f32[2] f32[2] f32[2]",
        "cat [f32[2]",
        "cat ]",
        "__import__('os') f32[2]",
        "relu f32[64,1024] | grads 7,9",
        "relu f32[64,1024] | grads -1",
        "add.Tensor f32[2] f32[2] 1 | grads 1,0",
        "add.Tensor f32[2] f32[2] 1 | grads 0,0",
        "max_pool2d [2, 2] [2, 2] [0, 0] [1, 1] false",
        'relu "x"',
        "cat f32[2] 0",
        "cat [f32[2], 3] 0",
        "sum.dim_IntList f32[2] [f32[2]]",
        "relu f32[9999999999,9999999999]",
        "expand f32[1] [99999999999999999999]",
        "new_ones bf16[1,64] [1024, [] 8192]",
        "max_pool2d f32[8,256,56,56] [2, 1e400] [2, 2] [0, 0] [1, 1] false",
    ],
)
def test_damaged_text_names_nothing(text: str) -> None:
    assert read_key(text) is None


def test_a_layout_has_no_key() -> None:
    from conjoin.ops import Split, make_layout

    split = TensorType((4, 4), torch.float32, make_layout([("d0", Split(0))]))
    with pytest.raises(AssertionError, match="no layout"):
        write_key(Call("relu", (split,)), ())
