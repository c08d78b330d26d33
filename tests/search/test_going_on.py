"""Searches that end early can go on: from their best plan, without what was tried; and nothing is lost on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conjoin.cost import CostModel
from conjoin.errors import ConjoinError, UsageError
from conjoin.frontends import capture
from conjoin.ir import Pipeline, plan_to_json
from conjoin.machine import parse_machine
from conjoin.search import (
    Notes,
    Remembered,
    SearchResult,
    Stopped,
    TooSlow,
    Wish,
    find_plan,
    is_answer,
    make_pipeline,
    make_plan,
    searches,
)
from conjoin.search.contest import Contest
from conjoin.search.entries import Variant
from conjoin.search.exact.space import Objective
from conjoin.search.exact.units import Units
from conjoin.search.joint import JointSearch
from conjoin.search.notes import notes_from_json
from conjoin.sim import predict_pipeline
from tests.ir.wording import assert_three_sentences
from tests.search.models import captured
from tests.search.small import slow_contest, small

MACHINE = parse_machine("p3.8xlarge")


def search(start: SearchResult | tuple[()] = (), **wish: object) -> SearchResult:
    return find_plan(small(), MACHINE, CostModel(), Wish(**{"budget": inf, **wish}), start=start)  # type: ignore[arg-type]


@cache
def found_in(steps: int) -> SearchResult:
    """What a search of some steps has found, for all tests that begin with it."""
    return search(steps=steps)


def test_a_search_goes_on_and_is_never_worse() -> None:
    first = found_in(14)
    assert first.stopped is Stopped.OUT_OF_STEPS and first.steps == 14
    on = search(first, steps=40)
    assert on.seconds_per_step <= first.seconds_per_step and on.steps <= 40 and on.num_plans > first.num_plans
    assert on.baseline == first.baseline, "what it found before is not what it is compared with"
    assert on.search_seconds > first.search_seconds and on.cpu_seconds > first.cpu_seconds


def test_with_a_single_step_more_nothing_is_lost() -> None:
    first = found_in(40)
    on = search(first, steps=41)
    assert on.stopped is Stopped.OUT_OF_STEPS and on.seconds_per_step == first.seconds_per_step


def test_what_was_tried_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Units, Objective, Variant | None]] = []
    try_all = JointSearch._try_all

    def watched(self: JointSearch, units: Units, objective: Objective, fresh: Variant | None) -> object:
        seen.append((units, objective, fresh))
        return try_all(self, units, objective, fresh)

    monkeypatch.setattr(JointSearch, "_try_all", watched)
    whole = search(search="joint")
    assert whole.stopped is Stopped.CONVERGED and len(seen) > 2 and len(set(seen)) == len(seen)
    tried = len(seen)
    again = search(whole)
    assert len(seen) == tried, "nothing is left to try but random changes"
    assert again.notes.rounds == whole.notes.rounds + 1 and again.seconds_per_step <= whole.seconds_per_step
    assert again.notes.tried.keys() >= whole.notes.tried.keys() and whole.notes is not again.notes


def test_with_steps_alone_going_on_gives_the_same_every_time() -> None:
    runs = []
    for _ in range(2):
        first = search(steps=20, seed=5)
        runs.append(search(first, steps=40, seed=5))
    one, other = runs
    assert str(one.plan.graph) == str(other.plan.graph) and one.num_plans == other.num_plans
    assert one.notes.to_json() == other.notes.to_json()


def test_ctrl_c_in_the_middle_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check, calls = Contest.check, 0

    def interrupted(self: Contest, doing: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        check(self, doing)

    with monkeypatch.context() as patch:
        patch.setattr(Contest, "check", interrupted)
        first = search()
    assert first.stopped is Stopped.INTERRUPTED and len(first.notes.tried) > 0
    on = search(first)
    assert on.stopped is Stopped.CONVERGED and on.notes.tried.keys() >= first.notes.tried.keys()


@pytest.mark.parametrize("name", ["mcmc", "random", "coordinate"])
def test_random_searches_go_on_with_another_seed(name: str) -> None:
    first = search(search=name, steps=25)
    on = search(first, search=name, steps=50)
    assert on.notes.rounds == 2 and on.seconds_per_step <= first.seconds_per_step


def test_a_result_is_kept_and_read_with_all_that_is_needed_to_go_on(tmp_path: Path) -> None:
    memory, wish = Remembered(tmp_path), Wish(budget=inf, steps=20)
    found = found_in(20)
    memory.keep(small(), MACHINE, wish, "none", found)
    read = memory.find(small(), MACHINE, Wish(budget=3.0), "none")
    assert read is not None and read.notes.to_json() == found.notes.to_json() and read.history == ()
    assert replace(read, history=found.history, plan=found.plan) == found
    assert str(search(read, steps=30).plan.graph) == str(search(found, steps=30).plan.graph)


def test_which_questions_a_result_answers() -> None:
    found = found_in(14)
    spent = replace(found, stopped=Stopped.OUT_OF_TIME, search_seconds=10.0, cpu_seconds=8.0, steps=14)
    assert is_answer(spent, Wish(budget=10.0)) and not is_answer(spent, Wish(budget=12.0))
    assert is_answer(spent, Wish(budget=10.9)), "a search keeps a tenth of its time to finish"
    assert not is_answer(spent, Wish(budget=inf))
    assert is_answer(spent, Wish(budget=99.0, cpu_budget=7.0)) and not is_answer(
        spent, Wish(budget=99.0, cpu_budget=9.0)
    )
    assert is_answer(spent, Wish(budget=99.0, steps=14)) and not is_answer(spent, Wish(budget=99.0, steps=15))
    assert is_answer(replace(spent, stopped=Stopped.CONVERGED), Wish(budget=99.0))
    assert not is_answer(replace(spent, stopped=Stopped.CONVERGED), Wish(at_most=found.seconds_per_step / 2))


def test_an_interrupted_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, wish, found = Remembered(tmp_path), Wish(), found_in(14)
    memory.keep(small(), MACHINE, wish, "none", found)
    (path,) = tmp_path.iterdir()
    before = path.read_text()

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            memory.keep(small(), MACHINE, wish, "none", replace(found, num_plans=99))
    assert [path.read_text() for path in tmp_path.iterdir()] == [before]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["notes"].update(rounds="many"),
        lambda data: data["notes"].update(rounds=-1),
        lambda data: data["notes"].update(tried=[1]),
        lambda data: data["notes"]["tried"].update(x="fast"),
        lambda data: data["notes"]["tried"].update({"x" * 1000: 1.0}),
        lambda data: data["notes"].update(more=1),
        lambda data: data.update(certificate={"gap": 1}),
        lambda data: data.update(stopped="NEVER"),
        lambda data: data.update(steps="x"),
        lambda data: data.pop("notes"),
    ],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, damage: object) -> None:
    memory, wish = Remembered(tmp_path), Wish()
    memory.keep(small(), MACHINE, wish, "none", found_in(14))
    (path,) = tmp_path.iterdir()
    assert memory.find(small(), MACHINE, wish, "none") is not None
    data = json.loads(path.read_text())
    damage(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))
    assert memory.find(small(), MACHINE, wish, "none") is None


def test_notes_survive_as_json() -> None:
    notes = Notes({"a": 1.5, "b": inf}, {"c": 2.0, "d": inf}, 3)
    read = notes_from_json(json.loads(json.dumps(notes.to_json())))
    assert read == Notes({"a": 1.5, "b": inf}, {"c": 2.0}, 3) and len(notes) == 7


def test_cpu_seconds_end_a_search_while_there_is_time_on_the_wall() -> None:
    found = search(cpu_budget=0.0)
    assert found.stopped is Stopped.OUT_OF_TIME and found.plan.strategy == found.baseline
    assert found_in(14).cpu_seconds > 0


def test_what_is_left_is_counted_in_what_is_scarcest() -> None:
    contest = slow_contest(budget=1e9, steps=4)
    assert contest.left == pytest.approx(1.0)
    contest.count_step()
    assert contest.left == pytest.approx(0.75)
    contest.cpu_started -= 100.0  # so long that what happens between two lines of this test makes no difference
    contest.cpu_budget = contest.cpu_elapsed * 4
    assert contest.left == pytest.approx(0.75, abs=0.05)
    contest.cpu_budget = contest.cpu_elapsed * 2
    assert 0.3 < contest.left <= 0.5
    contest.budget = 0.0
    assert contest.left == 0.0 and contest.time_left < 0


NONSENSE = (
    {"budget": -1.0}, {"budget": "60"}, {"steps": -1}, {"cpu_budget": float("nan")}, {"at_most": -0.5},
    {"at_most": 0.0}, {"memory": 0}, {"memory": float("nan")}, {"memory": "40GiB"}, {"fixed": None},
)  # fmt: skip


@pytest.mark.parametrize("wish", NONSENSE, ids=str)
def test_limits_that_make_no_sense_are_told(wish: dict[str, object]) -> None:
    with pytest.raises(ConjoinError, match=r"(is|not) a number (from|above) 0|They are a mapping"):
        search(**wish)


def test_the_baseline_stays_the_best_that_was_ever_judged() -> None:
    """A search that goes on may have no steps left to judge all named strategies again."""
    first = found_in(40)
    for steps in (40, 45):
        on = search(first, steps=steps)
        assert (on.baseline, on.ratio) == (first.baseline, pytest.approx(first.ratio)), steps


def test_what_is_too_slow_has_spent_what_both_searches_spent() -> None:
    found: SearchResult | tuple[()] = ()
    for _ in range(2):
        with pytest.raises(TooSlow) as told:
            search(found, steps=30, at_most=1e-9)
        found = told.value.result
        assert found.steps == 30


def test_a_part_of_a_search_that_was_cut_short_is_not_the_end() -> None:
    """Its share of the steps was over, others needed less than theirs: more steps may find more."""
    single = parse_machine("dgx-h100:1x1")
    few = find_plan(captured("mlp"), single, CostModel(), Wish(budget=inf, steps=10))
    many = find_plan(captured("mlp"), single, CostModel(), Wish(budget=inf, steps=1000))
    assert few.steps < 10 and few.stopped is Stopped.OUT_OF_STEPS and many.stopped is Stopped.CONVERGED


def test_ctrl_c_after_the_search_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(searches, "certify", interrupted)
    assert search(steps=14).certificate is None


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), torch.full((16,), scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_a_plan_with_other_constants_is_neither_remembered_nor_a_start(tmp_path: Path) -> None:
    one, five = (capture(Scaled(k), (torch.ones(8, 16),), lambda y: y.square().mean()) for k in (1.0, 5.0))
    memory, wish = Remembered(tmp_path), Wish(budget=inf, steps=14)
    found = find_plan(one, MACHINE, CostModel(), wish)
    memory.keep(one, MACHINE, wish, "", found)
    assert memory.find(one, MACHINE, wish, "") is not None and memory.find(five, MACHINE, wish, "") is None
    with pytest.raises(UsageError, match="holds other values of the constant scale"):
        find_plan(five, MACHINE, CostModel(), wish, start=[found.plan])


def test_a_start_that_wins_is_told_as_on_this_machine() -> None:
    other = find_plan(small(), parse_machine("dgx-h100:1x4"), CostModel(), Wish(budget=inf, steps=40)).plan
    found = find_plan(small(), MACHINE, CostModel(), Wish(budget=0.0, search="named"), start=[other])
    assert found.plan.graph == other.graph and found.plan.machine.name == MACHINE.name
    assert dict(found.plan.predictions)["seconds_per_step"] == found.seconds_per_step


def test_a_pipeline_to_start_from_is_no_faster_than_the_result() -> None:
    pipeline = make_pipeline(small(), MACHINE, "pipeline:pp=2,micro=2", CostModel())
    alone = predict_pipeline(pipeline, MACHINE, CostModel()).seconds
    wish = Wish(budget=inf, steps=2, search="named")
    found = find_plan(small(), MACHINE, CostModel(), wish, start=[pipeline])
    assert found.seconds_per_step <= alone
    kept = find_plan(small(), MACHINE, CostModel(), replace(wish, search="joint", stages=2, steps=0), start=[pipeline])
    assert kept.seconds_per_step <= alone and isinstance(kept.plan, Pipeline)
    for other in ({"stages": 3, "search": "joint"}, {"forbidden_axes": ("d0",)}):
        with pytest.raises(UsageError) as error:
            find_plan(small(), MACHINE, CostModel(), replace(wish, **other), start=[pipeline])
        assert_three_sentences(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"seconds_per_step": -1.0}, {"seconds_per_step": float("nan")}, {"steps": True}, {"search_seconds": "1"},
        {"certificate": {"units": "2", "hidden": 0, "seconds": float("inf"), "least": 1, "is_exact": 1, "memory": 0}},
        {"certificate": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_remembered_file_with_wrong_values_is_as_good_as_none(tmp_path: Path, change: dict[str, object]) -> None:
    memory, wish = Remembered(tmp_path), Wish(budget=inf, steps=14)
    memory.keep(small(), MACHINE, wish, "", found_in(14))
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert memory.find(small(), MACHINE, wish, "") is None


def test_a_remembered_plan_of_another_model_is_none(tmp_path: Path) -> None:
    memory, wish = Remembered(tmp_path), Wish(budget=inf, steps=14)
    memory.keep(small(), MACHINE, wish, "", found_in(14))
    (path,) = tmp_path.iterdir()
    other = make_plan(captured("mlp"), MACHINE, "data-parallel")
    path.write_text(json.dumps({**json.loads(path.read_text()), "plan": plan_to_json(other)}))
    assert memory.find(small(), MACHINE, wish, "") is None


def test_what_cannot_be_remembered_is_told_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    Remembered(tmp_path / "file" / "plans").keep(small(), MACHINE, Wish(), "", found_in(14))
    assert "not remembered" in caplog.text
