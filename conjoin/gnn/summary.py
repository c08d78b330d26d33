"""What a partition means for those who pay for it: vertices, edges and halo rows of each part, counted once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conjoin.gnn.adjacency import Adjacency, Ints


@dataclass(frozen=True, slots=True)
class PartitionSummary:
    """Counts for each part. It holds all that prices need of a partition, and none of its vertices."""

    vertices: tuple[int, ...]
    edges: tuple[int, ...]
    halo_rows: tuple[int, ...]
    """Rows of other parts that the part reads, each once."""
    sent_rows: tuple[int, ...]
    """Rows that the part sends, once to each part that reads it."""
    peers: tuple[int, ...]
    """Parts that the part reads from."""

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return len(self.vertices)

    @property
    def edge_imbalance(self) -> float:
        """The most edges of a part against the mean."""
        return max(self.edges) * self.num_parts / max(sum(self.edges), 1)

    @property
    def total_halo_rows(self) -> int:
        """Rows that are sent in one exchange."""
        return sum(self.halo_rows)

    def exchanged_bytes(self, row_bytes: int) -> int:
        """Bytes that the busiest part receives, or sends if that is more, in one exchange of rows of `row_bytes`."""
        return max(*self.halo_rows, *self.sent_rows) * row_bytes


def halo_of(adjacency: Adjacency, first: int, last: int) -> Ints:
    """Return the vertices outside [first, last) over which those inside aggregate, ascending, each once."""
    read = np.zeros(adjacency.num_vertices, bool)
    read[adjacency.indices[adjacency.indptr[first] : adjacency.indptr[last]]] = True
    read[first:last] = False
    return np.flatnonzero(read)


def summarize(adjacency: Adjacency, cuts: Ints) -> PartitionSummary:
    """Return the summary of a cut of the vertices into ranges.

    >>> line = Adjacency(np.array([0, 1, 3, 4]), np.array([1, 0, 2, 1]))
    >>> summarize(line, np.array([0, 2, 3])).halo_rows
    (1, 1)
    """
    num_parts = len(cuts) - 1
    sent = np.zeros(num_parts, np.int64)
    halo_rows, peers = [], []
    for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        owners = np.searchsorted(cuts, halo_of(adjacency, first, last), side="right") - 1
        from_each = np.bincount(owners, minlength=num_parts)
        sent += from_each
        halo_rows.append(len(owners))
        peers.append(int((from_each > 0).sum()))
    vertices, edges = np.diff(cuts).tolist(), np.diff(adjacency.indptr[cuts]).tolist()
    return PartitionSummary(tuple(vertices), tuple(edges), tuple(halo_rows), tuple(sent.tolist()), tuple(peers))
