"""Inputs that lie on the host during a step: the numbers of one device, and no more than two blocks on it."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conjoin.comm import offloads
from conjoin.cost import CostModel
from conjoin.errors import PlanError, StrategyError, UsageError
from conjoin.frontends import capture
from conjoin.ir import (
    STREAM,
    Graph,
    MemoryAction,
    Plan,
    Segment,
    check_plan,
    host_inputs,
    operators_of,
    plan_from_json,
    plan_to_json,
    recompute_actions,
)
from conjoin.machine import parse_machine
from conjoin.ops import aggregation
from conjoin.ops.compiled_kernels import is_compiled_for
from conjoin.report import diff_plans, explain, explanation_text
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import alone
from conjoin.runtime.state.storage import Store
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import Wish, find_plan, make_pipeline, make_plan
from conjoin.sim import MachinePrices, Wanted, measure_memory, predict, simulate
from tests.ir.wording import assert_three_sentences
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample
from tests.runtime.test_halo import alone as alone_on
from tests.runtime.test_halo import check, together
from tests.runtime.test_halo import edges as edges_of_kind
from tests.sim.test_memory import Storages
from tests.sim.test_offloads import OnDevice
from zoo.gnn import DeepGcn, Gat, Gcn, Gin, GnnConfig, GraphSage

V, E = 232_965, 114_848_857
"""Vertices and edges of Reddit's graph."""
SIZES = GnnConfig(features=6, classes=4, degree=4, hidden=8, layers=3, heads=2)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a few vertices go in several blocks, too."""
    monkeypatch.setattr(offloads, "BLOCK_BYTES", 512)


def sample(make: Callable[[GnnConfig], nn.Module], vertices: int = 40, edges: int = 160) -> tuple[Any, Any, Graph]:
    """A model in double precision, a graph with isolated vertices, loops and edges that are there twice, and both
    captured."""
    model, batch = workload(make, vertices, edges)
    return model, batch, graph_of(make, vertices, edges)


@cache
def graph_of(make: Callable[[GnnConfig], nn.Module], vertices: int, edges: int) -> Graph:
    return capture(*workload(make, vertices, edges), F.cross_entropy)


def workload(make: Callable[[GnnConfig], nn.Module], vertices: int, edges: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = make(SIZES).double()
    edge_index = torch.randint(vertices - 5, (2, edges))
    edge_index[:, :3] = edge_index[:, 3:6]
    edge_index[0, 7:9] = edge_index[1, 7:9]
    weights = (torch.rand(edges, dtype=torch.float64),) if make in (Gcn, DeepGcn) else ()
    x = torch.randn(vertices, SIZES.features, dtype=torch.float64)
    return model, (x, edge_index, *weights, torch.randint(4, (vertices,)))


def on_host(graph: Graph, strategy: str = "single", ranks: int = 1) -> Plan:
    """A plan with all that may lie on the host there, read from its file's text."""
    return plan_from_json(plan_to_json(make_plan(graph, parse_machine(f"local:{ranks}"), f"{strategy}+offload=inputs")))


class Greatest(nn.Module):
    """Of each vertex's neighbours, among them many equal ones."""

    def __init__(self, config: GnnConfig) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(config.features, 5), nn.Linear(5, config.classes)

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x_VF = torch.relu(layer(x_VF))
            at = edge_index_2E[1].unsqueeze(-1).expand(-1, x_VF.shape[1])
            read = x_VF[edge_index_2E[0]]
            x_VF = torch.zeros_like(x_VF).scatter_reduce(0, at, read, "amax", include_self=False)
        return x_VF


class Looped(nn.Module):
    """Attention of PyTorch Geometric's, with an edge from each vertex to itself."""

    def __init__(self, config: GnnConfig) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses calls of torch's that are to go
            make = importlib.import_module("torch_geometric.nn").GATConv
        self.first, self.second = make(config.features, 4, heads=2), make(8, config.classes)

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor) -> Tensor:
        made: Tensor = self.second(torch.relu(self.first(x_VF, edge_index_2E)), edge_index_2E)
        return made


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Gcn, {"x_VF", "edge_index_2E", "weight_E"}),
        (DeepGcn, {"x_VF", "edge_index_2E", "weight_E"}),
        (Gin, {"edge_index_2E"}),
        (GraphSage, {"edge_index_2E"}),
        (Gat, {"x_VF", "edge_index_2E"}),
        (Greatest, {"x_VF", "edge_index_2E"}),
        (Looped, {"x_VF", "edge_index_2E"}),
    ],
)
def test_training_is_as_on_one_device(make: Callable[[GnnConfig], nn.Module], names: set[str]) -> None:
    model, batch, graph = sample(make)
    plan = on_host(graph)
    assert host_inputs(plan) == names
    assert verify_in_process(Case(plan, graph, model, batch), 2).passed


EVERYTHING = {"x_VF", "edge_index_2E", "weight_E"}


@pytest.mark.parametrize(
    ("make", "ranks", "names"),
    [
        (Gcn, 1, EVERYTHING), (Gcn, 2, EVERYTHING), (Gcn, 3, EVERYTHING), (Gcn, 4, EVERYTHING),
        (Gin, 3, {"edge_index_2E"}), (GraphSage, 2, {"edge_index_2E"}), (GraphSage, 4, {"edge_index_2E"}),
        (Gat, 2, {"x_VF", "edge_index_2E"}), (Gat, 4, {"x_VF", "edge_index_2E"}),
        (Greatest, 3, {"x_VF", "edge_index_2E"}), (Looped, 3, {"x_VF", "edge_index_2E"}),
    ],
)  # fmt: skip
def test_parts_of_the_vertices_train_as_one_device(
    make: Callable[[GnnConfig], nn.Module], ranks: int, names: set[str]
) -> None:
    """Every rank has its edges, in the order of its own vertices and of the rows that it gets, on its host."""
    model, batch, graph = sample(make)
    plan = on_host(graph, "vertex-parallel", ranks)
    assert host_inputs(plan) == names
    assert verify_in_process(Case(plan, graph, model, batch), 2).passed


@pytest.mark.parametrize("kind", ["one corner", "star", "one loop"])
def test_parts_without_any_edge(kind: str) -> None:
    """Edges are few, and what others send is nothing."""
    model, batch, _ = sample(Gat)
    batch = batch[0], edges_of_kind(kind, len(batch[0])), batch[-1]
    graph = capture(model, batch, F.cross_entropy)
    plan = on_host(graph, "vertex-parallel", 4)
    assert "edge_index_2E" in host_inputs(plan)
    assert verify_in_process(Case(plan, graph, model, batch), 1).passed


def on_a_process(plan: Plan, given: Sample, num_bytes: int, communicator: Communicator) -> tuple[tuple[Any, ...], int]:
    peak = peak_on_a_process(plan, given, num_bytes, communicator)
    return together(plan, given, 2, communicator), peak


def test_on_processes_parts_train_as_the_plain_model_within_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloads, "BLOCK_BYTES", 1 << 14)
    model, batch, graph = sample(Gcn, 500, 7500)
    given, plan = Sample(graph, model, batch), on_host(graph, "vertex-parallel", 2)
    found = run_processes(plan.mesh, partial(on_a_process, plan, given, 1 << 14), tmp_path)
    check(plan, alone_on(given, F.cross_entropy, 2), [trained for trained, _ in found])
    told = measure_memory(simulate(plan, Wanted()).program, "sgd", "cpu")
    if is_compiled_for(batch[0]):
        assert told.peak == pytest.approx(max(peak for _, peak in found), rel=0.1)


def test_features_come_to_every_rank_from_its_host() -> None:
    model, batch, graph = sample(Gcn)
    plan = on_host(graph, "data-parallel", 3)
    assert "x_VF" in host_inputs(plan)
    assert verify_in_process(Case(plan, graph, model, batch), 2).passed


def test_with_segments_that_are_run_again() -> None:
    model, batch, graph = sample(DeepGcn)
    plan = on_host(graph)
    half = Segment(0, len(operators_of(plan.graph)) // 2)
    plan = check_plan(replace(plan, memory=(*plan.memory, *recompute_actions(plan.graph, [half]))))
    assert verify_in_process(Case(plan, graph, model, batch), 2).passed


class Both(nn.Module):
    """Rows of two inputs together, a layer with a bias, and an operand that is cut with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(7, 5), nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.cat((x, y * 2), dim=1))) * self.scale + z


def test_operators_over_rows_of_any_model() -> None:
    torch.manual_seed(0)
    model, draw = Both().double(), partial(torch.randn, dtype=torch.float64)
    batch = (draw(30, 3), draw(30, 4), draw(30, 5), draw(30, 5))
    graph = capture(model, batch, F.mse_loss)
    plan = on_host(graph)
    assert {"x", "y", "z"} <= host_inputs(plan)
    assert verify_in_process(Case(plan, graph, model, batch), 2).passed


def module_of(plan: Plan, model: nn.Module) -> ParallelModule:
    store = Store(plan, 0, torch.device("cpu"))
    store.fill(model)
    return ParallelModule(plan, store, alone(plan.mesh))


def peak_of(plan: Plan, model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """The bytes that the second step has on its device; what is left of the first is the order of edges on the host."""
    return peak_on(module_of(plan, model), batch)


def peak_on(module: ParallelModule, batch: tuple[Tensor, ...], num_steps: int = 1) -> int:
    """The least of some steps after the first."""
    with Storages() as first:
        module(*batch).backward()
        module.zero_grad()
    gc.collect()
    left = [torch.empty(0).set_(storage) for storage in first.alive]
    hosts = [x for x, part in zip(batch, module.input_parts(), strict=True) if part.on_host]
    peaks = []
    for _ in range(num_steps):
        with OnDevice([*left, *hosts], *(p.as_subclass(Tensor) for p in module.parameters()), *batch) as storages:
            module(*batch).backward()
        peaks.append(storages.peak)
        module.zero_grad()
        gc.collect()
    return min(peaks)


def peak_of_a_rank(plan: Plan, given: Sample, communicator: Communicator) -> int:
    """Of a step in which nobody came late: what is sent is held until it is taken."""
    module, parts = module_on(plan, given, communicator), list[Tensor]()
    for x, part in zip(given.inputs, module.input_parts(), strict=True):
        parts.append(x[tuple(slice(*span) for span in part.region)].clone())
    return peak_on(module, tuple(parts), num_steps=5)


def peak_on_a_process(plan: Plan, given: Sample, num_bytes: int, communicator: Communicator) -> int:
    offloads.BLOCK_BYTES, aggregation._FEW = num_bytes, 0  # what torch does itself makes a row for every edge
    gc.freeze()  # what was imported is not looked through for cycles between steps
    return peak_of_a_rank(plan, given, communicator)


@pytest.mark.parametrize(("make", "vertices", "block"), [(Gat, 250, 8_000), (Greatest, 2000, 256_000)])
def test_what_is_told_of_a_rank_is_what_lives_on_its_device(
    make: Callable[[GnnConfig], nn.Module], vertices: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processes: where ranks are threads, torch ended the process while both counted storages of each other."""
    monkeypatch.setattr(offloads, "BLOCK_BYTES", block)
    model, batch, graph = sample(make, vertices, 15 * vertices)
    if not is_compiled_for(batch[0]):
        pytest.skip("no C compiler")
    plan, given = on_host(graph, "vertex-parallel", 2), Sample(graph, model, batch)
    told = measure_memory(simulate(plan, Wanted()).program, "sgd", "cpu")
    peaks = run_processes(plan.mesh, partial(peak_on_a_process, plan, given, block), tmp_path)
    assert told.peak == pytest.approx(max(peaks), rel=0.1)


@pytest.mark.parametrize(("make", "vertices"), [(Gcn, 8000), (Gat, 400), (Greatest, 4000)])
def test_what_is_told_of_the_device_is_what_lives_there(
    make: Callable[[GnnConfig], nn.Module], vertices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of features and edges no more than two blocks; beside that as much as where they are on the device."""
    monkeypatch.setattr(offloads, "BLOCK_BYTES", 2**5 * vertices)
    model, batch, graph = sample(make, vertices, 15 * vertices)
    if not is_compiled_for(batch[0]):
        pytest.skip("torch makes a row for every edge of a block")
    plain, moved = make_plan(graph, parse_machine("local:1"), "single"), on_host(graph)
    told = [measure_memory(simulate(plan, Wanted()).program, "sgd", "cpu") for plan in (plain, moved)]
    given = sum(x.nbytes for x in batch)
    assert told[0].inputs == given and told[1].inputs == batch[-1].nbytes
    assert told[1].on_host == given - batch[-1].nbytes
    assert told[1].peak == pytest.approx(peak_of(moved, model, batch), rel=0.1)
    assert told[1].peak < told[0].peak - 0.9 * told[1].on_host


def reddit() -> tuple[list[Tensor], Graph]:
    """ROC's Figure 4.10: a GCN of widths 602-256-41 on a graph of the size of Reddit's."""
    with torch.device("meta"):
        model = Gcn(GnnConfig(602, 41, 492))
        kinds = (((V, 602), torch.float32), ((2, E), torch.int64), ((E,), torch.float32), ((V,), torch.int64))
        batch = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    return batch, capture(model, tuple(batch), F.cross_entropy)


def test_copies_are_counted_and_go_beside_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloads, "BLOCK_BYTES", 2**26)
    batch, graph = reddit()
    machine = parse_machine("p100-cluster:1x1")
    plain, moved = (make_plan(graph, machine, f"single{more}") for more in ("", "+offload=inputs"))
    steps = [simulate(plan, MachinePrices(machine, CostModel())) for plan in (plain, moved)]
    brought = sum(
        task.sent for fragment in steps[1].program.unrolled() for task in fragment if task.name == "from host"
    )
    rows, edges = batch[0].nbytes, 8 * E + 8 * V  # forward and backward, of both layers
    assert abs(brought - 2 * rows - 4 * edges) < 1e-3 * brought
    assert brought / 32e9 < steps[1].seconds < steps[0].seconds + brought / 8e9


def test_what_is_on_the_host_is_told() -> None:
    _, _, graph = sample(Gcn)
    plain, moved = make_plan(graph, parse_machine("local:1"), "single"), on_host(graph)
    assert "3 inputs on the host during the step, read block by block" in explanation_text(explain(moved))
    assert diff_plans(moved, moved).equal and len(diff_plans(plain, moved).memory) == 3


def test_a_batch_is_placed_without_what_stays_on_the_host() -> None:
    model, batch, graph = sample(Gcn)
    module = module_of(on_host(graph), model)
    module.store.device = torch.device("meta")
    x, edges, weight, labels = module.placed(batch)
    assert x is batch[0] and edges is batch[1] and weight is batch[2] and labels.is_meta
    with pytest.raises(UsageError, match="has it on the host during the step"):
        module(x.to("meta"), edges, weight, labels)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("target", "does not read it row by row"),
        ("nothing", "is no input"),
        ("weight_E", "not all that is said of its edges does"),
    ],
)
def test_a_wrong_edit_is_told(name: str, why: str) -> None:
    _, _, graph = sample(Gcn)
    plan = make_plan(graph, parse_machine("local:1"), "single")
    with pytest.raises(PlanError, match=why) as caught:
        check_plan(replace(plan, memory=(MemoryAction(STREAM, name),)))
    assert str(caught.value).count(". ") == 2


def test_strategies_that_cannot_are_refused() -> None:
    _, _, graph = sample(Gcn)
    with pytest.raises(UsageError, match="pipeline was given offload=inputs"):
        make_pipeline(graph, parse_machine("local:2"), "pipeline:pp=2+offload=inputs")
    model, tokens = nn.Sequential(nn.Flatten(0), nn.Linear(12, 3)), torch.randn(3, 4)
    other = capture(model, (tokens, torch.randn(3)), F.mse_loss)
    with pytest.raises(StrategyError, match="on the host"):
        make_plan(other, parse_machine("local:1"), "single+offload=inputs")


@pytest.mark.parametrize("gib", [2.5, 0.85])
def test_a_search_puts_on_the_host_what_does_not_fit(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what has to be there: features stay on the device while there is room for them."""
    monkeypatch.setattr(offloads, "BLOCK_BYTES", 2**26)
    machine, (batch, graph) = parse_machine("p100-cluster:1x1"), reddit()
    assert sum(x.nbytes for x in batch) > 2.5 * 2**30
    found = find_plan(graph, machine, CostModel(), Wish("joint", 20.0, "adam", int(gib * 2**30))).plan
    assert isinstance(found, Plan)
    assert host_inputs(found) >= {"edge_index_2E", "weight_E"} and ("x_VF" in host_inputs(found)) == (gib < 1)
    told = predict(found, machine, CostModel(), "adam")
    assert told.memory.peak <= gib * 2**30
    everything = predict(make_plan(graph, machine, "single+offload=inputs"), machine, CostModel(), "adam")
    assert everything.memory.peak > gib * 2**30 or told.seconds <= everything.seconds


@pytest.mark.parametrize("place", [0, 2])
def test_an_input_that_is_written_to_before_the_backward_pass_is_told(place: int) -> None:
    """As torch tells of the plain model: blocks are read again there, and gradients would be of something else."""
    model, batch, graph = sample(Gcn)
    module, given = module_of(on_host(graph), model), [x.clone() for x in batch]
    loss = module(*given)
    given[place].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("place", [0, 2])
def test_inputs_on_the_host_have_no_gradients(place: int) -> None:
    model, batch, graph = sample(Gcn)
    module, given = module_of(on_host(graph), model), [x.clone() for x in batch]
    given[place].requires_grad_()
    with pytest.raises(UsageError, match="would never learn") as caught:
        module(*given)
    assert_three_sentences(caught.value)
    with torch.no_grad():
        assert module(*given).isfinite()


class Total(nn.Module):
    """The gradient that comes to what is read from the host is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.pow(x, self.scale).sum()


def test_gradients_of_gradients_are_refused() -> None:
    model, x = Total(), torch.rand(30, 6, dtype=torch.float64) + 1
    module = module_of(on_host(capture(model, (x,))), model)
    loss = module(x)
    (gradient,) = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    with pytest.raises(UsageError, match="gradient of a gradient") as caught:
        (loss + gradient.square().sum()).backward()
    assert_three_sentences(caught.value)
