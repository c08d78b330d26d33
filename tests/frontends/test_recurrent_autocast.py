"""Recurrent layers under the CPU's autocast, which casts what is inside of them: the plain model is the judge."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from conjoin import capture
from conjoin.runtime import to_module

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "cells of lstm": nn.LSTMCell, "cells of gru": nn.GRUCell, "rnn": nn.RNN}


class Recurrent(nn.Module):
    """With `narrow` the layer is given what a linear layer made, which is in half precision."""

    def __init__(self, name: str, narrow: bool) -> None:
        super().__init__()
        self.before, self.layer, self.narrow = nn.Linear(6, 6), LAYERS[name](6, 4), narrow

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x) if self.narrow else x
        if not isinstance(self.layer, nn.LSTMCell | nn.GRUCell):
            return self._loss(self.layer(x)[0])
        state = None
        for step in x:
            state = self.layer(step, state)
        return self._loss(state[0] if isinstance(state, tuple) else state)

    def _loss(self, made: Tensor | None) -> Tensor:
        assert made is not None
        return made.float().square().mean()


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_cast_as_in_the_model(name: str, narrow: bool) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(name, narrow).train(), torch.randn(3, 5, 6)
    planned = to_module(capture(model, (x,), precision="bf16-mixed"), deepcopy(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(x)
    made = planned(x)
    plain.backward()
    made.backward()
    torch.testing.assert_close(made, plain, rtol=1e-4, atol=0)
    for (which, wanted), found in zip(model.named_parameters(), planned.parameters(), strict=True):
        if wanted.grad is not None:
            far = (found.grad - wanted.grad).abs().max() / wanted.grad.abs().max()
            assert far < 0.01, which
