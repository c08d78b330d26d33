"""The model inside what people put around one, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import conjoin
from conjoin.errors import CaptureError, UsageError
from conjoin.ir import plain_model
from tests.ir.wording import assert_three_sentences

X, Y = torch.randn(8, 4), torch.randn(8, 3)
WRAPPED: dict[str, Callable[[nn.Module], object]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": nn.DataParallel,
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "bare": lambda model: model,
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_what_is_around_a_model_is_taken_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    wrapped = wrap(model)
    assert plain_model(wrapped) is model
    plan = conjoin.plan(wrapped, (X, Y), "local:1", loss=functional.mse_loss, strategy="single")
    assert plan == conjoin.plan(model, (X, Y), "local:1", loss=functional.mse_loss, strategy="single")
    step = conjoin.load(plan, wrapped)
    assert dict(step.named_parameters()).keys() == {"weight", "bias"}
    want = functional.mse_loss(model(X), Y)
    assert torch.equal(step(X, Y), want)
    captured = conjoin.to_module(conjoin.capture(wrapped, (X, Y), functional.mse_loss), wrapped)
    assert torch.equal(captured(X, Y), want)
    assert conjoin.verify_plan(plan, wrapped, (X, Y), loss=functional.mse_loss, num_steps=1).passed


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: nn.Module = torch.jit.script(nn.Linear(4, 3))
    return made


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: nn.Module = torch.jit.trace(nn.Linear(4, 3), X)
    return made


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))


class Sharded(nn.Linear):
    """As fully_shard leaves a module: parameters of a class that torch calls DTensor."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_parameter("weight", nn.Parameter(DTensor(torch.zeros(3, 4))))


class DTensor(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "scripted": (scripted, "is TorchScript in itself"),
    "traced": (traced, "is TorchScript in itself"),
    "partly scripted": (lambda: nn.Sequential(nn.ReLU(), scripted()), "is TorchScript in 1"),
    "lazy": (lazy, "2 parameters or buffers without a shape, 1.weight first"),
    "sharded": (Sharded, "weight is a DTensor"),
    "a class": (lambda: nn.Linear, "The class Linear was given instead of the model"),
    "a function": (lambda: torch.relu, "was given instead of the model"),
}


@pytest.mark.parametrize(("make", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_plain_model(make: Callable[[], nn.Module], told: str) -> None:
    model = make()
    with pytest.raises(UsageError, match=told) as caught:
        plain_model(model)
    assert_three_sentences(caught.value)
    with pytest.raises((CaptureError, UsageError), match=told):
        conjoin.capture(model, (X, Y), functional.mse_loss)


def test_a_lazy_model_that_has_seen_a_batch_is_plain() -> None:
    model = lazy()
    model(X)
    assert len(conjoin.capture(model, (X, Y), functional.mse_loss).leaves) == 6
