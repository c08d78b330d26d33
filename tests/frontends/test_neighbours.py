"""Models over edges captured as one call a layer; what only looks alike stays. The plain model is the judge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.frontends.halo_counts import PARTS, count_halos, nested
from conjoin.ops import AGGREGATE, EDGE_SOFTMAX, GRAPH_ATTENTION
from conjoin.runtime import to_module

V, E, F = 7, 20, 3


def spread(target: Tensor, rows: Tensor) -> Tensor:
    return target.view(-1, 1).expand_as(rows)


def softmax(scores: Tensor, target: Tensor) -> Tensor:
    peaks = torch.zeros(V, 2).scatter_reduce(0, spread(target, scores), scores, "amax", include_self=False)
    powers = (scores - peaks[target]).exp()
    return powers / scores.new_zeros(V, scores.shape[1]).index_add(0, target, powers)[target]


def mean_of(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_reduce(0, spread(target, x[source]), x[source], "mean", include_self=False)


def rounded(x: Tensor) -> Tensor:
    """What half precision holds exactly, with the gradient of x: sums of such are in full precision."""
    return x + (x.half().float() - x).detach()


KNOWN: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, s, t, w: torch.zeros_like(x).index_add(0, t, x[s]),
    "in place": lambda x, s, t, w: torch.zeros_like(x).index_add_(0, t, x.index_select(0, s) * w[:, None]),
    "weight first": lambda x, s, t, w: x.new_zeros(V, F).index_add(0, t, w.unsqueeze(-1) * x[s]),
    "scatter_add": lambda x, s, t, w: torch.zeros(V, F).scatter_add(0, t[:, None].expand(-1, F), x[s]),
    "mean": lambda x, s, t, w: torch.zeros_like(x).scatter_reduce(0, spread(t, x[s]), x[s], "mean", include_self=False),
    "amax": lambda x, s, t, w: torch.zeros_like(x).scatter_reduce(0, spread(t, x[s]), x[s], "amax", include_self=False),
    "amin": lambda x, s, t, w: torch.zeros_like(x).scatter_reduce(0, spread(t, x[s]), x[s], "amin", include_self=False),
    "index_reduce": lambda x, s, t, w: torch.zeros_like(x).index_reduce(0, t, x[s], "mean", include_self=False),
    "index_put": lambda x, s, t, w: torch.zeros_like(x).index_put((t,), x[s] * w[:, None], accumulate=True),
    "gather": lambda x, s, t, w: torch.zeros_like(x).index_add(0, t, x.gather(0, s[:, None].expand(-1, F))),
    "embedding": lambda x, s, t, w: torch.zeros_like(x).index_add(0, t, functional.embedding(s, x)),
    "of numbers": lambda x, s, t, w: torch.zeros(V).index_add(0, t, x.sum(1)[s] * w),
    "rows of half": lambda x, s, t, w: torch.zeros(V, F).index_add(0, t, rounded(x).half()[s] * w[:, None]),
    "weights of half": lambda x, s, t, w: torch.zeros(V, F).index_add(0, t, x[s] * rounded(w).half()[:, None]),
    "half when read": lambda x, s, t, w: torch.zeros(V, F).index_add(0, t, rounded(x).half()[s].float()),
    "in double": lambda x, s, t, w: torch.zeros(V, F).double().index_add(0, t, x[s].double() * w[:, None]).float(),
}
OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "added to others": lambda x, s, t, w: x.index_add(0, t, x[s]),
    "doubled": lambda x, s, t, w: torch.zeros_like(x).index_add(0, t, x[s], alpha=2),
    "of both ends": lambda x, s, t, w: torch.zeros_like(x).index_add(0, t, x[s] + x[t]),
    "not of rows": lambda x, s, t, w: torch.zeros_like(x).index_add(0, t, x[s].relu()),
    "mean with the zero": lambda x, s, t, w: torch.zeros_like(x).scatter_reduce(0, spread(t, x[s]), x[s], "mean"),
    "the last": lambda x, s, t, w: torch.zeros_like(x).index_put((t[:1],), x[s[:1]]),
    "gathered by columns": lambda x, s, t, w: torch.zeros_like(x).index_add(0, t[:F], x.gather(0, s[:F].expand(F, F))),
    "padded": lambda x, s, t, w: torch.zeros_like(x).index_add(0, t, functional.embedding(s, x, padding_idx=1)),
    "least with the zero": lambda x, s, t, w: torch.zeros_like(x).scatter_reduce(0, spread(t, x[s]), x[s], "amin"),
    "product": lambda x, s, t, w: x.new_zeros(V, F).index_reduce(0, t, x[s], "prod", include_self=False),
    "by columns": lambda x, s, t, w: torch.zeros_like(x).scatter_add(0, t[:F].expand(F, F), x[s[:F]]),
    "narrowed when read": lambda x, s, t, w: torch.zeros(V, F).half().index_add(0, t, x[s].half()).float(),
    "mean of whole numbers": lambda x, s, t, w: x * mean_of((x.detach() * 8).long(), s, t),
}


class Model(nn.Module):
    def __init__(self, made: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(F, F), made

    def forward(self, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
        return self.made(self.layer(x), edges[0], edges[1], weight)


def batch() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(V, F), torch.randint(V, (2, E)), torch.rand(E)


def same_as_plain(model: nn.Module, inputs: tuple[Tensor, ...], off: float = 1e-5) -> list[str]:
    plain, graph = copy.deepcopy(model), capture(model, inputs)
    made, want = to_module(graph, model)(*inputs), plain(*inputs)
    torch.testing.assert_close(made, want)
    for each in (made, want):
        each.square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=10 * off, atol=off)
    return [node.op for node in graph.nodes]


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", KNOWN)
def test_rows_that_are_put_together_are_one_call(name: str) -> None:
    ops = same_as_plain(Model(KNOWN[name]), batch(), off=1e-2 if "half" in name else 1e-5)
    assert ops.count(AGGREGATE) == 1 and not {"index.Tensor", "index_select", "index_add"} & set(ops)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_alike_stays(name: str) -> None:
    assert AGGREGATE not in same_as_plain(Model(OTHERS[name]), batch(), off=1e-2 if "narrowed" in name else 1e-5)


class InZeros(nn.Module):
    """A convolution whose messages are weighted in full precision, put together in zeros like its rows or messages."""

    def __init__(self, like_rows: bool) -> None:
        super().__init__()
        self.layer, self.like_rows = nn.Linear(F, F), like_rows

    def forward(self, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
        rows = self.layer(x)
        messages = rows[edges[0]] * weight[:, None]
        return (rows if self.like_rows else messages).new_zeros(V, F).index_add(0, edges[1], messages)


def test_rows_in_the_half_precision_of_autocast_are_one_call() -> None:
    model, inputs = InZeros(like_rows=False), batch()
    with torch.autocast("cpu", torch.bfloat16):
        graph, want = capture(model, inputs), model(*inputs)
    want.square().sum().backward()
    gradient, model.layer.weight.grad = model.layer.weight.grad, None
    made = to_module(graph, model)(*inputs)
    made.square().sum().backward()
    assert [node.op for node in graph.nodes].count(AGGREGATE) == 1 and made.dtype == want.dtype == torch.float32
    torch.testing.assert_close(made, want)
    torch.testing.assert_close(model.layer.weight.grad, gradient, rtol=2e-2, atol=1e-2)


def test_what_torch_does_not_put_together_is_told() -> None:
    """Autocast leaves `index_add` as it is, and torch refuses to add numbers to those of half precision."""
    model, inputs = InZeros(like_rows=True), batch()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="must have the same scalar type"):
            model(*inputs)
        with pytest.raises(CaptureError, match=r"index_add .*given torch.bfloat16 and torch.float32: convert one"):
            capture(model, inputs)


class Attention(nn.Module):
    def __init__(self, turned: bool, drops: bool) -> None:
        super().__init__()
        self.values, self.ours, self.theirs = nn.Linear(F, 4), nn.Linear(F, 2), nn.Linear(F, 2)
        self.turned, self.drops = turned, drops

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sides = self.theirs(x)[edges[0]], self.ours(x)[edges[1]]
        weight = softmax(functional.leaky_relu(sides[self.turned] + sides[not self.turned], 0.1), edges[1])
        weight = weight * 2 if self.drops else weight
        rows = self.values(x).view(V, 2, 2)[edges[0]] * weight.unsqueeze(-1)
        return x.new_zeros(V, 2, 2).index_add(0, edges[1], rows)


@pytest.mark.parametrize(("turned", "drops"), list(product((False, True), (False, True))))
def test_attention_among_neighbours(turned: bool, drops: bool) -> None:
    ops = same_as_plain(Attention(turned, drops), batch()[:2])
    assert ops.count(GRAPH_ATTENTION) == (not drops) and ops.count(EDGE_SOFTMAX) == drops == ops.count(AGGREGATE)


def test_rows_between_parts_are_counted_once() -> None:
    source, target = torch.randint(V, (2, E), generator=torch.Generator().manual_seed(3))
    counted = list(count_halos(source, target, V, V))
    for factors in PARTS:
        pieces = nested(V, factors)
        if len(pieces) > V:
            continue
        part = {v: p for p, (start, stop) in enumerate(pieces) for v in range(start, stop)}
        moved = {(s, part[t]) for s, t in zip(source.tolist(), target.tolist(), strict=True) if part[s] != part[t]}
        sent = [sum(part[s] == p for s, _ in moved) for p in range(len(pieces))]
        received = [sum(to == p for _, to in moved) for p in range(len(pieces))]
        lies = [p for p, (start, stop) in enumerate(nested(E, factors)) for _ in range(start, stop)]
        edges = [(p, part[t]) for p, t in zip(lies, target.tolist(), strict=True) if p != part[t]]
        leave = [sum(here == p for here, _ in edges) for p in range(len(pieces))]
        arrive = [sum(there == p for _, there in edges) for p in range(len(pieces))]
        told = [counted.pop(0) for _ in range(1 + 4 * len(pieces))]
        assert told == [len(pieces), *sent, *received, *leave, *arrive]
    assert counted == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_told(bad: float) -> None:
    x, edges, weight = batch()
    weight[3] = bad
    with pytest.raises(CaptureError, match=r"1 of 20 edges have no finite number"):
        capture(Model(KNOWN["in place"]), (x, edges, weight))


@pytest.mark.parametrize("wrong", [-2, V])
def test_edges_to_nowhere_are_told(wrong: int) -> None:
    x, edges, weight = batch()
    edges[1, 4] = wrong
    with pytest.raises(CaptureError, match=rf"{wrong}.* vertices are 0 to {V - 1}"):
        capture(Model(KNOWN["in place"]), (x, edges, weight))
