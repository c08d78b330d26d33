"""A model as a row of cells, between which it may be cut into stages, and which of them compute the same.

Cells are the blocks of a model with what comes before and after them; where it has few blocks also the narrow places
inside, and where it has none rows of about as many seconds, from one narrow place to the next. Cells with the same
operators on the same shapes, reading each other alike, are of one *kind*: what is worked out for a row of kinds holds
for every such row, and for a longer row of one kind it grows by the same with every cell (`folds.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from conjoin.ir import Graph, Leaf, Node, StageGraph, Value, cut_in_stages, made_anew
from conjoin.ops import map_tensors
from conjoin.search.blocks import block_segments
from conjoin.search.stage_cuts import crossing_bytes, first_uses, open_places

_FEW = 8
"""Cells below which blocks are cut inside, too."""
_WITHOUT_BLOCKS = 8
"""Cells of a model that has no blocks: every row of them is priced by itself."""


@dataclass(frozen=True)
class Cells:
    """The graph of a micro-batch in cells."""

    graph: Graph
    places: tuple[int, ...]
    """The first node of every cell, and one after the last node of all."""

    def __len__(self) -> int:
        return len(self.places) - 1

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """By cell, a number that cells share which compute the same."""
        numbers: dict[Hashable, int] = {}
        names = _Names(self.graph)
        found = [names.of(first, last) for first, last in self._rows()]
        return tuple(numbers.setdefault(name, len(numbers)) for name in found)

    @cached_property
    def crossing(self) -> np.ndarray:
        """Bytes that go into every cell from those before it."""
        return crossing_bytes(self.graph)[list(self.places)]

    @cached_property
    def learning(self) -> np.ndarray:
        """Of how many operators before every cell, and before the end, no earlier one uses their parameters."""
        return np.concatenate([[0.0], np.cumsum(first_uses(self.graph))])[list(self.places)]

    def _rows(self) -> Iterator[tuple[int, int]]:
        yield from zip(self.places[:-1], self.places[1:], strict=True)

    def stages_of(self, bounds: tuple[int, ...]) -> list[int]:
        """The stage of every node, where stages begin with the cells of these numbers."""
        first = [self.places[cell] for cell in bounds]
        return [sum(place <= node for place in first[1:]) for node in range(len(self.graph.nodes))]

    def row(self, begin: int, end: int) -> StageGraph:
        """A row of cells as the stage that it would be."""
        bounds = tuple(dict.fromkeys((0, begin, end)))
        bounds = bounds if bounds[-1] < len(self) else bounds[:-1]
        return cut_in_stages(self.graph, self.stages_of(bounds))[int(begin > 0)]


def find_cells(graph: Graph, seconds: np.ndarray, *, blocks_only: bool = False) -> Cells:
    """The cells of the graph of a micro-batch, whose nodes take these seconds; perhaps no others than its blocks."""
    open_to, crossing = set(open_places(graph)), crossing_bytes(graph)
    anew = made_anew(graph)
    found = set[int]()
    for segment in block_segments(graph):
        for place in (segment[0], segment[1] + 1):
            while place > 1 and graph.nodes[place - 1] in anew:  # what a block reads is made with it
                place -= 1
            found.update({place} & open_to)
    if not found:
        found.update(_even_places(seconds, crossing, open_to))
    elif len(found) < _FEW and not blocks_only:
        narrow = max(crossing[place] for place in found)
        found.update(place for place in _even_places(seconds, crossing, open_to) if crossing[place] <= narrow)
    return Cells(graph, (0, *sorted(found), len(graph.nodes)))


def _even_places(seconds: np.ndarray, crossing: np.ndarray, open_to: set[int]) -> Iterator[int]:
    """The narrowest place in each of some rows of equal seconds."""
    parts = (np.cumsum(seconds) / max(float(seconds.sum()), 1e-30) * _WITHOUT_BLOCKS).astype(int)
    for part in range(_WITHOUT_BLOCKS):
        inside = [place for place in sorted(open_to) if parts[place - 1] == part]
        if inside:
            yield min(inside, key=lambda place: (crossing[place], -place))


class _Names:
    """What cells are called, such that those with one name compute the same."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.anew = graph, made_anew(graph)
        self.reads: dict[Value, int] = {}
        for node in graph.nodes:
            for value in node.inputs:
                self.reads[value] = self.reads.get(value, 0) + 1

    def of(self, first: int, last: int) -> Hashable:
        nodes = self.graph.nodes[first:last]
        inside = {node: i for i, node in enumerate(nodes)}
        others: dict[Value, int] = {}

        def name(value: Value) -> Hashable:
            owner = value.owner
            if isinstance(owner, Node) and owner in inside:
                return "made", inside[owner], tuple(owner.outputs()).index(value)
            number = others.setdefault(value, len(others))
            if isinstance(owner, Leaf):
                return owner.kind, number, value.type, owner.trainable, self.reads[value]
            return "taken", number, value.type, owner in self.anew

        told = []
        for node in nodes:
            args = map_tensors(node.op, node.args, name)
            told.append((node.op, repr(args), node.types, node in self.anew))
        return tuple(told)
