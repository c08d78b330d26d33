"""Graphs for the tests of this room: one written by hand, and random ones that use every corner of the two forms."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from hypothesis import strategies as st

from conjoin.ir import (
    LEAF,
    Graph,
    GraphBuilder,
    Leaf,
    LeafKind,
    Source,
    Structure,
    Value,
    fingerprint,
    make_leaf,
    make_node,
    parse_graph,
)
from conjoin.ir.graph_file import graph_from_json, graph_to_json
from conjoin.ops import (
    PLACEMENT_PARAMETERS,
    Copies,
    Kind,
    Parameter,
    Partial,
    Split,
    TensorType,
    make_layout,
    signature,
)

GOLDEN = """\
graph "mlp" train
input:x f32[4,8]
input:target i64[4]
param:fc.weight f32[3,8] trainable also "head.weight"
param:fc.bias f32[3]
buffer:"running mean" f32[3]
const:one f32[] = b64:AACAPw==
takes [input:x, 2, input:target] in {"kind":"tuple","keys":[],"children":[null,null,null]}
%0: f32[4,3] = linear(input:x, param:fc.weight, param:fc.bias)  @ "mlp.py":12 "fc"
%1: f32[4,3] = dropout(%0, p=0.5, train=true)
%2: f32[4,3] = dropout(%0, p=0.5, train=true) #1  @ "mlp.py":13
%3: f32[4,3] = add.Tensor(%1, %2, alpha=2)
%4: f32[3] = mean.dim(%3, dim=[0])
%5: f32[4,2], %6: f32[4,1] = split_with_sizes(%3, split_sizes=[2, 1], dim=1)
%7: f32[4,3] = cat([%6, %5], dim=1) pinned
%8: f32[4,3] = mul.Tensor(%7, const:one)
%9: f32[] = cross_entropy_loss(%8, input:target)
update "running mean" = %4
returns [%9, none, "done"] in {"kind":"dict","keys":["loss","aux","note"],"children":[null,null,null]} loss 0
"""


def chain(length: int) -> Graph:
    """One operator after the other."""
    builder = GraphBuilder()
    kind = TensorType((2,), torch.float32)
    value = start = builder.add_leaf(make_leaf(LeafKind.INPUT, "x", kind))
    for _ in range(length):
        value = Value(builder.add_call("relu", (value,), (kind,)))
    return builder.finish("chain", training=False, inputs=(start,), outputs=(value,))


_ODD_NAMES = ("x", "a.b", "a b", 'q"', "\\", "é", "n\nl", "%0", "a]", "", "input:x")
_NAMES = st.one_of(st.sampled_from(_ODD_NAMES), st.text(max_size=6))
_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
_FORMATS = st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format])
_ODD_NUMBERS = st.sampled_from([0, 0.0, -0.0, 1, 1.0, True, False, math.inf, 1e-300])
_NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), _ODD_NUMBERS)
_COMPLEX = st.complex_numbers()
_ATOMS = st.one_of(st.none(), st.booleans(), _NUMBERS, _COMPLEX, _NAMES, _DTYPES, _FORMATS)
LITERALS: st.SearchStrategy[Any] = st.recursive(
    _ATOMS, lambda item: st.lists(item, max_size=3).map(tuple), max_leaves=6
)
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, _NAMES)
_PLACEMENTS = st.one_of(st.just(Copies()), st.just(Partial()), st.builds(Split, st.integers(0, 3)))
_AXES = st.sampled_from(["x", "node_2", "ä"])
_LAYOUTS = st.dictionaries(_AXES, _PLACEMENTS, max_size=2).map(lambda placed: make_layout(placed.items()))
TYPES = st.builds(TensorType, st.lists(st.integers(0, 9), max_size=3).map(tuple), _DTYPES, _LAYOUTS)
_KEYS = st.one_of(_NAMES, st.integers(-3, 3))


@st.composite
def _containers(draw: st.DrawFn, children: st.SearchStrategy[Structure]) -> Structure:
    kind = draw(st.sampled_from(["tuple", "list", "dict", "my.module.Output"]))
    inside = tuple(draw(st.lists(children, max_size=3)))
    named = kind == "dict" or draw(st.booleans())
    return Structure(kind, tuple(draw(_KEYS) for _ in inside) if named else (), inside)


STRUCTURES = st.recursive(st.just(LEAF), _containers, max_leaves=5)
_SOURCES = st.none() | st.builds(Source, _NAMES, st.integers(0, 10**6), _NAMES)
_OPERATORS = (
    "relu", "add.Tensor", "cat", "sum.dim_IntList", "_to_copy", "gelu", "clamp", "dropout", "split.Tensor", "full",
    "index.Tensor", "layer_norm", "native_batch_norm", "add.Scalar", "where.self", "conv2d",
)  # fmt: skip


@st.composite
def _leaves(draw: st.DrawFn) -> Leaf:
    kind, type = draw(st.sampled_from(list(LeafKind))), draw(TYPES)
    data = draw(st.none() | st.just(bytes(range(256)) * 32)) if kind is LeafKind.CONSTANT else None
    return make_leaf(
        kind,
        draw(_NAMES),
        type,
        trainable=kind is LeafKind.PARAMETER and draw(st.booleans()),
        aliases=tuple(draw(st.lists(_NAMES, max_size=2))),
        data=None if data is None else data[: type.bytes],
    )


def _argument(draw: st.DrawFn, parameter: Parameter, values: list[Value]) -> Any:
    if parameter.name in PLACEMENT_PARAMETERS:
        return None
    some = st.sampled_from(values)
    match parameter.kind:
        case Kind.TENSOR:
            return draw(st.one_of(some, some, st.none(), st.booleans(), _NUMBERS, _COMPLEX))
        case Kind.TENSORS:
            return draw(st.none() | st.lists(st.none() | some, max_size=3).map(tuple))
        case Kind.ATTRIBUTE:
            return draw(st.just(parameter.default) | LITERALS)


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """Any graph that can be written down, well formed or not."""
    builder = GraphBuilder()
    leaves = {str(leaf): leaf for leaf in draw(st.lists(_leaves(), min_size=1, max_size=4))}
    values = [builder.add_leaf(leaf) for leaf in leaves.values()]
    known = list(values)
    for op in draw(st.lists(st.sampled_from(_OPERATORS), max_size=6)):
        args = tuple(_argument(draw, parameter, known) for parameter in signature(op).parameters)
        types = tuple(draw(st.lists(TYPES, min_size=1, max_size=3)))
        node = make_node(op, args, types, occurrence=draw(st.integers(0, 2)), pinned=draw(st.booleans()))
        builder.add_node(node, draw(_SOURCES))
        known += node.outputs()
    some = st.sampled_from(known)
    return builder.finish(
        draw(_NAMES),
        training=draw(st.booleans()),
        inputs=tuple(draw(st.lists(st.sampled_from(values) | _SCALARS, max_size=3))),
        outputs=tuple(draw(st.lists(some | _SCALARS, max_size=3))),
        updates=tuple(draw(st.lists(st.tuples(_NAMES, some), max_size=2))),
        loss=draw(st.none() | st.integers(0, 3)),
        input_structure=draw(STRUCTURES),
        output_structure=draw(STRUCTURES),
    )


def check_round_trip(graph: Graph) -> None:
    """What is written of a graph is read back as the same, from text and from JSON."""
    text = str(graph)
    from_text = parse_graph(text)
    assert from_text == graph and str(from_text) == text and from_text.sources == graph.sources
    again = graph_from_json(json.loads(json.dumps(graph_to_json(graph), allow_nan=False)))
    assert again == graph and again.sources == graph.sources
    assert fingerprint(again) == fingerprint(from_text) == fingerprint(graph)
