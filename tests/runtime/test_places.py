"""Nodes that run at one place of an axis only, the others having nothing: any graph computes what one device does.

As in `test_random_layouts`, but on each axis a node is at one random place half of the time, and so is what is stored.
The plans of models by hand run on threads, and one of them on processes with Gloo.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.errors import PlanError
from conjoin.ir import (
    LeafKind,
    Mark,
    Plan,
    check_plan,
    choose,
    find_faults,
    find_layout_faults,
    parallelize,
    parse_graph,
    recompute_actions,
    sequential,
)
from conjoin.machine import Axis, Mesh
from conjoin.ops import At, Split, make_layout
from tests.runtime.hand_plans import captured
from tests.runtime.random_graphs import (
    MESHES,
    Sample,
    chain,
    differences,
    on_one_device,
    on_ranks,
    random_plan,
    rules_at,
)

BLOCKS, CHAINS = range(6), 8


def check_runs(plan: Plan, sample: Sample) -> None:
    found = differences(plan, on_ranks(plan, sample), on_one_device(sample))
    assert not found, "\n".join([*found[:5], str(plan.mesh), str(plan.graph)])


@pytest.mark.parametrize("block", BLOCKS)
def test_random_graphs_at_random_places_compute_what_one_device_does(block: int) -> None:
    confined = 0
    for seed in range(block * CHAINS, (block + 1) * CHAINS):
        rng = Random(seed)
        sample = chain(rng)
        plan = random_plan(sample.graph, rng.choice(MESHES), rng, places=0.5)
        assert find_faults(plan.graph) == () and find_layout_faults(plan.graph, plan.mesh) == ()
        assert sequential(plan.graph) == sample.graph
        assert parse_graph(str(plan.graph)) == plan.graph
        check_runs(plan, sample)
        confined += any(isinstance(p, At) for node in plan.graph.nodes for t in node.types for _, p in t.layout)
    assert confined > CHAINS // 2


class Towers(nn.Module):
    """Two towers on one input, with dropout and batch norm, and a head over both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.25), nn.Linear(10, 4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x)], 1)
        return nn.functional.cross_entropy(self.head(both), y)


MESH = Mesh((Axis("x", 2), Axis("y", 2)))


def _tower_of(names: Iterable[str]) -> str | None:
    found = {name.split(".")[0] for name in names} & {"left", "right"}
    return found.pop() if len(found) == 1 else None


def towers(stored_at: bool = True, inner: bool = True) -> tuple[Plan, Sample]:
    """Each tower at its place of axis x, its batch split along y; the head reads copies along x."""
    torch.manual_seed(0)
    sample = captured(Towers(), (torch.randn(8, 6), torch.randint(3, (8,))))
    graph = sample.graph
    towers: dict[Any, str] = {}
    for node in graph.nodes:
        made = [towers[v.owner] for v in node.inputs if v.owner in towers]
        read = [v.owner.name for v in node.inputs if hasattr(v.owner, "kind") and v.owner.kind is not LeafKind.INPUT]
        tower = _tower_of(read) or (made[0] if made and len(set(made)) == 1 else None)
        if tower is not None and node.types[0].shape:
            towers[node] = tower
    at = {"left": At(0), "right": At(1)}
    choices, leaves = {}, {}
    for node, tower in towers.items():
        rules = {"x": rules_at(node, 2)[at[tower].place]}
        known = [r for r in _rules(node) if r.index and r.outputs[0] == Split(0) and r.operands[0] == Split(0)]
        whole = "batch_norm" in node.op
        choices[node] = choose({**rules, **({"y": known[0]} if known and inner and not whole else {})})
    for leaf in graph.leaves:
        tower = _tower_of([leaf.name])
        if tower is not None and leaf.type.shape and stored_at:
            leaves[leaf] = make_layout([("x", at[tower])])
    updates = {name: value for name, value in graph.updates}
    assert len(updates) == 3
    mark = Mark("towers", "")
    return check_plan(Plan(parallelize(graph, leaves, choices), MESH, mark, mark, "by hand")), sample


def _rules(node: Any) -> Any:
    from conjoin.ir import plain_call, rules_for

    return rules_for(plain_call(node), len(node.types))


@pytest.mark.parametrize("stored_at", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_towers_at_their_places_train_as_on_one_device(stored_at: bool, inner: bool) -> None:
    plan, sample = towers(stored_at, inner)
    check_runs(plan, sample)


def test_what_others_pass_by_is_not_run_again() -> None:
    """Ranks elsewhere would wait for collectives that only some run again: such a plan is refused."""
    plan, _ = towers()
    both = replace(plan, memory=recompute_actions(plan.graph, ((0, 1),)))
    with pytest.raises(PlanError, match="made at one place of an axis only"):
        check_plan(both)
