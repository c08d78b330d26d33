"""Plans that do not fit: which are kept beside others, what can be made to fit, and by which steps others are found."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from random import Random

import numpy as np
import pytest

from conjoin.cost import CostModel
from conjoin.machine import parse_machine
from conjoin.ops import At
from conjoin.search import Wish, make_plan
from conjoin.search.baselines import baselines
from conjoin.search.entries import Entry, Heavy, add_to_front, plan_of
from conjoin.search.exact.neighbours import Following
from conjoin.search.exact.space import LEAST_PRICE
from conjoin.search.input_relief import inputs_in_pieces
from conjoin.search.joint import JointSearch
from conjoin.search.memory_front import relieve_front
from conjoin.search.relief import relieve
from conjoin.search.searches import open_contest
from conjoin.search.variants import as_variant, make_variant
from conjoin.sim import MachinePrices, Offloads, kept_tensors, new_drafts, simulate_layouts
from conjoin.sim.memory import measure_peak
from conjoin.sim.relieved import relieved
from tests.search.everything import drawn
from tests.search.small import large
from tests.search.test_short_steps import MACHINE, NAMES, stack


def heavy(seconds: float, num_bytes: int, can_fit: bool) -> Heavy:
    return Heavy(None, seconds, num_bytes, lambda _: can_fit)  # type: ignore[arg-type]


def test_what_can_be_made_to_fit_stays_beside_what_is_faster_and_smaller_but_cannot() -> None:
    hopeless, hopeful = heavy(1.0, 10, False), heavy(2.0, 20, True)
    assert add_to_front([hopeless], hopeful) == [hopeless, hopeful]
    assert add_to_front([hopeful], hopeless) == [hopeless, hopeful]
    assert add_to_front([heavy(1.0, 10, True)], hopeful) != [hopeful]
    assert add_to_front([hopeful], better := heavy(1.0, 10, True)) == [better]


@pytest.mark.parametrize("seed", range(20))
def test_a_front_is_what_nothing_beats_in_whatever_order_it_comes(seed: int) -> None:
    rng = Random(seed)
    every = [heavy(rng.randrange(6), rng.randrange(6), rng.random() < 0.3) for _ in range(30)]
    told = [(point.seconds, point.peak_bytes, point.can_fit) for point in every]
    wanted = {
        one
        for one in told
        if not any(a <= one[0] and b <= one[1] and fits >= one[2] and (a, b, fits) != one for a, b, fits in told)
    }
    front: list[Heavy] = []
    for point in every:
        front = add_to_front(front, point)
    assert {(p.seconds, p.peak_bytes, p.can_fit) for p in front} == wanted
    assert front == sorted(front, key=lambda point: point.seconds)
    assert len(front) == len(wanted), "of equal ones the first is kept"


@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_is_what_a_step_holds_with_all_of_that_on_the_host(seed: int) -> None:
    """Also where few of many equal blocks tell of it, against steps that are laid out so and followed in full."""
    graph, told = stack(seed), 0
    prices = MachinePrices.of(graph, MACHINE, CostModel())
    known = dict(baselines(graph, MACHINE, lambda name: name not in NAMES))
    for entry in filter(None, map(known.get, NAMES)):
        skeleton, layouts = entry.variant.skeleton, entry.layouts
        drafts = new_drafts(skeleton, layouts, MACHINE.mesh, prices)
        found = simulate_layouts(skeleton, layouts, drafts, entry.regathered)
        tensors = tuple(sorted(tensor.made for tensor in kept_tensors(found.make(), "cuda")))
        states = frozenset(leaf.name for leaf in graph.leaves if leaf.is_trained)
        away = Offloads(tensors, states)
        least = simulate_layouts(skeleton, layouts, drafts, entry.regathered, (), 1, away).peak_bytes("adam", "cuda")
        assert found.relieved_bytes("adam", "cuda") == least <= found.peak_bytes("adam", "cuda")
        short = None if found.short is None else measure_peak(relieved(found.short, "cuda"), "adam", "cuda")
        assert short in (None, least)
        told += short is not None
    assert told > 0


def test_what_runs_at_places_is_not_tried_to_be_relieved_again_and_again() -> None:
    graph, machine = large(), parse_machine("dgx-h100:1x2")
    contest = open_contest(graph, machine, CostModel(), Wish())
    whole = as_variant(contest.enter_plan(make_plan(graph, machine, "data-parallel"), is_counted=False)).entry
    (axis,) = machine.mesh.names
    at, made = ((axis, At(0)),), whole.layouts.choices
    choices = tuple(replace(c, operands=(at,) * len(c.operands), outputs=(at,) * len(c.outputs)) for c in made)
    placed = replace(whole.layouts, leaves=dict.fromkeys(whole.layouts.leaves, at), choices=choices)
    contest.capacity, contest.best = 1, None
    contest.enter(Entry("at one place", make_variant(graph), placed))
    assert [point.outcome.entry.name for point in contest.front] == ["at one place"]
    asked = repeat(1.0, 5)
    relieve_front(contest, lambda: next(asked))


def test_an_input_that_is_read_in_pieces_is_given_in_pieces_where_memory_is_short() -> None:
    graph, machine = large(), parse_machine("dgx-h100:1")
    contest = open_contest(graph, machine, CostModel(), Wish())
    found = contest.enter_plan(make_plan(graph, machine, "reduction:k=8"), is_counted=False)
    assert found.peak_bytes is not None
    pieces = inputs_in_pieces(as_variant(found).entry)
    assert pieces is not None and inputs_in_pieces(pieces) is None
    given = next(leaf for leaf in graph.leaves if leaf.name == "x").type.bytes
    contest.capacity, contest.best = found.peak_bytes - given * 7 // 8, None
    relieve(contest, found)
    assert contest.best is not None
    assert contest.best.entry.name.endswith("inputs in pieces")
    assert contest.best.seconds <= found.seconds and contest.best.peak_bytes == contest.capacity
    assert plan_of(contest.best, graph, machine).strategy == contest.best.entry.name, "it is legal"


@pytest.mark.parametrize("seed", range(3))
def test_what_follows_an_operator_is_the_best_for_it(seed: int) -> None:
    """Of all values of a variable, with the others as they are, by the sum of all tables."""
    graph, _, machine, _ = drawn(80)
    contest = open_contest(graph, machine, CostModel(), Wish(optimizer="adam"))
    search, rng = JointSearch(contest, [variant := make_variant(graph)]), Random(seed)
    (units,) = search.cuts()
    problem = search.problem(variant, units, search.objective(0.0, LEAST_PRICE), with_dominated=True)
    assert problem is not None
    tables = Following(problem)

    def total(values: tuple[int, ...]) -> float:
        return sum(float(f.table.values[tuple(values[v] for v in f.variables)]) for f in problem.factors)

    for _ in range(20):
        start = tuple(rng.randrange(size) for size in problem.sizes)
        position = rng.randrange(problem.num_operators)
        changed = (*start[:position], value := rng.randrange(problem.sizes[position]), *start[position + 1 :])
        stored, all_next = tables.follow(start, position, value)
        moved = [v for v in range(len(start)) if stored[v] != changed[v]]
        assert all(v in {problem.variable[root] for root in problem.stored} for v in moved)
        assert all_next[position] == stored[position] == value
        assert total(all_next) <= total(stored) <= total(changed)
        read = (root for root in problem.stored if position in dict(problem.skeleton.readers[root]))
        for v in (problem.variable[root] for root in read):
            others = [total((*stored[:v], other, *stored[v + 1 :])) for other in range(problem.sizes[v])]
            assert np.isclose(total(stored), min(others), rtol=1e-12)
