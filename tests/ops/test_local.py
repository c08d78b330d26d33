"""Local forms: which part of every operand a piece needs, and what is emitted for it."""

from __future__ import annotations

from typing import Any

import torch

from conjoin.ops import (
    Call,
    OpSpec,
    Span,
    TensorType,
    bind_args,
    find_spec,
    operand_spans,
    output_spans,
    run_local,
)


def f(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


def call_of(op: str, *args: Any, **kwargs: Any) -> tuple[OpSpec, Call]:
    spec = find_spec(op)
    assert spec is not None
    return spec, Call(op, bind_args(op, args, kwargs))


def emitted(op: str, *args: Any, pieces: dict[str, tuple[int, int]]) -> list[str]:
    """The calls of a local form as text; operands are named x0, x1 …, results by their line."""
    spec, call = call_of(op, *args)
    lines: list[str] = []

    def emit(name: str, *given: Any) -> str:
        shown = [str(arg).replace(" ", "") for arg in given]
        lines.append(f"{name}({', '.join(shown)})")
        return f"%{len(lines) - 1}"

    run_local(spec, call, pieces, [f"x{k}" for k in range(len(call.tensors))], emit)
    return lines


def test_a_piece_of_a_convolution_needs_a_halo() -> None:
    spec, call = call_of("conv2d", f(2, 4, 8, 8), f(6, 4, 3, 3), None, (1, 1), (1, 1))
    assert operand_spans(spec, call, {"y": (0, 4)})[0] == (Span(2, 0, 5, pad_before=1),)
    assert operand_spans(spec, call, {"y": (4, 8)})[0] == (Span(2, 3, 8, pad_after=1),)
    assert operand_spans(spec, call, {"y": (2, 6)})[0] == (Span(2, 1, 7),)
    assert output_spans(spec, call, {"y": (4, 8)}) == ((Span(2, 4, 8),),)


def test_a_strided_window_needs_no_more_than_it_reads() -> None:
    spec, call = call_of("max_pool2d", f(1, 1, 8, 8), (2, 2))
    assert operand_spans(spec, call, {"y": (2, 4)})[0] == (Span(2, 4, 8),)


def test_a_factor_of_a_dim_spans_whole_units() -> None:
    spec, call = call_of("view", f(2, 12), (2, 3, 4))
    assert operand_spans(spec, call, {"a1": (1, 3)}) == ((Span(1, 4, 12),),)
    assert output_spans(spec, call, {"a1": (1, 3)}) == ((Span(1, 1, 3),),)


def test_a_plain_piece_is_the_operator_itself() -> None:
    assert emitted("mm", f(4, 6), f(6, 8), pieces={"m": (0, 2)}) == ["mm(x0, x1)"]


def test_padding_becomes_explicit_where_a_window_is_split() -> None:
    assert emitted("conv1d", f(2, 4, 8), f(6, 4, 3), None, (1,), (1,), pieces={"y": (0, 4)}) == [
        "constant_pad_nd(x0, (1,0,0,0,0,0), 0.0)",
        "conv1d(%0, x1, None, (1,), (0,), (1,), 1)",
    ]


def test_groups_and_sizes_follow_the_piece() -> None:
    assert emitted("conv1d", f(2, 4, 8), f(6, 2, 3), None, (1,), (1,), (1,), 2, pieces={"g": (1, 2)}) == [
        "conv1d(x0, x1, None, (1,), (1,), (1,), 1)"
    ]
    assert emitted("view", f(2, 12), (2, 3, 4), pieces={"a1": (0, 1)}) == ["view(x0, (2,1,4))"]


def test_rows_of_a_table_mask_what_others_hold() -> None:
    ids = TensorType((3,), torch.int64)
    assert emitted("embedding", f(10, 8), ids, 7, pieces={"v": (5, 10)}) == [
        "sub.Tensor(x1, 5)",
        "ge.Scalar(%0, 0)",
        "lt.Scalar(%0, 5)",
        "logical_and(%1, %2)",
        "clamp(%0, 0, 4)",
        "embedding(x0, %4, 2, False, False)",
        "reshape(%3, (3,1))",
        "logical_not(%6)",
        "masked_fill.Scalar(%5, %7, 0)",
    ]
    assert "embedding(x0, %4, -1, False, False)" in emitted("embedding", f(10, 8), ids, 7, pieces={"v": (0, 5)})


def test_a_mean_counts_for_what_its_piece_is_of_the_whole() -> None:
    assert emitted("mean", f(8), pieces={"d0": (0, 2)}) == ["mean(x0, None)", "mul.Tensor(%0, 0.25)"]


def test_later_queries_see_more_of_a_causal_mask() -> None:
    q = f(1, 2, 8, 4)
    op = "scaled_dot_product_attention"
    assert emitted(op, q, q, q, None, 0.0, True, pieces={"l": (2, 4)}) == [
        "slice.Tensor(x1, 2, 0, 4, 1)",
        "slice.Tensor(x2, 2, 0, 4, 1)",
        "conjoin::attention_from_row(x0, %0, %1, 2, None, False)",
    ]
    drops = emitted(op, q, q, q, None, 0.5, True, pieces={"l": (4, 8)})
    assert drops[:2] == ["new_ones(x0, (4,8), torch.bool)", "tril(%0, 4)"], "what is drawn is drawn for all keys"


def test_a_copied_dim_is_repeated_only_here() -> None:
    assert emitted("tile", f(2, 3), (4,), pieces={"r1": (1, 3)}) == ["tile(x0, (1,2))"]
