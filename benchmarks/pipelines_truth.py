"""Pipelines predicted against measured on an emulated cluster: 2 and 4 stages, 3 schedules, 2 link speeds.

    python -m benchmarks.pipelines_truth --ahead        # writes results/pipelines_truth.json
    python -m benchmarks.pipelines_truth --ahead --paced --output benchmarks/results/pipelines_truth_paced.json

Every stage is a node of one rank. What operators take is measured on all ranks at once, in each pass before the steps;
of the links only what the cluster was asked for is told. Pairs of pipelines at one link speed whose measured times are
more than 10 % apart are to be predicted in the right order.

Four ranks on a host of two cores slow each other down by as much as their passes happen to meet, which no device of a
real cluster does to another. Without `--paced` links are so slow that this hardly counts. With it devices are emulated
like links: an operator sleeps for as long as it is to take, so that four of them need no four cores, and computing
takes as long as sending does at speeds of real networks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.emulated_cluster.cluster import Cluster
from benchmarks.emulated_cluster.run_plan import Training, run_plan
from benchmarks.paced_devices import PacedBlock, time_paced
from benchmarks.prediction import DELAY_SECONDS, OPTIMIZER, Seen, say
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph, Pipeline
from conjoin.machine import DeviceType, Link, Machine, NodeKind
from conjoin.search import make_pipeline
from conjoin.sim import predict_pipeline, wanted_by

RESULT = Path(__file__).parent / "results" / "pipelines_truth.json"
STAGES = (2, 4)
MBIT = (5.0, 10.0)
"""So slow that four ranks on a host of two cores wait for links more than for each other's cores."""
PACED_MBIT = (50.0, 200.0)
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b")
BLOCKS, WIDTH, ROWS, MICRO = 8, 256, 64, 8
PACED_ROWS, PACED_SECONDS = 128, 2e-3
"""A message of 128 KiB takes 21 or 5 ms, two blocks 4 ms forward and 8 backward, four twice that."""
_DEVICE = "one rank of the emulated cluster"
_APART = 1.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.relu(self.up(x)))
        return made


@dataclass(frozen=True, slots=True)
class Row:
    """One pipeline at one link speed."""

    stages: int
    schedule: str
    mbit: float
    predicted_ms: float
    measured_ms: float
    """The median of the steps."""
    steps_ms: list[float]

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def cluster_of(nodes: int, mbit: float) -> Machine:
    """The cluster as it was asked for: a link from each node into the switch, which passes on at once."""
    device = DeviceType(_DEVICE, "cpu", 2**33, 1e10, (("float32", 5e10),))
    link = Link(("0", "network"), mbit * 1e6 / 8, DELAY_SECONDS / 2)
    return Machine("emulated", nodes, 1, "cpu", nodes=(NodeKind("node", nodes, (device,), (link,)),))


class Comparison:
    """Pipelines of one number of stages."""

    def __init__(self, stages: int, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self._stages, self._given = stages, given
        rows = PACED_ROWS if given.paced else ROWS
        blocks = (PacedBlock(WIDTH, PACED_SECONDS) if given.paced else Block() for _ in range(BLOCKS))
        self._model = nn.Sequential(*blocks)
        self._batch = torch.randn(MICRO * rows, WIDTH), torch.randn(MICRO * rows, WIDTH)
        self._graph: Graph = capture(self._model.train(), self._batch, nn.functional.mse_loss)

    def at(self, mbit: float) -> list[Row]:
        """Every schedule at one link speed."""
        machine, seen = cluster_of(self._stages, mbit), Seen()
        training = Training(self._model, self._batch, OPTIMIZER, 1, self._given.steps, watch_memory=False)
        with Cluster(self._stages, 1, mbit * 1e6 / 8, DELAY_SECONDS, ahead_of_others=self._given.ahead) as cluster:
            plans = self._plans(machine, None)
            wanted = wanted_by([stage.plan for plan in plans.values() for stage in plan.stages])
            first = Seen([cluster.run(time_paced, wanted, machine.mesh, timeout=900)[0]])
            plans = self._plans(machine, first.costs())
            wanted = wanted_by([stage.plan for plan in plans.values() for stage in plan.stages])
            for _ in range(self._given.passes):
                seen.operators += cluster.run(time_paced, wanted, machine.mesh, timeout=900)[:1]
                for name, plan in plans.items():
                    seen.steps.setdefault(name, []).extend(run_plan(cluster, plan, training).step_seconds)
        costs = seen.costs()
        told = {name: predict_pipeline(plan, machine, costs, OPTIMIZER).seconds for name, plan in plans.items()}
        return [self._row(name, mbit, told[name], seen.steps[name]) for name in plans]

    def _plans(self, machine: Machine, costs: CostModel | None) -> dict[str, Pipeline]:
        """By schedules; stages are balanced by what operators were measured to take, once they have been."""
        asked = f"pipeline:pp={self._stages},micro={MICRO},schedule="
        return {name: make_pipeline(self._graph, machine, asked + name, costs) for name in SCHEDULES}

    def _row(self, schedule: str, mbit: float, predicted: float, steps: list[float]) -> Row:
        measured = statistics.median(steps)
        row = Row(
            self._stages, schedule, mbit, round(1e3 * predicted, 1), round(1e3 * measured, 1),
            [round(1e3 * seconds, 1) for seconds in steps],
        )  # fmt: skip
        say(
            f"{row.stages} stages {mbit:>5g} Mbit/s {schedule:<10} predicted {row.predicted_ms:8.1f} ms  measured "
            f"{row.measured_ms:8.1f} ms  {row.error:+6.1%}"
        )
        return row


def summary(rows: list[Row]) -> dict[str, float]:
    """Pairs clearly apart at one link speed, how many of them are told in the wrong order, and the median error."""
    apart = wrong = 0
    for one, other in itertools.combinations(rows, 2):
        low, high = sorted((one.measured_ms, other.measured_ms))
        if one.mbit == other.mbit and high > _APART * low:
            apart += 1
            wrong += (one.predicted_ms - other.predicted_ms) * (one.measured_ms - other.measured_ms) <= 0
    median = statistics.median(abs(row.error) for row in rows)
    return {"pairs_apart": apart, "pairs_in_wrong_order": wrong, "median_error": round(median, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", type=int, default=list(STAGES))
    parser.add_argument("--mbit", nargs="+", type=float, help="5 and 10, or 50 and 200 where devices are paced")
    parser.add_argument("--paced", action="store_true", help="operators sleep for as long as they are to take")
    parser.add_argument("--passes", type=int, default=2, help="each times operators, and the steps of all schedules")
    parser.add_argument("--steps", type=int, default=6, help="timed in a pass")
    parser.add_argument("--ahead", action="store_true", help="let the ranks go before other work on this host")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    speeds = given.mbit or (PACED_MBIT if given.paced else MBIT)
    rows = [row for stages in given.stages for mbit in speeds for row in Comparison(stages, given).at(mbit)]
    say(json.dumps(summary(rows)))
    given.output.write_text(json.dumps({
        "command": f"python -m benchmarks.pipelines_truth {' '.join(sys.argv[1:])}".strip(), "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, emulated cluster of nodes with one rank each",
        "torch": torch.__version__, "python": platform.python_version(), "load_average": os.getloadavg()[0],
        "summary": summary(rows), "rows": [{**asdict(row), "error": round(row.error, 3)} for row in rows],
    }, indent=1) + "\n", encoding="utf-8")  # fmt: skip


if __name__ == "__main__":
    main()
