"""Leaves, nodes and values: built twice they are the same object, and nothing changes them."""

from __future__ import annotations

import gc
import math
import pickle
import weakref
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from conjoin.ir import Leaf, LeafKind, Node, Source, Value, make_leaf, make_node
from conjoin.ir.nodes import fits
from conjoin.ops import Copies, Kind, TensorType

F32 = TensorType((2, 3), torch.float32)


def leaf(**facts: Any) -> Leaf:
    return make_leaf(**{"kind": LeafKind.PARAMETER, "name": "w", "type": F32, **facts})


def add(literal: object, **facts: Any) -> Node:
    return make_node("add.Scalar", (Value(leaf()), literal, 1), (F32,), **facts)


def test_equal_construction_gives_the_same_object() -> None:
    w, node = leaf(), add(1)
    assert leaf() is w and add(1) is node
    assert Value(node) == Value(add(1)) and hash(Value(node)) == hash(Value(add(1)))


@pytest.mark.parametrize(
    "facts",
    [
        {"kind": LeafKind.BUFFER},
        {"name": "v"},
        {"type": TensorType((3, 2), torch.float32)},
        {"type": TensorType((2, 3), torch.float16)},
        {"type": TensorType((2, 3), torch.float32, (("x", Copies()),))},
        {"trainable": True},
        {"aliases": ("tied.weight",)},
        {"data": b""},
    ],
    ids=lambda facts: "-".join(facts),
)
def test_leaves_are_told_apart(facts: dict[str, Any]) -> None:
    plain, other = leaf(), leaf(**facts)
    assert plain is not other and plain != other and Value(plain) != Value(other)


def test_literals_of_different_types_or_signs_are_told_apart() -> None:
    literals = (1, 1.0, True, 0, 0.0, -0.0, False, "1", None, (1,), (1.0,), (True,), ((1,),), math.inf, -math.inf, 1j)
    nodes = [add(literal) for literal in literals]
    assert len(set(nodes)) == len(literals)
    assert [str(node.args[1]) for node in nodes] == [str(literal) for literal in literals]


def test_a_number_that_is_none_is_equal_to_itself() -> None:
    node = add(math.nan)
    assert add(float("nan")) is node and add(-math.nan) is node


def test_operands_operator_types_occurrence_and_pin_are_told_apart() -> None:
    x, y = Value(leaf(name="x")), Value(leaf(name="y"))
    nodes = [
        make_node("sub.Tensor", (x, y, 1), (F32,)),
        make_node("sub.Tensor", (y, x, 1), (F32,)),
        make_node("add.Tensor", (x, y, 1), (F32,)),
        make_node("sub.Tensor", (x, y, 1), (TensorType((2, 3), torch.float64),)),
        make_node("sub.Tensor", (x, y, 1), (F32,), occurrence=1),
        make_node("sub.Tensor", (x, y, 1), (F32,), pinned=True),
    ]
    assert len(set(nodes)) == len(nodes)
    assert [(node.occurrence, node.pinned) for node in nodes[-2:]] == [(1, False), (0, True)]


def test_signs_of_complex_zeros_are_told_apart() -> None:
    zeros = [complex(real, imaginary) for real in (0.0, -0.0) for imaginary in (0.0, -0.0)]
    assert len({add(zero) for zero in zeros}) == 4


def test_what_was_pickled_is_the_same_object_again() -> None:
    parts = leaf(trainable=True, aliases=("tied",)), leaf(data=b"1"), add(-0.0, occurrence=2, pinned=True), add((1, 1j))
    again = pickle.loads(pickle.dumps((*parts, Value(parts[2]))))
    assert all(one is other for one, other in zip(parts, again, strict=False)) and again[4] == Value(parts[2])


def test_unreferenced_nodes_are_freed() -> None:
    seen: list[weakref.ReferenceType[Any]] = []

    def build() -> None:
        node = make_node("relu", (Value(leaf(name="freed")),), (F32,), occurrence=77)
        seen.append(weakref.ref(node))
        seen.append(weakref.ref(leaf(name="freed")))
        assert None not in [reference() for reference in seen]

    build()
    gc.collect(1)
    assert [reference() for reference in seen] == [None, None]


def test_nothing_can_be_changed() -> None:
    node = add(1)
    for owner, name in ((node, "op"), (leaf(), "name"), (Value(node), "index"), (Source("a.py", 1), "line")):
        with pytest.raises(FrozenInstanceError):
            setattr(owner, name, "changed")


def test_several_outputs_have_their_own_types() -> None:
    small = TensorType((1, 3), torch.float32)
    node = make_node("split.Tensor", (Value(leaf()), 1, 0), (small, F32))
    first, second = node.outputs()
    assert (first.type, second.type) == (small, F32) and first != second


def test_a_node_is_shown_without_its_whole_past() -> None:
    value = Value(leaf())
    for _ in range(100):
        value = Value(make_node("add.Tensor", (value, value, 1), (F32,)))
    assert repr(value.owner) == "<Node add.Tensor -> f32[2,3]>"
    assert len(repr(value)) < 100


def test_a_source_reads_as_a_place() -> None:
    assert str(Source("a.py", 3)) == "a.py:3" and str(Source("a.py", 3, "layers.0")) == "a.py:3 (layers.0)"


@pytest.mark.parametrize(
    ("kind", "argument", "right"),
    [
        (Kind.TENSOR, "VALUE", True),
        (Kind.TENSOR, None, True),
        (Kind.TENSOR, 2.5, True),
        (Kind.TENSOR, 1j, True),
        (Kind.TENSOR, "text", False),
        (Kind.TENSOR, ("VALUE",), False),
        (Kind.TENSORS, ("VALUE", None), True),
        (Kind.TENSORS, None, True),
        (Kind.TENSORS, "VALUE", False),
        (Kind.TENSORS, (1,), False),
        (Kind.ATTRIBUTE, (1, "text", None), True),
        (Kind.ATTRIBUTE, "VALUE", False),
        (Kind.ATTRIBUTE, ((1, ("VALUE",)),), False),
    ],
)
def test_what_fits_a_parameter(kind: Kind, argument: Any, right: bool) -> None:
    def put(item: Any) -> Any:
        return tuple(map(put, item)) if isinstance(item, tuple) else Value(leaf()) if item == "VALUE" else item

    assert fits(kind, put(argument)) is right
