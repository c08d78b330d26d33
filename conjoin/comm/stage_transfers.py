"""Transfers between the stages of a pipeline: on which hosts their ranks are, and how a tensor goes there."""

from __future__ import annotations

from functools import lru_cache

from conjoin.comm.cross_mesh import CHUNKS, TransferPlan, plan_transfer
from conjoin.comm.unit_tasks import Grid
from conjoin.ir import Pipeline
from conjoin.ops import Layout, TensorType

CHUNK_BYTES = 2**16
"""Of a chunk at least: below it a message takes as long for fewer bytes."""


def stage_grid(pipeline: Pipeline, stage: int) -> Grid:
    """The ranks of a stage, and the node of each."""
    found, mesh = pipeline.stages[stage], pipeline.mesh
    between = [axis.name for axis in mesh.axes if axis.between_nodes]
    hosts = []
    for rank in found.ranks:
        places = mesh.coordinates(rank)
        hosts.append(mesh.rank_at({name: places[name] for name in between}))
    return Grid(found.plan.mesh, found.ranks, tuple(hosts))


def plan_crossing(type: TensorType, source: tuple[Layout, Grid], target: tuple[Layout, Grid]) -> TransferPlan:
    """How a tensor goes from the ranks of one stage to those of another, in chunks that are worth a message."""
    return _planned(type.shape, type.dtype.itemsize, source, target, max(1, min(CHUNKS, type.bytes // CHUNK_BYTES)))


@lru_cache(maxsize=1024)
def _planned(
    shape: tuple[int, ...],
    itemsize: int,
    source: tuple[Layout, Grid],
    target: tuple[Layout, Grid],
    chunks: int,
) -> TransferPlan:
    """Kept: both ways of equal layers are the same."""
    return plan_transfer(shape, itemsize, source, target, chunks)
