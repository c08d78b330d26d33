"""Random operators: shards draw independently, copies alike, and every draw keeps the law."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from conjoin.ops import (
    Call,
    OpSpec,
    Split,
    TensorType,
    all_ops,
    bind_args,
    execute,
    find_spec,
    operand_spans,
    random_call,
    random_tensors,
    run_local,
    run_whole,
    sharding_rules,
    signature,
    space_of,
)

SIZE = 40_000


def f(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


def call_of(op: str, *args: Any) -> tuple[OpSpec, Call]:
    spec = find_spec(op)
    assert spec is not None
    return spec, Call(op, bind_args(op, args, {}))


def shards(spec: OpSpec, call: Call, index: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Both halves of a call split at an index, drawn one after the other."""
    size = space_of(spec, call).sizes[index]
    results = []
    for piece in ((0, size // 2), (size // 2, size)):
        parts = []
        for tensor, spans in zip(tensors, operand_spans(spec, call, {index: piece}), strict=True):
            for span in spans:
                tensor = tensor.narrow(span.dim, span.start, span.stop - span.start)
            parts.append(tensor)
        results.append(run_local(spec, call, {index: piece}, parts, execute)[0])
    return results


DROPS = [
    ("dropout", (0.3, True), "d0"),
    ("native_dropout", (0.3, True), "d0"),
    ("feature_dropout", (0.3, True), "n"),
]


@pytest.mark.parametrize(("op", "args", "index"), DROPS, ids=[op for op, _, _ in DROPS])
def test_shards_of_dropout_draw_independently_and_keep_the_law(op: str, args: tuple[Any, ...], index: str) -> None:
    spec, call = call_of(op, f(SIZE, 2), *args)
    torch.manual_seed(0)
    first, second = shards(spec, call, index, [torch.ones(SIZE, 2)])
    assert not torch.equal(first, second)
    for shard in (first, second):
        kept = shard != 0
        assert abs(kept.float().mean().item() - 0.7) < 0.02
        assert torch.allclose(shard[kept], torch.tensor(1 / 0.7))


def test_a_channel_is_dropped_as_a_whole() -> None:
    spec, call = call_of("feature_dropout", f(8, 16, 5), 0.5, True)
    indices = {rule.index for rule in sharding_rules(spec, call)} - {None}
    assert indices == {"n", "c"}, "the elements of a channel share one draw"
    for shard in shards(spec, call, "c", [torch.ones(8, 16, 5)]):
        assert ((shard == 0).all(-1) | (shard != 0).all(-1)).all()


LAWS = [
    (("rand", (SIZE,)), 0.5, 1 / 12),
    (("randn", (SIZE,)), 0.0, 1.0),
    (("randint.low", 0, 10, (SIZE,)), 4.5, 8.25),
    (("bernoulli.p", f(SIZE), 0.3), 0.3, 0.21),
    (("exponential", f(SIZE), 2.0), 0.5, 0.25),
    (("uniform", f(SIZE), -1.0, 1.0), 0.0, 1 / 3),
    (("normal_functional", f(SIZE), 1.0, 0.5), 1.0, 0.25),
]


@pytest.mark.parametrize(("args", "mean", "variance"), LAWS, ids=[str(args[0]) for args, _, _ in LAWS])
def test_shards_of_a_draw_keep_mean_and_variance(args: tuple[Any, ...], mean: float, variance: float) -> None:
    spec, call = call_of(*args)
    torch.manual_seed(1)
    tensors = [torch.zeros(t.shape) for t in call.tensors]
    first, second = shards(spec, call, "d0", tensors)
    assert not torch.equal(first, second)
    for shard in (first, second):
        assert abs(shard.double().mean().item() - mean) < 0.05
        assert abs(shard.double().var().item() - variance) < 0.05 * max(1.0, variance)


RANDOM = [name for spec in all_ops() if spec.random for name in spec.names]
UNDEFINED = {"empty.memory_format", "new_empty", "empty_like"}
"""Their values are whatever was in memory, no draw."""


@pytest.mark.parametrize("op", [op for op in RANDOM if op not in UNDEFINED])
def test_the_same_seed_gives_the_same_draw(op: str) -> None:
    spec = find_spec(op)
    assert spec is not None and signature(op).random
    call = random_call(spec, Random(3), op)
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append(run_whole(call, random_tensors(spec, call, 0)))
    for one, other in zip(*draws, strict=True):
        assert torch.equal(one, other)


def test_whatever_torch_calls_random_is_declared_so() -> None:
    """All but those whose attributes switch their randomness off, which keep their rules either way."""
    undeclared = {name for spec in all_ops() for name in spec.names if signature(name).random and not spec.random}
    layers = {"lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"}
    assert undeclared == {"scaled_dot_product_attention", *layers}


@pytest.mark.parametrize("op", RANDOM)
def test_a_random_operator_is_split_only_where_elements_are_drawn_alone(op: str) -> None:
    """Every split index is one of the output: nothing drawn is summed, and no two devices draw the same element."""
    spec = find_spec(op)
    assert spec is not None
    for seed in range(5):
        for rule in sharding_rules(spec, random_call(spec, Random(seed), op)):
            if rule.index is not None:
                assert all(isinstance(placement, Split) for placement in rule.outputs)
            assert "P" not in str(rule)
