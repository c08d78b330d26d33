"""Where ranks that are threads meet: their collectives and messages, as hostile as a backend may be.

What Gloo or NCCL refuses is refused: strides, dtypes, sizes that do not match, members that come with different
collectives. A result is not there before its own work is waited for, whatever else was waited for: until then the
output is poison. What is under way is read late and must not be written to. And a rank carries out its collectives one
after the other in the order it started them, as streams of a busy GPU may: ranks that start those of two groups in
different orders wait for each other for ever, which is noticed at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conjoin.errors import RankError
from conjoin.runtime.ranks.communicator import Axes, Sizes
from conjoin.runtime.ranks.progress import BrokenOff
from conjoin.runtime.ranks.wire import CARRIED

Group = tuple[int, ...]
_Kind = tuple[Group, bool]
"""A group, and whether its members may leave its collectives."""


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _poison(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def _bits(tensor: Tensor) -> Tensor:
    """A copy of what is in memory, to compare with later: also NaN is like itself."""
    return tensor.detach().view(-1).view(torch.uint8).clone()


@dataclass(frozen=True, slots=True)
class Part:
    """What one member brings to a collective."""

    kind: str
    tensor: Tensor
    """What it gives; read when the collective is carried out."""
    output: Tensor
    sizes: Sizes
    """How many elements come from each member, and how many go to each."""
    versions: tuple[int, int]

    @staticmethod
    def of(kind: str, tensor: Tensor, output: Tensor, sizes: Sizes) -> Part:
        for x in (tensor, output):
            assert x.is_contiguous(), f"{kind} of strides {x.stride()}: no backend takes gaps"
            assert x.dtype in CARRIED and x.dtype == tensor.dtype, f"{kind} of {x.dtype}: not every backend knows it"
        own = tensor.detach().clone() if tensor is output else tensor
        _poison(output)
        return Part(kind, own, output, sizes, (_version(own), _version(output)))

    def check(self) -> None:
        assert self.versions == (_version(self.tensor), _version(self.output)), (
            f"a tensor of {self.output.numel()} elements was written to while its {self.kind} was under way"
        )


class Collective:
    """One collective of a group: what its members bring, and what each gets."""

    def __init__(self, group: Group, may_break: bool) -> None:
        self.group, self.may_break = group, may_break
        self.parts: dict[int, Part] = {}
        self.is_started = False
        """Whether all members have come, and have carried out all they started before."""
        self._results: dict[int, Tensor] | None = None

    def result(self, rank: int) -> Tensor:
        if self._results is None:
            parts = [self.parts[member] for member in self.group]
            for part in parts:
                part.check()
            self._results = dict(zip(self.group, _carried_out(parts), strict=True))
        return self._results.pop(rank)

    def mismatch(self) -> str | None:
        """In words how members differ in what they want."""
        parts = [self.parts[member] for member in self.group]
        first = parts[0]
        for i, part in enumerate(parts):
            if (part.kind, part.tensor.dtype) != (first.kind, first.tensor.dtype):
                return f"{_told(self.group[0], first)} and {_told(self.group[i], part)}"
            for j, other in enumerate(parts):
                if part.sizes[1][j] != other.sizes[0][i]:
                    sent, wanted = part.sizes[1][j], other.sizes[0][i]
                    return f"rank {self.group[i]} sends {sent} elements, rank {self.group[j]} takes {wanted}"
        return None


def _told(rank: int, part: Part) -> str:
    return f"rank {rank} came for {part.kind} of {part.tensor.numel()} × {part.tensor.dtype}"


def _carried_out(parts: Sequence[Part]) -> list[Tensor]:
    """What each member gets, in their order."""
    kind, tensors = parts[0].kind, [part.tensor.detach() for part in parts]
    match kind:
        case "all-reduce":
            return [torch.stack(tensors).sum(0, dtype=tensors[0].dtype)] * len(parts)
        case "largest":
            return [torch.stack(tensors).amax(0)] * len(parts)
        case "all-gather":
            return [torch.cat(tensors)] * len(parts)
        case "reduce-scatter":
            return list(torch.stack(tensors).sum(0, dtype=tensors[0].dtype).chunk(len(parts)))
        case _:
            cut = [torch.split(part.tensor.detach(), list(part.sizes[1])) for part in parts]
            return [torch.cat([pieces[place] for pieces in cut]) for place in range(len(parts))]


class Message:
    """What one rank sends to another: neither end is over with it before both have come, and it is read late."""

    may_break = True

    def __init__(self, route: tuple[int, int]) -> None:
        self.group = route
        self._sent: tuple[Tensor, Tensor] | None = None
        self._output: tuple[Tensor, Tensor] | None = None
        """Each with its bits when it was given: others may be parts of the same memory, and come at another time."""
        self.is_delivered = False

    def lacks(self, sender: bool) -> bool:
        return (self._sent if sender else self._output) is None

    def come(self, is_sender: bool, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), f"a message of strides {tensor.stride()}: no backend takes gaps"
        assert tensor.dtype in CARRIED, f"a message of {tensor.dtype}: not every backend knows it"
        if is_sender:
            self._sent = tensor.detach(), _bits(tensor)
        else:
            _poison(tensor)
            self._output = tensor.detach(), _bits(tensor)
        if self._sent is not None and self._output is not None:
            (sent, _), (taken, _) = self._sent, self._output
            assert (sent.dtype, sent.numel()) == (taken.dtype, taken.numel()), (
                f"rank {self.group[0]} sends {sent.numel()} × {sent.dtype}, "
                f"rank {self.group[1]} takes {taken.numel()} × {taken.dtype}"
            )

    @property
    def is_started(self) -> bool:
        return self._sent is not None and self._output is not None

    def deliver(self) -> None:
        if self.is_delivered:
            return
        assert self._sent is not None and self._output is not None
        (sent, before), (output, untouched) = self._sent, self._output
        assert torch.equal(before, _bits(sent)) and torch.equal(untouched, _bits(output)), (
            f"a message of {sent.numel()} elements was written to while it was under way"
        )
        with torch.no_grad():
            output.view(-1).copy_(sent.view(-1))
        self.is_delivered = True


@dataclass
class Board:
    """Where the threads of one process meet."""

    num_ranks: int
    timeout_seconds: float = 120.0
    failed: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _calls: list[threading.Condition] = field(init=False)
    """What wakes each rank: every time, all others would have to look whether it was for them."""
    _prepared: dict[Group, list[Axes]] = field(default_factory=dict)
    """By the ranks of a mesh, in the order in which all of them make their groups."""
    _open: dict[tuple[_Kind, int], Collective] = field(default_factory=dict)
    """By group and number, those for which not all members have come."""
    _counts: dict[tuple[_Kind, int], int] = field(default_factory=dict)
    """By group and rank, how many it has started."""
    _queues: dict[int, deque[Collective]] = field(default_factory=dict)
    """By rank, what it has started and not yet carried out, in order."""
    _waiting: dict[int, Collective | Message] = field(default_factory=dict)
    _mail: dict[tuple[str, int, int], deque[Message]] = field(default_factory=dict)
    """By channel, sender and receiver, what only one of the two has come for."""
    _left: set[int] = field(default_factory=set)
    _broken_off: set[int] = field(default_factory=set)
    """Who has left all but what all ranks do together."""
    _said: list[list[str]] = field(init=False)
    """By rank, what it said in every comparison."""

    def __post_init__(self) -> None:
        self._said = [[] for _ in range(self.num_ranks)]
        self._calls = [threading.Condition(self._lock) for _ in range(self.num_ranks)]

    def _wake(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._calls[rank].notify_all()

    def prepare(self, ranks: Group, number: int, axes: Axes) -> None:
        """Make the groups over some axes, which are those of this number on all ranks of a mesh."""
        with self._lock:
            prepared = self._prepared.setdefault(ranks, [])
            if number == len(prepared):
                prepared.append(axes)
            assert prepared[number] == axes, f"groups over {axes} where others make {prepared[number]}"

    def start(self, group: Group, rank: int, part: Part, may_break: bool) -> Collective:
        """Come to the next collective of a group, which a member may leave."""
        with self._lock:
            kind = group, may_break
            number = self._counts.get((kind, rank), 0)
            made = self._open.setdefault((kind, number), Collective(group, may_break))
            self._check_there(made, rank)
            self._counts[kind, rank] = number + 1
            made.parts[rank] = part
            self._queues.setdefault(rank, deque()).append(made)
            if len(made.parts) == len(group):
                del self._open[kind, number]
                fault = made.mismatch()
                if fault is not None:
                    self.fail()
                    raise RankError(
                        f"The ranks {group} came to a collective with different wishes: {fault}. They run different "
                        f"programs, or one of them left out a step. Give every rank the same plan and steps."
                    )
                self._carry_on(group)
            return made

    def _carry_on(self, group: Group) -> None:
        """Start what is first in line on all its members."""
        ready = [queue[0] for member in group if (queue := self._queues.get(member))]
        for made in ready:
            if not made.is_started and len(made.parts) == len(made.group):
                queues = [self._queues[member] for member in made.group]
                if all(queue and queue[0] is made for queue in queues):
                    made.is_started = True
                    for queue in queues:
                        queue.popleft()
                    self._wake(made.group)
                    self._carry_on(made.group)

    def finish(self, made: Collective, rank: int) -> Tensor:
        """Wait until a collective is carried out; what this rank gets of it."""
        with self._lock:
            self._wait_for(made, rank)
            return made.result(rank)

    def _wait_for(self, made: Collective | Message, rank: int) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        self._waiting[rank] = made
        self._look_for_deadlock()
        while not made.is_started:
            if self._is_left(made):
                del self._waiting[rank]
                self._check_there(made, rank)
            if self.failed or not self._calls[rank].wait(deadline - time.monotonic()):
                self.fail()
                raise RankError(
                    f"Rank {rank} waits for its group {made.group}, and not all of it came. Another rank stopped "
                    f"or runs another program. See its error."
                )
        del self._waiting[rank]

    def post(self, channel: str, route: tuple[int, int], rank: int, tensor: Tensor) -> Message:
        """Come as the sender or the receiver of the next message of a channel from one rank to another."""
        with self._lock:
            self._check_there(Message(route), rank)
            waiting, is_sender = self._mail.setdefault((channel, *route), deque()), rank == route[0]
            if waiting and waiting[0].lacks(is_sender):
                made = waiting.popleft()
            else:
                made = Message(route)
                waiting.append(made)
            made.come(is_sender, tensor)
            if made.is_started:
                self._wake(route)
            return made

    def receive(self, made: Message, rank: int) -> None:
        """Wait until the other end of a message has come; what is sent is read only now."""
        with self._lock:
            self._wait_for(made, rank)
            made.deliver()

    def break_off(self, rank: int) -> None:
        """A rank leaves all but what all ranks do together."""
        with self._lock:
            self._broken_off.add(rank)
            for queue in self._queues.values():
                left = [made for made in queue if not self._is_left(made)]
                queue.clear()
                queue.extend(left)
            self._wake(range(self.num_ranks))
            for queue in list(self._queues.values()):
                if queue:
                    self._carry_on(queue[0].group)

    def _is_left(self, made: Collective | Message) -> bool:
        return made.may_break and not self._broken_off.isdisjoint(made.group)

    def _check_there(self, made: Collective | Message, rank: int) -> None:
        if self._is_left(made):
            raise BrokenOff(
                f"Rank {rank} waited for another in the middle of a step. Rank "
                f"{min(self._broken_off.intersection(made.group))} has left it. All leave it together."
            )

    def renew(self) -> None:
        """Forget what is left of what was under way; one rank does, while the others wait."""
        with self._lock:
            self._broken_off.clear()
            self._mail.clear()
            self._open = {key: made for key, made in self._open.items() if not made.may_break}
            self._counts = {(kind, rank): count for (kind, rank), count in self._counts.items() if not kind[1]}

    def compare(self, rank: int, text: str) -> list[str]:
        """What every rank says in the same comparison."""
        with self._lock:
            self._said[rank].append(text)
            count = len(self._said[rank])
            if self._has_been_said(count):
                self._wake(range(self.num_ranks))
            self._look_for_deadlock()
            while not self._has_been_said(count):
                if self.failed or not self._calls[rank].wait(self.timeout_seconds):
                    raise RankError(
                        f"Rank {rank} waits for the others to compare notes, after a step that failed or before one of "
                        f"another shape, and not all of them came. They are in the middle of a step. Start again from "
                        f"the last checkpoint, with the same batches on all ranks."
                    )
            return [said[count - 1] for said in self._said]

    def _has_been_said(self, count: int) -> bool:
        """Whether all ranks have come to so many comparisons."""
        return min(map(len, self._said)) >= count

    def leave(self, rank: int) -> None:
        """A rank has come to its end."""
        with self._lock:
            self._left.add(rank)
            self._look_for_deadlock()

    def _look_for_deadlock(self) -> None:
        """Fail where every rank waits for one that waits."""
        stuck = {rank for rank, made in self._waiting.items() if not made.is_started and not self._is_left(made)}
        fewest = min(map(len, self._said))
        comparing = {rank for rank, said in enumerate(self._said) if len(said) > fewest}
        if stuck and len(stuck | comparing | self._left) == self.num_ranks and not self.failed:
            self.fail()
            waits = "; ".join(f"rank {rank} {self._why(rank)}" for rank in sorted(stuck))
            raise RankError(
                f"The ranks wait for each other: {waits}. Collectives of groups that share ranks were started in "
                f"different orders, or one rank left some out, as for a batch of another shape. Start them in the "
                f"same order on all ranks."
            )

    def _why(self, rank: int) -> str:
        message = self._waiting[rank]
        if isinstance(message, Message):
            source, target = message.group
            return f"has a message {f'to rank {target}' if rank == source else f'from rank {source}'} first"
        first = self._queues[rank][0]
        missing = [member for member in first.group if member not in first.parts]
        others = [member for member in first.group if member not in missing and self._queues[member][0] is not first]
        return f"has {first.parts[rank].kind} with {missing or others} first"

    def fail(self) -> None:
        """Let nobody wait for a rank that has stopped."""
        with self._lock:
            self.failed = True
            self._wake(range(self.num_ranks))
