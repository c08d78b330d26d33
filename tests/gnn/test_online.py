"""Graphs cut into parts of any sizes, and cut anew while they train: the plain model on the whole graph judges."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zoo
from conjoin.errors import GraphError, UsageError
from conjoin.frontends import capture
from conjoin.gnn import (
    BatchRoles,
    Graded,
    OnlineParts,
    WholeGraph,
    equal_edges,
    find_roles,
)
from conjoin.ir import Graph, Plan
from conjoin.machine import Machine
from conjoin.runtime import ParallelModule, RowExchange, run_ranks
from conjoin.runtime.program.other_plans import OtherPlans
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.state.storage import Store
from conjoin.search import make_plan
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.side_by_side import PLANNER

VERTICES, STEPS = 17, 3
"""Three steps are cut as at first, otherwise, and as at first again."""


@lru_cache
def workload(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Any, BatchRoles]:
    """A model in double precision on a graph with loops, doubled edges and vertices that have none."""
    torch.manual_seed(1)
    work = zoo.build(f"{name}:tiny", batch_size=VERTICES)
    x, _, *rest, labels = work.batch
    edges = torch.randint(VERTICES - 3, (2, 40))
    edges[:, :4] = torch.tensor([[2], [2]])
    weights = [torch.rand(40).double()] if rest else []
    batch = (x.double(), edges, *weights, labels.double() if labels.is_floating_point() else labels)
    model = work.model.double().train()
    return model, batch, work.loss, find_roles(capture(model, batch, work.loss))


def alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model, batch, loss, _ = workload(name)
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        made = loss(model(*batch[:-1]), batch[-1])
        made.backward()
        losses.append(made.item())
        optimizer.step()
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


@lru_cache
def without_values(name: str) -> Graph:
    model, batch, loss, _ = workload(name)
    without = tuple(torch.empty_like(x, device="meta") for x in batch)
    return capture(copy.deepcopy(model).to("meta"), without, Graded(loss))


def planned(name: str, parts: int) -> Plan:
    """Without values, as the command line plans."""
    return make_plan(without_values(name), Machine("many", 1, parts, "cpu"), f"vertex-parallel:parts={parts}")


def train(
    name: str, whole: WholeGraph, all_cuts: Sequence[np.ndarray], plan: Plan, ranks: Communicator
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Some steps, each with cuts of its own."""
    model, loss = workload(name)[0], Graded(workload(name)[2])
    store = Store(plan, ranks.rank, torch.device("cpu"))
    store.fill(model)
    step = ParallelModule(plan, store, ranks, None, OtherPlans(plan, model, PLANNER, loss, None))  # type: ignore[arg-type]
    parts = OnlineParts(whole, all_cuts[0], step)
    optimizer, losses, held = torch.optim.SGD(step.parameters(), lr=0.5, momentum=0.9), [], []
    for i in range(STEPS):
        if i:
            parts.go_over(whole.sizes(all_cuts[i % len(all_cuts)]))
        optimizer.zero_grad()
        with parts.timed() as clock:
            found = step(*parts.batch)
            clock.turn()
            found["loss"].backward()
        told = parts.learn(0)
        assert len(told.seconds) == ranks.mesh.size and told.moved is None
        losses.append(found["loss"].item())
        assert [x.shape for x in parts.batch] == [x.shape for x in parts.part.tensors], "what is run is the part"
        held.append(parts.part.tensors[1].shape[1])
        optimizer.step()
    state = {key: value.detach().as_subclass(Tensor).clone() for key, value in step.named_parameters()}
    return losses, state, held


def check(name: str, results: list[tuple[list[float], dict[str, Tensor], list[int]]]) -> None:
    losses, state = alone(name)
    for theirs, weights, _ in results:
        assert theirs == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(weights, {key: state[key] for key in weights}, rtol=1e-9, atol=1e-12)
    assert all(sum(counts) == 40 for counts in zip(*(held for *_, held in results), strict=True))


CUTS = {
    1: [(0, 17)],
    2: [(0, 5, 17), (0, 12, 17)],
    3: [(0, 6, 6, 17), (0, 3, 13, 17)],
    4: [(0, 4, 9, 11, 17), (0, 0, 9, 16, 17)],
    8: [(0, 2, 4, 5, 8, 8, 12, 15, 17), (0, 1, 4, 6, 8, 9, 12, 16, 17)],
}


EACH_ONCE = [
    ("gcn", 1), ("gcn", 2), ("gcn", 4), ("gcn-ppi", 3), ("gin", 3), ("commnet", 4), ("graphsage", 3), ("gat", 8),
    ("deep-gcn", 3),
]  # fmt: skip
"""Every model in as many parts that one may be empty, and every number of parts."""


@pytest.mark.parametrize(("name", "parts"), EACH_ONCE)
def test_it_trains_like_the_plain_model_while_it_is_cut_anew(name: str, parts: int) -> None:
    _, batch, _, roles = workload(name)
    order = np.random.default_rng(parts).permutation(VERTICES)
    whole, cuts = WholeGraph.of(roles, batch, order), [np.array(each) for each in CUTS[parts]]
    plan = planned(name, parts)
    assert parts == 1 or "i64[2,40]{d0:S(1)" in str(plan.graph)  # edges are split
    check(name, run_ranks(plan.mesh, partial(train, name, whole, cuts, plan)))


def test_on_processes_it_trains_like_the_plain_model(tmp_path: Path) -> None:
    _, batch, _, roles = workload("graphsage")
    whole, cuts = WholeGraph.of(roles, batch), [np.array(each) for each in CUTS[3]]
    plan = planned("graphsage", 3)
    check("graphsage", run_processes(plan.mesh, partial(train, "graphsage", whole, cuts, plan), tmp_path))


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32))
def test_what_moves_between_ranks_is_what_another_cut_has(num_parts: int, seed: int) -> None:
    _, batch, _, roles = workload("gcn")
    random, whole = np.random.default_rng(seed), WholeGraph.of(roles, batch)
    one, other = (np.array([0, *sorted(random.integers(VERTICES + 1, size=num_parts - 1)), VERTICES]) for _ in range(2))

    def go(ranks: Communicator) -> bool:
        exchange = RowExchange(ranks, tuple(axis.name for axis in ranks.mesh.axes))
        moved = whole.part(one, ranks.rank).moved(whole.sizes(other), exchange)
        wanted = whole.part(other, ranks.rank)
        return all(map(torch.equal, moved.tensors, wanted.tensors)) and moved.sizes == wanted.sizes

    assert all(run_ranks(Machine("many", 1, num_parts, "cpu").mesh, go))


class Slow(nn.Module):
    """As GIN, but a vertex's layer takes as long as its edges do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        made = torch.relu(self.first(x))
        for _ in range(3):
            made = torch.tanh(made)
        return self.second(torch.zeros_like(made).index_add(0, edges[1], made[edges[0]]))


def trained_by(model: nn.Module, batch: Any, loss: Any, losses: list[float]) -> nn.Module:
    """The plain model after as many steps, whose losses must be these."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wanted in losses:
        optimizer.zero_grad()
        here = loss(model(*batch[:-1]), batch[-1])
        here.backward()
        optimizer.step()
        assert here.item() == pytest.approx(wanted, rel=1e-5)
    return model


def test_parts_that_take_longer_give_vertices_away_and_the_curve_stays() -> None:
    """All edges come to few vertices: equal edges leave one rank with nearly all vertices, and most of the work."""
    torch.manual_seed(0)
    count, epochs = 3000, 9
    edges = torch.stack((torch.randint(count, (600,)), torch.randint(20, (600,))))
    model, loss = Slow(), nn.functional.cross_entropy
    batch = torch.randn(count, 64), edges, torch.randint(3, (count,))
    roles = find_roles(capture(model, batch, loss))
    whole, made = WholeGraph.of(roles, batch), Graded(loss)
    cuts = equal_edges(whole.adjacency, 2)
    assert cuts[1] < 20
    plan = make_plan(capture(model, batch, made), Machine("many", 1, 2, "cpu"), "vertex-parallel")

    def program(ranks: Communicator) -> Any:
        store = Store(plan, ranks.rank, torch.device("cpu"))
        store.fill(model)
        step = ParallelModule(plan, store, ranks, None, OtherPlans(plan, model, PLANNER, made, None))  # type: ignore[arg-type]
        parts, told, losses = OnlineParts(whole, cuts, step), [], []
        optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
        for epoch in range(epochs):
            optimizer.zero_grad()
            with parts.timed() as clock:
                found = step(*parts.batch)
                clock.turn()
                found["loss"].backward()
            told.append(parts.learn(10_000 - epoch))
            losses.append(found["loss"].item())
            optimizer.step()
        cuts_of_unseen = parts.cuts_of(unseen.adjacency)
        with torch.no_grad():
            inferred = step(*OnlineParts(unseen, cuts_of_unseen, step).batch)["loss"].item()
        return losses, told, parts.part.sizes, cuts_of_unseen.tolist(), inferred

    others = torch.randn(count, 64), torch.stack((edges[0].flip(0), count - 1 - edges[1])), batch[-1].flip(0)
    unseen = WholeGraph.of(roles, others)
    (losses, told, sizes, learned, inferred), (_, heard, theirs, *same) = run_ranks(plan.mesh, program)
    plain = trained_by(copy.deepcopy(model), batch, loss, losses)
    assert loss(plain(*others[:-1]), others[-1]).item() == pytest.approx(inferred, rel=1e-5)
    assert same == [learned, inferred] and equal_edges(unseen.adjacency, 2)[1] > count - 20
    assert 700 < learned[1] < 2300, "a graph that was never run is cut by what was learned"
    moved = [each.moved for each in told if each.moved is not None]
    assert moved and "cut anew" in str(moved[0]) and sizes == theirs
    assert 700 < sizes.cuts[1] < 2300, "vertices, not edges, are what takes time"
    # Another process may take part of an epoch's time.
    assert min(max(each.seconds) for each in told[-3:]) < 0.8 * max(told[1].seconds)
    assert told[-1].predicted is not None and told[-1].weights and heard[-1].predicted is None


def test_what_cannot_be_cut_is_told() -> None:
    _, batch, _, roles = workload("gcn")
    whole = WholeGraph.of(roles, batch)
    with pytest.raises(GraphError, match="end with the number of vertices, 17"):
        whole.sizes(np.array([0, 5, 18]))
    with pytest.raises(UsageError, match=r"tells of vertices\. There are 17 of them"):
        WholeGraph.of(roles, (batch[0][:-1], *batch[1:]))
    with pytest.raises(GraphError, match="names vertex 17"):
        WholeGraph.of(roles, (batch[0], batch[1] + 17 - batch[1].max(), *batch[2:]))


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_any_graph_in_any_parts_has_the_loss_and_gradients_of_the_whole(name: str) -> None:
    """Random edges, cut at random, one after the other on the same ranks: empty parts and vertices are among them."""
    model, batch, loss, roles = workload(name)
    plan, random = planned(name, 4), np.random.default_rng(5)
    cases = []
    for _ in range(12):
        edges = torch.from_numpy((VERTICES * random.random((2, 40)) ** random.integers(1, 4)).astype(np.int64))
        cuts = np.array([0, *sorted(random.integers(VERTICES + 1, size=3)), VERTICES])
        cases.append((WholeGraph.of(roles, (batch[0], edges, *batch[2:]), random.permutation(VERTICES)), cuts, edges))

    def go(ranks: Communicator) -> list[tuple[float, dict[str, Tensor]]]:
        store = Store(plan, ranks.rank, torch.device("cpu"))
        store.fill(model)
        step, found = ParallelModule(plan, store, ranks), []
        for whole, cuts, _ in cases:
            step.zero_grad()
            made = step(*OnlineParts(whole, cuts, step).batch)
            made["loss"].backward()
            gradients = {key: p.grad.as_subclass(Tensor).clone() for key, p in step.named_parameters()}  # type: ignore[union-attr]
            found.append((made["loss"].item(), gradients))
        return found

    results = run_ranks(plan.mesh, go)
    for i, (_, _, edges) in enumerate(cases):
        plain = copy.deepcopy(model)
        wanted = loss(plain(batch[0], edges, *batch[2:-1]), batch[-1])
        wanted.backward()
        for theirs in results:
            assert theirs[i][0] == pytest.approx(wanted.item(), rel=1e-9)
            gradients = {key: p.grad for key, p in plain.named_parameters()}
            torch.testing.assert_close(theirs[i][1], gradients, rtol=1e-9, atol=1e-12)


class Convolution(nn.Module):
    """A layer on sums of neighbours; what else models do with vertices and edges is done by its children."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def rows(self, x: Tensor, edges: Tensor, weight: Tensor | None = None) -> Tensor:
        rows = x[edges[0]] if weight is None else x[edges[0]] * weight[:, None]
        made: Tensor = self.layer(x.new_zeros(len(x), 5).index_add(0, edges[1], rows))
        return made

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.rows(x, edges)


class FirstAlone(Convolution):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return super().forward(x, edges)[:7]


class OwnRows(Convolution):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VERTICES, 5))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return super().forward(x + self.table, edges)


class Upwards(Convolution):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.rows(x, edges, (edges[0] < edges[1]).to(x.dtype))


class OwnWeights(Convolution):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.rows(x, edges, torch.sigmoid(self.weight))


class Degrees(Convolution):
    """As in a GCN, with batch norm and dropout: the same of vertices in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        degree = x.new_zeros(len(x)).index_add(0, edges[1], x.new_ones(edges.shape[1])).clamp(min=1) ** -0.5
        return self.rows(self.drop(self.norm(x)), edges, degree[edges[0]] * degree[edges[1]]).log_softmax(-1)


def of_some(outputs: Tensor, labels: Tensor, which: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs[which], labels[which])


@pytest.mark.parametrize(
    ("model", "rest", "loss", "told"),
    [
        (Convolution(), (torch.arange(VERTICES) % 3, torch.tensor([3, 1, 8])), of_some, "index.Tensor"),
        (FirstAlone(), (torch.arange(7) % 3,), nn.functional.cross_entropy, "slice.Tensor"),
        (OwnRows(), (torch.arange(VERTICES) % 3,), nn.functional.cross_entropy, "add.Tensor"),
        (Upwards(), (torch.arange(VERTICES) % 3,), nn.functional.cross_entropy, "lt.Tensor"),
        (OwnWeights(), (torch.arange(VERTICES) % 3,), nn.functional.cross_entropy, "own weight"),
        (Convolution(), (torch.arange(VERTICES) % 3,), nn.functional.cross_entropy, ""),
        (Degrees(), (torch.arange(VERTICES) % 3,), nn.functional.cross_entropy, ""),
    ],
)
def test_vertices_stay_where_they_are_for_what_goes_by_their_places(
    model: nn.Module, rest: tuple[Tensor, ...], loss: Any, told: str
) -> None:
    torch.manual_seed(0)
    batch = torch.randn(VERTICES, 5), torch.randint(VERTICES, (2, 40)), *rest
    roles, order = find_roles(capture(model, batch, loss)), np.random.default_rng(1).permutation(VERTICES)
    if told:
        with pytest.raises(UsageError, match=told):
            WholeGraph.of(roles, batch, order)
        return
    whole = WholeGraph.of(roles, batch, order)
    losses = []
    for x, edges, labels in (batch, whole.tensors):
        torch.manual_seed(0)
        losses.append(loss(copy.deepcopy(model).eval()(x, edges), labels).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def train_some(plan: Plan, model: nn.Module, whole: WholeGraph, cuts: np.ndarray, ranks: Communicator) -> float:
    loss = nn.functional.cross_entropy
    store = Store(plan, ranks.rank, torch.device("cpu"))
    store.fill(model)
    step = ParallelModule(plan, store, ranks, None, OtherPlans(plan, model, PLANNER, loss, None))  # type: ignore[arg-type]
    found: Tensor = step(*OnlineParts(whole, cuts, step).batch)
    return found.item()


class Scaled(Convolution):
    """Weights that are made of what the batch says of edges: a plan has that whole on every device."""

    def forward(self, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return self.rows(x, edges, torch.sigmoid(weight))


def scaled(num_edges: int) -> tuple[nn.Module, tuple[Tensor, ...], Plan]:
    torch.manual_seed(0)
    edges, weight = torch.randint(VERTICES, (2, num_edges)), torch.randn(num_edges).double()
    batch = torch.randn(VERTICES, 5).double(), edges, weight, torch.arange(VERTICES) % 3
    model, without = Scaled().double(), tuple(torch.empty_like(x, device="meta") for x in batch)
    graph = capture(copy.deepcopy(model).to("meta"), without, nn.functional.cross_entropy)
    return model, batch, make_plan(graph, Machine("many", 1, 2, "cpu"), "vertex-parallel:parts=2")


@pytest.mark.parametrize("cuts", [(0, 5, VERTICES), (0, 0, VERTICES)])  # in the second one part is all there is
def test_what_a_plan_has_whole_stays_whole_and_a_part_may_be_empty(cuts: tuple[int, ...]) -> None:
    model, batch, plan = scaled(40)
    whole = WholeGraph.of(find_roles(capture(model, batch, nn.functional.cross_entropy)), batch)
    losses = run_ranks(plan.mesh, partial(train_some, plan, model, whole, np.array(cuts)))
    alone = nn.functional.cross_entropy(model(*batch[:-1]), batch[-1]).item()
    assert losses == pytest.approx([alone] * 2, rel=1e-12)


def test_as_many_edges_as_vertices_are_not_cut() -> None:
    model, batch, _ = scaled(VERTICES)
    whole = WholeGraph.of(find_roles(capture(model, batch, nn.functional.cross_entropy)), batch)
    with pytest.raises(UsageError, match=f"{VERTICES} vertices and as many edges"):
        whole.sizes(np.array([0, 5, VERTICES])).on(("d0",))
