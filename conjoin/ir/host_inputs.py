"""Inputs that lie on the host during a step: operators that read them get them block by block, by their rows.

Two kinds of operators can. What makes a row of its output of a row of the input, as a layer on the features of vertices
does, goes over the rows. What adds up along edges goes over vertices, each with the edges that come to it. Views of an
input are made on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from conjoin.ir.builder import is_random
from conjoin.ir.graph import Graph
from conjoin.ir.legality import plain_call
from conjoin.ir.nodes import Leaf, LeafKind, Node, Value
from conjoin.ir.reshards import is_parallel
from conjoin.ops import AGGREGATE, GRAPH_ATTENTION, PARTITION, REPLICATE, Factors, NotationError, notation_of

_OVER_EDGES = (AGGREGATE, GRAPH_ATTENTION)
_EDGES = ("source", "target", "weight")
_LOCAL_RESHARDS = (PARTITION, REPLICATE)
"""Of what all devices have: each reads a part of it, or all."""


@dataclass(frozen=True, slots=True)
class HostReader:
    """An operator that reads inputs on the host, block by block."""

    host: tuple[int, ...]
    """Which of its operands lie there."""
    rows: tuple[int, ...]
    """Which are cut into the same rows; none where blocks are of vertices, with their edges."""

    @property
    def is_by_edges(self) -> bool:
        return not self.rows


def host_readers(graph: Graph, names: Collection[str]) -> dict[Node, HostReader]:
    """Who reads some inputs from the host, and how; ValueError where somebody cannot, or there is no such input."""
    if not names:
        return {}
    inputs = {leaf.name: leaf for leaf in graph.leaves_of(LeafKind.INPUT)}
    for name in names:
        if name not in inputs:
            raise ValueError(f"{name[:60]!r} is to lie on the host during the step, and is no input")
    there = _on_host(graph, [inputs[name] for name in names])
    results = [value for value in (*graph.outputs, *(value for _, value in graph.updates)) if value in there]
    if results:
        raise ValueError(f"{there[results[0]]} is to lie on the host during the step, and comes out of it")
    found: dict[Node, HostReader] = {}
    for node in graph.nodes:
        host = tuple(i for i, value in enumerate(node.inputs) if value in there)
        if not host or Value(node) in there:
            continue
        name = there[node.inputs[host[0]]]
        if is_parallel(node):
            raise ValueError(f"{name} is to lie on the host during the step, and is read in another layout")
        found[node] = _reader(node, host, name)
    return found


def _on_host(graph: Graph, inputs: list[Leaf]) -> dict[Value, str]:
    """The inputs, the views of them, and the part that a device reads; each with the name of the input."""
    there = {Value(leaf): leaf.name for leaf in inputs}
    for node in graph.nodes:
        is_view = node.op in _LOCAL_RESHARDS or (node.spec is not None and node.spec.view)
        if is_view and len(node.inputs) == 1 and node.inputs[0] in there:
            there.update((value, there[node.inputs[0]]) for value in node.outputs())
    return there


def _reader(node: Node, host: tuple[int, ...], name: str) -> HostReader:
    if node.op in _OVER_EDGES:
        return _edge_reader(node, host, name)
    rows = _rows_of(node, host)
    if rows is None:
        raise ValueError(f"{name} is to lie on the host during the step, and {node.op} does not read it row by row")
    return HostReader(host, rows)


def _edge_reader(node: Node, host: tuple[int, ...], name: str) -> HostReader:
    """What goes along edges that all lie on the host, with their weights."""
    call = plain_call(node)
    edges = tuple(i for i, operand in enumerate(call.operand_names) if operand in _EDGES)
    if host != edges:
        raise ValueError(f"{name} is to lie on the host during the step, and not all that is said of its edges does")
    return HostReader(host, ())


def _rows_of(node: Node, host: tuple[int, ...]) -> tuple[int, ...] | None:
    """The operands with the rows of those on the host; None where a row of the output hangs on others, too."""
    spec, call = node.spec, plain_call(node)
    if spec is None or spec.local or spec.follows or spec.reaches or is_random(node.op, node.args) or spec.view:
        return None
    try:
        notation, _ = notation_of(spec, call)
    except NotationError:
        return None
    first = {_first(notation.operands[i].dims) for i in host}
    index = next(iter(first))
    fixed = notation.whole | notation.averaged | notation.greatest
    if len(first) > 1 or index is None or index in fixed or len(notation.outputs) > 1 or len(node.types) > 1:
        return None
    accesses = (*notation.outputs, *notation.operands)
    if any(access.addresses == index for access in accesses) or _first(notation.outputs[0].dims) != index:
        return None
    if any(index in access.indices() and _first(access.dims) != index for access in accesses):
        return None
    if any(index in dim.names for access in accesses for dim in access.dims[1:] if isinstance(dim, Factors)):
        return None
    return tuple(i for i, access in enumerate(notation.operands) if _first(access.dims) == index)


def _first(dims: tuple[object, ...]) -> str | None:
    """The index that the first dim is, where it is one."""
    match dims[:1]:
        case (Factors(names=(name,)),):
            return name
    return None


def streamable_inputs(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The inputs that can lie on the host during a step: those that must go there together, the largest first."""
    found = [names for names in _together(graph) if _is_streamable(graph, names)]
    sizes = {leaf.name: leaf.type.bytes for leaf in graph.leaves_of(LeafKind.INPUT)}
    return tuple(sorted(found, key=lambda names: -sum(map(sizes.__getitem__, names))))


def _is_streamable(graph: Graph, names: tuple[str, ...]) -> bool:
    try:
        return bool(host_readers(graph, names))
    except ValueError:
        return False


def _together(graph: Graph) -> Iterator[tuple[str, ...]]:
    """Inputs one by one, but for those that say something of the same edges."""
    inputs = graph.leaves_of(LeafKind.INPUT)
    there = _on_host(graph, list(inputs))
    group = {leaf.name: {leaf.name} for leaf in inputs}
    for node in graph.nodes:
        if node.op in _OVER_EDGES:
            given = zip(node.call.operand_names, node.inputs, strict=True)
            named = [there[value] for name, value in given if name in _EDGES and value in there]
            joined = set[str]().union(*(group[name] for name in named))
            group.update(dict.fromkeys(joined, joined))
    yield from dict.fromkeys(tuple(sorted(names)) for names in group.values())
