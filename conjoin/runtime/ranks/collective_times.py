"""How long collectives take on the running ranks: timed over sizes and sets of mesh axes, for a machine's α-β fits.

What is timed goes through the communicator that plans run on, so that what is measured is what plans pay. All groups
along the axes work at the same time, as in a plan. A block of calls starts together and takes as long as its slowest
rank; every decision (how many calls, which sizes, when to stop) is made on such common times, so that all ranks decide
alike. Sizes and collectives take turns, round after round: whatever disturbs the host for a second spoils one round of
all, not all rounds of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor

from conjoin.machine import COLLECTIVE_KINDS, CollectiveFit, Mesh, fit_collective, reduce_repeats
from conjoin.runtime.ranks.communicator import Axes, Communicator
from conjoin.runtime.ranks.pace import Pace
from conjoin.runtime.ranks.process_groups import ProcessGroups

Points = tuple[tuple[int, float], ...]
"""Bytes sent by the busiest rank, and seconds."""
Progress = Callable[[float], None]
"""Told now and then which part of the time is over."""

_SMALLEST_BYTES = 256
_GROWTH = 4
_LARGEST_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Twice what a bundle of parameters sends; on NVLink (about 400 GB/s) less would not show the bandwidth."""
_LARGE_BYTES = 4 * 2**20
"""From here on sizes double: large messages slow down where memory is asked of the system anew (glibc: 32 MiB)."""
_LEAST_SIZES = 4
_SECOND_LOOKS = 2
"""How often a size that takes too long is tried again before larger ones are given up."""
_BLOCK_SECONDS = 2e-3
"""Long against the clock and against ranks that leave a barrier some microseconds apart."""
_MOST_REPEATS = 20
_MOST_ROUNDS = 40
_ROUNDS_WANTED = 4
_MOST_AXES_IN_ALL_SUBSETS = 4
_CONCURRENT_BYTES = 2**20
_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Timed:
    """One kind of transfer over one set of axes, with the time of each size."""

    kind: str
    axes: Axes
    points: Points

    def fit(self) -> CollectiveFit:
        """α and β of these times."""
        return fit_collective(self.kind, self.axes, self.points)


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Two all-reduces on different axes, each alone and both at once."""

    axes: tuple[Axes, Axes]
    alone_seconds: tuple[float, float]
    together_seconds: float

    @property
    def slowdown(self) -> float:
        """1 where neither notices the other; alone as long as each other, 2 where they wait for each other."""
        return self.together_seconds / max(self.alone_seconds)


@dataclass(frozen=True, slots=True)
class Communication:
    """All that was measured between ranks; the same on every rank."""

    collectives: tuple[Timed, ...]
    point_to_point: tuple[Timed, ...]
    concurrency: Concurrency | None


def calibrate_collectives(communicator: Communicator, seconds: float = 20.0) -> tuple[CollectiveFit, ...]:
    """α and β of every collective over every set of axes that matters; all ranks call it and get the same answer."""
    return tuple(timed.fit() for timed in time_collectives(communicator, seconds))


def measure_communication(
    communicator: Communicator, seconds: float, progress: Progress | None = None
) -> Communication:
    """Collectives, one pair of ranks on each kind of link, and two collectives at once, in about the time given."""
    return Communication(
        time_collectives(communicator, 0.8 * seconds, progress),
        time_point_to_point(communicator, 0.1 * seconds),
        time_concurrency(communicator, 0.1 * seconds),
    )


def axis_sets(mesh: Mesh) -> tuple[Axes, ...]:
    """The sets of axes to calibrate: all of up to 4 axes; of more each one, those in a node, those between, and all.

    >>> axis_sets(Mesh.of_nodes(2, 2))
    (('n0',), ('d0',), ('n0', 'd0'))
    >>> [" ".join(axes) for axes in axis_sets(Mesh.of_nodes(8, 4))]
    ['n0', 'n1', 'n2', 'd0', 'd1', 'd0 d1', 'n0 n1 n2', 'n0 n1 n2 d0 d1']
    """
    names = mesh.names
    if len(names) <= _MOST_AXES_IN_ALL_SUBSETS:
        return tuple(axes for count in range(1, len(names) + 1) for axes in combinations(names, count))
    inside = tuple(axis.name for axis in mesh.axes if not axis.between_nodes)
    between = tuple(axis.name for axis in mesh.axes if axis.between_nodes)
    found = (*((name,) for name in names), inside, between, names)
    return tuple(dict.fromkeys(axes for axes in found if axes))


class _Buffers:
    """Memory that all transfers share, as much as the largest so far needs."""

    def __init__(self, device: torch.device) -> None:
        self._pair = [torch.zeros(0, device=device) for _ in range(2)]

    def of(self, source: int, target: int) -> tuple[Tensor, Tensor]:
        """Flat tensors of so many elements to send from, and to receive into."""
        for i, numel in enumerate((source, target)):
            if self._pair[i].numel() < numel:
                self._pair[i] = self._pair[i].new_empty(numel).fill_(0.0)  # touched here, not where it is timed
        return self._pair[0][:source], self._pair[1][:target]


@dataclass
class _Ladder:
    """One collective over one set of axes: the sizes it is timed at, and the times so far."""

    kind: str
    axes: Axes
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Bytes asked for, bytes counted, calls in a block."""
    points: list[tuple[int, float]] = field(default_factory=list)

    def next_bytes(self, share: float) -> int | None:
        """The next size to add; None where it would take longer than its share of the time, or is large enough."""
        if not self.steps:
            return _SMALLEST_BYTES
        asked, counted, _ = self.steps[-1]
        quickest = min(seconds for size, seconds in self.points if size == counted)
        growth = _GROWTH if asked < _LARGE_BYTES else 2
        return asked * growth if len(self.steps) < _LEAST_SIZES or growth * quickest <= share else None

    def timed(self) -> Timed:
        return Timed(self.kind, self.axes, _reduced(self.points))


def _reduced(points: Sequence[tuple[int, float]]) -> Points:
    return tuple((int(size), seconds) for size, seconds in reduce_repeats(points))


def time_collectives(communicator: Communicator, seconds: float, progress: Progress | None = None) -> tuple[Timed, ...]:
    """Time every collective over every set of axes, in about the time given; () on one rank.

    The first round climbs from small sizes to large ones and ends each climb where the next size would take too long;
    further rounds repeat the same sizes, and climb on where a size took long by accident, until the time is over.
    """
    sets = axis_sets(communicator.mesh)
    if not sets:
        return ()
    for axes in sets:
        communicator.prepare(axes)
    pace = Pace(communicator)
    buffers = _Buffers(pace.device)
    ladders = [_Ladder(kind, axes) for axes in sets for kind in COLLECTIVE_KINDS]
    share = seconds / len(ladders) / _ROUNDS_WANTED
    for turn in range(_MOST_ROUNDS):
        for place, ladder in enumerate(ladders):
            elapsed = pace.elapsed()
            if progress is not None:
                progress(min(1.0, elapsed / seconds))
            if turn and elapsed > seconds:
                return tuple(ladder.timed() for ladder in ladders)
            _time_again(ladder, pace, buffers)
            _climb(ladder, pace, buffers, (share, seconds if turn else (place + 1) * seconds / len(ladders)))
    return tuple(ladder.timed() for ladder in ladders)


def _time_again(ladder: _Ladder, pace: Pace, buffers: _Buffers) -> None:
    for asked, counted, repeats in ladder.steps:
        call = _transfer(pace.communicator, ladder.kind, ladder.axes, asked, buffers)
        ladder.points.append((counted, pace.time(call, repeats)))


def _climb(ladder: _Ladder, pace: Pace, buffers: _Buffers, limits: tuple[float, float]) -> None:
    """Add larger sizes while one takes no more than its share and the end has not come, and time each."""
    share, end = limits
    while (asked := ladder.next_bytes(share)) is not None and asked <= _LARGEST_BYTES[pace.device.type]:
        if len(ladder.steps) >= _LEAST_SIZES and pace.elapsed() > end:
            return
        call = _transfer(pace.communicator, ladder.kind, ladder.axes, asked, buffers)
        before = pace.communicator.bytes_sent
        call()
        counted = int(pace.largest(pace.communicator.bytes_sent - before)[0])
        first = pace.time(call)
        repeats = max(1, min(_MOST_REPEATS, int(_BLOCK_SECONDS / first)))
        ladder.steps.append((asked, counted, repeats))
        ladder.points += [(counted, first), (counted, pace.time(call, repeats))]
        for _ in range(_SECOND_LOOKS):
            if ladder.next_bytes(share) is None:
                ladder.points.append((counted, pace.time(call)))


def _transfer(communicator: Communicator, kind: str, axes: Axes, sent: int, buffers: _Buffers) -> Callable[[], object]:
    """A collective in which the busiest rank sends about this many bytes."""
    group = communicator.mesh.group(communicator.rank, axes)
    others, place = len(group) - 1, group.index(communicator.rank)
    part = max(1, sent // others // _ELEMENT_BYTES)
    whole = part * len(group)
    match kind:
        case "all-reduce":
            flat, _ = buffers.of(max(1, sent * len(group) // (2 * others) // _ELEMENT_BYTES), 0)
            return lambda: communicator.all_reduce(flat, axes).wait()
        case "all-gather":
            piece, gathered = buffers.of(part, whole)
            return lambda: communicator.all_gather(gathered, piece, axes).wait()
        case "reduce-scatter":
            partial, reduced = buffers.of(whole, part)
            return lambda: communicator.reduce_scatter(reduced, partial, axes).wait()
        case "all-to-all":
            sizes = [part] * len(group)
        case _:
            side = max(1, sent // min(2, others) // _ELEMENT_BYTES)
            sizes = [side if abs(member - place) == 1 else 0 for member in range(len(group))]
    out, into = buffers.of(sum(sizes), sum(sizes))
    return lambda: communicator.all_to_all(into, out, (sizes, sizes), axes).wait()


# One pair of ranks, and two collectives at once.


def time_point_to_point(communicator: Communicator, seconds: float) -> tuple[Timed, ...]:
    """Time messages between rank 0 and a neighbour in its node, and one in another, while all else is quiet."""
    if not isinstance(communicator, ProcessGroups):
        return ()
    pace = Pace(communicator)
    ends = _nearest_axes(communicator.mesh)
    return tuple(_time_pair(pace, axis, seconds / len(ends)) for axis in ends)


def _nearest_axes(mesh: Mesh) -> tuple[str, ...]:
    """The fastest axis between nodes and the fastest one in a node, where there are such."""
    last = {axis.between_nodes: axis.name for axis in mesh.axes}
    return tuple(last[between] for between in (True, False) if between in last)


def _time_pair(pace: Pace, axis: str, seconds: float) -> Timed:
    """Half the time there and back, over sizes."""
    rank, peer = pace.communicator.rank, pace.communicator.mesh.rank_at({axis: 1})
    points: list[tuple[int, float]] = []
    size, start = _SMALLEST_BYTES, pace.elapsed()
    while size <= _LARGEST_BYTES[pace.device.type]:
        flat = torch.zeros(size // _ELEMENT_BYTES, device=pace.device)
        call = _there_and_back(flat, rank, peer)
        first = [pace.time(call), pace.time(call)][1]
        repeats = max(1, min(_MOST_REPEATS, int(_BLOCK_SECONDS / first)))
        points += [(size, pace.time(call, repeats) / 2) for _ in range(3)]
        if len(points) >= 3 * _LEAST_SIZES and pace.elapsed() - start + 4 * _GROWTH * first > seconds:
            break
        size *= _GROWTH
    return Timed("point-to-point", (axis,), _reduced(points))


def _there_and_back(flat: Tensor, rank: int, peer: int) -> Callable[[], object]:
    if rank == 0:
        return lambda: (dist.send(flat, peer), dist.recv(flat, peer))
    if rank == peer:
        return lambda: (dist.recv(flat, 0), dist.send(flat, 0))
    return lambda: None


def time_concurrency(communicator: Communicator, seconds: float) -> Concurrency | None:
    """Time an all-reduce on each of two axes alone, then both at once; None where there are no two axes."""
    mesh = communicator.mesh
    if len(mesh.axes) < 2:
        return None
    nearest = _nearest_axes(mesh)
    first, second = nearest if len(nearest) == 2 else mesh.names[-2:]
    pace = Pace(communicator)
    pair = (first,), (second,)
    flats = [torch.zeros(_CONCURRENT_BYTES // _ELEMENT_BYTES, device=pace.device) for _ in pair]
    for axes in pair:
        communicator.prepare(axes)

    def reduce(*places: int) -> None:
        for work in [communicator.all_reduce(flats[place], pair[place]) for place in places]:
            work.wait()

    points: list[tuple[int, float]] = []
    while not points or (pace.elapsed() < seconds and len(points) < 3 * _MOST_ROUNDS):
        points += [(i, pace.time(lambda p=places: reduce(*p))) for i, places in enumerate(((0,), (1,), (0, 1)))]  # type: ignore[misc]
    alone, other, both = (seconds for _, seconds in reduce_repeats(points))
    return Concurrency(pair, (alone, other), both)
