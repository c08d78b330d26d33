"""How the parameters of a bundle are packed and moved: gathered for use, their gradients summed up.

Everyone's pieces lie one row a member, padded to the widest, in one flat tensor. Between it and the parameters as they
are used, whole or a part of a split that stays, elements are copied by one call for all: the cast to another dtype is
part of it. Where the graph asks for sums in a narrower dtype than that of the parameters, they travel in it, and are
cast when they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from conjoin.comm import Entry, ParameterBundle
from conjoin.ir import Region, num_elements, region_of, region_shape
from conjoin.runtime.ranks.communicator import Communicator, Done, Work
from conjoin.runtime.ranks.wire import to_add, to_send
from conjoin.runtime.torch_private import copy_each


@dataclass(frozen=True, slots=True)
class _Parameter:
    """Which region of one parameter each member of a group holds, and which all of them use."""

    held: Region
    used: Region
    parts: tuple[Region, ...]
    """By position in the group."""
    dim: int
    """Along which equal parts follow each other in the order of the group; -1 where they do not."""

    @property
    def shape(self) -> tuple[int, ...]:
        return region_shape(self.used)

    def views(self, whole: Tensor, rows: Tensor, starts: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """The same elements in the parameter as used, and in everyone's rows, where its parts start at some places."""
        if self.dim >= 0 and len(set(starts)) == 1:
            count, piece = len(self.parts), region_shape(self.held)
            columns = rows[:, starts[0] : starts[0] + num_elements(self.held)].view(count, *piece)
            before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
            return [whole.reshape(*before, count, -1, *after).movedim(self.dim, 0)], [columns]
        shapes = [region_shape(part) for part in self.parts]
        sizes = [num_elements(part) for part in self.parts]
        pieces = [rows[i, at : at + sizes[i]].view(shapes[i]) for i, at in enumerate(starts)]
        return [whole[self._within(part)] for part in self.parts], pieces

    def _within(self, part: Region) -> tuple[slice, ...]:
        return tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(part, self.used, strict=True))


def _parameter(entry: Entry, communicator: Communicator, axes: tuple[str, ...]) -> _Parameter:
    value, layout = entry
    mesh, shape, rank = communicator.mesh, value.type.shape, communicator.rank
    parts = tuple(region_of(shape, value.type.layout, mesh, member) for member in mesh.group(rank, axes))
    held, used = (region_of(shape, way, mesh, rank) for way in (value.type.layout, layout))
    along = [dim for dim, (a, b) in enumerate(zip(held, used, strict=True)) if a != b]
    alike = len({region_shape(part) for part in parts}) == 1 and list(parts) == sorted(parts)
    return _Parameter(held, used, parts, along[0] if len(along) == 1 and alike else -1)


@dataclass(frozen=True, slots=True)
class _Cast:
    """A collective whose result is then copied into memory of another dtype."""

    work: Work
    result: Tensor
    into: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.into.copy_(self.result)


class Mover:
    """Brings the parameters of a bundle into the layouts of their use, and sums up their gradients."""

    def __init__(self, found: ParameterBundle, communicator: Communicator) -> None:
        self.kind, self._communicator = found.kind, communicator
        self._parameters = [_parameter(entry, communicator, self.kind.gathered) for entry in found.entries]
        self._sizes = [num_elements(parameter.held) for parameter in self._parameters]
        self._shapes = [region_shape(parameter.held) for parameter in self._parameters]
        parts = zip(*(parameter.parts for parameter in self._parameters), strict=True)
        by_member = [[num_elements(part) for part in each] for each in parts]
        self._starts = list(zip(*([0, *accumulate(sizes[:-1])] for sizes in by_member), strict=True))
        """For every parameter where it starts in each member's row."""
        self._width = max(map(sum, by_member))
        self._pads = any(sum(sizes) < self._width for sizes in by_member)
        self._stacks = not self._pads and all(parameter.dim == 0 for parameter in self._parameters)
        """Whether rows cut into columns are the parameters."""
        self._is_flat = found.is_flat
        self._num_members = len(by_member)
        self._under_way: tuple[Work, Tensor] | None = None
        for axes in (self.kind.gathered, self.kind.summed):
            if axes:
                communicator.prepare(axes)

    def start(self, held: Sequence[Tensor]) -> None:
        """Start gathering, unless it is under way."""
        if self._under_way is None:
            flat = self._pack(held, self.kind.dtype)
            output = flat.new_empty(self._parameters[0].shape if self._is_flat else self._num_members * self._width)
            axes = self.kind.gathered
            self._under_way = self._communicator.all_gather(to_send(output), to_send(flat), axes), output

    def bring(self, held: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The parameters as they are used."""
        if not self.kind.gathered:
            return tuple(x.view_as(x) if x.dtype == self.kind.dtype else x.to(self.kind.dtype) for x in held)
        self.start(held)
        assert self._under_way is not None
        (work, flat), self._under_way = self._under_way, None
        work.wait()
        del work  # it holds what was sent
        if self._is_flat:
            return (flat,)
        rows = flat.view(self._num_members, self._width)
        wholes = tuple(flat.new_empty(parameter.shape) for parameter in self._parameters)
        if self._stacks:
            columns = [whole.view(self._num_members, -1) for whole in wholes]
            torch.split_with_sizes_copy(rows, self._sizes, 1, out=columns)
        else:
            copy_each(*self._views(wholes, rows))
        return wholes

    def forget(self) -> None:
        """What was started and not used is of an earlier step: the parameters may have changed since."""
        if self._under_way is not None:
            self._under_way[0].wait()
        self._under_way = None

    def drop(self) -> None:
        """What was started will not come."""
        self._under_way = None

    def scatter(self, gradients: Sequence[Tensor], defers: bool) -> tuple[Work, Tensor]:
        """Start to sum gradients up over the axes they were gathered over; this rank's pieces, one after the other.

        What is put off is added up as it is stored.
        """
        if not self.kind.gathered:
            return Done(), self._pack(gradients, self.kind.stored if defers else self.kind.added)
        rows = self._rows(gradients)
        flat = rows.new_empty(self._width)
        work = self._communicator.reduce_scatter(to_add(flat), to_add(rows), self.kind.gathered)
        return work, flat[: sum(self._sizes)]

    def _rows(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients as everyone's rows, in the dtype in which they are summed up."""
        if self._is_flat:
            return gradients[0].detach().to(self.kind.added).contiguous()
        rows = self._empty((self._num_members, self._width), gradients[0], self.kind.added)
        if self._stacks:
            with torch.no_grad():
                torch.cat([gradient.reshape(self._num_members, -1) for gradient in gradients], 1, out=rows)
        else:
            wholes, parts = self._views(gradients, rows)
            copy_each(parts, wholes)
        return rows

    def sum_up(self, flat: Tensor) -> Work:
        """Start to sum pieces up over the axes on which they are stored alike."""
        if not self.kind.summed:
            return Done()
        summed = flat.to(self.kind.added)
        work = self._communicator.all_reduce(to_add(summed), self.kind.summed)
        return work if summed is flat else _Cast(work, summed, flat)

    def pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        """What lies one after the other as views, one for each parameter."""
        parts = torch.split(flat, self._sizes)
        return tuple(part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))

    def _pack(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Tensors of this rank one after the other."""
        flat = self._empty((self._width,), tensors[0], dtype)
        copy_each(torch.split(flat[: sum(self._sizes)], self._sizes), [x.reshape(-1) for x in tensors])
        return flat

    def _empty(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory to pack into; what only fills up is zero."""
        return like.new_zeros(shape, dtype=dtype) if self._pads else like.new_empty(shape, dtype=dtype)

    def _views(self, wholes: Sequence[Tensor], rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The same elements in the parameters as used and in everyone's rows."""
        found = [p.views(x, rows, at) for p, x, at in zip(self._parameters, wholes, self._starts, strict=True)]
        return [view for views, _ in found for view in views], [view for _, views in found for view in views]
