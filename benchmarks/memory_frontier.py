"""Step time and peak memory at falling budgets on one GPU: recompute + offload as planned, against torch's own ways.

    python -m benchmarks.memory_frontier plan --plans plans                # graphs and plans, on any host
    python -m benchmarks.memory_frontier measure --plans plans --out rows.json --minutes 2     # on the GPU

Budgets go from the peak of a step of which all is kept down to a part of its activation bytes. At each the plan says
before the run what it holds and whether that fits; measured are the median step and `torch.cuda.max_memory_allocated`.
Beside it stand the model with nothing saved, with every block checkpointed, by parts of blocks (`selective`), and
compiled by torch with `activation_memory_budget`. All in bfloat16 with AdamW.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import zoo
from benchmarks.prediction_gpu import Case, milliseconds, one_gpu, stepper
from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan, load_graph, load_plan, save_graph
from conjoin.machine import Machine
from conjoin.runtime import load
from conjoin.search import Wish, find_plan, make_plan
from conjoin.sim import predict

PARTS = (1.0, 0.8, 0.6, 0.45, 0.3)
"""Of the activation bytes that may be there at the peak."""
BATCHES = {"gpt-125m": 8, "resnet-50": 64, "u-net": 16}
_WARMUP, _ROUNDS = 2, 5


class UNet(nn.Module):
    """Four levels of two convolutions each, down and up again, with skips (Ronneberger et al., 2015), padded."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]
        self.down = nn.ModuleList(_convolved(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.bottom = _convolved(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths))
        self.merge = nn.ModuleList(_convolved(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        made: Tensor = self.head(x)
        return made


def _convolved(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
        nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
    )  # fmt: skip


def build(name: str, device: str) -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    """A model in bfloat16 with a batch and its loss."""
    size, loss = BATCHES[name], functional.cross_entropy
    if name == "u-net":
        with torch.device(device):
            model: nn.Module = UNet()
            batch: Any = (torch.randn(size, 3, 256, 256), torch.randint(4, (size, 256, 256)))
    else:
        model, batch, loss = zoo.build(name, batch_size=size, device=device)  # type: ignore[assignment]
    batch = tuple(x.to(device, torch.bfloat16) if x.is_floating_point() else x.to(device) for x in batch)
    return model.to(torch.bfloat16).train(), batch, loss


@dataclass(frozen=True, slots=True)
class Row:
    """A way to run a step, told before and measured."""

    model: str
    way: str
    budget_bytes: int
    told_bytes: int
    told_ms: float
    fits: bool
    """As told before the run."""
    step_ms: float = 0.0
    peak_bytes: int = 0
    strategy: str = ""


def make_plans(folder: Path, models: list[str], machine: Machine, seconds: float) -> Iterator[Row]:
    """Capture every model, and write a plan for every budget with what it tells."""
    costs = CostModel()
    folder.mkdir(parents=True, exist_ok=True)
    for name in models:
        path = folder / f"{name}.graph.json"
        graph = load_graph(path) if path.exists() else capture(*build(name, "meta"))
        save_graph(graph, path)
        told = predict(make_plan(graph, machine, "single"), machine, costs, "adamw")
        peak, activations = told.memory.peak, told.memory.activations
        for part in PARTS:
            budget = peak - int((1 - part) * activations)
            try:
                plan = find_plan(graph, machine, costs, Wish("joint", seconds, "adamw", budget)).plan
            except StrategyError as error:
                yield Row(name, f"planned {part}", budget, 0, 0.0, False, strategy=str(error)[:200])
                continue
            assert isinstance(plan, Plan)
            yield _write(plan, folder, name, f"planned {part}", budget, machine, costs)
        for mode in ("full", "selective"):
            yield _write(_named(graph, machine, mode), folder, name, f"recompute {mode}", peak, machine, costs)


def _named(graph: Graph, machine: Machine, mode: str) -> Plan:
    try:
        return make_plan(graph, machine, f"single+recompute={mode}")
    except Exception as error:
        print(f"{graph.name} {mode}: {str(error)[:100]}", flush=True)
        return make_plan(graph, machine, "single")


def _write(  # noqa: PLR0913 – what a row tells
    plan: Plan, folder: Path, name: str, way: str, budget: int, machine: Machine, costs: CostModel
) -> Row:
    plan.save(folder / f"{name} {way}.plan.json".replace(" ", "_"))
    told = predict(plan, machine, costs, "adamw")
    return Row(
        name, way, budget, told.memory.peak, 1e3 * told.seconds, told.memory.peak <= budget, strategy=plan.strategy
    )


def run_step(step: Callable[[], None]) -> tuple[float, int]:
    """The median step in milliseconds, and the most bytes that were allocated in any."""
    for _ in range(_WARMUP):
        step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    taken = [milliseconds(step) for _ in range(_ROUNDS)]
    return statistics.median(taken), torch.cuda.max_memory_allocated()


def measure(row: Row, folder: Path) -> Row:
    """A plan's step on this GPU."""
    plan = load_plan(folder / f"{row.model} {row.way}.plan.json".replace(" ", "_"))
    model, batch, _ = build(row.model, "cuda")
    module = load(plan, model, device="cuda")
    del model
    module.compare_every(0)
    step = stepper(torch.optim.AdamW(module.parameters(), lr=1e-5), lambda: [module(*batch)])
    return Row(**{**asdict(row), **dict(zip(("step_ms", "peak_bytes"), run_step(step), strict=True))})


def measure_torch(name: str, budget: float | None, graph: Graph) -> Row:
    """The plain model, or compiled with a part of its activation memory."""
    model, batch, loss = build(name, "cuda")
    case = Case(model, batch, loss, graph)
    forward: Callable[[], list[Any]] = case.plain
    way = "torch eager"
    if budget is not None:
        way = f"torch compiled, activation_memory_budget={budget}"
        torch._functorch.config.activation_memory_budget = budget
        torch._dynamo.reset()
        forward = torch.compile(case.plain)
    ms, peak = run_step(stepper(torch.optim.AdamW(model.parameters(), lr=1e-5), forward))
    return Row(name, way, 0, 0, 0.0, False, ms, peak)


def measure_all(folder: Path, minutes: float, budgets: list[float]) -> Iterator[Row]:
    """Every plan, then torch's own ways, while there is time."""
    end = time.perf_counter() + 60 * minutes
    rows = [Row(**row) for row in json.loads((folder / "told.json").read_text(encoding="utf-8"))]
    graphs = {name: load_graph(folder / f"{name}.graph.json") for name in dict.fromkeys(row.model for row in rows)}
    jobs: list[Callable[[], Row]] = []
    for name, graph in graphs.items():
        jobs.append(lambda name=name, graph=graph: measure_torch(name, None, graph))  # type: ignore[misc]
        jobs += [lambda row=row: measure(row, folder) for row in rows if row.model == name and row.told_bytes]  # type: ignore[misc]
    for name, graph in graphs.items():
        jobs += [lambda name=name, graph=graph, b=b: measure_torch(name, b, graph) for b in budgets]  # type: ignore[misc]
    for job in jobs:
        if time.perf_counter() > end:
            print("no time is left for the others", flush=True)
            return
        try:
            yield job()
        except Exception as error:
            print(f"{type(error).__name__}: {str(error)[:300]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("plan", "measure"))
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(BATCHES))
    parser.add_argument("--machine", default="dgx-h200", help="a machine whose first device this is")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a search")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--torch-budgets", nargs="*", type=float, default=[0.5, 0.2])
    arguments = parser.parse_args()
    if arguments.command == "plan":
        rows = make_plans(arguments.plans, arguments.models, one_gpu(arguments.machine), arguments.seconds)
        arguments.out = arguments.plans / "told.json"
    else:
        rows = measure_all(arguments.plans, arguments.minutes, arguments.torch_budgets)
    found = []
    for row in rows:
        found.append(asdict(row))
        print(json.dumps(found[-1]), flush=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
