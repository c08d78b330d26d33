"""Regions with gradients switched off, writes within them, and functions with a backward of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.runtime import to_module
from tests.frontends.counted_module import Counted, X


def no_grad_over_parameters(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        scale = m.layer(x).sigmoid() + m.layer.weight.sum()
    return y * scale


def nested_enable_grad(m: Counted, x: Tensor) -> Tensor:
    with torch.no_grad():
        stopped = m.layer(x)
        with torch.enable_grad():
            flowing = m.layer(stopped).tanh()
            with torch.no_grad():
                again = m.layer(flowing)
        last = m.layer(again)
    return flowing * again + last + stopped


def everything_stopped_but_one(m: Counted, x: Tensor) -> Any:
    with torch.no_grad():
        a = m.layer(x)
        b = a * 2
    return a, b, m.layer(b)


def view_of_a_parameter(m: Counted, x: Tensor) -> Tensor:
    with torch.no_grad():
        row = m.layer.weight[0]
        table = m.layer.weight.t()
    return m.layer(x) * row + x @ table


def integers_inside(m: Counted, x: Tensor) -> Tensor:
    with torch.no_grad():
        chosen = m.layer(x).argmax(-1)
        mask = m.layer(x) > 0
    return m.layer(x)[torch.arange(3), chosen] + (m.layer(x) * mask).sum(-1)


def decorated(m: Counted, x: Tensor) -> Tensor:
    @torch.no_grad()
    def scale(y: Tensor) -> Tensor:
        return m.layer(y).abs() + 1

    return m.layer(x) / scale(x)


def switched_by_hand(m: Counted, x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = m.layer(x)
    torch.set_grad_enabled(before)
    return m.layer(x) * y


def detached(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    return y * y.detach() + y.data + (y - y.detach()).detach_()


def straight_through(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    return y + (y.round() - y).detach()


def dropout_inside(m: Counted, x: Tensor) -> Tensor:
    with torch.no_grad():
        noise = nn.functional.dropout(m.layer(x), 0.5)
    return m.layer(x) + noise + nn.functional.dropout(m.layer(x), 0.5)


def empty_region(m: Counted, x: Tensor) -> Tensor:
    with torch.no_grad():
        pass
    return m.layer(x)


GRADIENTS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        no_grad_over_parameters, nested_enable_grad, everything_stopped_but_one, view_of_a_parameter, integers_inside,
        decorated, switched_by_hand, detached, straight_through, dropout_inside, empty_region,
    )
}  # fmt: skip


@pytest.mark.parametrize("function", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_stop_where_they_stop_in_the_plain_model(
    compare: Callable[..., Any], function: Callable[..., Any]
) -> None:
    compare(Counted(function), X, steps=2)


def returned_unchanged_inside(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        same = y.float().contiguous()
        m.steps += same.argmax()
    return m.layer(y)


def viewed_inside_written_outside(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        row = y[0]
    y = y * 2
    return y + row


def written_under_a_second_name(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    same = nn.functional.dropout(y.float(), training=False)
    same.add_(1)
    return y * 2


def noted_then_written(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.mean.add_(y.detach().mean(0))
    with torch.no_grad():
        m.steps += y.argmax()
    return y.relu_() * 2


OUTSIDE = (
    returned_unchanged_inside, viewed_inside_written_outside, written_under_a_second_name, noted_then_written,
)  # fmt: skip


@pytest.mark.parametrize("function", OUTSIDE, ids=lambda function: function.__name__)
def test_gradients_outside_a_region_are_not_touched(compare: Callable[..., Any], function: Callable[..., Any]) -> None:
    compare(Counted(function), X)


def under_no_grad(y: Tensor) -> None:
    with torch.no_grad():
        y.clamp_(min=0)


def to_a_view_under_no_grad(y: Tensor) -> None:
    with torch.no_grad():
        y[0].clamp_(min=0)


@pytest.mark.parametrize(
    "write",
    [under_no_grad, to_a_view_under_no_grad, lambda y: y.detach().clamp_(min=0), lambda y: y.data.clamp_(min=0)],
    ids=["under no_grad", "to a view under no_grad", "detached", "data"],
)
def test_writing_past_the_gradients_is_refused(write: Callable[[Tensor], None]) -> None:
    def forward(m: Counted, x: Tensor) -> Tensor:
        y = m.layer(x)
        write(y)
        return y

    with pytest.raises(CaptureError, match=r"operator clamp_ at .*stopped_gradients.py:\d+: it writes into a tensor"):
        capture(Counted(forward), X)


UNTOLD: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda y: torch.einsum("ab->ba", y),
    "meshgrid": lambda y: torch.meshgrid(y[0], indexing="ij")[0],
    "the second of two": lambda y: torch.atleast_3d(torch.ones(2), y)[1],
    "a list": lambda y: torch.broadcast_tensors(torch.ones(1), torch.einsum("ab->ba", y))[1],
}
"""Views of which no schema says so."""


@pytest.mark.parametrize("view", UNTOLD.values(), ids=UNTOLD)
@pytest.mark.parametrize("way", ["under no_grad", "detached", "to a parameter", "to an input"])
def test_what_must_not_be_written_to_is_seen_through_every_view(view: Callable[[Tensor], Tensor], way: str) -> None:
    def forward(m: Counted, x: Tensor) -> Tensor:
        y = m.layer(x)
        with torch.set_grad_enabled(way == "detached"):
            view({"to a parameter": m.layer.weight, "to an input": x, "detached": y.detach()}.get(way, y)).clamp_(min=0)
        return y

    told = "it writes to" if way.startswith("to") else "it writes into a tensor through which gradients flow"
    with pytest.raises(CaptureError, match=rf"operator clamp_ at .*_gradients.py:\d+: {told}"):
        capture(Counted(forward), X)


def test_no_gradient_at_all_flows_out_of_no_grad() -> None:
    model = Counted(lambda m, x: torch.no_grad()(lambda: m.layer(x))())
    output = to_module(capture(model, X), model)(X)
    assert not output.requires_grad


def test_capture_under_no_grad_is_still_a_training_graph(unequal: Callable[..., list[str]]) -> None:
    model = Counted(no_grad_over_parameters)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        graph = capture(model, X)
    assert graph == capture(model, X)
    module = to_module(graph, model)
    module(X).sum().backward()
    plain(X).sum().backward()
    assert unequal(module, plain) == []


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.sigmoid() * (1 + x * (1 - x.sigmoid())))


def test_an_autograd_function_with_a_backward_of_its_own_is_refused() -> None:
    model = Counted(lambda m, x: Reversed.apply(m.layer(x)))
    with pytest.raises(CaptureError, match=r"autograd function Reversed at .*_gradients.py:\d+: its backward is not"):
        capture(model, X)


def test_an_autograd_function_that_is_the_derivative_is_taken_apart() -> None:
    model = Counted(lambda m, x: Swish.apply(m.layer(x)))
    plain = copy.deepcopy(model)
    module = to_module(capture(model, X), model)
    module(X).sum().backward()
    plain(X).sum().backward()
    torch.testing.assert_close(module.layer.weight.grad, plain.layer.weight.grad)


HANDED_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": torch.atleast_2d,
    "atleast_3d": torch.atleast_3d,
    "contiguous": Tensor.contiguous,
    "of a transposed": lambda x: x.mT.contiguous().mT,
    "to its dtype": lambda x: x.to(torch.float32),
    "to its device": Tensor.cpu,
    "type_as": lambda x: x.type_as(x),
    "no dropout": lambda x: nn.functional.dropout(x, 0.5, training=False),
    "dropout of nothing": lambda x: nn.functional.dropout(x, 0.0),
    "flatten of one dim": lambda x: x.flatten(-1),
    "real": torch.real,
    "positive": torch.positive,
    "resolve_conj": torch.resolve_conj,
    "resolve_neg": torch.resolve_neg,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(1))[0],
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
    "a view": lambda x: x.view(x.shape),
    "all of it": lambda x: x[:],
    "reshape": lambda x: x.reshape(x.shape),
    "expand": lambda x: x.expand(x.shape),
    "transposed twice": lambda x: x.mT.mT,
    "a copy": Tensor.clone,
    "detach": Tensor.detach,
}


class HandsOn(nn.Module):
    """What a call gives without gradients, and what it was given after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in HANDED_ON)

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for layer, call in zip(self.layers, HANDED_ON.values(), strict=True):
            given = layer(x)
            with torch.no_grad():
                made = call(given)
            total = total + (made * made.abs()).sum() + 0.5 * given.sum()
        return total


def test_a_call_that_hands_on_its_argument_does_not_end_its_gradient() -> None:
    torch.manual_seed(0)
    model, x = HandsOn(), torch.randn(3, 2, 4)
    plain = copy.deepcopy(model)
    plain(x).backward()
    to_module(capture(model, x), model)(x).backward()
    for name, ours, theirs in zip(HANDED_ON, model.layers, plain.layers, strict=True):
        assert torch.equal(ours.weight.grad, theirs.weight.grad), name
