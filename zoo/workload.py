"""What the zoo hands out: a plain model, one synthetic batch, and the loss that turns its output into a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
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


_LENGTHS = ("length", "positions", "steps")
"""What configurations call the length of a sequence."""


def sizes_of(entry: Entry, *, tiny: bool) -> tuple[str, ...]:
    """The sizes of a model that may be asked for otherwise: the whole numbers of its configuration."""
    found: dict[str, None] = {}
    for config in _configs(entry.tiny_model if tiny else entry.model):
        whole = [field.name for field in fields(config) if type(getattr(config, field.name)) is int]
        found |= dict.fromkeys("length" if name in _LENGTHS else name for name in whole)
    return tuple(found)


def _configs(make: Callable[..., object]) -> list[Any]:
    given = (*make.args, *make.keywords.values()) if isinstance(make, partial) else ()
    return [value for value in given if is_dataclass(value) and not isinstance(value, type)]


def _resized(make: Callable[..., T], sizes: Mapping[str, int]) -> Callable[..., T]:
    """What makes a model or its data, in other sizes."""
    if not isinstance(make, partial) or not sizes:
        return make

    def changed(value: Any) -> Any:
        if not is_dataclass(value) or isinstance(value, type):
            return value
        names = {field.name for field in fields(value)}
        spelled = {next((n for n in _LENGTHS if n in names), k) if k == "length" else k: v for k, v in sizes.items()}
        return replace(value, **{name: size for name, size in spelled.items() if name in names})

    return partial(make.func, *map(changed, make.args), **{key: changed(v) for key, v in make.keywords.items()})


def build_entry(
    entry: Entry, *, tiny: bool, batch_size: int | None, device: str, seed: int, sizes: Mapping[str, int] | None = None
) -> Workload:
    """Build the model and its data on `device`, reproducibly for a seed, leaving the global random state alone."""
    make, data = (entry.tiny_model, entry.tiny_data) if tiny else (entry.model, entry.data)
    make, data = _resized(make, sizes or {}), _resized(data, sizes or {})
    count = batch_size or (entry.tiny_batch_size if tiny else entry.batch_size)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return Workload(make(), data(count), entry.loss)
