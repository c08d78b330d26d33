"""Many ranks in one process: each a thread with its own part of the plan, for checks without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from conjoin.errors import RankError
from conjoin.machine import Mesh
from conjoin.runtime.communicator import Board, ThreadRanks

T = TypeVar("T")


def run_ranks(mesh: Mesh, program: Callable[[ThreadRanks], T]) -> list[T]:
    """Run a program on every rank of a mesh and give what each returned; the first error of any rank is raised."""
    board = Board(mesh.size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadRanks(mesh, rank, board))
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
