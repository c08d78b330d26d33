"""Models that multiply with sparse matrices: torch's own products in double precision are the judge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.frontends.neighbour_matrices import matrices_of_edges
from conjoin.ops import AGGREGATE
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import alone, run_ranks
from conjoin.runtime.state.storage import Store
from tests.runtime.hand_plans import by_strategy, module_on
from tests.runtime.random_graphs import Sample

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
VERTICES, EDGES = 9, 26
loss = nn.functional.cross_entropy
Product = Callable[[Any, Tensor], Tensor]
PRODUCTS: dict[str, Product] = {
    "@": lambda a, h: a @ h,
    "sparse.mm": torch.sparse.mm,
    "spmm": torch.spmm,
    "mm": torch.mm,
    "turned": lambda a, h: a.t() @ h,
    "method": lambda a, h: a.mm(h),
    "addmm": lambda a, h: torch.sparse.addmm(h, a, h, beta=0.5, alpha=2.0),
    "degrees": lambda a, h: (a @ h) / (a @ torch.ones_like(h[:, 0])).add(3).unsqueeze(-1),
    "dense": lambda a, h: a.to_dense() @ h + a @ h,
}


class Network(nn.Module):
    def __init__(self, product: Product) -> None:
        super().__init__()
        self.first, self.second, self.product = nn.Linear(5, 8), nn.Linear(8, 3), product

    def forward(self, x: Tensor, adjacency: Any) -> Tensor:
        return self.product(adjacency, self.second(torch.relu(self.product(adjacency, self.first(x)))))


class Made(Network):
    """Of matrices that are made on the way."""

    def forward(self, x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:  # type: ignore[override]
        size = len(x), len(x)
        if len(rows) == len(columns):
            return super().forward(x, torch.sparse_coo_tensor(torch.stack((rows, columns)), values, size))
        return super().forward(x, torch.sparse_csr_tensor(rows, columns, values, size))


def matrix(kind: str, edges: int = EDGES) -> Tensor:
    """Some entries twice, a row and a column without any."""
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(VERTICES - 1, (2, edges), generator=generator)
    values = torch.rand(edges, generator=generator, dtype=torch.float64)
    made = torch.sparse_coo_tensor(indices, values, (VERTICES, VERTICES))
    match kind:
        case "coo":
            return made
        case "coalesced":
            return made.coalesce()
        case "csr":
            return made.coalesce().to_sparse_csr()
        case "csc":
            return made.coalesce().to_sparse_csc()
    made = made.coalesce().to_sparse_csr()
    parts = made.crow_indices().int(), made.col_indices().int(), made.values()
    return torch.sparse_csr_tensor(*parts, made.shape)


def batch_of(*graph: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(VERTICES, 5, generator=generator, dtype=torch.float64)
    return x, *graph, torch.randint(3, (VERTICES,), generator=generator)


def trained(model: nn.Module, step: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> tuple[list[float], Any]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(2):
        optimizer.zero_grad()
        made = step(*batch)
        made.backward()
        losses.append(made.item())
        optimizer.step()
    return losses, {name: p.detach().as_subclass(Tensor) for name, p in model.named_parameters()}


def on_rank(plan: Any, sample: Sample, ranks: Communicator) -> tuple[list[float], Any]:
    module = module_on(plan, sample, ranks)
    return trained(module, module, sample.inputs)


def check(model: nn.Module, batch: tuple[Tensor, ...], strategies: tuple[str, ...], count: int = 3) -> None:
    model = model.double()
    sample = Sample(capture(model, batch, loss), model, batch)
    assert AGGREGATE in {node.op for node in sample.graph.nodes}
    plain = copy.deepcopy(model)
    want = trained(plain, lambda *given: loss(plain(*given[:-1]), given[-1]), batch)
    for strategy in strategies:
        plan = by_strategy(sample, strategy, count)
        for losses, weights in run_ranks(plan.mesh, partial(on_rank, plan, sample)):
            assert losses == pytest.approx(want[0], rel=1e-9)
            torch.testing.assert_close(weights, want[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_a_matrix_of_the_batch(name: str) -> None:
    torch.manual_seed(0)
    check(Network(PRODUCTS[name]), batch_of(matrix("coalesced")), ("vertex-parallel",))


@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "csr of 32 bits"])
def test_matrices_in_other_layouts(kind: str) -> None:
    torch.manual_seed(0)
    check(Network(torch.sparse.mm), batch_of(matrix(kind)), ("vertex-parallel",))


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_matrices_that_are_made_on_the_way(kind: str) -> None:
    torch.manual_seed(0)
    given = matrix(kind)
    if kind == "csr":
        parts = given.crow_indices(), given.col_indices(), given.values()
    else:
        parts = *given._indices(), given._values()  # type: ignore[assignment]
    check(Made(torch.sparse.mm), batch_of(*parts), ("vertex-parallel",))


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_entries_have_gradients(kind: str) -> None:
    torch.manual_seed(0)
    model, (x, adjacency, labels) = Network(torch.sparse.mm).double(), batch_of(matrix(kind))
    ours, theirs = (adjacency.clone().requires_grad_() for _ in range(2))
    sample = Sample(capture(model, (x, ours, labels), loss), model, ())
    plan = by_strategy(sample, "single", 1)
    run_ranks(plan.mesh, lambda ranks: module_on(plan, sample, ranks)(x, ours, labels).backward())
    loss(model(x, theirs), labels).backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())


def test_another_matrix_in_every_step_and_one_that_is_written_to() -> None:
    torch.manual_seed(0)
    model, (x, first, labels) = Network(torch.sparse.mm).double(), batch_of(matrix("csr"))
    sample = Sample(capture(model, (x, first, labels), loss), model, ())
    plan = by_strategy(sample, "single", 1)

    def program(ranks: Communicator) -> None:
        module = module_on(plan, sample, ranks)
        columns = first.col_indices()
        for change in (lambda: None, lambda: columns.copy_(columns.roll(1)), lambda: first.values().mul_(3)):
            change()
            assert torch.allclose(module(x, first, labels), loss(model(x, first), labels))

    with torch.no_grad():
        run_ranks(plan.mesh, program)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda a, h: torch.sparse.softmax(a, 1).to_dense() @ h, "sparse"),
        (lambda a, h: h.t() @ a, "sparse"),
        (lambda a, h: (a * 2.0) @ h, "sparse"),
        (lambda a, h: a.crow_indices()[:1] + h, "whose crow_indices is asked for, is sparse"),
        (lambda a, h: a @ h[:-1], "is multiplied with a tensor of shape (8, 8)"),
    ],
)
def test_other_uses_are_told(use: Product, what: str) -> None:
    with pytest.raises(CaptureError) as told:
        capture(Network(use).double(), batch_of(matrix("csr")), loss)
    assert what in str(told.value) and str(told.value).split("\n")[0].count(". ") == 2


def test_other_threads_make_matrices_as_ever_while_one_traces() -> None:
    """Whatever the order in which tracing begins and ends."""
    plain = torch.sparse_coo_tensor
    at = torch.tensor([[0], [1]]), torch.ones(1), (2, 2)
    traced, other = matrices_of_edges(), matrices_of_edges()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        one.submit(traced.__enter__).result()
        assert isinstance(torch.sparse_coo_tensor(*at, check_invariants=True), Tensor)
        two.submit(other.__enter__).result()
        one.submit(traced.__exit__, None, None, None).result()
        assert isinstance(one.submit(partial(torch.sparse_coo_tensor, check_invariants=True), *at).result(), Tensor)
        assert not isinstance(two.submit(lambda: torch.sparse_coo_tensor(*at)).result(), Tensor)
        two.submit(other.__exit__, None, None, None).result()
    assert torch.sparse_coo_tensor is plain


def test_a_matrix_on_the_host_stays_there() -> None:
    torch.manual_seed(0)
    model, batch = Network(torch.sparse.mm).double(), batch_of(matrix("csr"))
    plan = by_strategy(Sample(capture(model, batch, loss), model, ()), "single+offload=inputs", 1)
    module = ParallelModule(plan, Store(plan, 0, torch.device("cpu")), alone(plan.mesh))
    module.store.fill(model)
    assert torch.allclose(module(*batch), loss(model(*batch[:-1]), batch[-1]))
    module.store.device = torch.device("meta")
    _, adjacency, labels = module.placed(batch)
    assert labels.is_meta and not adjacency.is_meta and torch.equal(adjacency.to_dense(), batch[1].to_dense())


def test_a_plan_is_verified_beside_the_model_itself() -> None:
    import conjoin

    torch.manual_seed(0)
    model, batch = Network(torch.sparse.mm).double(), batch_of(matrix("csr"))
    plan = conjoin.plan(model, batch, "local:2", loss=loss, strategy="vertex-parallel")
    assert conjoin.verify_plan(plan, model, batch, loss=loss, num_steps=2).passed
    names = {leaf.name for leaf in plan.graph.leaves}
    assert {"adjacency.indices", "adjacency.values"} <= names
