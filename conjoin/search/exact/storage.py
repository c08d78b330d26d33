"""The ways to store a parameter: split along its dims over some units, gathered once for a step or twice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from conjoin.ir import BUNDLE_BYTES
from conjoin.ops import TensorType
from conjoin.search.exact.choices import MAX_WASTE
from conjoin.search.exact.layout_codes import WHOLE, B, Codes, S, all_digits
from conjoin.search.exact.units import Units

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Storages:
    """The ways to store a parameter, in parallel arrays."""

    codes: Codes
    regathered: NDArray[np.bool_]
    """Whether what was gathered for the forward pass is dropped, and gathered again."""
    seconds: NDArray[np.float64]
    """Of the update, and what its memory is worth."""


def make_storages(
    type: TensorType,
    units: Units,
    storing_seconds: float,
    update_seconds: float,
    only: int | None = None,
) -> Storages:
    """Every layout of I and splits with little waste, or a given one; where memory counts also gathered twice.

    For a byte of it all that is stored is worth `storing_seconds`, and an update takes `update_seconds`.
    """
    digits = all_digits(len(type.shape), len(units))
    degrees = np.array([unit.degree for unit in units])
    legal, share = pieces_of(type, digits, degrees)
    codes = np.flatnonzero(legal if only is None else np.arange(len(digits)) == only)
    held = type.bytes * share[codes]
    seconds = held * storing_seconds + held * update_seconds
    split = np.flatnonzero((share < 1)[codes]) if storing_seconds else np.zeros(0, np.intp)
    return Storages(
        np.concatenate([codes, codes[split]]),
        np.concatenate([np.zeros(len(codes), bool), np.ones(len(split), bool)]),
        np.concatenate([seconds, seconds[split]]),
    )


def pieces_of(
    type: TensorType, digits: NDArray[np.int64], degrees: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Of layouts on units: which a parameter may be stored in, and how large the largest piece is."""
    legal = ((digits == WHOLE) | (digits >= S)).all(axis=1)
    share = np.ones(len(digits))
    for dim, size in enumerate(type.shape):
        ways = np.where(digits == S + dim, degrees, 1).prod(axis=1)
        piece = -(-size // ways)
        legal &= (ways <= max(size, 1)) & (piece * ways <= size * MAX_WASTE)
        share *= piece / max(size, 1)
    return legal, share


@lru_cache(maxsize=64)
def goes_in_bundle(rank: int, num_units: int) -> NDArray[np.bool_]:
    """[stored, used]: whether a parameter travels with others, while devices compute: where it differs it is stored
    whole or split, and used as copies."""
    digits = all_digits(rank, num_units)
    return in_bundle(digits[:, None, :], digits[None, :, :])


def in_bundle(stored: Codes, used: Codes) -> NDArray[np.bool_]:
    """The same for placements stored and used on units, [..., unit]."""
    brought = (used == B) & ((stored == WHOLE) | (stored >= S))
    found: NDArray[np.bool_] = np.logical_and.reduce((stored == used) | brought, axis=-1)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """How parameters come from where they are stored to a reader: arrays of one shape, or that can be made so."""

    both: Array
    """Seconds of the way there, and of the gradient's back."""
    light: Array
    """The same in a bundle: with others that share its latencies."""
    once: Array
    """Of the way there only."""
    bundled: NDArray[np.bool_]
    held: Array
    """Bytes that a device has of what is read."""
    regathered: NDArray[np.bool_]

    def seconds(self, overlap: float, seconds_per_byte: float) -> Array:
        """Bundles travel together while devices compute; whatever else is needed is waited for."""
        hidden, once = 1 - overlap, self.once
        seconds: Array = np.where(self.bundled, hidden * self.light, self.both)
        if seconds_per_byte:
            keeping = seconds_per_byte * self.held * (once > 0)
            again = np.where(self.bundled, hidden * once, once)
            seconds = seconds + np.where(self.regathered, again, keeping)
        return seconds


def latency_share(type: TensorType) -> float:
    """The part of a collective's latency that falls on a parameter in a bundle."""
    return min(1.0, type.bytes / BUNDLE_BYTES)
