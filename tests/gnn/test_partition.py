"""Cuts of graphs: features and halos of any range are those that are counted, and the greatest load is the least."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import GraphError
from conjoin.gnn import (
    NAMES,
    Adjacency,
    Load,
    balanced_cuts,
    count_halos,
    equal_edges,
    equal_vertices,
    from_edges,
    summarize,
    vertex_features,
)
from conjoin.gnn import features as features_file
from tests.gnn.random_graphs import adjacencies, partitions
from zoo.graphs import Recipe, csr


def counted(adjacency: Adjacency, first: int, last: int, width: int) -> dict[str, float]:
    """The features of a range, counted one vertex at a time."""
    found = dict.fromkeys(NAMES, 0.0)
    found["part"] = 1.0
    read = set()
    for v in range(first, last):
        row = adjacency.indices[adjacency.indptr[v] : adjacency.indptr[v + 1]].tolist()
        runs: list[int] = []
        for i, u in enumerate(row):
            if i and u - row[i - 1] in (0, 1):
                runs[-1] += 1
            else:
                runs.append(1)
        found["vertices"] += 1
        found["edges"] += len(row)
        found["runs"] += len(runs)
        found["run loads"] += sum(-(-run // 32) for run in runs)
        found["activation loads"] += sum(-(-run * width // 32) for run in runs)
        read |= set(row)
    found["halo rows"] = len(read - set(range(first, last)))
    return found


@settings(max_examples=60, deadline=None)
@given(partitions(), st.integers(1, 100))
def test_features_of_parts_are_those_that_are_counted(case: tuple[Adjacency, np.ndarray], width: int) -> None:
    adjacency, cuts = case
    features = vertex_features(adjacency, (width,))
    for (first, last), row in zip(pairwise(cuts.tolist()), features.of_parts(cuts, 0), strict=True):
        assert dict(zip(NAMES, row.tolist(), strict=True)) == counted(adjacency, first, last, width)


@settings(max_examples=60, deadline=None)
@given(partitions())
def test_a_summary_counts_what_sets_count(case: tuple[Adjacency, np.ndarray]) -> None:
    adjacency, cuts = case
    summary = summarize(adjacency, cuts)
    parts = [set(range(first, last)) for first, last in pairwise(cuts.tolist())]
    read = [set(adjacency.indices[adjacency.indptr[a] : adjacency.indptr[b]].tolist()) for a, b in pairwise(cuts)]
    assert summary.vertices == tuple(map(len, parts)) and sum(summary.edges) == adjacency.num_edges
    assert summary.halo_rows == tuple(len(r - p) for r, p in zip(read, parts, strict=True))
    sent = tuple(sum(len(p & (r - q)) for r, q in zip(read, parts, strict=True)) for p in parts)
    assert summary.sent_rows == sent and sum(sent) == summary.total_halo_rows
    peers = (sum(bool(p & (r - q)) for p in parts) for r, q in zip(read, parts, strict=True))
    assert summary.peers == tuple(peers)
    assert summary.exchanged_bytes(4) == 4 * max(*sent, *summary.halo_rows)


def test_halos_between_points_of_the_grid_and_from_a_sample_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    made = csr(Recipe("planted", 6_000, 90_000, num_communities=12), symmetric=True, shuffled=False)
    adjacency = Adjacency(made.indptr, made.indices)
    monkeypatch.setattr(features_file, "GRID", 64)
    ranges = [(a, b) for a, b in np.random.default_rng(0).integers(6_000, size=(20, 2)) if b - a > 300]
    for sampled, share in ((1 << 24, 0.01), (30_000, 0.2)):
        monkeypatch.setattr(features_file, "SAMPLED_EDGES", sampled)
        halos = count_halos(adjacency)
        assert len(halos.points) < 70
        for first, last in ranges:
            exact = counted(adjacency, first, last, 1)["halo rows"]
            assert halos.rows(first, np.array([last]))[0] == pytest.approx(
                exact,
                rel=share,
                abs=100,  # of a cell's 94 vertices all may be read
            )


def load_of(adjacency: Adjacency, weights: list[float]) -> Load:
    return Load(vertex_features(adjacency, (8,)), np.array([weights]))


@settings(max_examples=40, deadline=None)
@given(adjacencies(max_vertices=12), st.integers(1, 4), st.integers(0, 3))
def test_balanced_cuts_are_the_best_of_all(adjacency: Adjacency, num_parts: int, halo: int) -> None:
    if num_parts > adjacency.num_vertices:
        return
    load = load_of(adjacency, [0, 3.0, 1, 0.5, 0.1, 0.01, halo])  # no halo row is dearer than a vertex: loads only grow
    found = balanced_cuts(load, num_parts)
    assert found[0] == 0 and found[-1] == adjacency.num_vertices and (np.diff(found) >= 1).all()
    inner = combinations(range(1, adjacency.num_vertices), num_parts - 1)
    best = min(load.of_parts(np.array([0, *cuts, adjacency.num_vertices])).max() for cuts in inner)
    assert load.of_parts(found).max() <= best * 1.0002


@settings(max_examples=40, deadline=None)
@given(adjacencies(), st.integers(1, 40))
def test_every_way_to_cut_gives_each_part_a_vertex(adjacency: Adjacency, num_parts: int) -> None:
    size = adjacency.num_vertices
    load = load_of(adjacency, [0, 1, 1, 1, 1, 1, 1])
    ways = (
        lambda: equal_vertices(size, num_parts),
        lambda: equal_edges(adjacency, num_parts),
        lambda: balanced_cuts(load, num_parts),
    )
    for way in ways:
        if num_parts > size:
            with pytest.raises(GraphError, match=f"It has {size} vertices"):
                way()
            continue
        cuts = way()
        assert len(cuts) == num_parts + 1 and cuts[0] == 0 and cuts[-1] == size and (np.diff(cuts) > 0).all()


def test_edges_are_shared_out_evenly_where_no_vertex_has_too_many() -> None:
    made = csr(Recipe("power-law", 8_000, 160_000))
    adjacency = Adjacency(made.indptr, made.indices)
    for num_parts in (2, 7):
        assert summarize(adjacency, equal_edges(adjacency, num_parts)).edge_imbalance < 1.01
        by_load = balanced_cuts(load_of(adjacency, [0, 0, 1, 0, 0, 0, 0]), num_parts)
        assert summarize(adjacency, by_load).edge_imbalance < 1.01


def test_a_halo_that_is_dear_moves_the_cuts() -> None:
    """Half of the vertices read all over the graph, the others none but their neighbours; degrees are the same."""
    size, degree = 4_000, 8
    random = np.random.default_rng(0)
    targets = np.repeat(np.arange(size), degree)
    near = (targets + np.tile(np.arange(degree), size)) % size
    sources = np.where(targets < size // 2, random.integers(size, size=len(targets)), near)
    adjacency = from_edges(size, sources, targets)
    blind = balanced_cuts(load_of(adjacency, [0, 1, 1, 0, 0, 0, 0]), 4)
    seeing = load_of(adjacency, [0, 1, 1, 0, 0, 0, 10])
    assert np.abs(blind - equal_vertices(size, 4)).max() <= 1
    assert seeing.of_parts(balanced_cuts(seeing, 4)).max() < 0.85 * seeing.of_parts(blind).max()
