"""ROC's Figure 4.8: throughput of training with learned cuts against equal vertices and equal edges.

    python -m benchmarks.roc_fig4_8        # writes results/roc_fig4_8.json

Processes: a GCN's step on 2 to 8 parts, each in a process, of graphs whose hubs stand together, as in data numbered by
age (R-MAT), and after a reordering into communities. The step is what the slowest part takes, in seconds of its CPU.
Learned cuts start from equal edges and are cut anew for at most three epochs, where that pays. Simulated: 3 % of
Reddit on 2 to 16 P100, learned from simulated times with 2 % noise. The paper: up to 1.4 times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.roc_cluster import P100S, layer_seconds, step_seconds, write
from benchmarks.roc_processes import measure
from conjoin.gnn import (
    Adjacency,
    Features,
    PartitionModel,
    community_order,
    equal_edges,
    equal_vertices,
    propose_cuts,
    reordered,
    summarize,
    vertex_features,
)
from zoo.graphs import DATASETS, Recipe, csr

EPOCHS = 3


def graphs(num_vertices: int, num_edges: int) -> dict[str, Adjacency]:
    """Two graphs whose degrees change along the order of their vertices."""
    aged = csr(Recipe("r-mat", num_vertices, num_edges), shuffled=False)
    planted = csr(Recipe("planted", num_vertices, num_edges, num_communities=60, mixing=0.05))
    found = Adjacency(planted.indptr, planted.indices)
    return {
        "R-MAT, numbered by age": Adjacency(aged.indptr, aged.indices),
        "planted, reordered": reordered(found, community_order(found)),
    }


def learned(
    graph: Adjacency, features: Features, num_parts: int, seconds_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, int]:
    """Cuts after a few epochs of learning, and how often the graph was cut anew."""
    cuts, model, times = equal_edges(graph, num_parts), PartitionModel.empty(features.widths), 0
    best, least = cuts, float("inf")
    for epoch in range(EPOCHS):
        seconds = seconds_of(cuts)
        if seconds.sum(axis=0).max() < least:
            best, least = cuts, float(seconds.sum(axis=0).max())
        model = model.observed(features, cuts, seconds)
        proposed = propose_cuts(model, features, cuts, seconds, epochs_left=1000 - epoch, seconds_per_row=1e-6)
        if not proposed.pays:
            break
        print(f"  epoch {epoch}: {proposed}", flush=True)
        cuts, times = proposed.cuts, times + 1
    return best, times


def on_processes(num_vertices: int, num_edges: int) -> list[dict[str, Any]]:
    """Measured: a process a part."""
    widths, rows = (128, 64, 16), []
    for name, graph in graphs(num_vertices, num_edges).items():
        features = vertex_features(graph, (64, 16) * 2)
        for num_parts in (2, 4, 8):
            ways = {"vertices": equal_vertices(graph.num_vertices, num_parts), "edges": equal_edges(graph, num_parts)}
            ways["learned"], times = learned(graph, features, num_parts, partial(measure, graph, widths=widths))
            taken = {way: float("inf") for way in ways}
            for _ in range(2):
                for way, cuts in ways.items():
                    taken[way] = min(taken[way], float(measure(graph, cuts, widths).sum(axis=0).max()))
            rows.append(told("processes", name, num_parts, taken, times))
    return rows


def in_simulation(scale: float) -> list[dict[str, Any]]:
    """Predicted: P100s, Reddit's sizes or a share of them."""
    sizes, rows = DATASETS["reddit"], []
    widths = (sizes.num_features, 256, sizes.num_labels)
    random = np.random.default_rng(0)
    for name, graph in graphs(round(sizes.num_vertices * scale), round(sizes.num_edges * scale)).items():
        features = vertex_features(graph, (256, sizes.num_labels) * 2)

        def noisy(cuts: np.ndarray, graph: Adjacency = graph) -> np.ndarray:
            exact = layer_seconds(summarize(graph, cuts), widths, P100S)
            return np.asarray(exact * np.exp(0.02 * random.standard_normal(exact.shape)))

        for num_parts in (2, 4, 8, 16):
            ways = {"vertices": equal_vertices(graph.num_vertices, num_parts), "edges": equal_edges(graph, num_parts)}
            ways["learned"], times = learned(graph, features, num_parts, noisy)
            taken = {way: step_seconds(summarize(graph, cuts), widths, P100S) for way, cuts in ways.items()}
            rows.append(told("simulated P100", name, num_parts, taken, times))
    return rows


def told(where: str, graph: str, num_parts: int, seconds: dict[str, float], times: int) -> dict[str, Any]:
    """One row of the table."""
    gain = {way: round(seconds[way] / seconds["learned"], 3) for way in ("vertices", "edges")}
    row = {"where": where, "graph": graph, "parts": num_parts, "cut_anew": times}
    row |= {f"{way}_step_seconds": round(value, 5) for way, value in seconds.items()}
    row |= {f"learned_against_{way}": value for way, value in gain.items()}
    print(row, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=4_000_000)
    parser.add_argument("--scale", type=float, default=0.03, help="of Reddit, in simulation")
    asked = parser.parse_args()
    rows = in_simulation(asked.scale)
    write("roc_fig4_8", rows, torch=torch.__version__)
    rows += on_processes(asked.vertices, asked.edges)
    write("roc_fig4_8", rows, torch=torch.__version__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
