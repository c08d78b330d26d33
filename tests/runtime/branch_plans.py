"""Plans in which branches run beside each other, for tests: a named strategy with its branches dealt out by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conjoin.ir import Graph, Plan, sequential
from conjoin.machine import Machine
from conjoin.search import make_plan
from conjoin.search.branch_places import Places, confine, places_along
from conjoin.search.branches import find_forks
from conjoin.search.entries import Entry, Outcome, make_variant, plan_of
from conjoin.sim import Simulation, take_apart


class Towers(nn.Module):
    """Two towers on one input, one with batch norm and one with dropout, and a head over both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.25), nn.Linear(10, 4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x)], 1)
        return nn.functional.cross_entropy(self.head(both), y)


def towers_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def machine_of(num_devices: int) -> Machine:
    return Machine("many", 1, num_devices, "cpu")


def branched(graph: Graph, num_devices: int, strategy: str, axes: tuple[str, ...]) -> Plan:
    """A strategy with the branches of every fork of the model at the places of some axes, one after the other."""
    skeleton, _ = take_apart(make_plan(graph, machine_of(num_devices), strategy))
    places = places_along(axes, machine_of(num_devices).mesh)
    where: dict[int, Places] = {}
    for fork in find_forks(skeleton):
        free = [branch for branch in fork.branches if not where.keys() & {*branch}]
        sizes = [len(branch) for branch in free]
        balanced = len(free) > 1 and max(sizes) < 0.8 * sum(sizes)
        for i, branch in enumerate(free if balanced else ()):
            where.update(dict.fromkeys(branch, places[i % len(places)]))
    return _plan(graph, num_devices, strategy, where)


def with_towers(graph: Graph, num_devices: int, strategy: str = "data-parallel") -> Plan:
    """A strategy with the left tower at the first place of d0, and the right one at the second."""
    skeleton, _ = take_apart(make_plan(graph, machine_of(num_devices), strategy))
    where: dict[int, Places] = {}
    for i, operator in enumerate(skeleton.operators):
        module = operator.source.module.split(".")[0] if operator.source is not None else ""
        if module in ("left", "right") and any(skeleton.roots[root].type.shape for root in operator.makes):
            where[i] = (("d0", int(module == "right")),)
    return _plan(graph, num_devices, strategy, where)


def _plan(graph: Graph, num_devices: int, strategy: str, where: dict[int, Places]) -> Plan:
    assert len({*where.values()}) > 1, "there is nothing to run beside each other"
    machine = machine_of(num_devices)
    plan = make_plan(graph, machine, strategy)
    _, layouts = take_apart(plan)
    variant = make_variant(sequential(plan.graph), plan.substitutions)
    entry = Entry("branches", variant, confine(variant.skeleton, layouts, where))
    unjudged: Simulation = None  # type: ignore[assignment] # only the layouts of the outcome are asked for
    return plan_of(Outcome(entry, unjudged, 0.0, 0), graph, machine)
