"""Sharding rules: which indices may be split, and the rules as text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conjoin.ops import Call, TensorType, bind_args, find_spec, replicated_rules, sharding_rules, space_of, splittable


def f(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


def i(*shape: int) -> TensorType:
    return TensorType(shape, torch.int64)


def b(*shape: int) -> TensorType:
    return TensorType(shape, torch.bool)


def call_of(op: str, *args: Any, **kwargs: Any) -> Call:
    return Call(op, bind_args(op, args, kwargs))


def rules_of(call: Call) -> tuple[str, ...]:
    spec = find_spec(call.op)
    assert spec is not None
    return tuple(f"{rule.index or '-'}: {rule}" for rule in sharding_rules(spec, call))


def split_indices(call: Call) -> str:
    """The indices that have a rule, in order."""
    spec = find_spec(call.op)
    assert spec is not None
    found = [rule.index for rule in sharding_rules(spec, call) if rule.index is not None]
    assert set(found) <= set(splittable(space_of(spec, call)))
    return " ".join(found)


SPLIT = [
    (call_of("linear", f(4, 6), f(8, 6), f(8)), "d0 k n"),
    (call_of("linear", f(2, 4, 6), f(8, 6)), "d0 d1 k n"),
    (call_of("bmm", f(2, 3, 4), f(2, 4, 5)), "b m k n"),
    (call_of("einsum", "bsd,btd->bst", (f(2, 3, 4), f(2, 5, 4))), "b s d t"),
    (call_of("conv2d", f(2, 4, 8, 8), f(6, 4, 3, 3), None, (1, 1), (1, 1)), "n c y x o"),
    (call_of("conv2d", f(2, 4, 8, 8), f(6, 2, 3, 3), None, (1, 1), (1, 1), (1, 1), 2), "n g y x"),
    (call_of("conv2d", f(2, 4, 8, 8), f(4, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 4), "n g y x"),
    (call_of("conv_transpose2d.input", f(2, 4, 8, 8), f(4, 6, 3, 3)), "n c y x o"),
    (call_of("max_pool2d", f(2, 4, 8, 8), (2, 2)), "d0 d1 y x"),
    (call_of("avg_pool2d", f(2, 4, 8, 8), (3, 3), (1, 1), (1, 1), False, False), "d0 d1"),
    (call_of("adaptive_avg_pool2d", f(2, 4, 8, 8), (1, 1)), "d0 d1 r q"),
    (call_of("adaptive_avg_pool2d", f(2, 4, 8, 8), (2, 2)), "d0 d1"),
    (call_of("layer_norm", f(2, 3, 8), (8,), f(8), f(8)), "d0 d1"),
    (call_of("rms_norm", f(2, 3, 8), (8,), f(8)), "d0 d1"),
    (call_of("group_norm", f(2, 6, 4), 3, f(6), f(6)), "n g"),
    (call_of("_native_batch_norm_legit_functional", f(4, 3, 5, 5), f(3), f(3), f(3), f(3), True, 0.1, 1e-5), "c"),
    (call_of("_native_batch_norm_legit_no_training", f(4, 3, 5, 5), f(3), f(3), f(3), f(3), 0.1, 1e-5), "n c s0 s1"),
    (call_of("scaled_dot_product_attention", f(2, 4, 5, 8), f(2, 4, 6, 8), f(2, 4, 6, 7)), "b0 h l f"),
    (call_of("scaled_dot_product_attention", f(2, 8, 5, 8), f(2, 4, 6, 8), f(2, 4, 6, 7), enable_gqa=True), "b0 h l f"),
    (call_of("scaled_dot_product_attention", f(2, 4, 5, 8), f(2, 1, 6, 8), f(2, 1, 6, 7)), "b0 h l f"),
    (call_of("scaled_dot_product_attention", f(2, 4, 5, 8), f(2, 4, 6, 8), f(2, 4, 6, 7), None, 0.1), "b0 h l"),
    (call_of("embedding", f(10, 8), i(2, 3)), "v d d0 d1"),
    (call_of("embedding", f(10, 8), i(2, 3), -1, True), "d"),
    (call_of("conjoin::embedding_bag", f(10, 8), i(2, 3), None, "sum", None), "v d b l"),
    (call_of("conjoin::embedding_bag", f(10, 8), i(2, 3), None, "mean", None), "d b"),
    (call_of("index_select", f(4, 5, 6), 1, i(3)), "d0 k d2 j"),
    (call_of("gather", f(4, 5), 1, i(4, 3)), "d0 k j"),
    (call_of("index_add", f(4, 5), 0, i(7), f(7, 5)), "d1 j"),
    (call_of("scatter_add", f(4, 5), 0, i(7, 5), f(7, 5)), "d1 j"),
    (call_of("index_put", f(4, 5), (b(4, 5),), f()), "d0 d1"),
    (call_of("index.Tensor", f(4, 5, 6), (None, i(2, 3))), "d0 d2 j0 j1"),
    (call_of("softmax.int", f(2, 3, 4), -1), "d0 d1"),
    (call_of("softmax.int", f(2, 3, 4), 1), "d0 d2"),
    (call_of("sum.dim_IntList", f(2, 3, 4), (1,)), "d0 d1 d2"),
    (call_of("mean", f(2, 3)), "d0 d1"),
    (call_of("amax", f(2, 3, 4), (1,)), "d0 d2"),
    (call_of("cumsum", f(2, 3), 1), "d0"),
    (call_of("topk", f(2, 8), 3), "d0"),
    (call_of("add.Tensor", f(2, 3, 4), f(4)), "d0 d1 d2"),
    (call_of("type_as", f(2, 3), i(5)), "d0 d1"),
    (call_of("prelu", f(2, 3, 4), f(1)), "d0 d1 d2"),
    (call_of("view", f(2, 3, 8), (2, 3, 4, 2)), "a0 a1 a2"),
    (call_of("view", f(2, 3, 4, 2), (6, 8)), "a0 a2"),
    (call_of("view", f(6, 4), (4, 6)), "a0"),
    (call_of("transpose.int", f(2, 3, 4), 1, 2), "d0 d1 d2"),
    (call_of("expand", f(1, 3), (5, 4, 3)), "d2 d0 d1"),
    (call_of("repeat", f(2, 3), (4, 1, 2)), "d1 r0 r2"),
    (call_of("cat", (f(2, 3), f(2, 5)), 1), "d0"),
    (call_of("split.Tensor", f(2, 6), 2, 1), "d0"),
    (call_of("slice.Tensor", f(4, 6), 1, 0, 3), "d0"),
    (call_of("slice.Tensor", f(4, 6), 1, 0, 2**63 - 1), "d0 d1"),
    (call_of("flip", f(2, 3, 4), (1,)), "d0 d2"),
    (call_of("tril", f(2, 5, 5)), "d0 m n"),
    (call_of("constant_pad_nd", f(2, 3, 4), (1, 1)), "d0 d1"),
    (call_of("pixel_shuffle", f(2, 8, 3, 3), 2), "d0 c y x"),
    (call_of("grid_sampler_2d", f(2, 3, 4, 4), f(2, 5, 6, 2), 0, 0, False), "n c t0 t1"),
    (call_of("cross_entropy_loss", f(8, 10), i(8)), ""),
    (call_of("cross_entropy_loss", f(8, 10), i(8), None, 2), "n"),
    (call_of("cross_entropy_loss", f(8, 10), i(8), None, 0), "n"),
    (call_of("mse_loss", f(4, 5), f(4, 5)), "d0 d1"),
    (call_of("lstm_cell", f(4, 3), (f(4, 5), f(4, 5)), f(20, 3), f(20, 5)), "b"),
    (call_of("zeros", (3, 4)), "d0 d1"),
    (call_of("arange", 8), "k"),
    (call_of("dropout", f(2, 3), 0.1, True), "d0 d1"),
    (call_of("feature_dropout", f(2, 3, 4), 0.1, True), "n c"),
    (call_of("cdist", f(4, 3), f(5, 3)), "m n"),
]


@pytest.mark.parametrize(("call", "indices"), SPLIT, ids=[f"{call.op}-{n}" for n, (call, _) in enumerate(SPLIT)])
def test_what_may_be_split(call: Call, indices: str) -> None:
    assert split_indices(call) == indices


GOLDEN = [
    (
        call_of("linear", f(4, 6), f(8, 6), f(8)),
        """
        -: I, I, I -> I
        -: B, B, B -> B
        d0: S(0), B, B -> S(0)
        k: S(1), S(1), P -> P
        n: B, S(0), S(0) -> S(1)
        -: P, B, P -> P
        -: B, P, P -> P
        """,
    ),
    (
        call_of("conv2d", f(2, 4, 8, 8), f(6, 4, 3, 3), f(6), (1, 1), (1, 1)),
        """
        -: I, I, I -> I
        -: B, B, B -> B
        n: S(0), B, B -> S(0)
        c: S(1), S(1), P -> P
        y: S(2), B, B -> S(2)
        x: S(3), B, B -> S(3)
        o: B, S(0), S(0) -> S(1)
        -: P, B, P -> P
        -: B, P, P -> P
        """,
    ),
    (
        call_of("conv2d", f(2, 4, 8, 8), f(6, 2, 3, 3), None, (1, 1), (0, 0), (1, 1), 2),
        """
        -: I, I -> I
        -: B, B -> B
        n: S(0), B -> S(0)
        g: S(1), S(0) -> S(1)
        y: S(2), B -> S(2)
        x: S(3), B -> S(3)
        -: P, B -> P
        -: B, P -> P
        """,
    ),
    (
        call_of("embedding", f(10, 8), i(3)),
        """
        -: I, I -> I
        -: B, B -> B
        v: S(0), B -> P
        d: S(1), B -> S(1)
        d0: B, S(0) -> S(0)
        -: P, B -> P
        """,
    ),
    (
        call_of("index_add", f(4, 5), 0, i(7), f(7, 5)),
        """
        -: I, I, I -> I
        -: B, B, B -> B
        d1: S(1), B, S(1) -> S(1)
        j: P, S(0), S(0) -> P
        -: P, B, P -> P
        """,
    ),
    (
        call_of("layer_norm", f(4, 8), (8,), f(8), f(8)),
        """
        -: I, I, I -> I
        -: B, B, B -> B
        d0: S(0), B, B -> S(0)
        -: B, P, P -> P
        """,
    ),
    (
        call_of("add.Tensor", f(4, 8), f(8)),
        """
        -: I, I -> I
        -: B, B -> B
        d0: S(0), B -> S(0)
        d1: S(1), S(0) -> S(1)
        -: P, P -> P
        """,
    ),
    (
        call_of("cat", (f(2, 3), f(2, 5)), 1),
        """
        -: I, I -> I
        -: B, B -> B
        d0: S(0), S(0) -> S(0)
        -: P, P -> P
        """,
    ),
    (
        call_of("add.Tensor", f(4), 1),
        """
        -: I -> I
        -: B -> B
        d0: S(0) -> S(0)
        """,
    ),
    (
        call_of("max.dim", f(4, 8), 1),
        """
        -: I -> I, I
        -: B -> B, B
        d0: S(0) -> S(0), S(0)
        """,
    ),
]


@pytest.mark.parametrize(("call", "text"), GOLDEN, ids=[f"{call.op}-{n}" for n, (call, _) in enumerate(GOLDEN)])
def test_rules_as_text(call: Call, text: str) -> None:
    assert rules_of(call) == tuple(line.strip() for line in text.strip().splitlines())


def passes_partial(call: Call) -> bool:
    return any("P" in rule.split(" -> ")[0] for rule in rules_of(call))


LINEAR = [
    (call_of("_to_copy", f(3), dtype=torch.float64), True),
    (call_of("_to_copy", f(3), dtype=torch.bfloat16), False),
    (call_of("_to_copy", f(3), dtype=torch.int64), False),
    (call_of("_to_copy", f(3), dtype=torch.bool), False),
    (call_of("_to_copy", i(3), dtype=torch.float32), True),
    (call_of("_to_copy", b(3), dtype=torch.float32), False),
    (call_of("constant_pad_nd", f(3), (1, 1), 0.0), True),
    (call_of("constant_pad_nd", f(3), (1, 1), 1.0), False),
    (call_of("pad", f(2, 3), (1, 1), "constant", 1.0), False),
    (call_of("masked_fill.Scalar", f(3), b(3), 0), True),
    (call_of("masked_fill.Scalar", f(3), b(3), float("-inf")), False),
    (call_of("layer_norm", f(2, 3), (3,), None, f(3)), False),
    (call_of("scaled_dot_product_attention", f(2, 3, 4), f(2, 3, 4), f(2, 3, 4)), True),
    (call_of("scaled_dot_product_attention", f(2, 3, 4), f(2, 3, 4), f(2, 3, 4), None, 0.5), False),
    (call_of("relu", f(3)), False),
    (call_of("mul.Tensor", f(3), 2), True),
    (call_of("add.Tensor", f(3), 2), False),
]


@pytest.mark.parametrize(("call", "linear"), LINEAR, ids=[f"{call.op}-{n}" for n, (call, _) in enumerate(LINEAR)])
def test_partial_sums_pass_only_what_is_linear(call: Call, linear: bool) -> None:
    assert passes_partial(call) is linear


def test_truth_values_are_never_partial_sums() -> None:
    for call in (call_of("gather", b(4, 5), 1, i(4, 3)), call_of("where.self", b(3), b(3), b(3))):
        assert not any("P" in rule for rule in rules_of(call))


def test_an_opaque_operator_is_the_same_everywhere_or_copies() -> None:
    assert [str(rule) for rule in replicated_rules(2, 1)] == ["I, I -> I", "B, B -> B"]


FINE = (torch.float64, torch.float32)
HALVES = (torch.bfloat16, torch.float16)
COARSE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@pytest.mark.parametrize("op", ["_to_copy", "to.dtype", "sum", "cumsum"])
@pytest.mark.parametrize("dtype", [*FINE, *HALVES, *COARSE, torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_partial_sum_passes_no_cast_that_is_not_linear(op: str, dtype: torch.dtype) -> None:
    """Half of 0.3 is not half of what 0.3 becomes in fewer bits, or as a whole number."""
    given = (0,) if op == "cumsum" else ()
    call = Call(op, bind_args(op, (TensorType((4,), torch.float32), *given), {"dtype": dtype}))
    spec = find_spec(op)
    assert spec is not None
    rules = list(map(str, sharding_rules(spec, call)))
    assert ("P -> P" in rules) == (dtype in FINE), rules
    if op == "sum":
        assert ("S(0) -> P" in rules) == (dtype not in (*COARSE, torch.bool)), rules
