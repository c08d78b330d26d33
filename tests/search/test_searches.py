"""Searches: never worse than the named strategies, right to rounding, and kind when nothing can be found."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import zoo
from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.ir import Graph
from conjoin.machine import Machine, parse_machine
from conjoin.runtime import Case, verify_in_process
from conjoin.search import Remembered, SearchResult, Stopped, Wish, find_plan, make_plan, search_names
from conjoin.search.contest import Contest, Enough
from conjoin.search.entries import make_variant, plan_of
from conjoin.search.exact.units import cuts
from conjoin.search.joint import JointSearch
from conjoin.search.variants import expanded
from conjoin.sim import predict
from tests.search.models import captured
from tests.search.prices import SlowDevices
from tests.search.small import small

MACHINE = "p3.8xlarge"


def search(graph: Graph, machine: str = MACHINE, **wish: object) -> SearchResult:
    asked = Wish(**{"budget": 3600.0, **wish})  # type: ignore[arg-type]
    return find_plan(graph, parse_machine(machine), CostModel(), asked)


@pytest.mark.parametrize("name", search_names())
def test_no_search_is_worse_than_the_named_strategies(name: str) -> None:
    found = search(small(), search=name, steps=40)
    assert found.seconds_per_step <= found.baseline_seconds_per_step and found.ratio >= 1
    predicted = predict(found.plan, parse_machine(MACHINE), CostModel())
    assert predicted.seconds == found.seconds_per_step and predicted.memory.peak == found.peak_bytes


OBJECTIVES = ((0.0, 0.0), (0.8, 1e-6))
MODELS = ("mlp", "bert-base", "dlrm", "rnnlm-2step", "moe-8x7b", "resnet-50")


@pytest.mark.parametrize("name", MODELS)
def test_plans_of_the_exact_core_compute_what_the_model_computes(name: str) -> None:
    model, batch, _ = zoo.build(f"{name}:tiny", batch_size=4)
    graph, machine = captured(name), Machine("four", 2, 2, "cpu")
    contest = Contest(graph, machine, SlowDevices(), "adam", 1 << 40, 60.0)
    variant = make_variant(*expanded(graph))
    joint = JointSearch(contest, [variant])
    names = set()
    for overlap, price in OBJECTIVES if name == "mlp" else OBJECTIVES[len(name) % 2 :][:1]:
        contest.best = None
        outcome = joint.try_out(variant, next(cuts(machine.mesh, 2)), joint.objective(overlap, price))
        assert outcome is not None
        plan = plan_of(outcome, graph, machine)
        names |= {str(leaf.type) for leaf in plan.graph.leaves}
        assert verify_in_process(Case(plan, graph, model, batch), 1).passed
    assert any("{" in text for text in names), "nothing is split: the test would show nothing"


def converged() -> SearchResult:
    return find_plan(small(), parse_machine(MACHINE), CostModel(), Wish(budget=3600.0))


found_before = cache(converged)


def test_the_same_question_has_the_same_answer() -> None:
    one, other = converged(), found_before()
    assert str(one.plan.graph) == str(other.plan.graph) and one.stopped is Stopped.CONVERGED


def test_without_time_the_best_named_strategy_is_returned() -> None:
    found = search(small(), budget=0.0)
    assert found.stopped is Stopped.OUT_OF_TIME and found.baseline == found.plan.strategy


def test_on_one_device_only_the_graph_can_change() -> None:
    found = search(small(), machine="laptop")
    assert found.baseline == "single" and found.plan.mesh.size == 1 and found.stopped is Stopped.CONVERGED
    if found.plan.strategy != "single":
        assert found.plan.substitutions and found.seconds_per_step < found.baseline_seconds_per_step


def test_a_prime_number_of_devices_and_a_batch_that_does_not_divide() -> None:
    machine = Machine("five", 1, 5, "cpu")
    contest = Contest(small(), machine, SlowDevices(), "adam", 1 << 40, 60.0)
    JointSearch(contest, [make_variant(small())]).run()
    assert contest.best is not None and plan_of(contest.best, small(), machine).mesh.size == 5


def test_a_plan_of_the_users_is_a_start() -> None:
    graph, machine, start = small(), parse_machine(MACHINE), search(small(), steps=40).plan
    named = find_plan(graph, machine, CostModel(), Wish(search="named", budget=0.0))
    found = find_plan(graph, machine, CostModel(), Wish(search="named", budget=0.0), start=[start])
    assert found.plan.graph == start.graph and found.seconds_per_step < named.seconds_per_step


def test_what_does_not_fit_is_told_with_what_takes_most() -> None:
    with pytest.raises(StrategyError, match=r"needs .*iB of a device for its tensors, and 1.95 KiB may be used. Most"):
        search(small(), memory=2000, steps=20)


def test_memory_that_is_scarce_is_kept_to() -> None:
    free = search(small(), steps=20)
    tight = search(small(), memory=int(free.peak_bytes * 0.8), steps=20)
    assert tight.peak_bytes <= free.peak_bytes * 0.8 and tight.seconds_per_step >= free.seconds_per_step


def test_ctrl_c_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: JointSearch) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(JointSearch, "run", interrupted)
    assert search(small()).stopped is Stopped.INTERRUPTED


def test_steps_are_counted() -> None:
    assert search(small(), steps=3).stopped is Stopped.OUT_OF_STEPS
    machine = Machine("four", 1, 4, "cpu")
    contest = Contest(small(), machine, SlowDevices(), "adam", 1 << 40, 60.0, steps_left=0)
    with pytest.raises(Enough, match="out of steps"):
        contest.enter_plan(make_plan(small(), contest.machine, "data-parallel"))


@pytest.mark.parametrize(
    ("wish", "message"),
    [({"search": "magic"}, "Known are joint"), ({"optimizer": "magic"}, "Known are sgd")],
)
def test_wishes_that_make_no_sense_are_told(wish: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search(small(), **wish)


def test_what_was_found_is_remembered(tmp_path: Path) -> None:
    graph, machine = small(), parse_machine(MACHINE)
    wish, memory = Wish(budget=3600.0), Remembered(tmp_path)
    assert memory.find(graph, machine, wish, "none") is None
    found = found_before()
    memory.keep(graph, machine, wish, "none", found)
    again = memory.find(graph, machine, Wish(budget=3.0), "none")
    assert again is not None and str(again.plan.graph) == str(found.plan.graph), "converged: the budget does not matter"
    assert again.baseline == found.baseline and again.stopped is Stopped.CONVERGED
    assert memory.find(graph, machine, Wish(optimizer="sgd"), "none") is None
    assert memory.find(graph, machine, wish, "other costs") is None
    assert memory.find(graph, parse_machine("dgx-h100"), wish, "none") is None
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:100])
    assert memory.find(graph, machine, wish, "none") is None, "a damaged file is as good as none"
