"""What a range of vertices costs, in features that are added up once: then any range is looked up, not counted.

ROC (section 4.4.1, Table 4.2) has five features of a vertex: itself, its neighbours, their runs of consecutive numbers,
and memory accesses to load the runs and their activations. Sums of them over a range are differences of prefix sums.

None sees the halo: rows of other parts that a range reads, each once. It is no sum over vertices, but a count of pairs.
With every vertex its own neighbour, let a source be read by rows r1 < r2 < …; each is an entry (row, previous row), the
first one's previous row being -1. Range [a, b) reads as many sources as it has entries with a previous row before a:

    halo(a, b) = #{row < b, previous < a} − #{row < a} − (b − a)

and a table of these counts at points of a grid, `Halos`, answers for any range: exact there, interpolated between.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from conjoin.gnn.adjacency import Adjacency, Floats, Ints

WARP = 32
"""Threads that load together: ROC's WS."""
GRID = 1024
"""Points at which halos are counted: 8 MiB of counts."""
SAMPLED_EDGES = 1 << 24
"""Of larger graphs halos are counted for as many edges: those of sources drawn evenly."""
NAMES = ("part", "vertices", "edges", "runs", "run loads", "activation loads", "halo rows")
"""Features of a range, in the order in which they stand: `part` is 1 for each, what starting to work on it costs."""


@dataclass(frozen=True, slots=True, eq=False)
class Halos:
    """How many rows of others a range of vertices reads, from counts on a grid."""

    points: Ints
    counts: Floats
    """`counts[i, j]`: entries with previous row before point i and row before point j."""
    entries: Floats
    """Before each point."""
    owned: Floats
    """Vertices before each point, as the entries count them."""

    def rows(self, first: int, last: Ints) -> Floats:
        """Rows that [first, last) reads of others, for each of several ends."""
        cell = min(int(np.searchsorted(self.points, first, side="right")) - 1, len(self.points) - 2)
        return np.asarray(np.interp(last, self.points[cell:], self.rows_to_points(first, cell)))

    def rows_to_points(self, first: int, cell: int) -> Floats:
        """The same for all ends on the grid, from the point before `first` on, which is number `cell`."""
        into = (first - self.points[cell]) / (self.points[cell + 1] - self.points[cell])
        left = (1 - into) * self.counts[cell, cell:] + into * self.counts[cell + 1, cell:]
        no_halo = self.entries - self.owned
        before = (1 - into) * no_halo[cell] + into * no_halo[cell + 1]
        return np.asarray(np.maximum(left - before - self.owned[cell:], 0))


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Features of the vertices of one graph, added up; `widths` are those of the activations that each layer loads."""

    sums: Floats
    """`sums[v]`: vertices, edges, runs and run loads of the vertices before v."""
    activation_loads: tuple[Floats, ...]
    """The same for each layer's activation loads."""
    widths: tuple[int, ...]
    halos: Halos

    @property
    def num_vertices(self) -> int:
        """How many vertices the graph has."""
        return len(self.sums) - 1

    def of_range(self, first: int, last: Ints, layer: int) -> Floats:
        """Return the features of [first, last), a row for each of several ends, as one layer sees them."""
        last = np.asarray(last, np.int64)
        loads = self.activation_loads[layer]
        sums = self.sums[last] - self.sums[first]
        return np.column_stack([np.ones(len(last)), sums, loads[last] - loads[first], self.halos.rows(first, last)])

    def of_parts(self, cuts: Ints, layer: int) -> Floats:
        """Return the features of each part, a row a part."""
        ranges = zip(cuts[:-1].tolist(), cuts[1:], strict=True)
        return np.concatenate([self.of_range(first, last[None], layer) for first, last in ranges])


def vertex_features(adjacency: Adjacency, widths: tuple[int, ...], seed: int = 0) -> Features:
    """Return the features of a graph's vertices, for layers that aggregate rows of these widths.

    >>> line = Adjacency(np.array([0, 1, 3, 4]), np.array([1, 0, 2, 1]))
    >>> dict(zip(NAMES, vertex_features(line, (64,)).of_range(1, np.array([2]), 0)[0].tolist()))
    {'part': 1.0, 'vertices': 1.0, 'edges': 2.0, 'runs': 2.0,
     'run loads': 2.0, 'activation loads': 4.0, 'halo rows': 2.0}
    """
    size, indices = adjacency.num_vertices, adjacency.indices
    breaks = np.ones(len(indices), bool)
    step = indices[1:] - indices[:-1]
    breaks[1:] = (step != 0) & (step != 1)
    filled = adjacency.indptr[:-1][np.diff(adjacency.indptr) > 0]
    breaks[filled] = True
    starts = np.flatnonzero(breaks)
    lengths = np.diff(np.r_[starts, len(indices)])
    runs_before = np.searchsorted(starts, adjacency.indptr)
    loads = [np.r_[0.0, np.cumsum(-(-lengths * width // WARP))][runs_before] for width in (1, *widths)]
    columns = [np.arange(size + 1), adjacency.indptr, runs_before, loads[0]]
    return Features(np.column_stack(columns).astype(np.float64), tuple(loads[1:]), widths, count_halos(adjacency, seed))


def count_halos(adjacency: Adjacency, seed: int = 0) -> Halos:
    """Return how many rows of others ranges of vertices read, on a grid whose cells have about as many edges each."""
    size = adjacency.num_vertices
    work = adjacency.indptr + np.arange(size + 1)
    points = np.searchsorted(work, np.linspace(0, work[-1], GRID + 1))
    points = np.unique(np.r_[0, points, size]) if size > GRID else np.arange(size + 1)
    drawn = _drawn(adjacency, seed)
    owned = np.r_[0, np.cumsum(drawn)][points]
    entries = _entries_before(adjacency, drawn)[points] + owned
    side = len(points)
    table = np.zeros((side, side))
    last_cell = np.zeros(size, np.int64)  # one more than the cell in which a source was last read; none yet
    for cell, (first, last) in enumerate(pairwise(points.tolist()), start=1):
        read = np.r_[adjacency.indices[adjacency.indptr[first] : adjacency.indptr[last]], np.arange(first, last)]
        read = np.unique(read[drawn[read]])
        table[:, cell] = np.bincount(last_cell[read], minlength=side)
        table[cell, cell] += entries[cell] - entries[cell - 1] - len(read)
        last_cell[read] = cell
    scale = size / int(drawn.sum())
    counts = table.cumsum(axis=0).cumsum(axis=1) * scale
    return Halos(points, counts, entries * scale, owned * scale)


def _entries_before(adjacency: Adjacency, drawn: NDArray[np.bool_]) -> Ints:
    """How many pairs of a row and another vertex that it reads stand before each row: doubled edges are one."""
    fresh = drawn[adjacency.indices]
    repeated = adjacency.indices[1:] == adjacency.indices[:-1]
    starts = adjacency.indptr[1:-1]
    repeated[starts[(starts > 0) & (starts < adjacency.num_edges)] - 1] = False
    fresh[1:] &= ~repeated
    fresh &= adjacency.indices != adjacency.targets()
    return np.asarray(np.r_[0, np.cumsum(fresh)][adjacency.indptr])


def _drawn(adjacency: Adjacency, seed: int) -> NDArray[np.bool_]:
    """The sources that are looked at: all, or some where there are many edges."""
    if adjacency.num_edges <= SAMPLED_EDGES:
        return np.ones(adjacency.num_vertices, bool)
    drawn = np.random.default_rng(seed).random(adjacency.num_vertices) < SAMPLED_EDGES / adjacency.num_edges
    drawn[0] = True
    return drawn
