"""Which parts of a tensor a rank holds: one block, or of a packed weight one of each section, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from conjoin.ir import Leaf, Region, region_shape

Blocks = tuple[Region, ...]
"""Parts of a tensor that differ along one dim, along which they are held one after the other."""


def dim_of(blocks: Blocks) -> int:
    """The dim along which blocks follow each other.

    >>> dim_of((((0, 4), (0, 2)), ((0, 4), (6, 8))))
    1
    """
    return next((dim for dim, spans in enumerate(zip(*blocks, strict=True)) if len(set(spans)) > 1), 0)


def shape_of(blocks: Blocks) -> tuple[int, ...]:
    """The shape of what is held.

    >>> shape_of((((0, 4), (0, 2)), ((0, 4), (6, 8))))
    (4, 4)
    """
    first, dim = region_shape(blocks[0]), dim_of(blocks)
    if len(blocks) == 1:
        return first
    return (*first[:dim], sum(region_shape(block)[dim] for block in blocks), *first[dim + 1 :])


def cut_out(whole: Tensor, blocks: Blocks) -> Tensor:
    """Some blocks of a tensor, one after the other: a view where there is one only."""
    parts = [whole[tuple(slice(*span) for span in block)] for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim_of(blocks))


def views_of(held: Tensor, blocks: Blocks) -> tuple[Tensor, ...]:
    """The blocks in what is held."""
    if len(blocks) == 1:
        return (held,)
    dim = dim_of(blocks)
    return torch.split_with_sizes(held, [region_shape(block)[dim] for block in blocks], dim)


class Sections:
    """Packed weights among leaves, and how what is held of each is cut into its sections: all at once, so that the
    gradient is put together once."""

    def __init__(self, leaves: Sequence[Leaf], shapes: Sequence[tuple[int, ...]]) -> None:
        found: dict[str, list[int]] = {}
        for place, leaf in enumerate(leaves):
            if leaf.section is not None:
                found.setdefault(leaf.section.of, []).append(place)
        self._packed: list[tuple[list[int], list[int], int]] = []
        """Places of leaves, the sizes of their sections, and the dim."""
        for places in found.values():
            places.sort(key=lambda place: _start(leaves[place]))
            dim = _dim(leaves[places[0]])
            self._packed.append((places, [shapes[place][dim] for place in places], dim))

    def cut(self, held: list[Tensor | None]) -> list[Tensor | None]:
        """What is held of each leaf, where the whole weight stands for each of its sections."""
        for places, sizes, dim in self._packed:
            whole = held[places[0]]
            if whole is not None:
                for place, part in zip(places, torch.split_with_sizes(whole, sizes, dim), strict=True):
                    held[place] = part
        return held


def put_together(leaves: Sequence[Leaf], parts: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor | None:
    """The gradient of a parameter from those of its sections in order; None where there is none of any."""
    if len(leaves) == 1 or all(part is None for part in parts):
        return parts[0]
    filled = [torch.zeros_like(x) if part is None else part for part, x in zip(parts, like, strict=True)]
    return torch.cat(filled, _dim(leaves[0]))


def _start(leaf: Leaf) -> int:
    return 0 if leaf.section is None else leaf.section.start


def _dim(leaf: Leaf) -> int:
    return 0 if leaf.section is None else leaf.section.dim
