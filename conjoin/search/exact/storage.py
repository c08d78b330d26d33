"""The ways to store a parameter: split along its dims over some units, gathered once for a step or twice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from conjoin.ops import TensorType
from conjoin.search.exact.choices import MAX_WASTE
from conjoin.search.exact.layout_codes import WHOLE, B, Codes, S, all_digits
from conjoin.search.exact.units import Units


@dataclass(frozen=True, slots=True, eq=False)
class Storages:
    """The ways to store a parameter, in parallel arrays."""

    codes: Codes
    even: NDArray[np.bool_]
    """Whether all pieces are of one size: others are gathered on their own."""
    regathered: NDArray[np.bool_]
    """Whether what was gathered for the forward pass is dropped, and gathered again."""
    seconds: NDArray[np.float64]
    """Of the update, and what its memory is worth."""


def make_storages(
    type: TensorType,
    units: Units,
    copies: int,
    update_seconds: float,
    seconds_per_byte: float,
    only: int | None = None,
) -> Storages:
    """Every layout of I and splits with little waste, or a given one; where memory counts also gathered twice.

    `copies` tensors are stored for it, and for a byte of it an update takes `update_seconds`.
    """
    digits = all_digits(len(type.shape), len(units))
    degrees = np.array([unit.degree for unit in units])
    legal = ((digits == WHOLE) | (digits >= S)).all(axis=1)
    even, share = np.ones(len(digits), bool), np.ones(len(digits))
    for dim, size in enumerate(type.shape):
        ways = np.where(digits == S + dim, degrees, 1).prod(axis=1)
        piece = -(-size // ways)
        legal &= (ways <= max(size, 1)) & (piece * ways <= size * MAX_WASTE)
        even &= piece * ways == size
        share *= piece / max(size, 1)
    codes = np.flatnonzero(legal if only is None else np.arange(len(digits)) == only)
    held = type.bytes * share[codes]
    seconds = held * copies * seconds_per_byte + held * update_seconds
    split = np.flatnonzero((share < 1)[codes] & even[codes]) if seconds_per_byte else np.zeros(0, np.intp)
    return Storages(
        np.concatenate([codes, codes[split]]),
        np.concatenate([even[codes], even[codes][split]]),
        np.concatenate([np.zeros(len(codes), bool), np.ones(len(split), bool)]),
        np.concatenate([seconds, seconds[split]]),
    )


@lru_cache(maxsize=64)
def goes_in_bundle(rank: int, num_units: int) -> NDArray[np.bool_]:
    """[stored, used]: whether a parameter travels with others, while devices compute: copies of all that differs, whose
    gradients are all-reduced, or a gather of all that differs, whose gradients are reduce-scattered."""
    digits = all_digits(rank, num_units)
    stored, used = digits[:, None, :], digits[None, :, :]
    same, copied = stored == used, used == B
    found: NDArray[np.bool_] = np.logical_and.reduce(same | (copied & (stored == WHOLE)), axis=-1)
    gathered: NDArray[np.bool_] = np.logical_and.reduce(same | (copied & (stored >= S)), axis=-1)
    return np.logical_or(found, gathered)
