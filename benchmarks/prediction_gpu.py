"""Predicted against measured on one GPU, and planned against plain: training steps in float32 and bfloat16.

    python -m benchmarks.prediction_gpu capture --graphs graphs                               # anywhere
    python -m benchmarks.prediction_gpu measure --graphs graphs --output measured.json        # on the GPU
    python -m benchmarks.prediction_gpu predict --graphs graphs --measured measured.json      # anywhere
    python -m benchmarks.prediction_gpu predict                                               # measured before

Two lists of models: `zoo`, whose operators the shipped profile holds, and `public`, which nothing was fitted on
(`public_models.py`; needs torchvision and transformers). `measure` times whole training steps with AdamW, of the plain
module, of `to_module` and of `load` in turn; with a store it first times every operator of the models on its own, once
for each distinct call. Between the steps it reads the host's speed by a small model's, as `conjoin calibrate` does.
`predict` simulates the steps from operators alone, on a host of that speed, and compares.
Without a store the operators are those of the shipped profile; without `--measured` the steps are those in the results,
whose predictions are made anew; of steps that were not measured the rows in the results are kept, and of other lists
than are asked for the predictions, too. `capture` writes the models' graphs to files, so that neither has to. Beside
them stands the line through the profile's copies between host and device, with the error of every point.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import zoo
from benchmarks import public_models
from benchmarks.plotting import Point, draw
from conjoin.cli import HostSpeed
from conjoin.cost import CostModel, Measurement, MeasurementStore, measure, shipped_profiles, write_key
from conjoin.frontends import capture
from conjoin.ir import Graph, flatten_tree, load_graph, save_graph
from conjoin.machine import Machine, NodeKind, fit_line, parse_machine
from conjoin.runtime import load, to_module
from conjoin.search import make_plan
from conjoin.sim import predict, wanted_by

ZOO = (
    "bert-large", "gpt-350m", "resnet-101", "vit-l-16", "alexnet", "inception-v3", "dlrm", "candle-uno", "gpt-1.3b",
    "resnext-50", "vgg13", "mlp", "nmt",
)  # fmt: skip
LISTS = {"zoo": ZOO, "public": public_models.NAMES, "others": public_models.OTHERS, "later": public_models.LATER}
RESULTS = Path(__file__).parent / "results" / "prediction_h200.json"
OPTIMIZER = "adamw"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WARMUP, _ROUNDS = 3, 9


@dataclass(frozen=True, slots=True)
class Measured:
    """Training steps on the GPU: of the captured module, the loaded plan and the plain one, in turn; bytes of ours."""

    list: str
    model: str
    dtype: str
    step_ms: float
    loaded_ms: float
    plain_ms: float
    step_over_plain: float
    loaded_over_plain: float
    peak_bytes: int
    host_factor: float
    """How much longer the host took for a small step than the profile's; the median of readings between steps."""
    host_readings: int


class Case(NamedTuple):
    """A model in a dtype with its batch, its loss where it computes none itself, and its graph."""

    model: nn.Module
    batch: Any
    loss: Callable[..., Tensor] | None
    graph: Graph

    def plain(self) -> list[Any]:
        """What the user's own loop computes and holds: all that comes out of the model, the loss last."""
        if self.loss is None:
            made = self.model(**self.batch)
            return [made, made.loss]
        count = len(inspect.signature(self.model.forward).parameters)
        return [self.loss(self.model(*self.batch[:count]), *self.batch[count:])]

    def by(self, module: nn.Module) -> list[Any]:
        """The same by a module made from the graph."""
        assert self.graph.loss is not None
        made = module(**self.batch) if isinstance(self.batch, dict) else module(*self.batch)
        return [made, flatten_tree(made)[0][self.graph.loss]]


def build(name: str, dtype: torch.dtype, device: str, graphs: Path | None = None) -> Case:
    """A model of either list in a dtype on a device; its graph from its file where there is one."""
    if name in (*public_models.NAMES, *public_models.OTHERS, *public_models.LATER):
        model, batch, loss = public_models.build(name, device)
    else:
        model, batch, loss = zoo.build(name, device=device)  # type: ignore[assignment]
    model = model.to(dtype).train()
    batch = tree_map(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), batch)
    path = graph_path(graphs, name, dtype) if graphs else None
    if path is not None and path.exists():
        return Case(model, batch, loss, load_graph(path))
    return Case(model, batch, loss, capture(model, batch, loss) if loss else capture(model, batch))


def graph_path(graphs: Path, name: str, dtype: torch.dtype) -> Path:
    return graphs / f"{name}-{dtype_label(dtype)}.json"


def dtype_label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def capture_one(graphs: Path, name: str, dtype: torch.dtype) -> None:
    """Write the graph of a model to its file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        save_graph(build(name, dtype, "meta").graph, graph_path(graphs, name, dtype))
    except Exception as error:
        print(f"{name} {dtype}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def capture_all(arguments: argparse.Namespace) -> int:
    arguments.graphs.mkdir(parents=True, exist_ok=True)
    jobs = [(arguments.graphs, name, dtype) for _, name in chosen(arguments) for dtype in DTYPES.values()]
    with get_context("spawn").Pool(arguments.processes, maxtasksperchild=8) as pool:
        pool.starmap(capture_one, jobs, chunksize=1)
    return 0


def chosen(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The models that were asked for, each with its list."""
    return [(of, name) for of in arguments.lists for name in LISTS[of] if name in (arguments.models or LISTS[of])]


def one_gpu(machine: str) -> Machine:
    """One device of a machine's first node."""
    device = parse_machine(machine).device_type(0)
    return Machine(device.name, 1, 1, "cuda", nodes=(NodeKind("node", 1, (device,)),))


def time_operators(graph: Graph, machine: Machine, store: MeasurementStore, seconds: float) -> None:
    """Measure the calls of a model that the store does not have."""
    wanted, device = wanted_by([make_plan(graph, machine, "single")]), machine.device_type(0)
    for call, needs in wanted.calls:
        if store.find(device.name, torch.__version__, write_key(call, needs)) is None:
            store.add(device.name, torch.__version__, [measure(call, needs, "cuda", seconds=seconds)])


def stepper(optimizer: torch.optim.Optimizer, forward: Callable[[], list[Any]]) -> Callable[[], None]:
    """A training step, as in a loop that holds what the model gives until the gradients are there."""

    def step() -> None:
        optimizer.zero_grad()  # first: the gradients of the last step would be held during the forward pass
        made = forward()
        made[-1].backward()
        del made
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def time_steps(model_list: str, name: str, dtype: str, case: Case, before: int, host: HostSpeed) -> Measured:
    """Steps in turn, the order turned each round; memory of the captured module alone, without what was there before.

    The host's speed is read between the rounds: it changes by half within a minute. The step after a reading is not
    counted. The captured module and the plain one share weights and optimizer; the loaded plan has its own. Python's
    collector is kept from running in some steps and not in others.
    """
    captured = to_module(case.graph, case.model)
    optimizer = torch.optim.AdamW(captured.parameters(), lr=1e-5)
    ours = stepper(optimizer, lambda: case.by(captured))
    for _ in range(_WARMUP):
        ours()
    torch.cuda.reset_peak_memory_stats()
    ours()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    plan = make_plan(case.graph, parse_machine("local:1"), "single")
    module = load(plan, case.model, device="cuda")
    loaded = stepper(torch.optim.AdamW(module.parameters(), lr=1e-5), lambda: case.by(module))
    steps = [ours, loaded, stepper(optimizer, case.plain)]
    rounds: list[list[float]] = []
    readings: list[float] = []
    gc.collect()
    gc.disable()
    for i in range(_WARMUP + _ROUNDS):
        readings.append(host.read())
        steps[i % len(steps)]()
        taken = [0.0] * len(steps)
        for k in range(len(steps)):
            which = (i + k) % len(steps)
            taken[which] = milliseconds(steps[which])
        rounds.append(taken)
    gc.enable()
    kept = rounds[_WARMUP:]
    step_ms, loaded_ms, plain_ms = (statistics.median(taken) for taken in zip(*kept, strict=True))
    ratios = [statistics.median(taken[i] / taken[2] for taken in kept) for i in range(2)]
    speed = statistics.median(readings), len(readings)
    return Measured(model_list, name, dtype, step_ms, loaded_ms, plain_ms, *ratios, peak_bytes, *speed)


def measure_all(arguments: argparse.Namespace) -> int:
    machine = one_gpu(arguments.machine)
    rows: list[Measured] = []
    start = time.perf_counter()
    host = HostSpeed(machine.device_type(0), torch.device("cuda"))
    for of, name in chosen(arguments):
        for label, dtype in ((label, DTYPES[label]) for label in arguments.dtypes):
            if time.perf_counter() - start > 60 * arguments.minutes:
                break
            before = torch.cuda.memory_allocated()
            case = None
            try:
                case = build(name, dtype, "cuda", arguments.graphs)
                if arguments.store:
                    with MeasurementStore(arguments.store) as store:
                        time_operators(case.graph, machine, store, arguments.seconds_each)
                rows.append(time_steps(of, name, label, case, before, host))
                print(f"{time.perf_counter() - start:.0f} s: {rows[-1]}", flush=True)
            except Exception as error:
                print(f"{name} {label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            del case
            gc.collect()
            torch.cuda.empty_cache()
            facts = _circumstances() | {"rows": [asdict(row) for row in rows]}
            arguments.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


def _circumstances() -> dict[str, Any]:
    return {
        "date": str(date.today()),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def fit_copies(device: str) -> dict[str, Any]:
    """The line through the timed copies between pinned host memory and a device of the profile, and every point."""
    timed = {
        int(outcome.key.split()[1]): outcome.forward
        for profile in shipped_profiles()
        if profile.device == device
        for outcome in profile.outcomes
        if isinstance(outcome, Measurement) and outcome.key.startswith("copy ")
    }
    fit = fit_line(list(timed), list(timed.values()))
    return {
        "latency_microseconds": round(1e6 * fit.latency, 2),
        "gigabytes_per_second": round(1e-9 / fit.seconds_per_byte, 2),
        "r_squared": round(fit.r_squared, 6),
        "points": [
            {"bytes": size, "microseconds": round(1e6 * timed[size], 2), "error": round(error, 4)}
            for size, error in zip(sorted(timed), fit.errors, strict=True)
        ],
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How far a list's predictions were off, and planned steps against plain ones."""
    found: dict[str, float] = {"steps": len(rows)}
    for key in ("error", "memory_error"):
        off = [abs(row[key]) for row in rows]
        found |= {f"median_{key}": round(statistics.median(off), 4), f"worst_{key}": max(off)}
    for key in ("step_over_plain", "loaded_over_plain"):
        ratios = [row[key] for row in rows if key in row]
        if ratios:
            found |= {f"median_{key}": round(statistics.median(ratios), 4), f"worst_{key}": round(max(ratios), 4)}
    return found


def graph_of(name: str, dtype: torch.dtype, graphs: Path | None) -> Graph:
    """The graph of a model, from its file where there is one."""
    path = graph_path(graphs, name, dtype) if graphs else None
    return load_graph(path) if path is not None and path.exists() else build(name, dtype, "meta").graph


def host_factor(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """How fast the host was between a row's steps; where it was read once, before them, the median over the list."""
    if row.get("host_readings", 1) > 1:
        return float(row["host_factor"])
    readings = [other["host_factor"] for other in rows if other["list"] == row["list"] and "host_factor" in other]
    return statistics.median(readings) if readings else 1.0


def with_host(machine: Machine, factor: float) -> Machine:
    """The machine with a host that takes so much longer for calls."""
    device = replace(machine.device_type(0), host_factor=factor)
    return replace(machine, nodes=(NodeKind("node", 1, (device,)),))


def _named(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["list"], row["model"], row["dtype"]


def predict_all(arguments: argparse.Namespace) -> int:
    measured = json.loads(arguments.measured.read_text(encoding="utf-8"))
    machine, anew = one_gpu(arguments.machine), {_named(row) for row in measured["rows"]}
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    kept = [row for row in before if _named(row) not in anew]
    measured["rows"] = [*kept, *measured["rows"]]
    costs = CostModel([MeasurementStore(arguments.store)] if arguments.store else [])
    rows = []
    for row in measured["rows"]:
        if row["list"] not in arguments.lists:
            rows.append(row)
            continue
        graph = graph_of(row["model"], DTYPES[row["dtype"]], arguments.graphs)
        here = with_host(machine, host_factor(row, measured["rows"]))
        found = predict(make_plan(graph, here, "single"), here, costs, OPTIMIZER)
        error, memory = 1e3 * found.seconds / row["step_ms"] - 1, found.memory.peak / row["peak_bytes"] - 1
        sources = {source.value: round(seconds, 6) for source, seconds in found.breakdown.sources}
        rows.append({
            **row, "predicted_ms": round(1e3 * found.seconds, 3), "error": round(error, 3),
            "predicted_bytes": found.memory.peak, "memory_error": round(memory, 3), "seconds_by_source": sources,
        })  # fmt: skip
        print(
            f"{row['model']:<14} {row['dtype']:<9} predicted {1e3 * found.seconds:8.2f} ms  measured "
            f"{row['step_ms']:8.2f} ms  {error:+6.1%}   memory {memory:+6.1%}", flush=True,
        )  # fmt: skip
    summary = {of: summarise([row for row in rows if row["list"] == of]) for of in LISTS}
    copies = fit_copies(machine.device_type(0).name)
    print(json.dumps(summary), json.dumps(copies), sep="\n")
    command = f"python -m benchmarks.prediction_gpu {' '.join(sys.argv[1:])}"
    made = {"command": command, "predicted": str(date.today()), "summary": summary, "copies": copies, "rows": rows}
    facts = {**measured, **made}
    arguments.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    points = [Point(r["dtype"], r["step_ms"], r["predicted_ms"], r["model"]) for r in rows]
    picture = draw(points, "measured ms a step", "predicted ms a step", diagonals=(1.0, 0.9, 1.1))
    arguments.output.with_suffix(".svg").write_text(picture, encoding="utf-8")
    return 0


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["capture", "measure", "predict"])
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS))
    parser.add_argument("--models", nargs="+", help="only these of the lists")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="only these are measured")
    parser.add_argument("--machine", default="dgx-h200", help="a machine whose first device this is")
    parser.add_argument("--graphs", type=Path, help="where the models' graphs are kept as files")
    parser.add_argument("--processes", type=int, default=2, help="that capture at the same time")
    parser.add_argument("--store", type=Path, help="where seconds of operators are kept")
    parser.add_argument("--seconds-each", type=float, default=0.03)
    parser.add_argument("--minutes", type=float, default=5.0, help="no further model is begun after that")
    parser.add_argument("--measured", type=Path, default=RESULTS, help="what `measure` or an earlier `predict` wrote")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    return {"capture": capture_all, "measure": measure_all, "predict": predict_all}[arguments.what](arguments)


if __name__ == "__main__":
    sys.exit(main())
