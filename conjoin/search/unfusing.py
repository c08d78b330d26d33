"""Several layers computed as one are taken apart: query, key and value in one product, cut afterwards.

    y = linear(x, w, b);  q, k, v = cut(view(y))    becomes    q = view(linear(x, w_q, b_q)), k = …, v = …

Split by columns, y would have to be gathered: the pieces of its features are not the pieces of q, k and v. Each output
feature of a linear layer depends on its own row of w and b alone, so cutting the rows first gives the same values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod
from typing import Any

from conjoin.ir import Graph, GraphBuilder, Node, Result, Source, Value, drop_unused, make_node
from conjoin.ops import Args, Call, bind_args, map_tensors, output_types, signature, spec_for

_FEATURE_DIMS = {
    "linear": {"weight": 0, "bias": 0},
    "addmm": {"mat2": 1, "self": -1},
    "mm": {"mat2": 1},
    "matmul": {"other": -1},
}
"""Operands whose dim named here is the last dim of the output; the others do not have it."""
_VIEWS = {"reshape": "shape", "view": "size", "_unsafe_view": "size"}
_CUTS = ("unbind.int", "split.Tensor", "split_with_sizes", "split.sizes", "chunk")


@dataclass(frozen=True, slots=True)
class Fused:
    """A layer, what moves its output, and the node that cuts it along a dim which the layer's features lead."""

    layer: Node
    view: Node | None
    moves: tuple[tuple[int, ...], ...]
    """Permutations after the view, in order."""
    cut: Node
    dim: int
    """The dim that is cut, before the permutations."""

    @property
    def num_features(self) -> tuple[int, ...]:
        """How many features of the layer each piece has."""
        each = prod(self.shape[self.dim + 1 :])
        return tuple(size * each for size in self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.view or self.layer).types[0].shape

    @property
    def drops_dim(self) -> bool:
        return self.cut.op == "unbind.int"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length of each piece along the dim."""
        if self.drops_dim:
            return (1,) * len(self.cut.types)
        place = self.dim
        for move in self.moves:
            place = move.index(place)
        return tuple(type.shape[place] for type in self.cut.types)


def find_fused(graph: Graph, layer: Node) -> Fused | None:
    """The way from a layer to where its features are cut, when that is all its output is used for."""
    if layer.op not in _FEATURE_DIMS or Value(layer) in graph.outputs:
        return None
    node, view = _only_user(graph, layer), None
    if node is not None and node.op in _VIEWS:
        node, view = _only_user(graph, node), node
    moves: list[tuple[int, ...]] = []
    while node is not None and (move := _permutation(node)) is not None:
        moves.append(move)
        node = _only_user(graph, node)
    if node is None or node.op not in _CUTS:
        return None
    dim = node.call.dim()
    for move in reversed(moves):
        dim = move[dim]
    found = Fused(layer, view, tuple(moves), node, dim)
    lead = prod(layer.types[0].shape[:-1])
    return found if prod(found.shape[:dim]) == lead and sum(found.num_features) == layer.types[0].shape[-1] else None


def _only_user(graph: Graph, node: Node) -> Node | None:
    users = graph.users.get(Value(node), ())
    return users[0] if len(users) == 1 and Value(node) not in graph.outputs else None


def _permutation(node: Node) -> tuple[int, ...] | None:
    rank = len(node.types[0].shape) if node.types else 0
    if node.op == "permute":
        return node.call.dims("dims")
    if node.op == "transpose.int":
        order = list(range(rank))
        one, other = node.call.dim("dim0"), node.call.dim("dim1")
        order[one], order[other] = other, one
        return tuple(order)
    return None


@dataclass(slots=True)
class _Unfuser:
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    values: dict[Value, Value] = field(default_factory=dict)
    pieces: dict[tuple[Value, tuple[int, ...]], tuple[Value, ...]] = field(default_factory=dict)
    """Weights that are cut already."""

    def emit(self, like: tuple[Node, Source | None], op: str, *given: Any) -> tuple[Value, ...]:
        """Add a call that stands for a node, or for a part of it."""
        node, source = like
        args = bind_args(op, given, {})
        call = Call(op, map_tensors(op, args, lambda value: value.type))
        spec = spec_for(call)
        assert spec is not None, f"{op} is used in a form nobody declared"
        made = self.builder.add_call(op, args, output_types(spec, call), source, pinned=node.pinned)
        return tuple(made.outputs())

    def keep(self, node: Node, source: Source | None) -> None:
        """The node as it was, on the values as they are now."""
        args = map_tensors(node.op, node.args, lambda value: self.values[value])
        made = make_node(node.op, args, node.types, occurrence=node.occurrence, pinned=node.pinned)
        self.builder.add_node(made, source)
        self.values.update(zip(node.outputs(), made.outputs(), strict=True))

    def replace_cut(self, fused: Fused, source: Source | None) -> None:
        """Put a layer for each piece where the pieces were cut."""
        like = fused.layer, source
        for i, args in enumerate(self._piece_args(fused, like)):
            piece = self.emit(like, fused.layer.op, *args)[0]
            if fused.view is not None:
                piece = self.emit(like, fused.view.op, piece, _piece_shape(fused, i))[0]
            for move in _piece_moves(fused):
                piece = self.emit(like, "permute", piece, move)[0]
            self.values[Value(fused.cut, i)] = piece

    def _piece_args(self, fused: Fused, like: tuple[Node, Source | None]) -> list[Args]:
        """The arguments of each piece's layer: operands that have the features are cut along them."""
        layer, sizes = fused.layer, fused.num_features
        columns: list[tuple[Any, ...]] = []
        for parameter, argument in zip(signature(layer.op).parameters, layer.args, strict=True):
            dim = _FEATURE_DIMS[layer.op].get(parameter.name)
            if not isinstance(argument, Value):
                columns.append((argument,) * len(sizes))
            elif dim is None or argument.type.shape[dim] != sum(sizes):
                columns.append((self.values[argument],) * len(sizes))
            else:
                columns.append(self._cut(self.values[argument], sizes, dim % len(argument.type.shape), like))
        return list(zip(*columns, strict=True))

    def _cut(
        self, value: Value, sizes: tuple[int, ...], dim: int, like: tuple[Node, Source | None]
    ) -> tuple[Value, ...]:
        key = value, (dim, *sizes)
        if key not in self.pieces:
            self.pieces[key] = self.emit(like, "split_with_sizes", value, sizes, dim)
        return self.pieces[key]


def _piece_shape(fused: Fused, piece: int) -> tuple[int, ...]:
    shape, dim = fused.shape, fused.dim
    own = () if fused.drops_dim else (fused.sizes[piece],)
    return (*shape[:dim], *own, *shape[dim + 1 :])


def _piece_moves(fused: Fused) -> list[tuple[int, ...]]:
    """The permutations without the dim that is gone."""
    if not fused.drops_dim:
        return list(fused.moves)
    moves, dim = [], fused.dim
    for move in fused.moves:
        moves.append(tuple(place - (place > dim) for place in move if place != dim))
        dim = move.index(dim)
    return moves


def unfuse(graph: Graph, layers: Collection[Node]) -> Graph:
    """The graph with each of the fused layers taken apart where its output is cut."""
    found = [fused for layer in layers if (fused := find_fused(graph, layer)) is not None]
    by_cut = {fused.cut: fused for fused in found}
    if not by_cut:
        return graph
    work = _Unfuser()
    for leaf in graph.leaves:
        work.values[Value(leaf)] = work.builder.add_leaf(leaf)
    for node in graph.nodes:
        if node in by_cut:
            work.replace_cut(by_cut[node], graph.source_of(by_cut[node].layer))
        else:
            work.keep(node, graph.source_of(node))

    def read(result: Result) -> Result:
        return work.values[result] if isinstance(result, Value) else result

    finished = work.builder.finish(
        graph.name,
        training=graph.training,
        inputs=tuple(map(read, graph.inputs)),
        outputs=tuple(map(read, graph.outputs)),
        updates=tuple((name, work.values[value]) for name, value in graph.updates),
        loss=graph.loss,
        input_structure=graph.input_structure,
        output_structure=graph.output_structure,
    )
    return drop_unused(finished)
