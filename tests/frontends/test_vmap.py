"""`torch.vmap` in forward: values and gradients are those of the plain model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from conjoin.frontends import capture
from conjoin.runtime import to_module

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": torch.vmap(lambda row: row.softmax(-1) * 0.25),
    "centred": torch.vmap(lambda row: row - row.mean()),
    "pairs": lambda x: torch.vmap(torch.vmap(torch.dot, (None, 0)), (0, None))(x, x * 2),
    "numbers": lambda x: torch.vmap(lambda number: number.softmax(-1) * 0.25 + number)(x[0]),
    "in chunks": torch.vmap(lambda row: row.cumsum(0), chunk_size=2),
    "a view of a row": torch.vmap(lambda row: row.flip(0)[1:].exp()),
    "columns": torch.vmap(lambda column: column.cumsum(0), in_dims=1, out_dims=1),
    "rows become columns": torch.vmap(lambda row: row.exp(), out_dims=-1),
    "columns in chunks": torch.vmap(lambda column: column.exp(), in_dims=1, chunk_size=2),
    "pairs, the other way round": lambda x: torch.vmap(torch.vmap(torch.dot, (None, 0)), (0, None), 1)(x, x.exp()),
    "the same for all": lambda x: torch.vmap(lambda row: x[0].exp())(x),
    "what each drops": lambda x: torch.vmap(_drop, in_dims=1, out_dims=1, randomness="different")(x),
    "what all drop": lambda x: torch.vmap(_drop, randomness="same")(x),
    "what each draws": lambda x: torch.vmap(lambda row: row + torch.randn_like(row), randomness="different")(x),
}


def _drop(row: Tensor) -> Tensor:
    return nn.functional.dropout(row, 0.3)


class Batched(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.layer(x)).square().mean()


class Ensemble(nn.Module):
    """Several models of one form, whose parameters are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 2).to("meta")
        stacked, _ = stack_module_state([nn.Linear(4, 2) for _ in range(3)])
        self.weight, self.bias = nn.Parameter(stacked["weight"].detach()), nn.Parameter(stacked["bias"].detach())

    def forward(self, x: Tensor) -> Tensor:
        def one(weight: Tensor, bias: Tensor) -> Tensor:
            return functional_call(self.base, {"weight": weight, "bias": bias}, (x,))

        return torch.vmap(one)(self.weight, self.bias).var(0).sum()


def judge(model: nn.Module) -> None:
    model = model.double().train()
    planned = to_module(capture(model, torch.randn(3, 4, dtype=torch.float64)), model)
    x = torch.randn(3, 4, dtype=torch.float64)
    parameters = [p for p in model.parameters() if not p.is_meta]
    losses = []
    for module in (planned, model):
        torch.manual_seed(5)
        losses.append(module(x))
    gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_it_is_captured(form: Callable[[Tensor], Tensor]) -> None:
    judge(Batched(form))


def test_models_of_stacked_parameters_are_captured() -> None:
    judge(Ensemble())
