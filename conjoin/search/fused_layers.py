"""Several layers computed as one are taken apart: query, key and value in one product, cut afterwards.

    y = linear(x, w, b);  q, k, v = cut(view(y))    becomes    q = view(linear(x, w_q, b_q)), k = …, v = …

Split by columns, y would have to be gathered: the pieces of its features are not the pieces of q, k and v. Each output
feature of a linear layer depends on its own row of w and b alone, so cutting the rows first gives the same values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from conjoin.ir import Graph, Leaf, Node, Rewriting, Value, bring_into_order, in_same_order, permutation
from conjoin.ops import SCALED_LINEAR, Args, signature
from conjoin.search.rehearsed import finish_rehearsed

_FEATURE_DIMS = {
    "linear": {"weight": 0, "bias": 0},
    SCALED_LINEAR: {"weight": 0, "bias": 0},
    "addmm": {"mat2": 1, "self": -1},
    "mm": {"mat2": 1},
    "matmul": {"other": -1},
    **{op: {"self": -1, "other": -1} for op in ("add.Tensor", "sub.Tensor", "mul.Tensor")},
}
"""Operands whose dim named here is the last dim of the output; the others do not have it. What goes element by element
is taken apart like a layer: then the layers that are added up before the cut are cut themselves."""
_VIEWS = {"reshape": "shape", "view": "size", "_unsafe_view": "size"}
_CUTS = ("unbind.int", "split.Tensor", "split_with_sizes", "split.sizes", "chunk")
_SLICE, _SELECT = "slice.Tensor", "select.int"


@dataclass(frozen=True, slots=True)
class Fused:
    """A layer, what moves its output, and what cuts it along a dim which the layer's features lead."""

    layer: Node
    view: Node | None
    moves: tuple[tuple[int, ...], ...]
    """Permutations after the view, in order."""
    pieces: tuple[tuple[Value, int], ...]
    """The values cut out, in order, and the length of each along the dim."""
    dim: int
    """The dim that is cut, before the permutations."""

    @property
    def num_features(self) -> tuple[int, ...]:
        """How many features of the layer each piece has."""
        each = prod(self.shape[self.dim + 1 :])
        return tuple(size * each for _, size in self.pieces)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before the permutations."""
        return (self.view or self.layer).types[0].shape

    @property
    def drops_dim(self) -> bool:
        return len(self.pieces[0][0].type.shape) < len(self.shape)


def find_fused(graph: Graph, layer: Node) -> Fused | None:
    """The way from a layer to where its features are cut, when that is all its output is used for."""
    if layer.op not in _FEATURE_DIMS or not _has_features(layer):
        return None
    node, users = layer, _users(graph, layer)
    view = None
    if len(users) == 1 and users[0].op in _VIEWS:
        node = view = users[0]
        users = _users(graph, view)
    moves: list[tuple[int, ...]] = []
    while len(users) == 1 and (found := _next_move(graph, users[0])) is not None:
        move, node = found
        moves.append(move)
        users = _users(graph, node)
    while len(users) == 1 and users[0].op == "contiguous":
        node, users = users[0], _users(graph, users[0])
    dim, pieces = find_cut(users, node.types[0].shape)
    for move in reversed(moves):
        dim = move[dim]
    if len(pieces) < 2:
        return None
    fused = Fused(layer, view, tuple(moves), pieces, dim)
    *lead, width = layer.types[0].shape
    return fused if prod(fused.shape[:dim]) == prod(lead) and sum(fused.num_features) == width else None


def find_fused_at(graph: Graph, layer: Node) -> Node | None:
    """The layer if it is fused; else what it is added up or scaled in, alone, before that is cut."""
    node = layer
    while find_fused(graph, node) is None:
        users = _users(graph, node)
        if len(users) != 1 or not (users[0].op in _VIEWS or is_pointwise(users[0])):
            return None
        node = users[0]
    return node


def is_pointwise(node: Node) -> bool:
    """Whether a node adds up or scales what layers make."""
    return node.op in _FEATURE_DIMS and set(_FEATURE_DIMS[node.op]) == {"self", "other"}


def _has_features(layer: Node) -> bool:
    """Whether the last dim of its output is that of its weights: not of a product with one vector."""
    if is_pointwise(layer):
        return len(layer.types[0].shape) > 1
    weight = next(iter(_FEATURE_DIMS[layer.op]))
    return len(layer.call[weight].shape) > 1


def _users(graph: Graph, node: Node) -> tuple[Node, ...]:
    """The nodes that read the output of a node; none where the caller reads it too."""
    return () if Value(node) in graph.outputs else graph.users.get(Value(node), ())


def _next_move(graph: Graph, node: Node) -> tuple[tuple[int, ...], Node] | None:
    """How a node turns dims, or nodes from it on that add a dim and drop it again, and the last of them."""
    if node.op != "unsqueeze":
        move = permutation(node)
        return None if move is None else (move, node)
    order, users = tuple(range(len(node.types[0].shape))), _users(graph, node)
    gone = node.call.dim(rank=len(order))
    while len(users) == 1 and (turned := permutation(users[0])) is not None:
        order, users = tuple(order[place] for place in turned), _users(graph, users[0])
    if len(users) != 1 or not _drops(users[0], order.index(gone)):
        return None
    return tuple(place - (place > gone) for place in order if place != gone), users[0]


def _drops(node: Node, dim: int) -> bool:
    """Whether a node takes away a dim of size one, and nothing else."""
    if node.op == "squeeze.dim":
        return node.call.dim() == dim
    return node.op == "reshape" and node.types[0].shape == _without(node.args[0].type.shape, dim)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def find_cut(users: tuple[Node, ...], shape: tuple[int, ...]) -> tuple[int, tuple[tuple[Value, int], ...]]:
    """The dim along which the users cut a tensor into parts without gaps, and the parts; none where they do not."""
    if len(users) == 1 and users[0].op in _CUTS:
        dim, drops = users[0].call.dim(), users[0].op == "unbind.int"
        return dim, tuple((value, 1 if drops else value.type.shape[dim]) for value in users[0].outputs())
    if len(users) > 1 and all(node.op == _SELECT for node in users):
        at = {(node.call.dim(), int(node.call["index"]) % shape[node.call.dim()]): node for node in users}
        dim = users[0].call.dim()
        whole = [(dim, place) for place in range(shape[dim])]
        is_cut = len(at) == len(users) and sorted(at) == whole
        return (dim, tuple((Value(at[place]), 1) for place in whole)) if is_cut else (0, ())
    if len(users) < 2 or any(node.op != _SLICE for node in users):
        return 0, ()
    dim, end, parts = users[0].call.dim(), 0, []
    for node in sorted(users, key=lambda node: int(node.call["start"] or 0)):
        size = node.types[0].shape[dim]
        if (node.call.dim(), node.call["start"] or 0, node.call["step"]) != (dim, end, 1):
            return 0, ()
        parts.append((Value(node), size))
        end += size
    return (dim, tuple(parts)) if end == shape[dim] else (0, ())


class _Unfuser:
    """A rewriting that puts layers for each piece where the pieces were cut."""

    def __init__(self, graph: Graph, in_order: bool) -> None:
        self.work, self._in_order = Rewriting(graph), in_order
        self._pieces: dict[tuple[Value, tuple[int, ...]], tuple[Value, ...]] = {}
        """Weights that are cut already."""

    def take_apart(self, fused: Fused) -> None:
        """Put a layer for each piece where the pieces were cut."""
        layer, emit = fused.layer, self.work.emit
        for (value, size), args in zip(fused.pieces, self._piece_args(fused), strict=True):
            piece = emit(layer, layer.op, *args)
            shape = _piece_shape(fused, size)
            if piece.type.shape != shape:
                piece = emit(layer, fused.view.op if fused.view else "reshape", piece, shape)
            for move in _piece_moves(fused):
                piece = emit(layer, "permute", piece, move) if list(move) != sorted(move) else piece
            self.work.values[value] = piece
            if self._in_order:
                bring_into_order(self.work, layer, value)

    def _piece_args(self, fused: Fused) -> list[Args]:
        """The arguments of each piece's layer: operands that have the features are cut along them."""
        layer, sizes = fused.layer, fused.num_features
        columns: list[tuple[Any, ...]] = []
        for parameter, argument in zip(signature(layer.op).parameters, layer.args, strict=True):
            dim = _FEATURE_DIMS[layer.op].get(parameter.name)
            if not isinstance(argument, Value):
                columns.append((argument,) * len(sizes))
            elif dim is None or argument.type.shape[dim:][:1] != (sum(sizes),):
                columns.append((self.work.values[argument],) * len(sizes))
            else:
                columns.append(self._cut(layer, self.work.values[argument], sizes, dim % len(argument.type.shape)))
        return list(zip(*columns, strict=True))

    def _cut(self, layer: Node, value: Value, sizes: tuple[int, ...], dim: int) -> tuple[Value, ...]:
        key = value, (dim, *sizes)
        if key not in self._pieces:
            self._pieces[key] = self.work.emit(layer, "split_with_sizes", value, sizes, dim)
        return self._pieces[key]


def _piece_shape(fused: Fused, size: int) -> tuple[int, ...]:
    shape, dim = fused.shape, fused.dim
    own = () if fused.drops_dim else (size,)
    return (*shape[:dim], *own, *shape[dim + 1 :])


def _piece_moves(fused: Fused) -> list[tuple[int, ...]]:
    """The permutations without the dim that is gone."""
    if not fused.drops_dim:
        return list(fused.moves)
    moves, dim = [], fused.dim
    for move in fused.moves:
        moves.append(tuple(position - (position > dim) for position in move if position != dim))
        dim = move.index(dim)
    return moves


def unfuse(graph: Graph, layers: Collection[Node]) -> Graph:
    """The graph with each of the fused layers taken apart where its output is cut."""
    found = [fused for layer in layers if (fused := find_fused(graph, layer)) is not None]
    cuts: dict[Leaf | Node, Fused] = {value.owner: fused for fused in found for value, _ in fused.pieces}
    return in_same_order(graph, partial(_taken_apart, graph, cuts)) if cuts else graph


def _taken_apart(graph: Graph, cuts: Mapping[Leaf | Node, Fused], in_order: bool) -> Graph:
    unfuser = _Unfuser(graph, in_order)
    for node in graph.nodes:
        if node not in cuts:
            unfuser.work.keep(node)
        elif not any(value in unfuser.work.values for value, _ in cuts[node].pieces):
            unfuser.take_apart(cuts[node])
    return finish_rehearsed(unfuser.work)
