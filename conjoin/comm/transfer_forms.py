"""The ways of others to bring slices from one grid to another, to compare with: AlpaComm 3.1 and 3.2.

A slice that takes t seconds from host to host, wanted by B devices on each of A hosts, takes

- ABt by send and receive: one copy for every device,
- At with a local all-gather: one copy for every host, put together there,
- 2t with a global all-gather over hosts (t for one host): a part for every device, then all parts to all,
- t(1 + (A - 1)/K) by a broadcast along a chain in K chunks.

One host sends a slice whole, and while it does, neither it nor a host that receives takes part in another. What
follows one after another, the two halves of a global all-gather or chunks, pays the latency of a link each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from conjoin.comm.cross_mesh import Message
from conjoin.comm.senders import Assignment, Atomic
from conjoin.comm.unit_tasks import Grid, Pieces, Slices, all_hosts, pieces_on, slices_between
from conjoin.ir import Region
from conjoin.ops import Layout


class Form(Enum):
    """How one slice is brought from its sender to all that want it."""

    SEND_RECEIVE = "send/receive"
    LOCAL_ALL_GATHER = "send/receive + local all-gather"
    GLOBAL_ALL_GATHER = "send/receive + global all-gather"
    BROADCAST = "broadcast"


def form_seconds(
    form: Form, seconds: float, num_hosts: int, devices_per_host: int, chunks: int, latency: float = 0.0
) -> float:
    """What a slice takes that goes from one host to another in so many seconds, and a message without bytes in others.

    >>> [form_seconds(form, 1.0, 2, 4, 100) for form in Form]
    [8.0, 2.0, 2.0, 1.01]
    >>> [form_seconds(form, 0.0, 2, 4, 100, latency=1.0) for form in Form]
    [1.0, 1.0, 2.0, 101.0]
    """
    if not num_hosts:
        return 0.0
    match form:
        case Form.SEND_RECEIVE:
            return seconds * num_hosts * devices_per_host + latency
        case Form.LOCAL_ALL_GATHER:
            return seconds * num_hosts + latency
        case Form.GLOBAL_ALL_GATHER:
            return (seconds + latency) * min(2, num_hosts)
        case Form.BROADCAST:
            return (seconds / chunks + latency) * (chunks + num_hosts - 1)


@dataclass(frozen=True, slots=True)
class SentWhole:
    """A transfer in one of these ways, one slice after another."""

    messages: tuple[tuple[Message, ...], ...]
    """By round."""

    def rounds(self, device: int | None = None) -> Iterator[tuple[Message, ...]]:
        """All rounds in order; of one device only its own messages, in as many rounds."""
        for messages in self.messages:
            yield tuple(m for m in messages if device is None or device in (m.sender, m.receiver))

    def passes_on(self, number: int) -> bool:
        """Whether a device may have to wait for rounds before this one to take part in it."""
        return any(message.after >= 0 for message in self.messages[number])


class WholeSlices:
    """The slices between two grids as tasks that one host sends whole."""

    def __init__(self, shape: tuple[int, ...], source: tuple[Layout, Grid], target: tuple[Layout, Grid]) -> None:
        hosts = all_hosts(source[1], target[1])
        self.have: Pieces = pieces_on(shape, *source, hosts)
        self.want: Pieces = pieces_on(shape, *target, hosts)
        self.slices: Slices = slices_between(self.have, self.want)

    def tasks(
        self, form: Form, seconds_per_element: float, chunks: int = 100, latency: float = 0.0
    ) -> list[Atomic]:
        """What each slice takes in a form, who holds it and who wants it; what is there already takes nothing."""
        found = []
        columns = self.slices.source.tolist(), self.slices.target.tolist(), self.slices.sizes.tolist()
        for piece, wanted, size in zip(*columns, strict=True):
            holders, wanters = (np.flatnonzero(row) for row in (self.have.count[piece], self.want.count[wanted]))
            missing = np.setdiff1d(wanters, holders)
            devices = int(self.want.count[wanted, missing].max(initial=0))
            seconds = form_seconds(form, size * seconds_per_element, len(missing), devices, chunks, latency)
            found.append(Atomic(seconds, tuple(holders.tolist()), tuple(missing.tolist())))
        return found

    def carried(self, form: Form, assignment: Assignment, chunks: int = 100) -> SentWhole:
        """Rounds of messages that carry out an assignment, one slice after another."""
        rounds: list[tuple[Message, ...]] = []
        for number, sender in assignment.order:
            piece, wanted = int(self.slices.source[number]), int(self.slices.target[number])
            giver = int(self.have.devices[self.have.first[piece, sender]])
            near = [h for h in np.flatnonzero(self.have.count[piece]).tolist() if self.want.count[wanted, h]]
            hosts = [h for h in np.flatnonzero(self.want.count[wanted]).tolist() if not self.have.count[piece, h]]
            region, size = self.slices.region(number), int(self.slices.sizes[number])
            after = len(rounds) - 1
            copies = [(self._holder(piece, host, d), d) for host in near for d in self._wanters(wanted, host)]
            if copies:
                rounds.append(tuple(Message(one, other, region, 0, size, 0, after) for one, other in copies))
            devices = [self._wanters(wanted, host) for host in hosts]
            if devices:
                rounds += _carried(form, (region, size), giver, devices, (len(rounds) - 1, chunks))
        return SentWhole(tuple(rounds))

    def _wanters(self, piece: int, host: int) -> list[int]:
        found: list[int] = self.want.devices[self.want.first[piece, host] :][: self.want.count[piece, host]].tolist()
        return found

    def _holder(self, piece: int, host: int, device: int) -> int:
        """Who gives a slice to a device of a host that has it: the device itself if it can, else one beside it."""
        holders: list[int] = self.have.devices[self.have.first[piece, host] :][: self.have.count[piece, host]].tolist()
        return device if device in holders else holders[0]


def _carried(
    form: Form, what: tuple[Region, int], giver: int, hosts: Sequence[Sequence[int]], at: tuple[int, int]
) -> list[tuple[Message, ...]]:
    """Rounds that bring a slice from one device to devices by host."""
    (region, size), (after, chunks) = what, at
    everyone = [device for devices in hosts for device in devices]
    match form:
        case Form.SEND_RECEIVE:
            return [(Message(giver, device, region, 0, size, 0, after),) for device in everyone]
        case Form.LOCAL_ALL_GATHER:
            dealt = [_dealt(giver, devices, region, size, after) for devices in hosts]
            first = [message for messages in dealt for message in messages]
            gathered = [m for devices in hosts for m in _all_to_all(devices, region, size, after + 1)]
            return [tuple(first), tuple(gathered)]
        case Form.GLOBAL_ALL_GATHER:
            return [tuple(_dealt(giver, everyone, region, size, after)), *_ring(everyone, region, size, after + 1)]
        case Form.BROADCAST:
            chain = [giver, *everyone]
            rounds = []
            for frame in range(chunks + len(everyone) - 1):
                sent = []
                for depth in range(len(everyone)):
                    chunk = frame - depth
                    if 0 <= chunk < chunks and size * chunk // chunks < size * (chunk + 1) // chunks:
                        part = size * chunk // chunks, size * (chunk + 1) // chunks
                        sent.append(Message(chain[depth], chain[depth + 1], region, *part, chunk, after + frame))
                rounds.append(tuple(sent))
            return rounds


def _dealt(giver: int, devices: Sequence[int], region: Region, size: int, after: int) -> list[Message]:
    ends = [size * i // len(devices) for i in range(len(devices) + 1)]
    messages = [Message(giver, d, region, ends[i], ends[i + 1], i, after) for i, d in enumerate(devices)]
    return [message for message in messages if message.end > message.begin]


def _ring(devices: Sequence[int], region: Region, size: int, after: int) -> list[tuple[Message, ...]]:
    """Parts go around, so that those of all others come to each host once."""
    count = len(devices)
    ends, rounds = [size * i // count for i in range(count + 1)], []
    for step in range(count - 1):
        turn = [(i, (i - step) % count) for i in range(count)]
        rounds.append(tuple(
            Message(devices[i], devices[(i + 1) % count], region, ends[part], ends[part + 1], part, after + step)
            for i, part in turn if ends[part + 1] > ends[part]
        ))  # fmt: skip
    return rounds


def _all_to_all(devices: Sequence[int], region: Region, size: int, after: int) -> list[Message]:
    ends = [size * i // len(devices) for i in range(len(devices) + 1)]
    return [
        Message(giver, taker, region, ends[i], ends[i + 1], i, after)
        for i, giver in enumerate(devices)
        for taker in devices
        if giver != taker and ends[i + 1] > ends[i]
    ]
