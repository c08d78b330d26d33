"""A model with few of its equal blocks, which stands for the whole one: what is worked out for it holds there.

The longest row of equal cells is cut down to two of them (`shorten`). A row of cells of the whole model is then one of
the short model and so many cells of a kind more (`Fold.run`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from conjoin.ir import Graph, GraphBuilder, Leaf, LeafKind, Node, Value, make_node
from conjoin.ops import map_tensors
from conjoin.search.stages.cells import Cells

KEPT_CELLS = 2
_WORTH = 8
"""Equal cells in a row above which a model is shortened."""


@dataclass(frozen=True, slots=True)
class Run:
    """A row of cells as a shorter one that is priced, and how much comes on top."""

    row: tuple[int, int]
    more: tuple[tuple[int, int], ...] = ()
    """Cells that come two in a row, and how many more of their kind there are."""


@dataclass(frozen=True)
class Fold:
    """The kinds of all cells of a model, and of those of the model that stands for it."""

    kinds: tuple[int, ...]
    short: tuple[int, ...]

    @cached_property
    def _places(self) -> tuple[list[int], list[int]]:
        """By run of equal cells, where it begins in the model and in the short one."""
        return _starts(self.kinds), _starts(self.short)

    @cached_property
    def _lengths(self) -> tuple[list[int], list[int]]:
        both = (*((*starts, len(kinds)) for starts, kinds in zip(self._places, (self.kinds, self.short), strict=True)),)
        return tuple(list(map(int, np.diff(starts))) for starts in both)  # type: ignore[return-value]

    def cell(self, number: int) -> int:
        """The cell of the short model that stands for one."""
        run = self._run_at(number)
        return self._places[1][run] + min(number - self._places[0][run], self._lengths[1][run] - 1)

    def _run_at(self, number: int) -> int:
        return int(np.searchsorted(self._places[0], number, side="right")) - 1

    def run(self, begin: int, end: int) -> Run:
        """A row, with one of the equal cells that it begins or ends with, and how many more there are.

        >>> fold = Fold((0, 1, 1, 1, 1, 2), (0, 1, 1, 2))
        >>> fold.run(0, 5), fold.run(1, 4), fold.run(3, 6), fold.run(0, 6)
        (Run(row=(0, 2), more=((1, 3),)), Run(row=(1, 2), more=((1, 2),)), Run(row=(2, 4), more=((1, 1),)), \
Run(row=(0, 4), more=((1, 2),)))
        """
        first, last = self._run_at(begin), self._run_at(end - 1)
        starts, short = self._places
        lengths, fewer = self._lengths
        if first == last:
            return Run((short[first], short[first] + 1), ((short[first], end - begin - 1),) if end - begin > 1 else ())
        head, tail = starts[first] + lengths[first] - begin, end - starts[last]
        more = [(short[first], head - 1), (short[last], tail - 1)]
        more += [(short[run], lengths[run] - fewer[run]) for run in range(first + 1, last)]
        row = short[first] + fewer[first] - 1, short[last] + 1
        return Run(row, tuple((cell, times) for cell, times in more if times))


def _starts(kinds: tuple[int, ...]) -> list[int]:
    return [i for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


def stands_for(short: Cells, whole: Cells) -> Fold | None:
    """How the cells of a short model stand for those of the whole; None where their kinds do not follow each other
    alike."""
    one, other = ([(kind, len(list(run))) for kind, run in groupby(cells.kinds)] for cells in (short, whole))
    if len(one) != len(other):
        return None
    same: dict[int, int] = {}
    alike = all(same.setdefault(k, j) == j and few <= many for (j, few), (k, many) in zip(one, other, strict=True))
    return Fold(whole.kinds, short.kinds) if alike else None


def shorten(cells: Cells) -> Graph | None:
    """The model with two of its longest row of equal cells; None where that is short, or what is between is read."""
    runs = [(len(list(run)), kind) for kind, run in groupby(cells.kinds)]
    length = max(length for length, _ in runs)
    if length <= _WORTH:
        return None
    begin = sum(length for length, _ in runs[: [length for length, _ in runs].index(length)])
    graph, places = cells.graph, cells.places
    kept, cut, end = places[begin + KEPT_CELLS], places[begin + length - 1], places[begin + length]
    left_out, last = set(graph.nodes[kept:end]), graph.nodes[cut:end]
    instead = dict(zip(last, graph.nodes[places[begin + KEPT_CELLS - 1] : kept], strict=True))
    builder, values = GraphBuilder(), dict[Value, Value]()
    inner = {v.owner for node in left_out for v in node.inputs if isinstance(v.owner, Leaf)}
    outer = {v.owner for node in graph.nodes if node not in left_out for v in node.inputs}
    for leaf in graph.leaves:
        if leaf not in inner or leaf in outer or leaf.kind is LeafKind.INPUT:
            values[Value(leaf)] = builder.add_leaf(leaf)

    def found(value: Value) -> Value:
        owner = value.owner
        if isinstance(owner, Node) and owner in instead:
            value = list(instead[owner].outputs())[list(owner.outputs()).index(value)]
        return values[value]

    try:
        for node in graph.nodes:
            if node not in left_out:
                args = map_tensors(node.op, node.args, found)
                made = make_node(node.op, args, node.types, occurrence=node.occurrence, pinned=node.pinned)
                builder.add_node(made, graph.source_of(node))
                values.update(zip(node.outputs(), made.outputs(), strict=True))
        short = builder.finish(
            graph.name,
            training=graph.training,
            inputs=tuple(values[v] if isinstance(v, Value) else v for v in graph.inputs),
            outputs=tuple(values[v] if isinstance(v, Value) else v for v in graph.outputs),
            updates=tuple((name, values[value]) for name, value in graph.updates),
            loss=graph.loss,
        )
    except KeyError:  # what is left out is read from further away
        return None
    return replace(
        short, rounding=graph.rounding, input_structure=graph.input_structure, output_structure=graph.output_structure
    )
