"""Tensors between stages as one rank has part in them: what it sends of its piece, and how it puts one together.

A transfer is planned in rounds (`comm/cross_mesh.py`). What comes from the source is under way as soon as both ends
have come to it; what is passed on among the ranks of the target, when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from conjoin.comm import Grid, Message, TransferPlan, plan_crossing
from conjoin.ir import Region, region_of, region_shape
from conjoin.ops import Layout, TensorType
from conjoin.runtime.ranks.communicator import Channel, Parcel
from conjoin.runtime.ranks.wire import to_send

Slices = tuple[slice, ...]


def _inside(part: Region, whole: Region) -> Slices:
    """Where a part lies in a piece."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, whole, strict=True))


class Crossing:
    """A tensor from the ranks of one stage to those of another, again and again."""

    def __init__(self, type: TensorType, source: tuple[Layout, Grid], target: tuple[Layout, Grid], rank: int) -> None:
        self._dtype, self._rank = type.dtype, rank
        self._have, self._want = (_region(type.shape, *end, rank) for end in (source, target))
        plan: TransferPlan = plan_crossing(type.laid_out(()), source, target)
        first: list[Message] = []
        self._later: list[tuple[list[Message], list[Message]]] = []
        """By round, what this rank passes on and what it is passed; as many rounds on all ranks of the target."""
        for number, messages in enumerate(plan.rounds(rank)):
            first += [message for message in messages if message.after < 0]
            if (number + 1) % plan.rounds_per_frame == 0 or plan.longest_chain > 1:
                later = [message for message in messages if message.after >= 0]
                sent = [message for message in later if message.sender == rank]
                self._later.append((sent, [message for message in later if message.receiver == rank]))
        self._sent_first = [m for m in first if m.sender == rank]
        self._taken_first = [m for m in first if m.receiver == rank != m.sender]
        self._kept = [m for m in self._sent_first if m.receiver == rank]
        later = [message for _, taken in self._later for message in taken]
        self._regions = tuple(dict.fromkeys(m.region for m in (*first, *later) if m.receiver == rank))
        """All that this rank gets, and keeps."""
        self._needs_rounds = bool(len(plan.spread.sender)) or plan.longest_chain > 1
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing is under way, whatever a step that failed has left."""
        self._sent, self._expected = count(), count()
        self._own: dict[int, list[Tensor]] = {}
        """What this rank keeps of what it has, by number for every one under way: they come in the order in which they
        are sent, and may be waited for in another."""

    @property
    def is_sender(self) -> bool:
        return self._have is not None

    @property
    def is_receiver(self) -> bool:
        return self._want is not None

    def nothing(self, device: torch.device) -> Tensor:
        """Zeros in the place of this rank's piece."""
        assert self._have is not None
        return torch.zeros(region_shape(self._have), dtype=self._dtype, device=device)

    def messages_of(self, piece: Tensor) -> list[tuple[int, Tensor]]:
        """What this rank sends of its piece."""
        assert self._have is not None
        piece = piece.detach().to(self._dtype)  # autocast may have made it in another
        found: list[tuple[int, Tensor]] = []
        own: list[Tensor] = []
        for message in self._sent_first:
            part = piece if message.region == self._have else piece[_inside(message.region, self._have)]
            part = _slice(part.reshape(-1), message)
            if message.receiver == self._rank:
                own.append(part)
            else:
                found.append((message.receiver, to_send(part)))
        if self._want is not None:
            self._own[next(self._sent)] = own
        return found

    def expect(self, channel: Channel, device: torch.device) -> Expected:
        """Get ready for the next one."""
        parts = {region: torch.empty(_count(region), dtype=self._dtype, device=device) for region in self._regions}
        coming = [(m.sender, to_send(_slice(parts[m.region], m))) for m in self._taken_first]
        return Expected(self, next(self._expected), parts, channel, channel.start((), coming))

    def finish(self, number: int, parts: dict[Region, Tensor], channel: Channel) -> Tensor:
        """What was kept is put beside what came; what others on this rank's host want is passed on."""
        for message, part in zip(self._kept, self._own.pop(number, ()), strict=True):
            parts[message.region][message.begin : message.end] = part
        for sent, taken in self._later if self._needs_rounds else ():
            sends = [(m.receiver, to_send(_slice(parts[m.region], m))) for m in sent if m.receiver != self._rank]
            receives = [(m.sender, to_send(_slice(parts[m.region], m))) for m in taken if m.sender != self._rank]
            channel.start(sends, receives).wait()
        return self._put_together(parts)

    def _put_together(self, parts: dict[Region, Tensor]) -> Tensor:
        """The piece that this rank wants."""
        assert self._want is not None
        if list(parts) == [self._want]:
            return parts[self._want].view(region_shape(self._want))
        device = next(iter(parts.values())).device
        piece = torch.empty(region_shape(self._want), dtype=self._dtype, device=device)
        for region, part in parts.items():
            piece[_inside(region, self._want)] = part.view(region_shape(region))
        return piece


def _slice(elements: Tensor, message: Message) -> Tensor:
    """What a message has of the elements of its region."""
    is_whole = message.begin == 0 and message.end == len(elements)
    return elements if is_whole else elements[message.begin : message.end]


def _region(shape: tuple[int, ...], layout: Layout, grid: Grid, rank: int) -> Region | None:
    return region_of(shape, layout, grid.mesh, grid.devices.index(rank)) if rank in grid.devices else None


def _count(region: Sequence[tuple[int, int]]) -> int:
    total = 1
    for start, stop in region:
        total *= stop - start
    return total


class Expected:
    """A tensor on its way to this rank."""

    def __init__(
        self, crossing: Crossing, number: int, parts: dict[Region, Tensor], channel: Channel, work: Parcel
    ) -> None:
        self._crossing, self._number, self._parts, self._channel, self._work = crossing, number, parts, channel, work

    def wait(self) -> Tensor:
        """This rank's piece of it."""
        self._work.wait()
        return self._crossing.finish(self._number, self._parts, self._channel)
