"""Parts of unequal sizes as equal pieces: every part gets as many rows as the largest has, and the rest stay empty.

Layouts cut a dim in even pieces. A partition cuts vertices where the work is even, and parts then differ in how many
vertices they have. So vertices are moved apart: rows that belong to none have no edges and no label, nobody reads them,
and losses that leave unlabelled vertices out are those of the graph itself. What is taken of all rows together, as by
batch norm, would see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from conjoin.errors import UsageError

UNLABELLED = -100
"""The class that torch's cross-entropy leaves out."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Where the vertices of a graph lie once all parts have as many rows."""

    places: Tensor
    """The row of every vertex."""
    num_parts: int
    num_rows: int
    """Of each part."""

    def spread(self, values: Tensor, fill: float = 0) -> Tensor:
        """What was said of every vertex, said of every row; `fill` of those that belong to none."""
        made = values.new_full((self.num_parts * self.num_rows, *values.shape[1:]), fill)
        return made.index_copy(0, self.places.to(values.device), values)

    def collect(self, rows: Tensor) -> Tensor:
        """What is said of every row, of the vertices again."""
        return rows.index_select(0, self.places.to(rows.device))

    def renumber(self, edges: Tensor) -> Tensor:
        """Edges between vertices as edges between rows."""
        return self.places.to(edges.device)[edges]


def pad_parts(cuts: Sequence[int], order: Tensor | None = None) -> Padding:
    """Rows for parts that are cut out of vertices in an order: the part p has those from `cuts[p]` to `cuts[p + 1]`.

    >>> pad_parts((0, 1, 4)).places, pad_parts((0, 1, 4)).num_rows
    (tensor([0, 3, 4, 5]), 3)
    >>> pad_parts((0, 1, 4), order=torch.tensor([2, 0, 1, 3])).places
    tensor([3, 4, 0, 5])
    """
    bounds = [int(cut) for cut in cuts]
    if len(bounds) < 2 or bounds[0] != 0 or any(stop < start for start, stop in pairwise(bounds)) or not bounds[-1]:
        raise UsageError(
            f"Vertices were to be cut at {', '.join(map(str, bounds[:8]))}. Cuts begin with 0, never go down, and end "
            f"with the number of vertices. Take them from a partition of the graph, as (0, 3, 7) for parts of 3 and 4."
        )
    if order is not None and (order.shape != (bounds[-1],) or not torch.equal(order.sort().values, _numbers(order))):
        raise UsageError(
            f"Vertices were to be put in an order of {order.numel()}. The cuts end with {bounds[-1]}, and an order has "
            f"each vertex once. Give the vertices from first to last, or no order."
        )
    num_rows = max(stop - start for start, stop in pairwise(bounds))
    places = torch.empty(bounds[-1], dtype=torch.int64)
    lies = torch.cat([torch.arange(stop - start) + p * num_rows for p, (start, stop) in enumerate(pairwise(bounds))])
    places[torch.arange(bounds[-1]) if order is None else order.cpu()] = lies
    return Padding(places, len(bounds) - 1, num_rows)


def _numbers(order: Tensor) -> Tensor:
    return torch.arange(order.numel(), dtype=order.dtype, device=order.device)
