"""Every zoo model captured on the CPU and trained one step on a GPU, next to the plain model: losses and gradients.

    python benchmarks/zoo_on_gpu.py         # prints the table and writes benchmarks/results/zoo_on_gpu.json

The last column is the plain model against itself: some CUDA kernels add in a different order every time.
"""

from __future__ import annotations

import copy
import inspect
import json
import platform
import sys
import warnings
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

import conjoin
import zoo

RESULTS = Path(__file__).parent / "results" / "zoo_on_gpu.json"
NOISE = 1e-4
"""More than the order of additions explains: the plain model against itself stays a factor of five below."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one precision; gradients as the largest difference relative to the largest entry."""

    model: str
    precision: str
    loss_difference: float
    gradient_difference: float
    plain_against_itself: float


def gradient_difference(a: nn.Module, b: nn.Module) -> float:
    found = [0.0]
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            found.append(float((p.grad - q.grad).abs().max() / q.grad.abs().max().clamp(min=1e-9)))
    return max(found)


def measure(name: str, *, bf16: bool) -> Row:
    """One forward and backward of the captured model and of two copies of the plain one, with the same seed."""
    model, batch, loss = zoo.build(f"{name}:tiny")
    assert isinstance(batch, tuple) and loss is not None
    graph = conjoin.capture(model.train(), batch, loss)
    model = model.cuda()
    tensors = tuple(tensor.cuda() for tensor in batch)
    plain, again, captured = copy.deepcopy(model), copy.deepcopy(model), conjoin.to_module(graph, model)
    count = len(inspect.signature(model.forward).parameters)

    def step(net: nn.Module) -> Tensor:
        torch.manual_seed(1)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            value = net(*tensors) if net is captured else loss(net(*tensors[:count]), *tensors[count:])
        value.backward()
        return value.detach()

    losses = [step(net) for net in (captured, plain, again)]
    difference = float((losses[0] - losses[1]).abs())
    ours, theirs = gradient_difference(captured, plain), gradient_difference(again, plain)
    return Row(name, "bf16 autocast" if bf16 else "fp32", difference, ours, theirs)


def main() -> int:
    warnings.simplefilter("ignore")  # cuDNN's advice about weights of copied recurrent layers
    rows = [measure(name, bf16=bf16) for name in zoo.names() for bf16 in (False, True)]
    print(f"{'model':<20} {'precision':<14} {'loss':>9} {'gradients':>10} {'plain twice':>12}")
    for row in rows:
        gradients = f"{row.gradient_difference:>10.1e} {row.plain_against_itself:>12.1e}"
        print(f"{row.model:<20} {row.precision:<14} {row.loss_difference:>9.1e} {gradients}")
    circumstances = {
        "command": "python benchmarks/zoo_on_gpu.py",
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps({**circumstances, "rows": [asdict(row) for row in rows]}, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")
    same = all(row.loss_difference == 0 and row.gradient_difference <= NOISE for row in rows)
    print("equal to the plain model" if same else "DIFFERS")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
