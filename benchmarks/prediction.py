"""Predicted against measured: step time and peak memory of many plans on an emulated cluster at two link speeds.

    python -m benchmarks.prediction [--models mlp bert cnn dlrm] [--mbit 100 400] [--output FILE]
    python -m benchmarks.prediction --models narrow wide --mbit 100 --output FILE

Four ranks on two nodes. Collectives are calibrated and operators are timed on the cluster itself, all ranks at once as
in a training step; what is predicted from these alone is then measured. The plans are those of the named strategies in
several degrees and placements. Memory is what the step allocates; the batch lies on the host and is left out on both
sides. Writes a table as JSON and a scatter plot as SVG.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.emulated_cluster.cluster import Cluster
from benchmarks.emulated_cluster.run_plan import Training, run_plan
from benchmarks.plotting import Point, draw
from conjoin.cost import CostModel, Outcome, Store, mean_outcomes
from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import CollectiveFit, DeviceType, Machine, Mesh, NodeKind
from conjoin.runtime import Pace, calibrate_collectives, communicator_over
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
_DELAY = 200e-6
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


WORKLOADS = {
    "mlp": mlp, "bert": bert, "cnn": cnn, "dlrm": dlrm,
    "narrow": lambda: placed("narrow", 64), "wide": lambda: placed("wide", 4096),
}  # fmt: skip
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


def time_operators(rank: int, wanted: Wanted, mesh: Mesh, seconds: float) -> list[Outcome]:
    """Every call that any plan makes, on all ranks at once."""
    pace = Pace(communicator_over(mesh))
    return measure_wanted(wanted, OPTIMIZER, pace.device, pace, seconds)


def calibrate(rank: int, mesh: Mesh, seconds: float) -> tuple[CollectiveFit, ...]:
    return calibrate_collectives(communicator_over(mesh), seconds)


@dataclass(frozen=True, slots=True)
class Row:
    """One plan at one link speed."""

    model: str
    mbit: float
    strategy: str
    predicted_ms: float
    measured_ms: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def compare(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    workloads = {name: WORKLOADS[name]() for name in arguments.models}
    bare = Machine("emulated", 2, 2, "cpu")
    plans = {
        name: plans_of(workload.graph(), bare, PLACEMENTS if name in ("narrow", "wide") else STRATEGIES)
        for name, workload in workloads.items()
    }
    wanted = wanted_by(itertools.chain.from_iterable(plans.values()))
    say(f"{sum(map(len, plans.values()))} plans, {len(wanted.calls)} distinct calls")
    costs: CostModel | None = None
    rows: list[Row] = []
    fits: dict[str, Any] = {}
    for mbit in arguments.mbit:
        with Cluster(2, 2, mbit * 1e6 / 8, _DELAY, ahead_of_others=arguments.ahead) as cluster:
            if costs is None:
                costs = _costs(cluster.run(time_operators, wanted, bare.mesh, arguments.seconds, timeout=1800))
            found = cluster.run(calibrate, bare.mesh, arguments.calibration, timeout=600)[0]
            fits[str(mbit)] = [asdict(fit) for fit in found]
            machine = _machine(bare, found)
            for name, workload in workloads.items():
                training = Training(workload.model, workload.batch, OPTIMIZER, 2, arguments.steps)
                for plan in plans[name]:
                    prediction = predict(plan, machine, costs, OPTIMIZER)
                    rows.append(_row(workload.name, mbit, plan, prediction, cluster, training))
    return rows, fits


def _costs(answers: list[list[Outcome]]) -> CostModel:
    store = Store(Path(tempfile.mkdtemp()) / "costs.sqlite")
    store.add(_DEVICE, torch.__version__, mean_outcomes(answers))
    return CostModel([store], profiles=())


def _machine(bare: Machine, fits: tuple[CollectiveFit, ...]) -> Machine:
    """The cluster as its calibration describes it."""
    device = DeviceType(_DEVICE, "cpu", 2**33, 1e10, (("float32", 5e10),))
    return replace(bare, nodes=(NodeKind("node", 2, (device,) * 2),), fits=fits)


def _row(model: str, mbit: float, plan: Plan, found: Prediction, cluster: Cluster, training: Training) -> Row:
    measured = run_plan(cluster, plan, training)
    row = Row(
        model, mbit, plan.strategy, 1e3 * found.seconds, 1e3 * measured.seconds_per_step,
        found.memory.peak - found.memory.inputs, measured.peak_bytes,
    )  # fmt: skip
    say(
        f"{model:<10} {mbit:>5g} Mbit/s {plan.strategy:<34} predicted {row.predicted_ms:8.1f} ms  measured "
        f"{row.measured_ms:8.1f} ms  {row.error:+6.1%}   memory {row.memory_error:+6.1%}"
    )
    return row


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
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="for each operator")
    parser.add_argument("--calibration", type=float, default=40.0, help="seconds for all collectives at one speed")
    parser.add_argument("--ahead", action="store_true", help="let the ranks go before other work on this host")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "prediction.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows, fits = compare(arguments)
    found = summary(rows)
    for line in found:
        say(json.dumps(line))
    arguments.output.write_text(json.dumps({
        "command": f"python -m benchmarks.prediction {' '.join(sys.argv[1:])}".strip(), "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__, "python": platform.python_version(),
        "summary": found, "rows": [asdict(row) for row in rows], "fits": fits,
    }, indent=1) + "\n")  # fmt: skip
    arguments.output.with_suffix(".svg").write_text(scatter(rows))


def scatter(rows: Sequence[Row]) -> str:
    """Predicted over measured; the dashed lines are 30 % off."""
    points = [
        Point(row.model, row.measured_ms, row.predicted_ms, f"{row.strategy}, {row.mbit:g} Mbit/s") for row in rows
    ]
    return draw(points, "measured ms a step", "predicted ms a step", diagonals=(1.0, 0.7, 1.3))


if __name__ == "__main__":
    main()
