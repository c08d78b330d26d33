"""TF32 is on for every product of a step, forward and backward, and afterwards all is as it was.

The judge is torch's own flag, read by a dispatch mode whenever a product is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import conjoin
from conjoin.errors import UsageError
from conjoin.ir import Plan, computation_digest, cut_in_micro_batches, model_mark
from conjoin.machine import parse_machine
from conjoin.runtime import ParallelModule
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences

BACKENDS = torch.backends


class Watch(TorchDispatchMode):
    """Notes what torch would do with each product on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.seen.append((BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.conv.fp32_precision))
        return func(*args, **(kwargs or {}))


def settings() -> tuple[Any, ...]:
    found = BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn
    kept = BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    return (*kept, *(part.fp32_precision for part in found))


@pytest.fixture(params=["as it is", "cudnn off", "all on"])
def before(request: pytest.FixtureRequest) -> Iterator[tuple[Any, ...]]:
    first = settings()
    if request.param == "cudnn off":
        BACKENDS.cudnn.allow_tf32 = False
    elif request.param == "all on":
        torch.set_float32_matmul_precision("medium")
    yield settings()
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for part, precision in zip((BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn), first[3:], strict=True):
        part.fp32_precision = precision
    assert settings() == first


def workload() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).train(), (torch.randn(8, 4), torch.randn(8, 2))


def plan_of(model: nn.Module, batch: Any, precision: str = "tf32@cuda") -> Plan:
    graph = conjoin.capture(model, batch, nn.functional.mse_loss, precision=precision)
    return make_plan(graph, parse_machine("local:1"), "single")


def module_of(plan: Plan, model: nn.Module) -> ParallelModule:
    return conjoin.load(plan, model, device="cpu")


def test_every_product_of_a_step_and_nothing_after_it(before: tuple[Any, ...]) -> None:
    model, batch = workload()
    step = module_of(plan_of(model, batch), model)
    with Watch() as watch:
        loss = step(*batch)
        assert settings() == before
        loss.backward()
    assert settings() == before
    assert len(watch.seen) == 5 and set(watch.seen) == {(True, "tf32")}


def test_a_plan_in_float32_leaves_it_alone(before: tuple[Any, ...]) -> None:
    model, batch = workload()
    step = module_of(plan_of(model, batch, "float32@cuda"), model)
    with Watch() as watch:
        step(*batch).backward()
    assert {allowed for allowed, _ in watch.seen} == {before[0]} and settings() == before


def test_micro_batches_and_segments_that_are_run_again(before: tuple[Any, ...]) -> None:
    model, batch = workload()
    whole = conjoin.capture(model, batch, nn.functional.mse_loss, precision="tf32@cuda")
    graph, accumulation = cut_in_micro_batches(whole, 2)
    made = make_plan(graph, parse_machine("local:1"), "single")
    computes = computation_digest(made.graph, accumulation)
    step = module_of(replace(made, model=model_mark(whole), accumulation=accumulation, computes=computes), model)
    again = module_of(plan_of(model, batch), model)
    with Watch() as watch:
        step(*batch).backward()
        checkpoint(again, *batch, use_reentrant=False).backward()
    assert len(watch.seen) == 17 and set(watch.seen) == {(True, "tf32")} and settings() == before


def test_what_a_failed_pass_left_is_put_back_by_the_next_step(before: tuple[Any, ...]) -> None:
    model, batch = workload()
    step = module_of(plan_of(model, batch), model)
    parameter = next(step.parameters())
    handle = parameter.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(*batch).backward()
    handle.remove()
    step(*batch).backward()
    assert settings() == before
    with pytest.raises(UsageError):
        step(batch[0][:3], batch[1])
    assert settings() == before


@pytest.mark.parametrize(
    ("machine", "told"), [("local:2", "whose 2 devices are CPUs"), ("p3.8xlarge", "float16 (125 TFLOP/s)")]
)
def test_a_machine_without_it_refuses(machine: str, told: str) -> None:
    model, batch = workload()
    with pytest.raises(UsageError) as error:
        conjoin.plan(model, batch, machine, loss=nn.functional.mse_loss, strategy="fsdp", precision="tf32")
    assert told in str(error.value)
    assert_three_sentences(error.value)


def test_it_stands_in_the_plan_and_is_verified() -> None:
    model, batch = workload()
    loss = nn.functional.mse_loss
    plan = conjoin.plan(model, batch, "p4d.24xlarge", loss=loss, strategy="data-parallel", precision="tf32")
    assert plan.precision == "tf32@cuda" and plan.graph.rounding.tf32
    assert conjoin.explain(plan).precision == "tf32"
    assert conjoin.verify_plan(plan, model, batch, loss=loss, num_steps=2).passed
