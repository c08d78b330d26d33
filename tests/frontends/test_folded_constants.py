"""Masks and pieces that constants decide, against the plain model; what an input decides is left as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from conjoin.frontends import capture
from conjoin.frontends import folded_constants as folded
from conjoin.ir import Graph, Node, kept_between_steps
from conjoin.machine import Machine
from conjoin.runtime import to_module
from conjoin.search import make_plan

S, T = 6, 9
MIN = torch.finfo(torch.float32).min


def attention_of(graph: Graph) -> Node:
    (node,) = (node for node in graph.nodes if node.op == "scaled_dot_product_attention")
    return node


class Attention(nn.Module):
    """Attention with a mask that a function makes of the queries."""

    def __init__(
        self, mask: Callable[[Tensor], Tensor], num_keys: int = S, groups: int = 1, heads: int = 4, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.mask, self.groups, self.heads, self.scale = mask, groups, heads, scale
        self.q = nn.Linear(8, 2 * heads)
        self.kv = nn.Linear(8, 4 * heads // groups)
        self.keys = nn.Parameter(torch.randn(2, num_keys, 8))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(2, S, self.heads, 2).transpose(1, 2)
        kv = self.kv(self.keys).view(2, -1, 2 * (self.heads // self.groups), 2).transpose(1, 2)
        k, v = kv.chunk(2, 1)
        if self.groups > 1:
            k, v = (self.repeated(t) for t in (k, v))
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x), scale=self.scale)
        return found.transpose(1, 2).flatten(2)

    def repeated(self, t: Tensor) -> Tensor:
        b, h, s, e = t.shape
        return t[:, :, None].expand(b, h, self.groups, s, e).reshape(b, h * self.groups, s, e)


def lower(x: Tensor) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def rows() -> Tensor:
    return torch.arange(S)[:, None]


def columns(count: int = S) -> Tensor:
    return torch.arange(count)[None, :]


def written(x: Tensor) -> Tensor:
    mask = torch.zeros(S, S)
    mask[:, 3:] = float("-inf")
    return mask


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "all true": (lambda x: (columns() >= 0).expand(2, 1, S, S), "all"),
    "ones": (lambda x: x.new_ones((S, S), dtype=torch.bool), "all"),
    "zeros that are added": (lambda x: torch.zeros(1, 1, S, S), "all"),
    "causal": (lambda x: (columns() <= rows()).expand(2, 4, S, S), "past"),
    "causal and in a wide window": (lambda x: (columns() <= rows()) & (columns() > rows() - 4096), "past"),
    "causal by a triangle": (lambda x: torch.ones(S, S, dtype=torch.bool).tril(), "past"),
    "causal, added": (lambda x: torch.full((S, S), float("-inf")).triu(1), "past"),
    "causal, added, smallest number": (lambda x: torch.where(columns() <= rows(), 0.0, MIN), "past"),
    "in a narrow window": (lambda x: (columns() <= rows()) & (columns() > rows() - 3), "masked"),
    "one too many": (lambda x: columns() <= rows() + 1, "masked"),
    "one too few": (lambda x: (columns() < rows()) | (columns() == 0), "masked"),
    "a bias": (lambda x: -(rows() - columns()).abs().float(), "masked"),
    "causal with a bias": (lambda x: torch.where(columns() <= rows(), -1.0, MIN), "masked"),
    "written to": (written, "masked"),
    "of an input": (lambda x: (x[:, None, :, :1] > -100).expand(2, 1, S, S), "masked"),
    "of an input and constants": (lambda x: (columns() <= rows()) & (x[:, None, :, :1] > -100), "masked"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_constants_are_taken_for_what_they_are(name: str) -> None:
    mask, kind = MASKS[name]
    model, x = Attention(mask).train(), torch.randn(2, S, 8)
    graph = capture(model, x)
    _, _, _, kept, _, is_causal, *_ = attention_of(graph).args
    assert (kept is not None, is_causal) == {"all": (False, False), "past": (False, True), "masked": (True, False)}[
        kind
    ]
    planned = to_module(graph, model)
    for batch in (x, torch.randn(2, S, 8) - 1000 * torch.eye(S)[2][:, None] * (name == "of an input and constants")):
        expected, found = model(batch), planned(batch)
        torch.testing.assert_close(found, expected)
        wanted = torch.autograd.grad(expected.sum(), [*model.parameters()])
        for mine, theirs in zip(torch.autograd.grad(found.sum(), [*model.parameters()]), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("num_keys", [S - 2, T])
def test_causal_where_there_are_more_or_fewer_keys_than_queries(num_keys: int) -> None:
    model, x = Attention(lambda x: columns(num_keys) <= rows(), num_keys), torch.randn(2, S, 8)
    graph = capture(model, x)
    assert attention_of(graph).args[3:6] == (None, 0.0, True)
    torch.testing.assert_close(to_module(graph, model)(x), model(x))


def test_nothing_of_a_mask_that_is_not_read_is_left() -> None:
    graph = capture(Attention(MASKS["causal and in a wide window"][0]), torch.randn(2, S, 8))
    assert {node.op for node in graph.nodes} <= {
        "linear", "reshape", "transpose.int", "chunk", "scaled_dot_product_attention",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "heads", "grouped"),
    [("causal", 16, True), ("all true", 16, True), ("in a narrow window", 16, False), ("causal", 8, False)],
)
def test_heads_are_not_repeated_for_a_mask_that_is_not_there(name: str, heads: int, grouped: bool) -> None:
    """Four heads of keys stay repeated, so that a node of eight devices can split them."""
    mask = lower if name == "causal" else MASKS[name][0]
    model, x = Attention(mask, groups=2, heads=heads), torch.randn(2, S, 8)
    graph = capture(model, x)
    node = attention_of(graph)
    assert node.args[-1] is grouped and node.inputs[1].type.shape[1] == (heads // 2 if grouped else heads)
    planned, expected = to_module(graph, model), model(x)
    found = planned(x)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.square().sum(), [*model.parameters()])
    for mine, theirs in zip(torch.autograd.grad(found.square().sum(), [*model.parameters()]), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_few_heads_of_keys_are_split_as_far_as_queries() -> None:
    """The judge is the layout: with two heads of keys, attention is split among four devices all the same."""
    model, x = nn.Sequential(Attention(lower, groups=2), nn.Linear(8, 8)), torch.randn(2, S, 8)
    plan = make_plan(capture(Squared(model), x), Machine("four", 1, 4, "cpu"), "megatron:tp=4")
    split = [str(node.types[0]) for node in plan.graph.nodes if node.op == "scaled_dot_product_attention"]
    assert split and all("S(1)" in text for text in split)


class Squared(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def assert_same(model: nn.Module, planned: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(planned(x), model(x))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_causal_mask_under_a_scale_that_turns_it_round(scale: float) -> None:
    """Kernels scale the infinity that hides as well."""
    model, x = Attention(MASKS["causal"][0], scale=scale), torch.randn(2, S, 8)
    graph = capture(model, x)
    assert attention_of(graph).args[3] is not None
    assert_same(model, to_module(graph, model), x)


def test_a_mask_of_the_model_may_change_before_it_is_loaded() -> None:
    model, x = Attention(lambda x: torch.ones(())), torch.randn(2, S, 8)
    model.hidden = torch.ones(S, S, dtype=torch.bool)  # an attribute, neither buffer nor parameter
    model.mask = lambda x: model.hidden
    graph = capture(model, x)
    model.hidden = torch.ones(S, S, dtype=torch.bool).tril()
    assert_same(model, to_module(graph, model), x)


def test_one_query_head_over_many_keys() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            k = self.k(x).view(2, S, 8, 2).transpose(1, 2)
            k = k[:, :, None].expand(2, 8, 2, S, 2).reshape(2, 16, S, 2)
            mask = torch.ones(S, S, dtype=torch.bool).tril()
            return functional.scaled_dot_product_attention(k[:, :1], k, k, attn_mask=mask)

    model, x = Many(), torch.randn(2, S, 8)
    assert_same(model, to_module(capture(model, x), model), x)


def test_a_mask_of_a_thousand_steps() -> None:
    def long(x: Tensor) -> Tensor:
        mask = torch.zeros(S, S)
        for _ in range(1000):
            mask = mask + 1
        return mask > 0

    model, x = Attention(long), torch.randn(2, S, 8)
    assert attention_of(capture(model, x)).args[3] is None


def test_a_mask_is_looked_at_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Tensor] = []
    seen = folded.seen_under
    monkeypatch.setattr(folded, "seen_under", lambda mask, *sizes: [looked.append(mask), seen(mask, *sizes)][1])
    folded._seen_under_value.cache_clear()
    model = nn.Sequential(*(Attention(MASKS["causal"][0]) for _ in range(5)))
    graph = capture(model, torch.randn(2, S, 8))
    assert len(looked) == 1 and sum(node.op == "scaled_dot_product_attention" for node in graph.nodes) == 5


def test_what_a_concatenation_gives_is_not_what_it_was_given() -> None:
    """A buffer that is one with the batch would change with it; and an empty piece that is trained has a gradient."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.ones(3))
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            out = x * self.last.sum() + torch.cat([self.prompt[:0], x]).sum()
            self.last = torch.cat([x[:0], x])
            return out.sum()

    model, x = Keeps(), torch.ones(4)
    planned = to_module(capture(copy.deepcopy(model), x.clone()), copy.deepcopy(model))
    mine, theirs = x.clone(), x.clone()
    for _ in range(3):
        found, expected = planned(mine), model(theirs)
        torch.testing.assert_close(found, expected)
        for tensor in (mine, theirs):
            tensor.add_(1)
    found.backward()
    expected.backward()
    assert torch.equal(planned.get_parameter("prompt").grad, model.prompt.grad)  # type: ignore[arg-type]


class Joined(nn.Module):
    def __init__(self, empty: Tensor, dim: int) -> None:
        super().__init__()
        self.empty, self.dim = empty, dim
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.empty, self.layer(x), self.empty], self.dim)


@pytest.mark.parametrize(
    ("empty", "dim", "left"),
    [
        (torch.tensor([]), 1, 0),
        (torch.empty(3, 0), -1, 0),
        (torch.empty(0, dtype=torch.float64), 0, 1),
        (torch.ones(1, 4), 0, 1),
    ],
)
def test_pieces_of_no_size_are_left_out(empty: Tensor, dim: int, left: int) -> None:
    model, x = Joined(empty, dim), torch.randn(3, 4)
    graph = capture(model, x)
    assert sum(node.op == "cat" for node in graph.nodes) == left
    found, expected = to_module(graph, model)(x), model(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


class Attentions(TorchFunctionMode):
    """Writes down how attention is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[bool, bool, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            masked = given.get("attn_mask") is not None
            self.calls.append((masked, bool(given.get("is_causal")), bool(given.get("enable_gqa"))))
        return func(*args, **given)


@pytest.mark.parametrize("kind", ["Roberta", "Mistral", "GPTNeoX", "GPT2", "ViT"])
def test_attention_of_a_library_is_called_as_the_plain_model_calls_it(kind: str) -> None:
    """The judge is the library itself, which looks at its masks when it is not traced."""
    library = import_module("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    grouped, images = {"num_attention_heads": 16, "num_key_value_heads": 8}, {"image_size": 16, "patch_size": 8}
    more = {"Mistral": grouped, "ViT": images}.get(kind, {})
    config = getattr(library, f"{kind}Config")(**{**sizes, "vocab_size": 50, **more})
    if kind == "GPT2":
        config = library.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    head = "ForImageClassification" if kind == "ViT" else "Model"
    model = getattr(library, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}{head}")(config).eval()
    batch = (
        {"pixel_values": torch.randn(2, 3, 16, 16)} if kind == "ViT" else {"input_ids": torch.randint(3, 50, (2, 8))}
    )
    with Attentions() as plain, torch.no_grad():
        model(**batch)
    graph = capture(model, batch)
    found = [node.args for node in graph.nodes if node.op == "scaled_dot_product_attention"]
    assert plain.calls and [(args[3] is not None, args[5], args[-1]) for args in found] == plain.calls


def test_what_is_only_like_an_input_is_a_constant() -> None:
    """As a shifted window's mask is made: zeros of the input's type, with numbers written into parts of them.

    It is made once, and the tensor it was to be like is not read for it.
    """

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            mask = x.new_zeros((8, 8))
            for i in range(3):
                mask[i : i + 2, 4:] = i
            return (self.linear(x) + mask.masked_fill(mask != 0, -1.0) + x.new_full((8,), 0.5) * x.new_ones(8)).sum()

    model, x = Shifted(), torch.randn(4, 8, 8)
    graph = capture(model, x)
    kept, _ = kept_between_steps(graph)
    assert {"fill.Tensor", "slice_scatter", "masked_fill.Scalar"} <= {node.op for node in kept}
    assert not any(node.op.startswith("new_") for node in graph.nodes)
    assert torch.equal(to_module(graph, model)(x), model(x))


@pytest.mark.parametrize("order", ["as it lies", "turned", "backwards", "one twice", "of the batch"])
def test_what_is_read_by_its_numbers_in_order_is_seen_in_another_shape(order: str) -> None:
    """As masks of libraries read those of a batch; any other order stays as it was written."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows, columns = torch.arange(4)[:, None, None], torch.arange(3)[None, None, :]
            if order == "turned":
                rows, columns = rows.transpose(0, 2), columns.transpose(0, 2)
            elif order == "backwards":
                rows = 3 - rows
            elif order == "one twice":
                columns = columns // 2 * 2
            elif order == "of the batch":
                rows = x.argsort(0)[:, :1, None]
            return self.layer(x[rows, columns].transpose(0, 2) if order == "turned" else x[rows, columns])

    model, x = Masked(), torch.randn(4, 3)
    graph = capture(model, (x,))
    assert ("index.Tensor" in {node.op for node in graph.nodes}) == (order != "as it lies")
    torch.testing.assert_close(to_module(graph, model)(x), model(x))
