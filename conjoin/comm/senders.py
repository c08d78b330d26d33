"""Which host sends which slice: a linear programme, solved exactly, beside the ways of AlpaComm 3.2.

Splitting what a set of hosts holds among them so that the most that leaves a host is least is a flow: sets of hosts
give to hosts, hosts have room for `most` each. The least `most` is the densest demand, bytes of some sets over the
number of hosts they are on. It is found as Newton's method finds a root: try one, and where it does not do, the sets
that do not fit say the next. Slices that are never split (`atomic`) make this a harder problem: the greedy,
depth-first and randomized ways are those of the paper.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

HostSet = tuple[int, ...]


def split_evenly(amounts: Sequence[int], hosts: Sequence[HostSet]) -> list[dict[int, int]]:
    """How much of each amount each of its hosts sends, so that the most that one host sends is least, to the element.

    >>> split_evenly([6, 2], [(0, 1), (1,)])
    [{0: 4, 1: 2}, {1: 2}]
    """
    shares: list[dict[int, int]] = [{} for _ in amounts]
    for members in _components(hosts):
        if len({hosts[i] for i in members}) == 1:
            _deal(amounts, hosts, members, shares)
            continue
        for i, share in zip(
            members, _least_most([amounts[i] for i in members], [hosts[i] for i in members]), strict=True
        ):
            shares[i] = share
    return shares


def _components(hosts: Sequence[HostSet]) -> list[list[int]]:
    """Amounts that have hosts in common, by way of others too."""
    group_of: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for i, each in enumerate(hosts):
        touched = {group_of[host] for host in each if host in group_of}
        members = [m for group in touched for m in groups.pop(group)] + [i]
        groups[i] = members
        for member in members:
            group_of |= dict.fromkeys(hosts[member], i)
    return [sorted(members) for members in groups.values()]


def _deal(amounts: Sequence[int], hosts: Sequence[HostSet], members: list[int], shares: list[dict[int, int]]) -> None:
    """All on the same hosts: one after another, until each has its part."""
    mine = hosts[members[0]]
    total, at = sum(amounts[i] for i in members), 0
    ends = [total * (k + 1) // len(mine) for k in range(len(mine))]
    for i in members:
        begin, stop = at, at + amounts[i]
        for k, host in enumerate(mine):
            part = min(stop, ends[k]) - max(begin, ends[k - 1] if k else 0)
            if part > 0:
                shares[i][host] = part
        at = stop


def _least_most(amounts: list[int], hosts: list[HostSet]) -> list[dict[int, int]]:
    everyone = {host for each in hosts for host in each}
    most = Fraction(sum(amounts), len(everyone))
    while True:
        flow = _Flow(amounts, hosts, -(-most.numerator // most.denominator))
        cut = flow.lacking()
        if not cut:
            return flow.shares
        around = {host for i in cut for host in hosts[i]}
        dense = Fraction(sum(amounts[i] for i in cut), len(around))
        most = dense if dense > most else most + 1


class _Flow:
    """A greatest flow from amounts to hosts with room for `room` each, by shortest augmenting ways."""

    def __init__(self, amounts: list[int], hosts: list[HostSet], room: int) -> None:
        self.hosts = hosts
        self.left = list(amounts)
        self.room = dict.fromkeys((host for each in hosts for host in each), room)
        self.shares: list[dict[int, int]] = [{} for _ in amounts]
        self.on: dict[int, set[int]] = {host: set() for host in self.room}
        for i in range(len(amounts)):
            while self.left[i] and self._augment(i):
                pass

    def _augment(self, start: int) -> bool:
        came: dict[int, tuple[int, int | None]] = {}
        queue, seen = deque([start]), {start}
        source: dict[int, int | None] = {start: None}
        while queue:
            i = queue.popleft()
            for host in self.hosts[i]:
                if host in came:
                    continue
                came[host] = i, source[i]
                if self.room[host] > 0:
                    self._push(host, came)
                    return True
                for other in self.on[host]:
                    if other not in seen:
                        seen.add(other)
                        source[other] = host
                        queue.append(other)
        self.reached = seen
        return False

    def _push(self, last: int, came: dict[int, tuple[int, int | None]]) -> None:
        amount, host = self.room[last], last
        while True:
            i, before = came[host]
            if before is None:
                amount = min(amount, self.left[i])
                break
            amount = min(amount, self.shares[i][before])
            host = before
        host = last
        self.room[last] -= amount
        while True:
            i, before = came[host]
            self.shares[i][host] = self.shares[i].get(host, 0) + amount
            self.on[host].add(i)
            if before is None:
                self.left[i] -= amount
                return
            self.shares[i][before] -= amount
            if not self.shares[i][before]:
                del self.shares[i][before]
                self.on[before].discard(i)
            host = before

    def lacking(self) -> set[int]:
        """Amounts that do not fit, with all that stand in their way; none where all fit."""
        stuck = next((i for i, left in enumerate(self.left) if left), None)
        if stuck is None:
            return set()
        self._augment(stuck)
        return self.reached


@dataclass(frozen=True, slots=True)
class Atomic:
    """A unit task that one host sends whole: seconds, hosts that hold it, hosts that want it (AlpaComm 3.2)."""

    seconds: float
    holders: HostSet
    wanters: HostSet


@dataclass(frozen=True, slots=True)
class Assignment:
    """Tasks in the order in which they are started, each with its sender, and when the last one ends."""

    order: tuple[tuple[int, int], ...]
    seconds: float


def naive(tasks: Sequence[Atomic]) -> Assignment:
    """The first host that holds a task sends it; tasks go in the order in which they are given."""
    return _timed(tasks, [(i, task.holders[0]) for i, task in enumerate(tasks)])


def longest_first(tasks: Sequence[Atomic]) -> Assignment:
    """The longest task first, to the sender with the least to do ("load balance only")."""
    load: dict[int, float] = {}
    order = []
    for i in sorted(range(len(tasks)), key=lambda i: -tasks[i].seconds):
        sender = min(tasks[i].holders, key=lambda host: load.get(host, 0.0))
        load[sender] = load.get(sender, 0.0) + tasks[i].seconds
        order.append((i, sender))
    return _timed(tasks, order)


def randomized(tasks: Sequence[Atomic], seed: int = 0, tries: int = 20) -> Assignment:
    """Again and again as many tasks as do not get in each other's way: the largest such set of some random ones."""
    draw = random.Random(seed)
    left, order = set(range(len(tasks))), []
    load: dict[int, float] = {}
    while left:
        best: list[tuple[int, int]] = []
        for _ in range(tries):
            shuffled = sorted(left)
            draw.shuffle(shuffled)
            taken: set[int] = set()
            chosen = []
            for i in shuffled:
                free = [host for host in tasks[i].holders if host not in taken]
                if free and not taken.intersection(tasks[i].wanters):
                    sender = min(free, key=lambda host: load.get(host, 0.0))
                    chosen.append((i, sender))
                    taken |= {sender, *tasks[i].wanters}
            best = max(best, chosen, key=len)
        for i, sender in best:
            load[sender] = load.get(sender, 0.0) + tasks[i].seconds
        order += best
        left -= {i for i, _ in best}
    return _timed(tasks, order)


def depth_first(tasks: Sequence[Atomic], max_steps: int = 20_000) -> Assignment:
    """All orders and senders in depth, cut where what is left for some host ends no sooner than the best so far."""
    search = _Depth(tasks, min((longest_first(tasks), randomized(tasks)), key=lambda found: found.seconds), max_steps)
    search.go(0.0)
    return search.best


class _Depth:
    """Tasks that are started, those that are left, and the best way so far."""

    def __init__(self, tasks: Sequence[Atomic], best: Assignment, max_steps: int) -> None:
        self.tasks, self.best, self.steps_left = tasks, best, max_steps
        self.free: dict[int, float] = {}
        self.wanted: dict[int, float] = {}
        for task in tasks:
            self._want(task, 1)
        self.order: list[tuple[int, int]] = []
        self.left = set(range(len(tasks)))

    def _want(self, task: Atomic, sign: int) -> None:
        for host in task.wanters:
            self.wanted[host] = self.wanted.get(host, 0.0) + sign * task.seconds

    def go(self, end: float) -> None:
        self.steps_left -= 1
        if not self.left and end < self.best.seconds:
            self.best = Assignment(tuple(self.order), end)
        bound = max((self.free.get(host, 0.0) + rest for host, rest in self.wanted.items()), default=0.0)
        if self.steps_left <= 0 or max(bound, end) >= self.best.seconds - 1e-12:
            return
        tried: set[Atomic] = set()
        for i in sorted(self.left, key=lambda i: (-self.tasks[i].seconds, i)):
            if self.tasks[i] not in tried:  # of tasks alike, one is enough
                tried.add(self.tasks[i])
                for sender in sorted(self.tasks[i].holders, key=lambda host: self.free.get(host, 0.0)):
                    self._start(i, sender, end)

    def _start(self, i: int, sender: int, end: float) -> None:
        """Start a task, go on from there, and take it back."""
        task = self.tasks[i]
        before = {host: self.free.get(host, 0.0) for host in (sender, *task.wanters)}
        stop = max(before.values()) + task.seconds
        self.free.update(dict.fromkeys(before, stop))
        self._want(task, -1)
        self.left.discard(i)
        self.order.append((i, sender))
        self.go(max(end, stop))
        self.order.pop()
        self.left.add(i)
        self._want(task, 1)
        self.free.update(before)


def _timed(tasks: Sequence[Atomic], order: Sequence[tuple[int, int]]) -> Assignment:
    """Each task starts when its sender and all its receivers are free of those before it (AlpaComm Eq. 1-3)."""
    free: dict[int, float] = {}
    for i, sender in order:
        hosts = {sender, *tasks[i].wanters}
        stop = max(free.get(host, 0.0) for host in hosts) + tasks[i].seconds
        free |= dict.fromkeys(hosts, stop)
    return Assignment(tuple(order), max(free.values(), default=0.0))


SENDER_WAYS = {"naive": naive, "longest first": longest_first, "randomized": randomized, "depth first": depth_first}
"""How tasks that are sent whole are given senders and an order, by the name people know the way by."""
