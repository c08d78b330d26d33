"""Parameters in bundles: one collective for many, started early and waited for late.

A parameter that is stored as I and used as B needs nothing forward and an all-reduce of its gradient backward (data
parallel); one that is stored split is gathered for use and its gradient reduce-scattered (ZeRO). Both are done for many
parameters at once and overlap with computing:

- `launch` stands in the program where the first parameter of the bundle is used. In backward it runs when the last of
  the bundle's gradients is there, and starts the collective.
- `hold` stands at the start of the program. Autograd runs what was made first last, so in backward it runs when nothing
  else is left to do, and waits for the collective.
- A gather is started one bundle ahead of its use.

Parameters that are used in another dtype than stored are cast on the way: before they are gathered, and gradients
before they are summed up, so that a sum over many ranks is rounded as the parameter is. Where the graph asks for sums
in a narrower dtype they are cast to that one instead, and to the parameter's when they are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from conjoin.comm import BundleKind, Entry, ParameterBundle, find_bundles
from conjoin.ir import Graph, Region, num_elements, region_of, region_shape
from conjoin.runtime.communicator import Axes, Communicator, Work
from conjoin.runtime.wire import to_add, to_send


@dataclass(slots=True)
class _Ticket:
    """One forward pass through a bundle: what was held, and the collectives its backward has started."""

    held: tuple[Tensor, ...] = ()
    made: tuple[weakref.ref[Tensor], ...] = ()
    """The parameters as they are used, as long as somebody holds them."""
    works: list[Work] = field(default_factory=list)
    versions: tuple[int, ...] = ()
    """Which state of the parameters was held."""
    dropped: bool = False
    """Whether the backward pass needs something that was dropped."""
    again: tuple[Tensor, ...] | None = None
    """The parameters brought once more, for the backward pass."""

    def settle(self) -> None:
        """Wait for the collectives; what they were given is no longer held."""
        for work in self.works:
            work.wait()
        self.works.clear()


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: _Ticket, *stored: Tensor) -> tuple[Tensor, ...]:
        ctx.ticket = ticket
        ctx.set_materialize_grads(False)  # what is summed up at the end of all micro-batches gives none here
        return tuple(x.view_as(x) for x in stored)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.ticket.settle()
        return None, *gradients


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bundle: Bundle, ticket: _Ticket, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.bundle, ctx.ticket = bundle, ticket
        return bundle.bring(held)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.ticket.again = None
        if ctx.bundle.defers:
            ctx.bundle.put_off(gradients)
            return None, None, *(None for _ in gradients)
        ctx.bundle.settle_earlier()
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

    def __init__(self, found: ParameterBundle, mover: Mover, dropping: Dropping | None = None) -> None:
        self.entries, self.leaves, self._stored = found.entries, found.leaves, found.kind.stored
        self.mover = mover
        self._dropping = dropping
        self.ticket = _Ticket()
        self.before: Bundle | None = None
        self.after: Bundle | None = None
        self.defers = False
        """Whether gradients of several micro-batches are added up, and summed over the ranks at the end."""
        self._put_off: list[Tensor] = []

    def defer(self) -> None:
        """Sum gradients over the ranks when all micro-batches are done, where that needs no more memory than each."""
        self.defers = isinstance(self.mover, Reducing)

    def put_off(self, gradients: Sequence[Tensor]) -> None:
        """The gradients of a micro-batch."""
        wide = [gradient.to(self._stored) for gradient in gradients]
        pairs = zip(self._put_off, wide, strict=True)
        self._put_off = [mine + more for mine, more in pairs] if self._put_off else wide

    def forget_put_off(self) -> None:
        """What is left of a step that failed."""
        self._put_off = []

    def sum_up(self) -> tuple[Work, tuple[Tensor, ...]] | None:
        """Start to sum up what was put off; None where there is nothing."""
        gradients, self._put_off = self._put_off, []
        return self.mover.start_back(gradients) if gradients else None

    def hold(self, *stored: Tensor) -> tuple[Tensor, ...]:
        """The parameters as stored; in backward the wait for their gradients."""
        self.ticket.settle()  # of a backward pass that failed
        self.ticket = _Ticket(tuple(x.detach() for x in stored), versions=tuple(x._version for x in stored))
        if isinstance(self.mover, Gathering):
            self.mover.forget()
        return _Hold.apply(self.ticket, *stored)  # type: ignore[no-any-return, no-untyped-call]

    def launch(self, *held: Tensor) -> tuple[Tensor, ...]:
        """The parameters in the layouts of their use; in backward the start of the collective."""
        made: tuple[Tensor, ...] = _Launch.apply(self, self.ticket, *held)  # type: ignore[no-untyped-call]
        self.ticket.made = tuple(map(weakref.ref, made))
        if self._dropping is not None:
            self._dropping.note(self)
        return made

    def settle_earlier(self) -> None:
        """Let at most one reduce-scatter be under way before the next starts: each holds gradients of whole tensors."""
        earlier = self.after.after if self.after is not None else None
        if earlier is not None and isinstance(self.mover, Gathering):
            earlier.ticket.settle()

    def bring(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The values for the forward pass; those of the next bundle are started on the way."""
        if isinstance(self.mover, Gathering):
            self.mover.start(held)
            _start(self.after)
        return self.mover.bring(held)

    def bring_again(self, ticket: _Ticket, i: int) -> Tensor:
        """A parameter that was dropped after the forward pass; the bundle before is started on the way."""
        if ticket.again is None:
            if tuple(x._version for x in ticket.held) != ticket.versions:
                raise RuntimeError(
                    "A parameter was changed between a forward pass and its backward pass, which gathers it again. "
                    "The gradient would be that of another model. Call backward before the optimizer's step."
                )
            if isinstance(self.mover, Gathering):
                self.mover.start(ticket.held)
                if self.before is not None and self.before.ticket.dropped and self.before.ticket.again is None:
                    _start(self.before)
            with torch.no_grad():
                ticket.again = self.mover.bring(ticket.held)
        return ticket.again[i]


@dataclass(frozen=True, slots=True)
class _Dropped:
    """A tensor that autograd would have kept, in terms of a parameter that can be gathered again."""

    bundle: Bundle
    ticket: _Ticket
    parameter: int
    view: tuple[Any, Any, Any]
    """Size, stride and offset."""


class Dropping:
    """What autograd keeps for the backward pass: gathered parameters are dropped, and gathered again when needed."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[Tensor], Bundle, int]] = {}
        """By the address of its memory, every gathered parameter of this forward pass."""

    def hooks(self) -> AbstractContextManager[Any]:
        """For one forward pass."""
        self._alive.clear()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def note(self, bundle: Bundle) -> None:
        """The parameters of a bundle were just gathered."""
        for i, reference in enumerate(bundle.ticket.made):
            whole = reference()
            assert whole is not None
            self._alive[whole.untyped_storage().data_ptr()] = reference, bundle, i

    def pack(self, tensor: Tensor) -> Tensor | _Dropped:
        """What is kept of a tensor; autograd hands out aliases, so it is the memory that tells what it is."""
        reference, bundle, i = self._alive.get(tensor.untyped_storage().data_ptr(), (None, None, 0))
        if reference is None or bundle is None or reference() is None:  # that memory may be another tensor's by now
            return tensor
        bundle.ticket.dropped = True
        return _Dropped(bundle, bundle.ticket, i, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def unpack(self, kept: Tensor | _Dropped) -> Tensor:
        """The tensor again."""
        if isinstance(kept, Tensor):
            return kept
        return kept.bundle.bring_again(kept.ticket, kept.parameter).as_strided(*kept.view)


def _start(bundle: Bundle | None) -> None:
    if bundle is not None and isinstance(bundle.mover, Gathering) and bundle.ticket.held:
        bundle.mover.start(bundle.ticket.held)


class Reducing:
    """Parameters used as they are stored, but for their dtype, whose gradients are all-reduced."""

    def __init__(self, kind: BundleKind, communicator: Communicator) -> None:
        self._kind, self._axes, self._communicator = kind, kind.axes, communicator
        communicator.prepare(kind.axes)

    def bring(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) if x.dtype == self._kind.dtype else x.to(self._kind.dtype) for x in held)

    def start_back(self, gradients: Sequence[Tensor]) -> tuple[Work, tuple[Tensor, ...]]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self._kind.summed)
        work, made = _as_stored(self._communicator.all_reduce(to_add(flat), self._axes), flat, self._kind)
        parts = torch.split(made, [gradient.numel() for gradient in gradients])
        return work, tuple(part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True))


@dataclass(frozen=True, slots=True)
class _Cast:
    """A collective whose result is then copied into memory of another dtype."""

    work: Work
    result: Tensor
    into: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.into.copy_(self.result)


def _as_stored(work: Work, result: Tensor, kind: BundleKind) -> tuple[Work, Tensor]:
    """The work and its result, in the dtype of the parameters."""
    if kind.summed == kind.stored:
        return work, result
    into = torch.empty_like(result, dtype=kind.stored)
    return _Cast(work, result, into), into


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

    def __init__(self, found: ParameterBundle, communicator: Communicator) -> None:
        self._kind, self._axes, self._communicator = found.kind, found.kind.axes, communicator
        self._gathers = [_gathered(entry, communicator, self._axes) for entry in found.entries]
        self._sizes = [num_elements(gather.held) for gather in self._gathers]
        self._num_members = len(communicator.mesh.group(communicator.rank, self._axes))
        self._under_way: tuple[Work, Tensor] | None = None
        communicator.prepare(self._axes)

    def start(self, held: Sequence[Tensor]) -> None:
        """Start gathering, unless it is under way."""
        if self._under_way is None:
            flat = torch.cat([x.detach().reshape(-1) for x in held]).to(self._kind.dtype)
            output = flat.new_empty(self._num_members * flat.numel())
            self._under_way = self._communicator.all_gather(to_send(output), to_send(flat), self._axes), output

    def forget(self) -> None:
        """What was started ahead and not used is of an earlier step: the parameters may have changed since."""
        if self._under_way is not None:
            self._under_way[0].wait()
            self._under_way = None

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
        ]).to(self._kind.summed)  # fmt: skip
        output = packed.new_empty(sum(self._sizes))
        work = self._communicator.reduce_scatter(to_add(output), to_add(packed), self._axes)
        work, made = _as_stored(work, output, self._kind)
        parts = torch.split(made, self._sizes)
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


def make_bundles(
    graph: Graph, communicator: Communicator, regathered: frozenset[str], dropping: Dropping | None = None
) -> tuple[Bundle, ...]:
    """All bundles of a plan, kind by kind in the order of use."""
    bundles: list[Bundle] = []
    last: dict[BundleKind, Bundle] = {}
    for found in find_bundles(graph, communicator.mesh, regathered):
        bundle = Bundle(found, _mover(found, communicator), dropping if found.kind.regather else None)
        if found.kind in last:
            bundle.before = last[found.kind]
            last[found.kind].after = bundle
        last[found.kind] = bundle
        bundles.append(bundle)
    return tuple(bundles)


def _mover(found: ParameterBundle, communicator: Communicator) -> Mover:
    return Gathering(found, communicator) if found.kind.gathers else Reducing(found.kind, communicator)
