"""A model and its loss called as the user calls them, with a batch dealt out as capture deals it out; no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from conjoin.frontends.dealt_batch import Batch, deal_out


def run_plainly(model: nn.Module, batch: Batch, loss: Callable[..., Any] | None = None) -> Any:
    """What a step computes: the model's output, or the loss of it.

    >>> import torch
    >>> run_plainly(nn.Identity(), (torch.ones(2), torch.zeros(2)), nn.functional.mse_loss)
    tensor(1.)
    """
    given = deal_out(model, batch, loss)
    output = model(*given.args, **given.kwargs)
    if loss is None:
        return output
    rest = (batch,) if given.whole_to_loss else given.loss_args
    return loss(output, *rest, **(given.loss_kwargs or {}))
