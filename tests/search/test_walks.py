"""The papers' searches: each runs, ends when told, gives the same for a seed, and none is worse than its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from random import Random

import numpy as np
import pytest
import torch
from torch import nn

from conjoin.cost import CostModel, Seconds
from conjoin.errors import StrategyError, UsageError
from conjoin.frontends import capture
from conjoin.machine import Machine, parse_machine
from conjoin.ops import Partial, Split
from conjoin.rules import Library
from conjoin.search import SearchResult, Stopped, Wish, find_plan, make_plan
from conjoin.search.contest import Contest, Enough
from conjoin.search.entries import make_variant, plan_of
from conjoin.search.exact.branch_and_bound import TooMany, branch_and_bound
from conjoin.search.exact.elimination import solve
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.settled_choices import settle
from conjoin.search.exact.tables import Factor, Tables
from conjoin.search.exact.units import cuts
from conjoin.search.joint import JointSearch
from conjoin.search.papers.descents import Descent
from conjoin.search.papers.hierarchy import (
    MIN_PART,
    cut_positions,
    fastest_on_one,
    first_rewrite_then_walk,
    search_in_levels,
)
from conjoin.search.papers.walks import propose, sample, walk_from_all
from conjoin.search.rewrites import ways_of
from conjoin.search.variants import expanded
from conjoin.sim import Layouts
from tests.cases import each_of
from tests.search.exact.test_elimination import random_problem
from tests.search.models import captured
from tests.search.prices import SlowDevices

PAPERS = ("unity", "sequential", "taso-then-flexflow", "mcmc", "coordinate", "exhaustive", "random")


def search(model: str, machine: str = "p3.8xlarge", **wish: object) -> SearchResult:
    asked = Wish(**{"budget": 3600.0, "steps": 60, **wish})  # type: ignore[arg-type]
    return find_plan(captured(model), parse_machine(machine), CostModel(), asked)


def slow_contest(model: str, machine: Machine | None = None, steps: int | None = None) -> Contest:
    machine = machine or Machine("four", 2, 2, "cpu")
    return Contest(captured(model), machine, SlowDevices(), "adam", 1 << 40, 120.0, steps_left=steps)


@pytest.mark.parametrize("name", PAPERS)
def test_never_worse_and_the_same_for_a_seed(name: str) -> None:
    one, other = (search("dlrm", search=name, seed=3, steps=8) for _ in range(2))
    assert one.seconds_per_step <= one.baseline_seconds_per_step
    assert str(one.plan.graph) == str(other.plan.graph) and one.num_plans == other.num_plans
    assert one.num_plans <= 8


@pytest.mark.parametrize("name", ["mcmc", "taso-then-flexflow", "random"])
def test_steps_and_time_end_a_walk(name: str) -> None:
    assert search("mlp", search=name, steps=20).stopped is Stopped.OUT_OF_STEPS
    assert search("mlp", search=name, budget=0.0, steps=None).stopped is Stopped.OUT_OF_TIME


@pytest.mark.parametrize("name", PAPERS)
def test_on_one_device_there_is_nothing_to_search(name: str) -> None:
    assert search("mlp", "laptop", search=name).stopped is Stopped.CONVERGED


def test_other_seeds_walk_elsewhere() -> None:
    seen = set()
    for seed in range(3):
        contest = slow_contest("mlp", steps=40)
        start = contest.enter_plan(make_plan(contest.captured, contest.machine, "data-parallel"))
        with pytest.raises(Enough, match="out of steps"):
            walk_from_all(contest, [start], seed)
        seen.add(tuple(improvement.seconds for improvement in contest.history))
    assert len(seen) == 3


def test_a_walk_finds_better_plans_and_they_can_be_made() -> None:
    contest = slow_contest("mlp", steps=150)
    start = contest.enter_plan(make_plan(contest.captured, contest.machine, "data-parallel"))
    with pytest.raises(Enough, match="out of steps"):
        walk_from_all(contest, [start], 0)
    assert contest.best is not None and contest.best.seconds < start.seconds
    entry, plan = contest.best.entry, plan_of(contest.best, contest.captured, contest.machine)
    assert plan.mesh.size == 4 and contest.simulate(entry).seconds == contest.best.seconds


@pytest.mark.parametrize("devices", [4, 6])
def test_walks_time_plans_as_full_simulation_does(devices: int) -> None:
    """Also where a change makes devices differ that were simulated as one: 4 samples on 3 pairs of devices."""
    contest = slow_contest("mlp", Machine("some", 1, devices, "cpu"), steps=80)
    seen: list[tuple[Layouts, float]] = []
    judge = contest.judge

    def noting(entry, simulation):  # type: ignore[no-untyped-def]
        seen.append((entry.layouts, simulation.seconds))
        assert simulation.seconds == contest.simulate(entry).seconds
        return judge(entry, simulation)

    contest.judge = noting  # type: ignore[method-assign]
    start = contest.enter_plan(make_plan(contest.captured, contest.machine, "megatron:tp=2"))
    with pytest.raises(Enough, match="out of steps"):
        walk_from_all(contest, [start], 1)
    assert len(seen) > 50 and len({seconds for _, seconds in seen}) > 12


def test_nothing_is_stored_as_partial_sums() -> None:
    contest, rng = slow_contest("lenet"), Random(0)
    outcome = contest.enter_plan(make_plan(contest.captured, contest.machine, "data-parallel"))
    program = outcome.simulation.program
    found = [change for _ in range(400) if (change := propose(program, rng)) is not None]
    stored = [p for change in found for layout in change.leaves.values() for _, p in layout]
    assert stored and Partial() not in stored


def test_random_choices_are_legal_plans() -> None:
    contest = slow_contest("lenet", steps=12)
    with pytest.raises(Enough, match="out of steps"):
        sample(contest, [make_variant(contest.captured)], 5)
    assert contest.best is not None
    assert plan_of(contest.best, contest.captured, contest.machine).strategy == "random choices"


@each_of([(seed, width) for seed in range(60) for width in (1, 2, 3)])
def test_branch_and_bound_finds_the_least_sum(case: tuple[int, int]) -> None:
    seed, width = case
    sizes, factors, tables = random_problem(seed)
    found = branch_and_bound(sizes, factors, width=width)
    assert found.total == pytest.approx(solve(sizes, factors, tables).total, abs=1e-12)
    told = sum(float(f.table.values[tuple(found.values[v] for v in f.variables)]) for f in factors)
    assert told == pytest.approx(found.total, abs=1e-12)


def test_branch_and_bound_gives_up_where_bounds_tell_nothing() -> None:
    tables, rng = Tables(), np.random.default_rng(0)
    pairs = [(a, b) for a in range(9) for b in range(a)]
    factors = [Factor(pair, tables.named(pair, rng.random((5, 5)))) for pair in pairs]
    with pytest.raises(TooMany):
        branch_and_bound([5] * 9, factors, width=1, max_visited=50)
    assert branch_and_bound([5] * 9, factors, width=1).total == pytest.approx(solve([5] * 9, factors, tables).total)


@pytest.mark.parametrize("model", ["lenet", "rnnlm-2step"])
@pytest.mark.parametrize("overlap", [0.0, 0.8])
def test_the_exact_core_is_as_good_as_trying_everything(model: str, overlap: float) -> None:
    """On 4 devices, as in the thesis (section 3.7.5); dominated choices are tried too."""
    contest = slow_contest(model)
    tables = JointSearch(contest, ())
    space, objective = tables.space(next(cuts(contest.machine.mesh, 2))), tables.objective(overlap)
    skeleton = make_variant(contest.captured).skeleton
    exact = Problem(skeleton, space, objective).solve()
    everything = Problem(skeleton, space, objective, with_dominated=True)
    tried = branch_and_bound(everything.sizes, everything.factors)
    assert exact.is_exact and exact.total == pytest.approx(tried.total, rel=1e-9)


def test_too_many_axes_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"has 4 axes, and that is done for at most 3\. Use the joint search"):
        search("mlp", "piz-daint:16", search="exhaustive")


def test_descending_layer_by_layer_never_goes_up_and_cannot_beat_the_exact_core() -> None:
    contest = slow_contest("mlp")
    tables, rng = JointSearch(contest, ()), Random(0)
    space = tables.space(next(cuts(contest.machine.mesh, 2)))
    problem = Problem(make_variant(contest.captured).skeleton, space, tables.objective(0.5))
    start = settle(problem, [rng.randrange(size) for size in problem.sizes[: problem.num_operators]])
    descent, least = Descent(problem, list(start.values)), problem.solve().total
    assert descent.total == pytest.approx(start.total)
    assert sorted(v for layer in descent.layers for v in layer) == list(range(len(problem.sizes)))
    before = descent.total
    for layer in descent.layers:
        descent.improve(layer)
        assert least * (1 - 1e-9) <= descent.total <= before * (1 + 1e-9)
        before = descent.total
    assert descent.total < start.total


def test_graphs_are_cut_where_all_paths_meet() -> None:
    chain, branches = (make_variant(captured(name)).skeleton for name in ("mlp", "bert-base"))
    for skeleton in chain, branches:
        positions = cut_positions(skeleton)
        assert positions and all(b - a >= MIN_PART for a, b in pairwise([-1, *positions]))
        for position in positions:
            made = {root for op in skeleton.operators[:position] for root in op.makes}
            assert made.isdisjoint(root for op in skeleton.operators[position + 1 :] for root in op.reads)


@pytest.mark.parametrize("model", ["mlp", "bert-base"])
def test_unity_stores_parameters_as_they_are_used(model: str) -> None:
    contest = slow_contest(model)
    variant = make_variant(contest.captured)
    search_in_levels(contest, [variant], ())
    assert contest.best is not None
    layouts, skeleton = contest.best.entry.layouts, variant.skeleton
    for number, root in enumerate(skeleton.roots):
        if root.leaf is not None and root.leaf.trainable:
            place, operand = skeleton.readers[number][0]
            used = layouts.choices[place].operands[operand]
            kept = {entry for entry in used if isinstance(entry[1], Split)}
            assert set(layouts.leaves[number]) == kept
    plan_of(contest.best, contest.captured, contest.machine)


def test_the_variant_that_is_fastest_on_one_device_is_taken_first() -> None:
    contest = slow_contest("lenet", steps=30)
    plain, other = make_variant(contest.captured), make_variant(*expanded(contest.captured))
    fast, slow = sorted((plain, other), key=lambda variant: contest.seconds_alone(variant))
    with pytest.raises(Enough, match="out of steps"):
        first_rewrite_then_walk(contest, [slow, fast], (), 0)
    assert contest.seconds_alone(fast) < contest.seconds_alone(slow)
    assert contest.best is not None and contest.best.entry.variant.graph is not slow.graph


def test_tasos_search_goes_over_substitutions() -> None:
    """By these prices a product with a transposed matrix takes less than a linear operator."""
    contest = slow_contest("mlp")
    variant = make_variant(contest.captured)
    found = fastest_on_one(contest, [variant], ways_of(Library.shipped()))
    assert contest.seconds_alone(found) < contest.seconds_alone(variant)
    assert found.substitutions


def test_a_model_in_which_nothing_takes_time_is_planned() -> None:
    graph = capture(nn.Identity(), (torch.ones(8, 4),))
    for name in ("joint", "mcmc"):
        found = find_plan(graph, parse_machine("p3.8xlarge"), CostModel(), Wish(name, budget=inf, steps=40))
        assert found.ratio == 1.0


def test_a_batch_without_samples_is_refused() -> None:
    graph = capture(nn.Linear(4, 4), (torch.ones(0, 4),), lambda y: y.sum())
    with pytest.raises(UsageError, match=r"shape \[0, 4\]. It has 0 elements"):
        find_plan(graph, parse_machine("p3.8xlarge"), CostModel(), Wish(budget=0.0))


def test_an_input_without_features_beside_others_is_none_of_the_batch() -> None:
    graph = capture(nn.Linear(4, 4), (torch.ones(8, 4), torch.ones(8, 0)), lambda y, more: y.sum() + more.sum())
    assert find_plan(graph, parse_machine("p3.8xlarge"), CostModel(), Wish(budget=0.0)).ratio >= 1.0


@dataclass
class OddLinks(SlowDevices):
    """Links on which each collective over each set of axes is faster or slower than it should be: a detour may pay."""

    seed: int = 0
    factors: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def collective(self, kind: str, axes: tuple[str, ...], sent: int) -> Seconds:
        factor = self.factors.setdefault((kind, axes), Random(f"{self.seed} {kind} {axes}").uniform(0.3, 3.0))
        found = super().collective(kind, axes, sent)
        return Seconds(factor * found.value, found.source)


@pytest.mark.parametrize("seed", range(6))
def test_leaving_out_dominated_choices_loses_nothing_whatever_links_cost(seed: int) -> None:
    contest = slow_contest("bert-base")
    contest.prices = OddLinks(10 ** Random(seed).uniform(6, 9), 10 ** Random(seed).uniform(-8, -3), seed=seed)
    tables = JointSearch(contest, ())
    units = next(iter(tables.cuts()))
    skeleton, space = make_variant(contest.captured, ()).skeleton, tables.space(units)
    for overlap in (0.0, 0.6):
        objective = tables.objective(overlap)
        pruned, whole = (Problem(skeleton, space, objective, with_dominated=d).solve() for d in (False, True))
        assert pruned.is_exact and whole.is_exact and pruned.total == pytest.approx(whole.total, rel=1e-12)
