"""Input and weight gradients apart: autograd in one go is the judge of both, and of how often products are computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conjoin.runtime.pipelines.split_backward import SplitBackward


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.count["products"] += 1
        return func(*args, **(kwargs or {}))


class _Together(torch.autograd.Function):
    """One node for many parameters, as a bundle is."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def chained(x: Tensor, weights: list[Tensor], twice: bool) -> list[Tensor]:
    """Layers in a row; an output on the way, and one that nothing which arrived leads to."""
    for weight in weights[:-1]:
        x = torch.tanh(x @ weight) + x
    middle = x
    if twice:
        x = torch.tanh(x @ weights[0])
    return [x @ weights[-1], middle.sum(), weights[1].square().sum()]


@pytest.mark.parametrize("twice", [False, True], ids=["each once", "one twice"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a bundle"])
def test_both_parts_are_the_whole_and_nothing_is_computed_twice(together: bool, twice: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(5)]
    arrived = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def outputs() -> list[Tensor]:
        brought: Any = _Together.apply(*weights) if together else ()  # type: ignore[no-untyped-call]
        return chained(arrived, [torch.ops.aten.alias.default(x) for x in brought] or weights, twice)

    made = outputs()
    gradients = [torch.randn_like(x) for x in made]
    with Products() as whole:
        wanted = torch.autograd.grad(made, [arrived, *weights], gradients)
    made = outputs()
    with Products() as apart:
        split = SplitBackward(made, gradients, [arrived])
        first = split.input_gradients()
        split.add_weight_gradients(weights)
    found = [*first, *(weight.grad for weight in weights)]
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    assert apart.count["products"] == whole.count["products"] or twice


def test_a_weight_that_is_read_as_it_is_and_through_something_counts_once_each() -> None:
    """As in an autoencoder that decodes by what it encodes with."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    arrived = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def output() -> Tensor:
        return torch.tanh(nn.functional.linear(arrived, weight)) @ weight

    wanted = torch.autograd.grad(output().sum(), [arrived, weight])
    made = output()
    split = SplitBackward([made], [torch.ones_like(made)], [arrived])
    found = split.input_gradients()
    split.add_weight_gradients([weight])
    found.append(weight.grad)
    torch.testing.assert_close(found, list(wanted), rtol=1e-12, atol=1e-12)


def test_a_stage_that_nothing_arrives_at_has_all_its_gradients_later() -> None:
    model = nn.Linear(3, 2).double()
    loss = model(torch.ones(4, 3).double()).sum()
    split = SplitBackward([loss], [torch.ones_like(loss)], [])
    assert split.input_gradients() == []
    split.add_weight_gradients(list(model.parameters()))
    weight, bias = model.weight.grad, model.bias.grad
    assert weight is not None and bias is not None
    assert torch.equal(weight, torch.full((2, 3), 4.0).double()) and torch.equal(bias, torch.full((2,), 4.0).double())
