"""A session: what a process has as one of the ranks – its device, the process groups, the watch over the others.

All modules of a process share one, so that loading many times makes nothing twice. What it has made ends with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Self, cast
from weakref import WeakSet

import torch
import torch.distributed as dist

from conjoin.environment import is_launched
from conjoin.environment import patience_seconds as patience_of_environment
from conjoin.errors import RankError, UsageError
from conjoin.machine import Mesh
from conjoin.runtime.ranks.communicator import Work, World, closed
from conjoin.runtime.ranks.process_groups import ProcessGroups
from conjoin.runtime.ranks.progress import Passage, first_line
from conjoin.runtime.ranks.rank_watch import PATIENCE_SECONDS, Watch
from conjoin.runtime.ranks.rendezvous import KeyStore, all_connected, compare
from conjoin.runtime.ranks.threads import alone
from conjoin.runtime.torch_private import close_connections, default_store, group_of_members

Device = torch.device | str | None
_TIMES_PATIENCE = 3
"""How much longer than a rank's patience torch waits by itself: the watch comes first, and names the rank."""
_LEAST_TIMEOUT = timedelta(minutes=30)


class Session:
    """This process as one of the ranks, until it is closed; with `with` at the end of the block.

    It joins the process group that the launcher's environment describes unless there is one already. Without either it
    is alone. `device` is where modules are loaded: by default this rank's GPU where there are any. A rank that makes no
    progress for `patience_seconds` while others wait for it is taken for lost; else `CONJOIN_PATIENCE` says how long.
    """

    def __init__(self, device: Device = None, *, patience_seconds: float | None = None) -> None:
        wanted = asked_device(device)
        self.patience_seconds = _patience(patience_seconds)
        self._has_joined = not dist.is_initialized() and is_launched()
        if self._has_joined:
            on_cuda = torch.cuda.is_available() if wanted is None else wanted.type == "cuda"
            dist.init_process_group("nccl" if on_cuda else "gloo", timeout=self._timeout)
        self.world = dist.group.WORLD
        self.device = device_of_rank(wanted)
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if self.world else (0, 1)
        self.is_open, self.process = True, os.getpid()
        self._groups: dict[tuple[tuple[int, ...], str], Any] = {}
        self._communicators: WeakSet[ProcessGroups] = WeakSet()
        self._num_keys = self._num_renewed = 0
        self._watch: Watch | None = None
        if self.world is not None:
            self._prefix = f"conjoin/{default_store('conjoin').add(f'sessions/{self.rank}', 1)}"
            if self._has_joined:
                all_connected(default_store(self._prefix), range(self.num_ranks), self.rank)
            self._check_devices()
            store = default_store(f"{self._prefix}/watch", for_thread=True)
            self._watch = Watch(store, self.rank, self.num_ranks, self.patience_seconds)
            self._at_exit = Finalize(None, self._watch.leave, exitpriority=0)  # also in a process of multiprocessing
        _open.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the watch and the process groups that were made here; modules loaded in the session cannot run any more.

        The other ranks are told with which error this one ends, if any.
        """
        if not self.is_open:
            return
        self.is_open = False
        _open.remove(self)
        if self._watch is not None:
            self._watch.leave(error)
            self._watch = None
            self._at_exit.cancel()
        for communicator in self._communicators:
            communicator.close()
        if self.world is not dist.group.WORLD or self.world is None:
            return  # its groups ended with it
        while self._groups:
            (ranks, _), group = self._groups.popitem()
            if self.rank in ranks:
                dist.destroy_process_group(group)
        if self._has_joined:
            dist.destroy_process_group()

    @property
    def _timeout(self) -> timedelta:
        return max(_LEAST_TIMEOUT, timedelta(seconds=_TIMES_PATIENCE * self.patience_seconds))

    def communicator(self, mesh: Mesh) -> World:
        """What carries tensors between the ranks, which stand on this mesh."""
        assert mesh.size == self.num_ranks, "the ranks are those of the mesh"
        if self.world is None:
            return alone(mesh)
        made = ProcessGroups(mesh, self)
        self._communicators.add(made)
        return made

    def keys(self) -> KeyStore | None:
        """A store to compare notes in, another each time; all ranks ask for it in the same order. None when alone."""
        if self.world is None:
            return None
        self._num_keys += 1
        return default_store(f"{self._prefix}/{self._num_keys}")

    def group(self, ranks: tuple[int, ...], name: str = "") -> dist.ProcessGroup:
        """The process group of some ranks, made once; all ranks ask for all groups in the same order, but for those
        with a name, for which only their members ask."""
        if (ranks, name) not in self._groups:
            self._groups[ranks, name] = self._make_group(ranks, name)
        group: dist.ProcessGroup = self._groups[ranks, name]
        return group

    def _make_group(self, ranks: tuple[int, ...], name: str) -> Any:
        if name:
            made: Any = group_of_members(ranks, f"{self._prefix} {name}", self._timeout)
        else:
            made = dist.new_group(list(ranks), timeout=self._timeout)
        if self.rank in ranks:
            place = f"{self._prefix}/group/{name}/{','.join(map(str, ranks))}/{self._num_renewed}"
            all_connected(default_store(place), ranks, self.rank)
        return made

    def break_off(self) -> None:
        """Leave all that is under way in groups with names, so that nobody waits there for this rank."""
        assert self._watch is not None, "an open session of several ranks has one"
        self._watch.break_off()
        for (_, name), group in self._groups.items():
            if name:
                close_connections(group)

    def renew(self) -> None:
        """Make the groups with names anew, in the order in which they were made; all ranks do, and wait for nothing."""
        assert self._watch is not None, "an open session of several ranks has one"
        self._watch.renew()
        self._num_renewed += 1
        for (ranks, name), group in self._groups.items():
            if name:
                close_connections(group)
                dist.destroy_process_group(group)
                self._groups[ranks, name] = self._make_group(ranks, name)
        for communicator in self._communicators:
            communicator.reconnect()

    def fail(self, error: BaseException) -> None:
        """Say that this rank cannot go on: those who wait for it end."""
        if self._watch is not None:
            self._watch.fail(error)

    @property
    def guard(self) -> Watch:
        """This rank's watch, for what tells it by itself what it enters and waits for."""
        if self._watch is None:
            raise closed()
        return self._watch

    def waiting(self, ranks: tuple[int, ...]) -> AbstractContextManager[None]:
        """Around what some ranks do together without our communicator."""
        return nullcontext() if self._watch is None else self._watch.waiting(self._watch.enter(ranks))

    def started(
        self, ranks: tuple[int, ...], start: Callable[[], Work | None], may_break: bool = False
    ) -> _Watched | None:
        """Start a collective of some ranks, which one of them may leave, and watch over it."""
        watch = self.guard
        passage = watch.enter(ranks, may_break)
        try:
            work = start()
        except torch.OutOfMemoryError:  # of this rank alone: no other is lost
            raise
        except RuntimeError as error:
            raise watch.explain(error, passage) from error
        if work is not None and self.device.type != "cpu":
            watch.probe(passage, cast(dist.Work, work))
        return None if work is None else _Watched(work, watch, passage)

    def look_for(self, ranks: list[int], groups: Sequence[tuple[int, ...]]) -> None:
        """Raise what is known of ranks that do not come to compare notes: they ended, or went on without."""
        found = None if self._watch is None else self._watch.why_missing(ranks, groups)
        if found is not None:
            raise found

    def _check_devices(self) -> None:
        """Refuse two ranks on one GPU."""
        if self.device.type != "cuda" or self.num_ranks == 1:
            return
        keys = self.keys()
        assert keys is not None
        mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(self.device).uuid}"
        check_apart(compare(keys, "GPU", mine, self.rank, self.num_ranks))


class _Watched:
    """A collective under way; when it fails the error names the rank that was lost."""

    def __init__(self, work: Work, watch: Watch, passage: Passage) -> None:
        self._work, self._watch, self._passage = work, watch, passage

    def wait(self) -> None:
        with self._watch.waiting(self._passage):
            self._work.wait()


def check_apart(devices: Mapping[int, str]) -> None:
    """Refuse ranks that have one GPU together."""
    by_device: dict[str, list[int]] = {}
    for rank, device in devices.items():
        by_device.setdefault(device, []).append(rank)
    for device, ranks in by_device.items():
        if len(ranks) > 1:
            raise RankError(
                f"Ranks {', '.join(map(str, ranks[:8]))} were given one GPU, of {device.split(' ')[0]}. NCCL needs one "
                f'for each. Start as many ranks as the host has GPUs, or use the CPU with device="cpu".'
            )


def asked_device(device: Device) -> torch.device | None:
    """The device that is meant; a word that means none is refused."""
    try:
        return None if device is None else torch.device(device)
    except RuntimeError as error:
        raise UsageError(
            f"The device {str(device)[:60]!r} was asked for. torch knows no such word: {first_line(error)}. "
            f'Say "cpu", "cuda" or "cuda:0", or leave it out.'
        ) from None


def device_of_rank(wanted: torch.device | None) -> torch.device:
    """Where this rank's tensors lie: on the GPU that is asked for or its own, or on the CPU under Gloo.

    Launchers other than torchrun may not number the ranks of a node, or may let each see its own GPU only: then ranks
    take the GPUs they see in turn.
    """
    if wanted is None and (not torch.cuda.is_available() or _is_on_gloo()):
        return torch.device("cpu")
    if wanted is not None and wanted.type != "cuda":
        return wanted
    count = torch.cuda.device_count()
    if count <= (wanted.index or 0 if wanted else 0):
        raise UsageError(
            f"A module on {wanted} was asked for. This host has {count} CUDA devices. Leave device out to use what "
            f"there is."
        )
    if wanted is not None and wanted.index is not None:
        return wanted
    joined = dist.is_initialized()
    index = dist.get_node_local_rank(dist.get_rank()) % count if joined else torch.cuda.current_device()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _is_on_gloo() -> bool:
    return dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO


def _patience(given: float | None) -> float:
    found = given if given is not None else patience_of_environment()
    if found is not None and not found > 0:
        raise UsageError(
            f"A patience of {found} s was asked for. It is how long a rank may make no progress while others wait for "
            f"it. Give more than 0 s."
        )
    return PATIENCE_SECONDS if found is None else found


_open: list[Session] = []
"""Of this process, and of the one it was forked from."""


def open_session() -> Session | None:
    """The session of this process that was opened last and whose ranks have not parted."""
    here = (held for held in reversed(_open) if held.process == os.getpid() and held.world is dist.group.WORLD)
    return next(here, None)


def shared_session(device: Device = None) -> Session:
    """The open session, which modules share; where there is none one is opened."""
    return open_session() or Session(device)


@contextmanager
def waiting_for_all() -> Iterator[None]:
    """Around what all ranks do together: the open session watches whether all come."""
    session = open_session()
    with nullcontext() if session is None else session.waiting(tuple(range(session.num_ranks))):
        yield
