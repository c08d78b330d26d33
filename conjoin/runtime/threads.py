"""Many ranks in one process: each a thread with its own part of the plan, for checks without a cluster.

The ranks are as hostile as a backend may be. What Gloo or NCCL refuses is refused: strides, dtypes, sizes that do not
match, members that come with different collectives. A result is not there before its own work is waited for, whatever
else was waited for: until then the output is poison. What is under way is read late and must not be written to. And a
rank carries out its collectives one after the other in the order it started them, as streams of a busy GPU may: ranks
that start those of two groups in different orders wait for each other for ever, which is noticed at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from conjoin.comm import ring_bytes
from conjoin.errors import RankError
from conjoin.machine import Mesh
from conjoin.runtime.communicator import Axes, Sizes
from conjoin.runtime.wire import CARRIED

T = TypeVar("T")
Group = tuple[int, ...]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _poison(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one member brings to a collective."""

    kind: str
    tensor: Tensor
    """What it gives; read when the collective is carried out."""
    output: Tensor
    sizes: Sizes
    """How many elements come from each member, and how many go to each."""
    versions: tuple[int, int]

    @staticmethod
    def of(kind: str, tensor: Tensor, output: Tensor, sizes: Sizes) -> _Part:
        for x in (tensor, output):
            assert x.is_contiguous(), f"{kind} of strides {x.stride()}: no backend takes gaps"
            assert x.dtype in CARRIED and x.dtype == tensor.dtype, f"{kind} of {x.dtype}: not every backend knows it"
        own = tensor.detach().clone() if tensor is output else tensor
        _poison(output)
        return _Part(kind, own, output, sizes, (_version(own), _version(output)))

    def check(self) -> None:
        assert self.versions == (_version(self.tensor), _version(self.output)), (
            f"a tensor of {self.output.numel()} elements was written to while its {self.kind} was under way"
        )


class _Collective:
    """One collective of a group: what its members bring, and what each gets."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.parts: dict[int, _Part] = {}
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


def _told(rank: int, part: _Part) -> str:
    return f"rank {rank} came for {part.kind} of {part.tensor.numel()} × {part.tensor.dtype}"


def _carried_out(parts: Sequence[_Part]) -> list[Tensor]:
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


@dataclass
class Board:
    """Where the threads of one process meet."""

    num_ranks: int
    timeout_seconds: float = 120.0
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: bool = False
    _prepared: list[Axes] = field(default_factory=list)
    """In the order in which all ranks make their groups."""
    _open: dict[tuple[Group, int], _Collective] = field(default_factory=dict)
    """By group and number, those for which not all members have come."""
    _counts: dict[tuple[Group, int], int] = field(default_factory=dict)
    """By group and rank, how many it has started."""
    _queues: dict[int, deque[_Collective]] = field(default_factory=dict)
    """By rank, what it has started and not yet carried out, in order."""
    _waiting: dict[int, _Collective] = field(default_factory=dict)
    _left: set[int] = field(default_factory=set)
    _said: list[list[str]] = field(init=False)
    """By rank, what it said in every comparison."""

    def __post_init__(self) -> None:
        self._said = [[] for _ in range(self.num_ranks)]

    def prepare(self, number: int, axes: Axes) -> None:
        """Make the groups over some axes, which are those of this number on all ranks."""
        with self.changed:
            if number == len(self._prepared):
                self._prepared.append(axes)
            assert self._prepared[number] == axes, f"groups over {axes} where others make {self._prepared[number]}"

    def start(self, group: Group, rank: int, part: _Part) -> _Collective:
        """Come to the next collective of a group."""
        with self.changed:
            number = self._counts.get((group, rank), 0)
            self._counts[group, rank] = number + 1
            made = self._open.setdefault((group, number), _Collective(group))
            made.parts[rank] = part
            self._queues.setdefault(rank, deque()).append(made)
            if len(made.parts) == len(group):
                del self._open[group, number]
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
                    self.changed.notify_all()
                    self._carry_on(made.group)

    def finish(self, made: _Collective, rank: int) -> Tensor:
        """Wait until a collective is carried out; what this rank gets of it."""
        deadline = time.monotonic() + self.timeout_seconds
        with self.changed:
            self._waiting[rank] = made
            self._look_for_deadlock()
            while not made.is_started:
                if self.failed or not self.changed.wait(deadline - time.monotonic()):
                    self.fail()
                    raise RankError(
                        f"Rank {rank} waits for its group {made.group}, and not all of it came. Another rank stopped "
                        f"or runs another program. See its error."
                    )
            del self._waiting[rank]
            return made.result(rank)

    def compare(self, rank: int, text: str) -> list[str]:
        """What every rank says in the same comparison."""
        with self.changed:
            self._said[rank].append(text)
            count = len(self._said[rank])
            self.changed.notify_all()
            self._look_for_deadlock()
            while min(map(len, self._said)) < count:
                if self.failed or not self.changed.wait(self.timeout_seconds):
                    raise RankError(
                        f"Rank {rank} waits for the others after a step that failed, and not all of them came. They "
                        f"are in the middle of theirs. Start again from the last checkpoint."
                    )
            return [said[count - 1] for said in self._said]

    def leave(self, rank: int) -> None:
        """A rank has come to its end."""
        with self.changed:
            self._left.add(rank)
            self._look_for_deadlock()

    def _look_for_deadlock(self) -> None:
        """Fail where every rank waits for one that waits."""
        stuck = {rank for rank, made in self._waiting.items() if not made.is_started}
        fewest = min(map(len, self._said))
        comparing = {rank for rank, said in enumerate(self._said) if len(said) > fewest}
        if stuck and len(stuck | comparing | self._left) == self.num_ranks and not self.failed:
            self.fail()
            waits = "; ".join(f"rank {rank} {self._why(rank)}" for rank in sorted(stuck))
            raise RankError(
                f"The ranks wait for each other: {waits}. Collectives of groups that share ranks were started in "
                f"different orders, or one rank left some out. Start them in the same order on all ranks."
            )

    def _why(self, rank: int) -> str:
        first = self._queues[rank][0]
        missing = [member for member in first.group if member not in first.parts]
        others = [member for member in first.group if member not in missing and self._queues[member][0] is not first]
        return f"has {first.parts[rank].kind} with {missing or others} first"

    def fail(self) -> None:
        """Let nobody wait for a rank that has stopped."""
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class ThreadWork:
    """A collective of threads under way."""

    def __init__(self, board: Board, made: _Collective, rank: int) -> None:
        self._board, self._made, self._rank = board, made, rank
        self._part: _Part | None = made.parts[rank]

    def wait(self) -> None:
        if self._part is not None:
            result = self._board.finish(self._made, self._rank)
            self._part.check()
            with torch.no_grad():
                self._part.output.copy_(result)
            self._part = None


class ThreadRanks:
    """One rank among the threads of this process."""

    def __init__(self, mesh: Mesh, rank: int, board: Board) -> None:
        self.mesh, self.rank, self._board = mesh, rank, board
        self.bytes_sent = self.num_started = 0
        self.device = torch.device("cpu")
        self._prepared: set[Axes] = set()

    def prepare(self, axes: Axes) -> None:
        if axes not in self._prepared:
            self._board.prepare(len(self._prepared), axes)
            self._prepared.add(axes)

    def compare(self, text: str) -> list[str]:
        return self._board.compare(self.rank, text)

    def _start(self, kind: str, tensor: Tensor, output: Tensor, axes: Axes, sizes: Sizes) -> ThreadWork:
        assert axes in self._prepared, f"{kind} over {axes}, for which no group was made"
        group = self.mesh.group(self.rank, axes)
        self.num_started += 1
        made = self._board.start(group, self.rank, _Part.of(kind, tensor, output, sizes))
        return ThreadWork(self._board, made, self.rank)

    def all_reduce(self, tensor: Tensor, axes: Axes, largest: bool = False) -> ThreadWork:
        count = len(self.mesh.group(self.rank, axes))
        self.bytes_sent += ring_bytes(tensor.nbytes, count)
        sizes = [tensor.numel()] * count
        return self._start("largest" if largest else "all-reduce", tensor, tensor, axes, (sizes, sizes))

    def all_gather(self, output: Tensor, tensor: Tensor, axes: Axes) -> ThreadWork:
        count = len(self.mesh.group(self.rank, axes))
        assert output.numel() == count * tensor.numel(), f"{output.numel()} elements of {count} × {tensor.numel()}"
        self.bytes_sent += (count - 1) * tensor.nbytes
        sizes = [tensor.numel()] * count
        return self._start("all-gather", tensor, output, axes, (sizes, sizes))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, axes: Axes) -> ThreadWork:
        count = len(self.mesh.group(self.rank, axes))
        assert tensor.numel() == count * output.numel(), f"{count} × {output.numel()} elements of {tensor.numel()}"
        self.bytes_sent += tensor.nbytes - output.nbytes
        sizes = [output.numel()] * count
        return self._start("reduce-scatter", tensor, output, axes, (sizes, sizes))

    def all_to_all(self, output: Tensor, tensor: Tensor, sizes: Sizes, axes: Axes) -> ThreadWork:
        place = self.mesh.group(self.rank, axes).index(self.rank)
        assert (output.numel(), tensor.numel()) == (sum(sizes[0]), sum(sizes[1])), f"sizes {sizes} do not add up"
        self.bytes_sent += (tensor.numel() - sizes[1][place]) * tensor.itemsize
        return self._start("all-to-all", tensor, output, axes, sizes)


def alone(mesh: Mesh) -> ThreadRanks:
    """The only rank of a mesh of one device."""
    return ThreadRanks(mesh, 0, Board(1))


def run_ranks(mesh: Mesh, program: Callable[[ThreadRanks], T]) -> list[T]:
    """Run a program on every rank of a mesh and give what each returned; the first error of any rank is raised."""
    board = Board(mesh.size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadRanks(mesh, rank, board))
            board.leave(rank)
        except BaseException as error:  # whatever ends a rank must end the others; it is raised below
            errors.append(error)
            board.fail()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, RankError)), errors[0])
    return [results[rank] for rank in range(mesh.size)]
