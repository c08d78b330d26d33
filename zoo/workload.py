"""What the zoo hands out: a plain model, one synthetic batch, and the loss that turns its output into a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...] | dict[str, Tensor]


class Workload(NamedTuple):
    """A model, a batch, and a loss called as `loss(output, *what_forward_does_not_take)`; None: forward returns it."""

    model: nn.Module
    batch: Batch
    loss: Callable[..., Tensor] | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the catalogue: how to make a model and a batch of n samples, at the published size and a tiny one."""

    model: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    tiny_model: Callable[[], nn.Module]
    tiny_data: Callable[[int], Batch]
    batch_size: int
    tiny_batch_size: int
    loss: Callable[..., Tensor] | None
    source: str
    """The paper (section or table) or specification the hyper-parameters come from."""


def build_entry(entry: Entry, *, tiny: bool, batch_size: int | None, device: str, seed: int) -> Workload:
    """Build the model and its data on `device`, reproducibly for a seed, leaving the global random state alone."""
    make, data = (entry.tiny_model, entry.tiny_data) if tiny else (entry.model, entry.data)
    count = batch_size or (entry.tiny_batch_size if tiny else entry.batch_size)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return Workload(make(), data(count), entry.loss)
