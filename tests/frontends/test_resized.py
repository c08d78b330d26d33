"""A graph taken over for other sizes is the one that capture makes for them; where it might not be, there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

import conjoin
import zoo
from conjoin.frontends import capture, resize
from conjoin.frontends.known_values import KnownValues
from conjoin.ir import Graph, LeafKind, Plan, captured_graph, load_plan
from conjoin.runtime.program.other_plans import bare_copy

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()


def resized(model: nn.Module, before: Any, after: Any, loss: Any = None) -> tuple[Graph | None, Graph]:
    """The graph for one batch after that for another, and the one that is captured."""
    return resized_from(capture(model, before, loss), model, after, loss)


def resized_from(graph: Graph, model: nn.Module, after: Any, loss: Any = None) -> tuple[Graph | None, Graph]:
    """The same, where the graph for the one batch was captured before."""
    given = tree_map_only(Tensor, lambda x: x.to("meta"), after)
    return resize(graph, bare_copy(model), given, loss, ()), capture(model, after, loss)


@pytest.mark.parametrize("name", ["alexnet", "bert-large", "nmt"])
def test_a_graph_for_another_batch_is_the_captured_one(name: str) -> None:
    small, large = (zoo.build(f"{name}:tiny", batch_size=size) for size in (6, 8))
    made, captured = resized(large.model.train(), large.batch, small.batch, large.loss)
    assert made == captured


SIZES = dict(vocab_size=96, hidden_size=32, num_attention_heads=4, intermediate_size=64, num_hidden_layers=1)


def words(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 96, (batch, length))
    return {"input_ids": ids, "labels": ids}


def test_of_a_library_model_batch_and_length_may_be_others() -> None:
    """With as many heads as samples, and a mask that capture found to be causal."""
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=8, vocab_size=96, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    graph = capture(model, words(8, 16))
    for after in ((5, 16), (4, 12)):
        made, captured = resized_from(graph, model, words(*after))
        assert made == captured, after


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2))
        return x.flatten(1).reshape(len(x), 2, -1).mean(2) + x.permute(0, 2, 3, 1).contiguous().view(len(x), -1)[:, :2]


def test_images_whose_channels_lie_last_stay_so() -> None:
    model = Images().to(memory_format=torch.channels_last)
    before, after = (torch.randn(n, 3, 16, 16).to(memory_format=torch.channels_last) for n in (8, 5))
    made, captured = resized(model, before, after)
    assert made == captured and captured.leaves_of(LeafKind.INPUT)[0].channels_last
    made, captured = resized(model, before, after.contiguous())
    assert made is None and not captured.leaves_of(LeafKind.INPUT)[0].channels_last


def test_a_mask_that_hides_more_of_longer_sequences_is_seen() -> None:
    """A window of 20 is no window for 16 words."""
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=20)
    model = transformers.MistralForCausalLM(config)
    graph = capture(model, words(4, 16))
    short, captured = resized_from(graph, model, words(4, 18))
    assert short == captured
    longer, captured = resized_from(graph, model, words(4, 30))
    assert longer is None
    assert any(node.call["attn_mask"] for node in captured.nodes if node.op == "scaled_dot_product_attention")


def test_a_mask_takes_as_much_memory_for_many_layers_as_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention makes numbers of its mask, in every layer as many as the mask has places."""
    computed: list[int] = []

    def compute(self: KnownValues, *call: Any) -> Any:
        made = compute_before(self, *call)
        computed.extend(tensor.numel() for tensor in tree_leaves(made) if isinstance(tensor, Tensor))
        return made

    compute_before = KnownValues._computed
    monkeypatch.setattr(KnownValues, "_computed", compute)
    counts = []
    for num_layers in (1, 3):
        config = transformers.MistralConfig(**{**SIZES, "num_hidden_layers": num_layers}, num_key_value_heads=2)
        model = transformers.MistralForCausalLM(config)
        graph, after = capture(model, words(4, 16)), tree_map_only(Tensor, lambda x: x.to("meta"), words(6, 16))
        computed.clear()
        assert resize(graph, bare_copy(model), after, None, ()) is not None
        counts.append(sum(computed))
    assert counts[0] == counts[1] > 0


class Forward(nn.Module):
    """A layer, and what a function makes of what it gives."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


OTHERWISE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another way": (lambda x: x.relu() if len(x) > 7 else x.tanh(), "operator"),
    "fewer operators": (lambda x: x.relu().sum() if len(x) > 7 else x.sum(), "how many"),
    "a number": (lambda x: x / len(x) ** 0.5, "other of div.Tensor"),
    "a whole number": (lambda x: x * len(x), "other of mul.Tensor"),
    "a literal": (lambda x: x * torch.tensor(float(len(x))), "literal"),
    "an output": (lambda x: (x, len(x)), "returns"),
    "as many parts": (lambda x: x.unbind(0)[0], "of unbind.int"),
    "rounded": (lambda x: x[: (len(x) + 6) // 7], "none or a single one"),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_what_differs_by_more_than_sizes_is_captured(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    function, why = OTHERWISE[kind]
    caplog.set_level(logging.DEBUG, "conjoin.frontends.resized")
    made, _ = resized(Forward(function), torch.zeros(8, 4), torch.zeros(5, 4))
    assert made is None and why in caplog.text


class Swapped(nn.Module):
    """Equal operators on other tensors: two layers alike, or two inputs, the other way around for large batches."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.layers, self.swaps_layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), layers

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = self.layers if len(x) > 7 or not self.swaps_layers else reversed(self.layers)
        x, y = (x, y) if len(x) > 7 or self.swaps_layers else (y, x)
        made: Tensor = second(first(x) - y)
        return made


@pytest.mark.parametrize("layers", [True, False])
def test_the_same_operators_on_other_tensors_are_captured(layers: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "conjoin.frontends.resized")
    before, after = ((torch.zeros(size, 4), torch.zeros(size, 4)) for size in (8, 5))
    made, _ = resized(Swapped(layers), before, after)
    assert made is None and "tensor" in caplog.text


ALIKE: dict[str, Callable[[Tensor], Any]] = {
    "as large as another dim": lambda x: x.view(len(x), 2, 4).transpose(1, 2).reshape(len(x) * 2, 4),
    "turned": lambda x: x.t().reshape(8, len(x)),
    "counted": lambda x: x + torch.arange(len(x)).unsqueeze(1),
    "made": lambda x: torch.cat([x, torch.zeros(len(x), 3)], 1),
    "spread": lambda x: x[:1].expand(len(x), 8) + x,
    "the last": lambda x: x[len(x) - 1],
    "a half": lambda x: x[: len(x) // 2],
}


@pytest.mark.parametrize("kind", ALIKE)
def test_what_depends_on_sizes_is_as_captured_or_left(kind: str) -> None:
    """The layer is as wide as the first batch is large, so that sizes may be taken for each other."""
    model = Forward(ALIKE[kind])
    graph = capture(model, torch.zeros(8, 4))
    for size in (4, 6, 16):
        made, captured = resized_from(graph, model, torch.zeros(size, 4))
        assert made is None or made == captured, size
        assert made is not None or kind in ("turned", "the last", "a half"), size


@pytest.mark.parametrize("size", [0, 1])
def test_a_single_sample_is_captured(size: int) -> None:
    assert resized(Forward(torch.relu), torch.zeros(8, 4), torch.zeros(size, 4))[0] is None
    assert resized(Forward(torch.relu), torch.zeros(size, 4), torch.zeros(8, 4))[0] is None


def test_a_plan_without_rewrites_has_the_captured_graph_also_from_a_file(tmp_path: Path) -> None:
    model, batch = Forward(torch.relu), (torch.zeros(8, 4), torch.zeros(8, 8))
    plan = conjoin.plan(model, batch, "local:2", loss=functional.mse_loss, strategy="fsdp")
    assert isinstance(plan, Plan)
    plan.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert isinstance(read, Plan) and read.model.graph is None
    assert captured_graph(read) == captured_graph(plan) == conjoin.capture(model, batch, functional.mse_loss)


def test_a_second_shape_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds for a model of many layers is done once; the plain model is the judge."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    batch = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    plan = conjoin.plan(model, batch, "local:1", loss=functional.mse_loss, strategy="single")
    step = conjoin.load(plan, model, loss=functional.mse_loss, device="cpu")
    monkeypatch.setattr(torch.export, "export", None)
    small = batch[0][:5], batch[1][:5]
    assert torch.allclose(step(*small), functional.mse_loss(model(small[0]), small[1]), rtol=1e-12)


def evaluated(model: nn.Module, before: Any, after: Any) -> tuple[Graph | None, Graph]:
    """The graph of evaluation after that of training, and the one that is captured; the copy stays in its mode."""
    graph, bare = capture(model.train(), before), bare_copy(model).eval()
    made = resize(graph, bare, tree_map_only(Tensor, lambda x: x.to("meta"), after), None, ())
    assert not any(module.training for module in bare.modules())
    return made, capture(model.eval(), after)


def test_a_graph_of_evaluation_is_that_of_training_where_no_operator_is_told_the_mode() -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
    made, captured = evaluated(transformers.LlamaForCausalLM(config), words(4, 16), words(6, 16))
    assert made == captured and made is not None and not made.training


class Moody(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() if self.training else super().forward(x).tanh()


@pytest.mark.parametrize("part", [nn.Dropout(0.5), nn.BatchNorm1d(4), Moody(4, 4), nn.RReLU()], ids=type)
def test_what_does_something_else_in_evaluation_is_captured(part: nn.Module) -> None:
    made, captured = evaluated(nn.Sequential(nn.Linear(4, 4), part), torch.zeros(8, 4), torch.zeros(6, 4))
    assert made is None and not captured.training


def test_the_first_evaluation_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    batch = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    plan = conjoin.plan(model, batch, "local:1", loss=functional.mse_loss, strategy="single")
    step = conjoin.load(plan, model, loss=functional.mse_loss, device="cpu")
    monkeypatch.setattr(torch.export, "export", None)
    for size in (8, 5):
        some = batch[0][:size], batch[1][:size]
        assert torch.allclose(step.eval()(*some), functional.mse_loss(model(some[0]), some[1]), rtol=1e-12)
