"""A model small enough to be searched in no time, and machines on which it pays to split it."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from conjoin.frontends import capture
from conjoin.ir import Graph, Plan, parse_graph
from conjoin.machine import Machine, parse_machine
from conjoin.search import Wish
from conjoin.search.contest import Contest
from conjoin.search.searches import open_contest
from tests.search.prices import SlowDevices


def model() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Two layers with their batch."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return layers, (torch.randn(8, 16), torch.randn(8, 16))


@cache
def small() -> Graph:
    """The two layers and their loss."""
    layers, batch = model()
    return capture(layers.train(), batch, nn.functional.mse_loss)


@cache
def large() -> Graph:
    """Layers of a size for which eight GPUs are faster than one, though not eight times."""
    return parse_graph(
        'graph "large" train\nparam:a f32[8192,8192] trainable\nparam:b f32[8192,8192] trainable\n'
        "input:x f32[1024,8192]\ntakes [input:x] in null\n%0: f32[1024,8192] = linear(input:x, param:a)\n"
        "%1: f32[1024,8192] = relu(%0)\n%2: f32[1024,8192] = linear(%1, param:b)\n"
        "%3: f32[1024,8192] = relu(%2)\n%4: f32[] = sum(%3)\nreturns [%4] in null loss 0\n"
    )


def slow_contest(machine: str = "local:4", graph: Graph | None = None, **wish: object) -> Contest:
    """A contest on slow devices with fast links: splitting pays, and how is seen in the tables."""
    asked = Wish(**{"memory": 1 << 40, "budget": 120.0, **wish})  # type: ignore[arg-type]
    found = parse_machine(machine)
    contest = open_contest(graph or small(), _with_speeds(found), None, asked)  # type: ignore[arg-type]
    contest.prices, contest.capacity = SlowDevices(), asked.memory or 1 << 40
    return contest


def _with_speeds(machine: Machine) -> Machine:
    """A machine of the same mesh whose devices have a memory."""
    if machine.nodes:
        return machine
    known = parse_machine(f"dgx-h100:{machine.num_nodes}x{machine.devices_per_node}")
    assert known.mesh == machine.mesh
    return known


def line_of(plan: Plan, *words: str) -> str:
    """The line of a plan that has all words, without where it comes from."""
    found = [line for line in str(plan.graph).splitlines() if all(word in line for word in words)]
    assert found, words
    return found[0].split("  @")[0]
