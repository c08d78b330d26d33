"""Our step time against the hand-written way, on the same ranks in the same run.

    python benchmarks/runtime_overhead.py [--ranks 2] [--rounds 30] [--output FILE]

data-parallel against DistributedDataParallel, fsdp against FSDP2 (`fully_shard`), megatron against
`parallelize_module`, and single against the plain module; on an MLP and on a BERT-like encoder. Steps of both
alternate, so that whatever else runs on the machine slows both; the figure is the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import conjoin
from conjoin.machine import parse_machine
from conjoin.runtime import launch, load
from conjoin.search import make_plan

LIMIT = 1.05
Batch = tuple[Tensor, Tensor]
Step = Callable[[], None]


class Mlp(nn.Module):
    """Pairs of layers, wide in the middle."""

    def __init__(self, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = down(torch.relu(up(x)))
        return x


class Block(nn.Module):
    """A transformer layer whose heads are where a hand-written plan expects them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.head_width).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1)
        x = self.norms[0](x + self.out(attended))
        return self.norms[1](x + self.down(functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """BERT-like: what makes a step, without embeddings."""

    def __init__(self, width: int = 256, num_heads: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def workload(name: str, device: str = "cpu", scale: int = 1) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    if name == "mlp":
        model, shape = Mlp(512 * scale), (64 * scale, 512 * scale)
    else:
        model, shape = Encoder(256 * scale, depth=4 * scale), (8, 64 * scale, 256 * scale)
    model = model.to(device)
    x, target = (torch.randn(shape, device=device) for _ in range(2))
    return model, (x, target)


def trained(module: nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of().backward()
        optimizer.step()

    return step


def by_hand(strategy: str, model: nn.Module, batch: Batch) -> Step:
    """The way PyTorch's own documentation shows."""
    x, target = batch
    if strategy in ("data-parallel", "fsdp"):
        rank, size = dist.get_rank(), dist.get_world_size()
        x, target = (tensor.chunk(size)[rank] for tensor in (x, target))
    match strategy:
        case "data-parallel":
            module: nn.Module = DistributedDataParallel(model)
        case "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model.blocks if isinstance(model, Encoder) else (*model.up, *model.down):  # type: ignore[union-attr, misc]
                fully_shard(layer, mesh=mesh)
            module = fully_shard(model, mesh=mesh)
        case "megatron":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            module = parallelize_module(model, mesh, _styles(model))
        case _:
            module = model
    return trained(module, lambda: functional.mse_loss(module(x), target))


def _styles(model: nn.Module) -> dict[str, ColwiseParallel | RowwiseParallel]:
    if isinstance(model, Encoder):
        columns, rows, prefix = ("query", "key", "value", "up"), ("out", "down"), "blocks.*."
    else:
        columns, rows, prefix = ("up.*",), ("down.*",), ""
    return {
        **{f"{prefix}{name}": ColwiseParallel() for name in columns},
        **{f"{prefix}{name}": RowwiseParallel() for name in rows},
    }


def by_plan(strategy: str, model: nn.Module, batch: Batch, num_ranks: int) -> Step:
    graph = conjoin.capture(model, batch, functional.mse_loss)
    machine = parse_machine(f"local:{num_ranks}") if num_ranks > 1 else parse_machine("local:1")
    plan = make_plan(graph, machine, strategy)
    step = load(plan, model)
    return trained(step, lambda: step(batch))


def seconds(step: Step, synchronize: Callable[[], None]) -> float:
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def compare(ours: Step, theirs: Step, rounds: int, synchronize: Callable[[], None]) -> dict[str, float]:
    """Alternating steps, the order turned round each time."""
    for _ in range(3):
        ours(), theirs()
    pairs = []
    for i in range(rounds):
        first, second = (ours, theirs) if i % 2 else (theirs, ours)
        a, b = seconds(first, synchronize), seconds(second, synchronize)
        pairs.append((a, b) if i % 2 else (b, a))
    return {
        "ours_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "theirs_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def measure(rank: int, num_ranks: int, rounds: int) -> list[dict[str, object]]:
    warnings.simplefilter("ignore")
    rows: list[dict[str, object]] = []
    for name in ("mlp", "bert-like"):
        for strategy in ("data-parallel", "fsdp", "megatron"):
            model, batch = workload(name)
            theirs = by_hand(strategy, copy.deepcopy(model), batch)
            ours = by_plan(strategy if strategy != "megatron" else f"megatron:tp={num_ranks}", model, batch, num_ranks)
            row = compare(ours, theirs, rounds, dist.barrier)
            rows.append({"model": name, "strategy": strategy, "ranks": num_ranks, **row})
            if rank == 0:
                print(_line(rows[-1]), flush=True)
    return rows


def _single_steps(model: nn.Module, batch: Batch, compiled: bool) -> tuple[Step, Step]:
    """A step of the `single` plan, and one of the plain module."""
    plain, (x, target) = copy.deepcopy(model), batch
    graph = conjoin.capture(model, batch, functional.mse_loss)
    step = load(make_plan(graph, parse_machine("local:1"), "single"), model, device=x.device)
    ours, theirs = (torch.compile(module) if compiled else module for module in (step, plain))
    return trained(step, lambda: ours(batch)), trained(plain, lambda: functional.mse_loss(theirs(x), target))


def measure_single(rounds: int, device: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    scale = 4 if device == "cuda" else 1
    for name in ("mlp", "bert-like"):
        for compiled in (False, True):
            row = compare(*_single_steps(*workload(name, device, scale), compiled), rounds, synchronize)
            kind = f"single {'compiled' if compiled else 'eager'} on {device}"
            rows.append({"model": name, "strategy": kind, "ranks": 1, **row})
            print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, object]) -> str:
    return (
        f"{row['model']:<10} {row['strategy']:<24} {row['ranks']} ranks   ours {row['ours_ms']:8.2f} ms   "
        f"by hand {row['theirs_ms']:8.2f} ms   ratio {row['ratio']:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--single", choices=("cpu", "cuda"), help="single against the plain module, on this")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.single:
        rows = measure_single(given.rounds, given.single)
    else:
        rows = launch(given.ranks, measure, given.ranks, given.rounds)[0]
    result = {
        "what": "median ratio of our step time to the hand-written way, alternating steps",
        "rows": rows,
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "conjoin": conjoin.__version__},
        "command": " ".join(["python", *sys.argv]),
    }
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
