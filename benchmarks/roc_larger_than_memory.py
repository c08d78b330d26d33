"""A graph network whose step needs several times the memory that it is given: what it holds, and what that costs.

    python -m benchmarks.roc_larger_than_memory [--device cuda] [--vertices N] [--degree N] [--layers N] [--share 0.333]
    python -m benchmarks.roc_larger_than_memory --device cuda --model gcn --features 602 --hidden 64 --layers 2

The zoo's deep residual GCN, or its GCN, on a random graph is trained as it is; then with a share of the memory that
this took, which is all that torch gives out on a GPU (`torch.cuda.set_per_process_memory_fraction`). The plan is what a
search finds for that limit: tensors are kept, made again, or lie on the host between forward and backward. On a CPU,
where the host's memory is the device's, it is `single+offload=activations`, and bytes are those told before the run.
Losses of both must be the same. Features and edges, which every step reads, stay on the device, and count, unless they
alone are more than the limit: then the search has them on the host during the step, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conjoin
from conjoin.cost import CostModel
from conjoin.ir import Graph, LeafKind, Plan, host_inputs, plan_from_json, plan_to_json
from conjoin.machine import Machine, parse_machine
from conjoin.search import Wish, find_plan, make_plan
from conjoin.sim import Wanted, measure_memory, predict, simulate
from zoo.gnn import DeepGcn, Gcn, GnnConfig, symmetric_weights

CLASSES = 41
MODELS = {"deep-gcn": DeepGcn, "gcn": Gcn}
_OUTSIDE = 0.05
"""Of the limit is for holes between tensors and for libraries; the kept order of edges is counted besides."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the graph and the model."""

    vertices: int
    degree: int
    hidden: int
    layers: int
    features: int = 128
    kind: str = "deep-gcn"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[self.kind](GnnConfig(self.features, CLASSES, self.degree, self.hidden, self.layers))

    def batch(self) -> tuple[Tensor, ...]:
        """Features, edges in the order of their targets, weights and labels, on the host."""
        generator = torch.Generator().manual_seed(0)
        targets = torch.arange(self.vertices).repeat_interleave(self.degree)
        edges = torch.stack((torch.randint(self.vertices, targets.shape, generator=generator), targets))
        x = torch.randn(self.vertices, self.features, generator=generator)
        labels = torch.randint(CLASSES, (self.vertices,), generator=generator)
        return x, edges, symmetric_weights(edges, self.vertices), labels

    def order_bytes(self) -> int:
        """What is kept of the order of edges: their ends, by targets, by sources, and of weights."""
        edges = self.vertices * self.degree
        return edges * (2 * 8 + 4 + 4 + 8 + 4) + 2 * 8 * (self.vertices + 1)


def captured(sizes: Sizes) -> Graph:
    """The step, without values."""
    vertices, edges = sizes.vertices, sizes.vertices * sizes.degree
    with torch.device("meta"):
        model, x, weights = sizes.model(), torch.empty(vertices, sizes.features), torch.empty(edges)
        ends, labels = (torch.empty(shape, dtype=torch.int64) for shape in ((2, edges), (vertices,)))
    batch = (x, ends, weights, labels)
    return conjoin.capture(model, batch, F.cross_entropy)


class Trained(NamedTuple):
    """What some steps gave: the median of their seconds, and on a GPU the most bytes allocated, and reserved."""

    losses: list[float]
    seconds: float
    peak: int
    reserved: int


def trained(plan: Plan, sizes: Sizes, device: str, steps: int, limit: int | None = None) -> Trained:
    """Steps, on a GPU in a process of their own, which gets no more than the limit: nothing of another run is there."""
    if device == "cpu":
        return _trained(plan_to_json(plan), sizes, device, steps, limit)
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_trained, (plan_to_json(plan), sizes, device, steps, limit))


def _trained(plan: str, sizes: Sizes, device: str, steps: int, limit: int | None) -> Trained:
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    module = conjoin.load(plan_from_json(plan), sizes.model(), device=device)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    batch, losses, taken = module.placed(sizes.batch()), [], []
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(steps):
        wait()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        wait()
        taken.append(time.perf_counter() - start)
        losses.append(loss.item())
    most = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if device == "cuda" else (0, 0)
    return Trained(losses, statistics.median(taken[1:]), *most)


def plan_within(graph: Graph, machine: Machine, memory: int, order_bytes: int, seconds: float) -> Plan:
    """What a search finds for so many bytes of tensors, of which the order of the edges takes some where they are;
    without speeds of devices all activations on the host."""
    if machine.device != "cuda":
        return make_plan(graph, machine, "single+offload=activations")
    for beside in (0, order_bytes):
        found = find_plan(graph, machine, CostModel(), Wish("joint", seconds, "adam", memory - beside)).plan
        assert isinstance(found, Plan)
        if any("edge" in name for name in host_inputs(found)):
            break
    return found


def run(sizes: Sizes, device: str, machine: Machine, share: float, options: Any) -> dict[str, Any]:
    """Both trainings, and what was told of them."""
    graph = captured(sizes)
    plain = make_plan(graph, machine, "single")
    free = trained(plain, sizes, device, options.steps)
    told = _told(plain, machine)
    limit = int(share * (free.peak or told + sizes.order_bytes()))
    plan = plan_within(graph, machine, int((1 - _OUTSIDE) * limit), sizes.order_bytes(), options.seconds)
    held = trained(plan, sizes, device, options.steps, limit if device == "cuda" else None)
    gib, given = 2**30, sum(leaf.type.bytes for leaf in graph.leaves_of(LeafKind.INPUT))
    return {
        "batch_gib": round(given / gib, 4),
        "unlimited_gib": round(free.peak / gib, 4), "unlimited_told_gib": round(told / gib, 4),
        "limit_gib": round(limit / gib, 4), "peak_gib": round(held.peak / gib, 4),
        "reserved_gib": round(held.reserved / gib, 4),
        "told_gib": round(_told(plan, machine) / gib, 4), "is_kept": held.peak <= limit if held.peak else None,
        "strategy": plan.strategy, "offloaded": sum(action.action == "offload" for action in plan.memory),
        "on_host": sorted(host_inputs(plan)),
        "unlimited_seconds": round(free.seconds, 4), "seconds": round(held.seconds, 4),
        "slow_down": round(held.seconds / free.seconds, 3),
        "losses": free.losses, "losses_within_limit": held.losses,
        "largest_difference": max(abs(a - b) for a, b in zip(free.losses, held.losses, strict=True)),
    }  # fmt: skip


def _told(plan: Plan, machine: Machine) -> int:
    """The bytes of tensors that are predicted."""
    if machine.device == "cuda":
        return predict(plan, machine, CostModel(), "adam").memory.peak
    return measure_memory(simulate(plan, Wanted()).program, "adam", "cpu").peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--machine", help="a machine whose first device this is")
    parser.add_argument("--vertices", type=int, default=4_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--model", choices=MODELS, default="deep-gcn")
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--share", type=float, default=1 / 3, help="of the memory that it takes without a limit")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the search")
    parser.add_argument("--output", type=Path, help="Write the figures here, as .json.")
    options = parser.parse_args()
    sizes = Sizes(
        options.vertices, options.degree, options.hidden, options.layers, options.features, options.model
    )
    machine = parse_machine(options.machine or ("local:1" if options.device == "cpu" else "dgx-h200:1x1"))
    found = run(sizes, options.device, machine, options.share, options)
    for name, value in found.items():
        print(f"{name:<22} {value}")
    about = {
        "command": " ".join(("python -m benchmarks.roc_larger_than_memory", *sys.argv[1:])),
        "date": str(date.today()), "torch": torch.__version__,
        "machine": platform.machine() if options.device == "cpu" else torch.cuda.get_device_name(),
    }  # fmt: skip
    if options.output is not None:
        options.output.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
