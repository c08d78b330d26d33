"""How long a search takes: large models on many devices, and growth with layers and devices.

    python -m benchmarks.search_scale                          # writes results/search_scale.json and .svg
    python -m benchmarks.search_scale --models llama-8b        # one of the large ones
    python -m benchmarks.search_scale --models layers devices  # only the growth
    python -m benchmarks.search_scale --models unity           # Unity's seven on 192 GPUs of Summit

Seconds are of the process, from captured graph to plan, mesh shape included. They may grow with distinct layers, not
with how often these are repeated. Large models are in bfloat16 and their batch is one that fits without recomputing
activations: a sequence for each device, or for two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.plotting import Point
from benchmarks.search_table import Case, Row, line, open_table, options
from benchmarks.unity_fig14 import GPUS_PER_NODE, PUBLISHED
from conjoin.frontends import capture
from conjoin.ir import Graph
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.tokens import next_token_loss

NAME = "search_scale"
DEVICES_PER_NODE = 8
LARGE = {
    ("llama-8b", 64): 15.0,
    ("llama-8b", 256): 15.0,
    ("llama-8b", 1024): 15.0,
    ("llama-70b", 512): 30.0,
    ("gpt-175b", 1024): 45.0,
    ("gpt-1t", 3072): 60.0,
}
"""Models and devices, and the most seconds of the process that a search may take, pipelines among what it looks at."""
UNITY, UNITY_GPUS, UNITY_SECONDS = "unity", 192, 30.0
"""Unity's models (`unity_fig14.py`) on as many GPUs, and the most seconds of the process for each."""
TRILLION = GptConfig(128, 25600, 160, vocabulary=51_200, length=2048, by_head=True)
"""The largest of table 1 of Narayanan et al. (arXiv 2104.04473)."""
ASKED = 0.88
"""The part of these that is the search's budget: what was begun is brought to an end."""
DEVICES_PER_SEQUENCE = {"llama-8b": 1, "llama-70b": 2, "gpt-175b": 2, "gpt-1t": 1}
LAYERS, DEVICES = "layers", "devices"
"""The two curves."""
NUM_LAYERS = (2, 4, 8, 16, 32, 64, 96)
NUM_DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
FIXED_LAYERS, FIXED_DEVICES = 8, 64
WIDTH, HEADS, LENGTH = 1024, 16, 512


def gpt(layers: int, batch_size: int) -> Graph:
    """A GPT of any depth, captured."""
    return _captured(GptConfig(layers, WIDTH, HEADS, length=LENGTH), batch_size)


def _captured(config: GptConfig, batch_size: int, *, half: bool = False) -> Graph:
    with torch.device("meta"):
        model, batch = Gpt(config).train(), gpt_batch(batch_size, config)
    return capture(model.to(torch.bfloat16) if half else model, batch, next_token_loss)


def deep(layers: int, devices: int) -> Case:
    """A GPT of some layers on some devices, four sequences each."""
    batch_size = 4 * devices
    return Case(
        f"gpt-{layers}-layers", f"dgx-h100:{devices // DEVICES_PER_NODE}", batch_size, optimizer="adam",
        make_graph=partial(gpt, layers, batch_size),
    )  # fmt: skip


def large(models: Sequence[str]) -> Iterator[Case]:
    """The large models that are asked for."""
    for (model, devices), most in LARGE.items():
        if model in models:
            batch_size, nodes = devices // DEVICES_PER_SEQUENCE[model], devices // DEVICES_PER_NODE
            made = partial(_captured, TRILLION, batch_size, half=True) if model == "gpt-1t" else None
            yield Case(model, f"dgx-h100:{nodes}", batch_size, optimizer="adam", half=True, make_graph=made,
                       budget=ASKED * most)  # fmt: skip


def unity() -> Iterator[Case]:
    """Unity's models on all of its GPUs."""
    for model, known in PUBLISHED.items():
        nodes, batch_size = UNITY_GPUS // GPUS_PER_NODE, known.samples_per_gpu * UNITY_GPUS
        yield Case(model, f"summit:{nodes}", batch_size, known.speedup, known.optimizer, budget=ASKED * UNITY_SECONDS)


def is_quick(row: Row) -> bool:
    """Whether a search took no longer than it may."""
    most = UNITY_SECONDS if row.model in PUBLISHED else LARGE.get((row.model, row.devices))
    return not row.error and (most is None or row.search_cpu_seconds < most)


def points(by_layers: Sequence[Row], by_devices: Sequence[Row]) -> list[Point]:
    """Seconds against layers and against devices."""
    found = [
        Point(f"layers, {FIXED_DEVICES} devices", int(row.model.split("-")[1]), row.search_cpu_seconds, line(row))
        for row in by_layers
        if not row.error
    ]
    found += [
        Point(f"devices, {FIXED_LAYERS} layers", row.devices, row.search_cpu_seconds, line(row))
        for row in by_devices
        if not row.error
    ]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    names = tuple(dict.fromkeys(model for model, _ in LARGE))
    parser = options(__doc__ or "", NAME, (*names, UNITY, LAYERS, DEVICES))
    parser.add_argument("--layers", type=int, nargs="+", default=list(NUM_LAYERS), help="of the curve by layers")
    parser.add_argument("--devices", type=int, nargs="+", default=list(NUM_DEVICES), help="of the curve by devices")
    chosen = parser.parse_args(arguments)
    table = open_table(chosen, NAME, arguments)
    wanted_layers = chosen.layers if LAYERS in chosen.models else ()
    wanted_devices = chosen.devices if DEVICES in chosen.models else ()
    by_layers = table.fill(deep(layers, FIXED_DEVICES) for layers in wanted_layers)
    by_devices = table.fill(deep(FIXED_LAYERS, devices) for devices in wanted_devices)
    table.fill(large(chosen.models))
    table.fill(unity() if UNITY in chosen.models else ())
    table.draw("layers or devices", "process seconds of a search", points(by_layers, by_devices))
    slow = [row for row in table.rows if not is_quick(row)]
    print("every search is as quick as it has to be" if not slow else f"TOO SLOW: {', '.join(r.model for r in slow)}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
