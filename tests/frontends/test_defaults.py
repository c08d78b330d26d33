"""A graph means the same whatever torch's default dtype and device are where it is captured, read and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from conjoin.frontends import capture
from conjoin.ir import find_faults, parse_graph
from conjoin.runtime import to_module

X = torch.linspace(-1, 1, 12).reshape(3, 4)
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "division of whole numbers": lambda x: (x > 0).sum() / 5,
    "division by a number": lambda x: torch.arange(4, device=x.device) / 3,
    "root": lambda x: (x > 0).long().sqrt(),
    "sigmoid of truths": lambda x: (x > 0).sigmoid(),
    "times a float": lambda x: (x > 0).long() * 1.5,
    "plus a float": lambda x: (x > 0) + 0.5,
    "power": lambda x: (x > 0).long() ** 0.5,
    "chosen numbers": lambda x: torch.where(x > 0, 1.0, 0.0),
    "chosen from whole numbers": lambda x: torch.where(x > 0, (x > 1).long(), 0.5),
    "ones": lambda x: torch.ones(4, device=x.device),
    "full": lambda x: torch.full((4,), 0.5, device=x.device),
    "range": lambda x: torch.arange(0, 0.9, 0.3, device=x.device),
    "linspace": lambda x: torch.linspace(0, 1, 4, device=x.device),
    "eye": lambda x: torch.eye(3, device=x.device),
    "tensor": lambda x: torch.tensor(0.3, device=x.device),
    "like a mask": lambda x: torch.zeros_like(x > 0, dtype=torch.float32),
    "log of whole numbers": lambda x: torch.logaddexp(x, x) + (x > 0).long().add(1).log(),
    "division that does not round": lambda x: torch.div((x > 0).long(), 2, rounding_mode=None),
    "mean of truths as floats": lambda x: (x > 0).float().mean(),
}


class All(nn.Module):
    """Every function at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, dtype=torch.float32))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {name: function(x * self.scale) for name, function in FUNCTIONS.items()}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("captured", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("run", [torch.float32, torch.float64], ids=str)
def test_a_graph_runs_as_where_it_was_captured(captured: torch.dtype, run: torch.dtype) -> None:
    model = All()
    torch.set_default_dtype(captured)
    graph, want = capture(model, X), model(X)
    assert not any("opaque" in node.op for node in graph.nodes)
    torch.set_default_dtype(run)
    again = parse_graph(str(graph))
    assert again == graph and find_faults(again) == ()
    got = to_module(again, model)(X)
    assert {name for name in FUNCTIONS if got[name].dtype != want[name].dtype} == set()
    assert {name for name in FUNCTIONS if not torch.equal(got[name], want[name])} == set()


def test_capture_does_not_ask_for_the_default_device() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return 3 * x**2 * gradient

    class Cubed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return Cube.apply(self.layer(x)) + torch.ones(4, device=x.device)

    model = Cubed()
    want = str(capture(model, X))
    torch.set_default_device("meta")
    graph = capture(model, X)
    assert str(graph) == want
    assert pytree.tree_all(lambda tensor: tensor.device.type == "cpu", to_module(graph, model)(X))
