"""Branches beside each other: the predicted step with and without them, from the best named strategy of each model.

    python -m benchmarks.branches    # prints the table, writes results/branches.json

Small towers wait for the launches of their kernels: split over all devices, every device launches every tower; at
places of their own, each launches one. Where kernels are large, splitting them is as good and branches gain little.
All seconds are predicted; what the prices come from is told with them.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

import zoo
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import parse_machine
from conjoin.search import Wish, baselines, open_contest, place_branches

RESULTS = Path(__file__).parent / "results" / "branches.json"
MACHINE = "dgx-h100:1"
TOWERS = ((4, 64), (4, 4096), (8, 64))
"""Numbers of towers with a batch."""
MODELS = (("candle-uno", 256), ("dlrm", 1024))


class Towers(nn.Module):
    """Towers of six layers, each on an input of its own, and a head over all."""

    def __init__(self, count: int, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))
            for _ in range(count)
        )
        self.head = nn.Linear(count * width, 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        *xs, y = inputs
        made = torch.cat([tower(x) for tower, x in zip(self.towers, xs, strict=True)], 1)
        return nn.functional.mse_loss(self.head(made), y)


@dataclass(frozen=True, slots=True)
class Row:
    """One model."""

    model: str
    batch: int
    best_named: str
    named_seconds: float
    with_branches_seconds: float | None
    """None where no way to place branches is faster."""
    named_peak_bytes: int
    with_branches_peak_bytes: int | None


def _graphs() -> list[tuple[str, int, Graph]]:
    found = []
    for count, batch in TOWERS:
        with torch.device("meta"):
            inputs = (*(torch.empty(batch, 512) for _ in range(count)), torch.empty(batch, 1))
            found.append((f"{count} towers", batch, capture(Towers(count), inputs)))
    for name, batch in MODELS:
        model, data, loss = zoo.build(name, batch_size=batch, device="meta")
        found.append((name, batch, capture(model, data, loss)))
    return found


def measure(name: str, batch: int, graph: Graph) -> Row:
    """The best named strategy of a model, and the best with branches that is found from it."""
    machine = parse_machine(MACHINE)
    contest = open_contest(graph, machine, CostModel(), Wish())
    for _, entry in baselines(graph, machine):
        if entry is not None:
            contest.enter(entry)
    best, found = contest.best, place_branches(contest)
    assert best is not None
    return Row(
        name,
        batch,
        best.entry.name,
        best.seconds,
        found.seconds if found else None,
        best.peak_bytes or 0,
        found.peak_bytes if found else None,
    )


def main() -> None:
    rows = []
    print(f"{'model':<12} {'batch':>6} {'best named':<24} {'named':>10} {'branches':>10}")
    for name, batch, graph in _graphs():
        row = measure(name, batch, graph)
        rows.append(row)
        after = "-" if row.with_branches_seconds is None else f"{row.with_branches_seconds * 1e3:.3f} ms"
        print(f"{name:<12} {batch:>6} {row.best_named:<24} {row.named_seconds * 1e3:>7.3f} ms {after:>10}", flush=True)
    told = {
        "command": "python -m benchmarks.branches",
        "machine": f"{MACHINE}, predicted from links and a roofline, nothing measured",
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
