"""Time to accuracy on a graph with planted labels: all edges against sampled ones, deep residual against shallow.

    python -m benchmarks.roc_accuracy [--vertices 1200] [--epochs 40] [--ranks 2] [--output FILE]

ROC's Figures 4.6 and 4.7 in small. Vertices are of communities; features say little of which, and neighbours, three in
five of whom are of the same one, say more. `full graph` trains a two-layer GCN on all edges, one step an epoch.
`sampled` trains the same model on batches of vertices, of which each layer sees four neighbours (GraphSAGE's
sampling): more steps an epoch, each of less, and gradients that are not those of the graph. Both are tested on all
edges. `deep residual` is the zoo's with eight layers; `deep plain` has as many without residual connections. The graph
is also trained in parts on several ranks, whose losses are those of one process. Seconds are CPU seconds of training.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conjoin
from conjoin.machine import parse_machine
from conjoin.runtime import Case, to_module, verify_in_process
from conjoin.search import make_plan
from zoo.gnn import DeepGcn, Gcn, GnnConfig, symmetric_weights
from zoo.graphs import make_features

CLASSES, FEATURES, HIDDEN, DEGREE, SEEN = 10, 32, 32, 6, 4
_OF_BEST = 0.98
"""Of the full graph's best accuracy is what has to be reached."""
_BATCHES = 8


def planted_graph(vertices: int) -> tuple[Tensor, Tensor, Tensor]:
    """Edges both ways, features that say little of the label, and labels."""
    random = np.random.default_rng(0)
    labels = random.integers(CLASSES, size=vertices)
    by_label = [np.flatnonzero(labels == label) for label in range(CLASSES)]
    ends = random.integers(vertices, size=vertices * DEGREE // 2)
    near = np.array([random.choice(by_label[labels[end]]) for end in ends])
    others = np.where(random.random(len(ends)) < 0.6, near, random.integers(vertices, size=len(ends)))
    loops = np.arange(vertices)
    edges = np.stack((np.concatenate((ends, others, loops)), np.concatenate((others, ends, loops))))
    features = make_features(labels, FEATURES, signal=0.2)
    return torch.from_numpy(edges), torch.from_numpy(features), torch.from_numpy(labels)


class Data:
    """A graph with what is known of it: a third of the vertices is trained on, the others are tested."""

    def __init__(self, vertices: int) -> None:
        self.edges, self.x, self.labels = planted_graph(vertices)
        self.weight = symmetric_weights(self.edges, vertices)
        self.is_trained = torch.rand(vertices, generator=torch.Generator().manual_seed(1)) < 1 / 3
        self.targets = torch.where(self.is_trained, self.labels, -100)

    @property
    def batch(self) -> tuple[Tensor, ...]:
        return self.x, self.edges, self.weight, self.targets

    def accuracy(self, model: nn.Module) -> float:
        with torch.no_grad():
            right = model(self.x, self.edges, self.weight).argmax(1) == self.labels
        return float(right[~self.is_trained].float().mean())


def sampled(data: Data, random: np.random.Generator) -> Iterator[tuple[Tensor, ...]]:
    """Batches of an epoch: some vertices to train on, edges to these, and edges to those they come from.

    Of every vertex so many edges are drawn, with weights that make their sum on average that of all.
    """
    order = data.edges[1].argsort(stable=True).numpy()
    sources, first = data.edges[0].numpy(), np.append(0, np.bincount(data.edges[1]).cumsum())
    trained = random.permutation(np.flatnonzero(data.is_trained.numpy()))
    for seeds in np.array_split(trained, _BATCHES):
        reached, fresh, drawn = seeds, seeds, []
        for _ in range(2):
            some = np.concatenate([order[random.integers(first[v], first[v + 1], SEEN)] for v in fresh])
            drawn.append(some)
            fresh = np.setdiff1d(sources[some], reached)
            reached = np.concatenate((reached, fresh))
        rows, chosen = torch.from_numpy(reached), torch.from_numpy(np.concatenate(drawn))
        local = torch.zeros_like(data.labels).index_copy(0, rows, torch.arange(len(rows)))
        ends = data.edges[:, chosen]
        weight = data.weight[chosen] * data.edges[1].bincount()[ends[1]] / SEEN
        targets = torch.full((len(rows),), -100)
        targets[: len(seeds)] = data.labels[rows[: len(seeds)]]
        yield data.x[rows], local[ends], weight, targets


class DeepPlain(DeepGcn):
    """The deep model without what goes around its layers."""

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor, weight_E: Tensor) -> Tensor:
        x_VF = F.relu(self.inward(x_VF))
        for layer in self.layers:
            messages = layer(x_VF).index_select(0, edge_index_2E[0]) * weight_E[:, None]
            x_VF = F.relu(torch.zeros_like(x_VF).index_add(0, edge_index_2E[1], messages))
        made: Tensor = self.outward(x_VF)
        return made


def train(model: nn.Module, data: Data, epochs: int, samples: bool) -> list[tuple[float, float, float]]:
    """Of every epoch the seconds until its end, the last loss, and the accuracy on vertices not trained on."""
    step = None if samples else to_module(conjoin.capture(model, data.batch, F.cross_entropy), model)
    optimizer, random = torch.optim.Adam(model.parameters(), lr=1e-2), np.random.default_rng(0)
    curve, seconds = [], 0.0
    for _ in range(epochs):
        start = time.process_time()
        for batch in sampled(data, random) if samples else (data.batch,):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(*batch[:3]), batch[3]) if step is None else step(*batch)
            loss.backward()
            optimizer.step()
        seconds += time.process_time() - start
        curve.append((round(seconds, 4), round(loss.item(), 5), round(data.accuracy(model), 4)))
    return curve


def models() -> dict[str, tuple[nn.Module, bool]]:
    """Every way by name, with whether it is sampled; the same first weights where the model is the same."""

    def made(kind: type[nn.Module], layers: int) -> nn.Module:
        torch.manual_seed(0)
        return kind(GnnConfig(FEATURES, CLASSES, DEGREE, HIDDEN, layers))

    return {
        "full graph": (made(Gcn, 2), False), "sampled": (made(Gcn, 2), True),
        "deep residual": (made(DeepGcn, 8), False), "deep plain": (made(DeepPlain, 8), False),
    }  # fmt: skip


def is_as_one_process(data: Data, ranks: int, steps: int) -> bool:
    """Whether parts on several ranks train as one process does: losses, gradients and weights, in double precision."""
    torch.manual_seed(0)
    model = Gcn(GnnConfig(FEATURES, CLASSES, DEGREE, HIDDEN, 2)).double()
    batch = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in data.batch)
    graph = conjoin.capture(model, batch, F.cross_entropy)
    plan = make_plan(graph, parse_machine(f"local:{ranks}"), "vertex-parallel")
    return verify_in_process(Case(plan, graph, model, batch), steps).passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=1_200)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--sampled-epochs", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, help="Write the figures here, as .json.")
    options = parser.parse_args()
    data, rows = Data(options.vertices), []
    for name, (model, samples) in models().items():
        curve = train(model, data, options.sampled_epochs if samples else options.epochs, samples)
        best = max(accuracy for *_, accuracy in curve)
        rows.append({"way": name, "best_accuracy": best, "seconds": curve[-1][0], "curve": curve})
    wanted = _OF_BEST * rows[0]["best_accuracy"]  # type: ignore[operator]
    for row in rows:
        row["seconds_to_accuracy"] = next((s for s, _, a in row["curve"] if a >= wanted), None)  # type: ignore[attr-defined]
        print(f"{row['way']:<14} best {row['best_accuracy']:.4f}   to {wanted:.4f} in {row['seconds_to_accuracy']} s")
    same = is_as_one_process(data, options.ranks, 3)
    print(f"parts on {options.ranks} ranks train as one process: {same}")
    found: dict[str, Any] = {
        "command": " ".join(("python -m benchmarks.roc_accuracy", *sys.argv[1:])), "date": str(date.today()),
        "machine": platform.machine(), "torch": torch.__version__, "wanted_accuracy": round(wanted, 4),
        "parts_train_as_one_process": same, "ranks": options.ranks, "rows": rows,
    }  # fmt: skip
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
