"""Ranks that are processes with Gloo between them: a program runs on each, and what each returned comes back."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conjoin.machine import Mesh
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.process_groups import ProcessGroups
from tests.waiting import HUNG_SECONDS

Program = Callable[[Communicator], Any]


def _run_rank(rank: int, mesh: Mesh, program: Program, folder: Path) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=HUNG_SECONDS)
    init = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=mesh.size, timeout=timeout)
    try:
        torch.save(program(ProcessGroups(mesh)), folder / f"{rank}.pt")
    except Exception:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def run_processes(mesh: Mesh, program: Program, folder: Path) -> list[Any]:
    """Run a program on every rank of a mesh; all must end well."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_run_rank, args=(rank, mesh, program, folder), daemon=True) for rank in range(mesh.size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + HUNG_SECONDS
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        told = [path.read_text() for path in sorted(folder.glob("*.txt"))]
        assert [process.exitcode for process in ranks] == [0] * len(ranks), "\n".join(told)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(mesh.size)]
