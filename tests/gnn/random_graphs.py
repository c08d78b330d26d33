"""Random graphs for the tests of partitions: isolated vertices, self loops, doubled edges, hubs."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from conjoin.gnn import Adjacency, from_edges


@st.composite
def adjacencies(draw: st.DrawFn, max_vertices: int = 30) -> Adjacency:
    """Any small graph."""
    size = draw(st.integers(1, max_vertices))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, 6 * size))
    hubs = draw(st.booleans())
    ends = random.integers(size, size=(2, count)) if not hubs else (size * random.random((2, count)) ** 3).astype(int)
    return from_edges(size, ends[0], ends[1])


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Adjacency, np.ndarray]:
    """Any small graph and any cuts of it, empty parts among them."""
    adjacency = draw(adjacencies())
    inner = draw(st.lists(st.integers(0, adjacency.num_vertices), max_size=6))
    return adjacency, np.array([0, *sorted(inner), adjacency.num_vertices])
