"""How many micro-batches make up a step, what they are of its inputs, and the graph as its caller sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Leaf, LeafKind, Value

WHOLE = " (whole)"
"""What the name of an input ends with that is there as a whole beside its part."""


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How many micro-batches make up a step, and what they are of its inputs."""

    steps: int
    cut: tuple[str, ...]
    """Inputs that are cut along their first dim; the others are the same for all."""
    whole: tuple[tuple[str, str], ...] = ()
    """Inputs of the graph that are others as a whole: name, and name of the other."""


def is_whole(leaf: Leaf) -> bool:
    """Whether it is the whole of an input that is there in parts, too."""
    return leaf.name.endswith(WHOLE)


def calling_graph(graph: Graph, accumulation: Accumulation) -> Graph:
    """The graph as its caller sees it: without inputs that are others as a whole."""
    names = {name for name, _ in accumulation.whole}
    kept = tuple(v for v in graph.inputs if not (isinstance(v, Value) and _name(v) in names))
    children = graph.input_structure.children
    for_loss = replace(children[2], children=children[2].children[: len(children[2].children) - len(names)])
    structure = replace(graph.input_structure, children=(*children[:2], for_loss, *children[3:]))
    leaves = tuple(leaf for leaf in graph.leaves if leaf.kind is not LeafKind.INPUT or leaf.name not in names)
    return replace(graph, inputs=kept, input_structure=structure, leaves=leaves)


def _name(value: Value) -> str:
    return value.owner.name if isinstance(value.owner, Leaf) else ""


def check_accumulation(graph: Graph, accumulation: Accumulation, *, own_statistics: bool = False) -> None:
    """ValueError where a graph does not take micro-batches as stated."""
    inputs: Mapping[str, Leaf] = {leaf.name: leaf for leaf in graph.leaves_of(LeafKind.INPUT)}
    if not 2 <= accumulation.steps <= 2**20:
        raise ValueError(f"a step of {accumulation.steps} micro-batches")
    if (graph.updates and not own_statistics) or graph.loss is None or not graph.training:
        raise ValueError("micro-batches are for training with a loss, without buffers that change")
    whole = dict(accumulation.whole)
    for name in (*accumulation.cut, *whole, *whole.values()):
        if name not in inputs or not inputs[name].type.shape:
            raise ValueError(f"micro-batches of {name[:60]!r}, which is no input with a batch")
    if len(graph.input_structure.children) != 4 or set(whole.values()) - set(accumulation.cut):
        raise ValueError("inputs as a whole that are not cut")
