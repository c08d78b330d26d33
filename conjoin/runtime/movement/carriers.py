"""Reshards at run time: a route's steps on real tensors, and autograd functions whose backward is the dual route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import (
    Movement,
    Route,
    Step,
    StepKind,
    backward_route,
    changes_places,
    move_regions,
    movement,
    reshard,
)
from conjoin.ir import Region, RegionMove, holds, nothing, num_elements, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import Greatest, Layout, first_order, placement_on
from conjoin.runtime.ranks.communicator import Axes, Communicator, Sizes, uncompiled
from conjoin.runtime.ranks.wire import from_sum, to_add, to_send, total

Carry = Callable[[Tensor], Tensor]


def _exchanged(packed: Tensor, sizes: Sizes, axes: Axes, communicator: Communicator) -> Tensor:
    """Parts of a flat tensor to the members of a group, and theirs to this rank."""
    arrived = packed.new_empty(sum(sizes[0]))
    into, out = to_send(arrived), to_send(packed)
    width = packed.itemsize // out.itemsize
    received, sent = ([size * width for size in part] for part in sizes)
    communicator.all_to_all(into, out, (received, sent), axes).wait()
    return arrived


def _slices(part: Region, whole: Region) -> tuple[slice, ...]:
    """Where a part lies inside a local tensor that holds `whole`."""
    return tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(part, whole, strict=True))


class Exchange:
    """Parts of what this rank holds to others of its group, parts of theirs into what it wants.

    Backward it runs the other way: what a rank received gives its gradient back to where it came from, and what several
    took adds up.
    """

    def __init__(self, table: Movement, axes: Axes, communicator: Communicator) -> None:
        order = sorted(range(len(table.group)), key=lambda place: table.group[place])
        self._axes, self._communicator = axes, communicator
        self._have, self._want = table.have, table.want
        self._sends = _by_member(table.sends, order)
        self._receives = _by_member(table.receives, order)

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, (self._have, self._sends), (self._want, self._receives), add=False)

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of what was held, from the gradient of what was wanted."""
        return self._run(gradient, (self._want, self._receives), (self._have, self._sends), add=True)

    def _run(
        self,
        x: Tensor,
        source: tuple[Region, Sequence[Region | None]],
        target: tuple[Region, Sequence[Region | None]],
        add: bool,
    ) -> Tensor:
        (have, sends), (want, receives) = source, target
        parts = [x[_slices(part, have)].reshape(-1) for part in sends if part is not None]
        packed = torch.cat(parts) if parts else x.new_empty(0)
        sizes = [[num_elements(part) if part is not None else 0 for part in parts] for parts in (receives, sends)]
        arrived = _exchanged(packed, (sizes[0], sizes[1]), self._axes, self._communicator)
        result = x.new_zeros(region_shape(want)) if add else x.new_empty(region_shape(want))
        for part, piece in zip(receives, torch.split(arrived, sizes[0]), strict=True):
            if part is not None:
                place = result[_slices(part, want)]
                _ = place.add_(piece.view_as(place)) if add else place.copy_(piece.view_as(place))
        return result


def _by_member(parts: Sequence[tuple[int, Region]], order: Sequence[int]) -> list[Region | None]:
    found = dict(parts)
    return [found.get(place) for place in order]


class Gather:
    """Everyone's piece, put together; pieces of one size go in one collective, others as an exchange."""

    def __init__(self, table: Movement, axes: Axes, communicator: Communicator) -> None:
        self._axes, self._communicator = axes, communicator
        self._want = table.want
        found = dict(table.receives)
        order = sorted(range(len(table.group)), key=lambda place: table.group[place])
        self._parts = [found[place] for place in order]
        self._piece = region_shape(table.have)
        along = [d for d, (a, b) in enumerate(zip(table.have, table.want, strict=True)) if a != b]
        in_order = self._parts == sorted(self._parts)
        self._stacks = len(along) == 1 and along[0] == 0 and in_order

    @staticmethod
    def fits(table: Movement) -> bool:
        """Whether all pieces of the group have one size."""
        shapes = {region_shape(part) for _, part in table.receives}
        return len(shapes) == 1 and len(table.receives) == len(table.group)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.new_empty((len(self._parts), *self._piece))
        self._communicator.all_gather(to_send(flat), to_send(x), self._axes).wait()
        if self._stacks:
            return flat.view(region_shape(self._want))
        result = x.new_empty(region_shape(self._want))
        for part, piece in zip(self._parts, flat, strict=True):
            result[_slices(part, self._want)].copy_(piece)
        return result


class ReduceScatter:
    """The sum over the group of the part of a partial sum that belongs to this rank."""

    def __init__(self, table: Movement, axes: Axes, communicator: Communicator) -> None:
        self._axes, self._communicator = axes, communicator
        self._have, self._want = table.have, table.want
        order = sorted(range(len(table.group)), key=lambda place: table.group[place])
        found, nothing_of_it = dict(table.sends), nothing(len(table.have))
        self._parts = [found.get(place, nothing_of_it) for place in order]
        self._even = len({num_elements(part) for part in self._parts}) == 1

    def __call__(self, x: Tensor) -> Tensor:
        packed = torch.cat([x[_slices(part, self._have)].reshape(-1) for part in self._parts])
        if self._even:
            summed = to_add(packed)
            result = summed.new_empty(summed.numel() // len(self._parts))
            self._communicator.reduce_scatter(result, summed, self._axes).wait()
            return from_sum(result, x.dtype).view(region_shape(self._want))
        sizes = [num_elements(self._want)] * len(self._parts), [num_elements(part) for part in self._parts]
        arrived = _exchanged(packed, sizes, self._axes, self._communicator)
        return total(arrived.view(len(self._parts), *region_shape(self._want)))


class Reduce:
    """The sum over the group, at the one place that is to have it."""

    def __init__(self, table: Movement, axes: Axes, communicator: Communicator) -> None:
        self._axes, self._communicator = axes, communicator
        order = sorted(range(len(table.group)), key=lambda place: table.group[place])
        self._want = table.want
        self._sends = [part is not None for part in _by_member(table.sends, order)]
        self._receives = [part is not None for part in _by_member(table.receives, order)]

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        sizes = [[flat.numel() if some else 0 for some in members] for members in (self._receives, self._sends)]
        arrived = _exchanged(flat, (sizes[0], sizes[1]), self._axes, self._communicator)
        shape = region_shape(self._want)
        return total(arrived.view(len(self._receives), *shape)) if any(self._receives) else x.new_empty(shape)


def _all_reduce(x: Tensor, axes: Axes, communicator: Communicator, largest: bool) -> Tensor:
    summed = to_add(x.clone(memory_format=torch.contiguous_format))
    communicator.all_reduce(summed, axes, largest).wait()
    return from_sum(summed, x.dtype).view(x.shape)


def _pad(x: Tensor, have: Region, want: Region) -> Tensor:
    result = x.new_zeros(region_shape(want))
    result[_slices(have, want)] = x
    return result


def carry_step(step: Step, shape: tuple[int, ...], communicator: Communicator) -> Carry:
    """A step as a function of this rank's local tensor."""
    mesh, rank = communicator.mesh, communicator.rank
    axes = mesh.in_order(step.axes)
    if not step.kind.is_local:
        communicator.prepare(axes)
    if not _takes_part(step, communicator):
        return _as_it_is
    if step.kind.is_local:
        return _carry_local(step, shape, mesh, rank)
    if step.kind is StepKind.ALL_REDUCE:
        largest = placement_on(step.source, axes[0]) is Greatest()
        return partial(_all_reduce, axes=axes, communicator=communicator, largest=largest)
    table = movement(step, shape, mesh, rank)
    match step.kind:
        case StepKind.REDUCE:
            return Reduce(table, axes, communicator)
        case StepKind.REDUCE_SCATTER:
            return ReduceScatter(table, axes, communicator)
        case StepKind.ALL_GATHER if Gather.fits(table):
            return Gather(table, axes, communicator)
        case _:
            return Exchange(table, axes, communicator)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _carry_local(step: Step, shape: tuple[int, ...], mesh: Mesh, rank: int) -> Carry:
    """A step in which nothing is sent."""
    have, want = (region_of(shape, layout, mesh, rank) for layout in (step.source, step.target))
    match step.kind:
        case StepKind.SLICE:
            cut = _slices(want, have)
            return lambda x: x[cut]
        case StepKind.KEEP:
            places = mesh.coordinates(rank)
            return torch.zeros_like if any(places[axis] for axis in step.axes) else _as_it_is
        case StepKind.PAD:
            return partial(_pad, have=have, want=want)
        case StepKind.DROP if not holds(step.target, mesh, rank):
            return lambda x: x.new_empty(region_shape(want))
        case StepKind.FILL if not holds(step.source, mesh, rank):
            return lambda x: x.new_zeros(region_shape(want))
        case _:
            return _as_it_is


def _takes_part(step: Step, communicator: Communicator) -> bool:
    """Whether a rank, or one that it communicates with in a step, has anything of the tensor."""
    mesh, rank = communicator.mesh, communicator.rank
    group = mesh.group(rank, step.axes) if changes_places(step) else (rank,)
    return any(holds(step.source, mesh, member) for member in group)


def carry(route: Route, communicator: Communicator) -> Carry:
    """A whole route as a function of this rank's local tensor."""
    steps = [carry_step(step, route.shape, communicator) for step in route.steps]

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return run


class _Carried(torch.autograd.Function):
    """Moves a tensor forward one way and its gradient back the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Carry, back: Carry) -> Tensor:
        ctx.back = back
        moved = there(x)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0]), None, None


def differentiable(there: Carry, back: Carry) -> Carry:
    """A function that moves a tensor, and its gradient back."""

    @uncompiled
    def moved(x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _Carried.apply(x, there, back)  # type: ignore[no-any-return, no-untyped-call]
        return there(x)

    return moved


def carry_reshard(shape: tuple[int, ...], source: Layout, target: Layout, communicator: Communicator) -> Carry:
    """A reshard as a differentiable function: backward it is the reshard of the duals."""
    route = reshard(shape, source, target, communicator.mesh)
    back = backward_route(route, communicator.mesh)
    return differentiable(carry(route, communicator), carry(back, communicator))


def carry_move(move: RegionMove, communicator: Communicator) -> Carry:
    """A move between the regions of a group (a halo, or pieces that do not line up) as a differentiable function."""
    axes = prepare_move(move, communicator)
    exchange = Exchange(move_regions(move.have, move.want, move.group, communicator.rank), axes, communicator)
    return differentiable(exchange, exchange.back)


def prepare_move(move: RegionMove, communicator: Communicator) -> Axes:
    """Make ready for a move, also on ranks that have no part in it; the axes it goes over."""
    axes = _axes_of(move.group, communicator)
    communicator.prepare(axes)
    return axes


def _axes_of(group: tuple[int, ...], communicator: Communicator) -> Axes:
    """The axes along which the ranks of a group differ."""
    mesh = communicator.mesh
    places = [mesh.coordinates(rank) for rank in group]
    return tuple(name for name in mesh.names if len({place[name] for place in places}) > 1)
