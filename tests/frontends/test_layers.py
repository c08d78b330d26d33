"""torch's own layers and ways of writing a forward: the graph computes what the plain model does, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import CaptureError
from conjoin.frontends import capture, not_understood
from conjoin.ir import LeafKind
from conjoin.runtime import to_module

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
IDS = torch.tensor([[1, 2, 2], [0, 4, 1]])


class Recurrent(nn.Module):
    """A recurrent network that also returns its last state."""

    def __init__(self, net: nn.RNNBase) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        y, state = self.net(x)
        return y, state


RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(4, 5),
    "lstm, two layers, both ways, batch first, dropout": lambda: nn.LSTM(
        4, 5, num_layers=2, bidirectional=True, batch_first=True, dropout=0.25
    ),
    "lstm with projection, no bias": lambda: nn.LSTM(4, 5, proj_size=3, bias=False),
    "gru": lambda: nn.GRU(4, 5),
    "gru, two layers, both ways, dropout": lambda: nn.GRU(4, 5, num_layers=2, bidirectional=True, dropout=0.25),
    "rnn": lambda: nn.RNN(4, 5, nonlinearity="relu"),
}


@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_networks(compare: Callable[..., Any], make: Callable[[], nn.RNNBase]) -> None:
    captured = compare(Recurrent(make()), X, steps=2)
    assert not_understood(captured.graph).complete


def test_a_recurrent_model_still_runs_and_trains_after_capture() -> None:
    model = Recurrent(nn.LSTM(4, 5, num_layers=2, bidirectional=True))
    plain = copy.deepcopy(model)
    graph = capture(model, X)
    assert torch.equal(model(X)[0], plain(X)[0])
    model(X)[0].sum().backward()
    plain(X)[0].sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert capture(model, X) == graph


class SelfAttention(nn.Module):
    def __init__(self, weights: bool, mask: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.weights, self.mask = weights, mask

    def forward(self, x: Tensor) -> Any:
        mask = torch.triu(torch.full((5, 5), float("-inf")), 1) if self.mask else None
        return self.attention(x, x, x, need_weights=self.weights, attn_mask=mask)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention(compare: Callable[..., Any], weights: bool, mask: bool, training: bool) -> None:
    compare(SelfAttention(weights, mask).train(training), torch.randn(3, 5, 8))


@pytest.mark.parametrize("training", [True, False])
def test_transformer_layers(compare: Callable[..., Any], training: bool) -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
    )
    compare(encoder.train(training), torch.randn(3, 5, 8))
    decoder = nn.TransformerDecoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    x, memory = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    compare(decoder.train(training), (x, memory), lambda plain: plain(x, memory))


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 4, **options)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.bag(ids, offsets, per_sample_weights=weights)


OFFSETS = torch.tensor([0, 2])
BAGS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "matrix": ({}, (IDS,)),
    "matrix, sum": ({"mode": "sum"}, (IDS,)),
    "matrix, max": ({"mode": "max"}, (IDS,)),
    "matrix with padding": ({"padding_idx": 2}, (IDS,)),
    "matrix, weighted": ({"mode": "sum"}, (IDS, None, torch.rand(2, 3))),
    "offsets": ({}, (IDS.flatten(), OFFSETS)),
    "offsets with an empty bag": ({"mode": "sum"}, (IDS.flatten(), torch.tensor([0, 3, 3]))),
    "offsets, last included": ({"include_last_offset": True}, (IDS.flatten(), torch.tensor([0, 2, 6]))),
    "offsets, weighted": ({"mode": "sum"}, (IDS.flatten(), OFFSETS, torch.rand(6))),
    "offsets with padding": ({"mode": "max", "padding_idx": 1}, (IDS.flatten(), OFFSETS)),
}


@pytest.mark.parametrize(("options", "batch"), BAGS.values(), ids=BAGS)
def test_embedding_bags(compare: Callable[..., Any], options: dict[str, Any], batch: tuple[Any, ...]) -> None:
    captured = compare(Bags(**options), batch, lambda plain: plain(*batch))
    assert not_understood(captured.graph).complete


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_embedding_bags_with_other_gradients_are_refused(option: str) -> None:
    with pytest.raises(CaptureError, match=r"test_layers.py:\d+ \(bag\): its scale_grad_by_freq and sparse options"):
        capture(Bags(**{option: True}), IDS)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings(compare: Callable[..., Any], options: dict[str, Any]) -> None:
    compare(nn.Embedding(6, 4, **options), IDS)


IMAGE = torch.linspace(-2, 2, 2 * 4 * 6 * 6).reshape(2, 4, 6, 6)
LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1, groups=2), nn.ConvTranspose2d(8, 4, 3)), IMAGE),
    "one-dimensional": (lambda: nn.Sequential(nn.Conv1d(3, 6, 2, padding="same"), nn.MaxPool1d(2)), X),
    "same padding": (lambda: nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"), IMAGE),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)), IMAGE),
    "adaptive pooling": (lambda: nn.Sequential(nn.AdaptiveMaxPool2d(3), nn.AdaptiveAvgPool2d((2, 1))), IMAGE),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm((6, 6))), IMAGE),
    "rms norm": (lambda: nn.RMSNorm(4), X),
    "instance norm with statistics": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGE),
    "dropouts": (lambda: nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.3), nn.Linear(6, 6)), IMAGE),
    "dropout in place": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3, inplace=True)), X),
    "dropout of nothing": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), X),
    "alpha dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.SELU(), nn.AlphaDropout(0.2)), X),
    "randomised relu": (lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU()), X),
    "activations": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU("tanh"), nn.SiLU(), nn.PReLU(), nn.Softplus()), X),
    "activations in place": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(True), nn.Linear(4, 4), nn.ELU(inplace=True)),
        X,
    ),
    "bilinear": (lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelUnshuffle(2)), IMAGE),
    "nearest": (lambda: nn.Sequential(nn.Upsample(size=(9, 9)), nn.ZeroPad2d(1), nn.Flatten()), IMAGE),
    "flatten": (lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 3)), nn.Softmax(-1)), X),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), X),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("make", "x"), LAYERS.values(), ids=LAYERS)
def test_layers(compare: Callable[..., Any], make: Callable[[], nn.Module], x: Tensor, training: bool) -> None:
    compare(make().train(training), x, steps=2)


class Written(nn.Module):
    """A forward given as a function of a weight and the input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.weight, x)


def in_place_on_a_view(weight: Tensor, x: Tensor) -> Tensor:
    y = x @ weight
    y[:, 0].mul_(2)
    y[:, 1:, :2] += 1
    return y


def in_place_seen_through_an_earlier_view(weight: Tensor, x: Tensor) -> Tensor:
    y = x @ weight
    first = y[:, 0]
    y.mul_(3)
    return first + y[:, 1]


def written_into_an_empty_tensor(weight: Tensor, x: Tensor) -> Tensor:
    out = torch.empty(2, 3, 4)
    out[:, :2] = (x @ weight)[:, :2]
    out[:, 2] = 0
    return out


def in_place_on_the_shape(weight: Tensor, x: Tensor) -> Tensor:
    y = x @ weight
    return y.transpose_(0, 1).unsqueeze_(0).squeeze_(0) * 2


def with_an_out_argument(weight: Tensor, x: Tensor) -> Tensor:
    made = torch.empty(4, 4)
    torch.add(torch.ones(4, 4), 1, out=made)
    return x @ weight @ made


def called_twice(weight: Tensor, x: Tensor) -> Tensor:
    return (x @ weight).tanh().sum() + (x @ weight).tanh().sum() + (x @ weight).relu().sum()


def drawn_twice(weight: Tensor, x: Tensor) -> Tensor:
    y = x @ weight
    return (
        functional.dropout(y, 0.5) - functional.dropout(y, 0.5) + torch.rand_like(y) * torch.rand(4) + torch.randn(3, 4)
    )


def integer_arithmetic(weight: Tensor, x: Tensor) -> Tensor:
    index = torch.arange(4).flip(0) % 3
    mask = torch.ones(3, 4, dtype=torch.bool).tril()
    return torch.where(mask, (x @ weight)[..., index], torch.tensor(-1.0)).masked_fill(~mask, 0.5)


def lists_of_tensors(weight: Tensor, x: Tensor) -> Any:
    a, b = (x @ weight).chunk(2, -1)
    (whole,) = x.split(4, -1)
    parts = torch.stack([a, b]).unbind(0)
    return torch.cat([*parts, whole], -1), *x.split([1, 3], -1), a.tensor_split(2, 1)


WRITTEN: dict[str, Callable[..., Any]] = {
    "views": lambda w, x: (x @ w.T).view(6, 4).t().reshape(2, 12)[:, 1::2].unsqueeze(1).expand(2, 3, 6).mT,
    "views of parameters": lambda w, x: x @ w.view(2, 8).reshape(4, 4).transpose(0, 1),
    "strided": lambda w, x: (x @ w).as_strided((2, 2), (12, 1)) + w.diagonal()[:2],
    "in place": lambda w, x: (x @ w).add_(1).mul_(2).sub_(x).relu_() * 2,
    "in place on a view": in_place_on_a_view,
    "in place, seen through an earlier view": in_place_seen_through_an_earlier_view,
    "written into an empty tensor": written_into_an_empty_tensor,
    "in place on the shape": in_place_on_the_shape,
    "out argument": with_an_out_argument,
    "called twice": called_twice,
    "drawn twice": drawn_twice,
    "integers": integer_arithmetic,
    "lists of tensors": lists_of_tensors,
    "einsum": lambda w, x: torch.einsum("bij,jk->bki", x, w),
    "reductions": lambda w, x: ((x @ w).amax(1), (x @ w).std(-1), (x @ w).logsumexp((0, 1)), (x @ w).max(1)),
    "sorting": lambda w, x: ((x @ w).sort(-1, descending=True), (x @ w).topk(2), (x @ w).argsort()),
    "indexing": lambda w, x: ((x @ w)[torch.tensor([1, 0])], (x @ w)[..., [0, 2]], (x @ w)[:, torch.tensor([2]), 1:]),
    "scatter": lambda w, x: torch.zeros(2, 3, 5).scatter_add(2, torch.tensor([[[0, 4, 4, 1]] * 3] * 2), x @ w),
    "half precision": lambda w, x: ((x.bfloat16() @ w.bfloat16()).float(), (x @ w).to(torch.float64), (x @ w).long()),
    "checkpoint": lambda w, x: torch.utils.checkpoint.checkpoint(lambda y: (y @ w).tanh(), x, use_reentrant=False),
    "complex numbers": lambda w, x: torch.fft.rfft(x @ w).abs(),
    "loops over shapes": lambda w, x: sum(x[i] @ w * i for i in range(x.shape[0])),
    "branches on shapes": lambda w, x: x @ w if x.shape[1] > 2 and x.dim() == 3 else x,
    "constants": lambda w, x: x @ w * torch.tensor([1.0, 2, 3, 4]) + torch.tensor(3) + torch.full((4,), 0.5),
    "attention": lambda w, x: functional.scaled_dot_product_attention(x[None] @ w, x[None], x[None], is_causal=True),
}  # fmt: skip


@pytest.mark.parametrize("function", WRITTEN.values(), ids=WRITTEN)
def test_ways_of_writing_a_forward(compare: Callable[..., Any], function: Callable[..., Any]) -> None:
    compare(Written(function), X, steps=2)


def test_equal_calls_stay_two_where_gradients_or_draws_could_tell() -> None:
    graph = capture(Written(called_twice), X)
    ops = [node.op for node in graph.nodes]
    assert ops.count("matmul") == 3 and ops.count("tanh") == 2
    drawn = [node.op for node in capture(Written(drawn_twice), X).nodes]
    assert drawn.count("dropout") == 2


def test_equal_calls_without_gradients_are_one() -> None:
    graph = capture(Written(lambda w, x: (x @ w) * torch.arange(4) + torch.arange(4)), X)
    assert [node.op for node in graph.nodes].count("arange") == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.middle

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(self.middle(self.embedding(ids)).tanh()))


def test_tied_weights_are_one_leaf_with_both_names(compare: Callable[..., Any]) -> None:
    captured = compare(Tied(), IDS, steps=2)
    leaves = {leaf.name: leaf.aliases for leaf in captured.graph.leaves_of(LeafKind.PARAMETER)}
    assert leaves == {
        "embedding.weight": ("head.weight",),
        "middle.weight": ("again.weight",),
        "middle.bias": ("again.bias",),
    }
    assert list(captured.module.state_dict()) == list(captured.plain.state_dict())
    assert captured.module.head.weight is captured.module.embedding.weight


def test_training_tied_weights_updates_both_names(unequal: Callable[..., list[str]]) -> None:
    model = Tied()
    plain = copy.deepcopy(model)
    module = to_module(capture(model, IDS), model)
    for net in (module, plain):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net(IDS).square().sum().backward()
            optimizer.step()
    assert unequal(module, plain) == []
    state = module.state_dict()
    assert torch.equal(state["head.weight"], state["embedding.weight"])


class Partly(nn.Module):
    """One layer frozen, one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x).relu())


def test_frozen_and_unused_parameters_get_no_gradient(compare: Callable[..., Any]) -> None:
    captured = compare(Partly(), X)
    trainable = {leaf.name: leaf.trainable for leaf in captured.graph.leaves_of(LeafKind.PARAMETER)}
    assert trainable["trained.weight"] and not trainable["frozen.weight"]
    assert captured.module.unused.weight.grad is None and captured.module.frozen.weight.grad is None
    assert list(captured.module.state_dict()) == list(captured.plain.state_dict())


def test_the_gradient_of_an_input_flows_too() -> None:
    model = nn.Linear(4, 4)
    module = to_module(capture(model, X), model)
    mine, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    module(mine).sum().backward()
    model(theirs).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)
