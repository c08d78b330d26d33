"""Custom autograd functions: kept where their backward is the derivative of their forward, refused where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.frontends import custom_functions


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient pretends that it does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Cube(torch.autograd.Function):
    """x^3 with its analytic derivative, in the older style."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x**2 * gradient, None


class Sine(torch.autograd.Function):
    """sin(x) with its analytic derivative, in the newer style."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x.cos() * gradient


class Uses(nn.Module):
    def __init__(self, function: Any, *more: float) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.function, self.more = function, more

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.body(x), *self.more).sum()


@pytest.mark.parametrize("model", [Uses(Cube, 2.0), Uses(Sine)], ids=["older-style", "newer-style"])
def test_an_analytic_backward_is_kept(model: nn.Module) -> None:
    x = torch.randn(3, 4)
    step = conjoin.to_module(conjoin.capture(model, x), model)
    ours = torch.autograd.grad(step(x), list(model.parameters()))
    plain = torch.autograd.grad(model(x), list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, plain, strict=True))


def test_another_backward_is_refused_with_its_line() -> None:
    with pytest.raises(conjoin.CaptureError, match=r"StraightThrough at .*test_custom_functions.py:\d+") as caught:
        conjoin.capture(Uses(StraightThrough), torch.randn(3, 4))
    assert "register_operator" in str(caught.value)


through = StraightThrough.apply
"""As torch's own pages take it: before anything is captured."""


class Taken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = through(super().forward(x))
        return made.sum()


def test_one_that_was_taken_from_its_class_is_watched_too() -> None:
    with torch.device("meta"):
        model, x = Taken(4, 4), torch.randn(3, 4)
    with pytest.raises(conjoin.CaptureError, match=r"StraightThrough at .*test_custom_functions.py:\d+"):
        conjoin.capture(model, x)


def test_watching_leaves_torch_as_it_was() -> None:
    before = dict(vars(torch.autograd.Function))
    code = torch.autograd.Function.__dict__["apply"].__func__.__code__
    with pytest.raises(conjoin.CaptureError):
        conjoin.capture(Uses(StraightThrough), torch.randn(3, 4))
    assert dict(vars(torch.autograd.Function)) == before
    assert torch.autograd.Function.__dict__["apply"].__func__.__code__ is code


class Declared(torch.autograd.Function):
    """Rounds likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


declared = Declared.apply


class Rounding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = declared(super().forward(x))
        return made.square().sum()


def test_one_that_was_taken_and_then_declared_is_its_operator() -> None:
    conjoin.register_operator(Declared, "... -> ...")
    model, x = Rounding(4, 4), torch.randn(3, 4)
    graph = conjoin.capture(model, x)
    assert any(node.op.endswith("::Declared") for node in graph.nodes)
    ours = torch.autograd.grad(conjoin.to_module(graph, model)(x), list(model.parameters()))
    plain = torch.autograd.grad(model(x), list(model.parameters()))
    assert all(torch.allclose(a, b) for a, b in zip(ours, plain, strict=True))


@torch.library.custom_op("held::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)


class Holding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.twice, self.packet = twice, torch.ops.held.twice

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.packet(self.twice(super().forward(x)))
        return made


def test_an_operator_that_a_model_holds_is_no_state_of_it(caplog: pytest.LogCaptureFixture) -> None:
    graph = conjoin.capture(Holding(), torch.randn(3, 4))
    assert [node.op for node in graph.nodes][-2:] == ["held::twice"] * 2
    conjoin.capture(nn.GRU(4, 4), torch.randn(3, 2, 4))
    assert "forward changes it" not in caplog.text and "cannot be copied" not in caplog.text


class BoundedRoot(torch.autograd.Function):
    """The square root, its derivative bounded near zero: right where the root exists."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient / (4 * x).clamp(min=1e-6).sqrt()


def test_numbers_outside_the_domain_say_nothing() -> None:
    class Rooted(Uses):
        def forward(self, x: Tensor) -> Tensor:
            return BoundedRoot.apply(self.body(x) ** 2 + 0.5).sum()

    graph = conjoin.capture(Rooted(BoundedRoot), torch.randn(3, 4))
    assert "sqrt" in [node.op for node in graph.nodes]


class NeedsItsShape(torch.autograd.Function):
    """Runs on nothing but a tensor of its own shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.reshape(2048, 4096) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.reshape(4096, 2048) * 2


@pytest.mark.parametrize(
    ("function", "more", "reason"),
    [
        (Cube, (2.0,), None),
        (Sine, (), None),
        (StraightThrough, (), "its backward is not the derivative of its forward"),
        (NeedsItsShape, (), "its backward could not be tried on random numbers (RuntimeError: shape"),
    ],
)
def test_very_many_elements_are_tried_on_fewer(function: Any, more: tuple[float, ...], reason: str | None) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4096, 2048, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            return function.apply(x * self.weight, *more).sum()

    x = torch.empty(4096, 2048, device="meta")
    if reason is None:
        assert conjoin.capture(Large(), x).nodes
    else:
        with pytest.raises(conjoin.CaptureError) as caught:
            conjoin.capture(Large(), x)
        assert reason in str(caught.value)


def test_calls_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    monkeypatch.setattr(custom_functions, "_objection", lambda call: tried.append(call.args[1]))

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for factor in (2.0, 2.0, 3.0, 2.0):
                x = Cube.apply(x, factor)  # type: ignore[no-untyped-call]
            return x.sum()

    assert conjoin.capture(Deep(), torch.randn(3, 4)).nodes
    assert tried == [2.0, 3.0]
