"""A step of a pipeline that fails in its middle: all ranks leave it together, and the next one is right.

The judge is the plain model in a loop over the steps that did not fail.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.errors import RankError
from conjoin.frontends import capture
from conjoin.machine import Machine
from conjoin.runtime import launch
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.pipelines.stage_runs import StageRun
from conjoin.runtime.ranks.threads import ThreadRanks, run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.search import make_pipeline
from tests.runtime.test_pipelines import CASES, pipeline_of, train_plainly

PASSES = ("forward", "backward", "input_gradient", "weight_gradient")


class Failing:
    """Has one pass of a stage and a micro-batch fail, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, stage: int, micro_batch: int) -> None:
        whole, self.failed = getattr(StageRun, name), list[int]()

        def run(own: StageRun, number: int, *args: Any) -> Any:
            if own.stage.plan.model.name == f"stage {stage}" and number == micro_batch and self.is_armed:
                self.failed.append(number)
                raise MemoryError("there is no more")
            return whole(own, number, *args)

        monkeypatch.setattr(StageRun, name, run)

    is_armed = False


FAILURES = [
    ("batch norm", "pipeline:pp=2,micro=4", "forward", 1, 2),
    ("batch norm", "pipeline:pp=3,micro=4,schedule=zero-bubble", "weight_gradient", 0, 1),
    ("batch norm", "pipeline:pp=3,micro=4,schedule=eager-1f1b", "forward", 2, 0),
    ("skips", "pipeline:pp=3,micro=4,schedule=zero-bubble", "input_gradient", 1, 3),
    ("skips", "pipeline:pp=2,micro=4,schedule=interleaved", "backward", 2, 1),
    ("tied", "pipeline:pp=3,micro=2,schedule=gpipe", "backward", 0, 0),
]


@pytest.mark.parametrize(("case", "strategy", "name", "stage", "micro_batch"), FAILURES)
def test_after_a_failed_pass_the_same_step_may_be_taken_again(
    case: str, strategy: str, name: str, stage: int, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, make, loss = CASES[case]
    torch.manual_seed(3)
    model = kind().double().train()
    batches = [make() for _ in range(3)]
    ranks = int(strategy.split("pp=")[1][0])
    pipeline = pipeline_of(model, batches[0], loss, strategy, ranks)
    failing = Failing(monkeypatch, name, stage, micro_batch)
    where = pipeline.stages[stage].ranks[0]
    losses, _, state = train_plainly(model, batches, loss, pipeline.num_micro_batches)

    def rank(world: ThreadRanks) -> str:
        store = Store(pipeline, world.rank, torch.device("cpu"))
        store.fill(model)
        module, told = ParallelModule(pipeline, store, world), ""
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            if number == 1:
                failing.is_armed = True
                before = {n: x.clone() for n, x in module.named_buffers()}
                with pytest.raises((MemoryError, RankError)) as caught:
                    module(*batch)
                told = f"{type(caught.value).__name__}: {caught.value}"
                world.compare("all have seen it")
                failing.is_armed = False
                assert all(p.grad is None for p in module.parameters())
                assert all(torch.equal(x, before[n]) for n, x in module.named_buffers())
            made = module(*batch)
            made.backward()
            optimizer.step()
            assert made.item() == pytest.approx(losses[number], rel=1e-12)
        for n, held in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            torch.testing.assert_close(held.detach(), state[n], rtol=1e-9, atol=1e-12)
        return told

    told = run_ranks(pipeline.mesh, rank)
    assert failing.failed == [micro_batch], "it failed once"
    for number, text in enumerate(told):
        assert text.startswith("MemoryError" if number == where else "RankError"), text
        assert number == where or f"it failed on rank {where} (MemoryError: there is no more)." in text


def test_the_draws_of_a_failed_step_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    batch = torch.randn(8, 6).double(), torch.randn(8, 1).double()
    pipeline = pipeline_of(model.train(), batch, nn.functional.mse_loss, "pipeline:pp=2,micro=4", 2)
    failing = Failing(monkeypatch, "forward", 1, 2)

    def rank(world: ThreadRanks, fails: bool) -> list[float]:
        store = Store(pipeline, world.rank, torch.device("cpu"))
        store.fill(model)
        module, losses = ParallelModule(pipeline, store, world, exact_seed=4), list[float]()
        for number in range(3):
            if fails and number == 1:
                failing.is_armed = True
                with pytest.raises((MemoryError, RankError)):
                    module(*batch)
                world.compare("all have seen it")
                failing.is_armed = False
            losses.append(module(*batch).item())
        return losses

    wanted, found = (run_ranks(pipeline.mesh, lambda world, fails=fails: rank(world, fails)) for fails in (False, True))
    assert len(failing.failed) == 1 and found == wanted and len(set(wanted[0])) == 3


def plain_model() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))).double().train()


def batch_of() -> tuple[Tensor, Tensor]:
    torch.manual_seed(9)
    return torch.randn(8, 4).double(), torch.randn(8, 4).double()


def failing_then_killed(rank: int, plan: str) -> tuple[str, list[float], str]:
    """One step fails on rank 1, the next are right; then rank 1 is killed in the middle of one."""
    step, whole = conjoin.load(plan, plain_model()), StageRun.forward
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    told, losses = "", list[float]()

    def fail(own: StageRun, number: int, inputs: Any) -> Any:
        if rank == 1 and number == 2:
            raise MemoryError
        return whole(own, number, inputs)

    def die(own: StageRun, number: int, inputs: Any) -> Any:
        if rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(own, number, inputs)

    for number in range(2):
        if number == 1:
            StageRun.forward = fail  # type: ignore[method-assign]
            try:
                step(*batch_of())
            except (MemoryError, RankError) as error:
                told = f"{type(error).__name__}: {error}"
            StageRun.forward = whole  # type: ignore[method-assign]
        optimizer.zero_grad()
        loss = step(*batch_of())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    StageRun.forward = die  # type: ignore[method-assign]
    try:
        step(*batch_of())
    except RankError as error:
        path = Path(plan).with_name(f"seen by {rank}")
        path.write_text(f"{told}\n{losses}\n{error}")
        raise
    return told, losses, ""


def test_processes_go_on_after_a_failed_step_and_name_the_one_that_was_killed(tmp_path: Path) -> None:
    plan, model = tmp_path / "plan.json", plain_model()
    graph = capture(model, batch_of(), nn.functional.mse_loss)
    make_pipeline(graph, Machine("here", 1, 2, "cpu"), "pipeline:pp=2,micro=4").save(plan)
    with pytest.raises(RankError, match="ank 1"):
        launch(2, failing_then_killed, str(plan))
    told, losses, lost = (tmp_path / "seen by 0").read_text().split("\n", 2)
    assert "it failed on rank 1 (MemoryError)." in told and "ank 1" in lost
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch_of()[0]), batch_of()[1])
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert [float(x) for x in losses.strip("[]").split(",")] == pytest.approx(wanted, rel=1e-11)
