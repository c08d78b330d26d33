"""The batch is split: data parallel, ZeRO-1 and fully sharded data parallel, which also split what is stored.

Stored split, a parameter is gathered for use (S -> B), so its gradient comes back by reduce-scatter (P -> S). Under
`fsdp` (ZeRO-3, Rajbhandari et al., 2020) the gathered parameter is dropped after the forward pass and gathered again.
"""

from __future__ import annotations

from conjoin.errors import StrategyError
from conjoin.ir import REGATHER, MemoryAction
from conjoin.machine import Mesh
from conjoin.ops import Layout, Split, TensorType, make_layout
from conjoin.search.batch import split_batch
from conjoin.search.drafting import Draft
from conjoin.search.facts import Facts
from conjoin.search.groups import Group, make_groups
from conjoin.search.propagation import Flow, follow, propagate
from conjoin.search.request import Request


def data_group(mesh: Mesh, request: Request) -> Group:
    """All axes: the batch is split over the whole machine."""
    return make_groups(mesh, {"dp": request.degrees.get("dp", mesh.size)})["dp"]


def data_flow(facts: Facts, group: Group) -> Flow:
    """The batch runs through the graph; weights are replicated where they meet it."""
    return propagate(facts, group, split_batch(facts.graph, group), follow)


def draft_single(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """One device does everything."""
    if mesh.size != 1:
        raise StrategyError(
            f"The strategy single was asked for on {mesh.size} devices. It runs on one, and the others would stand "
            f"idle. Choose data-parallel, or a machine of one device."
        )
    return Draft(request, ())


def draft_data_parallel(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """The batch is split, weights are stored whole."""
    group = data_group(mesh, request)
    return Draft(request.filled({"dp": group.degree}), (data_flow(facts, group),))


def draft_zero1(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """The batch is split, weights are stored split and gathered once for each step."""
    group = data_group(mesh, request)
    stored = {leaf: split_storage(leaf.type, group, mesh) for leaf in facts.parameters()}
    return Draft(request.filled({"dp": group.degree}), (data_flow(facts, group),), stored)


def draft_fsdp(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """As zero1, but weights are gathered again for the backward pass."""
    draft = draft_zero1(facts, mesh, request)
    memory = tuple(MemoryAction(REGATHER, leaf.name) for leaf, layout in draft.storage.items() if layout)
    return Draft(draft.request, draft.flows, draft.storage, memory)


def split_storage(type: TensorType, group: Group, mesh: Mesh) -> Layout:
    """Where a parameter is stored: split along a dim that divides well, the first if it does, else the largest.

    A parameter with no dim that is long enough is split over as many of the innermost axes as its largest dim allows.

    >>> import torch
    >>> mesh = Mesh.of_nodes(1, 4)
    >>> group = Group("dp", mesh.names, 4)
    >>> for shape in (8, 3), (3, 8), (5, 3), (2, 3), (1,):
    ...     print(TensorType(shape, torch.float32, split_storage(TensorType(shape, torch.float32), group, mesh)))
    f32[8,3]{d0:S(0),d1:S(0)}
    f32[3,8]{d0:S(1),d1:S(1)}
    f32[5,3]{d0:S(0),d1:S(0)}
    f32[2,3]{d1:S(1)}
    f32[1]
    """
    if not type.shape:
        return ()
    dims = sorted(range(len(type.shape)), key=lambda dim: (dim > 0, -type.shape[dim]))
    even = [dim for dim in dims if type.shape[dim] % group.degree == 0 and type.shape[dim] > 0]
    enough = [dim for dim in dims if type.shape[dim] >= group.degree]
    if even or enough:
        dim = (even or enough)[0]
        return make_layout((axis, Split(dim)) for axis in group.axes)
    dim = max(dims, key=lambda d: type.shape[d])
    axes, ways = [], 1
    for axis in reversed(group.axes):
        if ways * mesh.sizes[axis] <= type.shape[dim]:
            axes.append(axis)
            ways *= mesh.sizes[axis]
    return make_layout((axis, Split(dim)) for axis in reversed(axes))
