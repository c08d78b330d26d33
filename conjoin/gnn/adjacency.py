"""A graph of vertices as data: those that each one aggregates over, in compressed rows, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.errors import GraphError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Indices = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Adjacency:
    """Row v is `indices[indptr[v]:indptr[v + 1]]`: the vertices that v aggregates over, ascending; doubles are kept.

    >>> Adjacency(np.array([0, 2, 2]), np.array([0, 1])).num_vertices
    2
    """

    indptr: Ints
    indices: Indices
    weights: NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        _check_rows(self.indptr, self.indices)
        _check_indices(self.indptr, self.indices)
        if self.weights is not None:
            _check_weights(self.weights, len(self.indices))

    @property
    def num_vertices(self) -> int:
        """How many vertices there are, with those that no edge touches."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """How many edges there are, doubles counted."""
        return len(self.indices)

    def targets(self) -> Ints:
        """The row of each edge."""
        return np.repeat(np.arange(self.num_vertices), np.diff(self.indptr))


def from_edges(
    num_vertices: int, sources: Ints, targets: Ints, weights: NDArray[np.floating] | None = None
) -> Adjacency:
    """Return the graph in which each target aggregates over its sources; edges may come in any order.

    >>> from_edges(3, np.array([2, 0]), np.array([1, 1])).indices.tolist()
    [0, 2]
    """
    if sources.ndim != 1 or sources.shape != targets.shape:
        raise GraphError(
            f"A graph was asked for of {sources.size} sources and {targets.size} targets. "
            "Every edge has one of each. Give two arrays of one length, in one dim."
        )
    for vertices in (sources, targets):
        _check_range(vertices, num_vertices)
    _check_keys(num_vertices)
    keys = targets.astype(np.int64) * num_vertices + sources
    if weights is None:
        keys.sort()
    else:
        _check_weights(weights, len(sources))
        order = np.argsort(keys, kind="stable")
        keys, weights = keys[order], weights[order]
    indptr = np.searchsorted(keys, np.arange(num_vertices + 1) * num_vertices)
    return Adjacency(indptr, narrow(keys % num_vertices, num_vertices), weights)


def transposed(adjacency: Adjacency) -> Adjacency:
    """Return the graph with every edge turned around: what a vertex's gradient is added up from."""
    sources = adjacency.indices.astype(np.int64)
    return from_edges(adjacency.num_vertices, adjacency.targets(), sources, adjacency.weights)


def reordered(adjacency: Adjacency, order: Ints) -> Adjacency:
    """Return the graph with vertex `order[i]` as vertex i: `order` is a permutation."""
    places = places_of(order, adjacency.num_vertices)
    return from_edges(adjacency.num_vertices, places[adjacency.indices], places[adjacency.targets()], adjacency.weights)


def places_of(order: Ints, num_vertices: int) -> Ints:
    """Return where each vertex comes to stand in an order, which must name each vertex once."""
    places = np.full(num_vertices, -1, np.int64)
    if len(order) == num_vertices and (not len(order) or (order.min() >= 0 and order.max() < num_vertices)):
        places[order] = np.arange(num_vertices)
    if (places < 0).any():
        raise GraphError(
            f"An order of {num_vertices} vertices was asked for with {len(order)} entries. It does not name every "
            f"vertex once: {int((places < 0).sum())} have no place. Give a permutation of 0 to {num_vertices - 1}."
        )
    return places


def narrow(vertices: Ints, num_vertices: int) -> Indices:
    """Numbers of vertices in as few bytes as they need."""
    if num_vertices < 2**31:
        return vertices.astype(np.int32, copy=False)
    return vertices


def _check_rows(indptr: Ints, indices: Indices) -> None:
    if indptr.ndim != 1 or indptr.dtype != np.int64 or indices.ndim != 1 or indices.dtype not in (np.int32, np.int64):
        raise GraphError(
            f"A graph was asked for with indptr {indptr.dtype}{list(indptr.shape)} and indices "
            f"{indices.dtype}{list(indices.shape)}. Rows begin at int64 numbers and list int32 or int64 vertices, both "
            "in one dim. Convert them with astype."
        )
    if indptr.size < 2:
        raise GraphError(
            f"A graph was asked for with {max(len(indptr) - 1, 0)} vertices. Nothing can be learned of none. "
            "Give an indptr of at least two entries."
        )
    falls = np.flatnonzero(np.diff(indptr) < 0)
    if indptr[0] != 0 or indptr[-1] != len(indices) or len(falls):
        at = f"falls after row {falls[0]}" if len(falls) else f"goes from {indptr[0]} to {indptr[-1]}"
        raise GraphError(
            f"A graph was asked for whose rows are not rows: indptr {at}. It must rise from 0 to the number of edges, "
            f"{len(indices)}. Make it of the counts of each row, added up."
        )


def _check_indices(indptr: Ints, indices: Indices) -> None:
    num_vertices = len(indptr) - 1
    _check_range(indices, num_vertices)
    falls = np.flatnonzero(indices[1:] < indices[:-1]) + 1
    inside = np.setdiff1d(falls, indptr, assume_unique=False)
    if len(inside):
        row = int(np.searchsorted(indptr, inside[0], side="right")) - 1
        raise GraphError(
            f"A graph was asked for whose row {row} is not sorted: vertex {indices[inside[0]]} follows "
            f"{indices[inside[0] - 1]}. Rows list vertices in ascending order, so that runs of them can be counted. "
            "Build it with from_edges, which sorts."
        )


def _check_range(vertices: Indices, num_vertices: int) -> None:
    if not len(vertices):
        return
    low, high = int(vertices.min()), int(vertices.max())
    if low < 0 or high >= num_vertices:
        where = int(np.argmax(vertices < 0)) if low < 0 else int(vertices.argmax())
        raise GraphError(
            f"A graph of {num_vertices} vertices was asked for, and entry {where} names vertex "
            f"{low if low < 0 else high}. Vertices are 0 to {num_vertices - 1}. Correct the edge, or say how many "
            "vertices there are."
        )


def _check_weights(weights: NDArray[np.floating], num_edges: int) -> None:
    if weights.shape != (num_edges,) or not np.issubdtype(weights.dtype, np.floating):
        raise GraphError(
            f"A graph was asked for with weights {weights.dtype}{list(weights.shape)} for {num_edges} edges. Each edge "
            "has one floating-point weight. Give one array of that length."
        )
    bad = np.flatnonzero(~np.isfinite(weights))
    if len(bad):
        raise GraphError(
            f"A graph was asked for with weight {weights[bad[0]]} at edge {bad[0]}; {len(bad)} are like it. Sums over "
            "such edges are no numbers. Remove these edges, or give them a finite weight."
        )


def _check_keys(num_vertices: int) -> None:
    if num_vertices < 1 or num_vertices >= 2**31:
        raise GraphError(
            f"A graph was asked for with {num_vertices} vertices. Edges are sorted by one number for each pair, so "
            f"there may be 1 to {2**31 - 1}. Give the rows themselves (indptr and sorted indices)."
        )
