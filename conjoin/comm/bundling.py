"""Which parameters travel together: one collective for many, each way.

A parameter that is stored as I and used as B needs nothing forward and an all-reduce of its gradient backward; one
that is stored split is gathered for use and its gradient reduce-scattered. What needs more goes on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conjoin.comm.movement import movement
from conjoin.comm.route import Route, Step, StepKind, backward_route, reshard
from conjoin.ir import Graph, Leaf, Value, is_parallel, origin, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import Copies, Layout

Entry = tuple[Value, Layout]
"""A parameter and the layout of its use."""
BUNDLE_BYTES = 25 * 2**20
"""As DistributedDataParallel's buckets (torch documentation, `bucket_cap_mb`)."""


@dataclass(frozen=True, slots=True)
class BundleKind:
    """What parameters must share to go in one collective."""

    gathers: bool
    """Gathered for use, gradients reduce-scattered; else used as stored, gradients all-reduced."""
    axes: tuple[str, ...]
    dtype: torch.dtype
    regather: bool
    """Gathered again for the backward pass."""


@dataclass(frozen=True, slots=True)
class ParameterBundle:
    """Parameters, each with the layout of its use, that are moved by one collective each way."""

    kind: BundleKind
    entries: tuple[Entry, ...]


def find_bundles(graph: Graph, mesh: Mesh, regathered: frozenset[str]) -> tuple[ParameterBundle, ...]:
    """All bundles of a plan; parameters that need more than one collective each way go on their own."""
    entries: dict[BundleKind, list[Entry]] = {}
    for entry in _parameter_reads(graph):
        kind = _kind_of(entry, mesh, regathered)
        if kind is not None:
            entries.setdefault(kind, []).append(entry)
    return tuple(ParameterBundle(kind, part) for kind, found in entries.items() for part in _filled(found))


def _filled(entries: list[Entry]) -> list[tuple[Entry, ...]]:
    """Entries in the order of use, cut into bundles filled from the last.

    The first one, whose gradients come last and whose gather comes first, is what remains: little is left to wait for.
    """
    parts: list[list[Entry]] = []
    num_bytes = BUNDLE_BYTES
    for entry in reversed(entries):
        if num_bytes >= BUNDLE_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(entry)
        num_bytes += entry[0].type.bytes
    return [tuple(reversed(part)) for part in reversed(parts)]


def _parameter_reads(graph: Graph) -> list[Entry]:
    """Every trainable parameter that is used in another layout than stored, with that layout, in the order of use."""
    results = [value for value in (*graph.outputs, *(v for _, v in graph.updates)) if isinstance(value, Value)]
    reads = [value for node in graph.nodes if not is_parallel(node) for value in node.inputs]
    found: dict[Entry, None] = {}
    for value in (*reads, *results):
        root = origin(value)
        if isinstance(root.owner, Leaf) and root.owner.trainable and root.type.layout != value.type.layout:
            found[root, value.type.layout] = None
    return list(found)


def _only(route: Route) -> Step | None:
    """The one step of a route that is more than a new label; None when there are more, or none."""
    steps = [step for step in route.steps if step.kind is not StepKind.RELABEL]
    return steps[0] if len(steps) == 1 else None


def _kind_of(entry: Entry, mesh: Mesh, regathered: frozenset[str]) -> BundleKind | None:
    value, layout = entry
    dtype, copied = value.type.dtype, _copied_axes(value, layout)
    if copied:
        return BundleKind(False, mesh.in_order(copied), dtype, False)
    there = reshard(value.type.shape, value.type.layout, layout, mesh)
    back = _only(backward_route(there, mesh))
    if back is None:
        return None
    axes = mesh.in_order(back.axes)
    step = _only(there)
    if step is None or step.kind is not StepKind.ALL_GATHER or set(step.axes) != set(axes):
        return None
    if back.kind is not StepKind.REDUCE_SCATTER or not _is_even(step, value, mesh):
        return None
    assert isinstance(value.owner, Leaf)
    return BundleKind(True, axes, dtype, value.owner.name in regathered)


def _copied_axes(value: Value, layout: Layout) -> list[str]:
    """The axes on which a parameter is used as copies of what is stored, when nothing else changes."""
    copied = [axis for axis, placement in layout if isinstance(placement, Copies)]
    kept = tuple(entry for entry in layout if entry[0] not in copied)
    return copied if kept == value.type.layout else []


def _is_even(step: Step, value: Value, mesh: Mesh) -> bool:
    """Whether every member of every group holds a piece of one size."""
    shape, layout = value.type.shape, value.type.layout
    table = movement(step, shape, mesh, 0)
    pieces = {region_shape(region_of(shape, layout, mesh, rank)) for rank in range(mesh.size)}
    return len(pieces) == 1 and len(table.receives) == len(table.group)
