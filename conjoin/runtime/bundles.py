"""Parameters in bundles: one collective for many, started early and waited for late.

A parameter that is stored as I and used as B needs nothing forward and an all-reduce of its gradient backward (data
parallel); one that is stored split is gathered for use and its gradient reduce-scattered (ZeRO). Both are done for many
parameters at once and overlap with computing:

- `launch` stands in the program where the first parameter of the bundle is used. In backward it runs when the last of
  the bundle's gradients is there, and starts the collective.
- `hold` stands at the start of the program. Autograd runs what was made first last, so in backward it runs when nothing
  else is left to do, and waits for the collective.
- A gather is started one bundle ahead of its use.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from conjoin.comm import Route, Step, StepKind, backward_route, movement, reshard
from conjoin.ir import Graph, Leaf, LeafKind, Region, Value, is_parallel, num_elements, origin, region_of, region_shape
from conjoin.ops import Layout
from conjoin.runtime.communicator import Axes, Communicator, Work, uncompiled

BUNDLE_BYTES = 25 * 2**20
"""As DistributedDataParallel's buckets (torch documentation, `bucket_cap_mb`)."""
Entry = tuple[Value, Layout]
"""A parameter and the layout of its use."""


@dataclass(slots=True)
class _Ticket:
    """One forward pass through a bundle: what was held, and the collectives its backward has started."""

    held: tuple[Tensor, ...] = ()
    made: tuple[weakref.ref[Tensor], ...] = ()
    """The parameters as they are used, as long as somebody holds them."""
    works: list[Work] = field(default_factory=list)
    again: tuple[Tensor, ...] | None = None
    """The parameters brought once more, for the backward pass."""


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: _Ticket, *stored: Tensor) -> tuple[Tensor, ...]:
        ctx.ticket = ticket
        return tuple(x.view_as(x) for x in stored)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for work in ctx.ticket.works:
            work.wait()
        ctx.ticket.works.clear()
        return None, *gradients


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bundle: Bundle, ticket: _Ticket, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.bundle, ctx.ticket = bundle, ticket
        return bundle.bring(held)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.ticket.again = None
        work, made = ctx.bundle.mover.start_back(gradients)
        ctx.ticket.works.append(work)
        return None, None, *made


class Mover(Protocol):
    """What a bundle does with its parameters forward and with their gradients backward."""

    def bring(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The values in the layouts of their use."""

    def start_back(self, gradients: Sequence[Tensor]) -> tuple[Work, tuple[Tensor, ...]]:
        """Start the collective on the gradients; what it returns is complete when the work is."""


class Bundle:
    """Some parameters, and how they are moved together."""

    def __init__(self, entries: Sequence[Entry], mover: Mover) -> None:
        self.entries = tuple(entries)
        self.mover = mover
        self.ticket = _Ticket()
        self.before: Bundle | None = None
        self.after: Bundle | None = None

    @uncompiled
    def hold(self, *stored: Tensor) -> tuple[Tensor, ...]:
        """The parameters as stored; in backward the wait for their gradients."""
        self.ticket = _Ticket(tuple(x.detach() for x in stored))
        return _Hold.apply(self.ticket, *stored)  # type: ignore[no-any-return, no-untyped-call]

    @uncompiled
    def launch(self, *held: Tensor) -> tuple[Tensor, ...]:
        """The parameters in the layouts of their use; in backward the start of the collective."""
        made: tuple[Tensor, ...] = _Launch.apply(self, self.ticket, *held)  # type: ignore[no-untyped-call]
        self.ticket.made = tuple(map(weakref.ref, made))
        return made

    def bring(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The values for the forward pass; those of the next bundle are started on the way."""
        if isinstance(self.mover, Gathering):
            self.mover.start(held)
            _start(self.after)
        return self.mover.bring(held)

    def find(self, tensor: Tensor) -> int | None:
        """Which parameter, as it was made for use, a tensor is or is a view of."""
        base = tensor if tensor._base is None else tensor._base
        return next((i for i, made in enumerate(self.ticket.made) if made() is base), None)

    def bring_again(self, ticket: _Ticket, i: int) -> Tensor:
        """A parameter that was dropped after the forward pass; the bundle before is started on the way."""
        if ticket.again is None:
            if isinstance(self.mover, Gathering):
                self.mover.start(ticket.held)
                if self.before is not None and self.before.ticket.again is None:
                    _start(self.before)
            with torch.no_grad():
                ticket.again = self.mover.bring(ticket.held)
        return ticket.again[i]


def _start(bundle: Bundle | None) -> None:
    if bundle is not None and isinstance(bundle.mover, Gathering) and bundle.ticket.held:
        bundle.mover.start(bundle.ticket.held)


class Reducing:
    """Parameters used as they are stored, whose gradients are all-reduced."""

    def __init__(self, axes: Axes, communicator: Communicator) -> None:
        self._axes, self._communicator = axes, communicator
        communicator.prepare(axes)

    def bring(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in held)

    def start_back(self, gradients: Sequence[Tensor]) -> tuple[Work, tuple[Tensor, ...]]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        views = tuple(part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True))
        return self._communicator.all_reduce(flat, self._axes), views


@dataclass(frozen=True, slots=True)
class _Gathered:
    """How one parameter is gathered: the region each member holds, and where it goes."""

    held: Region
    used: Region
    parts: tuple[Region, ...]
    """By position in the group."""

    @property
    def stacks(self) -> bool:
        """Whether the pieces one after the other are the whole."""
        along = [dim for dim, (a, b) in enumerate(zip(self.held, self.used, strict=True)) if a != b]
        return along == [0] and list(self.parts) == sorted(self.parts)

    def within(self, part: Region) -> tuple[slice, ...]:
        return tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(part, self.used, strict=True))


class Gathering:
    """Parameters stored split: gathered for use, their gradients reduce-scattered."""

    def __init__(self, entries: Sequence[Entry], axes: Axes, communicator: Communicator) -> None:
        self._axes, self._communicator = axes, communicator
        self._gathers = [_gathered(entry, communicator, axes) for entry in entries]
        self._sizes = [num_elements(gather.held) for gather in self._gathers]
        self._num_members = len(communicator.mesh.group(communicator.rank, axes))
        self._under_way: tuple[Work, Tensor] | None = None
        communicator.prepare(axes)

    def start(self, held: Sequence[Tensor]) -> None:
        """Start gathering, unless it is under way."""
        if self._under_way is None:
            flat = torch.cat([x.detach().reshape(-1) for x in held])
            output = flat.new_empty(self._num_members * flat.numel())
            self._under_way = self._communicator.all_gather(output, flat, self._axes), output

    def bring(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.start(held)
        assert self._under_way is not None
        work, flat = self._under_way
        self._under_way = None
        work.wait()
        columns = torch.split(flat.view(self._num_members, -1), self._sizes, 1)
        return tuple(map(_assemble, columns, self._gathers))

    def start_back(self, gradients: Sequence[Tensor]) -> tuple[Work, tuple[Tensor, ...]]:
        packed = torch.cat([
            gradient[gather.within(gather.parts[place])].reshape(-1)
            for place in range(self._num_members)
            for gradient, gather in zip(gradients, self._gathers, strict=True)
        ])  # fmt: skip
        output = packed.new_empty(sum(self._sizes))
        work = self._communicator.reduce_scatter(output, packed, self._axes)
        parts = torch.split(output, self._sizes)
        return work, tuple(part.view(region_shape(g.held)) for part, g in zip(parts, self._gathers, strict=True))


def _assemble(column: Tensor, gather: _Gathered) -> Tensor:
    """A whole parameter from everyone's pieces, one a row."""
    if gather.stacks:
        return column.reshape(region_shape(gather.used))
    whole = column.new_empty(region_shape(gather.used))
    for row, part in zip(column, gather.parts, strict=True):
        place = whole[gather.within(part)]
        place.copy_(row.view(place.shape))
    return whole


def _gathered(entry: Entry, communicator: Communicator, axes: Axes) -> _Gathered:
    value, layout = entry
    mesh, shape = communicator.mesh, value.type.shape
    group = mesh.group(communicator.rank, axes)
    parts = tuple(region_of(shape, value.type.layout, mesh, rank) for rank in group)
    held = region_of(shape, value.type.layout, mesh, communicator.rank)
    return _Gathered(held, region_of(shape, layout, mesh, communicator.rank), parts)


def parameter_reads(graph: Graph) -> list[Entry]:
    """Every trainable parameter that is used in another layout than stored, with that layout, in the order of use."""
    found: dict[Entry, None] = {}
    results = [value for value in (*graph.outputs, *(v for _, v in graph.updates)) if isinstance(value, Value)]
    reads = [value for node in graph.nodes if not is_parallel(node) for value in node.inputs]
    for value in (*reads, *results):
        root = origin(value)
        if isinstance(root.owner, Leaf) and root.owner.trainable and root.type.layout != value.type.layout:
            assert root.owner.kind is LeafKind.PARAMETER
            found[root, value.type.layout] = None
    return list(found)


def _only(route: Route) -> Step | None:
    """The one step of a route that communicates; None when there are more, or other work to do."""
    steps = [step for step in route.steps if step.kind is not StepKind.RELABEL]
    return steps[0] if len(steps) == 1 else None


@dataclass(frozen=True, slots=True)
class _Kind:
    gathers: bool
    axes: Axes
    dtype: torch.dtype
    regather: bool


def _kind_of(entry: Entry, communicator: Communicator, regathered: frozenset[str]) -> _Kind | None:
    """In which kind of bundle a parameter goes; None when it goes on its own."""
    value, layout = entry
    mesh = communicator.mesh
    there = reshard(value.type.shape, value.type.layout, layout, mesh)
    back = _only(backward_route(there, mesh))
    free = all(step.kind is StepKind.RELABEL for step in there.steps)
    if back is None:
        return None
    axes, dtype = mesh.in_order(back.axes), value.type.dtype
    if free and back.kind is StepKind.ALL_REDUCE:
        return _Kind(False, axes, dtype, False)
    forward = _only(there)
    gathers = forward is not None and forward.kind is StepKind.ALL_GATHER and set(forward.axes) == set(axes)
    if gathers and back.kind is StepKind.REDUCE_SCATTER and _is_even(forward, value, communicator):
        assert isinstance(value.owner, Leaf)
        return _Kind(True, axes, dtype, value.owner.name in regathered)
    return None


def _is_even(step: Step | None, value: Value, communicator: Communicator) -> bool:
    """Whether every member of every group holds a piece of one size."""
    assert step is not None
    shape, mesh = value.type.shape, communicator.mesh
    table = movement(step, shape, mesh, communicator.rank)
    pieces = {region_shape(region_of(shape, value.type.layout, mesh, rank)) for rank in range(mesh.size)}
    return len(pieces) == 1 and len(table.receives) == len(table.group)


def make_bundles(graph: Graph, communicator: Communicator, regathered: frozenset[str]) -> tuple[Bundle, ...]:
    """All bundles of a plan, kind by kind in the order of use."""
    entries: dict[_Kind, list[Entry]] = {}
    for entry in parameter_reads(graph):
        kind = _kind_of(entry, communicator, regathered)
        if kind is not None:
            entries.setdefault(kind, []).append(entry)
    bundles: list[Bundle] = []
    for kind, found in entries.items():
        made = [Bundle(part, _mover(kind, part, communicator)) for part in _filled(found)]
        for one, other in pairwise(made):
            one.after, other.before = other, one
        bundles.extend(made)
    return tuple(bundles)


def _filled(entries: list[Entry]) -> list[list[Entry]]:
    """Entries in the order of use, cut into bundles filled from the last: the first one, whose gradients come last and
    whose gather comes first, is what remains, so that little is left to wait for."""
    parts: list[list[Entry]] = []
    num_bytes = BUNDLE_BYTES
    for entry in reversed(entries):
        if num_bytes >= BUNDLE_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(entry)
        num_bytes += entry[0].type.bytes
    return [part[::-1] for part in reversed(parts)]


def _mover(kind: _Kind, entries: list[Entry], communicator: Communicator) -> Mover:
    return Gathering(entries, kind.axes, communicator) if kind.gathers else Reducing(kind.axes, communicator)
