"""A graph in double precision: the same program with every floating-point dtype made float64, to compare exactly."""

from __future__ import annotations

from typing import Any

import torch

from conjoin.ir.builder import GraphBuilder
from conjoin.ir.graph import Graph, Result
from conjoin.ir.nodes import Leaf, Value, make_leaf, make_node
from conjoin.ops import TensorType

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def _wide_type(type: TensorType) -> TensorType:
    return TensorType(type.shape, torch.float64, type.layout) if type.dtype in _NARROW else type


def _wide_data(leaf: Leaf) -> bytes | None:
    if leaf.data is None or leaf.type.dtype not in _NARROW:
        return leaf.data
    numbers = torch.frombuffer(bytearray(leaf.data), dtype=leaf.type.dtype) if leaf.data else torch.empty(0)
    return bytes(numbers.to(torch.float64).view(torch.uint8).tolist())


def widen(graph: Graph) -> Graph:
    """The graph in double precision; casts between floating-point dtypes become casts to float64."""
    builder = GraphBuilder()
    values: dict[Value, Value] = {}

    def change(item: Any) -> Any:
        if isinstance(item, Value):
            return values[item]
        if isinstance(item, tuple):
            return tuple(map(change, item))
        return torch.float64 if isinstance(item, torch.dtype) and item in _NARROW else item

    for leaf in graph.leaves:
        made = make_leaf(
            leaf.kind, leaf.name, _wide_type(leaf.type), trainable=leaf.trainable, aliases=leaf.aliases,
            data=_wide_data(leaf),
        )  # fmt: skip
        values[Value(leaf)] = builder.add_leaf(made)
    for node in graph.nodes:
        types = tuple(map(_wide_type, node.types))
        new = make_node(node.op, change(node.args), types, occurrence=node.occurrence, pinned=node.pinned)
        while builder.holds(new):  # two casts to different dtypes may have become one
            new = make_node(node.op, new.args, types, occurrence=new.occurrence + 1, pinned=node.pinned)
        builder.add_node(new, graph.source_of(node))
        values.update(zip(node.outputs(), new.outputs(), strict=True))

    def read(result: Result) -> Result:
        return values[result] if isinstance(result, Value) else result

    return builder.finish(
        graph.name,
        training=graph.training,
        inputs=tuple(map(read, graph.inputs)),
        outputs=tuple(map(read, graph.outputs)),
        updates=tuple((name, values[value]) for name, value in graph.updates),
        loss=graph.loss,
        input_structure=graph.input_structure,
        output_structure=graph.output_structure,
    )
