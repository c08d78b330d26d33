"""Batch norms that average over all batches seen (`momentum=None`), traced with the number of batches as a tensor.

Torch's layer reads that number out of its buffer and gives batch norm one by it as momentum. A graph is one program for
every step: so the statistics of the batch are taken apart from the running ones, as with a momentum of 1, and weighted
with one by the number as it is in the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def counted_batches(step: nn.Module) -> Iterator[None]:
    """Trace such layers of a step inside so."""
    layers = [layer for layer in step.modules() if isinstance(layer, _BatchNorm) and _reads_count(layer)]
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _reads_count(layer: _BatchNorm) -> bool:
    is_counting = layer.momentum is None and layer.num_batches_tracked is not None and layer.track_running_stats
    return is_counting and layer.training and type(layer).forward is _BatchNorm.forward


def _forward(layer: _BatchNorm, x: Tensor) -> Tensor:
    mean, var, count = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None and var is not None and count is not None
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    count.add_(1)
    of_batch = torch.zeros_like(mean), torch.ones_like(var)
    y = functional.batch_norm(x, *of_batch, layer.weight, layer.bias, training=True, momentum=1.0, eps=layer.eps)
    part = count.double().reciprocal()
    for running, new in zip((mean, var), of_batch, strict=True):
        running.copy_(part * new + (1 - part) * running)
    return y
