"""Constraints: every search keeps to them, the exact core finds the best within them, and what cannot be is told."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest

from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.machine import parse_machine
from conjoin.ops import Copies, Split
from conjoin.runtime import Case, verify_in_process
from conjoin.search import SearchResult, TooSlow, Wish, find_plan, make_plan, search_names
from conjoin.search.constraints import make_constraints
from conjoin.search.entries import make_variant, plan_of
from conjoin.search.exact.layout_codes import code_on
from conjoin.search.exact.problem import Impossible, Problem
from conjoin.search.exact.space import Objective
from conjoin.search.exact.tables import Factor, Table
from conjoin.search.joint import JointSearch
from conjoin.search.papers.walks import walk_from_all
from conjoin.search.tensor_names import find_tensor
from conjoin.sim import take_graph_apart
from tests.ir.wording import assert_three_sentences
from tests.search.exact.exhausting import exhaust
from tests.search.exact.test_problem import random_graph, space_of
from tests.search.models import captured
from tests.search.small import line_of, model, slow_contest, small

FIXED = {"0.weight": "d0:S(1)", "2": "{d1:S(1)}", "input:input": "d0:S(0)"}


def search(machine: str = "p3.8xlarge", **wish: object) -> SearchResult:
    asked = Wish(**{"budget": 30.0, **wish})  # type: ignore[arg-type]
    return find_plan(small(), parse_machine(machine), CostModel(), asked)


def assert_fixed(found: SearchResult) -> None:
    assert "f32[32,16]{d0:S(1)}" in line_of(found.plan, "param:0.weight")
    assert "f32[8,16]{d1:S(1)}" in line_of(found.plan, "= linear(", "param:2")
    assert "f32[8,16]{d0:S(0)}" in line_of(found.plan, "input:input")


@pytest.mark.parametrize("name", [name for name in search_names() if name != "named"])
def test_every_search_keeps_to_fixed_layouts(name: str) -> None:
    assert_fixed(search(search=name, fixed=FIXED, steps=30))


def test_fixed_layouts_are_kept_without_any_time() -> None:
    found = search(fixed=FIXED, budget=0.0)
    assert_fixed(found)
    assert found.baseline == "" and found.ratio == 1, "no named strategy stores the weights so"


@pytest.mark.parametrize("name", search_names())
def test_every_search_leaves_a_forbidden_axis_alone(name: str) -> None:
    if name == "named":
        with pytest.raises(StrategyError, match=r"keeps to d1 unused.*\. Without nothing split over d1, .* a step and"):
            search(search=name, forbidden_axes=("d1",))
        return
    found = search(search=name, forbidden_axes=("d1",), steps=30)
    assert "d1:" not in str(found.plan.graph)


def test_a_forbidden_axis_does_not_keep_others_from_being_used() -> None:
    contest = slow_contest("local:8", forbidden_axes=("d1",))
    JointSearch(contest, [make_variant(small())]).run()
    assert contest.best is not None
    text = str(plan_of(contest.best, small(), contest.machine).graph)
    assert "d0:" in text and "d2:" in text and "d1:" not in text


def test_a_layout_over_one_axis_in_the_middle_is_found() -> None:
    contest = slow_contest("local:8", fixed={"0.weight": "d1:S(0)", "%1": "d2:S(1),d0:S(1)"})
    JointSearch(contest, [make_variant(small())]).run()
    assert contest.best is not None and contest.allows(contest.best.entry)
    plan = plan_of(contest.best, small(), contest.machine)
    assert "f32[32,16]{d1:S(0)}" in line_of(plan, "param:0.weight")
    assert "f32[8,32]{d2:S(1),d0:S(1)}" in line_of(plan, "= relu("), "and nests as it was asked to"


def test_a_plan_to_start_from_that_keeps_to_them_is_taken() -> None:
    mine = search(fixed=FIXED, budget=0.0).plan
    asked, machine = Wish(search="named", budget=0.0, fixed=FIXED), parse_machine("p3.8xlarge")
    assert find_plan(small(), machine, CostModel(), asked, start=[mine]).plan == mine
    other = make_plan(small(), machine, "fsdp")
    with pytest.raises(StrategyError, match=r"Without 0.weight="):
        find_plan(small(), machine, CostModel(), asked, start=[other])


def test_random_changes_keep_to_them() -> None:
    contest = slow_contest(fixed={"2.weight": "d0:S(0)"}, forbidden_axes=("d1",), steps=150)
    tables = JointSearch(contest, [make_variant(small())])
    tried = (tables.try_out(tables.variants[0], units, tables.objective(0.0)) for units in tables.cuts())
    first = next(found for found in tried if found is not None)
    seen = []
    judge = contest.judge
    contest.judge = lambda entry, simulation: (seen.append(entry), judge(entry, simulation))[1]  # type: ignore[method-assign]
    walk_from_all(contest, [first], 0)
    assert len(seen) > 20 and all(map(contest.allows, seen))


def test_a_plan_within_constraints_computes_what_the_model_computes() -> None:
    layers, batch = model()
    found = search(fixed=FIXED, steps=25)
    assert verify_in_process(Case(found.plan, small(), layers, batch), 2).passed


@pytest.mark.parametrize("seed", range(40))
def test_the_core_finds_the_least_within_fixed_storage(seed: int) -> None:
    """Against trying everything, where every other storage is infinitely slow."""
    rng = Random(seed)
    skeleton, _ = take_graph_apart(random_graph(rng, rng.randint(1, 3)))
    space, objective = space_of("local:2", link=10 ** rng.uniform(5, 9)), Objective(update_seconds=1e-8)
    stored = [i for i, root in enumerate(skeleton.roots) if root.leaf and root.leaf.kind.value == "param"]
    fixed = {root: (("d0", Split(rng.randrange(2))),) for root in stored[:1]}
    tried = Problem(skeleton, space, objective, with_dominated=True)
    for root, layout in fixed.items():
        wrong = np.where(tried.storages(root).codes == code_on(layout, 2, space.units), 0.0, np.inf)
        tried.factors.append(Factor((tried.variable[root],), Table(-1, wrong)))
    found = Problem(skeleton, space, objective, fixed=fixed).solve()
    assert found.is_exact and found.total == pytest.approx(exhaust(tried).total, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_the_core_finds_the_least_with_a_fixed_output(seed: int) -> None:
    rng = Random(seed)
    skeleton, _ = take_graph_apart(random_graph(rng, rng.randint(2, 3)))
    space, objective = space_of("local:2", link=10 ** rng.uniform(5, 9)), Objective()
    root = skeleton.operators[rng.randrange(len(skeleton.operators) - 1)].makes[0]
    fixed = {root: (("d0", rng.choice((Split(0), Split(1), Copies()))),)}
    few, every = (Problem(skeleton, space, objective, with_dominated=w, fixed=fixed) for w in (False, True))
    solution = few.solve()
    assert solution.total == pytest.approx(exhaust(every).total, rel=1e-9)
    assert solution.total >= Problem(skeleton, space, objective).solve().total * (1 - 1e-9)
    layouts, _ = few.layouts(solution)
    maker = skeleton.roots[root].maker
    assert layouts.choices[maker].outputs[0] == fixed[root]


def test_an_input_in_a_fixed_layout_is_paid_for() -> None:
    skeleton, _ = take_graph_apart(small())
    space = space_of("local:2")
    number = next(i for i, root in enumerate(skeleton.roots) if root.leaf and root.leaf.name == "input")
    free = Problem(skeleton, space, Objective()).solve().total
    whole, rows, columns = (
        Problem(skeleton, space, Objective(), fixed={number: layout}).solve().total
        for layout in ((), (("d0", Split(0)),), (("d0", Split(1)),))
    )
    assert whole == pytest.approx(free) and min(rows, columns) > free * (1 + 1e-6), "all read it whole"


def test_units_that_cannot_tell_a_layout_are_refused() -> None:
    skeleton, _ = take_graph_apart(small())
    mesh = parse_machine("local:4").mesh
    from conjoin.search.exact.units import make_unit

    space = space_of("local:4", (make_unit(mesh, mesh.names),))
    with pytest.raises(Impossible):
        Problem(skeleton, space, Objective(), fixed={0: (("d0", Split(0)),)})


def test_names_of_tensors() -> None:
    graph = small()
    names = [find_tensor(graph, name) for name in ("0.weight", "param:0.weight", "%0", "0", "input:input", "2", "%2")]
    assert names[0] == names[1] and names[2] == names[3] and names[5] == names[6] and len(set(names)) == 4
    layers = captured("mlp", 8)
    assert find_tensor(layers, "layers.3") == find_tensor(layers, "%6"), "by the module of its line"


@pytest.mark.parametrize(
    ("fixed", "forbidden", "told"),
    [
        ({"0.wieght": "d0:S(0)"}, (), "Did you mean 0.weight?"),
        ({"%99": "d0:S(0)"}, (), "make %0 to %3"),
        ({"0.weight": "d0"}, (), "Write d0:S(0),d1:S(1)"),
        ({"0.weight": "d0:S(x)"}, (), "is not a placement"),
        ({"0.weight": "d0:S(0),d0:S(1)"}, (), "placed twice"),
        ({"0.weight": "d9:S(0)"}, (), "there is no axis d9"),
        ({"0.weight": "d0:S(2)"}, (), "splits dim 2 of 2"),
        ({"0.weight": "d0:B"}, (), "never B or P as on d0"),
        ({"%1": "d0:P"}, (), "along an axis, not P as on d0"),
        ({"0.weight": "d0:S(0)", "param:0.weight": "d1:S(0)"}, (), "Both names mean one tensor"),
        ({"0.weight": "d0:S(0)"}, ("d0",), "nothing may be split over d0"),
        ({}, ("e0",), "The mesh is d0:2 d1:2"),
        ({}, ("d0", "d1"), "all axes of the mesh"),
    ],
)
def test_what_cannot_be_asked_for_is_told(fixed: dict[str, str], forbidden: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_constraints(small(), parse_machine("local:4").mesh, fixed, forbidden)
    assert told in str(caught.value)
    assert_three_sentences(caught.value)


def test_layouts_that_tell_too_many_axes_apart_are_told() -> None:
    fixed = {"0": "n0:S(0)", "%1": "n1:S(0)", "2": "d0:S(0)", "0.weight": "d1:S(0)", "2.weight": "d2:S(0)"}
    contest = slow_contest("dgx-h100:4", fixed=fixed)
    with pytest.raises(UsageError, match="in 5 different ways, and at most 4"):
        JointSearch(contest, [make_variant(small())]).cuts()


def test_the_tightest_constraint_is_named_with_what_lifts_it() -> None:
    free = search(search="named", budget=0.0)
    limit = free.peak_bytes
    with pytest.raises(StrategyError) as caught:
        search(memory=limit, steps=30, fixed={"0.weight": "{}", "2.weight": "{}", "%0": "{}"}, forbidden_axes=("d0",))
    assert "may be used. Without " in str(caught.value) and "Lift that constraint, or allow" in str(caught.value)
    assert "pipelines are looked for only where no layout is fixed" in str(caught.value)
    assert_three_sentences(caught.value)


def test_a_step_that_no_plan_keeps_to_is_told_with_the_fastest() -> None:
    free = search(steps=20)
    assert search(steps=20, at_most=free.seconds_per_step).plan.strategy == free.plan.strategy
    with pytest.raises(TooSlow, match=r"takes .* ms\. That is 2\.00 times as long\. Allow so long") as caught:
        search(steps=20, at_most=free.seconds_per_step / 2)
    assert caught.value.result.seconds_per_step == free.seconds_per_step
    assert_three_sentences(caught.value)


def test_plans_to_start_from_must_be_of_this_model_and_machine() -> None:
    other = make_plan(small(), parse_machine("local:2"), "data-parallel")
    with pytest.raises(UsageError, match=r"A plan for 2 devices \(d0:2\) was given to start from"):
        find_plan(small(), parse_machine("p3.8xlarge"), CostModel(), Wish(budget=0.0), start=[other])
    from tests.search.small import large

    with pytest.raises(UsageError, match="their fingerprints differ"):
        plan = make_plan(large(), parse_machine("p3.8xlarge"), "data-parallel")
        find_plan(small(), parse_machine("p3.8xlarge"), CostModel(), Wish(budget=0.0), start=[plan])


def test_all_pairs_of_fixed_layouts_of_two_weights_can_be_had() -> None:
    """No combination of storages is impossible: a reshard is put where it is used."""
    layouts = ("{}", "d0:S(0)", "d1:S(1)", "d0:S(0),d1:S(0)", "d1:S(0),d0:S(0)")
    for one, other in product(layouts[1:], layouts[:2]):
        contest = slow_contest(fixed={"0.weight": one, "2.weight": other})
        tables = JointSearch(contest, [make_variant(small())])
        assert any(tables.try_out(tables.variants[0], units, tables.objective(0.0)) for units in tables.cuts())
        assert contest.best is not None and contest.allows(contest.best.entry)
