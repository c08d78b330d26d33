"""Many ranks in one process: each a thread with its own part of the plan, for checks without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from conjoin.comm import ring_bytes
from conjoin.errors import RankError
from conjoin.machine import Mesh
from conjoin.runtime.ranks.board import Board, Collective, Group, Message, Part
from conjoin.runtime.ranks.communicator import Axes, Messages, Sizes

T = TypeVar("T")


class ThreadWork:
    """A collective of threads under way."""

    def __init__(self, board: Board, made: Collective, rank: int) -> None:
        self._board, self._made, self._rank = board, made, rank
        self._part: Part | None = made.parts[rank]

    def wait(self) -> None:
        if self._part is not None:
            result = self._board.finish(self._made, self._rank)
            self._part.check()
            with torch.no_grad():
                self._part.output.copy_(result)
            self._part = None


class ThreadMessages:
    """Messages of threads under way."""

    def __init__(self, board: Board, rank: int, messages: Sequence[Message]) -> None:
        self._board, self._rank, self._messages = board, rank, messages
        self._num_over = 0

    def wait(self, count: int | None = None) -> None:
        end = len(self._messages) if count is None else count
        while self._num_over < end:
            self._board.receive(self._messages[self._num_over], self._rank)
            self._num_over += 1


class ThreadChannel:
    """Single messages between the threads of this process."""

    are_apart = True

    def __init__(self, name: str, rank: int, board: Board) -> None:
        self._name, self._rank, self._board = name, rank, board
        self.bytes_sent = 0

    def start(self, sends: Messages, receives: Messages) -> ThreadMessages:
        mine, name = self._rank, self._name
        made = [self._board.post(name, (peer, mine), mine, tensor) for peer, tensor in receives]
        made += [self._board.post(name, (mine, peer), mine, tensor) for peer, tensor in sends]
        self.bytes_sent += sum(tensor.nbytes for _, tensor in sends)
        return ThreadMessages(self._board, mine, made)


class ThreadRanks:
    """One rank among the threads of this process, or among those of them that a mesh is made up of."""

    def __init__(self, mesh: Mesh, rank: int, board: Board, ranks: Group | None = None) -> None:
        self.mesh, self.rank, self._board = mesh, rank, board
        self._ranks, self._may_break = tuple(range(mesh.size)) if ranks is None else ranks, ranks is not None
        self.bytes_sent = self.num_started = 0
        self.device = torch.device("cpu")
        self._prepared: set[Axes] = set()

    def prepare(self, axes: Axes) -> None:
        if axes not in self._prepared:
            self._board.prepare(self._ranks, len(self._prepared), axes)
            self._prepared.add(axes)

    def among(self, mesh: Mesh, ranks: Group) -> ThreadRanks:
        """This rank on a mesh of some of the ranks."""
        return ThreadRanks(mesh, ranks.index(self.rank), self._board, ranks)

    def prepare_channels(self) -> None:
        """There is nothing to make ready."""

    def channel(self, name: str, ranks: Group) -> ThreadChannel:
        """Single messages between some of the ranks."""
        return ThreadChannel(name, self.rank, self._board)

    def to_sum(self, tensor: Tensor, last: int) -> _SumOfThreads:
        """Threads have nothing to get ready."""
        return _SumOfThreads(self, tensor)

    def compare(self, text: str) -> list[str]:
        return self._board.compare(self.rank, text)

    can_break_off = True

    def break_off(self) -> None:
        self._board.break_off(self.rank)

    def renew(self) -> None:
        self.compare("all have left")
        if self.rank == 0:
            self._board.renew()
        self.compare("all is new")

    def fail(self, error: BaseException) -> None:
        self._board.fail()

    def _start(self, kind: str, tensor: Tensor, output: Tensor, axes: Axes, sizes: Sizes) -> ThreadWork:
        assert axes in self._prepared, f"{kind} over {axes}, for which no group was made"
        group = tuple(self._ranks[member] for member in self.mesh.group(self.rank, axes))
        self.num_started += 1
        part = Part.of(kind, tensor, output, sizes)
        made = self._board.start(group, self._ranks[self.rank], part, self._may_break)
        return ThreadWork(self._board, made, self._ranks[self.rank])

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


class _SumOfThreads:
    """A sum over all ranks, begun when it is waited for."""

    def __init__(self, ranks: ThreadRanks, tensor: Tensor) -> None:
        self._ranks, self._tensor = ranks, tensor

    def wait(self) -> None:
        self._ranks.all_reduce(self._tensor, self._ranks.mesh.names).wait()


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
