"""Other batches of the same kind: what was captured must hold for all of them, not only for the one captured.

Numbers are mixed from those that are there, so that they stay within their range: probabilities stay probabilities and
addresses stay inside their table. Every tensor of the batch is drawn by itself, though it may be given twice. Where a
model does not take such a batch (offsets that must rise, a mask that must leave something), only samples change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from conjoin.ir import flatten_tree, unflatten_tree

_SEED = 7
_SOME = 1000
"""Elements among which there are mostly more than two kinds."""


class Freshness(Enum):
    """How far a batch is from the one given; the freshest that the model takes is used."""

    MIXED = "other values within the same range"
    SHUFFLED = "the same samples in another order"
    GIVEN = "the batch as given"


def fresh_batches(batch: Any, count: int, freshness: Freshness) -> Sequence[Any]:
    """Several batches like one, each from the next; the same ones whenever and wherever they are asked for."""
    if freshness is Freshness.GIVEN:
        return [batch] * count
    generator = torch.Generator().manual_seed(_SEED)
    leaves, spec = flatten_tree(batch)
    return [
        unflatten_tree([_fresh(x, freshness, generator) if isinstance(x, Tensor) else x for x in leaves], spec)
        for _ in range(count)
    ]


def _fresh(tensor: Tensor, freshness: Freshness, generator: torch.Generator) -> Tensor:
    given = tensor.detach().cpu()
    if freshness is Freshness.SHUFFLED and given.dim():
        made = given[torch.randperm(given.shape[0], generator=generator)]
    else:
        made = _mixed(given.flatten(), generator).reshape(given.shape)
    return made.to(tensor.device).requires_grad_(tensor.requires_grad)


def _mixed(flat: Tensor, generator: torch.Generator) -> Tensor:
    """Every element somewhere between two that are there; where there are few kinds of them, one of these."""
    moved = flat[torch.randperm(len(flat), generator=generator)]
    if not flat.is_floating_point() or not flat.numel():
        return moved
    kinds = torch.unique(flat[:_SOME].double())
    if len(kinds) <= 2:  # else it need not be counted how many there are
        kinds = torch.unique(flat.double())
    are_finite = bool(flat.isfinite().all())
    part = torch.rand(flat.shape, generator=generator, dtype=torch.float64)
    if len(kinds) == 1 and are_finite:
        value = kinds.item()
        return (part if value == 0 else value * (1 + part) / 2).to(flat.dtype)
    if len(kinds) == 2 or not are_finite:
        return moved
    return (part * flat.double() + (1 - part) * moved.double()).to(flat.dtype)
