"""Published training throughput as a judge: steps that people measured on V100, A100 and H100, against predicted ones.

    python -m benchmarks.published                    # every row; writes results/published.json
    python -m benchmarks.published --rows mpt-3b H100 # those whose name has all these words; the others are kept

The rows are in `published_rows.toml`: what a source prints, what it is taken as here, and what differs. Each becomes a
model of the published size on the meta device, a machine, a named strategy and a predicted step. Rows that cannot be
said here are listed with the reason and count nowhere. Nothing is fitted to a row or a source.

A ratio is predicted over published seconds. The order of steps says little, as batches differ: beside its tau stands
that of the part of the peak rate that goes into the model (MFU).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.plotting import Point, draw
from benchmarks.published_models import capture_step
from conjoin.cost import OPTIMIZERS, CostModel, work_of
from conjoin.machine import Machine, parse_machine
from conjoin.search import make_plan
from conjoin.sim import Prediction, predict

HERE = Path(__file__).parent
ROWS, MACHINES, RESULTS = HERE / "published_rows.toml", HERE / "machines", HERE / "results" / "published.json"
ALL_BYTES = 2**32
"""Of a bundle that all parameters are in."""
PARTS = ("forward", "backward", "recompute", "update", "exposed", "waiting")


@dataclass(frozen=True, slots=True)
class Row:
    """A figure as its source has it, and what it is taken as."""

    name: str
    """Of the source."""
    url: str
    date: str
    gpu: str
    gpus: int
    machine: str
    model: str
    batch: int
    """Samples of a step on all GPUs."""
    precision: str
    """float32, bfloat16 or float16 throughout, or with `autocast` or `mixed` before it, or as `--precision` has it."""
    strategy: str
    optimizer: str
    published: float
    unit: str
    length: int = 0
    accumulate: int = 1
    """Micro-batches of a step."""
    recompute: str = ""
    """What is run again in the backward pass, as a strategy says it: full, every-2, selective."""
    step_teraflops: float = 0.0
    """Of the whole step as the source counts them, where it prints a rate."""
    attention: float = 1.0
    """How many times as long its kernels for attention take as those that are priced."""
    update_passes: int = 0
    """Reads and writes of each parameter in an update that none of torch's optimizers makes; `optimizer` is near it."""
    overlaps: bool = True
    """Whether gradients are summed up while the backward pass goes on, and not in one go after it."""
    differs: str = ""
    inexpressible: str = ""
    """Why it cannot be said here."""

    @property
    def title(self) -> str:
        length = f" length {self.length}" if self.length else ""
        again = f" recompute {self.recompute}" if self.recompute else ""
        setup = f"{self.model}{length} batch {self.batch}/{self.accumulate}{again} {self.precision} {self.strategy}"
        return f"{self.gpus} {self.gpu} {setup} {self.inexpressible} ({self.name})"

    @property
    def request(self) -> str:
        """The strategy with all that is asked of it."""
        again = f"+recompute={self.recompute}" if self.recompute else ""
        return f"{'single' if self.gpus == 1 else self.strategy}{again}+micro={self.accumulate}"

    @property
    def seconds(self) -> float:
        """Of a step, as published."""
        match self.unit:
            case "tokens/s/GPU":
                return self.batch * self.length / (self.published * self.gpus)
            case "samples/s":
                return self.batch / self.published
            case "TFLOP/s/GPU":
                return self.step_teraflops / (self.published * self.gpus)
            case "ms":
                return self.published / 1e3
        raise ValueError(f"no such unit: {self.unit}")


def read_rows(path: Path = ROWS) -> tuple[list[Row], dict[str, Any]]:
    """All rows, each with what its source says of all of them, and the models by name."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    sources = [(source, source.pop("rows")) for source in data["source"]]
    return [Row(**{**source, **row}) for source, rows in sources for row in rows], data["models"]


def machine_of(row: Row) -> Machine:
    """As many nodes as the row has GPUs for; one GPU is the first of a node."""
    per_node = parse_machine(row.machine, MACHINES).devices_per_node
    nodes = f"1x{row.gpus}" if row.gpus < per_node else f"{row.gpus // per_node}"
    return parse_machine(f"{row.machine}:{nodes}", MACHINES)


def predicted(row: Row, models: Mapping[str, Any], costs: CostModel) -> Prediction:
    """The step that is predicted for a row."""
    machine = machine_of(row)
    graph = capture_step(models[row.model], row.length, row.batch, row.precision)
    plan = make_plan(graph, machine, row.request)
    if not row.overlaps:
        plan = replace(plan, bundle_bytes=ALL_BYTES)
    return predict(plan, machine, costs, row.optimizer)


def judged(row: Row, found: Prediction, costs: CostModel) -> dict[str, Any]:
    """A row with what was predicted for it; seconds of products are those at the peak rate, on one GPU."""
    program, spent = found.simulation.program, found.breakdown
    again = spent.recompute / spent.forward
    works = [work_of(operator.call, operator.needs) for operator in program.skeleton.operators]
    flops = sum(w.forward.flops * (1 + again) + w.backward.flops for w in works if w.family == "contraction")
    mfu = found.step_flops / found.peak_flops
    update = spent.update * (row.update_passes / OPTIMIZERS[row.optimizer].passes if row.update_passes else 1.0)
    slower = (row.attention - 1) * _attention_seconds(row, found, costs, again)
    seconds = found.seconds - spent.update + update + slower
    return {
        **asdict(row), "title": row.title, "expressible": True, "published_seconds": row.seconds,
        "predicted_seconds": seconds, "ratio": seconds / row.seconds, "published_mfu": mfu / row.seconds,
        "predicted_mfu": mfu / seconds, "products_at_peak": program.steps * flops / found.peak_flops,
        "parts": {name: getattr(spent, name) for name in PARTS} | {"update": update, "slower attention": slower},
        "fits": found.fits, "peak_gib": found.memory.peak / 2**30,
    }  # fmt: skip


def _attention_seconds(row: Row, found: Prediction, costs: CostModel, again: float) -> float:
    """Of a step, on one GPU of those that the batch is split over: forward, also as it is run again, and backward."""
    program, device = found.simulation.program, machine_of(row).device_types[0]
    calls = [(operator.call, operator.needs) for operator in program.skeleton.operators]
    told = [costs.operator(*call, device) for call in calls if work_of(*call).family == "attention"]
    whole = sum(cost.forward.value * (1 + again) + cost.backward.value for cost in told)
    return program.steps * whole / row.gpus


def kendall(rows: Sequence[dict[str, Any]], key: str) -> float:
    """Kendall's tau of what was predicted and what was published."""
    told = [(row[f"predicted_{key}"], row[f"published_{key}"]) for row in rows]
    products: list[float] = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(told, 2)]
    return sum((product > 0) - (product < 0) for product in products) / max(len(products), 1)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every type of GPU how far steps are off; rows that could not be said count nowhere."""
    found = []
    counted = [row for row in rows if "ratio" in row]
    for gpu in dict.fromkeys(row["gpu"] for row in counted):
        some = [row for row in counted if row["gpu"] == gpu]
        worst = max(some, key=lambda row: abs(row["ratio"] - 1))
        found.append({
            "gpu": gpu, "rows": len(some), "median_ratio": round(median(row["ratio"] for row in some), 3),
            "median_error": round(median(abs(row["ratio"] - 1) for row in some), 3),
            "worst_ratio": round(worst["ratio"], 3), "worst": worst["title"],
            "kendall_tau_steps": round(kendall(some, "seconds"), 3), "kendall_tau_mfu": round(kendall(some, "mfu"), 3),
        })  # fmt: skip
    return found


def line(row: Mapping[str, Any]) -> str:
    """A row of the printed table."""
    if "ratio" not in row:
        return f"{row['published']:>9g} {row['unit']:<14} {'':>6}  {row['title']}"
    return f"{row['published_seconds']:>10.4f} {row['predicted_seconds']:>10.4f} s {row['ratio']:>7.2f}  {row['title']}"


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Everything so far, with a picture of steps."""
    facts = {
        "command": "python -m benchmarks.published", "date": date.today().isoformat(), "torch": torch.__version__,
        "python": platform.python_version(), "machine": platform.machine(),
        "costs": "the profiles that ship, then the devices' peaks: predicted, not measured",
    }  # fmt: skip
    path.write_text(json.dumps({**facts, "summary": summary(rows), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    told = [row for row in rows if "ratio" in row]
    points = [Point(row["gpu"], row["published_seconds"], row["predicted_seconds"], row["title"]) for row in told]
    if points:
        picture = draw(points, "published seconds a step", "predicted seconds a step", diagonals=(1.0, 0.8, 1.25))
        path.with_suffix(".svg").write_text(picture, encoding="utf-8")


def _earlier(path: Path, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Rows that were judged before, by their titles; what differs is as it is told now."""
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    now = {row.title: row.differs for row in rows}
    return {row["title"]: {**row, "differs": now[row["title"]]} for row in before if row["title"] in now}


def main(arguments: Sequence[str] | None = None) -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], help="words that the line of a row has, all of them")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    rows, models = read_rows()
    done = _earlier(chosen.output, rows) if chosen.rows else {}
    costs = CostModel()
    print(f"{'published':>10} {'predicted':>10}   {'ratio':>7}  row")
    for row in rows:
        if row.inexpressible:
            done[row.title] = {**asdict(row), "title": row.title, "expressible": False}
        elif all(word in row.title for word in chosen.rows):
            done[row.title] = judged(row, predicted(row, models, costs), costs)
        if row.title in done:
            print(line(done[row.title]), flush=True)
            write(chosen.output, [done[one.title] for one in rows if one.title in done])
    for found in summary(list(done.values())):
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
