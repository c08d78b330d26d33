"""Which weights are stored in sections, and what becomes of a graph that another one stores its weights for."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan, check_plan, verify
from conjoin.machine import parse_machine
from conjoin.ops import Split
from conjoin.report import explain
from conjoin.runtime import to_module
from conjoin.search import Wish, find_plan, make_plan
from conjoin.search.packed_weights import find_packed, sections_alike, store_in_sections, stored_as_in
from conjoin.sim import predict
from conjoin.sim.skeleton import take_graph_apart
from tests.runtime.packed_models import GatedMlp, GroupedAttention, LowRank, Words


class Cut(nn.Module):
    """A packed weight that is cut by itself, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.packed, self.down = how, nn.Parameter(torch.randn(16, 6)), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        w, more = self.packed, torch.zeros(())
        match self.how:
            case "chunk":
                one, other = w.chunk(2)
            case "slices":
                one, other = w[:8], w[8:]
            case "turned":
                one, other = (part.T for part in w.T.split(8, dim=1))
            case "penalty":
                (one, other), more = w.split(8), w.square().mean()
            case "gap":
                one, other = w[:8], w[7:15]
            case "twice":
                (one, other), more = w.split(8), w.split(4)[0].mean()
        return self.down(functional.linear(x, one).sigmoid() * functional.linear(x, other)) + more


def graph_of(how: str) -> tuple[Cut, Tensor, Graph]:
    torch.manual_seed(0)
    model, x = Cut(how).double().train(), torch.randn(4, 6, dtype=torch.float64)
    return model, x, capture(model, (x,), lambda y: y.square().mean())


@pytest.mark.parametrize("how", ["chunk", "slices", "turned"])
def test_a_weight_that_is_cut_by_all_who_read_it_is_stored_in_parts(how: str) -> None:
    model, x, graph = graph_of(how)
    cuts = [node for node in graph.nodes if find_packed(graph, node) is not None]
    apart = verify(store_in_sections(graph, cuts))
    assert [leaf.name for leaf in apart.leaves if leaf.section] == ["packed[0:8]", "packed[8:16]"]
    assert not any(find_packed(apart, node) for node in apart.nodes)
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    for graph_run, owner in ((graph, one), (apart, other)):
        to_module(graph_run, owner)(x).backward()
    assert torch.equal(one.packed.grad, other.packed.grad)  # type: ignore[arg-type]
    plan = make_plan(graph, parse_machine("local:2"), "megatron:tp=2")
    stored = {leaf.name: dict(leaf.type.layout) for leaf in plan.graph.leaves if leaf.section}
    assert stored == {"packed[0:8]": {"d0": Split(0)}, "packed[8:16]": {"d0": Split(0)}}


@pytest.mark.parametrize("how", ["penalty", "gap", "twice"])
def test_a_weight_that_is_also_read_otherwise_stays_whole(how: str) -> None:
    _, _, graph = graph_of(how)
    assert not any(find_packed(graph, node) for node in graph.nodes)
    plan = make_plan(graph, parse_machine("local:2"), "megatron:tp=2")
    assert not any(leaf.section for leaf in plan.graph.leaves)


@pytest.mark.parametrize("way", ["together", "apart"])
def test_a_graph_reads_what_another_one_stores(way: str) -> None:
    model, x, graph = graph_of("chunk")
    apart = store_in_sections(graph, [node for node in graph.nodes if find_packed(graph, node) is not None])
    mine, theirs = (graph, apart) if way == "together" else (apart, graph)
    made = verify(stored_as_in(mine, theirs))
    assert made.leaves == theirs.leaves and stored_as_in(made, theirs) is made
    assert torch.equal(to_module(made, model)(x), to_module(graph, model)(x))


def test_searches_store_sections_alike_and_end_no_worse() -> None:
    model = Words(GroupedAttention, GatedMlp, 1).train()
    batch = torch.zeros(1, 4).long(), torch.zeros(1, 4).long()
    graph = capture(model, batch, lambda y, t: functional.cross_entropy(y.flatten(0, 1), t.flatten()))
    machine = parse_machine("dgx-h100:1x2")
    named = make_plan(graph, machine, "megatron:tp=2")
    assert isinstance(named, Plan) and sum(leaf.section is not None for leaf in named.graph.leaves) == 5
    skeleton, layouts = take_graph_apart(named.graph)
    places = [i for i, leaf in enumerate(named.graph.leaves) if leaf.section is not None]
    odd = replace(layouts, leaves={**layouts.leaves, places[0]: ()})
    assert sections_alike(skeleton.graph, odd, named.mesh).leaves == layouts.leaves
    found = find_plan(graph, machine, CostModel(), Wish(budget=60, steps=12))
    assert found.seconds_per_step <= predict(named, machine, CostModel()).seconds
    assert isinstance(found.plan, Plan)
    check_plan(found.plan)


def test_a_rank_stores_and_sends_what_it_would_of_separate_weights() -> None:
    """Of gate and up in one weight as of both by themselves."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(functional.silu(self.gate(x)) * self.up(x))

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = nn.Linear(16, 64), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(functional.silu(gate) * up)

    told = []
    for model in (Apart(), Packed()):
        graph = capture(model, (torch.randn(8, 16),), lambda y: y.square().mean())
        for strategy in ("megatron:tp=4", "fsdp+megatron:tp=2"):
            plan = explain(make_plan(graph, parse_machine("local:4"), strategy))
            told.append((plan.stored_bytes, plan.bytes_of(0)))
    assert told[:2] == told[2:]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_narrow_pair_beside_a_layer_costs_what_is_narrow(is_packed: bool) -> None:
    """Gate and up are split as they are without a LoRA beside them, and only what is between its layers is summed."""

    class Gated(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            layers = [nn.Linear(16, 64)] if is_packed else [nn.Linear(16, 32), nn.Linear(16, 32)]
            self.up = nn.ModuleList(LowRank(layer, rank) if rank else layer for layer in layers)
            self.first, self.down = nn.LayerNorm(16), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            gate, up = self.up[0](x).chunk(2, dim=-1) if is_packed else (layer(x) for layer in self.up)
            return self.down(functional.silu(gate) * up)

    told = []
    for rank in (0, 2):
        graph = capture(Gated(rank), (torch.randn(8, 16),), lambda y: y.square().mean())
        told.append(explain(make_plan(graph, parse_machine("local:2"), "megatron:tp=2")))
    plain, tuned = told
    pairs, size = 1 if is_packed else 2, 4
    assert tuned.bytes_of(0) - plain.bytes_of(0) == pairs * 8 * 2 * size
    assert tuned.stored_bytes - plain.stored_bytes == (pairs * 16 * 2 + 64 * 2 // 2) * size
