"""AutoDDL's Figure 7: how the last three dense layers of VGG13 are split over 32 GPUs of Piz Daint.

    python -m benchmarks.autoddl_fig7                     # writes results/autoddl_fig7.json

In the paper samples arrive split over all devices, as convolutions leave them, no weight matrix is replicated (p0 = 1),
and so no gradient of one is summed up. Here the same three layers with the same samples (eight a GPU) are searched,
with the input held in that layout. Of each weight the row has into how many pieces it is split where its product reads
it, how many copies work on different parts of the batch (p0), and how many do the same work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from torch import nn

from benchmarks.search_table import RESULTS, circumstances
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import Mesh, parse_machine
from conjoin.ops import Copies, Split
from conjoin.search import Wish, find_plan

NAME = "autoddl_fig7"
GPUS, SAMPLES_PER_GPU = 32, 8
WIDTHS = (25_088, 4096, 4096, 1000)
KINDS = (Split, Copies)


def dense_layers() -> Graph:
    """The end of VGG13, and its loss."""
    with torch.device("meta"):
        layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).train()
        count = SAMPLES_PER_GPU * GPUS
        batch = torch.zeros(count, WIDTHS[0]), torch.zeros(count, dtype=torch.long)
    return capture(model, batch, nn.functional.cross_entropy)


def weights_as_read(graph: Graph, mesh: Mesh) -> Iterator[dict[str, int | str]]:
    """Every weight matrix as its product reads it."""
    for node in graph.nodes:
        if "linear" not in node.op:
            continue
        weight = node.inputs[1].type
        ways = dict(weight.layout)
        split, copies = (
            prod(mesh.sizes[axis] for axis, one in ways.items() if isinstance(one, kind)) for kind in KINDS
        )
        yield {
            "weight": "x".join(map(str, weight.shape)), "layout": str(weight), "pieces": split, "p0": copies,
            "same work": mesh.size // split // copies,
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of the process for the search")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    chosen = parser.parse_args(arguments)
    machine = parse_machine(f"piz-daint:{GPUS}")
    arrives = ",".join(f"{axis}:S(0)" for axis in machine.mesh.names)
    wish = Wish("joint", 40 * chosen.budget, "sgd", cpu_budget=chosen.budget, fixed={"input": arrives}, stages=1)
    found = find_plan(dense_layers(), machine, CostModel(), wish)
    assert isinstance(found.plan, Plan), "one stage was asked for"
    rows = list(weights_as_read(found.plan.graph, machine.mesh))
    for row in rows:
        print(row)
    data = {
        **circumstances(f"python -m benchmarks.{NAME}", chosen.budget), "paper": "p0 = 1 for all three",
        "devices": machine.name, "plan": found.plan.strategy, "seconds": found.seconds_per_step,
        "data_parallel_or_named": [found.baseline, found.baseline_seconds_per_step], "rows": rows,
    }  # fmt: skip
    chosen.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(len(rows) != len(WIDTHS) - 1 or any(row["p0"] != 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
