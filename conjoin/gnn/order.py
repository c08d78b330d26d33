"""A one-time order of the vertices in which ranges of vertices have few neighbours outside: small halos for any cuts.

`community_order` finds communities of communities (`communities.py`), puts the coarse ones in a row by recursive
spectral bisection, and in each of them sorts vertices by the mean place of their neighbours elsewhere.
`breadth_first_order` is cheap and good for meshes and roads; `metis_order` asks METIS, where pymetis is installed, and
is good for its number of parts alone.
"""

from __future__ import annotations

import numpy as np

from conjoin.errors import GraphError
from conjoin.gnn.adjacency import Adjacency, Floats, Ints
from conjoin.gnn.communities import Level, contracted, find_communities, first_level

COARSE = 1024
"""So many communities are put in a row at once: an eigenvector of a matrix of that size takes less than a second."""


def community_order(adjacency: Adjacency, seed: int = 0) -> Ints:
    """Return an order, `order[i]` the vertex at place i, in which communities stand together."""
    level = first_level(adjacency, seed)
    homes, coarse = _coarsened(level, seed)
    row = _in_a_row(coarse)
    places = np.empty(coarse.size, np.int64)
    places[row] = np.arange(coarse.size)
    return np.lexsort((_pull(level, homes, places, coarse.volumes), places[homes]))


def breadth_first_order(adjacency: Adjacency) -> Ints:
    """Return the vertices by their distance from one far out, a component after another (Cuthill and McKee)."""
    level = first_level(adjacency)
    degrees = np.diff(level.indptr)
    seen = np.zeros(level.size, bool)
    order: list[Ints] = []
    for start in np.argsort(degrees, kind="stable"):
        if seen[start]:
            continue
        front = np.array([start])
        while len(front):
            seen[front] = True
            order.append(front)
            reached = level.indices[_rows(level.indptr, front)]
            reached = reached[~seen[reached]]
            first = np.unique(reached, return_index=True)[1]
            front = reached[np.sort(first)]
    return np.concatenate(order)


def metis_order(adjacency: Adjacency, num_parts: int) -> Ints:
    """Return the vertices part by part, as METIS cuts the graph into parts with about as many edges each."""
    parts = metis_parts(adjacency, num_parts)
    return np.argsort(parts, kind="stable")


def metis_parts(adjacency: Adjacency, num_parts: int) -> Ints:
    """Return the part of each vertex that METIS chooses; edges are the load to balance.

    By bisection again and again: its other way leaves a load of more than eight parts up to 3 % unequal.
    """
    try:
        import pymetis
    except ImportError as error:
        raise GraphError(
            f"A cut into {num_parts} parts by METIS was asked for. Python's pymetis is not installed. "
            "Install it (`pip install pymetis`), or use community_order."
        ) from error
    both = np.unique(_both_ways(adjacency))
    size = adjacency.num_vertices
    indptr, neighbours = np.searchsorted(both, np.arange(size + 1) * size), both % size
    load = np.maximum(np.diff(adjacency.indptr), 1)
    graph = pymetis.CSRAdjacency(indptr, neighbours)
    _, parts = pymetis.part_graph(num_parts, graph, vweights=load.tolist(), recursive=True)
    return np.asarray(parts, np.int64)


def _both_ways(adjacency: Adjacency) -> Ints:
    size = adjacency.num_vertices
    sources, targets = adjacency.indices.astype(np.int64), adjacency.targets()
    apart = sources != targets
    sources, targets = sources[apart], targets[apart]
    return np.concatenate([targets * size + sources, sources * size + targets])


def _coarsened(level: Level, seed: int) -> tuple[Ints, Level]:
    """Communities of communities, until there are few or they stay as they are: of each vertex, and as a graph."""
    homes = np.arange(level.size)
    while level.size > COARSE:
        labels = find_communities(level, seed)
        if labels.max() + 1 > 0.95 * level.size:
            break
        level, homes = contracted(level, labels), labels[homes]
    return homes, level


def _in_a_row(level: Level) -> Ints:
    """The vertices of a coarse graph so that those that are joined stand near each other."""
    if level.size > COARSE:  # too many that nothing joins: the large ones first
        return np.argsort(-level.volumes, kind="stable")
    joined = np.zeros((level.size, level.size))
    rows = np.repeat(np.arange(level.size), np.diff(level.indptr))
    joined[rows, level.indices] = 1.0 if level.weights is None else level.weights
    return _bisected(joined, level.volumes, np.arange(level.size), np.zeros(level.size))


def _bisected(joined: Floats, volumes: Floats, nodes: Ints, lean: Floats) -> Ints:
    """Nodes in a row: sorted by the Fiedler vector of their graph, cut at half its volume, each half in the same way.

    `lean` says which end of the row each node should be near, as the cut before saw it.
    """
    if len(nodes) <= 2:
        return nodes[np.argsort(lean[nodes], kind="stable")]
    vector = _fiedler(joined[np.ix_(nodes, nodes)])
    if vector @ (lean[nodes] - lean[nodes].mean()) < 0:
        vector = -vector
    lean = lean.copy()
    lean[nodes] = vector
    order = np.argsort(vector, kind="stable")
    reached = np.cumsum(volumes[nodes[order]])
    half = int(np.abs(reached - reached[-1] / 2).argmin()) + 1
    half = min(max(half, 1), len(nodes) - 1)
    sides = (nodes[order[:half]], nodes[order[half:]])
    return np.concatenate([_bisected(joined, volumes, side, lean) for side in sides])


def _fiedler(joined: Floats) -> Floats:
    """The second eigenvector of the normalized Laplacian."""
    root = 1 / np.sqrt(np.maximum(joined.sum(axis=1), 1e-9))
    _, vectors = np.linalg.eigh(root[:, None] * joined * root)
    return np.asarray(vectors[:, -2] * root)


def _pull(level: Level, homes: Ints, places: Ints, volumes: Floats) -> Floats:
    """Of each vertex: the mean place of its neighbours in other communities, or its own where it has none."""
    ends = np.cumsum(volumes[np.argsort(places)])
    middle = (ends - volumes[np.argsort(places)] / 2)[places]
    rows = np.repeat(np.arange(level.size), np.diff(level.indptr))
    outside = homes[rows] != homes[level.indices]
    rows, there = rows[outside], middle[homes[level.indices[outside]]]
    count = np.bincount(rows, minlength=level.size)
    total = np.bincount(rows, there, minlength=level.size)
    return (total + middle[homes]) / (count + 1)


def _rows(indptr: Ints, vertices: Ints) -> Ints:
    """Where the edges of some vertices stand, row after row."""
    counts = indptr[vertices + 1] - indptr[vertices]
    starts = np.repeat(indptr[vertices] - np.r_[0, np.cumsum(counts)[:-1]], counts)
    return starts + np.arange(int(counts.sum()))
