"""What a graph computes, as a digest that layouts, reshards, numbers and the order of lines have no part in.

A plan carries the digest of the graph it was made with. An edit of layouts leaves it as it is; an edit of an operator,
of an attribute or of what is read where does not, and would silently train another model.
"""

from __future__ import annotations

import hashlib
from typing import Any

from conjoin.ir.accumulation import Accumulation
from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Leaf, Node, Value
from conjoin.ir.reshards import is_parallel, origin
from conjoin.ir.rounding import EXACT


def computation_digest(graph: Graph, accumulation: Accumulation | None = None) -> str:
    """The digest of what a graph computes, or of a step that is made up of its micro-batches.

    >>> from conjoin.ir import parse_graph
    >>> lines = ['graph "g" eval', "input:x f32[2]", "takes [input:x] in null", "%7: f32[2] = relu(input:x)"]
    >>> computation_digest(parse_graph("\\n".join([*lines, "returns [%7] in null"])))[:12]
    '47709242aeac'
    """
    made: dict[Leaf | Node, str] = {leaf: _of_leaf(leaf) for leaf in graph.leaves}
    for node in graph.nodes:
        if not is_parallel(node):
            made[node] = _of_node(node, made)
    rounding = (str(graph.rounding),) if graph.rounding != EXACT else ()
    results = (_told(graph.outputs, made), _told(graph.updates, made), graph.loss, graph.training, *rounding)
    return _digest((_told(graph.inputs, made), results, accumulation))


def _of_leaf(leaf: Leaf) -> str:
    data = None if leaf.data is None else hashlib.sha256(leaf.data).hexdigest()
    section = () if leaf.section is None else (leaf.section,)
    told = (leaf.kind.value, leaf.name, leaf.aliases, leaf.trainable, str(leaf.type.laid_out(())), data)
    return _digest((*told, *section))


def _of_node(node: Node, made: dict[Leaf | Node, str]) -> str:
    types = [str(type.laid_out(())) for type in node.types]
    return _digest((node.op, _told(node.args, made), types, node.occurrence, node.pinned))


def _told(item: Any, made: dict[Leaf | Node, str]) -> Any:
    if isinstance(item, Value):
        return made[origin(item).owner], origin(item).index
    return [_told(part, made) for part in item] if isinstance(item, tuple | list) else item


def _digest(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()
