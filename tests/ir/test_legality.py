"""The type checker of one node: where a legal one lies, and word for word why another cannot lie so."""

from __future__ import annotations

import pytest
import torch

from conjoin.ir import (
    LayoutError,
    LeafKind,
    Node,
    Value,
    layout_fault,
    make_leaf,
    make_node,
    node_fault,
    parse_type,
    place,
    plain_call,
    rules_for,
)
from conjoin.machine import Axis, Mesh
from conjoin.ops import TensorType

MESH = Mesh((Axis("x", 2), Axis("y", 2), Axis("z", 3)))


def call(op: str, *operands: str, outputs: str, attributes: tuple[object, ...] = ()) -> Node:
    """A node on leaves of these types."""
    leaves = [Value(make_leaf(LeafKind.INPUT, f"i{i}", parse_type(text))) for i, text in enumerate(operands)]
    return make_node(op, (*leaves, *attributes), (parse_type(outputs),))


def linear(x: str, weight: str, bias: str, out: str) -> Node:
    return call("linear", f"f32[8,6]{x}", f"f32[4,6]{weight}", f"f32[4]{bias}", outputs=f"f32[8,4]{out}")


def test_where_a_node_lies() -> None:
    layouts = "{x:S(0),z:S(1),y:B}", "{y:S(0),z:S(1),x:B}", "{y:S(0),x:B,z:P}", "{x:S(0),y:S(1),z:P}"
    placed = place(linear(*layouts), MESH)
    assert sorted(axes for _, axes in placed.splits) == [("x",), ("y",), ("z",)]
    assert dict(placed.splits)["k"] == ("z",) and dict(placed.splits)["n"] == ("y",)
    assert set(placed.axes) == {"x", "y", "z"}
    assert place(linear("", "", "", ""), MESH).splits == ()
    assert place(linear("{x:B}", "{x:B}", "{x:B}", "{x:B}"), MESH).axes == ()


def test_the_pieces_of_a_rank_follow_the_nesting() -> None:
    node = call("relu", "f32[7]{y:S(0),x:S(0)}", outputs="f32[7]{y:S(0),x:S(0)}")
    placed = place(node, MESH)
    ((index, axes),) = placed.splits
    assert axes == ("y", "x")
    found = [placed.pieces({index: 7}, MESH, MESH.rank_at({"x": x, "y": y}))[index] for y in (0, 1) for x in (0, 1)]
    assert found == [(0, 2), (2, 4), (4, 6), (6, 7)]


FAULTS = [
    (
        linear("{x:S(0)}", "", "", "{x:S(0)}"),
        "on axis x S(0), I, I -> S(0) is not legal; the nearest legal way is I, I, I -> I",
    ),
    (
        linear("{x:S(0)}", "{x:B}", "", "{x:S(0)}"),
        "on axis x S(0), B, I -> S(0) is not legal; the nearest legal way is S(0), B, B -> S(0)",
    ),
    (
        linear("{x:S(1)}", "{x:S(1)}", "{x:B}", "{x:P}"),
        "on axis x S(1), S(1), B -> P is not legal; the nearest legal way is S(1), S(1), P -> P",
    ),
    (
        linear("{x:S(1)}", "{x:S(1)}", "{x:P}", ""),
        "on axis x S(1), S(1), P -> I is not legal; these operands give P",
    ),
    (
        linear("{w:S(0)}", "{w:B}", "{w:B}", "{w:S(0)}"),
        "there is no axis w: the mesh is x:2 y:2 z:3",
    ),
    (
        call("relu", "f32[8]{x:P}", outputs="f32[8]{x:P}"),
        "on axis x P -> P is not legal; the nearest legal way is I -> I",
    ),
    (
        call("relu", "f32[8]{x:S(0),y:S(0)}", outputs="f32[8]{y:S(0),x:S(0)}"),
        "the axes that split index",
    ),
    (
        call("add.Tensor", "f32[4]{x:B}", "f32[4]", outputs="f32[4]{x:B}", attributes=(1,)),
        "on axis x B, I -> B is not legal; the nearest legal way is I, I -> I",
    ),
    (
        call("softmax.int", "f32[4,4]{x:S(1)}", outputs="f32[4,4]{x:S(1)}", attributes=(1, None)),
        "on axis x S(1) -> S(1) is not legal; the nearest legal way is I -> I",
    ),
    (
        call("relu", "f32[5]{x:S(0),y:S(0),z:S(0)}", outputs="f32[5]{x:S(0),y:S(0),z:S(0)}"),
        "dim 0 of size 5 cannot be split 12 ways",
    ),
    (
        call("reshape", "f32[6,4]{x:S(1)}", outputs="f32[24]{x:S(0)}", attributes=((24,),)),
        "on axis x S(1) -> S(0) is not legal; the nearest legal way is I -> I",
    ),
    (
        call("reshape", "f32[24]{x:S(0),y:S(0)}", outputs="f32[2,12]{x:S(0),y:S(0)}", attributes=((2, 12),)),
        "dim 0 of size 2 cannot be split 4 ways",
    ),
    (
        call("relu", "f32[8]{x:S(0)}", outputs="f32[8]{x:S(1)}"),
        "axis x splits dim 1 of 1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("node", "why"), FAULTS, ids=[why[:40] for _, why in FAULTS])
def test_why_a_node_cannot_lie_so(node: Node, why: str) -> None:
    found = node_fault(node, MESH)
    assert found is not None and found.startswith(why), found


def test_the_order_of_nesting_must_be_the_same_in_all_tensors() -> None:
    node = call("add.Tensor", "f32[8]{x:S(0),y:S(0)}", "f32[8]{y:S(0),x:S(0)}", outputs="f32[8]{x:S(0),y:S(0)}",
                attributes=(1,))  # fmt: skip
    with pytest.raises(LayoutError, match=r"^the axes that split index \S+ nest in different orders: x,y and y,x$"):
        place(node, MESH)


def test_an_index_of_fewer_elements_than_pieces() -> None:
    """A dim that splits into heads: the heads are split, not the dim."""
    types = "f32[12]{x:S(0),y:S(0)}", "f32[3,4]{x:S(0),y:S(0)}"
    node = call("reshape", types[0], outputs=types[1], attributes=((3, 4),))
    with pytest.raises(LayoutError, match=r"^index \S+ of size 3 cannot be split 4 ways$"):
        place(node, MESH)
    assert node_fault(node, MESH) == "dim 0 of size 3 cannot be split 4 ways"


def test_an_opaque_operator_is_the_same_everywhere() -> None:
    type = TensorType((3,), torch.float32)
    node = make_node("nonzero", (Value(make_leaf(LeafKind.INPUT, "i", type)),), (TensorType((3, 1), torch.int64),))
    assert [str(rule) for rule in rules_for(plain_call(node), 1)] == ["I -> I", "B -> B"]


LAYOUT_FAULTS = [
    ("f32[4]{w:B}", "there is no axis w: the mesh is x:2 y:2 z:3"),
    ("f32[4]{x:S(2)}", "axis x splits dim 2 of 1"),
    ("f32[3]{x:S(0),y:S(0)}", "dim 0 of size 3 cannot be split 4 ways"),
    ("f32[0]{x:S(0)}", "dim 0 of size 0 cannot be split 2 ways"),
    ("f32[4]{x:S(0),y:S(0),z:B}", None),
]


@pytest.mark.parametrize(("text", "why"), LAYOUT_FAULTS)
def test_why_a_tensor_cannot_lie_so(text: str, why: str | None) -> None:
    assert layout_fault(parse_type(text), MESH) == why
