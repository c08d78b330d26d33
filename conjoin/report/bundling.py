"""Which parameters travel together: the bundles that the runtime makes of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conjoin.comm import Route, Step, StepKind, backward_route, movement, reshard
from conjoin.ir import Graph, Leaf, Value, is_parallel, origin, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.report.gradients import Entry

BUNDLE_BYTES = 25 * 2**20
"""As the runtime's bundles."""


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
    after: ParameterBundle | None
    """The next of its kind: gathered ahead in the forward pass, and gathers this one ahead in the backward pass."""


def find_bundles(graph: Graph, mesh: Mesh, regathered: frozenset[str]) -> tuple[ParameterBundle, ...]:
    """All bundles of a plan; parameters that need more than one collective each way go on their own."""
    groups: dict[BundleKind, list[list[Entry]]] = {}
    filled: dict[BundleKind, int] = {}
    for entry in _parameter_reads(graph):
        kind = _kind_of(entry, mesh, regathered)
        if kind is None:
            continue
        if filled.get(kind, BUNDLE_BYTES) >= BUNDLE_BYTES:
            groups.setdefault(kind, []).append([])
            filled[kind] = 0
        groups[kind][-1].append(entry)
        filled[kind] += entry[0].type.bytes
    return tuple(bundle for kind, parts in groups.items() for bundle in _chain(kind, parts))


def _chain(kind: BundleKind, parts: list[list[Entry]]) -> list[ParameterBundle]:
    bundles: list[ParameterBundle] = []
    for entries in reversed(parts):
        bundles.insert(0, ParameterBundle(kind, tuple(entries), bundles[0] if bundles else None))
    return bundles


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
    there = reshard(value.type.shape, value.type.layout, layout, mesh)
    back = _only(backward_route(there, mesh))
    if back is None:
        return None
    axes, dtype = mesh.in_order(back.axes), value.type.dtype
    if all(step.kind is StepKind.RELABEL for step in there.steps) and back.kind is StepKind.ALL_REDUCE:
        return BundleKind(False, axes, dtype, False)
    step = _only(there)
    if step is None or step.kind is not StepKind.ALL_GATHER or set(step.axes) != set(axes):
        return None
    if back.kind is not StepKind.REDUCE_SCATTER or not _is_even(step, value, mesh):
        return None
    assert isinstance(value.owner, Leaf)
    return BundleKind(True, axes, dtype, value.owner.name in regathered)


def _is_even(step: Step, value: Value, mesh: Mesh) -> bool:
    """Whether every member of every group holds a piece of one size."""
    shape, layout = value.type.shape, value.type.layout
    table = movement(step, shape, mesh, 0)
    pieces = {region_shape(region_of(shape, layout, mesh, rank)) for rank in range(mesh.size)}
    return len(pieces) == 1 and len(table.receives) == len(table.group)
