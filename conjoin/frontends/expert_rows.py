"""Rows that a model sorts by their experts, brought back into the order they came in.

Libraries multiply each expert's rows at once: they sort the rows by expert, multiply group by group, and bring the rows
back. A sort takes all rows whole, so nothing of it could be split. But all that happens in between happens to each row
by itself: for a value v = u[order] "in the order of experts" there is its twin u, made by the same operators,

    x[order // c], w[order], sorted experts   ->   x (each row read c times), w, experts
    grouped_mm(v, weight, ends of experts)    ->   conjoin::expert_linear(u, weight, experts)
    f(v, ...), row by row                     ->   f(u, ...)
    v[inverse of order]                       ->   u

A product that something else than rows is made of stays as it was, opaque. Two products with an activation between
them, which the experts of most models are, become one `conjoin::expert_network`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from conjoin.ir import Graph, Node, Rewriting, Value, drop_unused, is_random
from conjoin.ops import (
    CAST,
    EXPERT_LINEAR,
    EXPERT_NETWORK,
    Copies,
    Factors,
    ShardingRule,
    Split,
    map_tensors,
    sharding_rules,
    space_of,
)

_GROUPED = ("transformers::grouped_mm_fallback", "_grouped_mm")
"""A product for each group of rows, which end at offsets."""
_SORTS = ("sort", "sort.stable")
_FLOORS = ("floor_divide", "div.Tensor_mode", "div.Scalar_mode", "floor_divide.Scalar")


def in_their_own_order(graph: Graph) -> Graph:
    """The graph with the rows of experts as they came in; the same graph where it sorts none, or in another way."""
    sorts = {sort for node in graph.nodes if (sort := _sort_of(node)) is not None}
    while sorts:
        found = _Unsorting(graph, sorts).run()
        left = {sort for node in found.nodes if (sort := _sort_of(node)) is not None}
        if not left:
            return _as_networks(found)
        # What was sorted is still read as it was: done in both orders it would be done twice.
        still = {sort for sort in sorts if sort.args in {other.args for other in left}}
        sorts = sorts - still if still else set()
    return graph


def _node(value: Any, *ops: str) -> Node | None:
    """The call that makes a value, where it is one of these."""
    owner = value.owner if isinstance(value, Value) else None
    return owner if isinstance(owner, Node) and owner.op in ops else None


def _sort_of(node: Node) -> Node | None:
    """The sort by experts that the groups of a product come from: their ends add up how often each expert is there."""
    if node.op not in _GROUPED or node.call["bias"] is not None or node.call["out_dtype"] is not None:
        return None
    rows, weight, ends = node.args[:3]
    if len(rows.type.shape) != 2 or len(weight.type.shape) != 3 or ends is None:
        return None
    total = _node(ends, "cumsum")
    counts = _node(total.args[0], "histc") if total is not None else None
    if counts is None:
        return None
    num, call = weight.type.shape[0], counts.call
    if (call["bins"], call["min"], call["max"]) != (num, 0, num - 1):
        return None
    counted = counts.args[0]
    while (cast := _node(counted, CAST)) is not None:
        counted = cast.args[0]
    sort = _node(counted, *_SORTS)
    plain = sort is not None and len(sort.types[0].shape) == 1 and not sort.call["descending"] and counted.index == 0
    return sort if plain else None


@dataclass(frozen=True, slots=True)
class _Order:
    """What sorts rows, or (`each` above 1) the row of x that a sorted row is read from, or what brings rows back."""

    sort: Node
    each: int = 1
    is_inverse: bool = False


@dataclass(slots=True)
class _Unsorting:
    """A rewriting that makes the twins of sorted values beside them; who reads no sorted value any more is dropped."""

    graph: Graph
    sorts: set[Node]
    orders: dict[Value, _Order] = field(default_factory=dict)
    twins: dict[Value, tuple[Value, Node]] = field(default_factory=dict)
    """For values in the order of a sort the same rows as they came, and the sort."""
    repeated: dict[Value, int] = field(default_factory=dict)
    """Twins that stand for rows of which each is read so often; only a product reads them as they are."""

    def run(self) -> Graph:
        """The graph, without what nobody reads."""
        work = Rewriting(self.graph)
        for node in self.graph.nodes:
            if not self._is_brought_back(node, work):
                work.keep(node)
                self._note(node, work)
        return drop_unused(_without_empty(drop_unused(work.finish())))

    def _is_brought_back(self, node: Node, work: Rewriting) -> bool:
        read = _read_at(node)
        order = self.orders.get(read[1]) if read is not None else None
        if read is None or order is None or not order.is_inverse or read[0] not in self.twins:
            return False
        twin, sort = self.twins[read[0]]
        if sort is not order.sort or read[0] in self.repeated:
            return False
        work.values[Value(node)] = twin
        return True

    def _note(self, node: Node, work: Rewriting) -> None:
        """Note what a node makes: an order, or sorted rows and their twin."""
        if node in self.sorts:
            self.twins[Value(node)] = work.values[node.args[0]], node
            self.orders[Value(node, 1)] = _Order(node)
        elif (order := self._made_order(node)) is not None:
            self.orders[Value(node)] = order
        elif (read := _read_at(node)) is not None and read[1] in self.orders:
            self._note_rows(node, *read, work)
        elif any(value in self.twins for value in node.inputs):
            self._note_function(node, work)

    def _made_order(self, node: Node) -> _Order | None:
        if node.op in _FLOORS:
            order, each = self.orders.get(node.args[0]), node.args[1]
            rounds = node.op.startswith("floor") or node.call["rounding_mode"] in ("floor", "trunc")
            is_plain = order is not None and order.each == 1 and not order.is_inverse and rounds
            return _Order(order.sort, each) if order is not None and is_plain and type(each) is int else None
        if node.op == "index_put" and node.args[1] and len(node.args[1]) == 1 and not node.call["accumulate"]:
            order = self.orders.get(node.args[1][0])
            numbers = _node(node.args[2], "arange", "arange.start", "arange.start_step")
            counts = numbers is not None and numbers.call["start"] in (None, 0) and numbers.call["step"] in (None, 1)
            whole = node.types[0].shape == node.args[1][0].type.shape == node.args[2].type.shape
            is_plain = order is not None and order == _Order(order.sort)
            return _Order(order.sort, is_inverse=True) if order is not None and is_plain and counts and whole else None
        return None

    def _note_rows(self, node: Node, rows: Value, at: Value, work: Rewriting) -> None:
        """Rows read in an order: their twin is what they are read from."""
        order, num_rows = self.orders[at], at.type.shape[0]
        if order.is_inverse or rows in self.twins or rows.type.shape[0] * order.each != num_rows:
            return
        self.twins[Value(node)] = work.values[rows], order.sort
        if order.each > 1:
            self.repeated[Value(node)] = order.each

    def _note_function(self, node: Node, work: Rewriting) -> None:
        """What a node makes of sorted rows, made of their twins."""
        sorts = {self.twins[value][1] for value in node.inputs if value in self.twins}
        if len(sorts) != 1 or is_random(node.op, node.args):
            return
        (sort,) = sorts
        if _sort_of(node) is sort:
            if node.args[0] in self.twins and node.args[1] not in self.twins:
                experts, weight = self.twins[Value(sort)][0], work.values[node.args[1]]
                rows = self.twins[node.args[0]][0]
                made = work.emit(node, EXPERT_LINEAR, rows, weight, experts, weight.type.shape[0])
                self.twins[Value(node)] = made, sort
            return
        if not _is_row_by_row(node, [value in self.twins for value in node.inputs]):
            return

        def twin(value: Value) -> Value:
            return self._whole_twin(node, value, work) if value in self.twins else work.values[value]

        args = map_tensors(node.op, node.args, twin)
        made = work.builder.add_call(node.op, args, node.types, self.graph.source_of(node), pinned=node.pinned)
        for old, new in zip(node.outputs(), made.outputs(), strict=True):
            self.twins[old] = new, sort

    def _whole_twin(self, node: Node, value: Value, work: Rewriting) -> Value:
        """The twin with a row for every sorted row."""
        twin, each = self.twins[value][0], self.repeated.get(value, 1)
        if each == 1:
            return twin
        num, *rest = twin.type.shape
        spread = work.emit(node, "expand", work.emit(node, "unsqueeze", twin, 1), (num, each, *rest))
        made: Value = work.emit(node, "reshape", spread, (num * each, *rest))
        return made


def _without_empty(graph: Graph) -> Graph:
    """The graph without memory that nobody reads: nothing is drawn for it."""
    work = Rewriting(graph)
    for node in graph.nodes:
        if node.op != "empty_like" or Value(node) in graph.users or Value(node) in graph.outputs:
            work.keep(node)
    return work.finish()


def _read_at(node: Node) -> tuple[Value, Value] | None:
    """What is read along its first dim, and at which rows."""
    if node.op == "index.Tensor" and len(node.args[1]) == 1 and len(node.args[1][0].type.shape) == 1:
        return node.args[0], node.args[1][0]
    return (node.args[0], node.args[2]) if node.op == "index_select" and node.call.dim() == 0 else None


def _is_row_by_row(node: Node, is_sorted: list[bool]) -> bool:
    """Whether a row of all outputs is made of that row of the sorted operands, and of no row of the others."""
    spec = node.spec
    if spec is None:
        return False
    space = space_of(spec, node.call)

    def fits(rule: ShardingRule) -> bool:
        wanted = [Split(0) if one else Copies() for one in is_sorted]
        if rule.index is None or list(rule.operands) != wanted or set(rule.outputs) != {Split(0)}:
            return False
        operands = (access for access, one in zip(space.notation.operands, is_sorted, strict=True) if one)
        return all(access.dims[0] == Factors((rule.index,)) for access in (*operands, *space.notation.outputs))

    return any(map(fits, sharding_rules(spec, node.call)))


_ACTIVATIONS = {("silu",): "silu", ("relu",): "relu", ("gelu", "none"): "gelu", ("gelu", "tanh"): "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class _Network:
    """Two products of the same rows' experts and what is between them."""

    inward: Node
    outward: Node
    activation: str


def _as_networks(graph: Graph) -> Graph:
    """The graph with every two products that have an activation, or a gate, between them as one."""
    found = {network.outward: network for node in graph.nodes if (network := _find_network(graph, node)) is not None}
    if not found:
        return graph
    work = Rewriting(graph)
    for node in graph.nodes:
        if node in found:
            (x, inward, expert, experts), outward = found[node].inward.args, node.args[1]
            x, inward, outward, expert = (work.values[value] for value in (x, inward, outward, expert))
            made = work.emit(node, EXPERT_NETWORK, x, inward, outward, expert, experts, found[node].activation)
            work.values[Value(node)] = made
        else:
            work.keep(node)
    return drop_unused(work.finish())


def _find_network(graph: Graph, node: Node) -> _Network | None:
    if node.op != EXPERT_LINEAR or node.args[0].type.shape[0] != node.args[2].type.shape[0]:
        return None
    between = node.args[0].owner
    for activated, gated in _sides(between):
        activation = _ACTIVATIONS.get(_named(activated))
        inward = _first_layer(activated.args[0], gated) if activation is not None else None
        if inward is None or activation is None or inward.args[2:] != node.args[2:]:
            continue
        inner = {activated, between, *([gated.owner] if gated is not None else ()), inward}
        if all(_read_within(graph, one, inner | {node}) for one in inner):
            return _Network(inward, node, activation)
    return None


def _sides(between: Any) -> Iterator[tuple[Node, Value | None]]:
    """The activation and what it gates, either way round; or the activation alone."""
    if isinstance(between, Node) and between.op == "mul.Tensor":
        for one, other in (between.args, between.args[::-1]):
            if isinstance(one, Value) and isinstance(other, Value) and isinstance(one.owner, Node):
                yield one.owner, other
    elif isinstance(between, Node):
        yield between, None


def _named(node: Node) -> tuple[Any, ...]:
    return node.op, *(argument for argument in node.args[1:] if isinstance(argument, str))


def _first_layer(gate: Value, gated: Value | None) -> Node | None:
    """The product that an activation reads, or of which it reads the first half and what it gates is the second."""
    if gated is None:
        return _node(gate, EXPERT_LINEAR)
    cut = _node(gate, "split.Tensor", "chunk", "split_with_sizes", "split.sizes")
    if cut is None or gated.owner is not cut or (gate.index, gated.index, len(cut.types)) != (0, 1, 2):
        return None
    halves = cut.types[0] == cut.types[1] and cut.call.dim() == 1
    return _node(cut.args[0], EXPERT_LINEAR) if halves else None


def _read_within(graph: Graph, node: Node, inner: set[Node]) -> bool:
    """Whether nobody else reads what a node makes."""
    results = [*graph.outputs, *(value for _, value in graph.updates)]
    return all(value not in results and inner.issuperset(graph.users.get(value, ())) for value in node.outputs())
