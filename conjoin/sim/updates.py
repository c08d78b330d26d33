"""What the update of stored parameters takes on each rank: its pieces of them, their seconds, bytes for a moment."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from conjoin.comm import splits_evenly, updated_together
from conjoin.cost import Seconds
from conjoin.ir import cut_for_all, places_of_all
from conjoin.machine import Mesh
from conjoin.ops import At, TensorType, split_axes
from conjoin.sim.fragments import local_shape
from conjoin.sim.prices import OPTIMIZER_COPIES, Prices


class UpdatedPieces:
    """What ranks store of tensors; those that are split evenly are looked at once."""

    def __init__(self, types: Sequence[TensorType], mesh: Mesh) -> None:
        self._types, self._mesh = types, mesh
        self._even = {
            type: TensorType(local_shape(type, mesh), type.dtype)
            for type in dict.fromkeys(types)
            if splits_evenly(type.shape, type.layout, mesh)
        }
        self._same = [self._even.get(type) for type in types]
        self._uneven = tuple(type for type in dict.fromkeys(types) if type not in self._even)

    @property
    def are_even(self) -> bool:
        return all(self._same)

    def told_apart(self, rank: int) -> tuple[int, ...]:
        """What tells ranks apart that have unlike pieces: lengths of what is not split evenly, and where it lies."""
        return tuple(self._told[rank].tolist())

    @cached_property
    def _told(self) -> NDArray[np.int64]:
        columns = [np.zeros(self._mesh.size, np.int64)]
        for type in self._uneven:
            for dim, size in enumerate(type.shape):
                starts, stops = cut_for_all(size, split_axes(type.layout, dim), self._mesh).T
                columns.append(stops - starts)
            places = ((axis, found.place) for axis, found in type.layout if isinstance(found, At))
            columns += [(places_of_all(self._mesh)[axis] == place).astype(np.int64) for axis, place in places]
        return np.stack(columns, axis=1)

    def on(self, rank: int) -> list[TensorType]:
        """The pieces of a rank; of some tensors it may have nothing."""
        found = {type: TensorType(local_shape(type, self._mesh, rank), type.dtype) for type in self._uneven}
        pieces = ((type, same or found[type]) for type, same in zip(self._types, self._same, strict=True))
        return [piece for type, piece in pieces if piece.num_elements or not type.num_elements]


class UpdatePrices:
    """Seconds of the update on ranks; those with equal pieces are asked once where devices are alike."""

    def __init__(self, pieces: UpdatedPieces, prices: Prices) -> None:
        self._pieces, self._prices, self._are_alike = pieces, prices, not prices.unlike_axes()
        self._known: dict[Hashable, Seconds] = {}

    def on(self, rank: int) -> Seconds:
        key = self._pieces.told_apart(rank), 0 if self._are_alike else rank
        if key not in self._known:
            self._known[key] = self._prices.update(self._pieces.on(rank), rank)
        return self._known[key]


def update_bytes(optimizer: str, kind: str, sizes: list[int], states: list[int]) -> int:
    """What the update of parameters of these sizes needs besides; those in `states` have theirs on the host: of them
    what is updated, comes and goes, and of Adam's root and quotient two for one parameter after the other, on a GPU one
    for all that are updated at once."""

    def passing(sizes: list[int]) -> int:
        if optimizer not in ("adam", "adamw"):
            return 0
        return sum(sizes) if kind == "cuda" else 2 * max(sizes, default=0)

    copies, largest = OPTIMIZER_COPIES[optimizer], 0
    parts = updated_together([copies * size for size in states])
    for k, part in enumerate(parts):
        near = range(parts[max(k - 1, 0)].start, parts[min(k + 1, len(parts) - 1)].stop)
        updated = [states[i] for i in part] + (sizes if k == len(parts) - 1 else [])
        largest = max(largest, copies * sum(states[i] for i in near) + passing(updated))
    return max(largest, passing(sizes)) if parts else passing(sizes)
