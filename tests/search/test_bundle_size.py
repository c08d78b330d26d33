"""The size of bundles: judged by trying all of them in the simulator, which knows nothing of the formula."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import BUNDLE_BYTES, Graph
from conjoin.machine import Machine, parse_machine
from conjoin.search import make_plan
from conjoin.search.bundle_size import MEBI, choose_bundle_bytes
from conjoin.sim import predict


@cache
def layers(width: int, depth: int) -> Graph:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        batch = torch.zeros(4096, width), torch.zeros(4096, width)
    return capture(model.train(), batch, functional.mse_loss)


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
@pytest.mark.parametrize("machine", ["dgx-h100", "dgx-h100:16", "summit:4"])
def test_no_size_is_much_better(machine: str, strategy: str) -> None:
    chosen, costs = parse_machine(machine), CostModel()
    plan = make_plan(layers(1024, 40), chosen, strategy)
    sizes = [plan.bundle_bytes, *(size * MEBI for size in (1, 4, 16, 25, 64, 160))]
    mine, *others = (predict(replace(plan, bundle_bytes=size), chosen, costs).seconds for size in sizes)
    assert mine <= 1.1 * min(others), [round(1e3 * seconds, 2) for seconds in (mine, *others)]


def test_what_it_depends_on() -> None:
    small, large = layers(256, 2), layers(1024, 40)
    near, far = Machine.preset("dgx-h100"), Machine.preset("dgx-h100", nodes=16)
    assert MEBI <= choose_bundle_bytes(small, near) < choose_bundle_bytes(large, near)
    assert choose_bundle_bytes(large, near) < choose_bundle_bytes(large, far) <= 64 * MEBI
    assert choose_bundle_bytes(large, parse_machine("local:4")) == BUNDLE_BYTES
