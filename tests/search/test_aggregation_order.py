"""Whether neighbours are aggregated before a layer or after it: the library's rules, and the plain model as judge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conjoin import capture, plan
from conjoin.ir import Graph, LeafKind, Value
from conjoin.ops import AGGREGATE, AGGREGATE_ONCE, execute, map_tensors
from conjoin.rules import Index, Library
from conjoin.search import Wish
from conjoin.search.entries import make_variant
from conjoin.search.features_once import with_constants_once
from conjoin.search.rewrites import rewritten, ways_of

VERTICES, EDGES = 40, 400


class Aggregating(nn.Module):
    """One layer, and what vertices make of their neighbours, before or after it."""

    def __init__(self, inputs: int, outputs: int, first: bool, reduce: str) -> None:
        super().__init__()
        self.layer, self.first, self.reduce = nn.Linear(inputs, outputs, bias=first), first, reduce

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        rows = (x if self.first else self.layer(x))[edge_index[0]]
        zeros = x.new_zeros(len(x), rows.shape[1])
        if self.reduce == "mean":
            ends = edge_index[1][:, None].expand_as(rows)
            made = zeros.scatter_reduce(0, ends, rows, "mean", include_self=False)
        else:
            made = zeros.index_add(0, edge_index[1], rows * weight[:, None] if self.reduce == "weighted" else rows)
        return self.layer(made) if self.first else made


class WithGraph(nn.Module):
    """The same, with features and edges of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        x, edge_index, weight, _ = batch_of(inputs, outputs)
        self.inner = Aggregating(inputs, outputs, False, "weighted").double()
        for name, tensor in (("x", x), ("edge_index", edge_index), ("weight", weight)):
            self.register_buffer(name, tensor)

    def forward(self, factor: Tensor) -> Tensor:
        made: Tensor = self.inner(self.x, self.edge_index, self.weight)
        return made * factor


def batch_of(inputs: int, outputs: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(VERTICES, (2, EDGES), generator=generator)
    x = torch.randn(VERTICES, inputs, generator=generator, dtype=torch.float64)
    weight = torch.rand(EDGES, generator=generator, dtype=torch.float64)
    return x, edge_index, weight, torch.randint(outputs, (VERTICES,), generator=generator)


def order_of(graph: Graph) -> list[str]:
    """Of aggregation and the layer beside it, which a search may write as a product."""
    kinds = {AGGREGATE: AGGREGATE, AGGREGATE_ONCE: AGGREGATE_ONCE, "linear": "linear", "matmul": "linear"}
    return [kinds[node.op] for node in graph.nodes if node.op in kinds][-2:]


class Hidden(nn.Module):
    """Aggregation of what a layer made, whose gradient goes back through it."""

    def __init__(self, inputs: int, outputs: int, first: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(inputs, inputs), Aggregating(inputs, outputs, first, "weighted")

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = self.after(torch.relu(self.before(x)), edge_index, weight)
        return made


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(602, 128), (16, 256)])
def test_a_search_aggregates_the_shorter_rows(inputs: int, outputs: int, first: bool) -> None:
    with torch.device("meta"):
        model = Hidden(inputs, outputs, first)
        x, labels, weight = torch.empty(20_000, inputs), torch.empty(20_000, dtype=torch.int64), torch.empty(400_000)
        batch = (x, torch.empty(2, 400_000, dtype=torch.int64), weight, labels)
    made = plan(model, batch, "piz-daint:1", loss=nn.functional.cross_entropy, wish=Wish(budget=8))
    order = order_of(made.graph)
    assert order == (["linear", AGGREGATE] if inputs > outputs else [AGGREGATE, "linear"])
    applied = [each for each in made.substitutions if "aggregate" in each.name]
    assert len(applied) == ((inputs > outputs) == first)  # where it was written the other way round
    names = Library.shipped().by_name
    assert all(each.name.removesuffix("-back") in names and each.proof.startswith("definitions:") for each in applied)


@pytest.mark.parametrize("reduce", ["sum", "weighted", "mean"])
@pytest.mark.parametrize("first", [True, False])
def test_both_orders_train_as_the_plain_model_does(first: bool, reduce: str) -> None:
    torch.manual_seed(0)
    model, batch = Aggregating(5, 3, first, reduce).double(), batch_of(5, 3)
    graph = capture(model, batch, nn.functional.cross_entropy)
    ways = [way for way in ways_of(Library.shipped()) if "linear-aggregate" in way.rule.name]
    found = [made for way in ways if (made := rewritten(make_variant(graph), way, Index(graph))) is not None]
    (changed,) = (made for made in found if order_of(made.variant.graph) == order_of(graph)[::-1])
    assert changed.fault() == ""
    expected = nn.functional.cross_entropy(model(*batch[:3]), batch[3])
    weights = dict(model.named_parameters())
    given = {**dict(zip([leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)], batch, strict=True)), **weights}
    values = {Value(leaf): given[leaf.name] for leaf in changed.variant.graph.leaves}
    for node in changed.variant.graph.nodes:
        values[Value(node)] = execute(node.op, *map_tensors(node.op, node.args, values.__getitem__))
    loss = values[changed.variant.graph.outputs[0]]
    gradients = [torch.autograd.grad(each, list(weights.values())) for each in (expected, loss)]
    assert torch.allclose(loss, expected, rtol=1e-12, atol=0)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*gradients, strict=True))


def test_features_of_the_model_are_aggregated_once() -> None:
    torch.manual_seed(0)
    model, factor = WithGraph(8, 602), torch.ones(VERTICES, 1, dtype=torch.float64)
    graph = capture(model, (factor,))
    made, told = with_constants_once(graph)
    assert order_of(graph) == ["linear", AGGREGATE] and order_of(made) == [AGGREGATE_ONCE, "linear"]
    assert [each.proof.startswith("definitions:") for each in told] == [True, False]
    given = Aggregating(8, 602, False, "weighted")
    assert with_constants_once(capture(given.double(), batch_of(8, 602), nn.functional.cross_entropy))[1] == ()
