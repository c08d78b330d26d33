"""The plan that the search chooses, run beside all named strategies on an emulated cluster at two link speeds.

    python -m benchmarks.search_truth [--models mlp bert cnn dlrm gpt rnn] [--mbit 100 200] [--ahead] [--output FILE]

Four ranks on two nodes. Links are calibrated and operators timed on the cluster itself; with that the search plans.
What its plan computes and was not timed yet is timed then, and it plans again, until nothing new is wanted: estimates
choose what is measured, measurements choose the plan. Then its plan and those of all named strategies train in turn,
pass after pass, and the medians are compared: the chosen plan is to be within 5 % of the best that was measured, or
better, and not slower than data parallelism beyond noise. Beside the named strategies stands a plan by which every rank
computes everything alone: on slow links that may be the best.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.emulated_cluster.cluster import Cluster
from benchmarks.emulated_cluster.run_plan import Training, run_plan
from benchmarks.prediction import (
    DELAY_SECONDS,
    OPTIMIZER,
    STRATEGIES,
    WORKLOADS,
    Seen,
    Workload,
    machine_with,
    plans_of,
    time_links,
    time_operators,
)
from conjoin.ir import Graph, Mark, Plan, check_plan, model_mark
from conjoin.machine import Machine
from conjoin.search import SearchResult, Wish, find_plan
from conjoin.sim import Wanted, wanted_by
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.recommendation import Dlrm, DlrmConfig, dlrm_batch
from zoo.rnn import LanguageModel, RnnConfig
from zoo.tokens import next_token_batch, next_token_loss

CHOSEN = "the search's"
WITHIN = 1.05
"""How much slower than the best measured the chosen plan may be."""
_MAX_ROUNDS = 4
_BARE = Machine("emulated", 2, 2, "cpu")


def gpt() -> Workload:
    config = GptConfig(layers=2, width=128, heads=4, length=32, vocabulary=1024, dropout=0.0)
    return Workload("gpt", Gpt(config), gpt_batch(32, config), next_token_loss)


def rnn() -> Workload:
    config = RnnConfig(vocabulary=1024, hidden=256, layers=2, steps=4, outputs=1024)
    batch = next_token_batch(512, config.steps, config.vocabulary)
    return Workload("rnnlm", LanguageModel(config), batch, next_token_loss)


def dlrm() -> Workload:
    """With a batch for which a step takes much longer than the turns in which ranks share the cores of a host."""
    config = DlrmConfig(rows=(4000,) * 8, dense=256, bottom=(512, 256, 64), top=(1024, 512, 1), dot=True)
    return Workload("dlrm", Dlrm(config), dlrm_batch(4096, config), functional.binary_cross_entropy_with_logits)


MODELS: dict[str, Callable[[], Workload]] = {
    "mlp": WORKLOADS["mlp"], "bert": WORKLOADS["bert"], "cnn": WORKLOADS["cnn"], "dlrm": dlrm, "gpt": gpt, "rnn": rnn,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One model at one link speed."""

    model: str
    mbit: float
    chosen: str
    predicted_ms: float
    measured_ms: float
    """The median of the steps."""
    best_named: str
    """The named strategy that was measured to be the fastest."""
    best_named_ms: float
    data_parallel_ms: float
    search_seconds: float
    rounds: int
    """Searches, each with more that was measured."""
    steps_ms: dict[str, list[float]]

    @property
    def is_right(self) -> bool:
        return self.measured_ms <= WITHIN * min(self.best_named_ms, self.data_parallel_ms)


@dataclass
class Trial:
    """One model at one link speed under way."""

    workload: Workload
    mbit: float
    given: argparse.Namespace

    def run(self) -> Row:
        """Measure, plan until nothing new is wanted, and train by all plans."""
        graph = self.workload.graph()
        named = {plan.strategy: plan for plan in (*plans_of(graph, _BARE, STRATEGIES), _alone(graph))}
        with Cluster(2, 2, self.mbit * 1e6 / 8, DELAY_SECONDS, ahead_of_others=self.given.ahead) as cluster:
            found, rounds = self._plan(cluster, graph, wanted_by(named.values()))
            steps = self._train(cluster, {**named, CHOSEN: found.plan})
        medians = {name: 1e3 * statistics.median(seconds) for name, seconds in steps.items()}
        best = min(named, key=medians.__getitem__)
        return Row(
            self.workload.name, self.mbit, found.plan.strategy, 1e3 * found.seconds_per_step, medians[CHOSEN], best,
            medians[best], next(medians[name] for name in named if name.startswith("data-parallel")),
            round(found.search_seconds, 1), rounds,
            {name: [round(1e3 * second, 1) for second in seconds] for name, seconds in steps.items()},
        )  # fmt: skip

    def _plan(self, cluster: Cluster, graph: Graph, timed: Wanted) -> tuple[SearchResult, int]:
        """The best plan by what was measured, and after how many searches everything in it was."""
        seen, wish = Seen(), Wish(budget=self.given.budget, optimizer=OPTIMIZER)
        outcomes = cluster.run(time_operators, timed, _BARE.mesh, timeout=1800)[0]
        seen.collectives += cluster.run(time_links, _BARE.mesh, self.given.calibration, timeout=600)[:1]
        machine, rounds = machine_with(_BARE, seen.fits()), 0
        while True:
            seen.operators, rounds = [outcomes], rounds + 1
            found = find_plan(graph, machine, seen.costs(), wish)
            fresh = _missing(wanted_by([found.plan]), timed)
            if rounds == _MAX_ROUNDS or not (fresh.calls or fresh.updates):
                return found, rounds
            outcomes = outcomes + cluster.run(time_operators, fresh, _BARE.mesh, timeout=1800)[0]
            timed.calls |= fresh.calls
            timed.updates |= fresh.updates

    def _train(self, cluster: Cluster, plans: dict[str, Plan]) -> dict[str, list[float]]:
        steps: dict[str, list[float]] = {name: [] for name in plans}
        training = Training(self.workload.model, self.workload.batch, OPTIMIZER, 1, self.given.steps, False)
        for _ in range(self.given.passes):
            for name, plan in plans.items():
                steps[name] += run_plan(cluster, plan, training).step_seconds
        return steps


def _alone(graph: Graph) -> Plan:
    """Every rank computes everything, and nothing is sent: as fast as one device."""
    machine = Mark(_BARE.name, _BARE.fingerprint())
    return check_plan(Plan(graph, _BARE.mesh, model_mark(graph), machine, "each alone"))


def _missing(wanted: Wanted, timed: Wanted) -> Wanted:
    """What is wanted and was not timed."""
    return Wanted(
        {call: None for call in wanted.calls if call not in timed.calls},
        {update: None for update in wanted.updates if update not in timed.updates},
    )


def line(row: Row) -> str:
    """A row of the printed table."""
    return (
        f"{row.model:<10} {row.mbit:>5g} Mbit/s  chosen {row.measured_ms:8.1f} ms (predicted {row.predicted_ms:8.1f})  "
        f"best named {row.best_named_ms:8.1f} ms ({row.best_named})  data parallel {row.data_parallel_ms:8.1f} ms  "
        f"{row.best_named_ms / row.measured_ms:.3f}x  {'right' if row.is_right else 'WRONG'}: {row.chosen}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--mbit", nargs="+", type=float, default=[100.0, 200.0])
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for each search")
    parser.add_argument("--passes", type=int, default=2, help="each trains by all plans")
    parser.add_argument("--steps", type=int, default=3, help="timed in a pass")
    parser.add_argument("--calibration", type=float, default=20.0, help="seconds for all collectives")
    parser.add_argument("--ahead", action="store_true", help="let the ranks go before other work on this host")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "search_truth.json")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = kept(given.output)
    for name in given.models:
        for mbit in given.mbit:
            row = Trial(MODELS[name](), mbit, given).run()
            print(line(row), flush=True)
            rows = [one for one in rows if (one.model, one.mbit) != (row.model, row.mbit)] + [row]
            write(given.output, rows, arguments)
    return 0 if all(row.is_right for row in rows) else 1


def kept(output: Path) -> list[Row]:
    """What was measured before."""
    return [Row(**row) for row in json.loads(output.read_text(encoding="utf-8"))["rows"]] if output.exists() else []


def write(output: Path, rows: Sequence[Row], arguments: Sequence[str] | None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    data: dict[str, Any] = {
        "command": f"python -m benchmarks.search_truth {' '.join(given)}".strip(),
        "date": str(date.today()),
        "machine": f"{platform.machine()}, emulated cluster of 2 nodes with 2 ranks each on one host",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [asdict(row) for row in sorted(rows, key=lambda row: (row.mbit, row.model))],
    }
    aside = output.with_suffix(".tmp")
    aside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    aside.replace(output)


if __name__ == "__main__":
    sys.exit(main())
