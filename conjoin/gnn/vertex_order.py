"""Whether a model computes the same of a graph whose vertices stand in another order: if nothing goes by their places.

Dims that have a place for every vertex are followed through the graph, from the inputs that say something of each. What
is done to every vertex alike passes them on, and what adds them up or averages them ends them. A slice of vertices, a
list that names some, a tensor of the model's own with a row for each: these go by places, and so does all that is not
understood.
"""

from __future__ import annotations

from collections.abc import Mapping

from conjoin.comm import OVER_EDGES
from conjoin.ir import Graph, Node, Value
from conjoin.ops import EDGE_SOFTMAX, Access, Factors, NotationError, OpSpec, Space, space_of, spec_for

_FILLED = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
_ADDED = ("index_add", "scatter_add", "scatter_reduce.two")
_ENDS = ("select.int", "unbind.int", "reshape", "unsqueeze", "squeeze.dim", "expand", "_to_copy", "clone")
_COMPARED = ("eq.Tensor", "ne.Tensor")
_TAKEN_WHOLE = (
    "batch_norm", "_native_batch_norm_legit_functional", "softmax.int", "cross_entropy_loss",
    "nll_loss_nd", "nll_loss",
)  # fmt: skip
"""Operators that are the same for every order of a dim that they take whole."""

Dims = frozenset[int]
_ROWS: Dims = frozenset({0})


def use_of_order(graph: Graph, num_vertices: int, vertices: set[Value], ends: set[Value]) -> Node | None:
    """The first call that goes by the places of vertices: some inputs say something of each, some which edges join."""
    order = _Order(num_vertices, dict.fromkeys(vertices, _ROWS), set(ends))
    return next((node for node in graph.nodes if not order.passes(node)), None)


class _Order:
    """Which dims of what was made so far have a place for every vertex, and what are numbers of vertices."""

    def __init__(self, num_vertices: int, dims: dict[Value, Dims], ends: set[Value]) -> None:
        self._num_vertices, self._dims, self._ends = num_vertices, dims, ends

    def passes(self, node: Node) -> bool:
        """Take the next call; whether it is the same for every order."""
        outputs = tuple(node.outputs())
        if node.op in _FILLED:
            self._dims |= {out: self._sized(out) for out in outputs}
            return True
        named = dict(zip(node.call.operand_names, node.inputs, strict=True))
        if self._ends.intersection(node.inputs):
            return self._reads_ends(node, named)
        tagged = [i for i, value in enumerate(node.inputs) if self._dims.get(value)]
        spec = spec_for(node.call)
        if node.op in OVER_EDGES or (tagged and spec is None):
            return False
        if spec is None or not (tagged or node.op == "expand"):
            return True
        try:
            return self._follows(node, spec, space_of(spec, node.call), tagged)
        except NotationError:
            return False

    def _reads_ends(self, node: Node, named: Mapping[str, Value]) -> bool:
        """A call with numbers of vertices: the same for every order where they are looked up, written at, or equal."""
        outputs = tuple(node.outputs())
        if node.op in _ENDS:
            self._ends.update(outputs)
            return True
        rows = [value for value in node.inputs if value not in self._ends]
        if node.op in _COMPARED or node.op == EDGE_SOFTMAX:
            return not rows if node.op in _COMPARED else not any(map(self._dims.get, rows))
        if node.op in OVER_EDGES:
            self._dims[outputs[0]] = _ROWS
            own = [value for name, value in named.items() if name not in ("source", "target", "weight")]
            both = {named["source"], named["target"]} <= self._ends
            return both and all(self._dims.get(one) == _ROWS for one in own) and named.get("weight") not in self._ends
        if node.op in ("index.Tensor", "index_select"):
            first = node.args[1][0] in self._ends if node.op == "index.Tensor" else node.call.dim() == 0
            return first and len(node.inputs) == 2 and self._dims.get(node.inputs[0]) == _ROWS
        if node.op in _ADDED and node.call.dim() == 0 and 0 in self._dims.get(node.inputs[0], ()):
            self._dims[outputs[0]] = _ROWS
            return node.inputs[1] in self._ends and not any(map(self._dims.get, node.inputs[2:]))
        return False

    def _follows(self, node: Node, spec: OpSpec, space: Space, tagged: list[int]) -> bool:
        """Whether a call does the same to all vertices; all that has a place for each has to be about them."""
        operands = space.notation.operands
        dims = [(i, dim) for i in tagged for dim in self._dims[node.inputs[i]]]
        names = [_leading(operands[i].dims[dim], space) for i, dim in dims]
        if not all(self._is_alike(node, spec, space, *pair) for pair in zip(names, dims, strict=True)):
            return False
        taken = {name for name in names if name is not None}
        known = [self._dims.get(value, Dims()) for value in node.inputs]
        if known != [_with(access, taken) for access in operands]:
            return False
        if node.op == "expand":  # what is repeated for every vertex says the same of each
            read = {name for access in operands for name in access.indices()}
            new = {name for name, size in space.sizes.items() if name not in read and size == self._num_vertices}
            taken |= new
        outputs = zip(node.outputs(), space.notation.outputs, strict=True)
        self._dims |= {value: _with(access, taken) for value, access in outputs}
        return True

    def _is_alike(self, node: Node, spec: OpSpec, space: Space, name: str | None, at: tuple[int, int]) -> bool:
        """Whether a call treats the places of one dim of an operand alike."""
        if node.op == "slice.Tensor":
            return name is not None and node.call.dim() != at[1]
        if name is None or spec.local is not None:
            return False
        is_whole = name in space.notation.whole and node.op not in _TAKEN_WHOLE
        return not is_whole and all(access.addresses != name for access in space.notation.operands)

    def _sized(self, value: Value) -> Dims:
        return frozenset(dim for dim, size in enumerate(value.type.shape) if size == self._num_vertices)


def _leading(dim: object, space: Space) -> str | None:
    """The index that a dim is made of first; None of a window, and of a dim that has none."""
    names = dim.names if isinstance(dim, Factors) else ()
    return next((name for name in names if space.sizes[name] != 1), next(iter(names), None))


def _with(access: Access, names: set[str]) -> Dims:
    return frozenset(i for i, dim in enumerate(access.dims) if isinstance(dim, Factors) and names & set(dim.names))
