"""Which output of a model is taken for its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.frontends import capture

X, Y = torch.randn(8, 6), torch.randint(4, (8,))


class Returning(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.scale, self.make = nn.Linear(6, 4), nn.Parameter(torch.tensor(1.0)), make

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.fc(x)
        return self.make(logits, functional.cross_entropy(logits, y), self.scale)


RETURNS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], int | None]] = {
    "loss alone": (lambda logits, loss, scale: loss, 0),
    "logits and loss": (lambda logits, loss, scale: (logits, loss), 1),
    "loss and logits": (lambda logits, loss, scale: [loss, logits], 0),
    "deep": (lambda logits, loss, scale: {"a": (logits, {"b": loss})}, 1),
    "named": (lambda logits, loss, scale: {"aux": loss * 2, "loss": loss, "logits": logits}, 1),
    "named, no number": (lambda logits, loss, scale: {"loss": logits, "other": loss}, None),
    "beside a learned scale": (lambda logits, loss, scale: (logits, scale.exp(), loss), 2),
    "beside an accuracy": (lambda logits, loss, scale: (loss, logits.argmax(-1).sum(), logits), 0),
    "beside a plain number": (lambda logits, loss, scale: (3.0, loss), 1),
    "two numbers": (lambda logits, loss, scale: (loss, 2 * loss), None),
    "a learned scale alone beside features": (lambda logits, loss, scale: (logits, scale.exp()), None),
    "none": (lambda logits, loss, scale: (logits, logits), None),
    "the norm of the batch": (lambda logits, loss, scale: (logits, X.norm()), None),
}


@pytest.mark.parametrize(("make", "place"), RETURNS.values(), ids=RETURNS)
def test_the_loss_among_the_outputs(make: Callable[[Tensor, Tensor, Tensor], Any], place: int | None) -> None:
    assert capture(Returning(make), (X, Y)).loss == place


def test_a_loss_function_may_return_more_than_the_loss() -> None:
    found = capture(nn.Linear(6, 4), (X, Y), lambda out, y: (functional.cross_entropy(out, y), out))
    assert found.loss == 0 and len(found.outputs) == 2
