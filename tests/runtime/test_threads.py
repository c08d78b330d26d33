"""Ranks that are threads: the first real error is raised, and nobody waits for a rank that has stopped."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from conjoin.errors import RankError
from conjoin.machine import Axis, Mesh
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from tests.ir.wording import assert_three_sentences

MESH = Mesh((Axis("x", 2), Axis("y", 2)))


def total(communicator: Communicator, axes: tuple[str, ...] = MESH.names) -> float:
    tensor = torch.tensor([float(communicator.rank)])
    communicator.prepare(axes)
    communicator.all_reduce(tensor, axes).wait()
    return tensor.item()


def test_what_each_rank_returned_in_their_order() -> None:
    assert run_ranks(MESH, lambda c: (c.rank, total(c))) == [(rank, 6.0) for rank in range(4)]
    assert run_ranks(MESH, lambda c: total(c, ("y",))) == [1.0, 1.0, 5.0, 5.0]


def test_one_rank_alone() -> None:
    assert run_ranks(Mesh(()), lambda c: (c.rank, c.mesh.size)) == [(0, 1)]


def test_ranks_run_at_the_same_time() -> None:
    met = threading.Barrier(4, timeout=10)
    assert sorted(run_ranks(MESH, lambda c: met.wait())) == [0, 1, 2, 3]


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("axes", [("x", "y"), ("x",), ("y",)], ids=str)
def test_a_rank_that_fails_while_others_wait(failing: int, axes: tuple[str, ...]) -> None:
    def program(communicator: Communicator) -> None:
        total(communicator, axes)
        if communicator.rank == failing:
            time.sleep(0.05)  # the others are waiting by then
            raise ArithmeticError(f"rank {failing}")
        for _ in range(3):
            total(communicator)

    start = time.monotonic()
    with pytest.raises(ArithmeticError, match=f"rank {failing}"):
        run_ranks(MESH, program)
    assert time.monotonic() - start < 100


def test_the_error_that_came_first_is_raised_not_what_it_did_to_the_others() -> None:
    second = threading.Event()

    def program(communicator: Communicator) -> None:
        if communicator.rank == 3:
            raise LookupError("the first")
        try:
            total(communicator)
        except RankError:
            if communicator.rank == 0:
                second.set()
                raise
            second.wait(10)
            raise ValueError("the last") from None

    with pytest.raises(LookupError, match="the first"):
        run_ranks(MESH, program)


def test_when_no_rank_has_an_error_of_its_own_the_one_that_waited_speaks() -> None:
    """Rank 3 ends well, and early: the others were promised a collective with it."""

    def program(communicator: Communicator) -> None:
        if communicator.rank == 3:
            raise RankError("Rank 3 stops. It has its reasons. Ask it.")
        total(communicator)

    with pytest.raises(RankError, match="Rank 3 stops"):
        run_ranks(MESH, program)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_ends_a_rank_ends_all(error: type[BaseException]) -> None:
    def program(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise error
        total(communicator)

    with pytest.raises(error):
        run_ranks(MESH, program)


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            run_ranks(MESH, lambda c: 1 / 0 if c.rank == 2 else total(c))
    assert threading.active_count() == before


def test_gradients_flow_on_every_rank_also_when_the_caller_has_switched_them_off() -> None:
    """Threads begin with torch's defaults, as processes do."""
    with torch.no_grad():
        assert run_ranks(MESH, lambda c: torch.is_grad_enabled()) == [True] * 4


def prepared(communicator: Communicator, *groups: tuple[str, ...]) -> None:
    for axes in groups or (MESH.names,):
        communicator.prepare(axes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_a_result_is_poison_until_its_own_work_is_waited_for(dtype: torch.dtype) -> None:
    def program(communicator: Communicator) -> list[list[bool]]:
        prepared(communicator)
        tensors = [torch.ones(4, dtype=dtype), torch.zeros(4, dtype=dtype), torch.zeros(1, dtype=dtype)]
        works = [
            communicator.all_reduce(tensors[0], MESH.names),
            communicator.all_gather(tensors[1], torch.ones(1, dtype=dtype), MESH.names),
            communicator.reduce_scatter(tensors[2], torch.ones(4, dtype=dtype), MESH.names),
        ]
        found = [[bool((x == want).all()) for x, want in zip(tensors, (4, 1, 4), strict=True)]]
        for i in (2, 0, 1):  # not in the order they were started in
            works[i].wait()
            found.append([bool((x == want).all()) for x, want in zip(tensors, (4, 1, 4), strict=True)])
        return found

    there = [[False] * 3, [False, False, True], [True, False, True], [True] * 3]
    assert run_ranks(MESH, program) == [there] * 4


@pytest.mark.parametrize("written", ["what is sent", "a view of it", "where it arrives", "what is summed"])
def test_what_is_under_way_must_not_be_written_to(written: str) -> None:
    def program(communicator: Communicator) -> None:
        prepared(communicator)
        sent, arrives, summed = torch.ones(3), torch.empty(12), torch.ones(3)
        works = communicator.all_gather(arrives, sent, MESH.names), communicator.all_reduce(summed, MESH.names)
        if communicator.rank == 2:
            match written:
                case "what is sent":
                    sent.add_(1)
                case "a view of it":
                    sent[1:].zero_()
                case "where it arrives":
                    arrives.zero_()
                case _:
                    summed.mul_(2)
        for work in works:
            work.wait()

    with pytest.raises(AssertionError, match="was under way"):
        run_ranks(MESH, program)


def test_what_was_read_may_be_written_to_after_the_own_wait() -> None:
    def program(communicator: Communicator) -> list[float]:
        prepared(communicator)
        sent, arrives = torch.ones(1), torch.empty(4)
        work = communicator.all_gather(arrives, sent, MESH.names)
        if communicator.rank % 2:
            work.wait()
            sent.zero_()
        total(communicator)  # the others wait when that is done
        work.wait()
        return arrives.tolist()

    assert run_ranks(MESH, program) == [[1.0] * 4] * 4


REFUSED = {
    "strides": (lambda c: c.all_gather(torch.empty(8), torch.ones(4)[::2], MESH.names), "strides"),
    "strides of a sum": (lambda c: c.all_reduce(torch.ones(2, 3).t(), MESH.names), "strides"),
    "strides of the output": (lambda c: c.all_gather(torch.empty(16)[::2], torch.ones(2), MESH.names), "strides"),
    "truth values": (lambda c: c.all_reduce(torch.ones(2, dtype=torch.bool), MESH.names), "not every backend"),
    "short integers": (
        lambda c: c.all_gather(torch.ones(8).short(), torch.ones(2).short(), MESH.names), "not every backend",
    ),
    "complex numbers": (lambda c: c.all_reduce(torch.ones(2, dtype=torch.complex64), MESH.names), "not every backend"),
    "two dtypes": (lambda c: c.all_gather(torch.ones(8), torch.ones(2).double(), MESH.names), "not every backend"),
    "too little room": (lambda c: c.all_gather(torch.ones(6), torch.ones(2), MESH.names), "6 elements of 4 × 2"),
    "no equal parts": (lambda c: c.reduce_scatter(torch.ones(2), torch.ones(7), MESH.names), "4 × 2 elements of 7"),
    "sizes": (lambda c: c.all_to_all(torch.ones(4), torch.ones(4), ([1] * 4, [1, 1, 1, 2]), MESH.names), "add up"),
    "a group that was not made": (lambda c: c.all_reduce(torch.ones(1), ("x",)), "no group was made"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_backend_may_refuse_is_refused(what: str) -> None:
    def program(communicator: Communicator) -> None:
        prepared(communicator)
        REFUSED[what][0](communicator).wait()

    with pytest.raises(AssertionError, match=REFUSED[what][1]):
        run_ranks(MESH, program)


MISMATCHED = {
    "another kind": (
        lambda c: c.all_reduce(torch.ones(2), MESH.names, largest=c.rank == 1),
        "rank 0 came for all-reduce of 2 × torch.float32 and rank 1 came for largest of 2",
    ),
    "another dtype": (
        lambda c: c.all_reduce(torch.ones(2, dtype=[torch.half, torch.float][c.rank % 2]), MESH.names),
        "float16",
    ),
    "another size": (
        lambda c: c.all_reduce(torch.ones(2 + c.rank), MESH.names),
        "rank 0 sends 2 elements, rank 1 takes 3",
    ),
    "parts": (
        lambda c: c.all_to_all(*torch.ones(2, 4), ([1] * 4, [2, 1, 1, 0] if c.rank == 3 else [1] * 4), MESH.names),
        "rank 3 sends 2 elements, rank 0 takes 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISMATCHED)
def test_ranks_that_want_different_things_are_told(what: str) -> None:
    def program(communicator: Communicator) -> None:
        prepared(communicator)
        MISMATCHED[what][0](communicator).wait()

    with pytest.raises(RankError, match=MISMATCHED[what][1]) as told:
        run_ranks(MESH, program)
    assert_three_sentences(told.value)


ORDERS = {
    "two groups of the same ranks": ([("x", "y"), ("y",)], [("y",), ("x", "y")], [0]),
    "two groups that share one rank": ([("x",), ("y",)], [("y",), ("x",)], [0, 3]),
}


@pytest.mark.parametrize("what", ORDERS)
@pytest.mark.parametrize("waits", ["at once", "late"])
def test_groups_that_share_ranks_are_used_in_one_order(what: str, waits: str) -> None:
    """A cycle of ranks that each wait for the next: 0 for 2, 2 for 3, 3 for 1, 1 for 0."""
    order, other, turned = ORDERS[what]

    def program(communicator: Communicator) -> None:
        prepared(communicator, ("x",), ("y",), ("x", "y"))
        works = []
        for axes in other if communicator.rank in turned else order:
            works.append(communicator.all_reduce(torch.ones(1), axes))
            if waits == "at once":
                works.pop().wait()
        for work in works:
            work.wait()

    start = time.monotonic()
    with pytest.raises(RankError, match="The ranks wait for each other") as told:
        run_ranks(MESH, program)
    assert time.monotonic() - start < 100 and "in the same order on all ranks" in str(told.value)
    assert_three_sentences(told.value)


def test_a_rank_that_ends_early_is_not_waited_for() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="wait for each other"):
        run_ranks(MESH, lambda c: c.rank == 3 or total(c))
    assert time.monotonic() - start < 100


def test_groups_are_made_in_one_order() -> None:
    """A process group is made by all ranks together."""

    def program(communicator: Communicator) -> None:
        prepared(communicator, *((("x",), ("y",)) if communicator.rank else (("y",), ("x",))))

    with pytest.raises(AssertionError, match="where others make"):
        run_ranks(MESH, program)
