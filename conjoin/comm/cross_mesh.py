"""From a layout on some devices to a layout on others: who sends what to whom, in which round.

Each slice leaves its holders once and comes to each host that wants it once (`unit_tasks.py`). Who sends is a linear
programme (`senders.py`); hosts that want the same slice form a chain along which it is passed on. All amounts between
pairs of hosts are arranged in rounds without collisions (`rounds.py`), which last together L, the most that a host
sends or receives. Everything is cut into K chunks: a *frame* is all rounds for one K-th of every amount, and what has
come in one frame is passed on in the next. With chains of at most A hosts that takes K + A - 1 frames, L(1 + (A -
1)/K): no way is shorter than L (AlpaComm 3.1, for one slice; here for all of them together). All devices of a host that
have a slice send as much of it, and all that want it take as much, each over its own card if it has one. What comes to
a host is spread there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conjoin.comm.pieces import num_devices, splits_of
from conjoin.comm.rounds import decompose
from conjoin.comm.route import reshard
from conjoin.comm.senders import split_evenly
from conjoin.comm.steps import Route
from conjoin.comm.unit_tasks import Grid, Pieces, Slices, all_hosts, pieces_on, slices_between
from conjoin.comm.volume import route_bytes
from conjoin.errors import PlanError
from conjoin.ir import Region
from conjoin.ops import Copies, Greatest, Invariant, Layout, Partial, Split, make_layout

Numbers = NDArray[np.int64]

SUMS = (Partial, Greatest)
CHUNKS = 100
"""In how many chunks slices are passed on where they are: about as many as AlpaComm 3.1 uses."""
CARD_BYTES = 2**21
"""For the card of a device at least, where what a host sends or takes is dealt out to several: 80 us of 25 GB/s, eight
times what a message takes that is empty. Where the devices of a host share a card, smaller parts are fewer chunks."""


@dataclass(frozen=True, slots=True)
class Message:
    """Elements of a region, counted as they lie in it, that one device sends to another.

    It may start when all messages of its two devices in the rounds up to `after` have come, -1 for at once. Where
    sender and receiver are the same device, it keeps what it has.
    """

    sender: int
    receiver: int
    region: Region
    begin: int
    end: int
    chunk: int
    after: int


class InRounds(Protocol):
    """A transfer as those who carry it out know it."""

    def rounds(self, device: int | None = None) -> Iterator[tuple[Message, ...]]:
        """All rounds in order; of one device only its own messages, in as many rounds."""

    def passes_on(self, number: int) -> bool:
        """Whether a device may have to wait for rounds before this one to take part in it."""


@dataclass(frozen=True)
class Cells:
    """Messages before they are cut into chunks: one row of a table for elements `x` to `y` of a part of a slice."""

    round: Numbers
    sender: Numbers
    receiver: Numbers
    slice: Numbers
    offset: Numbers
    """Where the part begins in its slice."""
    size: Numbers
    """Elements of the part."""
    x: Numbers
    y: Numbers
    depth: Numbers
    """How often it was passed on before."""

    def chosen(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Cells:
        """Some of them."""
        return Cells(*(getattr(self, name)[which] for name in Cells.__dataclass_fields__))


@dataclass(frozen=True)
class TransferPlan:
    """Everything about a transfer between two grids; rounds and messages are made from it when they are asked for."""

    slices: Slices
    cells: Cells
    """Between hosts, in rounds."""
    spread: Cells
    """Inside hosts: what came in a frame."""
    kept: Cells
    """Inside hosts: what is there from the start."""
    chunks: int
    longest_chain: int
    most: int
    """The most elements that one host sends or receives."""
    bound: int
    """Fewer elements no plan could make do with: the most that a host needs, or that some host has to send."""
    itemsize: int

    @property
    def num_frames(self) -> int:
        return self.chunks + self.longest_chain - 1 if self.longest_chain else 1

    @property
    def rounds_per_frame(self) -> int:
        """Rounds between hosts, and one that spreads inside hosts what has come."""
        return int(self.cells.round.max(initial=-1)) + 2

    def seconds(self, bytes_per_second: float, latency: float = 0.0) -> float:
        """From the first message between hosts to the last, at so many bytes a second into and out of each host."""
        frame = self.most * self.itemsize / self.chunks / bytes_per_second + latency * (self.rounds_per_frame - 1)
        return frame * self.num_frames if self.most else 0.0

    def bound_seconds(self, bytes_per_second: float) -> float:
        """What no transfer between the same holders and wanters is below."""
        return self.bound * self.itemsize / bytes_per_second

    @property
    def most_inside(self) -> int:
        """The most elements that one device sends to others of its host, or receives from them."""
        ends = [[table.sender, table.receiver] for table in (self.spread, self.kept)]
        sizes = np.concatenate([self.spread.y - self.spread.x, self.kept.size])
        moves = np.concatenate([self.spread.sender != self.spread.receiver, self.kept.sender != self.kept.receiver])
        sums = [np.bincount(np.concatenate(each)[moves], weights=sizes[moves]) for each in zip(*ends, strict=True)]
        return int(max(each.max(initial=0) for each in sums))

    def rounds(self, device: int | None = None) -> Iterator[tuple[Message, ...]]:
        """All rounds in order; of one device only its own messages, in as many rounds."""
        tables = [_of_device(table, device) for table in (self.cells, self.spread, self.kept)]
        regions = {int(i): self.slices.region(i) for i in np.unique(np.concatenate([table.slice for table in tables]))}
        per_frame = self.rounds_per_frame
        cells, spread, kept = (_by_round(table, per_frame) for table in tables)
        for frame in range(self.num_frames):
            after = frame * per_frame - 1
            for number in range(per_frame - 1):
                yield tuple(self._chunks(cells[number], regions, frame, after))
            start = tuple(_whole(kept[0], regions)) if frame == 0 else ()
            yield (*start, *self._chunks(spread[-1], regions, frame, after + per_frame - 1, came=True))

    def passes_on(self, number: int) -> bool:
        """Whether a device may have to wait for rounds before this one to take part in it."""
        is_last = (number + 1) % self.rounds_per_frame == 0
        return self.longest_chain > 1 or (is_last and bool(len(self.spread.sender)))

    def _chunks(
        self, table: list[list[int]], regions: dict[int, Region], frame: int, after: int, came: bool = False
    ) -> Iterator[Message]:
        """What rows of a table of cells are in one frame; what did not come here before may start at once."""
        for sender, receiver, number, offset, size, x, y, depth in table:
            chunk = frame - depth
            begin, end = (size * chunk + x) // self.chunks, (size * chunk + y) // self.chunks
            if 0 <= chunk < self.chunks and end > begin:
                ready = after if depth or came else -1
                yield Message(sender, receiver, regions[number], offset + begin, offset + end, chunk, ready)


def _whole(table: list[list[int]], regions: dict[int, Region]) -> Iterator[Message]:
    """What is not cut into chunks: it goes no further than its host."""
    for sender, receiver, number, offset, size, *_ in table:
        yield Message(sender, receiver, regions[number], offset, offset + size, 0, -1)


def _of_device(cells: Cells, device: int | None) -> Cells:
    if device is None:
        return cells
    return cells.chosen((cells.sender == device) | (cells.receiver == device))


def _by_round(cells: Cells, per_frame: int) -> list[list[list[int]]]:
    columns = [cells.sender, cells.receiver, cells.slice, cells.offset, cells.size, cells.x, cells.y, cells.depth]
    order = np.argsort(cells.round, kind="stable")
    rows = np.stack(columns, axis=1)[order].tolist()
    edges = np.searchsorted(cells.round[order], np.arange(per_frame + 1))
    return [rows[edges[i] : edges[i + 1]] for i in range(per_frame)]


def plan_transfer(
    shape: tuple[int, ...],
    itemsize: int,
    source: tuple[Layout, Grid],
    target: tuple[Layout, Grid],
    chunks: int = CHUNKS,
) -> TransferPlan:
    """How a tensor comes from one layout on one grid to another on another; partial sums have been summed before.

    >>> from conjoin.ops import Split
    >>> rows = (("n0", Split(0)),)
    >>> plan = plan_transfer((8, 4), 4, (rows, Grid.of_hosts(2, 1)), ((), Grid.of_hosts(2, 1, 2, 2)), chunks=4)
    >>> plan.num_frames, plan.most, plan.bound
    (5, 32, 32)
    """
    _check(source[0], chunks)
    hosts = all_hosts(source[1], target[1])
    have, want = (pieces_on(shape, layout, grid, hosts) for layout, grid in (source, target))
    slices = slices_between(have, want)
    parts, kept = _parts(have, want, slices, -(-CARD_BYTES // itemsize))
    sizes = np.zeros((len(hosts), len(hosts)), dtype=np.int64)
    np.add.at(sizes, (parts.sender_host, parts.receiver_host), parts.cells.size)
    cells = _in_rounds(parts, sizes)
    spread = _spread(want, slices, parts, int(cells.round.max(initial=-1)) + 1)
    chain = int(parts.cells.depth.max(initial=-1)) + 1
    most = int(max(sizes.sum(axis=0).max(initial=0), sizes.sum(axis=1).max(initial=0)))
    least = max(int(sizes.sum(axis=0).max(initial=0)), parts.least_sent)
    return TransferPlan(slices, cells, spread, kept, chunks if chain > 1 else 1, chain, most, least, itemsize)


def _check(layout: Layout, chunks: int) -> None:
    sums = [axis for axis, placement in layout if isinstance(placement, SUMS)]
    if sums:
        raise PlanError(
            f"A tensor is to leave its devices as partial sums over {', '.join(sums)}. What is sent in slices "
            f"has been summed. Reduce it first: `reduced_for_transfer` says how."
        )
    if not 1 <= chunks <= 1 << 20:
        raise PlanError(
            f"A transfer is to be cut into {chunks:,} chunks. There can be 1 to 1,048,576. Give one of these."
        )


@dataclass(frozen=True)
class _Parts:
    """Edges of chains: cells in no round yet, with the hosts at their ends."""

    cells: Cells
    sender_host: Numbers
    receiver_host: Numbers
    target: Numbers
    """Pieces that are wanted."""
    least_sent: int


def _parts(have: Pieces, want: Pieces, slices: Slices, for_card: int) -> tuple[_Parts, Cells]:
    """Slices dealt out to senders and put on chains, and what is at the hosts that want it already."""
    from_sets, set_hosts = have.host_sets()
    to_sets, wanting_hosts = want.host_sets()
    source_set, target_set = from_sets[slices.source], to_sets[slices.target]
    apart = not ((have.count > 0).any(axis=0) & (want.count > 0).any(axis=0)).any()
    keys, group_of = np.unique(source_set * (not apart) * len(wanting_hosts) + target_set, return_inverse=True)
    pairs = np.stack(np.divmod(keys, len(wanting_hosts)), axis=1)
    missing = [wanting_hosts[to] if apart else np.setdiff1d(wanting_hosts[to], set_hosts[of]) for of, to in pairs]
    lacks = np.array([len(each) > 0 for each in missing], dtype=bool)
    moving = np.flatnonzero(lacks[group_of])
    amounts = np.bincount(source_set[moving], weights=slices.sizes[moving], minlength=len(set_hosts)).astype(np.int64)
    shares = split_evenly(amounts.tolist(), [tuple(each.tolist()) for each in set_hosts])
    number, offset, size, sender = _dealt(slices, moving, source_set, shares)
    place, turn_out, turn_in, offset, size = _on_cards(have, want, (slices, number, offset, size, sender), for_card)
    number, sender = number[place], sender[place]
    tables = []
    for chain, rows in zip(missing, _members(group_of[number], len(missing)), strict=True):
        if len(chain) and len(rows):
            tables += _chained(rows, sender[rows], size[rows], chain)
    empty = np.zeros((4, 0), dtype=np.int64)
    row, from_host, to_host, depth = np.concatenate([empty, *tables], axis=1)
    source, target = slices.source[number[row]], slices.target[number[row]]
    first = depth == 0
    giver = np.zeros(len(row), dtype=np.int64)
    giver[first] = have.on(source[first], from_host[first], turn_out[row[first]])
    giver[~first] = want.on(target[~first], from_host[~first], turn_in[row[~first]])
    taker = want.on(target, to_host, turn_in[row])
    whole = size[row]
    cells = Cells(np.zeros_like(row), giver, taker, number[row], offset[row], whole, np.zeros_like(row), whole, depth)
    sent = {host: 0 for each in set_hosts for host in each.tolist()}
    for share in shares:
        for host, amount in share.items():
            sent[host] += amount
    parts = _Parts(cells, from_host, to_host, target, max(sent.values(), default=0))
    shared = [] if apart else [np.intersect1d(set_hosts[of], wanting_hosts[to]) for of, to in pairs]
    return parts, _kept(have, want, slices, shared, _members(group_of, len(shared)))


def _members(numbers: Numbers, count: int) -> list[Numbers]:
    """The places at which each number stands."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.searchsorted(numbers[order], np.arange(1, count))) if count else []


def _dealt(
    slices: Slices, moving: Numbers, source_set: Numbers, shares: list[dict[int, int]]
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Slices one after another to the hosts that share them, cut where shares end: slice, offset, size, host."""
    numbers, offsets, sizes, hosts = [], [], [], []
    for share, places in zip(shares, _members(source_set[moving], len(shares)), strict=True):
        mine = moving[places]
        if not len(mine):
            continue
        ends = np.cumsum(slices.sizes[mine])
        begins = ends - slices.sizes[mine]
        borders = np.cumsum(list(share.values()))
        marks = _merged(begins, borders[:-1])
        place = np.searchsorted(ends, marks, side="right")
        numbers.append(mine[place])
        offsets.append(marks - begins[place])
        sizes.append(np.diff(np.append(marks, ends[-1])))
        hosts.append(np.array(list(share))[np.searchsorted(borders, marks, side="right")])
    empty = np.zeros(0, dtype=np.int64)
    joined = [np.concatenate([empty, *each]) for each in (numbers, offsets, sizes, hosts)]
    return joined[0], joined[1], joined[2], joined[3]


def _on_cards(
    have: Pieces, want: Pieces, parts: tuple[Slices, Numbers, Numbers, Numbers, Numbers], least: int
) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Parts cut so that of what a host sends all its devices that have a piece send as much as any other, and all that
    want it on another host take as much: which part, whose turn it is to send and to take, offset, size."""
    slices, number, offset, size, sender = parts
    source, target, place = slices.source[number], slices.target[number], np.arange(len(number))
    given, taken = (piece * have.count.shape[1] + sender for piece in (source, target))
    num_giving, num_taking = have.count[source, sender], want.count.max(axis=1, initial=1)[target]
    for key, count in ((taken, num_taking), (given, num_giving)):
        if (count == 1).all():
            continue
        cut, begin, size = _cut_evenly(size, key[place], count[place], least)
        place, offset = place[cut], offset[cut] + begin
    order = np.lexsort((offset, place))
    place, offset, size = place[order], offset[order], size[order]
    turn_out = _turns(size, given[place], num_giving[place])
    return place, turn_out, _turns(size, taken[place], num_taking[place]), offset, size


def _cut_evenly(size: Numbers, key: Numbers, count: Numbers, least: int) -> tuple[Numbers, Numbers, Numbers]:
    """What has a key in common, one after another, cut into as many runs of a size as it counts, none below the least:
    which it was, where in it this begins, size."""
    if not len(size):
        return key, key, size
    order, ends, starts, totals = _in_line(size, key)
    runs = np.maximum(np.minimum(totals // least, count[order][starts]), 1)
    group = np.repeat(np.arange(len(runs)), runs)
    turn = np.arange(len(group)) - np.repeat(np.cumsum(runs) - runs, runs)
    begins = ends - size[order]
    marks = _merged(begins, begins[starts][group] + totals[group] * turn // runs[group])
    cut = np.searchsorted(ends, marks, side="right")
    return order[cut], marks - begins[cut], np.diff(np.append(marks, ends[-1]))


def _turns(size: Numbers, key: Numbers, count: Numbers) -> Numbers:
    """The how manieth run of those with the same key the middle of each is in, of as many runs as it counts; each key
    begins with another."""
    if (count == 1).all():
        return np.zeros_like(key)
    order, ends, starts, totals = _in_line(size, key)
    lengths = np.diff(np.append(starts, len(order)))
    middle = ends - np.repeat((ends - size[order])[starts], lengths) - (size[order] + 1) // 2
    found = np.empty_like(order)
    found[order] = middle * count[order] // np.repeat(totals, lengths) + np.repeat(np.arange(len(starts)), lengths)
    return found


def _in_line(size: Numbers, key: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """In the order of keys: where each ends, at which of them keys begin, and how much each key has."""
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(key[order])))
    return order, np.cumsum(size[order]), starts, np.add.reduceat(size[order], starts)


def _merged(one: Numbers, other: Numbers) -> Numbers:
    """Two ascending rows as one, without repetition."""
    both = np.sort(np.concatenate([one, other]), kind="stable")
    found: Numbers = both[np.append(True, both[1:] != both[:-1])]
    return found


def _chained(rows: Numbers, sender: Numbers, sizes: Numbers, chain: Numbers) -> list[Numbers]:
    """Edges from the sender along the hosts that want it, beginning with each for as much as with any other.

    What one sender gives begins with few hosts, so that hosts meet in few rounds.
    """
    first = (np.cumsum(sizes) - sizes) * len(chain) // max(int(sizes.sum()), 1)
    tables, before = [], sender
    for depth in range(len(chain)):
        host = chain[(first + depth) % len(chain)]
        tables.append(np.stack([rows, before, host, np.full(len(rows), depth)]))
        before = host
    return tables


def _in_rounds(parts: _Parts, sizes: Numbers) -> Cells:
    """Edges cut where the rounds of their hosts end. All pairs of hosts lie on one line, one after another."""
    found = decompose(sizes)
    pair = parts.sender_host * len(sizes) + parts.receiver_host
    order = np.argsort(pair, kind="stable")
    cells = parts.cells.chosen(order)
    ends = np.cumsum(cells.size)
    begins = ends - cells.size
    in_line = np.lexsort((found.rounds, found.senders * len(sizes) + found.receivers))
    round_ends = np.cumsum(found.amounts[in_line])
    marks = _merged(begins, np.concatenate([[0], round_ends])[:-1]) if len(begins) else begins
    cell = np.searchsorted(ends, marks, side="right")
    turn = found.rounds[in_line][np.searchsorted(round_ends, marks, side="right")] if len(marks) else marks
    lengths = np.diff(np.append(marks, ends[-1:]))
    cut = cells.chosen(cell)
    x = marks - begins[cell]
    return Cells(turn, cut.sender, cut.receiver, cut.slice, cut.offset, cut.size, x, x + lengths, cut.depth)


def _spread(want: Pieces, slices: Slices, parts: _Parts, last: int) -> Cells:
    """What came to one device of a host, to its other devices that want it: all of a part in one message."""
    cells, host = parts.cells, parts.receiver_host
    target = slices.target[cells.slice]
    count, first = want.count[target, host], want.first[target, host]
    row = np.repeat(np.arange(len(target)), count)
    turn = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    device = want.devices[first[row] + turn]
    other = device != cells.receiver[row]
    row, device = row[other], device[other]
    copied = cells.chosen(row)
    whole = copied.x, copied.y, copied.depth
    return Cells(np.full(len(row), last), copied.receiver, device, copied.slice, copied.offset, copied.size, *whole)


def _kept(have: Pieces, want: Pieces, slices: Slices, shared: list[Numbers], members: list[Numbers]) -> Cells:
    """What hosts that want a slice have already: from a device there to those that want it, which may be itself."""
    rows: list[tuple[int, int, int]] = []
    for hosts, numbers in zip(shared, members, strict=True):
        for host in hosts.tolist():
            for number in numbers.tolist():
                rows += _copies(have, want, slices, number, host)
    sender, receiver, number = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    zero, sizes = np.zeros_like(number), slices.sizes[number]
    return Cells(zero, sender, receiver, number, zero, sizes, zero, sizes, zero)


def _copies(have: Pieces, want: Pieces, slices: Slices, number: int, host: int) -> list[tuple[int, int, int]]:
    piece, wanted = slices.source[number], slices.target[number]
    holders = have.devices[have.first[piece, host] :][: have.count[piece, host]].tolist()
    wanters = want.devices[want.first[wanted, host] :][: want.count[wanted, host]].tolist()
    senders = {device: device if device in holders else holders[i % len(holders)] for i, device in enumerate(wanters)}
    return [(sender, device, number) for device, sender in senders.items()]


def reduced_for_transfer(
    shape: tuple[int, ...], itemsize: int, source: tuple[Layout, Grid], target: tuple[Layout, Grid]
) -> tuple[Route, TransferPlan]:
    """How partial sums are summed on their own devices, and the transfer that follows.

    They are summed everywhere, or scattered along a dim, copies with them or not; what is best for the busiest rank
    and the busiest host together is taken. Without partial sums the route is empty.
    """
    layout, grid = source
    wholes = [make_layout([entry for entry in layout if not isinstance(entry[1], SUMS)])]
    if any(isinstance(placement, Partial) for _, placement in layout):
        axes = dict.fromkeys(grid.mesh.names, Invariant()) | dict(layout)
        for loose in (SUMS, (*SUMS, Invariant, Copies)):
            for dim in range(len(shape)):
                way = [(axis, Split(dim) if isinstance(each, loose) else each) for axis, each in axes.items()]
                wholes.append(make_layout(way))
    best: tuple[int, Route, TransferPlan] | None = None
    for whole in wholes:
        if not _has_room(shape, whole, grid):
            continue
        route = reshard(shape, layout, whole, grid.mesh)
        plan = plan_transfer(shape, itemsize, (whole, grid), target)
        sent = route_bytes(route, itemsize, grid.mesh) + plan.most * itemsize
        if best is None or sent < best[0]:
            best = sent, route, plan
    assert best is not None, "the first way is always there"
    return best[1], best[2]


def _has_room(shape: tuple[int, ...], layout: Layout, grid: Grid) -> bool:
    """Whether every device gets something of every dim."""
    splits = splits_of(layout, len(shape))
    return all(size >= num_devices(axes, grid.mesh) for size, axes in zip(shape, splits, strict=True))
