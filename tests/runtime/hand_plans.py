"""Plans for the tests of this room: written by hand, rule by rule, or by a named strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import (
    REGATHER,
    Graph,
    Mark,
    MemoryAction,
    Plan,
    check_plan,
    choose,
    parallelize,
    plain_call,
    rules_for,
)
from conjoin.machine import Axis, Machine, Mesh
from conjoin.ops import make_layout, parse_placement
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.state.storage import Store
from conjoin.search import make_plan
from conjoin.search.drafts import Draft, make_plan_by
from conjoin.search.facts import Facts
from conjoin.search.groups import Group
from conjoin.search.request import Request
from conjoin.search.strategies.data_parallel import data_flow, data_group, split_storage
from tests.runtime.random_graphs import Sample

MESH = Mesh((Axis("x", 2), Axis("y", 2)))


def captured(model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Any] | None = None) -> Sample:
    """A model in double precision with its batch and its graph."""
    doubled = copy.deepcopy(model).double().train()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in batch)
    return Sample(capture(doubled, inputs, loss), doubled, inputs)


def by_hand(
    graph: Graph, leaves: Mapping[str, str], rules: Mapping[int, str], outputs: Mapping[int, str] | None = None
) -> Plan:
    """A plan from texts: `x:S(0) y:B` for a leaf, `x S(0), B -> S(0); y …` for the node of a number; the rest is I."""
    names = {leaf.name: leaf for leaf in graph.leaves}
    stored = {names[name]: layout_of(text) for name, text in leaves.items()}
    choices = {}
    for number, text in rules.items():
        node = graph.nodes[number]
        known = {str(rule): rule for rule in rules_for(plain_call(node), len(node.types))}
        by_axis = dict(part.strip().split(" ", 1) for part in text.split(";"))
        choices[node] = choose({axis: known[wanted] for axis, wanted in by_axis.items()})
    given = {i: layout_of(text) for i, text in (outputs or {}).items()}
    mark = Mark("by hand", "")
    return check_plan(Plan(parallelize(graph, stored, choices, given), MESH, mark, mark, "by hand"))


def layout_of(text: str) -> Any:
    entries = (entry.split(":") for entry in text.split())
    return make_layout((axis, parse_placement(placement)) for axis, placement in entries)


def by_strategy(sample: Sample, strategy: str, num_devices: int = 4) -> Plan:
    return make_plan(sample.graph, Machine("many", 1, num_devices, "cpu"), strategy)


def sharded_inside(graph: Graph, machine: Machine, *, regather: bool = True) -> Plan:
    """The batch split over all devices, parameters stored split inside nodes and alike on each (hybrid sharding)."""
    mesh = machine.mesh
    inner = tuple(axis.name for axis in mesh.axes if not axis.between_nodes)
    shard = Group("shard", inner, machine.devices_per_node)

    def draft(facts: Facts) -> Draft:
        request = Request("fsdp", {})
        flow = data_flow(facts, data_group(mesh, request))
        stored = {leaf: split_storage(leaf.type, shard, mesh) for leaf in facts.parameters()}
        names = [leaf.name for leaf, layout in stored.items() if layout and regather]
        return Draft(request, (flow,), stored, tuple(MemoryAction(REGATHER, name) for name in names))

    return make_plan_by(graph, machine, draft)


def module_on(
    plan: Plan, sample: Sample, communicator: Communicator, exact_seed: int | None = None
) -> ParallelModule:
    """A rank's module with its pieces of the sample's model."""
    store = Store(plan, communicator.rank, torch.device("cpu"))
    store.fill(sample.model)
    return ParallelModule(plan, store, communicator, exact_seed)
