"""Which parameters travel together: one collective for many, each way.

A parameter that is stored as I and used as B needs nothing forward and an all-reduce of its gradient backward; one
that is stored split is gathered for use and its gradient reduce-scattered. What needs more goes on its own.

A parameter that is used in another dtype than stored, as in mixed precision, is cast where it is stored: what is
gathered is narrow, and gradients are summed up in the dtype of the parameter, or in the one that the graph says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from conjoin.comm.gradients import Entry, GradientFlow
from conjoin.comm.movement import movement
from conjoin.comm.pieces import splits_evenly
from conjoin.comm.route import backward_route, reshard
from conjoin.comm.steps import Route, Step, StepKind
from conjoin.ir import EXACT, Graph, Leaf, Rounding, Value, is_parallel, origin, stored_leaf
from conjoin.machine import Mesh
from conjoin.ops import Copies, Layout, TensorType

BUNDLE_BYTES = 25 * 2**20
"""As DistributedDataParallel's buckets (torch documentation, `bucket_cap_mb`)."""


@dataclass(frozen=True, slots=True)
class BundleKind:
    """What parameters must share to go in one collective."""

    gathers: bool
    """Gathered for use, gradients reduce-scattered; else used as stored, gradients all-reduced."""
    axes: tuple[str, ...]
    dtype: torch.dtype
    """In which they are used."""
    regather: bool
    """Gathered again for the backward pass."""
    stored: torch.dtype
    """In which they are stored."""
    summed: torch.dtype
    """In which their gradients are summed up."""


@dataclass(frozen=True, slots=True)
class ParameterBundle:
    """Parameters, each with the layout of its use, that are moved by one collective each way."""

    kind: BundleKind
    entries: tuple[Entry, ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The parameters as they are stored."""
        found = tuple(stored_leaf(root) for root, _ in self.entries)
        assert all(leaf is not None for leaf in found)
        return found  # type: ignore[return-value] # just seen

    @property
    def sums(self) -> tuple[TensorType, ...]:
        """Their gradients as they are summed up."""
        return tuple(replace(leaf.type, dtype=self.kind.summed) for leaf in self.leaves)


def find_bundles(graph: Graph, mesh: Mesh, regathered: frozenset[str]) -> tuple[ParameterBundle, ...]:
    """All bundles of a plan; parameters that need more than one collective each way go on their own."""
    return bundle_parameters(_parameter_reads(graph), mesh, regathered, graph.rounding)


def bundle_parameters(
    reads: Iterable[Entry], mesh: Mesh, regathered: frozenset[str], rounding: Rounding = EXACT
) -> tuple[ParameterBundle, ...]:
    """Bundles of parameters that are used in other layouts than stored, given in the order of use."""
    entries: dict[BundleKind, list[Entry]] = {}
    for entry in reads:
        value, layout = entry
        leaf = stored_leaf(value)
        assert leaf is not None
        stored = leaf.type.dtype
        kind = _kind_of(value.type, layout, mesh, leaf.name in regathered, (stored, rounding.summed_in(stored)))
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
    """Every trainable parameter, or what one is cast to, that is used in another layout than stored, with that layout,
    in the order of use.

    One whose use has no part in the loss gets no gradient, as on one device: together with others it would get zeros.
    """
    flow = GradientFlow(graph) if graph.training else None
    results = [value for value in (*graph.outputs, *(v for _, v in graph.updates)) if isinstance(value, Value)]
    reads = [value for node in graph.nodes if not is_parallel(node) for value in node.inputs]
    found: dict[Entry, None] = {}
    for value in (*reads, *results):
        root, layout = origin(value), value.type.layout
        if root.type.layout == layout or stored_leaf(root) is None:
            continue
        if flow is None or flow.reach_read(root, layout):
            found[root, layout] = None
    return list(found)


def _only(route: Route) -> Step | None:
    """The one step of a route that is more than a new label; None when there are more, or none."""
    steps = [step for step in route.steps if step.kind is not StepKind.RELABEL]
    return steps[0] if len(steps) == 1 else None


@lru_cache(maxsize=1 << 14)
def _kind_of(
    type: TensorType, layout: Layout, mesh: Mesh, regather: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> BundleKind | None:
    copied = _copied_axes(type, layout)
    if copied:
        return BundleKind(False, mesh.in_order(copied), type.dtype, False, *dtypes)
    there = reshard(type.shape, type.layout, layout, mesh)
    back = _only(backward_route(there, mesh))
    if back is None:
        return None
    axes = mesh.in_order(back.axes)
    step = _only(there)
    if step is None or step.kind is not StepKind.ALL_GATHER or set(step.axes) != set(axes):
        return None
    if back.kind is not StepKind.REDUCE_SCATTER or not _is_even(step, type, mesh):
        return None
    return BundleKind(True, axes, type.dtype, regather, *dtypes)


def _copied_axes(type: TensorType, layout: Layout) -> list[str]:
    """The axes on which a parameter is used as copies of what is stored, when nothing else changes."""
    copied = [axis for axis, placement in layout if isinstance(placement, Copies)]
    kept = tuple(entry for entry in layout if entry[0] not in copied)
    return copied if kept == type.layout else []


def _is_even(step: Step, type: TensorType, mesh: Mesh) -> bool:
    """Whether every member of every group holds a piece of one size, and no two the same."""
    if not splits_evenly(type.shape, type.layout, mesh):
        return False
    table = movement(step, type.shape, mesh, 0)
    return len(table.receives) == len(table.group)
