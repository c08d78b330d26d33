"""Aggregation over graphs against torch's own scattering, by compiled kernels and without; bad graphs are refused."""

from __future__ import annotations

import weakref

import numpy
import pytest
import torch
from torch import Tensor

from conjoin.errors import UsageError
from conjoin.ops import (
    AGGREGATE,
    AGGREGATE_ONCE,
    EDGE_SOFTMAX,
    Call,
    TensorType,
    aggregation,
    bytes_read,
    edges,
    find_operator,
    find_spec,
    flops,
)
from conjoin.ops.aggregation import window_of
from conjoin.ops.compiled_kernels import compiled_kernels
from conjoin.ops.edges import edges_of

REDUCED = {"sum": "sum", "mean": "mean", "max": "amax"}
GRAPHS = {
    "plain": ([0, 1, 2, 3, 1], [1, 2, 3, 0, 3]),
    "loops": ([0, 0, 1, 2, 2, 2], [0, 0, 1, 2, 0, 0]),
    "one hub": ([0, 1, 2, 3, 4], [4] * 5),
    "no edges": ([], []),
}


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled" and compiled_kernels() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(aggregation, "_FEW", 0 if request.param == "compiled" else 1 << 60)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randint(-3, 4, shape).to(dtype).requires_grad_()  # small whole numbers: there are ties


def scattered(x: Tensor, source: Tensor, target: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    rows = x[source]
    if weight is not None:
        rows = rows * weight.reshape(*weight.shape, *(1,) * (rows.dim() - weight.dim()))
    at = target.reshape(-1, *(1,) * (x.dim() - 1)).expand_as(rows)
    return torch.zeros(5, *x.shape[1:], dtype=x.dtype).scatter_reduce(0, at, rows, REDUCED[reduce], include_self=False)


def same(got: Tensor, want: Tensor, *operands: Tensor) -> None:
    torch.testing.assert_close(got, want)
    gradient = torch.randn_like(want)
    pairs = zip(*(torch.autograd.grad(one, operands, gradient, allow_unused=True) for one in (got, want)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_aggregation_is_scattering(graph: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, target = (torch.tensor(ends, dtype=torch.long) for ends in GRAPHS[graph])
    for shape, heads in (((3,), None), ((3,), ()), ((2, 3), (2,)), ((), ())):
        x, weight = drawn(5, *shape, dtype=dtype), None if heads is None else drawn(len(source), *heads, dtype=dtype)
        for reduce in REDUCED if weight is None else ("sum", "mean"):
            got = find_operator(AGGREGATE)(x, source, target, weight, 5, reduce)
            same(got, scattered(x, source, target, weight, reduce), *(t for t in (x, weight) if t is not None))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_of_any_width(dtype: torch.dtype) -> None:
    """Around what processors add up at once: whole vectors, and a last one that covers some of the one before."""
    source, target = (torch.tensor(ends) for ends in GRAPHS["loops"])
    for width in (2, 3, 4, 7, 8, 9, 15, 16, 17, 41, 64, 65, 127, 128, 129, 144, 300):
        for heads in ((), (2,)):
            x, weight = drawn(5, *heads, width, dtype=dtype), drawn(len(source), *heads, dtype=dtype)
            got = find_operator(AGGREGATE)(x, source, target, weight, 5, "sum")
            same(got, scattered(x, source, target, weight, "sum"), x, weight)


@pytest.mark.usefixtures("way")
def test_bfloat16_is_aggregated_too() -> None:
    x, ends = drawn(5, 3, dtype=torch.bfloat16), torch.tensor([0, 1, 2])
    same(find_operator(AGGREGATE)(x, ends, ends, None, 5, "sum"), scattered(x, ends, ends, None, "sum"), x)


def test_a_graph_that_is_written_to_is_another_graph() -> None:
    x, source, target = torch.arange(3.0)[:, None], torch.tensor([0, 1]), torch.tensor([2, 2])
    sums = [find_operator(AGGREGATE)(x, source, target, None, 3, "sum")[2].item()]
    source[1] = 2
    sums.append(find_operator(AGGREGATE)(x, source, target, None, 3, "sum")[2].item())
    assert sums == [1.0, 2.0]


def test_weights_are_ordered_once_while_they_stay_the_same() -> None:
    source, target, x = torch.tensor([2, 0, 1, 2]), torch.tensor([1, 2, 0, 0]), drawn(5, 3)
    order, weight = edges_of(source, target, window_of(x, 5, ())).by_target, torch.rand(4).double()

    def summed(weight: Tensor) -> Tensor:
        made = find_operator(AGGREGATE)(x, source, target, weight, 5, "sum")
        same(made, scattered(x, source, target, weight, "sum"), x)
        return order.of_edges(weight, stay=True)

    first = summed(weight)
    assert summed(weight) is first and summed(weight[:]) is first
    weight.mul_(2)
    second = summed(weight)
    assert second is not first and summed(weight.clone()) is not second
    gone = weakref.ref(summed(weight))
    del weight
    assert gone() is None  # held by nobody else, it is not held here


def test_a_graph_in_an_array_that_is_filled_again_is_another_graph() -> None:
    x, sources = torch.arange(3.0)[:, None], numpy.array([0, 1])
    sums = []
    for second in (1, 2):
        sources[1] = second  # no tensor counts this
        ends = torch.from_numpy(sources), torch.tensor([2, 2])
        sums += [find_operator(made)(x, *ends, None, 3, "sum")[2].item() for made in (AGGREGATE, AGGREGATE_ONCE)]
    assert sums == [1.0, 1.0, 2.0, 2.0]


def test_features_in_an_array_and_sums_that_were_written_to_are_made_anew() -> None:
    features, ends = numpy.ones((3, 1), numpy.float32), torch.tensor([0, 1])
    sums = []
    for _ in range(3):
        made = aggregation.aggregate_once(torch.from_numpy(features), ends, ends, None, 3, "sum")
        sums.append(float(made.sum()))
        features *= 2
        made.add_(1)
    assert sums == [2.0, 4.0, 8.0]
    kept = aggregation.aggregate_once(torch.from_numpy(features), ends, ends, None, 3, "sum")
    assert aggregation.aggregate_once(torch.from_numpy(features), ends, ends, None, 3, "sum") is kept


@pytest.mark.parametrize("reduce", ["sum", "mean", "attention"])
def test_what_is_kept_in_a_test_serves_training(reduce: str) -> None:
    ends = torch.tensor([3, 0, 1, 1]), torch.tensor([1, 0, 3, 2])
    weight = torch.ones(4, 2, requires_grad=True)

    def loss() -> Tensor:
        if reduce == "attention":
            return aggregation.graph_attention(weight[..., None], weight, weight, *ends, 4, 0.2).square().sum()
        fixed = aggregation.aggregate_once(torch.ones(4, 2), *ends, None, 4, reduce)
        return (aggregation.aggregate(fixed * weight, *ends, None, 4, reduce) * fixed).sum()

    with torch.inference_mode():
        want = loss()
    made = loss()
    made.backward()
    torch.testing.assert_close(made.detach(), want.clone())
    assert weight.grad is not None and weight.grad.isfinite().all()


def test_edges_that_are_made_in_every_step_are_not_all_held() -> None:
    x, ends = torch.ones(4, 1), torch.tensor([[0, 1, 3], [3, 2, 1]])
    for inference in (False, True):
        with torch.inference_mode(inference):
            for _ in range(5):
                made = ends + 0
                find_operator(AGGREGATE)(x, made[0], made[1], None, 4, "sum")
    graphs = [seen for seen in edges._SEEN._seen.values() if torch.equal(seen.ends[0], ends[0])]
    assert len(graphs) == 1


def test_of_large_graphs_the_last_four_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for every use; the same again is made no second time."""
    monkeypatch.setattr(edges, "_SEEN", edges._Memory(64, 1000))
    made: list[int] = []
    graphs = [torch.randint(0, 9, (2, 100 + i)) for i in range(7)]
    small = torch.randint(0, 9, (2, 3))
    for number in (0, 1, 2, 3, 4, 5, 6, 6, 5, 4):
        for use in ("one", "another"):
            edges.of_graph(*graphs[number], use, lambda *_, number=number: made.append(number))
    assert made == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    held = {len(seen.ends[0]) for seen in edges._SEEN._seen.values()}
    assert held == {104, 105, 106} or held == {103, 104, 105, 106}
    for _ in range(70):
        edges.of_graph(*small.clone(), "one", lambda *_: None)
    assert len(edges._SEEN._seen) <= 9, "equal graphs are one"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [1, 3])
def test_weights_of_other_edges_are_refused(count: int) -> None:
    ends = torch.tensor([0, 1])
    with pytest.raises(UsageError, match=rf"2 edges .* \[{count}\]\. .* as many weights as edges"):
        find_operator(AGGREGATE)(torch.ones(2, 1), ends, ends, torch.ones(count), 2, "sum")


@pytest.mark.usefixtures("way")
def test_rows_of_no_features() -> None:
    ends = torch.tensor([0, 1])
    assert find_operator(AGGREGATE)(torch.ones(2, 0), ends, ends, None, 3, "mean").shape == (3, 0)


def test_a_graph_is_ordered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    ordered = aggregation.Edges._order
    monkeypatch.setattr(aggregation.Edges, "_order", lambda *args: made.append(args) or ordered(*args))
    x, ends = drawn(7, 2), torch.randint(0, 7, (2, 30))
    for graph in (ends, ends, ends.clone()):
        find_operator(AGGREGATE)(x, graph[0], graph[1], None, 7, "sum").sum().backward()
    assert len(made) == 2  # by target and by source


@pytest.mark.parametrize("wrong", [-1, 5])
def test_edges_to_nowhere_are_refused(wrong: int) -> None:
    x, good = torch.zeros(5, 1), torch.tensor([0, 1])
    with pytest.raises(UsageError, match=rf"{wrong}.* Its vertices are 0 to 4, .* Correct the edges"):
        find_operator(AGGREGATE)(x, torch.tensor([0, wrong]), good, None, 5, "sum")


def test_scores_of_edges_are_softmax_of_each_vertex() -> None:
    scores, target = drawn(6, 2), torch.tensor([0, 2, 2, 0, 2, 4])
    got = find_operator(EDGE_SOFTMAX)(scores, target, 5)
    want = torch.empty_like(scores)
    for v in (0, 2, 4):
        want[target == v] = scores[target == v].softmax(0)
    same(got, want, scores)


def test_work_is_that_of_the_edges_here() -> None:
    spec, ends = find_spec(AGGREGATE), TensorType((100,), torch.int64)
    assert spec is not None
    whole = Call(AGGREGATE, (TensorType((20, 8), torch.float32), ends, ends, None, 20, "sum", (), ()))
    half = Call(AGGREGATE, (TensorType((20, 8), torch.float32), ends, ends, None, 10, "sum", (0, 20, 10, 20), ()))
    assert (flops(spec, whole), flops(spec, half)) == (1600, 800)
    assert (bytes_read(spec, whole), bytes_read(spec, half)) == (100 * (8 * 4 + 4), 50 * (8 * 4 + 4))


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_products_with_a_sparse_matrix(weighted: bool) -> None:
    """As on a GPU, whose kernel is not judged here."""
    x, weight = drawn(6, 4).detach(), drawn(9).detach() if weighted else None
    source, target = torch.randint(6, (9,)), torch.randint(5, (9,))
    order = edges.edges_of(source, target, edges.EdgeWindow(0, 6, 0, 5, 6, 5)).by_target
    ordered = None if weight is None else order.of_edges(weight)
    made = aggregation._sparse_product(x, order, ordered)
    torch.testing.assert_close(made, scattered(x, source, target, weight, "sum"))
