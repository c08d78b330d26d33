"""What people do with a module: compile, autocast, checkpoint activations, accumulate, on two real ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zoo
from conjoin.frontends import capture
from conjoin.machine import parse_machine
from conjoin.runtime import launch, load
from conjoin.search import make_plan

Run = Callable[[Any, Any], Tensor]


def _compiled(step: Any, batch: Any) -> Tensor:
    torch.compiler.reset()
    return torch.compile(step, backend="aot_eager")(batch)  # type: ignore[no-any-return]


def _checkpointed(step: Any, batch: Any) -> Tensor:
    return checkpoint(step, batch, use_reentrant=False)  # type: ignore[no-any-return]


def _autocast(step: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return step(batch)  # type: ignore[no-any-return]


WAYS: dict[str, Run] = {
    "eager": lambda step, batch: step(batch),
    "compiled": _compiled,
    "checkpointed": _checkpointed,
    "autocast": _autocast,
}


def _gradients(step: Any, run: Run, batch: Any, passes: int = 1) -> tuple[float, list[float]]:
    torch.manual_seed(3)
    step.zero_grad()
    for _ in range(passes):
        loss = run(step, batch) / passes
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()) * passes, [float(p.grad.double().norm()) for p in step.parameters()]


def _all_ways(rank: int, plan: Any, model: Any, batch: Any) -> dict[str, tuple[float, list[float]]]:
    warnings.simplefilter("ignore")  # of the compiler about itself
    found = {}
    for name, run in WAYS.items():
        step = load(plan, copy.deepcopy(model))
        found[name] = _gradients(step, run, batch)
        if name == "eager":
            plain = load(plan, copy.deepcopy(model), exact_seed=5)
            once, twice = _gradients(plain, run, batch), _gradients(plain, run, batch, passes=2)
            assert plain.plan is plan and once[0] > 0 and len(twice[1]) == len(once[1])
    return found


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
def test_compile_checkpoint_and_autocast_train_the_same(strategy: str) -> None:
    workload = zoo.build("gpt-125m:tiny")
    graph = capture(workload.model.train(), workload.batch, workload.loss)
    plan = make_plan(graph, parse_machine("local:2"), strategy)
    for found in launch(2, _all_ways, plan, workload.model, workload.batch):
        loss, gradients = found["eager"]
        for name in ("compiled", "checkpointed"):
            assert found[name][0] == pytest.approx(loss, rel=1e-5), name
            assert found[name][1] == pytest.approx(gradients, rel=1e-3, abs=1e-6), name
        assert found["autocast"][0] == pytest.approx(loss, rel=1e-2)
        assert found["autocast"][0] != loss
        assert found["autocast"][1] == pytest.approx(gradients, rel=0.2, abs=1e-3)
