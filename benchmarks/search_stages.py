"""The search over pipelines against the configurations that Megatron-LM was published with.

    python -m benchmarks.search_stages                    # writes results/search_stages.json
    python -m benchmarks.search_stages --models 39.1b     # some of them

Models, degrees and batches are those of table 1 of Narayanan et al. (arXiv 2104.04473), on DGX A100; micro-batches are
of one sequence for each data-parallel rank, blocks are run again as there. Both are predicted on the same machine for
the same batch. Seconds are of the process, from captured graph to pipeline.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from time import process_time

import torch

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import Machine, parse_machine
from conjoin.search import make_pipeline
from conjoin.search.stages.plans import Model
from conjoin.search.stages.search import Over, StageSearch
from conjoin.sim import predict_pipeline
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.tokens import next_token_loss

LENGTH, VOCABULARY = 2048, 51_200
RESULTS = Path(__file__).parent / "results" / "search_stages.json"


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the table that has stages."""

    layers: int
    width: int
    heads: int
    tp: int
    pp: int
    gpus: int
    batch: int

    @property
    def strategy(self) -> str:
        dp = self.gpus // self.tp // self.pp
        return f"pipeline:pp={self.pp},tp={self.tp},micro={self.batch // dp}+recompute=full"


TABLE = {
    "39.1b": Published(48, 8192, 64, 8, 2, 512, 1536),
    "76.1b": Published(60, 10240, 80, 8, 4, 1024, 1792),
    "145.6b": Published(80, 12288, 96, 8, 8, 1536, 2304),
    "310.1b": Published(96, 16384, 128, 8, 16, 1920, 2160),
    "529.6b": Published(105, 20480, 128, 8, 35, 2520, 2520),
    "1008b": Published(128, 25600, 160, 8, 64, 3072, 3072),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What both come to."""

    model: str
    published: str
    published_seconds: float
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

    def check(doing: str) -> None:
        if process_time() - started > budget:
            raise Over

    search = StageSearch(Model(graph, machine, costs, "adam", machine.usable_bytes), lambda: inf, check)
    ended = search.run()
    took, best = process_time() - started, search.best
    theirs = _published(graph, machine, row, costs)
    return Row(
        name, row.strategy, theirs[0], theirs[1], best.pipeline.strategy if best is not None else "",
        None if best is None else best.seconds, took, ended,
    )  # fmt: skip


def _published(graph: Graph, machine: Machine, row: Published, costs: CostModel) -> tuple[float, bool]:
    told = predict_pipeline(make_pipeline(graph, machine, row.strategy, costs), machine, costs)
    return told.seconds, told.fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TABLE), choices=list(TABLE))
    parser.add_argument("--budget", type=float, default=45.0, help="CPU seconds for each")
    asked = parser.parse_args()
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in asked.models:
        row = compare(name, asked.budget)
        known[name] = asdict(row)
        print(row, flush=True)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
