"""Which products of a program go in chunks with the collectives next to them.

What a product makes is summed up with it where everyone reads the sum, in one layout, and the first of them stands in
the same segment, or in none as the product does: what is sent once must not be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence

from conjoin.comm.chunks import Chunking, chunking_of, is_product
from conjoin.ir import Graph, Node, Segment, Value, operators_of, origin, place
from conjoin.machine import Mesh
from conjoin.ops import Layout

Readers = list[tuple[Layout, Node | None]]
"""In which layouts a value is read, and by whom, in order; results of the graph are read by nobody."""


class ChunkPlaces:
    """Tells of every product how it goes in chunks."""

    def __init__(self, graph: Graph, mesh: Mesh, chunks: int, segments: Sequence[Segment] = ()) -> None:
        self._mesh, self._chunks = mesh, chunks
        operators = operators_of(graph) if chunks > 1 else ()
        self._segments = {operators[i]: s for s in segments for i in range(s[0], s[1] + 1) if operators}
        whole = {operators[i] for segment in segments for i in (segment[1], *segment.kept) if operators}
        """What ends a segment, or is kept of it, does not run again as a whole."""
        self._candidates = frozenset(operators) - whole
        self._readers: dict[Value, Readers] = {}
        reads = [(value, node) for node in operators for value in node.inputs]
        results = [value for value in (*graph.outputs, *(v for _, v in graph.updates)) if isinstance(value, Value)]
        for value, reader in (*reads, *((value, None) for value in results)):
            self._readers.setdefault(origin(value), []).append((value.type.layout, reader))

    def find(self, node: Node, own: Layout | None) -> tuple[Chunking, Layout | None] | None:
        """How a product goes in chunks whose rows come from their own layout (None: they are there), and into which
        layout what it makes goes with it; None where it goes at once."""
        if node not in self._candidates or not is_product(node):
            return None
        placed, target = place(node, self._mesh), self._target(node)
        if target is not None and chunking_of(node, placed, self._mesh, self._chunks, None, target) is None:
            target = None
        found = chunking_of(node, placed, self._mesh, self._chunks, own, target)
        return None if found is None else (found, target if found.output is not None else None)

    def _target(self, node: Node) -> Layout | None:
        """The only layout that what a node makes is read in, where it is not that in which it is made."""
        readers = self._readers.get(Value(node), []) if len(node.types) == 1 else []
        layouts = {layout for layout, _ in readers}
        if len(layouts) != 1 or layouts == {node.types[0].layout} or any(reader is None for _, reader in readers):
            return None
        first = readers[0][1]
        assert first is not None
        return layouts.pop() if self._segments.get(first) == self._segments.get(node) else None
