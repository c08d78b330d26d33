"""Weights that made the times are found again, collinear features or not, and a graph is cut anew where it pays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import GraphError
from conjoin.gnn import (
    NAMES,
    Adjacency,
    PartitionModel,
    TimeModel,
    balanced_cuts,
    equal_edges,
    equal_vertices,
    moved_rows,
    parse_model,
    propose_cuts,
    vertex_features,
    write_model,
)
from zoo.graphs import Recipe, csr

TRUE = np.array([1e-3, 2e-6, 1e-8, 0, 0, 3e-9, 5e-7])


def graph(kind: str, seed: int = 0) -> Adjacency:
    made = csr(Recipe(kind, 8_000, 120_000, num_communities=9, seed=seed))
    return Adjacency(made.indptr, made.indices)


def seconds_of(features, cuts: np.ndarray, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    layers = range(len(features.widths))
    exact = np.stack([features.of_parts(cuts, layer) @ TRUE for layer in layers])
    return exact * np.exp(noise * np.random.default_rng(seed).standard_normal(exact.shape))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_the_fit_is_the_best_without_negative_weights(seed: int) -> None:
    """The judge is the slope of the sum of squares: none where a weight is used, upwards where it is zero."""
    random = np.random.default_rng(seed)
    features, seconds = random.random((12, len(NAMES))), random.random(12) + 0.1
    features[:, 3] = features[:, 2] * 1.001
    features[:, 5] = 0
    found = TimeModel.empty().observed(features[:7], seconds[:7]).observed(features[7:], seconds[7:]).weights()
    scaled = features / seconds[:, None]
    slope = scaled.T @ (scaled @ found - 1) + 1e-4 * (scaled**2).sum(axis=0) * found
    assert (found >= 0).all() and found[5] == 0
    assert np.abs(slope[found > 0]).max() < 1e-9 and slope.min() > -1e-9


def test_parts_of_another_graph_are_predicted() -> None:
    model = PartitionModel.empty((16, 64))
    for seed, kind in enumerate(("power-law", "planted", "r-mat")):
        features = vertex_features(graph(kind, seed), (16, 64))
        for num_parts in (2, 4, 8):
            cuts = equal_vertices(8_000, num_parts)
            model = model.observed(features, cuts, seconds_of(features, cuts, noise=0.02, seed=seed))
    unseen = vertex_features(graph("planted", 7), (16, 64))
    cuts = equal_vertices(8_000, 5)
    exact = seconds_of(unseen, cuts).sum(axis=0)
    assert model.load(unseen).of_parts(cuts) == pytest.approx(exact, rel=0.05)
    learned, blind = balanced_cuts(model.load(unseen), 5), equal_vertices(8_000, 5)
    assert seconds_of(unseen, learned).sum(axis=0).max() <= seconds_of(unseen, blind).sum(axis=0).max()


def test_the_cuts_settle_after_a_few_epochs() -> None:
    adjacency = graph("r-mat")
    features = vertex_features(adjacency, (16,))
    cuts, model = equal_edges(adjacency, 4), PartitionModel.empty((16,))
    slowest = []
    for epoch in range(5):
        seconds = seconds_of(features, cuts, noise=0.005, seed=epoch)
        slowest.append(seconds.max())
        model = model.observed(features, cuts, seconds)
        proposed = propose_cuts(model, features, cuts, seconds, epochs_left=100, seconds_per_row=1e-9)
        cuts = proposed.cuts if proposed.pays else cuts
    even = seconds_of(features, cuts)[0]
    assert slowest[-1] < 0.95 * slowest[0] and even.max() / even.mean() < 1.03


def test_a_graph_is_cut_anew_only_where_it_pays() -> None:
    adjacency = graph("r-mat")
    features = vertex_features(adjacency, (16,))
    cuts = equal_vertices(8_000, 4)
    seconds = seconds_of(features, cuts)
    model = PartitionModel.empty((16,)).observed(features, cuts, seconds)
    dear = propose_cuts(model, features, cuts, seconds, epochs_left=1, seconds_per_row=1.0)
    assert not dear.pays and str(dear).startswith("kept: an epoch of")
    cheap = propose_cuts(model, features, cuts, seconds, epochs_left=1000, seconds_per_row=1e-9)
    assert cheap.pays and str(cheap).startswith("cut anew") and cheap.moved_rows == moved_rows(cuts, cheap.cuts)
    after = seconds_of(features, cheap.cuts)
    model = model.observed(features, cheap.cuts, after)
    last = propose_cuts(model, features, cheap.cuts, after, epochs_left=0, seconds_per_row=1e-9)
    assert not last.pays


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=2), st.lists(st.integers(0, 20), min_size=2, max_size=2))
def test_rows_that_move_are_those_with_another_owner(before: list[int], after: list[int]) -> None:
    one, two = (np.array([0, *sorted(inner), 20]) for inner in (before, after))
    owners = [np.searchsorted(cuts, np.arange(20), side="right") - 1 for cuts in (one, two)]
    changed = owners[0] != owners[1]
    busiest = max(max((owners[i][changed] == part).sum() for i in (0, 1)) for part in range(3))
    assert moved_rows(one, two) == busiest


def test_what_was_not_measured_is_not_predicted() -> None:
    features = vertex_features(graph("planted"), (16,))
    with pytest.raises(GraphError, match="has not seen every layer run"):
        PartitionModel.empty((16,)).load(features)
    with pytest.raises(GraphError, match=r"widths \(8,\)"):
        PartitionModel.empty((8,)).load(features)
    cuts = equal_vertices(8_000, 2)
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(GraphError, match="one measurement for each part"):
            PartitionModel.empty((16,)).observed(features, cuts, np.array([[1.0, bad]]))


def test_a_model_is_written_and_read() -> None:
    features = vertex_features(graph("planted"), (16, 8))
    cuts = equal_vertices(8_000, 4)
    model = PartitionModel.empty((16, 8)).observed(features, cuts, seconds_of(features, cuts))
    again = parse_model(write_model(model))
    assert np.array_equal(again.load(features).of_parts(cuts), model.load(features).of_parts(cuts))
    text = write_model(model)
    for bad in ("", "{}", "[]", text[:-5], text.replace("halo rows", "halos"), text.replace("[16, 8]", "[16]")):
        with pytest.raises(GraphError, match="A learned model of parts"):
            parse_model(bad)
