"""How the tests of the zoo build tiny workloads and run them."""

from __future__ import annotations

import inspect

from torch import Tensor

from zoo.catalog import _entries
from zoo.workload import Entry, Workload, build_entry


def tiny_names() -> tuple[str, ...]:
    """Models of the zoo that differ in their tiny sizes: the first name of each."""
    first: dict[str, str] = {}
    for name, entry in sorted(_entries().items()):
        first.setdefault(repr((entry.tiny_model, entry.tiny_data, entry.tiny_batch_size)), name)
    return tuple(first.values())


def build_tiny(entry: Entry, seed: int = 0, batch_size: int | None = None) -> Workload:
    """The tiny size on the CPU in double precision."""
    model, batch, loss = build_entry(entry, tiny=True, batch_size=batch_size, device="cpu", seed=seed)
    return Workload(model.double(), tuple(t.double() if t.is_floating_point() else t for t in batch), loss)


def inputs_and_targets(workload: Workload) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Split the batch after the tensors that `forward` takes."""
    taken = len(inspect.signature(workload.model.forward).parameters)
    return workload.batch[:taken], workload.batch[taken:]


def loss_of(workload: Workload) -> Tensor:
    """The loss of one forward."""
    inputs, targets = inputs_and_targets(workload)
    return workload.loss(workload.model(*inputs), *targets)
