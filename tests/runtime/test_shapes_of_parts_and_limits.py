"""Batches that come in parts, few programs that are held, files beside a plan, and shapes that are refused."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import conjoin
from conjoin.errors import PlanError, RankError, UsageError
from conjoin.machine import parse_machine
from conjoin.runtime import Loader, launch, run_ranks
from conjoin.runtime.program.other_plans import Key, OtherPlans, check_stored_alike
from conjoin.runtime.program.other_programs import MAX_PROGRAMS
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.runtime.shape_cases import TwoHeads, captured, case_of, numbers, word_loss, words
from tests.runtime.side_by_side import Call, Case, check, module_of, others_of

# Parts of batches.


def test_parts_of_smaller_batches_are_parts_where_batches_came_in_parts() -> None:
    case = case_of("words", 2, "data-parallel")
    wanted = [word_loss(copy.deepcopy(case.model).eval()(ids), target).item() for ids, target in (words(8), words(4))]
    wanted.append(wanted[0])

    def program(ranks: Communicator) -> list[float]:
        step, found = module_of(case, others_of(case), ranks).eval(), []
        for size in (8, 4):
            half = slice(ranks.rank * size // 2, (ranks.rank + 1) * size // 2)
            found.append(step(*(x[half] for x in words(size))).item())
        return [*found, step(*words(8)).item()]  # as large as the plan's batch, and so it

    for found in run_ranks(case.plan.mesh, program):
        assert found == pytest.approx(wanted, rel=1e-9)


def test_a_small_batch_is_no_part_where_batches_came_whole() -> None:
    """Half of the plan's batch is what a rank holds of it; given whole, it is a batch of its own."""
    case = case_of("words without dropout", 2, "data-parallel")
    sizes = (8, 4)
    check(case, [Call(True, words(size, seed=size)) for size in sizes])


@pytest.mark.parametrize("strategy", ["data-parallel", "context:cp=2"])
def test_a_small_batch_is_no_part_where_it_is_the_first(strategy: str) -> None:
    """It is the same on all ranks, so it is not what each of them holds of a larger one."""
    case = case_of("words without dropout", 2, strategy)
    small = tuple(x[:, :4] if strategy.startswith("context") else x[:4] for x in words(8))
    check(case, [Call(True, small), Call(True, words(8)), Call(False, small)])


def test_parts_that_are_alike_to_warm_up_do_not_tell_how_batches_come() -> None:
    """All ranks make up the same zeros; what they bring afterwards are parts of a batch, and none of it is left out."""
    case = case_of("words without dropout", 2, "data-parallel")
    wanted = word_loss(copy.deepcopy(case.model)(words(8)[0]), words(8)[1]).item()

    def program(ranks: Communicator) -> list[float]:
        step, half = module_of(case, others_of(case), ranks), slice(ranks.rank * 4, ranks.rank * 4 + 4)
        for _ in range(2):
            step(*(torch.zeros_like(x[half]) for x in words(8)))
        return [step(*(x[half] for x in words(8))).item() for _ in range(2)]

    for found in run_ranks(case.plan.mesh, program):
        assert found == pytest.approx([wanted, wanted], rel=1e-9)


def sum_loss(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum")


@pytest.mark.parametrize("left", [4, 3])
def test_what_is_left_of_an_epoch_is_whole_where_batches_came_in_parts(left: int) -> None:
    """Also where it is as large as a part: no sample counts twice."""
    model, _, _ = captured("words without dropout")
    graph = conjoin.capture(model, words(8), sum_loss, check=False)
    case = Case(model, sum_loss, make_plan(graph, parse_machine("local:2"), "data-parallel"))
    ids, target = words(8 + left)
    wanted = [sum_loss(model(ids[part]), target[part]).item() for part in (slice(8), slice(8, None))]

    def program(ranks: Communicator) -> list[float]:
        step = module_of(case, others_of(case), ranks)
        return [step(*batch).item() for batch in Loader(TensorDataset(ids, target), step, drop_last=False)]

    for found in run_ranks(case.plan.mesh, program):
        assert found == pytest.approx(wanted, rel=1e-9)


# Limits and refusals.


def test_few_programs_are_held_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conjoin.runtime.program.other_programs.MAX_PROGRAMS", 3)
    assert MAX_PROGRAMS == 16
    case = case_of("words", 1, "single")

    def program(ranks: Communicator) -> list[str]:
        step = module_of(case, others_of(case), ranks)
        for size in (5, 6, 5, 7, 8):
            step(*words(size))
        return [key.call for key in step._others._programs]

    (held,) = run_ranks(case.plan.mesh, program)
    assert held == ["i64[5,6], i64[5,6]", "i64[7,6], i64[7,6]"]


def test_garbage_is_collected_before_and_after_a_shape_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = nn.Linear(4, 4), []
    plan = conjoin.plan(model, torch.ones(8, 4), "local:1", strategy="single")
    step, find = conjoin.load(plan, model, device="cpu"), OtherPlans.find

    def watched(self: OtherPlans, key: Key, dealt: Any) -> Any:
        seen.append(gc.isenabled())
        return find(self, key, dealt)

    monkeypatch.setattr(OtherPlans, "find", watched)
    step(torch.ones(6, 4))
    assert seen == [False] and gc.isenabled()
    gc.disable()
    try:
        step(torch.ones(5, 4))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_without_the_loss_another_shape_is_refused() -> None:
    case = case_of("words", 1, "single")
    step = conjoin.load(case.plan, case.model, device="cpu")
    assert step(*words(8)).requires_grad
    with pytest.raises(UsageError, match=r"training on i64\[5,6\], i64\[5,6\] was asked for.* Pass the loss") as told:
        step(*words(5))
    assert_three_sentences(told.value)
    with pytest.raises(UsageError, match="Pass the loss"):
        step.eval()(*words(8))


def test_a_model_that_cannot_be_copied_is_told_when_it_is_needed() -> None:
    case = case_of("words", 1, "single")
    model = copy.deepcopy(case.model)
    model.handle = (value for value in ())  # a generator
    step = conjoin.load(case.plan, model, loss=word_loss, device="cpu")
    step(*words(8))
    with pytest.raises(UsageError, match="could not be copied without its values: TypeError") as told:
        step(*words(5))
    assert_three_sentences(told.value)


def test_the_model_is_kept_without_its_values() -> None:
    case = case_of("words", 1, "single")
    model = copy.deepcopy(case.model)
    held = weakref.ref(model.head.weight)
    step = conjoin.load(case.plan, model, loss=word_loss, device="cpu")
    assert all(x.is_meta for x in (*step._others.plans.model.parameters(), *step._others.plans.model.buffers()))
    del model
    gc.collect()
    assert held() is None
    assert step(*words(5)).requires_grad


def test_a_plan_is_told_of_where_it_has_to_differ(caplog: pytest.LogCaptureFixture) -> None:
    case = case_of("words", 2, "data-parallel")
    with caplog.at_level(logging.INFO, "conjoin"):
        run_ranks(case.plan.mesh, lambda ranks: module_of(case, others_of(case), ranks)(*words(5)).item())
        run_ranks(case.plan.mesh, lambda ranks: module_of(case, others_of(case), ranks)(*words(1)).item())
    told = [record for record in caplog.records if "planned" in record.message]
    assert [record.levelname for record in told] == ["INFO", "WARNING"]
    assert "are split over fewer devices than in the plan" in told[1].message


def test_plans_are_kept_beside_the_file_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("words without dropout", 1, "single")
    case.plan.save(tmp_path / "plan.json")
    first = conjoin.load(tmp_path / "plan.json", case.model, loss=word_loss, device="cpu")(*words(5))
    (kept,) = (tmp_path / "plan.json.shapes").iterdir()
    conjoin.load_plan(kept)
    monkeypatch.setattr("conjoin.api.capture_graph", None)  # nothing is captured again
    again = conjoin.load(tmp_path / "plan.json", case.model, loss=word_loss, device="cpu")
    assert again(*words(5)).item() == first.item()


def test_a_copy_has_weights_of_its_own_in_every_shape() -> None:
    case = case_of("words without dropout", 1, "single")
    step = conjoin.load(case.plan, case.model, loss=word_loss, device="cpu")
    before = step(*words(5)).item()
    twin = copy.deepcopy(step)
    with torch.no_grad():
        for parameter in step.parameters():
            parameter.mul_(1.5)
    assert twin(*words(5)).item() == before != step(*words(5)).item()


def two_heads(strategy: str) -> Case:
    torch.manual_seed(2)
    model = TwoHeads().double()
    graph = conjoin.capture(model, numbers(8), functional.mse_loss, check=False)
    return Case(model, functional.mse_loss, make_plan(graph, parse_machine("local:2"), strategy))


def _call(rank: int, case: Case, sizes: list[list[int]]) -> list[float]:
    step = conjoin.load(case.plan, case.model, loss=case.loss)
    found = []
    for size in sizes[rank]:
        loss = step(*numbers(size, size))
        loss.backward()
        found.append(loss.item())
    return found


def test_ranks_that_are_processes() -> None:
    case = two_heads("fsdp")
    given = [numbers(size, size) for size in (8, 5, 1, 8)]
    wanted = [functional.mse_loss(case.model(x), y).item() for x, y in given]
    for found in launch(2, _call, case, [[8, 5, 1, 8]] * 2):
        assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([[8, 5], [8, 3]], r"rank 0 to training on f64\[5,4\], f64\[5,2\], rank 1 to training on f64\[3,4\]"),
        ([[8, 5], [8, 8]], "Rank 1 went on without those who wait for it, noticed by rank 0"),
    ],
    ids=["both new", "one new"],
)
def test_ranks_with_different_shapes_are_told(sizes: list[list[int]], said: str) -> None:
    with pytest.raises(RankError, match=said) as told:
        launch(2, _call, two_heads("fsdp"), sizes)
    assert_three_sentences(told.value)


def _save_alone(rank: int, case: Case, call: str, folder: Path) -> None:
    step = conjoin.load(case.plan, case.model, loss=case.loss)
    _ = step(*numbers(8)).backward()
    if rank == 0:
        _ = conjoin.full_state_dict(step) if call == "full_state_dict" else conjoin.save_checkpoint(folder / "a", step)
    _ = step(*numbers(5 if call == "another shape" else 8)).backward()


@pytest.mark.parametrize("call", ["full_state_dict", "save_checkpoint", "another shape"])
def test_what_all_ranks_do_is_not_done_by_one(call: str, tmp_path: Path) -> None:
    """Who notices is up to the clock: a rank that waits, one that hears what the others came to, or both."""
    said = r"went on without those who wait|[Rr]ank 0 (came )?to save_checkpoint, (and )?rank 1 to"
    with pytest.raises(RankError, match=said) as told:
        launch(2, _save_alone, two_heads("fsdp"), call, tmp_path)
    assert_three_sentences(told.value)
    assert not list(tmp_path.iterdir())


def test_a_plan_that_stores_weights_otherwise_cannot_share_them() -> None:
    one, other = (case_of("words", 2, strategy).plan for strategy in ("data-parallel", "fsdp"))
    with pytest.raises(PlanError, match=r"stores words\.weight as") as told:
        check_stored_alike(one, other)
    assert_three_sentences(told.value)


def test_a_precision_holds_for_every_shape() -> None:
    model, loss, _ = captured("words without dropout")
    model = copy.deepcopy(model).float()
    plan = conjoin.plan(model, words(8), "local:1", loss=loss, strategy="single", precision="bf16-mixed")
    step = conjoin.load(plan, model, loss=loss, device="cpu")
    for call in (words(8), words(5)):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = loss(model(call[0]), call[1]).item()
        assert step(*call).item() == pytest.approx(wanted, rel=1e-3)
        assert step.eval()(call[0]).dtype == torch.bfloat16 and step.train()


def test_the_casts_of_an_unnamed_autocast_are_taken_over_or_the_other_mode_is_refused() -> None:
    """Where the model does the same in both modes they are for both; else they would have to be captured."""
    for name in ("words without dropout", "words"):
        model, loss, _ = captured(name)
        model = copy.deepcopy(model).float()
        with torch.autocast("cpu", torch.bfloat16):
            plan = conjoin.plan(model, words(8), "local:1", loss=loss, strategy="single")
        step = conjoin.load(plan, model, loss=loss, device="cpu")
        if name == "words":
            with pytest.raises(UsageError, match="made in an autocast of the caller") as told:
                step.eval()(*words(5))
            assert_three_sentences(told.value)
            continue
        with torch.autocast("cpu", torch.bfloat16):
            plain = loss(model(words(5)[0]), words(5)[1])
        assert torch.equal(step(*words(5)), plain) and torch.equal(step.eval()(*words(5)), plain)


def test_a_model_on_the_meta_device_is_run_in_every_shape_and_saved(tmp_path: Path) -> None:
    case = case_of("words without dropout", 1, "single")
    step = conjoin.load(case.plan, copy.deepcopy(case.model).to("meta"), loss=word_loss, device="cpu", seed=5)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    for size in (8, 5):
        step(*words(size)).backward()
        optimizer.step()
    conjoin.save_checkpoint(tmp_path / "saved", step, optimizer)
    other = conjoin.load(case.plan, case.model, loss=word_loss, device="cpu")
    conjoin.load_checkpoint(tmp_path / "saved", other)
    plain = copy.deepcopy(case.model)
    plain.load_state_dict(conjoin.full_state_dict(step))
    ids, target = words(3)
    wanted = word_loss(plain(ids), target).item()
    assert step(ids, target).item() == pytest.approx(wanted, rel=1e-12)
    assert other.eval()(ids, target).item() == pytest.approx(wanted, rel=1e-12)
