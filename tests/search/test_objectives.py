"""The cheapest plan takes fewer devices where that pays, and bounds say how far a plan can be from the least sum."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest

from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.machine import parse_machine
from conjoin.runtime import Case, verify_in_process
from conjoin.search import SearchResult, Stopped, TooSlow, Wish, find_plan
from conjoin.search.certificate import Certificate, certify
from conjoin.search.entries import make_variant
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.space import Objective
from conjoin.search.exact.units import cuts
from conjoin.search.joint import JointSearch
from conjoin.search.named_plans import make_plan
from conjoin.sim import predict, take_graph_apart
from tests.search.exact.test_problem import random_graph, space_of
from tests.search.small import large, model, slow_contest, small


def search(graph: object = None, machine: str = "dgx-h100", **wish: object) -> SearchResult:
    asked = Wish(**{"budget": 60.0, "steps": 60, "optimizer": "sgd", **wish})  # type: ignore[arg-type]
    return find_plan(graph or large(), parse_machine(machine), CostModel(), asked)  # type: ignore[arg-type]


@cache
def fastest() -> SearchResult:
    return search()


@cache
def cheapest() -> SearchResult:
    return search(objective="cost")


def test_the_cheapest_plan_takes_fewer_devices() -> None:
    assert fastest().num_devices == 8 and cheapest().num_devices == 1
    assert cheapest().seconds_per_step > fastest().seconds_per_step
    assert cheapest().seconds_per_step < 8 * fastest().seconds_per_step
    assert cheapest().ratio >= 1 and cheapest().baseline_devices >= 1


def test_a_limit_of_time_asks_for_more_devices_again() -> None:
    limit = (cheapest().seconds_per_step + fastest().seconds_per_step) / 2
    found = search(objective="cost", at_most=limit)
    assert found.seconds_per_step <= limit and 1 < found.num_devices <= 8
    assert found.seconds_per_step * found.num_devices <= 8 * fastest().seconds_per_step * (1 + 1e-9)
    part = parse_machine(found.plan.machine.name) if found.num_devices < 8 else parse_machine("dgx-h100")
    assert part.mesh == found.plan.mesh, "the plan names the machine it is for"
    assert predict(found.plan, part, CostModel(), "sgd").seconds == found.seconds_per_step


def test_a_limit_of_memory_asks_for_more_devices_too() -> None:
    need = cheapest().peak_bytes
    found = search(objective="cost", memory=int(need * 0.6))
    assert found.num_devices > 1 and found.peak_bytes <= need * 0.6


def test_nothing_quick_enough_is_told_with_the_fastest() -> None:
    with pytest.raises(TooSlow, match=r"on dgx-h100 or a part of it was to take .* The fastest plan found .* on 8 dev"):
        search(objective="cost", at_most=fastest().seconds_per_step / 3, steps=40)
    with pytest.raises(StrategyError, match="may be used"):
        search(objective="cost", memory=1000, steps=20)


def test_ctrl_c_keeps_the_cheapest_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: JointSearch) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(JointSearch, "run", interrupted)
    found = search(small(), "p3.8xlarge", objective="cost", steps=None)
    assert found.stopped is Stopped.INTERRUPTED and found.num_devices == 1 and found.plan.strategy == "single"


def test_a_plan_to_start_from_must_be_for_some_part() -> None:
    plans = [make_plan(small(), parse_machine(name), "data-parallel") for name in ("local:2", "local:8")]
    wish = Wish(objective="cost", budget=0.0, search="named")
    found = find_plan(small(), parse_machine("p3.8xlarge"), CostModel(), wish, start=plans[:1])
    assert found.objective == "cost"
    with pytest.raises(UsageError, match="nor a part of it"):
        find_plan(small(), parse_machine("p3.8xlarge"), CostModel(), wish, start=plans)


def test_axes_that_are_named_must_be_there() -> None:
    found = search(small(), "p3.8xlarge", objective="cost", fixed={"0.weight": "d1:S(0)"}, steps=40)
    assert found.num_devices == 4, "only the whole machine has an axis d1"
    with pytest.raises(UsageError, match=r"The objective 'money' was asked for. Known are time, cost"):
        search(objective="money")


def test_a_plan_for_a_part_computes_what_the_model_computes() -> None:
    layers, batch = model()
    found = search(small(), "p3.8xlarge:1x2", objective="cost", forbidden_axes=(), steps=20)
    assert found.num_devices == 1 and verify_in_process(Case(found.plan, small(), layers, batch), 2).passed


def test_a_search_for_the_cheapest_goes_on() -> None:
    wish = Wish(objective="cost", budget=60.0, steps=30, optimizer="sgd")
    first = find_plan(large(), parse_machine("dgx-h100"), CostModel(), wish)
    on = find_plan(large(), parse_machine("dgx-h100"), CostModel(), replace(wish, steps=60), start=first)
    assert on.seconds_per_step * on.num_devices <= first.seconds_per_step * first.num_devices
    assert on.objective == "cost" and on.steps > first.steps


# Bounds


def test_what_the_core_finds_is_certified_as_the_least() -> None:
    contest = slow_contest("local:4")
    variant = make_variant(small())
    tables = JointSearch(contest, [variant])
    units = next(cuts(contest.mesh, 2))
    found = tables.try_out(variant, units, tables.objective(0.3))
    assert found is not None
    bound = certify(contest, found)
    assert bound is not None and bound.is_exact and bound.gap == pytest.approx(0, abs=1e-9) and bound.hidden == 0.3
    assert "within 0.0% of the least on units of" in str(bound)


def test_a_named_strategy_is_certified_with_how_far_it_is() -> None:
    contest = slow_contest("local:4")
    gaps = {}
    for name in ("data-parallel", "megatron:tp=4", "fsdp"):
        bound = certify(contest, contest.enter_plan(make_plan(small(), contest.machine, name)))
        assert bound is not None and bound.least <= bound.seconds * (1 + 1e-9)
        gaps[name] = bound.gap
    assert max(gaps.values()) > 0.01 and min(gaps.values()) >= 0


def test_without_time_nothing_is_worked_out() -> None:
    contest = slow_contest("local:4", budget=0.0)
    assert certify(contest, contest.enter_plan(make_plan(small(), contest.machine, "fsdp"))) is None


def test_without_time_tables_on_finer_units_will_do() -> None:
    """The plan treats both axes alike, and no tables are there of both together."""
    contest = slow_contest("local:4")
    outcome = contest.enter_plan(make_plan(small(), contest.machine, "data-parallel"))
    JointSearch(contest, ()).space(next(cuts(contest.mesh, 2)))
    contest.budget = 0.0
    bound = certify(contest, outcome)
    assert bound is not None and bound.units == "2×2"


def test_a_result_carries_its_bound() -> None:
    found = search(small(), "p3.8xlarge")
    assert isinstance(found.certificate, Certificate) and found.certificate.least > 0
    assert found.stopped in (Stopped.OUT_OF_STEPS, Stopped.CONVERGED)


@pytest.mark.parametrize("seed", range(30))
def test_the_dual_bounds_every_plan_that_needs_no_more_memory(seed: int) -> None:
    """Against all combinations of choices, storages and hubs of a small graph, each with its seconds and bytes."""
    rng = Random(seed)
    skeleton, _ = take_graph_apart(random_graph(rng, rng.randint(1, 2)))
    space, price = space_of("local:2", link=10 ** rng.uniform(5, 9)), 10 ** rng.uniform(-10, -6)
    cheap, dear = (Objective(0.0, p, update_seconds=1e-8) for p in (price, 2 * price))
    once, twice = (Problem(skeleton, space, objective, with_dominated=True) for objective in (cheap, dear))
    least = Problem(skeleton, space, cheap).solve().total
    plans = []
    for values in product(*map(range, once.sizes)):
        sums = [
            sum(float(f.table.values[tuple(values[v] for v in f.variables)]) for f in problem.factors)
            for problem in (once, twice)
        ]
        plans.append((2 * sums[0] - sums[1], (sums[1] - sums[0]) / price))
        if len(plans) > 3000:
            break
    for limit in sorted(size for _, size in plans)[:: max(1, len(plans) // 7)]:
        fastest_within = min(seconds for seconds, size in plans if size <= limit * (1 + 1e-12))
        assert least - price * limit <= fastest_within + 1e-12


def test_memory_that_is_scarce_is_in_the_bound() -> None:
    contest = slow_contest("local:4")
    variant = make_variant(small())
    tables = JointSearch(contest, [variant])
    found = tables.try_out(variant, next(cuts(contest.mesh, 2)), tables.objective(0.0, 1e-6))
    assert found is not None and found.peak_bytes is not None
    contest.capacity = found.peak_bytes
    bound = certify(contest, found)
    assert bound is not None and bound.memory is not None and bound.memory >= contest.capacity
    assert 0 <= bound.gap < 0.5 and "GiB" in str(bound)


def test_a_plan_for_a_part_is_judged_however_little_time_there_is() -> None:
    limit = {"optimizer": "sgd", "at_most": 0.5 * (fastest().seconds_per_step + cheapest().seconds_per_step)}
    first = search(objective="cost", **limit)
    assert first.num_devices not in (1, 8), "else another part would have been judged before it"
    wish = Wish(budget=0.0, objective="cost", **limit)  # type: ignore[arg-type]
    again = find_plan(large(), parse_machine("dgx-h100"), CostModel(), wish, start=[first.plan])
    cost = again.seconds_per_step * again.num_devices
    assert cost <= first.seconds_per_step * first.num_devices


def test_where_no_strategy_is_quick_enough_the_quickest_parts_are_searched() -> None:
    named, found = (search(machine="dgx-h100:2x8", steps=90, search=s) for s in ("named", "joint"))
    assert found.seconds_per_step < 0.9 * named.seconds_per_step
    limit = 0.5 * (found.seconds_per_step + named.seconds_per_step)
    cheap = search(machine="dgx-h100:2x8", steps=300, objective="cost", at_most=limit)
    assert cheap.seconds_per_step <= limit


def test_parts_that_cannot_keep_to_the_wish_are_left_out() -> None:
    whole = search(small(), "dgx-h100", steps=60, forbidden_axes=("d0",))
    cheap = search(small(), "dgx-h100", steps=60, objective="cost", forbidden_axes=("d0",))
    assert cheap.seconds_per_step * cheap.num_devices <= whole.seconds_per_step * whole.num_devices
    with pytest.raises(UsageError, match="These are all axes"):
        search(small(), "dgx-h100", objective="cost", forbidden_axes=("d0", "d1", "d2"))
