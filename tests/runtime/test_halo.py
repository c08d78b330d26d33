"""Vertices of a graph split over ranks: the plain model on one device is the judge of losses, gradients and weights."""

from __future__ import annotations

import copy
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conjoin
import zoo
from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.ir import Plan
from conjoin.machine import parse_machine
from conjoin.ops import aggregation
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.search import make_plan
from conjoin.sim import predict
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample

MODELS = ("gcn-ppi", "gin", "commnet", "graphsage", "gat", "deep-gcn")


def edges(kind: str, vertices: int) -> Tensor:
    """Graphs with vertices that have no edges, edges that are there twice, loops; parts without any edge."""
    generator = torch.Generator().manual_seed(vertices)
    match kind:
        case "random":
            return torch.randint(vertices, (2, 3 * vertices), generator=generator)
        case "one corner":  # all but the first vertices are alone
            return torch.randint(2, (2, 9), generator=generator)
        case "star":
            return torch.stack((torch.arange(vertices), torch.zeros(vertices, dtype=torch.long)))
        case _:
            return torch.zeros(2, 1, dtype=torch.long)


@lru_cache
def sample_of(name: str, kind: str = "random", vertices: int = 13) -> tuple[Sample, Any]:
    work = zoo.build(f"{name}:tiny", batch_size=vertices)
    x, _, *rest, labels = work.batch
    graph = edges(kind, vertices)
    weights = [torch.rand(graph.shape[1])] if rest else []
    assert work.loss is not None
    return captured(work.model, (x, graph, *weights, labels), work.loss), work.loss


def alone(sample: Sample, loss: Any, steps: int = 1) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model, losses = copy.deepcopy(sample.model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        made = loss(model(*sample.inputs[:-1]), sample.inputs[-1])
        made.backward()
        losses.append(made.item())
        optimizer.step()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, weights


def together(plan: Plan, sample: Sample, steps: int, communicator: Communicator) -> tuple[Any, ...]:
    module = module_on(plan, sample, communicator)
    optimizer, losses, sent = torch.optim.SGD(module.parameters(), lr=0.5), [], []
    for _ in range(steps):
        optimizer.zero_grad()
        before = communicator.bytes_sent
        made = module(*sample.inputs)
        made.backward()
        losses.append(made.item())
        sent.append(communicator.bytes_sent - before)
        optimizer.step()
    tensors = {name: parameter.detach().as_subclass(Tensor) for name, parameter in module.named_parameters()}
    gradients = {name: p.grad.as_subclass(Tensor) for name, p in module.named_parameters() if p.grad is not None}
    return losses, gradients, tensors, sent


def check(plan: Plan, want: Any, steps: list[tuple[Any, ...]]) -> None:
    told = explain(plan)
    for rank, (losses, gradients, weights, sent) in enumerate(steps):
        assert losses == pytest.approx(want[0], rel=1e-9)
        torch.testing.assert_close(gradients, want[1], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(weights, want[2], rtol=1e-9, atol=1e-12)
        assert sent == [told.bytes_of(rank)] * len(losses)


@pytest.mark.parametrize(("name", "ranks"), [*zip(MODELS, (2, 3, 4, 2, 3, 4), strict=True), *product(MODELS, (8,))])
def test_it_trains_like_the_plain_model_with_the_bytes_told(name: str, ranks: int) -> None:
    sample, loss = sample_of(name)
    plan = by_strategy(sample, f"vertex-parallel:parts={ranks}", ranks)
    assert "all-to-all" in {total.kind for total in explain(plan).totals}
    check(plan, alone(sample, loss, 2), run_ranks(plan.mesh, partial(together, plan, sample, 2)))


@pytest.mark.parametrize("kind", ["one corner", "star", "one loop"])
@pytest.mark.parametrize("name", ["gcn", "graphsage", "gat"])
def test_vertices_without_edges_and_parts_without_any(name: str, kind: str) -> None:
    sample, loss = sample_of(name, kind, 9)
    plan = by_strategy(sample, "vertex-parallel", 4)
    check(plan, alone(sample, loss), run_ranks(plan.mesh, partial(together, plan, sample, 1)))


@pytest.mark.parametrize("name", MODELS)
def test_in_mixed_precision_vertices_are_split_as_well(name: str) -> None:
    """Zoo models under autocast, whose layers are in half precision and whose edges have weights in full."""
    torch.manual_seed(0)
    work = zoo.build(f"{name}:tiny", batch_size=13)
    plan = conjoin.plan(
        work.model, work.batch, "local:3", loss=work.loss, strategy="vertex-parallel", precision="bf16-mixed"
    )
    assert "all-to-all" in {total.kind for total in explain(plan).totals}
    assert conjoin.verify_plan(plan, work.model, work.batch, loss=work.loss, num_steps=2).passed


def all_together(plans: list[Plan], samples: list[Sample], communicator: Communicator) -> list[tuple[Any, ...]]:
    return [together(plan, sample, 1, communicator) for plan, sample in zip(plans, samples, strict=True)]


def test_on_processes_all_train_like_the_plain_models(tmp_path: Path) -> None:
    samples = [sample_of(name) for name in MODELS]
    plans = [by_strategy(sample, "vertex-parallel", 3) for sample, _ in samples]
    program = partial(all_together, plans, [sample for sample, _ in samples])
    results = run_processes(plans[0].mesh, program, tmp_path)
    for i, (sample, loss) in enumerate(samples):
        check(plans[i], alone(sample, loss), [steps[i] for steps in results])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["gcn-ppi", "gin", "graphsage"])
def test_features_that_stay_are_aggregated_once(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, loss = sample_of(name)
    plan = by_strategy(sample, "vertex-parallel:once", ranks)
    made: list[tuple[int, ...]] = []
    plain = aggregation.aggregate_over
    monkeypatch.setattr(aggregation, "aggregate_over", lambda *a: made.append(a[1].shape) or plain(*a))
    check(plan, alone(sample, loss, 3), run_ranks(plan.mesh, partial(together, plan, sample, 3)))
    assert "aggregate-features-once" in {substitution.name for substitution in plan.substitutions}
    assert made.count((13, 5)) == ranks


def test_features_that_are_written_to_are_others() -> None:
    x, ends = torch.ones(3, 2), torch.tensor([0, 1])
    sums = [float(aggregation.aggregate_once(x, ends, ends, None, 3, "sum").sum()) for _ in range(2)]
    x.mul_(2)
    sums.append(float(aggregation.aggregate_once(x, ends, ends, None, 3, "sum").sum()))
    assert sums == [4.0, 4.0, 8.0]


class PerFeature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, graph: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, graph[1], self.layer(x)[graph[0]] * weight)


def test_weights_for_each_feature_are_not_moved_before_the_layer() -> None:
    inputs = torch.randn(6, 4), edges("random", 6), torch.rand(18, 4)
    sample = captured(PerFeature(), (*inputs, torch.zeros(6, 4)), nn.functional.mse_loss)
    with pytest.raises(StrategyError, match="aggregated once"):
        by_strategy(sample, "vertex-parallel:once", 2)


class Dropping(nn.Module):
    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        rows = nn.functional.dropout(x, 0.5)[graph[0]]
        return torch.zeros_like(x).index_add(0, graph[1], rows)


def test_features_that_are_others_in_every_step_are_not_aggregated_once() -> None:
    batch = torch.randn(11, 3), edges("random", 11), torch.randn(11, 3)
    sample = captured(Dropping(), batch, nn.MSELoss())
    with pytest.raises(StrategyError, match=r"aggregated once. No aggregation in it reads .* Leave once out"):
        by_strategy(sample, "vertex-parallel:once", 2)


class Greatest(nn.Module):
    """The greatest of neighbours; the graph is the model's own."""

    def __init__(self, graph: Tensor) -> None:
        super().__init__()
        self.register_buffer("graph", graph)
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(x)[self.graph[0]]
        at = self.graph[1].view(-1, 1).expand_as(rows)
        return x.new_zeros(len(x), 4).scatter_reduce(0, at, rows, "amax", include_self=False)


def test_a_graph_that_the_model_has_and_the_greatest_of_neighbours() -> None:
    torch.manual_seed(0)
    sample = captured(Greatest(edges("random", 11)), (torch.randn(11, 3), torch.randn(11, 4)), nn.MSELoss())
    plan = by_strategy(sample, "vertex-parallel", 4)
    check(plan, alone(sample, nn.MSELoss(), 2), run_ranks(plan.mesh, partial(together, plan, sample, 2)))


@pytest.mark.parametrize("ends", ["source", "target"])
def test_edges_to_nowhere_are_refused_on_every_rank(ends: str) -> None:
    sample, _ = sample_of("gcn")
    plan = by_strategy(sample, "vertex-parallel", 2)
    graph = sample.inputs[1].clone()
    graph[int(ends == "target"), 3] = 13
    wrong = Sample(sample.graph, sample.model, (sample.inputs[0], graph, *sample.inputs[2:]))

    def refused(communicator: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            module_on(plan, wrong, communicator)(*wrong.inputs)
        return str(caught.value)

    assert all(f"{ends}s from 0 to 13. Its vertices are 0 to 12," in text for text in run_ranks(plan.mesh, refused))


def test_more_parts_than_vertices_and_models_without_edges_are_told() -> None:
    sample, _ = sample_of("gcn", vertices=3)
    with pytest.raises(StrategyError, match=r"split 4 ways .* It has 3, .* fewer parts"):
        by_strategy(sample, "vertex-parallel", 4)
    with pytest.raises(StrategyError, match=r"Nothing in it reads .* Choose data-parallel"):
        work = zoo.build("mlp:tiny")
        by_strategy(captured(work.model, work.batch, work.loss), "vertex-parallel", 4)  # type: ignore[arg-type]


def test_a_row_that_two_edges_of_a_part_read_comes_once() -> None:
    """A graph whose neighbours are near: most rows stay where they are."""
    vertices = 4000
    x, near = torch.randn(vertices, 64), torch.arange(vertices)
    graph = torch.stack((torch.cat((near, near)), torch.cat(((near + 1) % vertices, (near + 7) % vertices))))
    work = zoo.build("gin:tiny", sizes={"features": 64, "hidden": 64})
    assert work.loss is not None
    mixed = graph[:, torch.randperm(2 * vertices)]
    graphs = [conjoin.capture(work.model, (x, some, near % 4), work.loss) for some in (graph, mixed)]
    plans = [make_plan(some, parse_machine("local:4"), "vertex-parallel") for some in graphs]
    sent = [sum(t.forward.total for t in explain(plan).totals if t.kind == "all-to-all") for plan in plans]
    assert sent[0] == sent[1] == 2 * 4 * 7 * 64 * 4  # layers, parts, rows, each once, features, bytes


def test_a_graph_too_large_for_one_device_is_predicted_to_fit_and_run_sooner_on_more() -> None:
    work = zoo.build("gcn-amazon", device="meta")
    graph = conjoin.capture(work.model, work.batch, work.loss)
    found = []
    for ways in (2, 8):
        machine = parse_machine(f"dgx-h100:1x{ways}")
        found.append(predict(make_plan(graph, machine, "vertex-parallel"), machine, CostModel()))
    assert found[1].seconds < 0.6 * found[0].seconds and found[1].memory.peak < 0.6 * found[0].memory.peak


def test_a_plan_is_verified_saved_and_read_again(tmp_path: Path) -> None:
    work = zoo.build("gcn:tiny")
    plan = conjoin.plan(work.model, work.batch, "local:2", loss=work.loss, strategy="vertex-parallel")
    assert conjoin.verify_plan(plan, work.model, work.batch, loss=work.loss, num_steps=2).passed
    path = tmp_path / "plan.json"
    plan.save(path)
    assert conjoin.load_plan(path) == plan
    unseen = zoo.build("gcn:tiny", device="meta")  # its edges are not known, and it is the same model
    planned = conjoin.plan(unseen.model, unseen.batch, "local:2", loss=unseen.loss, strategy="vertex-parallel")
    assert planned.model == plan.model
    assert conjoin.verify_plan(planned, work.model, work.batch, loss=work.loss, num_steps=1).passed
