"""Steps that fail and are caught: the next one is right, or all ranks are told that it cannot be."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conjoin.errors import RankError, UsageError
from conjoin.ir import Plan
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from tests.ir.wording import assert_three_sentences
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import by_strategy, module_on
from tests.runtime.random_graphs import Sample
from tests.runtime.test_accumulation import plan_for, sample
from tests.runtime.test_bundles import regathering
from tests.runtime.test_recompute import transformer_loss

_OF_THREADS = {"clone", "fill_", "copy_", "stack", "sum", "amax", "cat", "split", "detach"}
"""What ranks that are threads do for each other, each as often as it comes to it first."""


class Fails(TorchDispatchMode):
    """Memory runs out at the operator of a number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in _OF_THREADS:
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError("tried to allocate more than there is")
        return func(*args, **(kwargs or {}))


@cache
def plan_of(kind: str) -> tuple[Sample, Plan]:
    strategy, *more = kind.split(", ")
    found = sample("transformer")
    if "micro-batches" in more:
        return found, plan_for(found, strategy, 2, segments=7 if "segments" in more else 0)
    plan = by_strategy(found, strategy, 2)
    return found, regathering(plan) if "gathered again" in more else plan


KINDS = (
    "data-parallel", "fsdp", "fsdp, gathered again", "megatron", "data-parallel, micro-batches", "fsdp, micro-batches",
    "megatron, micro-batches, segments",
)  # fmt: skip


@cache
def gradients_alone(kind: str) -> dict[str, Tensor]:
    """Of the plain model."""
    found, _ = plan_of(kind)
    model = copy.deepcopy(found.model)
    transformer_loss(model(found.inputs[0]), found.inputs[1]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_step(step: ParallelModule, kind: str) -> None:
    """One step without a failure has the gradients of the plain model."""
    found, _ = plan_of(kind)
    step.zero_grad()
    step(*found.inputs).backward()
    check_gradients(step, kind)


def check_gradients(step: ParallelModule, kind: str) -> None:
    for name, parameter in step.named_parameters():
        whole = gradients_alone(kind)[name]
        part = step.store.cut(name, whole)
        torch.testing.assert_close(parameter.grad, part, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_step_that_failed_on_all_ranks_the_next_one_is_right(kind: str) -> None:
    found, plan = plan_of(kind)

    def program(communicator: Communicator) -> list[bool]:
        step = module_on(plan, found, communicator)
        with Fails(-1) as counting:
            step(*found.inputs).backward()
        failed = []
        for at in range(1, counting.count + 1, max(1, counting.count // 6)):
            try:
                with Fails(at):
                    loss = step(*found.inputs)
                    loss.backward()
                failed.append(False)
            except torch.OutOfMemoryError:
                failed.append(True)
            check_step(step, kind)
        return failed

    for failed in run_ranks(plan.mesh, program):
        assert len(failed) >= 6 and all(failed)


@pytest.mark.parametrize("kind", ["data-parallel", "fsdp, gathered again", "fsdp, micro-batches"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_rank_that_fails_alone_does_not_go_on(kind: str, share: float) -> None:
    found, plan = plan_of(kind)

    def program(communicator: Communicator) -> None:
        step = module_on(plan, found, communicator)
        with Fails(-1) as counting:
            step(*found.inputs).backward()
        try:
            with Fails(int(share * counting.count) + 1 if communicator.rank else -1):
                step(*found.inputs).backward()
        except torch.OutOfMemoryError:
            assert communicator.rank == 1
        for _ in range(2):
            step(*found.inputs).backward()

    with pytest.raises(RankError):
        run_ranks(plan.mesh, program)


def different_points(communicator: Communicator) -> str:
    """Both ranks fail in the midst of a step, one of them after one collective more."""
    found, plan = plan_of("data-parallel")
    step, axes = module_on(plan, found, communicator), communicator.mesh.names
    with pytest.raises(torch.OutOfMemoryError), Fails(5):
        step(*found.inputs)
    more = communicator.all_reduce(torch.ones(1), axes) if communicator.rank else None
    with pytest.raises(RankError) as told:
        step(*found.inputs)
    (more or communicator.all_reduce(torch.ones(1), axes)).wait()
    assert_three_sentences(told.value)
    return str(told.value)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_ranks_that_failed_at_different_points_are_told(ranks: str, tmp_path: Path) -> None:
    mesh = plan_of("data-parallel")[1].mesh
    run = run_ranks(mesh, different_points) if ranks == "threads" else run_processes(mesh, different_points, tmp_path)
    for told in run:
        assert "the ranks failed at different points" in told and "on rank 0" in told


def test_inputs_that_were_refused_cost_nothing() -> None:
    kind = "data-parallel"
    found, plan = plan_of(kind)

    def program(communicator: Communicator) -> None:
        step = module_on(plan, found, communicator)
        if communicator.rank:
            with pytest.raises(UsageError):
                step(*(x[:3] for x in found.inputs))
        check_step(step, kind)

    run_ranks(plan.mesh, program)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_in_any_order(kind: str) -> None:
    """Forward alone, without gradients, two forwards and a backward, one retained and come back to, one run again."""
    found, plan = plan_of(kind)

    def program(communicator: Communicator) -> None:
        step = module_on(plan, found, communicator)
        with torch.no_grad():
            step(*found.inputs)
        step(*found.inputs)
        check_step(step, kind)
        first, second = step(*found.inputs), step(*found.inputs)
        step.zero_grad()
        (0.25 * first).backward(retain_graph=True)
        (0.5 * second).backward()
        first.backward(torch.tensor(0.25))
        check_gradients(step, kind)
        step.zero_grad()
        checkpoint(step, *found.inputs, use_reentrant=False).backward()
        check_gradients(step, kind)
        with pytest.raises(RuntimeError, match="a second time"):
            first.backward()

    run_ranks(plan.mesh, program)
