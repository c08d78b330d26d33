"""The four collectives, alike among threads and among Gloo processes; and what happens when a rank does not come."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conjoin.errors import RankError
from conjoin.machine import Axis, Mesh
from conjoin.runtime.ranks.board import Board
from conjoin.runtime.ranks.communicator import Communicator, uncompiled
from conjoin.runtime.ranks.process_groups import group_device
from conjoin.runtime.ranks.swaps import swap
from conjoin.runtime.ranks.threads import ThreadRanks, run_ranks
from tests.ir.wording import assert_three_sentences
from tests.runtime.gloo_ranks import run_processes

MESH = Mesh((Axis("x", 2), Axis("y", 2)))


def mine(communicator: Communicator, count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float64) + 100 * communicator.rank


def collect(communicator: Communicator) -> list[tuple[list[float], int]]:
    """Every collective over one axis, the other and both; what each gave and how many bytes it sent."""
    found: list[tuple[list[float], int]] = []

    def note(tensor: Tensor) -> None:
        found.append((tensor.tolist(), communicator.bytes_sent))

    for axes in (("x",), ("y",), ("x", "y")):
        communicator.prepare(axes)
        count = len(communicator.mesh.group(communicator.rank, axes))
        total = mine(communicator, 3)
        communicator.all_reduce(total, axes).wait()
        note(total)
        largest = -mine(communicator, 3)
        communicator.all_reduce(largest, axes, largest=True).wait()
        note(largest)
        gathered = torch.empty(3 * count, dtype=torch.float64)
        communicator.all_gather(gathered, mine(communicator, 3), axes).wait()
        note(gathered)
        part = torch.empty(2, dtype=torch.float64)
        communicator.reduce_scatter(part, mine(communicator, 2 * count), axes).wait()
        note(part)
        place = communicator.mesh.group(communicator.rank, axes).index(communicator.rank)
        sent = [i + place for i in range(count)]
        received = [place + i for i in range(count)]
        output = torch.empty(sum(received), dtype=torch.float64)
        communicator.all_to_all(output, mine(communicator, sum(sent)), (received, sent), axes).wait()
        note(output)
    return found


def test_threads_and_processes_give_the_same(tmp_path: Path) -> None:
    threads = run_ranks(MESH, collect)
    assert threads == run_processes(MESH, collect, tmp_path)
    first = [result for result, _ in threads[0][:5]]
    assert first == [
        [200, 202, 204],
        [0, -1, -2],
        [0, 1, 2, 200, 201, 202],
        [200, 202],
        [200],
    ]
    sent = [0, *(sent for _, sent in threads[0][:5])]
    assert [after - before for before, after in pairwise(sent)] == [24, 24, 24, 16, 8]


class Messages:
    """A process group's messages, noted instead of sent."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, int]] = []

    def rank(self) -> int:
        return 1

    def note(self, way: str, member: int) -> Messages:
        self.noted.append((way, member))
        return self

    def wait(self) -> None:
        self.noted.append(("wait", 0))


def test_everyone_is_ready_to_receive_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the word that one is ready stands behind the data on the same connection."""
    group = Messages()
    monkeypatch.setattr(dist, "irecv", lambda tensor, *, group, tag, group_src: group.note("from", group_src))
    monkeypatch.setattr(dist, "isend", lambda tensor, *, group, tag, group_dst: group.note("to", group_dst))
    out, into = torch.arange(6.0).split([2, 1, 3, 0]), torch.zeros(4).split([0, 1, 2, 1])
    swap("all-to-all", group, into, out).wait()  # type: ignore[arg-type]
    assert group.noted[:4] == [("from", 3), ("from", 2), ("to", 2), ("to", 0)], "of members who have a part"
    assert group.noted[4:] == [("wait", 0)] * 4
    assert into[1].item() == 2, "what stays here is there"


def test_what_a_rank_does_to_its_tensor_afterwards_concerns_nobody_else() -> None:
    def program(communicator: Communicator) -> list[float]:
        total, gathered = mine(communicator, 2), torch.empty(8, dtype=torch.float64)
        communicator.prepare(MESH.names)
        communicator.all_reduce(total, MESH.names).wait()
        kept = total.clone()
        total.mul_(communicator.rank)
        own = mine(communicator, 2)
        communicator.all_gather(gathered, own, MESH.names).wait()
        own.zero_()
        return [*kept.tolist(), *gathered.tolist()]

    found = run_ranks(MESH, program)
    assert found == [[600, 604, 0, 1, 100, 101, 200, 201, 300, 301]] * 4


def test_the_error_of_the_rank_that_failed_is_raised() -> None:
    def program(communicator: Communicator) -> None:
        if communicator.rank == 2:
            raise ZeroDivisionError("rank 2 divides by zero")
        communicator.prepare(MESH.names)
        communicator.all_reduce(torch.ones(1), MESH.names).wait()

    with pytest.raises(ZeroDivisionError, match="rank 2 divides by zero"):
        run_ranks(MESH, program)


def test_a_rank_that_waits_in_vain_says_so() -> None:
    board = Board(2, timeout_seconds=0.2)
    mesh = Mesh((Axis("x", 2),))
    rank = ThreadRanks(mesh, 1, board)
    rank.prepare(("x",))
    with pytest.raises(RankError) as told:
        rank.all_reduce(torch.ones(1), ("x",)).wait()
    assert_three_sentences(told.value)
    assert "Rank 1 waits for its group (0, 1), and not all of it came" in str(told.value)


def test_ranks_that_come_after_a_failure_do_not_wait() -> None:
    board = Board(2)
    board.fail()
    errors: list[BaseException] = []

    def run() -> None:
        rank = ThreadRanks(Mesh((Axis("x", 2),)), 0, board)
        rank.prepare(("x",))
        try:
            rank.all_reduce(torch.ones(1), ("x",)).wait()
        except RankError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and len(errors) == 1


@pytest.mark.parametrize(
    ("backend", "rank", "local_rank", "num_visible", "device"),
    [
        ("gloo", 3, "3", 8, "cpu"),
        ("nccl", 11, "3", 8, "cuda:3"),
        ("nccl", 3, None, 8, "cuda:3"),
        ("nccl", 11, None, 8, "cuda:3"),
        ("nccl", 3, "3", 1, "cuda:0"),
    ],
)
def test_every_rank_has_a_gpu_of_its_own(
    backend: str, rank: int, local_rank: str | None, num_visible: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert group_device() == torch.device(device)


# torch's own compiler deprecates its own functions; nothing of it is ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
def test_the_compiler_leaves_what_talks_to_other_ranks_alone_whatever_it_is_given() -> None:
    """It compiled how that is switched off, again for every number of tensors, until it gave up."""
    compiled = []

    @uncompiled
    def talk(*tensors: Tensor) -> Tensor:
        compiled.append(torch.compiler.is_compiling())
        return torch.stack(tensors).sum(0)

    def step(x: Tensor) -> Tensor:
        return talk(talk(x * 2, x), talk(x), x) + talk(x, x, x, x)

    x = torch.rand(3)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        made = torch.compile(step, backend="eager")(x)
    torch.testing.assert_close(made, 9 * x)
    assert compiled == [False] * 4
