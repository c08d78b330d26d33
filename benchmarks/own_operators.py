"""Operators of our own against the stock ones that they stand for: seconds of forward and backward, in turn.

    python -m benchmarks.own_operators [--device cpu] [--rounds 20] [--output FILE]

`linear_relu` against a linear layer and a ReLU; batch norm by moments, as a plan runs it where the batch is split (here
on the whole batch, so that nothing is sent), against stock batch norm. Both take turns, so that whatever else runs on
the machine slows both; the figure is the ratio of the medians. On a GPU also the time in which kernels run is told:
where a host is slow to launch them, it is much less.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from conjoin.ops import BATCH_MOMENTS, LINEAR_RELU, MEAN_AND_VARIANCE, NORMALIZE_CHANNELS, find_operator

EPS = 1e-5
AT_ONCE = 5
"""Calls between two looks at the clock: on a GPU they are launched while others run, as in training."""
LAYERS = ((256, 8192, 8192), (4096, 1024, 4096), (16384, 512, 512))
"""Rows, inputs and outputs."""
IMAGES = ((64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (64, 2048, 7, 7))
"""Of ResNet-50 with 64 samples."""
Run = Callable[[], Tensor]


def layers(shape: Sequence[int], device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run, Run]:
    """Operands, our own and the stock operators."""
    rows, inputs, outputs = shape
    x, w, b = (made(device, dtype, *sizes) for sizes in ((rows, inputs), (outputs, inputs), (outputs,)))
    own = find_operator(LINEAR_RELU)
    return [x, w, b], lambda: own(x, w, b), lambda: functional.linear(x, w, b).relu()


def norms(shape: Sequence[int], device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run, Run]:
    """The same for batch norm."""
    x = made(device, dtype, *shape)
    w, b = (made(device, torch.float32, shape[1]) for _ in range(2))
    moments, known, normalize = map(find_operator, (BATCH_MOMENTS, MEAN_AND_VARIANCE, NORMALIZE_CHANNELS))
    mean, var = torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device)
    return (
        [x, w, b],
        lambda: normalize(x, known(moments(x)), w, b, EPS),
        lambda: functional.batch_norm(x, mean, var, w, b, training=True, eps=EPS),
    )


def made(device: str, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(*sizes, device=device, dtype=dtype).requires_grad_()


def compare(operands: Sequence[Tensor], own: Run, stock: Run, rounds: int) -> tuple[float, float]:
    """Seconds of forward and backward by each, the median of many turns."""
    gradient = torch.randn_like(stock())
    spent: dict[Run, list[float]] = {own: [], stock: []}
    for _ in range(rounds + 3):
        for run, seconds in spent.items():
            begin = now(gradient)
            for _ in range(AT_ONCE):
                torch.autograd.grad(run(), operands, gradient)
            seconds.append((now(gradient) - begin) / AT_ONCE)
    return statistics.median(spent[own][3:]), statistics.median(spent[stock][3:])


def busy(operands: Sequence[Tensor], run: Run, rounds: int) -> float:
    """Seconds in which kernels of one call and its backward run on a GPU, without waiting for launches."""
    gradient = torch.randn_like(run())
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            torch.autograd.grad(run(), operands, gradient)
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in seen.key_averages()) / rounds / 1e6


def now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    rows = []
    kinds = (("linear_relu", LAYERS, layers), ("batch norm", IMAGES, norms))
    for dtype, (name, shapes, make) in product((torch.float32, torch.bfloat16), kinds):
        for shape in shapes:
            operands, by_own, by_stock = make(shape, chosen.device, dtype)
            own, stock = compare(operands, by_own, by_stock, chosen.rounds)
            what, ratio = {"operator": name, "dtype": str(dtype).removeprefix("torch."), "shape": shape}, own / stock
            row = {**what, "own": own, "stock": stock, "ratio": round(ratio, 3)}
            told = " ".join(str(word) for word in what.values())
            print(f"{told:<48} own {own * 1e3:9.3f} ms  stock {stock * 1e3:9.3f} ms  {ratio:.3f}", end="")
            if chosen.device == "cuda":
                kernels = [busy(operands, run, chosen.rounds) for run in (by_own, by_stock)]
                row |= {"own_kernels": kernels[0], "stock_kernels": kernels[1]}
                print(f"  kernels alone {kernels[0] * 1e3:9.3f} and {kernels[1] * 1e3:9.3f} ms", end="")
            rows.append(row)
            print()
    if chosen.output:
        about = {
            "command": " ".join(("python -m benchmarks.own_operators", *sys.argv[1:])),
            "date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if chosen.device == "cuda" else "one core",
        }  # fmt: skip
        chosen.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
