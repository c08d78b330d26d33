"""The first step of ranks that should agree: batches, weights and gradients that differ are told, nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import RankError
from conjoin.ir import Plan
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.agreement import digest
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from tests.ir.wording import assert_three_sentences
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample
from tests.runtime.test_accumulation import plan_for
from tests.runtime.test_accumulation import sample as micro_sample


@cache
def case(kind: str) -> tuple[Sample, Plan]:
    if kind == "micro-batches":
        return micro_sample("layers"), plan_for(micro_sample("layers"), "data-parallel", 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    found = captured(model, (torch.randn(8, 4), torch.randn(8, 2)), functional.mse_loss)
    return found, by_strategy(found, kind, 2)


def comparing(communicator: Communicator, kind: str, every: int | None = None) -> tuple[ParallelModule, list[Tensor]]:
    found, plan = case(kind)
    step = module_on(plan, found, communicator)
    step.compare_every(every)
    return step, [x.clone() for x in found.inputs]


KINDS = "data-parallel", "fsdp", "megatron", "micro-batches"
DIFFERENT = ["another batch", "one number", "a sign of zero", "other targets", "other weights", "other gradients"]


def spoil(what: str, step: ParallelModule, inputs: list[Tensor]) -> None:
    match what:
        case "another batch":
            inputs[0].normal_()
        case "one number":
            inputs[0][5, 1] *= 1 + 1e-6
        case "a sign of zero":
            inputs[0][0, 0] = -inputs[0][0, 0]
        case "other targets":
            inputs[1].add_(1)
        case "other weights":
            with torch.no_grad():
                next(step.parameters()).mul_(3)
        case _:
            next(step.parameters()).register_hook(lambda gradient: gradient * 2)


def told_by(communicator: Communicator, kind: str, what: str) -> str:
    step, inputs = comparing(communicator, kind)
    if communicator.rank == 1:
        spoil(what, step, inputs)
    with pytest.raises(RankError) as told:
        step(*inputs).backward()
    assert_three_sentences(told.value)
    return str(told.value)


HELD_APART = [(kind, what) for kind in ("fsdp", "megatron") for what in DIFFERENT[-2:]]
"""Every rank has a part of the first weight of its own."""


@pytest.mark.parametrize(("kind", "what"), [case for case in product(KINDS, DIFFERENT) if case not in HELD_APART])
def test_what_should_agree_and_does_not_is_told(kind: str, what: str) -> None:
    wanted = {"other targets": "input target", "other weights": "0.weight", "other gradients": "gradient of 0.weight"}
    for told in run_ranks(case(kind)[1].mesh, lambda c: told_by(c, kind, what)):
        assert f"The ranks 0 and 1 must have the same {wanted.get(what, 'input input')}, and" in told


def test_processes_tell_it_too(tmp_path: Path) -> None:
    mesh = case("data-parallel")[1].mesh
    for told in run_processes(mesh, lambda c: told_by(c, "data-parallel", "another batch"), tmp_path):
        assert "The ranks 0 and 1 must have the same input input, and in step 1 they have not" in told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [False, True])
def test_what_agrees_or_need_not_is_not_told(kind: str, part: bool) -> None:
    """The whole batch on every rank, or to each its part; without gradients, with, and over again."""
    _, plan = case(kind)

    def program(communicator: Communicator) -> int:
        step, inputs = comparing(communicator, kind, 2)
        if part and kind != "megatron":
            inputs = [x.chunk(2)[communicator.rank] for x in inputs]
        with torch.no_grad():
            step(*inputs)
        for _ in range(4):
            step(*inputs).backward()
        return communicator.num_started

    found = run_ranks(plan.mesh, program)
    assert found[0] == found[1]


def test_only_the_steps_asked_for_are_compared() -> None:
    _, plan = case("data-parallel")

    def started(communicator: Communicator, every: int | None) -> list[int]:
        step, inputs = comparing(communicator, "data-parallel", every)
        counts = [0]
        for _ in range(4):
            step(*inputs).backward()
            counts.append(communicator.num_started)
        return [b - a for a, b in pairwise(counts)]

    asked: tuple[int | None, ...] = 0, None, 2
    runs = {every: run_ranks(plan.mesh, lambda c, e=every: started(c, e))[0] for every in asked}
    plain = runs[0][0]
    assert runs[0] == [plain] * 4 and runs[None] == [plain + 2, *[plain] * 3]
    assert runs[2] == [plain + 2, plain, plain + 2, plain]


def test_a_batch_that_differs_later_is_told_where_that_is_asked_for() -> None:
    _, plan = case("megatron")

    def program(communicator: Communicator) -> str:
        step, inputs = comparing(communicator, "megatron", 3)
        for i in range(4):
            try:
                step(*(x + i * communicator.rank * (i == 3) for x in inputs)).backward()
            except RankError as error:
                return str(error)
        return ""

    assert all("in step 4 they have not" in told for told in run_ranks(plan.mesh, program))


CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.flip(0), lambda x: x.roll(1, 1), lambda x: x + 1, lambda x: x[:, :-1], lambda x: x.t(), lambda x: -x,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64], ids=str)
def test_digests_tell_tensors_apart(dtype: torch.dtype) -> None:
    x = torch.arange(1, 31).reshape(5, 6).to(dtype)
    assert digest(x) == digest(x.t().contiguous().t()) == digest(x.clone())
    assert all(digest(change(x)) != digest(x) for change in CHANGES)
    assert digest(x[:0]) == 0 and digest(torch.zeros(3, dtype=torch.bool)) == 0
