"""A graph in double precision: the same program with every floating-point dtype made float64, to compare exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from conjoin.ir.builder import GraphBuilder
from conjoin.ir.graph import Graph, Result
from conjoin.ir.nodes import Leaf, Node, Source, Value, make_leaf, make_node
from conjoin.ir.offloads import Made
from conjoin.ir.plan import (
    OFFLOAD,
    RECOMPUTE,
    Plan,
    offload_actions,
    offloaded_tensors,
    recompute_actions,
    recomputed_segments,
)
from conjoin.ir.segments import Segment, operators_of
from conjoin.ops import CAST, Args, TensorType, bind_args, signature

_WIDE = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
    torch.float8_e4m3fn: torch.float64, torch.float8_e5m2: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
_OF_BITS = "view.dtype"
"""Looks at bits of numbers as other numbers: in double precision there are other bits, and other sizes."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The double-precision dtype that stands for another; integers, booleans and float64 stand for themselves."""
    return _WIDE.get(dtype, dtype)


def _wide_type(type: TensorType) -> TensorType:
    return TensorType(type.shape, wide_dtype(type.dtype), type.layout)


def _wide_data(leaf: Leaf) -> bytes | None:
    if not leaf.data or leaf.type.dtype not in _WIDE:
        return leaf.data
    numbers = torch.frombuffer(bytearray(leaf.data), dtype=leaf.type.dtype).to(wide_dtype(leaf.type.dtype))
    return numbers.numpy().tobytes()


class _Widener:
    """The new graph as far as it is made, and what became of each value of the old one."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self.values: dict[Value, Value] = {}
        self._casts: set[Node] = set()
        """Added here; a graph that is widened again has them already."""

    def add_leaf(self, leaf: Leaf) -> None:
        made = make_leaf(
            leaf.kind, leaf.name, _wide_type(leaf.type), trainable=leaf.trainable, aliases=leaf.aliases,
            data=_wide_data(leaf), channels_last=leaf.channels_last, section=leaf.section,
        )  # fmt: skip
        self.values[Value(leaf)] = self.builder.add_leaf(made)

    def add_node(self, node: Node, source: Source | None) -> None:
        if node in self._casts:
            self.values[Value(node)] = Value(node)
            return
        args, types = self._change(node.args), tuple(map(_wide_type, node.types))
        if node.op == _OF_BITS:
            (bits,) = (self._as(self.values[value], value.type, source) for value in node.inputs)
            made = self._add(node, (bits, *node.args[1:]), node.types, source)
            self.values[Value(node)] = self._as(Value(made), types[0], source)
            return
        if not _takes_default(node):
            made = self._add(node, args, types, source)
            self.values.update(zip(node.outputs(), made.outputs(), strict=True))
            return
        # Of integers or of nothing torch makes its default dtype, whatever the rest of the graph computes in.
        names = [parameter.name for parameter in signature(node.op).parameters]
        if "dtype" in names:
            place = names.index("dtype")
            made = self._add(node, (*args[:place], types[0].dtype, *args[place + 1 :]), types, source)
            self.values.update(zip(node.outputs(), made.outputs(), strict=True))
            return
        made = self._add(node, args, node.types, source)
        for old, new, type in zip(node.outputs(), made.outputs(), types, strict=True):
            self.values[old] = self._as(new, type, source)

    def _as(self, value: Value, type: TensorType, source: Source | None) -> Value:
        """A value of a type, cast where it is of another one."""
        if value.type == type:
            return value
        node = make_node(CAST, bind_args(CAST, (value,), {"dtype": type.dtype}), (type,))
        self._casts.add(node)
        return Value(self.builder.add_node(node, source))

    def _add(self, node: Node, args: Args, types: tuple[TensorType, ...], source: Source | None) -> Node:
        made = make_node(node.op, args, types, occurrence=node.occurrence, pinned=node.pinned)
        while self.builder.holds(made):  # two casts to different dtypes may have become one
            made = make_node(node.op, args, types, occurrence=made.occurrence + 1, pinned=node.pinned)
        return self.builder.add_node(made, source)

    def _change(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self.values[item]
        if isinstance(item, tuple):
            return tuple(map(self._change, item))
        return wide_dtype(item) if isinstance(item, torch.dtype) else item

    def read(self, result: Result) -> Result:
        return self.values[result] if isinstance(result, Value) else result


def _takes_default(node: Node) -> bool:
    """Whether a call makes numbers to be widened out of operands that are none."""
    reads = (value.type.dtype for value in node.inputs)
    return any(type.dtype in _WIDE for type in node.types) and not any(_is_inexact(dtype) for dtype in reads)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def widen(graph: Graph) -> Graph:
    """The graph in double precision; casts between floating-point dtypes become casts to float64."""
    return _widen(graph)[0]


def widen_plan(plan: Plan) -> Plan:
    """The plan in double precision; what it recomputes is still recomputed, though casts may have been added."""
    graph, values = _widen(plan.graph)
    old, places = operators_of(plan.graph), {node: place for place, node in enumerate(operators_of(graph))}

    def place_of(operator: int) -> int:
        owner = values[tuple(old[operator].outputs())[-1]].owner
        assert isinstance(owner, Node)
        return places[owner]

    def made_as(value: Value) -> Made:
        owner = values[value].owner
        assert isinstance(owner, Node)
        return places[owner], values[value].index

    segments = [
        Segment(place_of(segment[0] - 1) + 1 if segment[0] else 0, place_of(segment[1]), map(place_of, segment.kept))
        for segment in recomputed_segments(plan)
    ]
    offloads = [made_as(tuple(old[place].outputs())[i]) for place, i in offloaded_tensors(plan)]
    kept = tuple(action for action in plan.memory if action.action not in (RECOMPUTE, OFFLOAD))
    memory = (*kept, *recompute_actions(graph, segments), *offload_actions(graph, offloads))
    return replace(plan, graph=graph, memory=memory)


def _widen(graph: Graph) -> tuple[Graph, Mapping[Value, Value]]:
    """The graph in double precision, and what became of every value."""
    wide = _Widener()
    for leaf in graph.leaves:
        wide.add_leaf(leaf)
    for node in graph.nodes:
        wide.add_node(node, graph.source_of(node))
    made = wide.builder.finish(
        graph.name,
        training=graph.training,
        inputs=tuple(map(wide.read, graph.inputs)),
        outputs=tuple(map(wide.read, graph.outputs)),
        updates=tuple((name, wide.values[value]) for name, value in graph.updates),
        loss=graph.loss,
        input_structure=graph.input_structure,
        output_structure=graph.output_structure,
    )
    return made, wide.values
