"""Plans compute what one device computes: losses, gradients and parameters after two steps."""

from __future__ import annotations

import pytest

import zoo
from conjoin.machine import Machine
from conjoin.runtime import Case, verify_in_process
from conjoin.search import make_plan
from tests.search.models import captured

CASES = [
    ("mlp-autoddl", "sbp3d:m=2,n=1,k=2"),
    ("lenet", "data-parallel"),
    ("lenet", "one-weird-trick"),
    ("lenet", "spatial"),
    ("dlrm", "table-parallel"),
    ("dlrm", "reduction"),
    ("xdl", "fsdp"),
    ("gpt-125m", "megatron:tp=2,dp=2"),
    ("llama-70b", "megatron:tp=2,dp=2,sp,vocab"),
]


@pytest.mark.parametrize(("name", "strategy"), CASES, ids=[f"{name}-{strategy}" for name, strategy in CASES])
def test_a_plan_trains_as_one_device_does(name: str, strategy: str) -> None:
    size = 4 if "megatron" in strategy else 6  # samples that do not divide, where they are split over all
    model, batch, _ = zoo.build(f"{name}:tiny", batch_size=size)
    graph = captured(name, size)
    plan = make_plan(graph, Machine("local", 1, 4, "cpu"), strategy)
    found = verify_in_process(Case(plan, graph, model, batch), num_steps=2)
    assert found.passed, found.differences[:5]
