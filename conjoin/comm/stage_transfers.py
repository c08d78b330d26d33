"""Transfers between the stages of a pipeline: on which hosts their ranks are, and how a tensor goes there."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from conjoin.comm.cross_mesh import CHUNKS, TransferPlan, plan_transfer
from conjoin.comm.unit_tasks import Grid
from conjoin.ir import Pipeline, Transfer
from conjoin.ops import Layout, TensorType

CHUNK_BYTES = 2**16
"""Of a chunk at least, where a plan does not say how many there are: below it a message takes as long for fewer."""


def stage_grid(pipeline: Pipeline, stage: int) -> Grid:
    """The ranks of a stage, and the node of each."""
    found, mesh = pipeline.stages[stage], pipeline.mesh
    between = [axis.name for axis in mesh.axes if axis.between_nodes]
    hosts = []
    for rank in found.ranks:
        places = mesh.coordinates(rank)
        hosts.append(mesh.rank_at({name: places[name] for name in between}))
    return Grid(found.plan.mesh, found.ranks, tuple(hosts))


def plan_of_transfer(pipeline: Pipeline, transfer: Transfer, back: bool = False) -> TransferPlan:
    """How what goes between two stages of a pipeline does, or its gradient back."""
    source = transfer.made.layout, stage_grid(pipeline, transfer.source)
    target = transfer.taken.layout, stage_grid(pipeline, transfer.target)
    chunks = None if transfer.chunks is None else transfer.chunks[back]
    return plan_crossing(transfer.made.laid_out(()), *((target, source) if back else (source, target)), chunks)


@lru_cache(maxsize=1024)
def plan_crossing(
    type: TensorType, source: tuple[Layout, Grid], target: tuple[Layout, Grid], chunks: int | None = None
) -> TransferPlan:
    """How a tensor goes from the ranks of one stage to those of another; in chunks that are worth a message, where
    it is not said in how many.

    Kept: both ways of equal layers are the same.
    """
    plan = plan_transfer(type.shape, type.dtype.itemsize, source, target, chunks or CHUNKS)
    if chunks is not None:
        return plan
    sizes = plan.cells.y - plan.cells.x
    usual = int(sizes.sum()) // max(len(sizes), 1) * plan.itemsize
    return replace(plan, chunks=max(1, min(plan.chunks, usual // CHUNK_BYTES)))
