"""Tensors between stages as one rank has part in them: what it sends of its piece, and how it puts one together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from conjoin.comm import Held, Sending, direct_messages
from conjoin.ir import Region, region_shape
from conjoin.runtime.communicator import Channel, Messages, Parcel
from conjoin.runtime.wire import to_send

Slices = tuple[slice, ...]


def _inside(part: Region, whole: Region) -> Slices:
    """Where a part lies in a piece."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, whole, strict=True))


class Crossing:
    """A tensor from the ranks of one stage to those of another, again and again."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, ends: tuple[Held, Held], rank: int) -> None:
        source, target = ends
        self._dtype = dtype
        self._messages = direct_messages(shape, source, target)
        self._rank = rank
        self._have = source.regions(shape).get(rank)
        self._want = target.regions(shape).get(rank)
        self._own: deque[Tensor] = deque()
        """What this rank sends to itself."""

    @property
    def is_sender(self) -> bool:
        return self._have is not None

    @property
    def is_receiver(self) -> bool:
        return self._want is not None

    def messages_of(self, piece: Tensor) -> Messages:
        """What this rank sends of its piece."""
        assert self._have is not None
        found: list[tuple[int, Tensor]] = []
        for message in self._messages:
            if message.sender == self._rank:
                part = piece.detach()[_inside(message.region, self._have)]
                if message.receiver == self._rank:
                    self._own.append(part)
                else:
                    found.append((message.receiver, to_send(part)))
        return found

    def expect(self, channel: Channel, device: torch.device) -> Expected:
        """Get ready for the next one."""
        assert self._want is not None
        mine = [message for message in self._messages if message.receiver == self._rank]
        parts = [torch.empty(region_shape(message.region), dtype=self._dtype, device=device) for message in mine]
        coming = [
            (message.sender, to_send(part))
            for message, part in zip(mine, parts, strict=True)
            if message.sender != self._rank
        ]
        return Expected(self, mine, parts, channel.start((), coming))

    def put_together(self, mine: Sequence[Sending], parts: Sequence[Tensor]) -> Tensor:
        """The piece that this rank wants."""
        assert self._want is not None
        given = [
            self._own.popleft() if message.sender == self._rank else part
            for message, part in zip(mine, parts, strict=True)
        ]
        if len(given) == 1:
            return given[0].clone() if mine[0].sender == self._rank else given[0]
        piece = torch.empty(region_shape(self._want), dtype=self._dtype, device=given[0].device)
        for message, part in zip(mine, given, strict=True):
            piece[_inside(message.region, self._want)] = part
        return piece


class Expected:
    """A tensor on its way to this rank."""

    def __init__(self, crossing: Crossing, mine: Sequence[Sending], parts: Sequence[Tensor], work: Parcel) -> None:
        self._crossing, self._mine, self._parts, self._work = crossing, mine, parts, work

    def wait(self) -> Tensor:
        """This rank's piece of it."""
        self._work.wait()
        return self._crossing.put_together(self._mine, self._parts)
