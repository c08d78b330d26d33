"""What is found on counted axes becomes plans that compute what the model computes; the joint search enters them."""

from __future__ import annotations

import pytest

import zoo
from conjoin.machine import Machine
from conjoin.runtime import Case, verify_in_process
from conjoin.search.contest import Contest
from conjoin.search.entries import make_variant, plan_of
from conjoin.search.exact.counted.space import CountedSpace
from conjoin.search.joint import JointSearch
from conjoin.search.variants import expanded
from tests.search.models import captured
from tests.search.prices import SlowDevices

EIGHT = Machine("eight", 1, 8, "cpu")


@pytest.mark.parametrize("name", ["mlp", "lenet", "dlrm", "gpt-125m"])
def test_plans_on_counted_axes_compute_what_the_model_computes(name: str) -> None:
    model, batch, _ = zoo.build(f"{name}:tiny", batch_size=8)
    graph = captured(name, 8)
    contest = Contest(graph, EIGHT, SlowDevices(link=1e7), "adam", 1 << 40, 60.0)
    variant = make_variant(*expanded(graph))
    joint = JointSearch(contest, [variant])
    outcome = joint.try_counted(variant, CountedSpace(EIGHT.mesh, joint.operators), joint.objective(0.0))
    assert outcome is not None
    plan = plan_of(outcome, graph, EIGHT)
    assert plan.strategy == "joint search, 3 axes of 2"
    assert len({str(leaf.type) for leaf in plan.graph.leaves if "{" in str(leaf.type)}) > 0, "nothing is split"
    assert verify_in_process(Case(plan, graph, model, batch), 1).passed


def test_the_joint_search_counts_where_all_axes_are_alike() -> None:
    entered = {}
    for machine in (EIGHT, Machine("two nodes", 2, 4, "cpu")):
        contest = Contest(captured("mlp", 8), machine, SlowDevices(link=1e7), "adam", 1 << 40, 60.0)
        names: list[str] = []
        enter = contest.enter
        contest.enter = lambda entry, enter=enter, names=names: (names.append(entry.name), enter(entry))[1]  # type: ignore[misc, method-assign]
        JointSearch(contest, [make_variant(captured("mlp", 8))]).run()
        entered[machine.name] = any("axes of" in name for name in names)
    assert entered == {"eight": True, "two nodes": False}
