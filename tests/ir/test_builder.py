"""Building graphs: which equal calls become one node, and which must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conjoin.errors import GraphError
from conjoin.ir import GraphBuilder, LeafKind, Source, Value, is_random, make_leaf, make_node
from conjoin.ops import TensorType
from tests.ir.wording import assert_three_sentences

F32, I64, C64 = (TensorType((4,), dtype) for dtype in (torch.float32, torch.int64, torch.complex64))
B1 = TensorType((4,), torch.bool)


@pytest.fixture
def builder() -> GraphBuilder:
    return GraphBuilder()


def read(builder: GraphBuilder, type: TensorType) -> Value:
    return builder.add_leaf(make_leaf(LeafKind.INPUT, "x", type))


@pytest.mark.parametrize(
    ("op", "literals", "reads", "makes", "shared"),
    [
        ("add.Scalar", (1, 1), I64, I64, True),
        ("logical_not", (), B1, B1, True),
        ("add.Scalar", (1, 1), F32, F32, False),
        ("mul.Scalar", (2,), C64, C64, False),
        ("gt.Scalar", (0,), F32, B1, True),
        ("_to_copy", (torch.float32, None, None, None, None, None), I64, F32, True),
        ("bernoulli", (None,), F32, F32, False),
        ("rand_like", (None,) * 5, I64, F32, False),
        ("randint_like", (3, None, None, None, None, None), I64, I64, False),
        ("dropout", (0.5, True), F32, F32, False),
    ],
)
def test_calls_are_shared_where_nothing_can_tell(
    builder: GraphBuilder, op: str, literals: tuple[Any, ...], reads: TensorType, makes: TensorType, shared: bool
) -> None:
    x = read(builder, reads)
    nodes = [builder.add_call(op, (x, *literals), (makes,)) for _ in range(3)]
    assert [node.occurrence for node in nodes] == ([0, 0, 0] if shared else [0, 1, 2])
    assert len(set(nodes)) == (1 if shared else 3)


def test_calls_from_nothing_are_shared_unless_random(builder: GraphBuilder) -> None:
    zeros = [builder.add_call("zeros", ((4,), None, None, None, None), (F32,)) for _ in range(2)]
    draws = [builder.add_call("rand", ((4,), None, None, None, None), (F32,)) for _ in range(2)]
    assert zeros[0] is zeros[1] and draws[0] is not draws[1]


def test_a_rate_of_zero_draws_nothing() -> None:
    x = Value(make_leaf(LeafKind.INPUT, "x", F32))
    attention = (x, x, x, None)
    assert is_random("scaled_dot_product_attention", (*attention, 0.1, False, None, False))
    assert not is_random("scaled_dot_product_attention", (*attention, 0.0, False, None, False))
    assert not is_random("relu", (x,))


def test_pinned_calls_are_another_node(builder: GraphBuilder) -> None:
    x = read(builder, I64)
    assert builder.add_call("neg", (x,), (I64,)) is not builder.add_call("neg", (x,), (I64,), pinned=True)


def test_a_leaf_is_named_once(builder: GraphBuilder) -> None:
    read(builder, F32)
    for again in (F32, I64):
        with pytest.raises(GraphError, match="input:x twice") as told:
            read(builder, again)
        assert_three_sentences(told.value)
    assert builder.add_leaf(make_leaf(LeafKind.BUFFER, "x", F32)).type == F32


def test_leaves_are_found_by_kind_and_name(builder: GraphBuilder) -> None:
    x = read(builder, F32)
    assert builder.leaf("input:x") is x.owner and builder.leaf("param:x") is None


def test_nodes_keep_their_order_and_first_source(builder: GraphBuilder) -> None:
    x = read(builder, I64)
    first = builder.add_call("neg", (x,), (I64,), Source("a.py", 1))
    second = builder.add_call("abs", (x,), (I64,))
    assert builder.add_call("neg", (x,), (I64,), Source("b.py", 2)) is first
    assert builder.holds(first) and not builder.holds(make_node("sgn", (x,), (I64,)))
    graph = builder.finish("g", training=True, inputs=(x,), outputs=(Value(second),))
    assert graph.nodes == (first, second) and graph.sources == (Source("a.py", 1), None)


def test_a_graph_without_sources_has_none(builder: GraphBuilder) -> None:
    x = read(builder, I64)
    builder.add_call("neg", (x,), (I64,))
    assert builder.finish("g", training=True, inputs=(x,), outputs=(x,)).sources == ()
