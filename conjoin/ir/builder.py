"""Building a graph step by step: names leaves once, keeps order, and tells equal calls apart where they must be."""

from __future__ import annotations

from collections.abc import Iterable

from conjoin.errors import GraphError
from conjoin.ir.graph import Graph, Result
from conjoin.ir.nodes import Leaf, LeafKind, Node, Source, Value, make_node
from conjoin.ir.structure import LEAF, Structure
from conjoin.ops import OPAQUE, Args, TensorType, find_spec, signature, walk_tensors


def is_random(op: str, args: Args) -> bool:
    """Whether a call draws random numbers: declared so, or tagged so by torch and not switched off by an attribute."""
    spec, known = find_spec(op.removeprefix(OPAQUE)), signature(op)
    if spec is not None and spec.random:
        return True
    names = ("dropout", "dropout_p") if spec is None else (spec.rate,)
    rates = [args[place] for place in map(known.position, names) if place >= 0]
    return known.random and not (rates and all(rate == 0 for rate in rates))


class GraphBuilder:
    """Collects leaves and nodes in order; `finish` gives the immutable graph."""

    def __init__(self) -> None:
        self._leaves: dict[str, Leaf] = {}
        self._nodes: dict[Node, Source | None] = {}

    def add_leaf(self, leaf: Leaf) -> Value:
        """Add a leaf; its kind and name must be new."""
        if str(leaf) in self._leaves:
            raise GraphError(f"The graph has {leaf} twice. Every leaf needs a name of its own. Rename one of them.")
        self._leaves[str(leaf)] = leaf
        return Value(leaf)

    def add_node(self, node: Node, source: Source | None = None) -> Node:
        """Add a node as it is; adding it again changes nothing."""
        self._nodes.setdefault(node, source)
        return node

    def add_call(
        self, op: str, args: Args, types: tuple[TensorType, ...], source: Source | None = None, *, pinned: bool = False
    ) -> Node:
        """Add a call; an equal earlier one is shared only where neither randomness nor gradients can tell."""
        node = make_node(op, args, types, pinned=pinned)
        if node in self._nodes and (is_random(op, args) or _carries_gradient(op, args, types)):
            occurrence = 1
            while (node := make_node(op, args, types, occurrence=occurrence, pinned=pinned)) in self._nodes:
                occurrence += 1
        return self.add_node(node, source)

    def holds(self, node: Node) -> bool:
        """Whether a node was added already."""
        return node in self._nodes

    def leaf(self, reference: str) -> Leaf | None:
        """The leaf of that kind and name, `param:fc.weight`."""
        return self._leaves.get(reference)

    def forget_unread(self, results: Iterable[Result]) -> None:
        """Leave out calls and constants that nothing reads, but for calls that draw numbers: others draw after them."""
        read, waiting = set[Leaf | Node](), [value.owner for value in results if isinstance(value, Value)]
        waiting += [node for node in self._nodes if is_random(node.op, node.args)]
        while waiting:
            owner = waiting.pop()
            if owner not in read:
                read.add(owner)
                waiting += [value.owner for value in owner.inputs] if isinstance(owner, Node) else []
        self._nodes = {node: source for node, source in self._nodes.items() if node in read}
        self._leaves = {
            name: leaf for name, leaf in self._leaves.items() if leaf.kind is not LeafKind.CONSTANT or leaf in read
        }

    def finish(  # noqa: PLR0913 – the parts of a graph besides leaves and nodes, by name
        self,
        name: str,
        *,
        training: bool,
        inputs: tuple[Result, ...],
        outputs: tuple[Result, ...],
        updates: tuple[tuple[str, Value], ...] = (),
        loss: int | None = None,
        input_structure: Structure = LEAF,
        output_structure: Structure = LEAF,
    ) -> Graph:
        """The graph with what was added so far."""
        sources = tuple(self._nodes.values())
        return Graph(
            name, training, tuple(self._leaves.values()), tuple(self._nodes), inputs, outputs, updates, loss,
            input_structure, output_structure, sources if any(sources) else (),
        )  # fmt: skip


def _carries_gradient(op: str, args: Args, types: tuple[TensorType, ...]) -> bool:
    reads: list[TensorType] = [value.type for _, value in walk_tensors(op, args)]
    return any(map(_differentiable, types)) and any(map(_differentiable, reads))


def _differentiable(type: TensorType) -> bool:
    return type.dtype.is_floating_point or type.dtype.is_complex
