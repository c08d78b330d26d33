"""Capture time against model depth: it must grow linearly, and the whole capture take at most two torch.exports.

Capture contains an export of its own, which notes the user's lines in a cheaper way than torch's default: that is why
the whole can take less than a plain `torch.export`.

    python -m benchmarks.capture            # prints the table and writes benchmarks/results/capture.json
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import conjoin
import zoo
from benchmarks.circumstances import circumstances
from zoo.llama import Llama, LlamaConfig

RESULTS = Path(__file__).parent / "results" / "capture.json"
DEPTHS = (2, 4, 8, 16, 32, 64)
NAMED = ("inception-v3", "llama-7b", "llama-70b")
LINEAR = 1.3
"""Eight times the depth may take this much more than eight times the time: room for noise, not for a square."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model: seconds of torch.export alone, and of the whole capture, which contains an export."""

    model: str
    num_nodes: int
    export_seconds: float
    capture_seconds: float
    capture_over_export: float


def measure(name: str, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], repeats: int) -> Row:
    """The fastest of some runs of each, taken in turn so that both see the same machine."""
    exports, captures, num_nodes = [], [], 0
    for _ in range(repeats):
        start = time.perf_counter()
        torch.export.export(model, inputs, strict=False)
        middle = time.perf_counter()
        num_nodes = len(conjoin.capture(model, inputs).nodes)
        exports.append(middle - start)
        captures.append(time.perf_counter() - middle)
    export, capture = min(exports), min(captures)
    return Row(name, num_nodes, round(export, 3), round(capture, 3), round(capture / export, 2))


def by_depth() -> list[Row]:
    """A llama of growing depth, everything else fixed, on the meta device."""
    rows = []
    for depth in DEPTHS:
        with torch.device("meta"):
            model = Llama(LlamaConfig(depth, 4096, 11008, 32, 32, 32000, 2048))
            tokens = torch.zeros(1, 2048, dtype=torch.int64)
        rows.append(measure(f"llama, {depth} layers", model, (tokens,), repeats=3))
    return rows


def by_name() -> list[Row]:
    """Full-size models of the zoo in training mode."""
    rows = []
    for name in NAMED:
        model, batch, _ = zoo.build(name, device="meta", batch_size=2)
        assert isinstance(batch, tuple)
        rows.append(measure(name, model.train(), batch[:1], repeats=2))
    return rows


def growth(rows: list[Row]) -> float:
    """Time per layer at the largest depth relative to that at an eighth of it: 1 is linear."""
    return round(rows[-1].capture_seconds / rows[-4].capture_seconds / 8, 2)


def main() -> int:
    torch.set_num_threads(1)
    measure("warm-up", torch.nn.Linear(2, 2), (torch.zeros(1, 2),), repeats=1)
    depth_rows, named_rows = by_depth(), by_name()
    print(f"{'model':<18} {'nodes':>6} {'export s':>9} {'capture s':>10} {'capture / export':>17}")
    for row in (*depth_rows, *named_rows):
        seconds = f"{row.export_seconds:>9.2f} {row.capture_seconds:>10.2f}"
        print(f"{row.model:<18} {row.num_nodes:>6} {seconds} {row.capture_over_export:>17.2f}")
    linearity = growth(depth_rows)
    print(f"time per layer at {DEPTHS[-1]} layers over that at {DEPTHS[-4]}: {linearity} (1 is linear)")
    tables = {"depth": [asdict(row) for row in depth_rows], "models": [asdict(row) for row in named_rows]}
    taken = circumstances("python -m benchmarks.capture", "one thread")
    result = {**taken, **tables, "time_per_layer_ratio": linearity}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    quick = all(row.capture_over_export <= 2 for row in (*depth_rows[2:], *named_rows))
    print("linear, and at most two exports" if linearity <= LINEAR and quick else "TOO SLOW")
    return 0 if linearity <= LINEAR and quick else 1


if __name__ == "__main__":
    sys.exit(main())
