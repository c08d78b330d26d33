"""What goes in and what comes out: nested inputs and outputs, and how a batch is dealt out to model and loss."""

from __future__ import annotations

import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from conjoin.frontends import capture
from conjoin.frontends.torch_export import _Step
from conjoin.frontends.torch_private import FollowedCalls
from conjoin.ir import Graph, LeafKind, Value, parse_graph
from conjoin.ir.graph_file import graph_from_json, graph_to_json
from conjoin.runtime import to_module


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Output:
    """As libraries of models define theirs: a class registered with torch's pytrees."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    note: Any = None


def _take_apart(output: Output) -> tuple[list[Any], list[str]]:
    kept = {key: value for key, value in vars(output).items() if value is not None}
    return list(kept.values()), list(kept)


pytree.register_pytree_node(
    Output,
    _take_apart,
    lambda values, keys: Output(**dict(zip(keys, values, strict=True))),
    serialized_type_name=f"{Output.__module__}.{Output.__qualname__}",
)


class Lambda(nn.Module):
    """A linear layer in a forward given as a function of it and the inputs."""

    def __init__(self, function: Callable[..., Any], size: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self.layer, x)


def input_names(graph: Graph) -> list[str]:
    return [leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)]


X = torch.arange(12.0).reshape(3, 4) / 12
Y = X.flip(0)
TARGET = torch.tensor([0, 2, 1])

OUTPUTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "tensor": lambda f, x: f(x),
    "tuple": lambda f, x: (f(x), x.sum()),
    "tuple of one": lambda f, x: (f(x),),
    "list": lambda f, x: [f(x), f(x) * 2],
    "dict": lambda f, x: {"b": f(x), "a": x * 2},
    "dict with numbers as keys": lambda f, x: {1: f(x), 0: x * 2},
    "nested": lambda f, x: {"a": [f(x), (x * 2,)], "b": {"c": f(x) + 1}},
    "empty containers": lambda f, x: (f(x), [], {}, ()),
    "named tuple": lambda f, x: Point(f(x), x * 2),
    "class": lambda f, x: Output(loss=f(x).sum(), logits=f(x)),
    "class within a tuple": lambda f, x: (Output(logits=f(x)), 3),
    "numbers": lambda f, x: (f(x), 3, 2.5, True),
    "nothing and text": lambda f, x: (None, f(x), "text", None),
    "the input itself": lambda f, x: (f(x), x),
    "the same tensor twice": lambda f, x: (lambda y: (y, y))(f(x)),
    "a parameter": lambda f, x: (f(x), f.weight),
    "a size": lambda f, x: (f(x), x.shape[0]),
    "integers": lambda f, x: (f(x), f(x).argmax(1)),
    "detached": lambda f, x: (f(x), f(x).detach()),
}


@pytest.mark.parametrize("function", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_keep_their_nesting_and_plain_values(compare: Callable[..., Any], function: Callable[..., Any]) -> None:
    captured = compare(Lambda(function), X)
    assert type(captured.module(X)) is type(captured.plain(X))


@pytest.mark.parametrize("function", OUTPUTS.values(), ids=OUTPUTS)
def test_nesting_survives_text_and_json(function: Callable[..., Any]) -> None:
    model = Lambda(function)
    graph = capture(model, X)
    for again in (parse_graph(str(graph)), graph_from_json(graph_to_json(graph))):
        assert again == graph
        assert type(to_module(again, model)(X)) is type(model(X))


def test_an_object_among_the_outputs_becomes_none_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = Lambda(lambda f, x: {"y": f(x), "cache": object()})
    module = to_module(capture(model, X), model)
    assert module(X)["cache"] is None
    assert "output cache (object): neither tensor nor plain value" in caplog.text


INPUTS: dict[str, tuple[Callable[..., Any], Any, list[str]]] = {
    "tuple": (lambda f, x: f(x[0]) + x[1], (X, Y), ["x.0", "x.1"]),
    "list": (lambda f, x: f(x[0]) + x[1], [X, Y], ["x.0", "x.1"]),
    "dict": (lambda f, x: f(x["a"]) + x["b"], {"a": X, "b": Y}, ["x.a", "x.b"]),
    "dict in another order": (lambda f, x: f(x["a"]) + x["b"], {"b": Y, "a": X}, ["x.b", "x.a"]),
    "named tuple": (lambda f, x: f(x.x) + x.y, Point(X, Y), ["x.0", "x.1"]),
    "nested": (lambda f, x: f(x["a"][0]) + x["a"][1]["b"], {"a": [X, {"b": Y}]}, ["x.a.0", "x.a.1.b"]),
    "class": (lambda f, x: f(x.loss) + x.logits, Output(X, Y), ["x.loss", "x.logits"]),
    "with plain values": (lambda f, x: f(x["a"]) * x["k"] if x["on"] else None, {"a": X, "k": 2, "on": True}, ["x.a"]),
    "with none and text": (lambda f, x: f(x[0]) * 2 if x[2] == "double" else None, (X, None, "double"), ["x.0"]),
    "the same tensor twice": (lambda f, x: f(x[0]) + x[1], (X, X), ["x.0", "x.1"]),
}


@pytest.mark.parametrize(("function", "x", "names"), INPUTS.values(), ids=INPUTS)
def test_inputs_may_be_nested(
    compare: Callable[..., Any], function: Callable[..., Any], x: Any, names: list[str]
) -> None:
    captured = compare(Lambda(function), (x,), lambda plain: plain(x))
    assert input_names(captured.graph) == names


def test_an_ordered_dict_is_taken_as_keyword_inputs_too(compare: Callable[..., Any]) -> None:
    compare(Lambda(lambda f, x: f(x)), OrderedDict(x=X), lambda plain: plain(x=X))


class Many(nn.Module):
    """Positional, defaulted, keyword-only and any further inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        h = self.layer(x) * scale
        h = h if y is None else h + y
        return h if mask is None else h * mask


BATCHES: dict[str, tuple[Any, list[str], int]] = {
    "tensor": (X, ["x"], 0),
    "tuple of one": ((X,), ["x"], 0),
    "tuple": ((X, Y), ["x", "y"], 1),
    "list": ([X, Y], ["x", "y"], 1),
    "tuple with none": ((X, None), ["x"], 0),
    "dict": ({"x": X, "y": Y}, ["x", "y"], 1),
    "dict in another order": ({"y": Y, "x": X}, ["y", "x"], 1),
    "keyword only": ({"x": X, "mask": Y, "scale": 0.5}, ["x", "mask"], 1),
}


@pytest.mark.parametrize(("batch", "names", "extra"), BATCHES.values(), ids=BATCHES)
def test_a_batch_is_a_tensor_a_tuple_or_a_dict(
    compare: Callable[..., Any], batch: Any, names: list[str], extra: int
) -> None:
    def plain(model: nn.Module) -> Any:
        if isinstance(batch, dict):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)

    captured = compare(Many(), batch, plain)
    assert input_names(captured.graph) == names
    assert isinstance(captured.graph.inputs[0], Value)


def test_the_module_is_called_as_the_model_is() -> None:
    model = Many()
    by_name = to_module(capture(model, {"x": X, "mask": Y, "scale": 0.5}), model)
    want = model(X, mask=Y, scale=0.5)
    assert torch.equal(by_name(x=X, mask=Y, scale=0.5), want)
    assert torch.equal(by_name(mask=Y, scale=0.5, x=X), want)
    assert torch.equal(by_name({"x": X, "mask": Y, "scale": 0.5}), want)
    assert torch.equal(by_name({"scale": 0.5, "mask": Y, "x": X}), want)
    by_position = to_module(capture(model, (X, Y)), model)
    assert torch.equal(by_position(X, Y), model(X, Y))
    assert torch.equal(by_position((X, Y)), model(X, Y))
    assert torch.equal(by_position([X, Y]), model(X, Y))


class AnyArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *xs: Tensor, **named: Tensor) -> Tensor:
        return self.layer(torch.stack([*xs, *named.values()]).sum(0))


def test_a_forward_of_any_number_of_inputs_takes_the_whole_batch(compare: Callable[..., Any]) -> None:
    captured = compare(AnyArguments(), (X, Y, X), lambda plain: plain(X, Y, X))
    assert input_names(captured.graph) == ["input_0", "input_1", "input_2"]
    captured = compare(AnyArguments(), {"a": X, "b": Y}, lambda plain: plain(a=X, b=Y))
    assert input_names(captured.graph) == ["a", "b"]


class Pair(nn.Module):
    """Takes two inputs in any nesting; holds a parameter, a buffer that it changes, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4, 4))
        self.scale = torch.linspace(1, 2, 16).reshape(4, 4)

    def forward(self, a: Any, b: Any = None, **named: Any) -> Tensor:
        first, second = [leaf for leaf in pytree.tree_leaves((a, b, named)) if leaf is not None]
        self.seen.view(-1).add_(1.0)
        return self.layer(first * self.scale) * 2 + second.mul(3) + self.seen


Z = torch.linspace(-1, 1, 16).reshape(4, 4)
TWICE: dict[str, Callable[[Pair], Any]] = {
    "positions": lambda m: (Z, Z),
    "names": lambda m: {"a": Z, "b": Z},
    "further names": lambda m: {"a": Z, "labels": Z},
    "a list": lambda m: ([Z, Z],),
    "a list and a dict": lambda m: ([Z], {"y": (Z,)}),
    "views of one tensor": lambda m: (Z, Z.t()),
    "another object in the same memory": lambda m: (Z, Z.detach()),
    "overlapping parts": lambda m: tuple(torch.arange(20.0).unfold(0, 16, 4).reshape(2, 4, 4)),
    "an expanded tensor": lambda m: (Z[:1].expand(4, 4), Z[:1].expand(4, 4)),
    "on meta": lambda m: (Z.to("meta"),) * 2,
    "a parameter": lambda m: (Z, m.layer.weight),
    "the memory of a parameter": lambda m: (Z, m.layer.weight.detach()),
    "a buffer": lambda m: (Z, m.seen),
    "the memory of a buffer": lambda m: (m.seen.t(), Z),
    "a constant": lambda m: (m.scale, m.scale),
}


@pytest.mark.parametrize("batch_of", TWICE.values(), ids=TWICE)
def test_every_leaf_of_a_batch_is_an_input_of_its_own(batch_of: Callable[[Pair], Any]) -> None:
    """What is one tensor at capture is not one for ever: with two that differ the graph runs as the model does."""
    model, plain = Pair(), Pair()
    plain.load_state_dict(model.state_dict())
    leaves, nesting = pytree.tree_flatten(batch_of(model))
    module = to_module(capture(model, pytree.tree_unflatten(leaves, nesting)), model)
    given = pytree.tree_unflatten([torch.randn(4, 4), torch.randn(4, 4)], nesting)
    want = plain(**given) if isinstance(given, dict) else plain(*given)
    assert torch.equal(module(given), want)
    assert torch.equal(model.seen, plain.seen)


def test_labels_that_are_the_tokens_at_capture_are_not_ever_after() -> None:
    model = Lambda(lambda f, x: f(nn.functional.one_hot(x, 4).float()))
    ids = torch.tensor([0, 1, 2])
    module = to_module(capture(model, (ids, ids), functional.cross_entropy), model)
    for labels in (torch.tensor([3, 0, 1]), torch.tensor([-100, 2, -100])):
        assert torch.equal(module(ids, labels), functional.cross_entropy(model(ids), labels))


def mean_of(output: Tensor) -> Tensor:
    return output.square().mean()


class Hinge(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.multi_margin_loss(output, target)


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.3, 0.5, 1.0]))
LOSSES: dict[str, tuple[Any, Callable[..., Tensor], Callable[[nn.Module], Tensor], list[str]]] = {
    "function of what is left over": (
        (X, TARGET), functional.cross_entropy, lambda m: functional.cross_entropy(m(X), TARGET), ["x", "target"],
    ),
    "module": ((X, TARGET), Hinge(), lambda m: Hinge()(m(X), TARGET), ["x", "target"]),
    "module with a buffer": ((X, TARGET), WEIGHTED, lambda m: WEIGHTED(m(X), TARGET), ["x", "target"]),
    "of the output alone": (X, mean_of, lambda m: mean_of(m(X)), ["x"]),
    "lambda of the output": ((X,), lambda out: out.sum(), lambda m: m(X).sum(), ["x"]),
    "two left over": (
        (X, Y, TARGET), lambda out, y, t: functional.cross_entropy(out + y, t),
        lambda m: functional.cross_entropy(m(X) + Y, TARGET), ["x", "target_0", "target_1"],
    ),
    "left over from a dict": (
        {"x": X, "labels": TARGET}, lambda out, labels: functional.cross_entropy(out, labels),
        lambda m: functional.cross_entropy(m(X), TARGET), ["x", "labels"],
    ),
    "of output and batch": (
        X, lambda out, batch: (out - batch).square().mean(), lambda m: (m(X) - X).square().mean(), ["x"],
    ),
    "of output and batch, a tuple": (
        (X,), lambda out, batch: (out - batch[0]).abs().mean(), lambda m: (m(X) - X).abs().mean(), ["x"],
    ),
    "of output and batch, a dict": (
        {"x": X}, lambda out, batch: (out - batch["x"]).abs().mean(), lambda m: (m(X) - X).abs().mean(), ["x"],
    ),
    "a nested target": (
        (X, {"label": TARGET, "weight": 0.5}), lambda out, t: functional.cross_entropy(out, t["label"]) * t["weight"],
        lambda m: functional.cross_entropy(m(X), TARGET) * 0.5, ["x", "target.label"],
    ),
    "with an optional argument": (
        (X, TARGET), lambda out, t, smoothing=0.1: functional.cross_entropy(out, t, label_smoothing=smoothing),
        lambda m: functional.cross_entropy(m(X), TARGET, label_smoothing=0.1), ["x", "target"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "loss", "plain", "names"), LOSSES.values(), ids=LOSSES)
def test_a_loss_gets_the_output_and_what_the_model_does_not_take(
    compare: Callable[..., Any], batch: Any, loss: Callable[..., Tensor], plain: Any, names: list[str]
) -> None:
    captured = compare(Lambda(lambda f, x: f(x)), batch, plain, loss=loss)
    assert captured.graph.loss == 0
    assert input_names(captured.graph) == names


class Masked(nn.Module):
    """Takes a mask, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        assert labels is None, "the model was given what the loss takes"
        return self.layer(x) if mask is None else self.layer(x) * mask


class Wrapped(nn.Module):
    """Hands everything on, as wrappers of models do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Masked()

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return self.model(*args, **named)  # type: ignore[no-any-return]


def by_name(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels)


DEALT: dict[str, tuple[Any, Any, Callable[[nn.Module], Tensor]]] = {
    "target, no mask": ((X, TARGET), functional.cross_entropy, lambda m: functional.cross_entropy(m(X), TARGET)),
    "target for a module": ((X, TARGET), nn.CrossEntropyLoss(), lambda m: functional.cross_entropy(m(X), TARGET)),
    "target for a partial": (
        [X, TARGET], partial(functional.cross_entropy, label_smoothing=0.1),
        lambda m: functional.cross_entropy(m(X), TARGET, label_smoothing=0.1),
    ),
    "mask and target": ((X, Y, TARGET), functional.cross_entropy, lambda m: functional.cross_entropy(m(X, Y), TARGET)),
    "mask, nothing for the loss": ((X, Y), mean_of, lambda m: mean_of(m(X, Y))),
    "names": ({"x": X, "labels": TARGET}, by_name, lambda m: functional.cross_entropy(m(X), TARGET)),
    "names with a mask": (
        {"x": X, "mask": Y, "labels": TARGET}, by_name, lambda m: functional.cross_entropy(m(X, Y), TARGET),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", [Masked, Wrapped])
@pytest.mark.parametrize(("batch", "loss", "plain"), DEALT.values(), ids=DEALT)
def test_what_the_loss_needs_is_not_given_to_an_optional_parameter(
    compare: Callable[..., Any], model: type[nn.Module], batch: Any, loss: Any, plain: Any
) -> None:
    compare(model(), batch, plain, loss=loss)


def test_the_buffer_of_a_loss_becomes_a_constant_with_its_values() -> None:
    graph = capture(Lambda(lambda f, x: f(x)), (X, TARGET), WEIGHTED)
    (constant,) = graph.leaves_of(LeafKind.CONSTANT)
    assert constant.name == "loss.weight"
    assert torch.equal(torch.frombuffer(bytearray(constant.data), dtype=torch.float32), WEIGHTED.weight)
    assert graph.leaves_of(LeafKind.BUFFER) == ()


def test_a_loss_module_keeps_the_mode_it_is_in() -> None:
    class Noisy(nn.Module):
        def forward(self, output: Tensor) -> Tensor:
            return functional.dropout(output, training=self.training).sum()

    loss = Noisy().eval()
    graph = capture(nn.Linear(4, 4).train(), X, loss)
    assert "dropout" not in [node.op for node in graph.nodes]
    assert not loss.training


def test_a_loss_inside_the_model_is_found() -> None:
    model = Lambda(lambda f, x: Output(loss=f(x).mean(), logits=f(x)))
    assert capture(model, X).loss == 0
    assert capture(Lambda(lambda f, x: {"logits": f(x), "loss": f(x).mean()}), X).loss == 1
    assert capture(Lambda(lambda f, x: f(x).mean()), X).loss == 0
    assert capture(Lambda(lambda f, x: f(x)), X).loss is None
    assert capture(Lambda(lambda f, x: (f(x).sum(), f(x))), X).loss == 0


def test_a_lambda_loss_of_a_loss_inside_the_model(compare: Callable[..., Any]) -> None:
    model = Lambda(lambda f, x: Output(loss=f(x).mean(), logits=f(x)))
    captured = compare(model, X, lambda plain: plain(X).loss, loss=lambda out: out.loss)
    assert captured.graph.loss == 0


def test_only_calls_of_model_and_loss_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What export asks of their tensors beside them is several times as much."""
    follow, inside = FollowedCalls.__torch_function__, []

    def noted(self: FollowedCalls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stack = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
        inside.append(_Step.forward.__code__ in stack)
        return follow(self, func, types, args, kwargs)

    monkeypatch.setattr(FollowedCalls, "__torch_function__", noted)
    capture(nn.Linear(4, 2), (torch.randn(3, 4), torch.randn(3, 2)), functional.mse_loss)
    assert inside and all(inside)
