"""Tensors between stages as one rank has part in them: what it sends of its piece, and how it puts one together.

A transfer is planned in rounds (`comm/cross_mesh.py`, or another way of `comm/transfer_forms.py`). What may start at
once is under way as soon as both ends have come to it. All else goes round by round when it is waited for: a rank takes
part in a round when it has what it needs of those before, so a chunk is passed on while the next ones come.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from conjoin.comm import Grid, InRounds, Message, plan_crossing
from conjoin.ir import Region, region_of, region_shape
from conjoin.ops import Layout, TensorType
from conjoin.runtime.ranks.communicator import Channel, Parcel
from conjoin.runtime.ranks.wire import carried, flat

AHEAD = 8
"""For how many turns a rank gets ready before its own, where a backend sends only what is expected."""

Slices = tuple[slice, ...]
Parts = Mapping[Region, Tensor]
"""Elements of regions, one after another."""


def _inside(part: Region, whole: Region) -> Slices:
    """Where a part lies in a piece."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, whole, strict=True))


def _inside_of(part: Region, whole: Region | None) -> Slices | None:
    """The same; None where it is all of it."""
    assert whole is not None, "it has the parts that it gives"
    return None if part == whole else _inside(part, whole)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a rank does in a round, after all it has to do with in the rounds up to another one."""

    round: int
    after: int
    sent: tuple[Message, ...]
    taken: tuple[Message, ...]
    kept: tuple[Message, ...]

    @classmethod
    def of(cls, number: int, messages: Sequence[Message], rank: int) -> _Turn:
        """Those of one rank among the messages of a round."""
        sent = tuple(m for m in messages if m.sender == rank != m.receiver)
        taken = tuple(m for m in messages if m.receiver == rank != m.sender)
        kept = tuple(m for m in messages if m.sender == rank == m.receiver)
        return cls(number, max((m.after for m in messages), default=-1), sent, taken, kept)

    def keep(self, own: Parts, parts: Parts) -> None:
        for message in self.kept:
            _slice(parts[message.region], message).copy_(_slice(own[message.region], message))


class Crossing:
    """A tensor from the ranks of one stage to those of another, again and again: as it is planned, or by another plan.

    By a plan in which ranks of the source wait for rounds, each transfer has to be over before the next one begins.
    """

    def __init__(
        self,
        type: TensorType,
        source: tuple[Layout, Grid],
        target: tuple[Layout, Grid],
        rank: int,
        plan: InRounds | None = None,
    ) -> None:
        self._dtype, self._rank = type.dtype, rank
        self._have, self._want = (_region(type.shape, *end, rank) for end in (source, target))
        plan = plan_crossing(type.laid_out(()), source, target) if plan is None else plan
        self._first: list[_Turn] = []
        """What starts at once."""
        self._later: list[_Turn] = []
        """What is passed on; as many rounds on all ranks of the target."""
        for number, messages in enumerate(plan.rounds(rank)):
            self._first.append(_Turn.of(number, [m for m in messages if m.after < 0], rank))
            if plan.passes_on(number):
                self._later.append(_Turn.of(number, [m for m in messages if m.after >= 0], rank))
        taken, sent, kept = (_regions(self._first + self._later, each) for each in ("taken", "sent", "kept"))
        self._got = tuple({**taken, **kept})
        """What this rank's new piece is made of."""
        given = (region for region in {**sent, **kept} if region not in taken)
        self._given = tuple((region, _inside_of(region, self._have)) for region in given)
        """What it needs of the piece that it has, and where that lies in it: of this, nothing comes."""
        self._kept_back = {**kept, **_regions(self._later, "sent")}
        """What it does not send at once."""
        self._sent = [message for turn in self._first for message in turn.sent]
        self._sent_rounds = [turn.round for turn in self._first for _ in turn.sent]
        self._taken = [message for turn in self._first for message in turn.taken]
        self._taken_rounds = [turn.round for turn in self._first for _ in turn.taken]
        self._sizes = {region: _count(region) for region in self._got}
        self._shape = () if self._want is None else region_shape(self._want)
        self._comes_whole = self._got == (self._want,)
        self.passes_on = bool(self._later)
        """Alike on all ranks."""
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing is under way, whatever a step that failed has left."""
        self._num_sent, self._num_expected = count(), count()
        self._own: dict[int, Parts] = {}
        """Of this rank's own piece what it needs to get another, by number for every one under way: they come in the
        order in which they are sent, and may be waited for in another."""

    def nothing(self, device: torch.device) -> Tensor:
        """Zeros in the place of this rank's piece."""
        assert self._have is not None
        return torch.zeros(region_shape(self._have), dtype=self._dtype, device=device)

    def send(self, channel: Channel, piece: Tensor) -> Parcel:
        """Start to send this rank's piece. What it has to wait for goes on when the parcel is waited for, or where
        this rank also gets a piece, when that one is."""
        own = self._parts_of(piece)
        parcel = channel.start([(m.receiver, _slice(own[m.region], m)) for m in self._sent], ())
        if not self._kept_back:
            return parcel
        later = {region: part for region, part in own.items() if region in self._kept_back}
        if self._want is None:
            return Sent(self, later, channel, Flight([(parcel, self._sent_rounds)]))
        self._own[next(self._num_sent)] = later
        return parcel

    def _parts_of(self, piece: Tensor) -> Parts:
        """What others need of a piece, each part one element after another."""
        if piece.dtype != self._dtype:
            piece = piece.to(self._dtype)  # autocast may have made it in another
        return {region: flat(piece if inside is None else piece[inside]) for region, inside in self._given}

    def expect(self, channel: Channel, device: torch.device, onward: Channel | None = None) -> Expected:
        """Get ready for the next one.

        Where one is expected before the last has been passed on, that goes over a channel of its own: in the same it
        would stand behind what comes later, or be taken for it.
        """
        parts = {region: torch.empty(size, dtype=self._dtype, device=device) for region, size in self._sizes.items()}
        parcel = channel.start((), [(m.sender, _slice(parts[m.region], m)) for m in self._taken])
        return Expected(self, next(self._num_expected), parts, onward or channel, parcel)

    def finish(self, number: int, parts: Parts, channel: Channel, parcel: Parcel) -> Tensor:
        """What was kept is put beside what comes; what others want is passed on."""
        own: Parts = self._own.pop(number, {}) if self._kept_back else {}
        if own:
            for turn in self._first:
                turn.keep(own, parts)
        if self._later:
            self.go_on(own, parts, channel, Flight([(parcel, self._taken_rounds)]))
        else:
            parcel.wait()
        return self._put_together(parts)

    def go_on(self, own: Parts, parts: Parts, channel: Channel, flight: Flight) -> None:
        """All rounds in which something is passed on, to their end.

        Where messages are apart, this rank is ready for what comes some turns before its own: then who sends does not
        wait for it.
        """
        there, busy = {**parts, **own}, [turn for turn in self._later if turn.sent or turn.taken or turn.kept]
        num_ready = num_begun = 0
        for turn in self._later:  # also in those of others, so that all ranks have started as much: who waits looks
            if num_begun < len(busy) and turn is busy[num_begun]:
                num_begun += 1
                flight.wait(turn.after)
            turn.keep(own, parts)
            soon = busy[num_ready : num_begun + AHEAD] if channel.are_apart else [turn]
            num_ready += len(soon)
            coming = [message for each in soon for message in _receives(each, parts)]
            rounds, sends = [each.round for each in soon for _ in each.taken], _sends(turn, there)
            if channel.are_apart:
                flight.add(channel.start((), coming), rounds)
                flight.add(channel.start(sends, ()), [turn.round] * len(sends))
            else:
                flight.add(channel.start(sends, coming), rounds + [turn.round] * len(sends))
        flight.wait()

    def _put_together(self, parts: Parts) -> Tensor:
        """The piece that this rank wants."""
        assert self._want is not None
        if self._comes_whole:
            return parts[self._want].view(self._shape)
        device = next(iter(parts.values())).device
        piece = torch.empty(self._shape, dtype=self._dtype, device=device)
        for region, part in parts.items():
            piece[_inside(region, self._want)] = part.view(region_shape(region))
        return piece


def _regions(turns: Sequence[_Turn], which: Literal["sent", "taken", "kept"]) -> dict[Region, None]:
    """The regions of messages, in order."""
    return {message.region: None for turn in turns for message in getattr(turn, which)}


def _sends(turn: _Turn, parts: Parts) -> list[tuple[int, Tensor]]:
    return [(m.receiver, _slice(parts[m.region], m)) for m in turn.sent]


def _receives(turn: _Turn, parts: Parts) -> list[tuple[int, Tensor]]:
    return [(m.sender, _slice(parts[m.region], m)) for m in turn.taken]


def _slice(elements: Tensor, message: Message) -> Tensor:
    """What a message has of the elements of its region, as every backend carries it."""
    is_whole = message.begin == 0 and message.end == elements.numel()
    return carried(elements if is_whole else elements[message.begin : message.end])


def _region(shape: tuple[int, ...], layout: Layout, grid: Grid, rank: int) -> Region | None:
    return region_of(shape, layout, grid.mesh, grid.devices.index(rank)) if rank in grid.devices else None


def _count(region: Sequence[tuple[int, int]]) -> int:
    total = 1
    for start, stop in region:
        total *= stop - start
    return total


@dataclass
class Flight:
    """What a rank has under way of one transfer: parcels, and the round of each of their messages in order."""

    parcels: list[tuple[Parcel, list[int]]] = field(default_factory=list)

    def add(self, parcel: Parcel, rounds: list[int]) -> None:
        if rounds:
            self.parcels.append((parcel, rounds))

    def wait(self, round: int | None = None) -> None:
        """Until all is there that belongs to the rounds up to one of them."""
        if round is None:
            for parcel, _ in self.parcels:
                parcel.wait()
            self.parcels = []
            return
        left = []
        for parcel, rounds in self.parcels:
            num_wanted = bisect_right(rounds, round)
            if num_wanted == len(rounds):
                parcel.wait()
            else:
                left.append((parcel, rounds))
                if num_wanted:
                    parcel.wait(num_wanted)
        self.parcels = left


class Expected:
    """A tensor on its way to this rank."""

    def __init__(self, crossing: Crossing, number: int, parts: Parts, channel: Channel, parcel: Parcel) -> None:
        self._crossing, self._number, self._parts = crossing, number, parts
        self._channel, self._parcel = channel, parcel

    def wait(self) -> Tensor:
        """This rank's piece of it."""
        return self._crossing.finish(self._number, self._parts, self._channel, self._parcel)


class Sent:
    """A piece that leaves a rank in several rounds."""

    def __init__(self, crossing: Crossing, own: Parts, channel: Channel, flight: Flight) -> None:
        self._crossing, self._own, self._channel, self._flight = crossing, own, channel, flight

    def wait(self, count: int | None = None) -> None:
        self._crossing.go_on(self._own, {}, self._channel, self._flight)
