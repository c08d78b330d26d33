"""The network between the nodes: one process that takes every frame and hands it over when a real link would have.

A link is its node's network card: full duplex, a rate each way, and a delay. A frame of s bytes from a to b that comes
at time t starts at the later of t and the end of a's last one, and takes s/rate to leave. Its first byte is at b after
the delay, and waits there for the end of b's last one; it is handed over s/rate later. So an idle link takes
delay + s/rate for any s, and what shares a card shares its rate.

`Clock` computes these times and does nothing else. `Switch` keeps them: it reads a frame only shortly before its
card is free, as a card does, so that waiting frames wait in the sender's own queue. It drops none.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.emulated_cluster.namespaces import MAX_MTU

AHEAD_SECONDS = 1e-3
"""How long before its card is free a frame may be read: what a busy host may be late without the link standing idle."""
LATE_SECONDS = 1e-3
_IP_VERSION_4 = 4
_MAX_WAITING_BYTES = 256 * 2**20
_FRAMES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Link:
    """A node's card: bytes per second each way, and seconds one way (between two cards the mean of theirs)."""

    bytes_per_second: float
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the switch did since the start; frames handed over late say that the host was too busy to be believed."""

    num_frames: int = 0
    num_bytes: int = 0
    num_late: int = 0
    """Frames more than a millisecond late."""
    mean_lateness_seconds: float = 0.0
    worst_lateness_seconds: float = 0.0
    num_dropped: int = 0
    processor_seconds: float = 0.0
    real_time: bool = False
    """Whether the switch goes before other processes; without it a busy host makes it late."""


class Clock:
    """When frames leave and arrive.

    >>> clock = Clock([Link(1000.0, 0.5), Link(1000.0, 0.5)])
    >>> clock.send(0.0, 0, 1, 2000)
    2.5
    >>> clock.send(0.0, 0, 1, 1000), clock.send(0.0, 1, 0, 1000)
    (3.5, 1.5)
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)
        self.free_to_send = [0.0] * len(links)
        self._free_to_receive = [0.0] * len(links)

    def send(self, now: float, source: int, target: int, num_bytes: int) -> float:
        """The time at which the last byte of a frame that stands in front of its card now has arrived."""
        ours, theirs = self.links[source], self.links[target]
        start = max(now, self.free_to_send[source])
        left = start + num_bytes / ours.bytes_per_second
        delay = (ours.delay_seconds + theirs.delay_seconds) / 2
        received = max(start + delay, self._free_to_receive[target]) + num_bytes / theirs.bytes_per_second
        arrived = max(received, left + delay)
        self.free_to_send[source], self._free_to_receive[target] = left, arrived
        return arrived


class Switch:
    """Carries frames between the nodes until the control socket is closed; any message on it is answered with JSON."""

    def __init__(self, links: Sequence[Link], devices: Sequence[int], control: socket.socket, real_time: bool) -> None:
        self._clock = Clock(links)
        self._devices, self._control = list(devices), control
        self._node_of = {device: node for node, device in enumerate(devices)}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._waiting_bytes = self._num_frames = self._num_bytes = self._num_late = self._num_dropped = 0
        self._lateness = self._worst = 0.0
        self._real_time = real_time

    def run(self) -> None:
        """Carry frames until the other end of the control socket is closed."""
        while True:
            now = time.monotonic()
            self._hand_over(now)
            readable, wake = self._look_ahead(now)
            timeout = None if wake is None else max(0.0, wake - time.monotonic())
            ready, _, _ = select.select(readable, [], [], timeout)
            for file in ready:
                if isinstance(file, int):
                    self._take(file)
                elif not self._answer():
                    return

    def traffic(self) -> Traffic:
        """What was done so far."""
        return Traffic(
            self._num_frames,
            self._num_bytes,
            self._num_late,
            self._lateness / max(1, self._num_frames),
            self._worst,
            self._num_dropped,
            time.process_time(),
            self._real_time,
        )

    def _look_ahead(self, now: float) -> tuple[list[int | socket.socket], float | None]:
        """The devices whose next frame may be read now, and when there is something to do without a new frame."""
        readable: list[int | socket.socket] = [self._control]
        wakes = [self._waiting[0][0]] if self._waiting else []
        for device, free in zip(self._devices, self._clock.free_to_send, strict=True):
            if free - AHEAD_SECONDS <= now:
                readable.append(device)
            else:
                wakes.append(free - AHEAD_SECONDS)
        return readable, min(wakes, default=None)

    def _take(self, device: int) -> None:
        source = self._node_of[device]
        now = time.monotonic()
        for _ in range(_FRAMES_AT_ONCE):
            if self._clock.free_to_send[source] - AHEAD_SECONDS > now:
                return
            try:
                frame = os.read(device, MAX_MTU + 1000)
            except BlockingIOError:
                return
            target = _target_of(frame, len(self._devices))
            if target is not None:
                self._accept(now, source, target, frame)

    def _accept(self, now: float, source: int, target: int, frame: bytes) -> None:
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            self._num_dropped += 1
            return
        self._num_frames += 1
        self._num_bytes += len(frame)
        self._waiting_bytes += len(frame)
        due = self._clock.send(now, source, target, len(frame))
        heapq.heappush(self._waiting, (due, self._num_frames, target, frame))

    def _hand_over(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            due, _, target, frame = heapq.heappop(self._waiting)
            self._waiting_bytes -= len(frame)
            os.write(self._devices[target], frame)
            self._lateness += now - due
            self._worst = max(self._worst, now - due)
            self._num_late += now - due > LATE_SECONDS

    def _answer(self) -> bool:
        if not self._control.recv(64):
            return False
        self._control.sendall(json.dumps(asdict(self.traffic())).encode() + b"\n")
        return True


def _target_of(frame: bytes, num_nodes: int) -> int | None:
    """The node an IPv4 frame goes to, from the last byte of its address; None for what is no business of the nodes."""
    if len(frame) < 20 or frame[0] >> 4 != _IP_VERSION_4:
        return None
    node = frame[19] - 1
    return node if 0 <= node < num_nodes else None
