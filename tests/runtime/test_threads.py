"""Ranks that are threads: the first real error is raised, and nobody waits for a rank that has stopped."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from conjoin.errors import RankError
from conjoin.machine import Axis, Mesh
from conjoin.runtime.communicator import Communicator
from conjoin.runtime.threads import run_ranks

MESH = Mesh((Axis("x", 2), Axis("y", 2)))


def total(communicator: Communicator, axes: tuple[str, ...] = MESH.names) -> float:
    tensor = torch.tensor([float(communicator.rank)])
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
    assert time.monotonic() - start < 10


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
