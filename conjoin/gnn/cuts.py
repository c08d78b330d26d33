"""Cuts of a vertex order into parts of equal load: ROC's partitioning (section 4.4.2) for loads that are no sums.

The load of a range grows with its end. For a bound on the load the parts are found from the left, each as long as it
can be (`reach`: one look at the grid of the halos, then a binary search among the vertices of a cell), and the bound
itself is found by bisection. So the greatest load of a part is the least there is, in O(P log V) for each bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conjoin.errors import GraphError
from conjoin.gnn.adjacency import Adjacency, Floats, Ints
from conjoin.gnn.features import Features, Halos

TOLERANCE = 1e-4
"""Bounds are not told apart below this share: measured times of one part vary by more than a hundred times that."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What a range of vertices takes: features of each layer, weighted, in whatever unit the weights have."""

    features: Features
    weights: Floats
    """A row for each layer, a column for each of the features' names."""

    def of_range(self, first: int, last: Ints) -> Floats:
        """Return the load of [first, last) for each of several ends."""
        layers = range(len(self.weights))
        return np.asarray(sum(self.features.of_range(first, last, layer) @ self.weights[layer] for layer in layers))

    def of_parts(self, cuts: Ints) -> Floats:
        """Return the load of each part."""
        ranges = zip(cuts[:-1].tolist(), cuts[1:], strict=True)
        return np.concatenate([self.of_range(first, last[None]) for first, last in ranges])


def equal_vertices(num_vertices: int, num_parts: int) -> Ints:
    """Return cuts into parts with as many vertices each, give or take one: NeuGraph's.

    >>> equal_vertices(7, 3).tolist()
    [0, 3, 5, 7]
    """
    _check_parts(num_vertices, num_parts)
    return -(-np.arange(num_parts + 1) * num_vertices // num_parts)


def equal_edges(adjacency: Adjacency, num_parts: int) -> Ints:
    """Return cuts into parts with about as many edges each."""
    _check_parts(adjacency.num_vertices, num_parts)
    wanted = np.arange(num_parts + 1) * (adjacency.num_edges / num_parts)
    after = np.searchsorted(adjacency.indptr, wanted).clip(0, adjacency.num_vertices)
    before = np.maximum(after - 1, 0)
    nearer = np.abs(adjacency.indptr[before] - wanted) < np.abs(adjacency.indptr[after] - wanted)
    return _nowhere_empty(np.where(nearer, before, after), adjacency.num_vertices)


def balanced_cuts(load: Load, num_parts: int) -> Ints:
    """Return the cuts whose greatest load of a part is the least, to within a ten-thousandth."""
    size = load.features.num_vertices
    _check_parts(size, num_parts)
    grid = _GridLoad.of(load)
    low, high = 0.0, float(load.of_range(0, np.array([size]))[0])
    best, mean = np.full(num_parts + 1, size), high / num_parts
    if (cuts := grid.filled(1.5 * mean, num_parts))[-1] == size:
        low, high, best = mean / 2, 1.5 * mean, cuts
    while high - low > TOLERANCE * high:
        bound = (low + high) / 2
        cuts = grid.filled(bound, num_parts)
        if cuts[-1] == size:
            best, high = cuts, bound
        else:
            low = bound
    return _nowhere_empty(best, size)


@dataclass(frozen=True, slots=True, eq=False)
class _GridLoad:
    """A load at the points of the halos' grid, where a part's end is looked for first."""

    halos: Halos
    sums: tuple[tuple[Floats, Floats], ...]
    """Sums of features and their weights: what is added up over vertices."""
    at_points: Floats
    """That, of the vertices before each point."""
    halo: float
    """The load of a halo row."""
    start: float
    """The load of a part of nothing."""

    @classmethod
    def of(cls, load: Load) -> _GridLoad:
        features, weights = load.features, load.weights
        halos = features.halos
        sums = [(features.sums, weights[:, 1:5].sum(axis=0))]
        sums += [(loads[:, None], row[5:6]) for loads, row in zip(features.activation_loads, weights, strict=True)]
        at_points = np.asarray(sum(values[halos.points] @ share for values, share in sums))
        halo, start = float(weights[:, 6].sum()), float(weights[:, 0].sum())
        return cls(halos, tuple(sums), at_points, halo, start)

    def filled(self, bound: float, num_parts: int) -> Ints:
        """Cuts into parts each as long as the bound lets it be; the last cut is the end where the parts reach it."""
        cuts = [0]
        for _ in range(num_parts):
            cuts.append(self.reach(cuts[-1], bound))
        return np.array(cuts)

    def reach(self, first: int, bound: float) -> int:
        """The last end to which [first, end) stays within the bound: the point before it, then the vertex."""
        points = self.halos.points
        if first == points[-1]:
            return first
        cell = int(np.searchsorted(points, first, side="right")) - 1
        halos = self.halos.rows_to_points(first, cell)
        spent = sum(float(values[first] @ share) for values, share in self.sums) - self.start
        loads = self.at_points[cell:] - spent + self.halo * halos
        within = int(np.searchsorted(np.maximum.accumulate(loads[1:]), bound, side="right"))
        if within == len(loads) - 1:
            return int(points[-1])
        low, high = int(points[cell + within]), int(points[cell + within + 1])
        inside = np.asarray(sum(values[low : high + 1] @ share for values, share in self.sums)) - spent
        inside += self.halo * np.linspace(halos[within], halos[within + 1], high - low + 1)
        reached = low + int(np.searchsorted(np.maximum.accumulate(inside), bound, side="right")) - 1
        return max(reached, first)


def _nowhere_empty(cuts: Ints, size: int) -> Ints:
    """The cuts, moved so that each part has a vertex."""
    steps = np.arange(len(cuts))
    cuts = np.maximum.accumulate(cuts - steps) + steps
    cuts = np.minimum(cuts, size - steps[::-1])
    cuts[0], cuts[-1] = 0, size
    return cuts


def _check_parts(num_vertices: int, num_parts: int) -> None:
    if not 1 <= num_parts <= num_vertices:
        raise GraphError(
            f"{num_parts} parts of a graph were asked for. It has {num_vertices} vertices, and each part has at least "
            f"one. Ask for 1 to {num_vertices} parts."
        )
