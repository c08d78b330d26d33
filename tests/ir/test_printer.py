"""The text form, written: what stands where, readable by eye."""

from __future__ import annotations

import torch

from conjoin.ir import Graph, GraphBuilder, LeafKind, Source, Value, make_leaf, make_node, parse_graph
from conjoin.ir.printer import is_default
from conjoin.ops import TensorType, signature
from tests.ir.graphs import GOLDEN

F32 = TensorType((2,), torch.float32)


def test_golden_text() -> None:
    assert str(parse_graph(GOLDEN)) == GOLDEN


def test_golden_text_of_a_graph_built_in_python() -> None:
    builder = GraphBuilder()
    x = builder.add_leaf(make_leaf(LeafKind.INPUT, "a b.é", F32))
    w = builder.add_leaf(make_leaf(LeafKind.PARAMETER, "w_1.0", F32, trainable=True, aliases=("tied", "a b")))
    total = builder.add_call("add.Tensor", (x, w, 1), (F32,), Source("/home/me/a b.py", 3))
    cast = builder.add_call("_to_copy", (Value(total), torch.bfloat16, *[None] * 5), (F32,), pinned=True)
    graph = builder.finish('say "hi"', training=False, inputs=(x,), outputs=(Value(cast), float("-inf")))
    assert str(graph) == (
        'graph "say \\"hi\\"" eval\n'
        'input:"a b.\\u00e9" f32[2]\n'
        'param:w_1.0 f32[2] trainable also "tied" also "a b"\n'
        'takes [input:"a b.\\u00e9"] in null\n'
        '%0: f32[2] = add.Tensor(input:"a b.\\u00e9", param:w_1.0)  @ "/home/me/a b.py":3\n'
        "%1: f32[2] = _to_copy(%0, dtype=bf16, non_blocking=none) pinned\n"
        "returns [%1, -inf] in null\n"
    )


def test_arguments_after_one_left_out_are_named() -> None:
    x = Value(make_leaf(LeafKind.INPUT, "x", F32))
    node = make_node("batch_norm", (x, None, x, None, None, True, 0.1, 1e-5, False), (F32,))
    graph = Graph("g", True, (x.owner,), (node,), (x,), (Value(node),))  # type: ignore[arg-type]
    line = str(graph).splitlines()[3]
    arguments = "input:x, bias=input:x, training=true, momentum=0.1, eps=1e-05, cudnn_enabled=false"
    assert line == f"%0: f32[2] = batch_norm({arguments})"


def test_only_the_default_itself_is_left_out() -> None:
    stride, alpha = (signature(op).parameters[i] for op, i in (("conv2d", 3), ("add.Tensor", 2)))
    assert is_default(alpha, 1) and not is_default(alpha, 1.0) and not is_default(alpha, True)
    assert is_default(stride, (1, 1)) is (stride.default == (1, 1))
    assert not is_default(stride, (1.0, 1.0)) and not is_default(stride, (True, True))
