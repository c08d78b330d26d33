"""A full-graph step of a two-layer GCN on one host, against torch's own sparse product: CPU seconds, taken in turn.

    python -m benchmarks.roc_step [--vertices 233000] [--edges 11500000] [--rounds 3] [--device cuda] [--geometric]

602 features, 128 hidden, 41 classes, as ROC's on Reddit with a tenth of the edges; the graph is symmetric, weighted,
and has communities. `torch CSR` multiplies with a CSR matrix and is given its backward by hand: the same product once
more, since the matrix is symmetric. `torch CSR, autograd` transposes it in every step, as torch does. `ours` is what
`conjoin.capture` makes of a model in gather-scatter form; `ours, A·X once` what the strategy vertex-parallel:once makes
of the same: the first layer the other way round, (A·X)·W, by a rule of the library, with A·X made in the first step.
`--geometric` adds PyTorch Geometric's GCNConv over the same weights, given edges, or given a CSR matrix; what does not
fit a GPU is told. Seconds are those of all threads; on a GPU those on the wall, with the most bytes that a step
allocates beside what is there before it, the graph of every way.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conjoin
from conjoin.runtime import to_module
from zoo.gnn import Gcn, GnnConfig, symmetric_weights

FEATURES, HIDDEN, CLASSES, COMMUNITIES = 602, 128, 41, 50


def community_graph(vertices: int, edges: int) -> Tensor:
    """Edges both ways, three in four of them inside a community, which are neighbouring vertices."""
    generator = torch.Generator().manual_seed(0)
    count, size = edges // 2, max(vertices // COMMUNITIES, 1)
    one = torch.randint(vertices, (count,), generator=generator)
    near = one // size * size + torch.randint(size, (count,), generator=generator)
    far = torch.randint(vertices, (count,), generator=generator)
    other = torch.where(torch.rand(count, generator=generator) < 0.75, near.clamp(max=vertices - 1), far)
    return torch.stack((torch.cat((one, other)), torch.cat((other, one))))


class _Symmetric(torch.autograd.Function):
    """The product with a symmetric matrix, whose gradient is one, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.matrix = matrix
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.matrix @ gradients[0], None


class CsrGcn(nn.Module):
    """The same model by torch's sparse product."""

    def __init__(self, model: Gcn, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.product = model.layers, product

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        x = F.relu(self.product(first.layer(x)) + first.bias)  # type: ignore[operator, arg-type]
        return self.product(second.layer(x)) + second.bias  # type: ignore[operator, arg-type]


class GeometricGcn(nn.Module):
    """The same model by PyTorch Geometric's layers over the same weights."""

    def __init__(self, model: Gcn, graph: tuple[Tensor, ...]) -> None:
        super().__init__()
        make = importlib.import_module("torch_geometric.nn").GCNConv
        self.graph, self.layers = graph, nn.ModuleList()
        for layer in model.layers:
            own = make(*layer.layer.weight.shape[::-1], normalize=False, add_self_loops=False)  # type: ignore[union-attr]
            own.lin.weight, own.bias = layer.layer.weight, layer.bias
            self.layers.append(own)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        made: Tensor = second(F.relu(first(x, *self.graph)), *self.graph)
        return made


def seconds_of(step: Callable[[], Tensor], model: nn.Module, device: str) -> tuple[float, float, int]:
    """Of a step, forward and backward; its loss, and on a GPU the bytes that it allocates."""
    model.zero_grad()
    if device == "cpu":
        start = time.process_time()
        loss = step()
        loss.backward()
        return time.process_time() - start, loss.item(), 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    loss = step()
    loss.backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start, loss.item(), torch.cuda.max_memory_allocated() - before


def ways(
    vertices: int, edges: int, device: str, geometric: bool = False
) -> dict[str, tuple[Callable[[], Tensor], nn.Module]]:
    """A step of every way on the same graph."""
    graph = community_graph(vertices, edges).to(device)
    weight = symmetric_weights(graph, vertices)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(vertices, FEATURES, generator=generator).to(device)
    labels = torch.randint(CLASSES, (vertices,), generator=generator).to(device)
    model = Gcn(GnnConfig(FEATURES, CLASSES, 0, HIDDEN)).to(device)
    matrix = torch.sparse_coo_tensor(graph.flip(0), weight, (vertices, vertices)).coalesce().to_sparse_csr()
    batch = (x, graph, weight, labels)
    ours = to_module(conjoin.capture(model, batch, F.cross_entropy), model)
    told = conjoin.plan(model, batch, "local:1", loss=F.cross_entropy, strategy="vertex-parallel:once")
    once = to_module(told.graph, model)
    symmetric = CsrGcn(model, lambda h: _Symmetric.apply(h, matrix))  # type: ignore[no-untyped-call]
    plain = CsrGcn(model, lambda h: torch.sparse.mm(matrix, h))
    losses: dict[str, tuple[Callable[[], Tensor], nn.Module]] = {
        "torch CSR": (lambda: F.cross_entropy(symmetric(x), labels), model),
        "torch CSR, autograd": (lambda: F.cross_entropy(plain(x), labels), model),
        "ours": (lambda: ours(*batch), ours),
        "ours, A·X once": (lambda: once(*batch), once),
    }
    if geometric:
        edgewise, by_matrix = GeometricGcn(model, (graph, weight)), GeometricGcn(model, (matrix,))
        losses["PyG, edges"] = (lambda: F.cross_entropy(edgewise(x), labels), model)
        losses["PyG, CSR"] = (lambda: F.cross_entropy(by_matrix(x), labels), model)
    return losses


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=233_000)
    parser.add_argument("--edges", type=int, default=11_500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--geometric", action="store_true", help="PyTorch Geometric as well")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/roc_step.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse")
    steps = ways(options.vertices, options.edges, options.device, options.geometric)
    names = list(steps)
    losses: dict[str, float] = {}
    held: dict[str, int] = {}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 1):
        for name, (step, model) in list(steps.items()):
            try:
                seconds_of(step, model, options.device)  # as in training, where a step follows one like it
                seconds, losses[name], held[name] = seconds_of(step, model, options.device)
            except torch.OutOfMemoryError as error:
                print(f"{name:<22} out of memory: {str(error).splitlines()[0][:100]}", flush=True)
                del steps[name], found[name]
                continue
            found[name] += [seconds] if turn else []  # the first round makes what is kept
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    kind = "cpu_seconds" if options.device == "cpu" else "seconds"
    rows: list[dict[str, Any]] = [
        {"way": name, kind: round(s, 4), "ratio": round(s / medians["torch CSR"], 3), "loss": losses[name]}
        | ({"step_gib": round(held[name] / 2**30, 3)} if options.device == "cuda" else {})
        for name, s in medians.items()
    ]
    for row in rows:
        more = f"  {row['step_gib']} GiB" if options.device == "cuda" else ""
        print(f"{row['way']:<22} {row[kind]:>8} s  {row['ratio']:>6}  loss {row['loss']:.6f}{more}")
    about = {
        "machine": platform.machine() if options.device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(), "torch": torch.__version__,
        "date": str(date.today()), "vertices": options.vertices, "edges": options.edges,
        "out_of_memory": [name for name in names if name not in steps],
        "command": " ".join(("python -m benchmarks.roc_step", *sys.argv[1:])),
    }  # fmt: skip
    options.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
