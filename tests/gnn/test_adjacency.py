"""Graphs of vertices: edges in any order become rows, and what is no graph is refused with its numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import GraphError
from conjoin.gnn import Adjacency, from_edges, reordered, transposed

EDGES = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=40))
)


def dense(adjacency: Adjacency) -> np.ndarray:
    matrix = np.zeros((adjacency.num_vertices,) * 2)
    weights = np.ones(adjacency.num_edges) if adjacency.weights is None else adjacency.weights
    for v in range(adjacency.num_vertices):
        for e in range(adjacency.indptr[v], adjacency.indptr[v + 1]):
            matrix[v, adjacency.indices[e]] += weights[e]
    return matrix


@settings(deadline=None)
@given(EDGES, st.booleans())
def test_edges_become_rows_and_turn_and_move_as_matrices_do(case: tuple[int, list[tuple[int, int]]], weighted: bool):
    n, edges = case
    sources, targets = np.array(edges, np.int64).reshape(-1, 2).T
    weights = np.arange(1.0, len(edges) + 1) if weighted else None
    made = from_edges(n, sources, targets, weights)
    expected = np.zeros((n, n))
    np.add.at(expected, (targets, sources), 1.0 if weights is None else weights)
    assert np.array_equal(dense(made), expected) and made.num_edges == len(edges)
    assert np.array_equal(dense(transposed(made)), expected.T)
    order = np.random.default_rng(0).permutation(n)
    assert np.array_equal(dense(reordered(made, order)), expected[np.ix_(order, order)])


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("indptr", "indices", "weights", "words"),
    [
        (ints(0, 1), ints(1), None, "names vertex 1. Vertices are 0 to 0"),
        (ints(0, 1), ints(-1), None, "names vertex -1"),
        (ints(0, 2, 2), ints(1, 0), None, "row 0 is not sorted: vertex 0 follows 1"),
        (ints(0, 1, 3), ints(1, 1, 0), None, "row 1 is not sorted"),
        (ints(0), ints(), None, "with 0 vertices"),
        (ints(), ints(), None, "with 0 vertices"),
        (ints(0, 2, 1), ints(0), None, "falls after row 1"),
        (ints(1, 1), ints(0), None, "from 1 to 1"),
        (ints(0, 2), ints(0), None, "from 0 to 2"),
        (ints(0, 1), ints(0), np.array([np.nan]), "weight nan at edge 0"),
        (ints(0, 1), ints(0), np.array([np.inf]), "weight inf"),
        (ints(0, 1), ints(0), np.array([1.0, 2.0]), "for 1 edges"),
        (ints(0, 1), np.array([0.0]), None, "float64"),
        (ints(0, 1).reshape(1, 2), ints(0), None, "one dim"),
    ],
)
def test_what_is_no_graph_is_refused(indptr, indices, weights, words: str) -> None:
    with pytest.raises(GraphError, match="A graph") as told:
        Adjacency(indptr, indices, weights)
    assert words in str(told.value) and str(told.value).count(". ") >= 2


def test_edges_that_are_none_are_refused() -> None:
    with pytest.raises(GraphError, match="names vertex 3"):
        from_edges(3, ints(0), ints(3))
    with pytest.raises(GraphError, match="names vertex -2"):
        from_edges(3, ints(-2), ints(0))
    with pytest.raises(GraphError, match="1 sources and 2 targets"):
        from_edges(3, ints(0), ints(0, 1))
    with pytest.raises(GraphError, match="with 0 vertices"):
        from_edges(0, ints(), ints())


def test_an_order_names_each_vertex_once() -> None:
    graph = from_edges(3, ints(0), ints(1))
    for order in (ints(0, 1), ints(0, 0, 1), ints(0, 1, 3), ints(0, 1, -1)):
        with pytest.raises(GraphError, match="permutation of 0 to 2"):
            reordered(graph, order)
