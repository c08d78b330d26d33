"""The search against configurations that people published as their best: predicted on the same machine and batch.

    python -m benchmarks.opponents                                # all; writes results/opponents.json
    python -m benchmarks.opponents --rows megatron-1.7b --budget 12

- `megatron-…`: table 1 of Narayanan et al. (arXiv 2104.04473), DGX A100, as in `data/megatron_table.csv` of
  https://github.com/SotaroKaneda/MLCarbon at 69070b28de401b6800d30f435db32996473560e2. Micro-batches have one sample
  for each data-parallel rank, blocks are run again as there; query, key and value of a head stand side by side, as in
  that code. What was measured follows from the rate by equation 3 there.
- `titan-…`: LLaMA on H100 by torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md` of
  https://github.com/pytorch/torchtitan at 31a17bfdb70bab6f62a13d21816a5339b911d6e3. Degrees, batch and what is run
  again are those of the tables. The 70B and 405B were compiled and in eight bits there, so their rates are not beside
  ours; here all are in mixed bfloat16. Of the 405B the number of micro-batches is not said: one for each sample of a
  data-parallel rank is taken, and the schedule is 1F1B.
- `alpa-…`: GPT on eight V100, in the degrees of Alpa's test of performance, `benchmark/alpa/suite_paper_manual_gpt.py`
  of https://github.com/alpa-projects/alpa at 3c6205f0730ab589e23815a8f1066bb42251bcee.

A row says whether the opponent fits as predicted: a plan that does not fit need not be beaten. Seconds of the search
are of the process, from captured graph to plan. `conjoin compare --strategy` puts both beside each other.
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

from benchmarks.published import MACHINES, read_rows
from benchmarks.published_models import capture_step
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import Machine, parse_machine
from conjoin.search import Stopped, Wish, find_plan, make_pipeline, make_plan
from conjoin.sim import predict, predict_pipeline
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.tokens import next_token_loss

LENGTH, VOCABULARY = 2048, 51_200
RESULTS = Path(__file__).parent / "results" / "opponents.json"


@dataclass(frozen=True, slots=True)
class Megatron:
    """A row of Megatron-LM's table."""

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
    def machine(self) -> str:
        return f"dgx-a100:{self.gpus // 8}"

    @property
    def measured_seconds(self) -> float:
        """Of a step: from the rate, with blocks that are run again among the operations."""
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

    def graph(self) -> Graph:
        """The model, captured in half precision."""
        config = GptConfig(self.layers, self.width, self.heads, vocabulary=VOCABULARY, length=LENGTH, by_head=True)
        with torch.device("meta"):
            model, batch = Gpt(config).to(torch.bfloat16).train(), gpt_batch(self.batch, config)
        return capture(model, batch, next_token_loss)


@dataclass(frozen=True, slots=True)
class Published:
    """A configuration in words, of a model by its name in `published_rows.toml`."""

    model: str
    machine: str
    strategy: str
    batch: int
    length: int
    precision: str
    tokens: float = 0.0
    """A second, on each GPU, as it was measured; none where it was measured otherwise than it is predicted."""
    gpus: int = 0

    @property
    def measured_seconds(self) -> float | None:
        return self.batch * self.length / (self.tokens * self.gpus) if self.tokens else None

    def graph(self) -> Graph:
        """The model, captured as it was trained."""
        return capture_step(read_rows()[1][self.model], self.length, self.batch, self.precision)


TABLE: dict[str, Megatron | Published] = {
    "megatron-1.7b": Megatron(24, 2304, 24, 1, 1, 32, 512, 137),
    "megatron-3.6b": Megatron(30, 3072, 32, 2, 1, 64, 512, 138),
    "megatron-7.5b": Megatron(36, 4096, 32, 4, 1, 128, 512, 142),
    "megatron-18.4b": Megatron(40, 6144, 48, 8, 1, 256, 1024, 135),
    "megatron-39.1b": Megatron(48, 8192, 64, 8, 2, 512, 1536, 138),
    "megatron-76.1b": Megatron(60, 10240, 80, 8, 4, 1024, 1792, 140),
    "megatron-145.6b": Megatron(80, 12288, 96, 8, 8, 1536, 2304, 148),
    "megatron-310.1b": Megatron(96, 16384, 128, 8, 16, 1920, 2160, 155),
    "megatron-529.6b": Megatron(105, 20480, 128, 8, 35, 2520, 2520, 163),
    "megatron-1008b": Megatron(128, 25600, 160, 8, 64, 3072, 3072, 163),
    "titan-8b-8": Published("llama3-8b", "dgx-h100:1", "fsdp+recompute=selective", 16, 8192, "mixed bfloat16", 5762, 8),
    "titan-8b-128": Published(
        "llama3-8b", "dgx-h100:16", "fsdp+recompute=selective", 256, 8192, "mixed bfloat16", 5605, 128
    ),
    "titan-70b-256": Published(
        "llama3-70b", "dgx-h100:32", "megatron:tp=8,dp=32,sp,fsdp+recompute=full", 512, 8192, "mixed bfloat16"
    ),
    "titan-405b-512": Published(
        "llama3-405b", "dgx-h100:64", "pipeline:pp=8,tp=8,micro=32,fsdp+recompute=full", 256, 8192, "mixed bfloat16"
    ),
    "alpa-2.6b-8": Published("alpa-2.6b", "dgx-1:1", "pipeline:pp=2,tp=2,micro=4+recompute=full", 32, 1024, "float16"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What both come to."""

    model: str
    published: str
    measured_seconds: float | None
    published_seconds: float
    """As predicted."""
    published_fits: bool
    found: str
    found_seconds: float
    cpu_seconds: float
    ended: bool
    """Whether the search came to its end within its time."""


def compare(name: str, budget: float) -> Row:
    """The published configuration and what the search finds in so many seconds of the process."""
    row, costs = TABLE[name], CostModel()
    graph, machine = row.graph(), parse_machine(row.machine, MACHINES)
    started = process_time()
    found = find_plan(graph, machine, costs, Wish(budget=100 * budget, cpu_budget=budget, optimizer="adam"))
    took = process_time() - started
    seconds, fits = _published(graph, machine, row.strategy, costs)
    return Row(
        name, row.strategy, row.measured_seconds, seconds, fits, found.plan.strategy, found.seconds_per_step, took,
        found.stopped is Stopped.CONVERGED,
    )  # fmt: skip


def _published(graph: Graph, machine: Machine, strategy: str, costs: CostModel) -> tuple[float, bool]:
    if strategy.startswith("pipeline:"):
        several = predict_pipeline(make_pipeline(graph, machine, strategy, costs), machine, costs)
        return several.seconds, several.fits
    told = predict(make_plan(graph, machine, strategy), machine, costs, "adam")
    return told.seconds, told.fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(TABLE), choices=list(TABLE))
    parser.add_argument("--budget", type=float, default=45.0, help="CPU seconds for each")
    asked = parser.parse_args()
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in asked.rows:
        row = compare(name, asked.budget)
        known[name] = asdict(row) | {
            "command": f"python -m benchmarks.opponents --rows {name} --budget {asked.budget:g}",
            "date": strftime("%Y-%m-%d"),
            "host": f"{platform.machine()}, {cpu_count()} cores shared with other work; steps are predicted",
            "torch": torch.__version__,
        }
        print(row, flush=True)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    fitting = {name: row for name, row in known.items() if row["published_fits"]}
    lost = [name for name, row in fitting.items() if row["found_seconds"] > row["published_seconds"]]
    print(f"{len(known)} of {len(TABLE)} rows, slower than the opponent in {lost or 'none'}")
    return int(bool(lost))


if __name__ == "__main__":
    raise SystemExit(main())
