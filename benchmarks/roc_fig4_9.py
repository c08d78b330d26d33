"""ROC's Figure 4.9: inference on graphs that were never run, cut by what was learned on others.

    python -m benchmarks.roc_fig4_9        # writes results/roc_fig4_9.json

Protein graphs as in PPI, four times as large (9,500 vertices, 270,000 edges), whose hubs stand together. Forward
passes of two layers run on six of them, a process a part; then four others are cut by equal vertices, equal edges and
the learned model before anything is known of them. Latency is what the slowest part takes, in seconds of its CPU. The
paper: up to 1.2 times lower.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.roc_cluster import write
from benchmarks.roc_processes import measure
from conjoin.gnn import (
    Adjacency,
    PartitionModel,
    balanced_cuts,
    equal_edges,
    equal_vertices,
    vertex_features,
)
from zoo.graphs import Recipe, csr

WIDTHS = (256, 64, 64)


def protein(seed: int) -> Adjacency:
    """One graph of the family: its sizes vary by a third."""
    factor = np.random.default_rng(seed).uniform(0.8, 1.2)
    made = csr(Recipe("r-mat", round(9_500 * factor), round(270_000 * factor), seed=seed), shuffled=False)
    return Adjacency(made.indptr, made.indices)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seen", type=int, default=6)
    parser.add_argument("--unseen", type=int, default=4)
    asked = parser.parse_args()
    model = PartitionModel.empty(WIDTHS[1:])
    for seed in range(asked.seen):
        graph = protein(seed)
        features = vertex_features(graph, WIDTHS[1:])
        for num_parts in (2, 4):
            for cuts in (equal_edges(graph, num_parts), equal_vertices(graph.num_vertices, num_parts)):
                seconds = measure(graph, cuts, WIDTHS, backward=False)
                model = model.observed(features, cuts, seconds)
    rows = [told(model, num_parts, range(1000, 1000 + asked.unseen)) for num_parts in (2, 4, 8)]
    weights = [layer.weights().tolist() for layer in model.layers]
    write("roc_fig4_9", rows, torch=torch.__version__, weights=weights)
    return 0


def told(model: PartitionModel, num_parts: int, seeds: range) -> dict[str, Any]:
    """Mean latency on unseen graphs, and how far the prediction of the slowest part was off."""
    totals, off = {"vertices": 0.0, "edges": 0.0, "learned": 0.0}, []
    for seed in seeds:
        graph = protein(seed)
        load = model.load(vertex_features(graph, WIDTHS[1:]))
        ways = {
            "vertices": equal_vertices(graph.num_vertices, num_parts),
            "edges": equal_edges(graph, num_parts),
            "learned": balanced_cuts(load, num_parts),
        }
        taken = dict.fromkeys(ways, np.inf)
        for _ in range(2):
            for way, cuts in ways.items():
                seconds = measure(graph, cuts, WIDTHS, repeats=5, backward=False).sum(axis=0)
                taken[way] = min(taken[way], float(seconds.max()))
        off.append(abs(float(load.of_parts(ways["learned"]).max()) / taken["learned"] - 1))
        totals = {way: totals[way] + taken[way] / len(seeds) for way in totals}
    row: dict[str, Any] = {"parts": num_parts, "unseen_graphs": len(seeds)}
    row |= {f"{way}_seconds": round(value, 5) for way, value in totals.items()}
    row |= {f"learned_against_{way}": round(totals[way] / totals["learned"], 3) for way in ("vertices", "edges")}
    row["prediction_off"] = round(float(np.mean(off)), 3)
    print(row, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
