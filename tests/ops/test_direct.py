"""What runs an operator is judged by the dispatcher of torch: the same kernels on the same arguments, in one order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch._ops import OpOverload

from conjoin.ops import (
    all_ops,
    find_function,
    find_operator,
    find_spec,
    map_tensors,
    random_call,
    random_tensors,
    spread_args,
)
from tests.cases import each_of
from tests.kernels import Kernels

OVERLOADS = [name for spec in all_ops() for name in spec.names]


def run(
    function: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]
) -> tuple[list[tuple[str, str]], list[Any]]:
    torch.manual_seed(0)
    with Kernels() as kernels:
        result = function(*positional, **keywords)
    return kernels.asked, list(result) if isinstance(result, tuple | list) else [result]


@each_of([op for op in OVERLOADS if find_function(op) is not find_operator(op)])
def test_the_same_kernels_run(op: str) -> None:
    spec = find_spec(op)
    assert spec is not None
    for seed in range(4):
        call = random_call(spec, Random(seed), op)
        feed = iter(random_tensors(spec, call, seed))
        args = map_tensors(op, call.args, partial(next, feed))
        positional, keywords = spread_args(op, args, "cpu" if not call.tensors else None)
        asked, made = run(find_operator(op), positional, keywords)
        asked_directly, made_directly = run(find_function(op), positional, keywords)
        assert asked_directly == asked, seed
        for mine, theirs in zip(made_directly, made, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
            assert mine.stride() == theirs.stride() and mine.requires_grad == theirs.requires_grad


def test_what_models_are_made_of_is_called_directly() -> None:
    common = ("add.Tensor", "linear", "conv2d", "relu", "reshape", "transpose.int", "cat", "layer_norm", "mean.dim")
    assert not any(isinstance(find_function(op), OpOverload) for op in common)
