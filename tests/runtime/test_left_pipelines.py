"""A rank that fails alone in a stage which others have part in: all leave the step, and the next one is right.

The others are in collectives with it, or wait for what it was to send. The judge is the plain model in a loop over the
steps that did not fail.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.comm import exchanges_in_passes
from conjoin.errors import RankError
from conjoin.frontends import capture
from conjoin.ir import Pipeline
from conjoin.machine import Machine
from conjoin.runtime import Session, launch
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.pipelines.stage_runs import StageRun
from conjoin.runtime.ranks.process_groups import ProcessGroups
from conjoin.runtime.ranks.rank_watch import last_words
from conjoin.runtime.ranks.threads import ThreadRanks, run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.search import make_pipeline
from tests.ir.wording import assert_three_sentences
from tests.runtime.test_passes import Fails
from tests.runtime.test_pipelines import CASES, Block, pipeline_of, train_plainly

SECONDS = 30
"""Within which all ranks have left a step, also on a busy machine."""
Where = tuple[str, int, int, int, int]
"""A pass of a stage, the rank among its ranks, the micro-batch, and the number of the operator; 0 is before all."""


class Failing:
    """Has one rank of a stage run out of memory in the middle of a pass, while it is armed."""

    def __init__(self, name: str, stage: int, member: int, micro_batch: int, at: int) -> None:
        self._name, self._whole, self.is_armed = name, getattr(StageRun, name), False

        def run(own: StageRun, *args: Any) -> Any:
            is_there = own.stage.plan.model.name == f"stage {stage}" and own.program.communicator.rank == member
            if self.is_armed and is_there and (not args or args[0] == micro_batch):
                if not at:
                    raise torch.OutOfMemoryError("tried to allocate more than there is")
                with Fails(at):
                    return self._whole(own, *args)
            return self._whole(own, *args)

        setattr(StageRun, name, run)

    def end(self) -> None:
        setattr(StageRun, self._name, self._whole)


def fail(step: nn.Module, batch: tuple[Tensor, ...]) -> str:
    """A step that fails, and of which nothing is left; what is said."""
    before = {name: x.clone() for name, x in step.named_buffers()}
    step.zero_grad()
    begin = time.monotonic()
    with pytest.raises((torch.OutOfMemoryError, RankError)) as caught:
        step(*batch)
    assert time.monotonic() - begin < SECONDS
    assert all(p.grad is None for p in step.parameters())
    assert all(torch.equal(x, before[name]) for name, x in step.named_buffers())
    return f"{type(caught.value).__name__}: {caught.value}"


TWICE = "zero-bubble"
"""Of the schedules in which a rank fails, that in which it does so again, after a step that was right."""
FAILURES: list[tuple[str, str, int, Where]] = [
    ("tied", "pipeline:pp=2,tp=2,micro=4", 4, ("forward", 0, 1, 1, 4)),
    ("tied", "pipeline:pp=2,tp=2,sp,micro=4,schedule=gpipe", 4, ("backward", 1, 0, 2, 9)),
    ("tied", "pipeline:pp=2,fsdp,micro=4,schedule=eager-1f1b", 4, ("backward", 0, 0, 3, 6)),
    ("batch norm", "pipeline:pp=2,micro=2", 4, ("forward", 1, 1, 1, 5)),
    ("batch norm", "pipeline:pp=3,micro=2,schedule=zero-bubble", 6, ("weight_gradient", 2, 1, 0, 3)),
    ("skips", "pipeline:pp=2,zero1,micro=4,schedule=interleaved", 4, ("sum_up", 1, 1, 0, 0)),
    ("translator", "pipeline:pp=3,micro=2", 8, ("backward", 1, 2, 0, 2)),
    ("tied", "pipeline:pp=1,v=2,tp=2,micro=2,schedule=interleaved", 2, ("backward", 1, 1, 1, 3)),
]


ALONE = "pipeline:pp=2,micro=4", 4, ("forward", 0, 1, 2, 3)


@pytest.mark.parametrize(("case", "strategy", "ranks", "where"), FAILURES)
def test_all_leave_a_step_in_which_one_has_failed(case: str, strategy: str, ranks: int, where: Where) -> None:
    check_leaving(case, strategy, ranks, where)


def check_leaving(case: str, strategy: str, ranks: int, where: Where) -> Pipeline:
    """One rank fails, once or twice; the steps between are those of the plain model."""
    kind, make, loss = CASES[case]
    torch.manual_seed(3)
    model = kind().double().train()
    batches = [make() for _ in range(3 if TWICE in strategy else 2)]
    pipeline = pipeline_of(model, batches[0], loss, strategy, ranks)
    wanted = train_plainly(model, batches, loss, pipeline.num_micro_batches)
    failing = Failing(*where)

    def train(world: ThreadRanks) -> list[str]:
        store = Store(pipeline, world.rank, torch.device("cpu"))
        store.fill(model)
        module, told = ParallelModule(pipeline, store, world), []
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for number, batch in enumerate(batches):
            if number > 0:
                failing.is_armed = True
                world.compare("all begin")
                told.append(fail(module, batch))
                world.compare("all have left")
                failing.is_armed = False
                world.compare("all go on")
            optimizer.zero_grad()
            made = module(*batch)
            made.backward()
            optimizer.step()
            assert made.item() == pytest.approx(wanted[0][number], rel=1e-12)
        for name, held in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            whole = wanted[2][name]
            part = store.cut(name, whole)
            torch.testing.assert_close(held.detach(), part, rtol=1e-9, atol=1e-12)
        return told

    try:
        told = run_ranks(pipeline.mesh, train)
    finally:
        failing.end()
    failed = pipeline.stages[where[1]].ranks[where[2]]
    for rank, texts in enumerate(told):
        for text in texts:
            assert text.startswith("OutOfMemoryError" if rank == failed else "RankError"), text
            assert rank == failed or f"it failed on rank {failed} (OutOfMemoryError: tried" in text
    return pipeline


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(8) for _ in range(4)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def small_model() -> nn.Module:
    torch.manual_seed(8)
    return Small().double().train()


def small_batch(samples: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(9)
    return torch.randn(samples, 8).double(), torch.randn(samples, 1).double()


PLACES: dict[str, tuple[Where, ...]] = {
    "pipeline:pp=2,tp=2,micro=4": (
        ("forward", 0, 0, 1, 5), ("backward", 1, 1, 2, 6),
    ),
    "pipeline:pp=2,fsdp,micro=4,schedule=eager-1f1b": (
        ("backward", 0, 0, 0, 8), ("sum_up", 1, 1, 0, 0),
    ),
}  # fmt: skip
Told = list[tuple[str, float]]


def fail_in_turn(rank: int, plans: dict[str, str]) -> dict[str, tuple[Told, dict[str, Tensor]]]:
    """By plan, what was said of every step that failed, each with the loss of the next; and the weights at the end."""
    found = {}
    for strategy, plan in plans.items():
        step, told = conjoin.load(plan, small_model(), loss=nn.functional.mse_loss), []
        optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
        for where in PLACES[strategy]:
            failing = Failing(*where)
            failing.is_armed = True
            said = fail(step, small_batch())
            failing.end()
            optimizer.zero_grad()
            loss = step(*small_batch(4 if where is PLACES[strategy][-1] else 8))  # at last with fewer samples
            loss.backward()
            optimizer.step()
            told.append((said, loss.item()))
        found[strategy] = told, conjoin.full_state_dict(step)
    return found


def save_plan(strategy: str, path: Path) -> Pipeline:
    graph = capture(small_model(), small_batch(), nn.functional.mse_loss)
    pipeline = make_pipeline(graph, Machine("here", 1, 4, "cpu"), strategy)
    pipeline.save(path)
    return pipeline


def test_processes_leave_a_step_together_and_go_on(tmp_path: Path) -> None:
    plans = {strategy: str(tmp_path / f"{i}.json") for i, strategy in enumerate(PLACES)}
    pipelines = {strategy: save_plan(strategy, Path(path)) for strategy, path in plans.items()}
    assert all(exchanges_in_passes(stage.plan) for p in pipelines.values() for stage in p.stages)
    found = launch(4, fail_in_turn, plans)
    model = small_model()
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.1), []
    for samples in (8, 4):
        x, y = small_batch(samples)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for strategy, pipeline in pipelines.items():
        for rank, by_strategy in enumerate(found):
            told, state = by_strategy[strategy]
            assert [loss for _, loss in told] == pytest.approx(wanted, rel=1e-12)
            for where, (text, _) in zip(PLACES[strategy], told, strict=True):
                failed = pipeline.stages[where[1]].ranks[where[2]]
                assert text.startswith("OutOfMemoryError" if rank == failed else "RankError"), text
                assert rank == failed or f"it failed on rank {failed} (OutOfMemoryError: tried" in text
            for name, tensor in model.state_dict().items() if rank == 0 else ():
                torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


def fail_where_nobody_can_leave(rank: int, plan: str, notes: str) -> None:
    """As with a backend whose collectives nobody can leave."""
    ProcessGroups.can_break_off = False  # type: ignore[assignment, method-assign]

    def note(error: RankError) -> None:
        (Path(notes) / f"{rank}").write_text(str(error))

    last_words.insert(0, note)
    step = conjoin.load(plan, small_model(), session=Session(patience_seconds=20.0))
    step(*small_batch())
    Failing("forward", 1, 0, 2, 3).is_armed = True
    try:
        step(*small_batch())
    except RankError as error:
        note(error)
        if rank == 2:
            time.sleep(SECONDS)  # the others do not have to see that the process has ended
        raise


def test_where_nobody_can_leave_a_collective_all_end_and_say_why(tmp_path: Path) -> None:
    save_plan("pipeline:pp=2,tp=2,micro=4", tmp_path / "plan.json")
    begin = time.monotonic()
    with pytest.raises(RankError, match="ank 2"):
        launch(4, fail_where_nobody_can_leave, str(tmp_path / "plan.json"), str(tmp_path))
    assert time.monotonic() - begin < 10 * SECONDS
    told = {path.name: path.read_text() for path in tmp_path.glob("[0-3]")}
    assert "2" in told and "OutOfMemoryError" in told["2"] and "cannot leave" in told["2"]
    assert_three_sentences(RankError(told["2"]))
    assert len(told) > 1 and all("ank 2" in text and "OutOfMemoryError" in text for text in told.values()), told


def test_a_stage_that_only_sums_up_at_the_end_is_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody can leave a collective, and nobody is in one with the rank that fails."""
    monkeypatch.setattr(ThreadRanks, "can_break_off", False)
    first, last = check_leaving("skips", *ALONE).stages
    assert not exchanges_in_passes(first.plan) and exchanges_in_passes(last.plan), "the loss is a sum over ranks"
