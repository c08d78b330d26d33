"""Steps told by few of many equal periods, against the same steps with all of them timed and walked through."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from random import Random

import pytest
import torch
from torch import Tensor, nn

from conjoin.api import capture
from conjoin.cost import CostModel
from conjoin.ir import Graph, Segment
from conjoin.machine import parse_machine
from conjoin.search import Wish, find_plan, make_plan
from conjoin.search.baselines import baselines, with_blocks_again
from conjoin.search.entries import Entry
from conjoin.sim import (
    MachinePrices,
    Program,
    Simulation,
    least_step,
    measure_memory,
    new_drafts,
    predict,
    run,
    simulate_layouts,
)
from conjoin.sim.memory import measure_peak

MACHINE = parse_machine("dgx-h100:1")
NAMES = ("fsdp", "megatron:tp=2,sp,fsdp", "megatron:tp=4,sp,zero1", "data-parallel")
BUNDLES = (1 << 10, 1 << 13, 1 << 15, 1 << 20)
"""Bytes for which parameters of a block travel alone, with those of a few blocks, or of all."""
SEEDS = range(5)
CAST_SEEDS = 3, 5
"""Stacks with steps that are told by short ones also where parameters are cast; of most there are none."""


class Layer(nn.Module):
    """A block, as transformers have them, of random parts."""

    def __init__(self, width: int, inner: int, gated: bool, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None

    def forward(self, x_BD: Tensor, shift_D: Tensor) -> Tensor:
        y = self.norm(x_BD) + shift_D
        up = torch.relu(self.up(y))
        return x_BD + self.down(up if self.gate is None else up * torch.sigmoid(self.gate(y)))


class Stack(nn.Module):
    """Equal blocks, of which the first, the last and one in the middle may be others; all read one shared tensor,
    and what is before and behind them a shared parameter."""

    def __init__(self, rng: Random, width: int = 32) -> None:
        super().__init__()
        inner, gated, bias = rng.choice((2 * width, 4 * width)), rng.random() < 0.5, rng.random() < 0.7
        count, odd = rng.randrange(12, 15), {0: 3 * width, -1: 5 * width}
        middle = rng.randrange(count) if rng.random() < 0.3 else None
        sizes = [inner] * count
        for place, other in odd.items():
            sizes[place] = other if rng.random() < 0.5 else inner
        if middle is not None:
            sizes[middle] = 8 * width
        self.shift = nn.Parameter(torch.zeros(width))
        self.layers = nn.ModuleList(Layer(width, size, gated, bias) for size in sizes)
        self.tied = nn.Linear(width, width, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        shift, x_BD = torch.tanh(self.shift), self.tied(x_BD)
        for layer in self.layers:
            x_BD = layer(x_BD, shift)
        return self.tied(x_BD).square().mean()


@cache
def stack(seed: int, precision: str | None = None, scale: int = 1) -> Graph:
    with torch.device("meta"):
        model, batch = Stack(Random(seed), 32 * scale).train(), (torch.zeros(64 * scale, 32 * scale),)
        return capture(model, batch, lambda output, batch: output, precision=precision)


def simulated(entry: Entry, graph: Graph, bundle_bytes: int) -> Simulation:
    skeleton, layouts = entry.variant.skeleton, entry.layouts
    prices = MachinePrices.of(graph, MACHINE, CostModel())
    drafts = new_drafts(skeleton, layouts, MACHINE.mesh, prices)
    drafts.bundle_bytes = bundle_bytes
    return simulate_layouts(skeleton, layouts, drafts, entry.regathered, entry.segments)


def check(found: Simulation) -> bool:
    """Compare with the whole step; whether the short one told of it."""
    is_told = found.short is not None and "program" not in found.__dict__
    peak = None if found.short is None else measure_peak(found.short, "adam", "cuda")
    whole: Program = found.make()
    drafts = whole.drafts
    timeline = run(whole.unrolled(), whole.num_events, drafts.classes.shape, drafts.prices.slowed())
    assert found.ticks == timeline.ticks
    assert peak is None or peak == measure_memory(whole, "adam", "cuda").peak
    return is_told and peak is not None


def segmented(rng: Random, entry: Entry) -> Entry:
    """Some of its operators are run again: periods of another length than blocks, or here and there."""
    count, length = len(entry.variant.skeleton.operators), rng.randrange(3, 20)
    starts = [*range(rng.randrange(5), count - 2 * length, rng.choice((length, 2 * length)))]
    segments = tuple(Segment(first, first + length - 1) for first in starts if rng.random() < 0.97)
    return replace(entry, segments=segments)


def told_of_stacks(seed: int, precision: str | None) -> int:
    """How many of the steps of a random stack were told by short ones."""
    rng = Random(seed)
    graph, told = stack(seed, precision), 0
    known = dict(baselines(graph, MACHINE, lambda name: name not in NAMES))
    for name in NAMES:
        entry = known[name]
        if entry is None:
            continue
        again = with_blocks_again(entry, rng.choice(("full", "every-2", "selective")))
        for one in (entry, *([again] if again is not None else []), segmented(rng, entry)):
            told += check(simulated(one, graph, rng.choice(BUNDLES)))
    return told


@pytest.mark.parametrize("seed", SEEDS)
def test_a_short_step_takes_and_holds_what_the_whole_one_does(seed: int) -> None:
    assert told_of_stacks(seed, None) > 0


def test_so_it_does_where_parameters_are_cast() -> None:
    assert all(told_of_stacks(seed, "bf16-mixed@cuda") > 0 for seed in CAST_SEEDS)


@pytest.mark.parametrize(
    ("machine", "precision", "scales"),
    [
        ("dgx-h100:2", None, (64,)),
        ("dgx-h100:2", "bf16-mixed@cuda", (1, 64)),
        ("p3.8xlarge:1", None, (1, 64)),
        ("p3.8xlarge:1", "bf16-mixed@cuda", (64,)),
        ("dgx-a100:2x4", None, (1, 64)),
        ("dgx-a100:2x4", "bf16-mixed@cuda", (64,)),
    ],
)
def test_no_step_takes_less_than_its_operators_and_what_they_wait_for(
    machine: str, precision: str | None, scales: tuple[int, ...]
) -> None:
    """Of large operators, and on each machine of small ones, which take next to nothing, in one of the precisions."""
    on, shares = parse_machine(machine), list[float]()
    for scale in scales:
        graph = stack(0, precision, scale)
        prices = MachinePrices.of(graph, on, CostModel())
        for _, entry in baselines(graph, on):
            if entry is not None:
                skeleton, layouts = entry.variant.skeleton, entry.layouts
                drafts = new_drafts(skeleton, layouts, on.mesh, prices)
                whole = simulate_layouts(skeleton, layouts, drafts, entry.regathered)
                shares.append(least_step(skeleton, layouts, drafts) / whole.seconds)
    assert len(shares) >= 13 * len(scales) and 0.8 < max(shares) <= 1


def test_strategies_that_cannot_be_the_best_are_not_simulated_and_the_best_is_the_same() -> None:
    machine, graph = parse_machine("p3.8xlarge:1"), stack(0, scale=64)
    made = [name for name, entry in baselines(graph, machine) if entry is not None]
    predicted = [predict(make_plan(graph, machine, name), machine, CostModel()) for name in made]
    found = find_plan(graph, machine, CostModel(), Wish("named", budget=inf))
    assert found.seconds_per_step == min(one.seconds for one in predicted if one.fits)
    assert found.num_plans < len(made)
