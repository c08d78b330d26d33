"""Starting the ranks of a plan on this host: one process each, one error message for all."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.distributed as dist

from conjoin.errors import ConjoinError, RankError, UsageError
from conjoin.runtime.watching import SILENT_EXIT

Program = Callable[..., Any]
MAX_LOCAL_RANKS = 256
_GRACE_SECONDS = 15.0
"""How long the other ranks may take to stop by themselves, and to say why, after one has failed."""
_LOOK_SECONDS = 1.0
"""How often a rank looks whether its launcher is still there."""
_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Site:
    """Where ranks run if not simply on this host, as network namespaces that play nodes. Such ranks use the CPU."""

    address: str
    """Of rank 0's node; the ranks meet there."""
    enter: Callable[[int], None]
    """What the process of a rank does first, to be where that rank belongs."""
    timeout_seconds: float
    """How long the run may take in all."""


def launch(num_ranks: int, program: Program, *args: Any, site: Site | None = None) -> list[Any]:
    """Run `program(rank, *args)` on processes of this host that form a process group; what each returned.

    The first rank that fails ends the run: its own message is raised here, and every process is gone. No rank outlives
    this process, however it ends.
    """
    if not 1 <= num_ranks <= MAX_LOCAL_RANKS:
        raise UsageError(
            f"{num_ranks} ranks were asked for on this host; between 1 and {MAX_LOCAL_RANKS} can be started. More do "
            f"not fit one machine. Start them with torchrun on several hosts."
        )
    context = multiprocessing.get_context("spawn" if site is None and torch.cuda.is_available() else "fork")
    processes: list[_Child] = []
    with _exiting_when_terminated():
        try:
            processes.append(_Child(context, _hold_store, site))
            port = processes[0].answer.recv()
            for rank in range(num_ranks):
                processes.append(_Child(context, _run, (rank, num_ranks, port), site, program, args))
            return _collect(processes[1:], None if site is None else site.timeout_seconds)
        finally:
            for process in reversed(processes):
                process.end()


@contextmanager
def _exiting_when_terminated() -> Iterator[None]:
    """Let SIGTERM end this process as an exit does, so that its ranks are ended first; a program's own way stays."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    launcher = os.getpid()

    def leave(*_: Any) -> None:
        if os.getpid() != launcher:
            os._exit(_TERMINATED)  # a child that was forked a moment ago
        sys.exit(_TERMINATED)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Child:
    """A process, and the pipe on which it says what it has to say."""

    def __init__(self, context: BaseContext, target: Program, *args: Any) -> None:
        self.answer, theirs = context.Pipe(duplex=False)
        told = (os.getpid(), theirs, *args)
        self.process = context.Process(target=target, args=told, daemon=True)  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside torch's own idle threads
            self.process.start()
        theirs.close()

    def read(self) -> tuple[str, Any]:
        """How a rank ended: with a value, with a message for the user, or without a word."""
        try:
            kind, content = pickle.loads(self.answer.recv_bytes())
        except EOFError:
            self.process.join(5)
            code = self.process.exitcode
            return "silent" if code == SILENT_EXIT else "died", code
        return kind, content

    def end(self) -> None:
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.answer.close()


def _hold_store(launcher: int, answer: Connection, site: Site | None) -> None:
    """Where the ranks meet, in a process of its own: its threads must not run where others are forked."""
    gc.freeze()
    address = _enter(launcher, site, 0)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    answer.send(store.port)
    threading.Event().wait()  # until it is ended


def _enter(launcher: int, site: Site | None, rank: int) -> str:
    """Go where the rank belongs, and end from now on when the launcher does; the address at which the ranks meet."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if site is not None:
        site.enter(rank)  # first: a process with threads may not enter a user namespace
    threading.Thread(target=_end_with, args=(launcher,), name="conjoin-launcher", daemon=True).start()
    return "127.0.0.1" if site is None else site.address


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    os._exit(_TERMINATED)


def _run(
    launcher: int,
    answer: Connection,
    place: tuple[int, int, int],
    site: Site | None,
    program: Program,
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # what the parent has is the parent's to clean up
    rank, num_ranks, port = place
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))  # also: a forked child must not use more at first
    try:
        address = _enter(launcher, site, rank)
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
        cuda = site is None and torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=num_ranks)
        _say(answer, "value", program(rank, *args))
        dist.destroy_process_group()
    except BaseException as error:
        sys.last_value = error  # as the interpreter notes an error nobody caught: the watch tells the other ranks
        _say(answer, *_ending(error))
    finally:
        sys.stdout.flush()
        answer.close()


def _say(answer: Connection, kind: str, content: Any) -> None:
    """Send by value: what multiprocessing itself sends of a tensor is a handle, which ends with this process."""
    answer.send_bytes(pickle.dumps((kind, content)))


def _ending(error: BaseException) -> tuple[str, Any]:
    """What a rank says that ends with an error."""
    match error:
        case RankError():
            return "lost", error
        case ConjoinError():
            return "refused", error
        case KeyboardInterrupt():
            return "interrupted", None
    return "failed", "".join(traceback.format_exception(error))


def _collect(ranks: list[_Child], timeout_seconds: float | None = None) -> list[Any]:
    values: dict[int, Any] = {}
    troubles: dict[int, tuple[str, Any]] = {}
    waiting = {child.answer: rank for rank, child in enumerate(ranks)}
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while waiting:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        for ready in wait(list(waiting), left):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            kind, content = ranks[rank].read()
            if kind == "value":
                values[rank] = content
                continue
            troubles[rank] = (kind, content)
            grace = time.monotonic() + _GRACE_SECONDS
            deadline = grace if deadline is None else min(deadline, grace)
    if troubles:
        raise _trouble(troubles)
    if waiting:
        late = ", ".join(str(rank) for rank in sorted(waiting.values()))
        raise RankError(
            f"Rank {late} did not end within the {timeout_seconds:g} s that the run was given. All ranks were stopped. "
            f"Give it longer, or look at what they wait for."
        )
    return [values[rank] for rank in range(len(ranks))]


def _trouble(troubles: dict[int, tuple[str, Any]]) -> BaseException:
    """The one error that says most: a refusal, then an unexpected end, then what it did to the others."""
    order = ("interrupted", "refused", "died", "failed", "silent", "lost")
    rank, (kind, content) = min(troubles.items(), key=lambda item: order.index(item[1][0]))
    match kind:
        case "interrupted":
            return KeyboardInterrupt()
        case "refused" | "lost":
            assert isinstance(content, ConjoinError)
            return content
        case "silent":
            return RankError(
                f"Rank {rank} noticed that another rank was silent, and ended. Its message stands above. Look at that "
                f"rank's process, then start again from the last checkpoint."
            )
        case "failed":
            return RankError(
                f"Rank {rank} failed with an error of its own. The other ranks were stopped. It said:\n{content}"
            )
        case _:
            return RankError(
                f"Rank {rank} ended in the middle of a step with exit code {content}. It was killed or ran out of "
                f"memory, and the other ranks were stopped. Start again from the last checkpoint."
            )
