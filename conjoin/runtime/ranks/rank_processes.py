"""Starting the ranks of a plan on this host: one process each, one error message for all."""

from __future__ import annotations

import atexit
import mmap
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from conjoin.environment import take_environment, whole_environment
from conjoin.errors import ConjoinError, RankError, UsageError
from conjoin.runtime.ranks.fork_server import ForkServer, server_for
from conjoin.runtime.ranks.parcels import pack, unpack
from conjoin.runtime.ranks.rank_watch import SILENT_EXIT, last_words
from conjoin.runtime.ranks.rendezvous import all_connected
from conjoin.runtime.torch_private import default_store

Program = Callable[..., Any]
MAX_LOCAL_RANKS = 256
_GRACE_SECONDS = 15.0
"""How long the other ranks may take to stop by themselves, and to say why, after one has failed."""
_END_SECONDS = 2.0
"""How long a process may take to end that was told to."""
_LOOK_SECONDS = 1.0
"""How often a rank looks whether the process that forked it is still there."""
_PAUSE_SECONDS = 0.005
_SAME_SECONDS = 2.0
"""A second SIGTERM that comes later than this after the first ends what may finish."""
_TERMINATED = 128 + signal.SIGTERM
_PROGRAM = "What the ranks are to run"


@dataclass(frozen=True, slots=True)
class Site:
    """Where ranks run if not simply on this host, as network namespaces that play nodes. Such ranks use the CPU."""

    address: str
    """Of rank 0's node; the ranks meet there."""
    enter: Callable[[int], None]
    """What the process of a rank does first, to be where that rank belongs."""
    timeout_seconds: float
    """How long the run may take in all."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What every process of a run has in common."""

    num_ranks: int
    on_gpus: bool
    folder: str
    search_path: list[str]
    words: list[str]
    environment: dict[str, str]
    site: bytes
    program: bytes


def launch(
    num_ranks: int,
    program: Program,
    *args: Any,
    site: Site | None = None,
    device: str | None = None,
    may_finish: bool = False,
) -> list[Any]:
    """Run `program(rank, *args)` on processes of this host that form a process group; what each returned.

    Each is a fresh process with this one's folder, environment and search path; program and arguments are copied to it.
    With `device="cuda"` every rank has a GPU of its own, with "cpu" none; by default GPUs are used where there are
    enough. The first rank that fails ends the run: its own message is raised here, and every process is gone. No rank
    outlives this process, however it ends. SIGTERM ends them with it; where they `may_finish` it is passed on to them,
    which end as they like, and a second one ends them.
    """
    if not 1 <= num_ranks <= MAX_LOCAL_RANKS:
        raise UsageError(
            f"{num_ranks} ranks were asked for on this host; between 1 and {MAX_LOCAL_RANKS} can be started. More do "
            f"not fit one machine. Start them with torchrun on several hosts."
        )
    on_gpus = site is None and _have_gpus(num_ranks, device)
    here = (os.getcwd(), sys.path, sys.argv, whole_environment())
    run = _Run(num_ranks, on_gpus, *here, pack("A site", site), pack(_PROGRAM, (program, args)))
    processes: list[_Child] = []
    ending = _Ending(processes, num_ranks + 1 if may_finish else None)
    with ending, tempfile.TemporaryFile() as told:
        pickle.dump(run, told)
        told.flush()
        server = server_for(_begin)
        try:
            processes.append(_Child(server, told.fileno(), None))
            port = processes[0].line.recv()
            for rank in range(num_ranks):
                processes.append(_Child(server, told.fileno(), (rank, port)))
            return _collect(processes[1:], None if site is None else site.timeout_seconds)
        except RankError:
            if ending.is_passed_on:  # it came before they could finish anything
                sys.exit(_TERMINATED)
            raise
        finally:
            signals = (signal.SIGKILL,) if may_finish else (signal.SIGTERM, signal.SIGKILL)
            for process in reversed(processes):
                process.end(signals)


def _have_gpus(num_ranks: int, device: str | None) -> bool:
    """Whether every rank gets a GPU of its own; where some would not, that is refused or told."""
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if count >= num_ranks or (count == 0 and device != "cuda"):
        return count > 0
    if device == "cuda":
        raise UsageError(
            f"{num_ranks} ranks on GPUs were asked for, and this host has {count}. Every rank needs one of its own. "
            f'Start {count or "no"} ranks, or leave GPUs unused with device="cpu".'
        )
    print(
        f"{num_ranks} ranks were started on a host with {count} GPUs. Every rank needs one of its own, so all of them "
        f'use the CPU. Start {count} ranks to use GPUs; device="cpu" says that the CPU is meant.',
        file=sys.stderr,
    )
    return False


class _Ending:
    """Lets SIGTERM end this process as an exit does, so that its ranks are ended first; a program's own way stays."""

    def __init__(self, processes: list[_Child], num_finishing: int | None) -> None:
        self._processes, self._num_finishing = processes, num_finishing
        self._first: float | None = None
        self._is_set = False

    @property
    def is_passed_on(self) -> bool:
        return self._first is not None

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._end)
            self._is_set = True

    def __exit__(self, *_: object) -> None:
        if self._is_set:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if len(self._processes) != self._num_finishing:
            sys.exit(_TERMINATED)
        now = time.monotonic()
        if self._first is None:
            self._first = now
            for child in self._processes[1:]:
                child.ask_to_end()
        elif now - self._first > _SAME_SECONDS:
            sys.exit(_TERMINATED)


class _Child:
    """A process of a run, and the line on which it is told its rank and says how it ended."""

    def __init__(self, server: ForkServer, told: int, place: tuple[int, int] | None) -> None:
        self._server = server
        self.line, theirs = Pipe()
        with theirs:
            self.process = server.fork([told, theirs.fileno(), 1, 2])
        self._code: int | None = None
        self._has_spoken = place is None  # the store ends with the line
        self.line.send(place)

    def read(self) -> tuple[str, Any]:
        """How a rank ended: with a value, with a message for the user, or without a word."""
        try:
            kind, content = pickle.loads(self.line.recv_bytes())
            self._has_spoken = True
        except (EOFError, ConnectionError):
            code = self._exit_code(5.0)
            return "silent" if code == SILENT_EXIT else "died", code
        return kind, content

    def ask_to_end(self) -> None:
        """Pass SIGTERM on to it."""
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGTERM)

    def end(self, signals: Sequence[signal.Signals]) -> None:
        """End it by these; a rank that has said its last may end by itself."""
        self.line.close()
        if not self._server.is_alive:
            return  # it ends by itself
        self._exit_code(_END_SECONDS if self._has_spoken else 0.0)
        for number in signals:
            if self._exit_code(0.0) is None:
                os.kill(self.process, number)  # its id cannot be another's: the server keeps it until asked
                self._exit_code(_END_SECONDS)

    def _exit_code(self, seconds: float) -> int | None:
        """How the process ended, waiting for that if need be."""
        deadline = time.monotonic() + seconds
        while self._code is None:
            self._code = self._server.status(self.process)
            if self._code is not None or time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE_SECONDS)
        return self._code


def _begin(files: list[int]) -> None:
    """What a process does that was forked for a run."""
    told, line_file, out, err = files
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for file, number in ((out, 1), (err, 2)):
        os.dup2(file, number)
        os.close(file)
    os.set_inheritable(line_file, False)
    with mmap.mmap(told, 0, access=mmap.ACCESS_READ) as content:
        run: _Run = pickle.load(content)
    os.close(told)
    line = Connection(line_file)
    place: tuple[int, int] | None = line.recv()
    os.chdir(run.folder)
    sys.path[:], sys.argv[:] = run.search_path, run.words
    take_environment(run.environment | ({} if place is None else _numbers(place[0], run.num_ranks)))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // run.num_ranks))
    site: Site | None = unpack("A site", run.site)
    if site is not None:
        site.enter(0 if place is None else place[0])  # first: a process with threads may not enter a user namespace
    address = "127.0.0.1" if site is None else site.address
    threading.Thread(target=_end_with, args=(os.getppid(),), name="conjoin-launcher", daemon=True).start()
    if place is None:
        _hold_store(address, line)
    else:
        _be_rank(place, address, run, line)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # taking the interpreter apart takes longer than all before


def _hold_store(address: str, line: Connection) -> None:
    """Where the ranks meet, in a process of its own: it is there for as long as any of them, whoever is told to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    line.send(store.port)
    with suppress(EOFError):
        line.recv()  # until it is closed


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(_TERMINATED)


def _be_rank(place: tuple[int, int], address: str, run: _Run, line: Connection) -> None:
    rank, port = place
    last_words.append(lambda error: _say(line, *_ending(error)))
    try:
        program, args = unpack(_PROGRAM, run.program)
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
        backend = "nccl" if run.on_gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=run.num_ranks)
        all_connected(default_store("conjoin/launch"), range(run.num_ranks), rank)
        _say(line, "value", program(rank, *args))
        dist.destroy_process_group()
    except BaseException as error:
        sys.last_value = error  # as the interpreter notes an error nobody caught: the watch tells the other ranks
        _say(line, *_ending(error))


def _numbers(rank: int, num_ranks: int) -> dict[str, str]:
    """What launchers tell their ranks in the environment."""
    ranks, sizes = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {**dict.fromkeys(ranks, str(rank)), **dict.fromkeys(sizes, str(num_ranks))}


def _say(line: Connection, kind: str, content: Any) -> None:
    """Send by value: what multiprocessing itself sends of a tensor is a handle, which ends with this process."""
    line.send_bytes(pickle.dumps((kind, content)))


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
    waiting = {child.line: rank for rank, child in enumerate(ranks)}
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
            known = isinstance(content, RankError) and {*waiting.values()} <= {*content.ranks}
            grace = time.monotonic() + (_END_SECONDS if known else _GRACE_SECONDS)
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
