"""Values that are the same in every step: made of constants alone."""

from __future__ import annotations

from conjoin.ir.builder import is_random
from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Leaf, LeafKind, Node, Value
from conjoin.ir.reshards import is_parallel


def fixed_nodes(graph: Graph) -> frozenset[Node]:
    """The declared calls that read nothing but constants, or what such calls make, and draw nothing.

    Parameters, inputs and buffers are not constants: whoever trains or loads a model changes them.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        reads = (value.owner for value in node.inputs)
        fixed = all(x.kind is LeafKind.CONSTANT if isinstance(x, Leaf) else x in found for x in reads)
        if fixed and node.spec is not None and not is_parallel(node) and not is_random(node.op, node.args):
            found.add(node)
    return frozenset(found)


def kept_between_steps(graph: Graph) -> tuple[tuple[Node, ...], tuple[Value, ...]]:
    """The fixed calls that need to be made only once, in order, and what others read of them.

    What a graph gives out is made in every step, with all it is made of: whoever gets it may write to it.
    """
    fixed, given = fixed_nodes(graph), set[Node]()
    waiting = [value for value in (*graph.outputs, *(value for _, value in graph.updates)) if isinstance(value, Value)]
    while waiting:
        owner = waiting.pop().owner
        if isinstance(owner, Node) and owner in fixed and owner not in given:
            given.add(owner)
            waiting += owner.inputs
    nodes = tuple(node for node in graph.nodes if node in fixed and node not in given)
    inside = frozenset(nodes)
    outputs = (value for node in nodes for value in node.outputs())
    return nodes, tuple(v for v in outputs if any(user not in inside for user in graph.users.get(v, ())))
