"""Layers at places: depths are those of the model's layers, dealt out in balance, and placed where that is faster."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

import zoo
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import place
from conjoin.machine import parse_machine
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import Wish, layer_depths, make_plan, open_contest
from conjoin.search.branch_places import place_branches
from conjoin.search.entries import plan_of
from conjoin.search.layer_places import deal_depths, longest_way
from conjoin.sim import take_graph_apart


def test_steps_of_a_layer_are_at_one_depth_and_decoders_at_that_of_encoders() -> None:
    found = zoo.build("nmt:tiny")
    skeleton = take_graph_apart(capture(found.model.train(), found.batch, found.loss))[0]
    depth_of = layer_depths(skeleton)
    cells = [depth for depth, op in zip(depth_of, skeleton.operators, strict=True) if op.call.op == "lstm_cell"]
    assert cells == [1, 2] * (len(cells) // 2)
    assert depth_of[0] == 0 and max(depth_of) == 5, "embedding, two layers, attention's query and result, words"


def test_depths_are_dealt_out_as_evenly_as_any_cut_does() -> None:
    rng = Random(0)
    for _ in range(40):
        seconds, places = [rng.random() for _ in range(rng.randint(1, 7))], rng.randint(1, 4)
        dealt = deal_depths(seconds, places)
        assert dealt == sorted(dealt) and dealt[0] >= 0 and dealt[-1] < places
        most = max(sum(s for s, p in zip(seconds, dealt, strict=True) if p == place) for place in range(places))
        cuts = (
            (0, *cut, len(seconds))
            for count in range(min(places, len(seconds)))
            for cut in combinations(range(1, len(seconds)), count)
        )
        least = min(max(sum(seconds[a:b]) for a, b in pairwise(cut)) for cut in cuts)
        assert most == pytest.approx(least)


def test_layers_of_a_recurrent_model_are_placed_and_train_the_same() -> None:
    """Kernels that do next to nothing: layers at two places launch theirs at the same time, a step apart.

    On two nodes samples are still split between them.
    """
    found = zoo.build("rnnlm:tiny", batch_size=8)
    graph = capture(found.model.train(), found.batch, found.loss)
    machine = parse_machine("k80-cluster:2")
    contest = open_contest(graph, machine, CostModel(), Wish())
    contest.enter_plan(make_plan(graph, machine, "data-parallel"))
    better = place_branches(contest)
    assert contest.best is not None and better is not None and better.entry.name.endswith("layers at places")
    assert better.seconds < 0.85 * contest.best.seconds
    contest.judge(better.entry, better.simulation)
    placed = plan_of(contest.best, graph, machine)
    cells = [place(node, machine.mesh) for node in placed.graph.nodes if node.op == "lstm_cell"]
    assert len({cell.at for cell in cells}) == 2, "one for each layer"
    assert all(set(cell.axes) == set(machine.mesh.names) for cell in cells), "and the samples over what is left"
    assert verify_in_process(Case(placed, graph, found.model, found.batch), 1).worst < 1e-6


def test_the_longest_way_is_of_operators_that_wait_for_each_other() -> None:
    found = zoo.build("rnnlm:tiny")
    skeleton = take_graph_apart(capture(found.model.train(), found.batch, found.loss))[0]
    seconds = [float(op.call.op == "lstm_cell") for op in skeleton.operators]
    layers, steps = 2, sum(seconds) / 2
    assert longest_way(skeleton, seconds) == layers + steps - 1
