"""Operators replaced by compositions of others that may be split where they may not: batch norm, losses, softmax."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch

from conjoin.ir.builder import is_random
from conjoin.ir.graph import Graph
from conjoin.ir.memory_order import looks_at_order, orders_looked_at, strides_in
from conjoin.ir.nodes import Node, Value
from conjoin.ir.rewriting import Rewriting
from conjoin.ops import LocalForm, map_tensors, space_of


def can_expand(node: Node) -> bool:
    """Whether an operator is declared with an expansion."""
    return node.spec is not None and node.spec.expansion is not None


def has_parts(node: Node) -> bool:
    """Whether an operator is declared as a composition that may be split along dims which it takes whole."""
    return node.spec is not None and node.spec.by_parts is not None


def expand(graph: Graph, nodes: Collection[Node], *, parts: bool = False) -> Graph:
    """The graph with each of the nodes replaced by its expansion, or taken by parts; nothing is left that nobody reads.

    What compositions make may lie in memory otherwise than what the operator makes. Where a random call would then draw
    for its elements in another order, their results are brought into the operator's.
    """
    return in_same_order(graph, partial(_expanded, graph, nodes, parts)) if nodes else graph


def in_same_order(graph: Graph, made: Callable[[bool], Graph]) -> Graph:
    """What a rewriting makes of a graph: told to keep orders in memory where a random call would otherwise draw for its
    elements in another one."""
    found = made(False)
    if not any(map(looks_at_order, graph.nodes)) or orders_looked_at(graph, False) == orders_looked_at(found, False):
        return found
    return made(True)


def bring_into_order(work: Rewriting, node: Node, value: Value) -> None:
    """Have what stands for a value of a node lie in memory in the order that the value has in the old graph."""
    strides = strides_in(work.graph)[value]
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    if 0 in strides or list(order) == sorted(order):
        work.values[value] = work.emit(node, "clone", work.values[value], torch.contiguous_format)
        return
    turned = work.emit(node, "clone", work.emit(node, "permute", work.values[value], order), torch.contiguous_format)
    work.values[value] = work.emit(node, "permute", turned, tuple(map(order.index, range(len(order)))))


def _expanded(graph: Graph, nodes: Collection[Node], parts: bool, in_order: bool) -> Graph:
    work = Rewriting(graph)
    for node in graph.nodes:
        if node not in nodes:
            work.keep(node)
            continue
        _expand(node, work, parts)
        for value in node.outputs() if in_order else ():
            bring_into_order(work, node, value)
    return drop_unused(work.finish())


def _expand(node: Node, work: Rewriting, parts: bool) -> None:
    """Put the composition where the node stood."""
    spec = node.spec
    composition = None if spec is None else spec.by_parts if parts else spec.expansion
    assert spec is not None and composition is not None, f"{node.op} has no expansion"
    args = map_tensors(node.op, node.args, lambda value: work.values[value])
    form = LocalForm(spec, node.call, space_of(spec, node.call), {}, args, partial(work.emit, node))
    result = composition(form)
    work.values.update(zip(node.outputs(), result if isinstance(result, tuple) else (result,), strict=True))


def drop_unused(graph: Graph) -> Graph:
    """The graph without the nodes that nothing reads, random draws excepted: leaving one out would shift the others."""
    used: set[Node] = set()
    results = [*graph.outputs, *(value for _, value in graph.updates)]
    wanted = {value.owner for value in results if isinstance(value, Value)}
    for node in reversed(graph.nodes):
        if node in wanted or is_random(node.op, node.args):
            used.add(node)
            wanted.update(value.owner for value in node.inputs)
    if len(used) == len(graph.nodes):
        return graph
    kept = [(node, graph.source_of(node)) for node in graph.nodes if node in used]
    sources = tuple(source for _, source in kept)
    return replace(graph, nodes=tuple(node for node, _ in kept), sources=sources if any(sources) else (), labels=())
