"""Predicted against measured: step time and peak memory of many plans on an emulated cluster at two link speeds.

    python -m benchmarks.prediction [--models mlp bert cnn dlrm] [--mbit 100 400] [--passes 2] [--output FILE]
    python -m benchmarks.prediction --models narrow wide --mbit 100 --output FILE

Four ranks on two nodes. Collectives are calibrated and operators are timed on the cluster itself, all ranks at once as
in a training step; from these alone is predicted, and steps are measured. All three take turns, pass after pass and one
model after the other: how fast a shared host is changes over minutes, by a third and more, and is then the same for
both sides. The plans are those of the named strategies in several degrees and placements. Memory is what the step
allocates; the batch lies on the host and is left out on both sides. Writes a table as JSON and a scatter plot as SVG;
what the file has of other models and speeds is kept.

A cluster takes five cores: four for its ranks, one for its links. On a host of two cores the ranks share them, and
steps as short as its scheduler's turns are not predicted well: at 200 Mbit/s the same plan of the CNN then differs by
up to a third from step to step, and four pairs that were measured more than 10 % apart were predicted the other way
round. With a build of torch for CUDA each model and speed takes a command of its own, since ranks are forked.

`narrow` and `wide` are one model with a batch of 64 and of 4096, for which tensor parallelism belongs across the nodes
and inside them: either few activations or few weights go over the slow links.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.emulated_cluster.cluster import Cluster
from benchmarks.emulated_cluster.run_plan import Training, run_plan
from benchmarks.plotting import Point, draw
from conjoin.cost import CostModel, MeasurementStore, Outcome, mean_outcomes
from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import CollectiveFit, DeviceType, Machine, Mesh, NodeKind, fit_collective
from conjoin.runtime import Pace, Timed, communicator_over, time_collectives
from conjoin.search import make_plan
from conjoin.sim import Prediction, Wanted, measure_wanted, predict, wanted_by
from zoo.bert import Bert, BertConfig, pretraining_batch, pretraining_loss
from zoo.recommendation import Dlrm, DlrmConfig, dlrm_batch

STRATEGIES = (
    "data-parallel", "zero1", "fsdp", "megatron:tp=2", "megatron:tp=2@d0,n0", "megatron:tp=4", "megatron:tp=2,sp",
    "megatron:tp=2,sp@d0,n0", "megatron:tp=4,sp", "reduction", "sbp3d:m=2,n=2", "sbp3d:m=2,n=2@d0,n0", "sbp3d:m=2,k=2",
    "sbp3d:m=2,k=2@d0,n0", "sbp3d:n=2,k=2", "one-weird-trick", "table-parallel", "spatial:h=2,dp=2",
    "spatial:h=2,dp=2@d0,n0", "spatial:h=2,w=2", "spatial:h=4", "spatial:w=4",
)  # fmt: skip
OPTIMIZER = "sgd"
_DEVICE = "one rank of the emulated cluster"
DELAY_SECONDS = 200e-6
_APART = 1.1
"""Plans whose measured times differ by more than this are to be predicted in the right order."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    model: nn.Module
    batch: Any
    loss: Any

    def graph(self) -> Graph:
        return capture(self.model.train(), self.batch, self.loss)


def mlp() -> Workload:
    widths = (512, 1024, 1024, 512, 64)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    batch = (torch.randn(256, widths[0]), torch.randn(256, widths[-1]))
    return Workload("mlp", nn.Sequential(*layers[:-1]), batch, functional.mse_loss)


def bert() -> Workload:
    config = BertConfig(layers=2, width=128, heads=2, vocabulary=2048, positions=64)
    return Workload("bert-tiny", Bert(config), pretraining_batch(32, config), pretraining_loss)


def cnn() -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 16),
    )  # fmt: skip
    batch = (torch.randn(32, 3, 32, 32), torch.randint(0, 16, (32,)))
    return Workload("cnn", model, batch, functional.cross_entropy)


def dlrm() -> Workload:
    config = DlrmConfig(rows=(4000,) * 8, dense=64, bottom=(256, 128, 64), top=(512, 256, 1), dot=True)
    return Workload("dlrm-tiny", Dlrm(config), dlrm_batch(256, config), functional.binary_cross_entropy_with_logits)


def placed(name: str, batch_size: int) -> Workload:
    """A model of two layers whose best placement depends on the batch."""
    model = nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 512))
    batch = (torch.randn(batch_size, 512), torch.randn(batch_size, 512))
    return Workload(name, model, batch, functional.mse_loss)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": mlp, "bert": bert, "cnn": cnn, "dlrm": dlrm,
    "narrow": lambda: placed("narrow", 64), "wide": lambda: placed("wide", 4096),
}  # fmt: skip
PLACED = ("narrow", "wide")
PLACEMENTS = ("megatron:tp=2", "megatron:tp=2@d0,n0")
"""Tensor parallelism inside the nodes, and across them."""


def plans_of(graph: Graph, machine: Machine, strategies: Sequence[str] = STRATEGIES) -> list[Plan]:
    """The plans of all strategies that fit; those that turn out the same are kept once."""
    found: dict[Any, Plan] = {}
    for strategy in strategies:
        try:
            plan = make_plan(graph, machine, strategy)
        except StrategyError:
            continue
        found.setdefault((plan.graph, plan.memory), plan)
    return list(found.values())


def time_operators(rank: int, wanted: Wanted, mesh: Mesh) -> list[Outcome]:
    """Every call that any plan makes, on all ranks at once."""
    pace = Pace(communicator_over(mesh))
    return measure_wanted(wanted, OPTIMIZER, pace.device, pace)


def time_links(rank: int, mesh: Mesh, seconds: float) -> tuple[Timed, ...]:
    return time_collectives(communicator_over(mesh), seconds)


@dataclass(frozen=True, slots=True)
class Row:
    """One plan at one link speed."""

    model: str
    mbit: float
    strategy: str
    predicted_ms: float
    measured_ms: float
    """The median of the steps."""
    steps_ms: list[float]
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(slots=True)
class Seen:
    """What was measured at one link speed, pass by pass."""

    operators: list[list[Outcome]] = field(default_factory=list)
    collectives: list[tuple[Timed, ...]] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)

    def costs(self) -> CostModel:
        store = MeasurementStore(Path(tempfile.mkdtemp()) / "costs.sqlite")
        store.add(_DEVICE, torch.__version__, mean_outcomes(self.operators))
        return CostModel([store], profiles=())

    def fits(self) -> tuple[CollectiveFit, ...]:
        return tuple(
            fit_collective(same[0].kind, same[0].axes, [point for timed in same for point in timed.points])
            for same in zip(*self.collectives, strict=True)
        )


class Comparison:
    """The plans of one model, and their peaks of memory, which do not depend on the links and are measured once."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self._arguments, self._bare = arguments, Machine("emulated", 2, 2, "cpu")
        self._workload = WORKLOADS[name]()
        found = plans_of(self._workload.graph(), self._bare, PLACEMENTS if name in PLACED else STRATEGIES)
        self._plans = {plan.strategy: plan for plan in found}
        self._wanted = wanted_by(self._plans.values())
        self._peaks: dict[str, int] = {}
        say(f"{name}: {len(self._plans)} plans, {len(self._wanted.calls)} distinct calls")

    def at(self, mbit: float) -> tuple[list[Row], tuple[CollectiveFit, ...]]:
        """Every plan at one link speed."""
        seen = Seen()
        with Cluster(2, 2, mbit * 1e6 / 8, DELAY_SECONDS, ahead_of_others=self._arguments.ahead) as cluster:
            for _ in range(self._arguments.passes):
                self._pass(cluster, seen)
        machine, costs = machine_with(self._bare, seen.fits()), seen.costs()
        found = {strategy: predict(plan, machine, costs, OPTIMIZER) for strategy, plan in self._plans.items()}
        return [self._row(strategy, mbit, found[strategy], seen.steps[strategy]) for strategy in found], seen.fits()

    def _pass(self, cluster: Cluster, seen: Seen) -> None:
        mesh, given, workload = self._bare.mesh, self._arguments, self._workload
        seen.operators += cluster.run(time_operators, self._wanted, mesh, timeout=1800)[:1]
        seen.collectives += cluster.run(time_links, mesh, given.calibration / given.passes, timeout=600)[:1]
        for strategy, plan in self._plans.items():
            new = strategy not in self._peaks
            figures = run_plan(cluster, plan, Training(workload.model, workload.batch, OPTIMIZER, 1, given.steps, new))
            seen.steps.setdefault(strategy, []).extend(figures.step_seconds)
            if new:
                self._peaks[strategy] = figures.peak_bytes

    def _row(self, strategy: str, mbit: float, found: Prediction, steps: Sequence[float]) -> Row:
        row = Row(
            self._workload.name, mbit, strategy, 1e3 * found.seconds, 1e3 * statistics.median(steps),
            [round(1e3 * seconds, 1) for seconds in steps],
            found.memory.peak - found.memory.inputs, self._peaks[strategy],
        )  # fmt: skip
        say(
            f"{row.model:<10} {mbit:>5g} Mbit/s {row.strategy:<34} predicted {row.predicted_ms:8.1f} ms  measured "
            f"{row.measured_ms:8.1f} ms  {row.error:+6.1%}   memory {row.memory_error:+6.1%}"
        )
        return row


def machine_with(bare: Machine, fits: tuple[CollectiveFit, ...]) -> Machine:
    """The cluster as its calibration describes it."""
    device = DeviceType(_DEVICE, "cpu", 2**33, 1e10, (("float32", 5e10),))
    return replace(bare, nodes=(NodeKind("node", 2, (device,) * 2),), fits=fits)


def kendall(rows: Sequence[Row]) -> tuple[float, int]:
    """Kendall's tau of predicted and measured times, and how many pairs clearly apart are in the wrong order."""
    agreement, wrong, pairs = 0, 0, 0
    for one, other in itertools.combinations(rows, 2):
        pairs += 1
        product = (one.predicted_ms - other.predicted_ms) * (one.measured_ms - other.measured_ms)
        agreement += (product > 0) - (product < 0)
        low, high = sorted((one.measured_ms, other.measured_ms))
        wrong += product < 0 and high > _APART * low
    return agreement / max(pairs, 1), wrong


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found = []
    for (model, mbit), group in itertools.groupby(rows, key=lambda row: (row.model, row.mbit)):
        some = list(group)
        tau, wrong = kendall(some)
        errors, memory = [abs(row.error) for row in some], [abs(row.memory_error) for row in some]
        found.append({
            "model": model, "mbit": mbit, "plans": len(some), "kendall_tau": round(tau, 3),
            "pairs_in_wrong_order": wrong, "median_error": round(statistics.median(errors), 3),
            "worst_error": round(max(errors), 3), "worst_memory_error": round(max(memory), 3),
        })  # fmt: skip
    return found


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=["mlp", "bert", "cnn", "dlrm"])
    parser.add_argument("--mbit", nargs="+", type=float, default=[100.0, 400.0])
    parser.add_argument("--passes", type=int, default=2, help="each times operators, links and the steps of all plans")
    parser.add_argument("--steps", type=int, default=4, help="timed in a pass")
    parser.add_argument("--calibration", type=float, default=40.0, help="seconds for all collectives at one speed")
    parser.add_argument("--ahead", action="store_true", help="let the ranks go before other work on this host")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "prediction.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows, fits, commands = kept(arguments.output)
    commands.append(f"python -m benchmarks.prediction {' '.join(sys.argv[1:])}".strip())
    for name in arguments.models:
        comparison = Comparison(name, arguments)
        for mbit in arguments.mbit:
            some, found_fits = comparison.at(mbit)
            say(json.dumps(summary(some)[0]))
            rows = [row for row in rows if (row.model, row.mbit) != (some[0].model, mbit)] + some
            fits[f"{some[0].model} {mbit:g}"] = [asdict(fit) for fit in found_fits]
            write(arguments.output, rows, fits, commands)


def kept(output: Path) -> tuple[list[Row], dict[str, Any], list[str]]:
    """What was measured before, and by which commands."""
    if not output.exists():
        return [], {}, []
    found = json.loads(output.read_text(encoding="utf-8"))
    return [Row(**row) for row in found["rows"]], found["fits"], found["commands"]


def write(output: Path, rows: list[Row], fits: dict[str, Any], commands: list[str]) -> None:
    rows.sort(key=lambda row: (row.mbit, row.model))
    output.write_text(json.dumps({
        "commands": commands, "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__, "python": platform.python_version(),
        "summary": summary(rows), "rows": [asdict(row) for row in rows], "fits": fits,
    }, indent=1) + "\n", encoding="utf-8")  # fmt: skip
    output.with_suffix(".svg").write_text(scatter(rows), encoding="utf-8")


def scatter(rows: Sequence[Row]) -> str:
    """Predicted over measured; the dashed lines are 30 % off."""
    points = [
        Point(row.model, row.measured_ms, row.predicted_ms, f"{row.strategy}, {row.mbit:g} Mbit/s") for row in rows
    ]
    return draw(points, "measured ms a step", "predicted ms a step", diagonals=(1.0, 0.7, 1.3))


if __name__ == "__main__":
    main()
