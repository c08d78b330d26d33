"""Predicted against measured on one GPU: step time of zoo models at their real size, in float32 and bfloat16.

    python -m benchmarks.prediction_gpu measure --store costs.sqlite --output measured.json    # on the GPU
    python -m benchmarks.prediction_gpu predict --store costs.sqlite --measured measured.json  # anywhere
    python -m benchmarks.prediction_gpu predict                                                # measured before

`measure` times every operator of every model on its own, once for each distinct call, and then whole training steps
with AdamW. `predict` simulates the steps from the operators alone and compares. Without a store the operators are those
of the shipped profile; without `--measured` the steps are those in the results, whose predictions are made anew. Beside
them stands the line through the profile's copies between host and device, with the error of every point.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from benchmarks.plotting import Point, draw
from conjoin.cost import CostModel, Measurement, Store, measure, shipped_profiles, write_key
from conjoin.frontends import capture
from conjoin.ir import Graph, flatten_tree
from conjoin.machine import Machine, NodeKind, fit_line, parse_machine
from conjoin.runtime import to_module
from conjoin.search import make_plan
from conjoin.sim import predict, wanted_by

MODELS = (
    "bert-large", "gpt-350m", "resnet-101", "vit-l-16", "alexnet", "inception-v3", "dlrm", "candle-uno", "gpt-1.3b",
    "resnext-50", "vgg13", "mlp", "nmt",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "prediction_h200.json"
OPTIMIZER = "adamw"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WARMUP, _STEPS = 3, 10


@dataclass(frozen=True, slots=True)
class Measured:
    """A training step on the GPU."""

    model: str
    dtype: str
    step_ms: float
    peak_bytes: int


def build(name: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, tuple[Any, ...], Graph]:
    """A model in a dtype, its batch, and its graph."""
    found = zoo.build(name, device=device)
    model = found.model.to(dtype).train()
    batch = tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in found.batch)
    return model, batch, capture(model, batch, found.loss)


def one_gpu(machine: str) -> Machine:
    """One device of a machine's first node."""
    device = parse_machine(machine).device_type(0)
    return Machine(device.name, 1, 1, "cuda", nodes=(NodeKind("node", 1, (device,)),))


def time_operators(graph: Graph, machine: Machine, store: Store, seconds: float) -> None:
    """Measure the calls of a model that the store does not have."""
    wanted, device = wanted_by([make_plan(graph, machine, "single")]), machine.device_type(0)
    for call, needs in wanted.calls:
        if store.find(device.name, torch.__version__, write_key(call, needs)) is None:
            store.add(device.name, torch.__version__, [measure(call, needs, "cuda", seconds=seconds)])


def time_step(name: str, dtype: str, model: nn.Module, batch: tuple[Any, ...], graph: Graph, before: int) -> Measured:
    """Whole training steps; memory without what was there before the model was."""
    module = to_module(graph, model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    assert graph.loss is not None
    seconds = []
    for i in range(_WARMUP + _STEPS):
        if i == _WARMUP:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()  # first: the gradients of the last step would be held during the forward pass
        loss: Tensor = flatten_tree(module(*batch))[0][graph.loss]
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    step_ms = 1e3 * statistics.median(seconds[_WARMUP:])
    return Measured(name, dtype, step_ms, torch.cuda.max_memory_allocated() - before)


def measure_all(arguments: argparse.Namespace) -> int:
    machine = one_gpu(arguments.machine)
    rows: list[Measured] = []
    start = time.perf_counter()
    with Store(arguments.store) as store:
        for name in arguments.models:
            for label, dtype in DTYPES.items():
                if time.perf_counter() - start > 60 * arguments.minutes:
                    break
                before = torch.cuda.memory_allocated()
                try:
                    model, batch, graph = build(name, dtype, "cuda")
                    time_operators(graph, machine, store, arguments.seconds_each)
                    rows.append(time_step(name, label, model, batch, graph, before))
                    print(f"{time.perf_counter() - start:.0f} s: {rows[-1]}", flush=True)
                except Exception as error:
                    print(f"{name} {label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                model = batch = graph = None  # type: ignore[assignment]
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


def predict_all(arguments: argparse.Namespace) -> int:
    measured = json.loads(arguments.measured.read_text(encoding="utf-8"))
    machine = one_gpu(arguments.machine)
    costs = CostModel([Store(arguments.store)] if arguments.store else [])
    rows = []
    for row in measured["rows"]:
        _, _, graph = build(row["model"], DTYPES[row["dtype"]], "meta")
        found = predict(make_plan(graph, machine, "single"), machine, costs, OPTIMIZER)
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
    errors, memory_errors = ([abs(row[key]) for row in rows] for key in ("error", "memory_error"))
    summary = {
        "steps": len(rows), "median_error": statistics.median(errors), "worst_error": max(errors),
        "median_memory_error": statistics.median(memory_errors), "worst_memory_error": max(memory_errors),
    }  # fmt: skip
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
    parser.add_argument("what", choices=["measure", "predict"])
    parser.add_argument("--models", nargs="+", default=[name for name in MODELS if name in zoo.names()])
    parser.add_argument("--machine", default="dgx-h200", help="a machine whose first device this is")
    parser.add_argument("--store", type=Path, help="where seconds of operators are kept")
    parser.add_argument("--seconds-each", type=float, default=0.03)
    parser.add_argument("--minutes", type=float, default=5.0, help="no further model is begun after that")
    parser.add_argument("--measured", type=Path, default=RESULTS, help="what `measure` or an earlier `predict` wrote")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    return measure_all(arguments) if arguments.what == "measure" else predict_all(arguments)


if __name__ == "__main__":
    sys.exit(main())
