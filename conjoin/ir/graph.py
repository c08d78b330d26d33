"""The graph: leaves and nodes in the order they run, what comes out, and what is written back into buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from conjoin.ir.nodes import Leaf, LeafKind, Node, Source, Value, typed_key
from conjoin.ir.printer import print_graph
from conjoin.ir.rounding import EXACT, Rounding
from conjoin.ir.structure import LEAF, Structure

Scalar = bool | int | float | str | None
Result = Value | Scalar
"""An output of a graph: a tensor, or a plain value the model returned beside its tensors."""


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """A model with its loss as a program over tensors; immutable, and equal to one of that name that runs the same."""

    name: str
    training: bool
    leaves: tuple[Leaf, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[Result, ...]
    """The flattened inputs in the caller's order: the leaf's value, or a plain value that was fixed at capture."""
    outputs: tuple[Result, ...]
    updates: tuple[tuple[str, Value], ...] = ()
    """Buffers (by name) and the values they have after the step."""
    loss: int | None = None
    """Which output is the loss."""
    input_structure: Structure = LEAF
    output_structure: Structure = LEAF
    sources: tuple[Source | None, ...] = field(default=())
    """For every node the user's line it comes from; equal graphs may come from different lines."""
    labels: tuple[int, ...] = field(default=())
    """For every node the number its first output has in the text it was read from, which an editor need not count."""
    rounding: Rounding = EXACT

    def __repr__(self) -> str:
        return f"<Graph {self.name!r} {'train' if self.training else 'eval'}, {len(self.nodes)} nodes>"

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Graph) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        boundary = typed_key((self.inputs, self.outputs))
        rest = repr(self.input_structure), repr(self.output_structure), self.rounding
        return self.name, self.training, self.leaves, self.nodes, boundary, self.updates, self.loss, rest

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled field by field: leaves, then nodes in the order they run, so that none leads into the depth of the
        graph; what was derived from them is derived again."""
        return Graph, tuple(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        """Every rank of a process asks for it, in what it compares with others."""
        return print_graph(self)

    def leaves_of(self, kind: LeafKind) -> tuple[Leaf, ...]:
        """The leaves of one kind, in order."""
        return tuple(leaf for leaf in self.leaves if leaf.kind is kind)

    @cached_property
    def numbers(self) -> Mapping[Value, int]:
        """The number each node output has in the text form."""
        return {value: number for number, value in enumerate(v for node in self.nodes for v in node.outputs())}

    def label_of(self, place: int) -> str:
        """The name under which a reader finds the node at a place: that of its first output, `%3`."""
        return f"%{self.labels[place] if self.labels else self.numbers.get(Value(self.nodes[place]), place)}"

    @cached_property
    def users(self) -> Mapping[Value, tuple[Node, ...]]:
        """The nodes that read each value."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                found.setdefault(value, []).append(node)
        return {value: tuple(nodes) for value, nodes in found.items()}

    def source_of(self, node: Node) -> Source | None:
        """The user's line a node comes from, where known."""
        return self._source_by_node.get(node)

    @cached_property
    def _source_by_node(self) -> Mapping[Node, Source | None]:
        return dict(zip(self.nodes, self.sources, strict=False))
