"""The search over pipelines against the configurations that Megatron-LM was published with.

    python -m benchmarks.search_stages                    # writes results/search_stages.json
    python -m benchmarks.search_stages --models 39.1b     # some of them

Models, degrees, batches and rates are those of table 1 of Narayanan et al. (arXiv 2104.04473), on DGX A100, as in
https://github.com/SotaroKaneda/MLCarbon/blob/69070b28de401b6800d30f435db32996473560e2/data/megatron_table.csv.
Micro-batches are of one sequence for each data-parallel rank, blocks are run again as there; query, key and value of a
head stand side by side, as in that code. Both are predicted on the same machine for the same batch; what was measured
follows from the rate by equation 3 there. Seconds of the search are of the process, from captured graph to pipeline.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from os import cpu_count
from pathlib import Path
from time import process_time, strftime

import torch

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import Machine, parse_machine
from conjoin.search import Stopped, Wish, find_plan, make_pipeline, make_plan
from conjoin.sim import predict, predict_pipeline
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.tokens import next_token_loss

LENGTH, VOCABULARY = 2048, 51_200
RESULTS = Path(__file__).parent / "results" / "search_stages.json"


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the table."""

    layers: int
    width: int
    heads: int
    tp: int
    pp: int
    gpus: int
    batch: int
    teraflops: float
    """A second, on each GPU."""

    @property
    def seconds(self) -> float:
        """Of a step, as it was measured: from the rate, with blocks that are run again among the operations."""
        layers = 96 * self.batch * LENGTH * self.layers * self.width**2
        rest = 1 + LENGTH / (6 * self.width) + VOCABULARY / (16 * self.layers * self.width)
        return layers * rest / (self.gpus * self.teraflops * 1e12)

    @property
    def strategy(self) -> str:
        dp = self.gpus // self.tp // self.pp
        if self.pp > 1:
            return f"pipeline:pp={self.pp},tp={self.tp},micro={self.batch // dp}+recompute=full"
        inside = f"megatron:tp={self.tp},dp={dp}" if self.tp > 1 else f"data-parallel:dp={dp}"
        return f"{inside}+recompute=full+micro={self.batch // dp}"


TABLE = {
    "1.7b": Published(24, 2304, 24, 1, 1, 32, 512, 137),
    "3.6b": Published(30, 3072, 32, 2, 1, 64, 512, 138),
    "7.5b": Published(36, 4096, 32, 4, 1, 128, 512, 142),
    "18.4b": Published(40, 6144, 48, 8, 1, 256, 1024, 135),
    "39.1b": Published(48, 8192, 64, 8, 2, 512, 1536, 138),
    "76.1b": Published(60, 10240, 80, 8, 4, 1024, 1792, 140),
    "145.6b": Published(80, 12288, 96, 8, 8, 1536, 2304, 148),
    "310.1b": Published(96, 16384, 128, 8, 16, 1920, 2160, 155),
    "529.6b": Published(105, 20480, 128, 8, 35, 2520, 2520, 163),
    "1008b": Published(128, 25600, 160, 8, 64, 3072, 3072, 163),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What both come to."""

    model: str
    published: str
    measured_seconds: float
    published_seconds: float
    """As predicted."""
    published_fits: bool
    found: str
    found_seconds: float | None
    cpu_seconds: float
    ended: bool
    """Whether the search came to its end within its time."""


def graph_of(row: Published) -> Graph:
    """The model, captured in half precision."""
    config = GptConfig(row.layers, row.width, row.heads, vocabulary=VOCABULARY, length=LENGTH, by_head=True)
    with torch.device("meta"):
        model, batch = Gpt(config).to(torch.bfloat16).train(), gpt_batch(row.batch, config)
    return capture(model, batch, next_token_loss)


def compare(name: str, budget: float) -> Row:
    """The published configuration and what the search finds in so many seconds of the process."""
    row, costs = TABLE[name], CostModel()
    graph, machine = graph_of(row), parse_machine(f"dgx-a100:{row.gpus // 8}")
    started = process_time()
    found = find_plan(graph, machine, costs, Wish(budget=10 * budget, cpu_budget=budget, optimizer="adam"))
    took = process_time() - started
    theirs = _published(graph, machine, row, costs)
    return Row(
        name, row.strategy, row.seconds, theirs[0], theirs[1], found.plan.strategy, found.seconds_per_step, took,
        found.stopped is Stopped.CONVERGED,
    )  # fmt: skip


def _published(graph: Graph, machine: Machine, row: Published, costs: CostModel) -> tuple[float, bool]:
    if row.pp > 1:
        several = predict_pipeline(make_pipeline(graph, machine, row.strategy, costs), machine, costs)
        return several.seconds, several.fits
    told = predict(make_plan(graph, machine, row.strategy), machine, costs, "adam")
    return told.seconds, told.fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TABLE), choices=list(TABLE))
    parser.add_argument("--budget", type=float, default=45.0, help="CPU seconds for each")
    asked = parser.parse_args()
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in asked.models:
        row = compare(name, asked.budget)
        known[name] = asdict(row) | {
            "command": f"python -m benchmarks.search_stages --models {name} --budget {asked.budget:g}",
            "date": strftime("%Y-%m-%d"),
            "host": f"{platform.machine()}, {cpu_count()} cores shared with other work; steps are predicted",
            "torch": torch.__version__,
        }
        print(row, flush=True)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
