"""A GCN's layers on parts of a graph, a process a part: what each takes in seconds of its CPU, both ways.

Rows of other parts are copied out of one array and their gradients added into it, as an exchange would put them there.
Processes do not wait for each other, so that a machine with fewer cores than parts tells the same.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import process_time

import numpy as np
import torch
from torch import Tensor

from conjoin.gnn import Adjacency, halo_of


@dataclass(frozen=True, slots=True)
class Job:
    """One part of a graph, and the widths of the layers that run on it."""

    graph: Adjacency
    first: int
    last: int
    widths: tuple[int, ...]
    repeats: int
    backward: bool


def measure(
    graph: Adjacency, cuts: np.ndarray, widths: Sequence[int], repeats: int = 3, backward: bool = True
) -> np.ndarray:
    """Return the CPU seconds of each layer forward, and of each backward, on each part: the least of several."""
    jobs = [Job(graph, a, b, tuple(widths), repeats, backward) for a, b in pairwise(cuts.tolist())]
    with multiprocessing.get_context("fork").Pool(len(jobs)) as pool:
        return np.array(pool.map(part_seconds, jobs, chunksize=1)).T


def part_seconds(job: Job) -> list[float]:
    """What one process does: its part's layers, one after another."""
    torch.set_num_threads(1)
    rows, there = _local(job.graph, job.first, job.last)
    back = _transposed(rows)
    forward, backward = [], []
    for i, (wide, narrow) in enumerate(pairwise(job.widths)):
        everywhere = torch.zeros(job.graph.num_vertices, narrow)
        inputs, weight = torch.rand(job.last - job.first, wide), torch.rand(wide, narrow)
        output = torch.rand(job.last - job.first, narrow)

        def ahead(inputs: Tensor = inputs, weight: Tensor = weight, everywhere: Tensor = everywhere) -> None:
            mine = inputs @ weight
            torch.relu_(rows @ torch.cat([mine, everywhere[there]]))

        def behind(
            output: Tensor = output,
            inputs: Tensor = inputs,
            weight: Tensor = weight,
            everywhere: Tensor = everywhere,
            whole: bool = i > 0,
        ) -> None:
            both = back @ output
            everywhere.index_add_(0, there, both[len(inputs) :])
            mine = both[: len(inputs)]
            inputs.T @ mine
            if whole:
                mine @ weight.T

        forward.append(_least(ahead, job.repeats))
        if job.backward:
            backward.append(_least(behind, job.repeats))
    return forward + backward


def _least(run: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = process_time()
        run()
        seconds.append(process_time() - began)
    return max(min(seconds), 1e-7)


def _local(graph: Adjacency, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The part's rows over its own vertices and its halo, and which vertices the halo is."""
    halo = halo_of(graph, first, last)
    places = np.zeros(graph.num_vertices, np.int64)
    places[first:last] = np.arange(last - first)
    places[halo] = np.arange(last - first, last - first + len(halo))
    edges = slice(int(graph.indptr[first]), int(graph.indptr[last]))
    starts = torch.from_numpy(graph.indptr[first : last + 1] - graph.indptr[first])
    columns = torch.from_numpy(places[graph.indices[edges]])
    size = (last - first, last - first + len(halo))
    rows = torch.sparse_csr_tensor(starts, columns, torch.ones(len(columns)), size)
    return rows, torch.from_numpy(halo)


def _transposed(rows: Tensor) -> Tensor:
    columns = rows.col_indices().numpy()
    targets = np.repeat(np.arange(rows.shape[0]), np.diff(rows.crow_indices().numpy()))
    order = np.argsort(columns, kind="stable")
    starts = np.searchsorted(columns[order], np.arange(rows.shape[1] + 1))
    values = torch.ones(len(columns))
    return torch.sparse_csr_tensor(
        torch.from_numpy(starts), torch.from_numpy(targets[order]), values, (rows.shape[1], rows.shape[0])
    )
