"""When a rank dies the others stop and say which: a sign of life from everyone in the rendezvous store.

A collective with a dead rank fails at once on Gloo, or waits for ever on other backends. Each rank counts up a number
of its own once a second. Who fails in a collective looks twice at all the numbers: one that stands still is the rank
that was lost. A thread watches the next two ranks all the time, for collectives that never return. A rank that ends
says so, and with which error if it was one of its own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from conjoin.errors import RankError
from conjoin.runtime.rendezvous import KeyStore

T = TypeVar("T")
BEAT_SECONDS = 1.0
LOOK_SECONDS = 4.0
"""Between the two looks after a failure: long enough for any rank that lives to have counted on."""
SILENT_SECONDS = 20.0
"""A rank that has not counted for this long is lost even when no collective failed."""
_GRACE_SECONDS = 5.0
SILENT_EXIT = 75
"""The exit code of a rank that ends because another one was silent."""


class Watch:
    """This rank's sign of life, and its eye on the others."""

    def __init__(self, store: KeyStore, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._stop = threading.Event()
        self._last_seen: dict[int, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="conjoin-watch", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Say that this rank ends: on purpose, after another one was lost, or with an error of its own."""
        if self._stop.is_set():
            return
        self._stop.set()
        error = getattr(sys, "last_value", None)  # what nobody caught; not there before the first
        if error is None or isinstance(error, RankError):
            self._quietly(lambda: self._store.add(f"left/{self._rank}", 1))
        else:
            self._quietly(lambda: self._store.set(f"failed/{self._rank}", _name(error)))

    def explain(self, error: BaseException) -> RankError:
        """Which rank was lost, after a collective failed."""
        lost = self._find_lost()
        if lost is None:
            return RankError(
                f"A collective failed on rank {self._rank} although every rank is alive: {_first_line(error)}. The "
                f"ranks ran different programs, or the network failed. Compare their logs."
            )
        self._quietly(lambda: self._store.add(f"lost/{lost}", 1))
        return RankError(self._lost_message(lost))

    def _find_lost(self) -> int | None:
        before = self._counts()
        time.sleep(LOOK_SECONDS)
        after = self._counts()
        if before is None or after is None:
            return 0  # the store itself is gone with the process that holds it
        for rank in range(self._num_ranks):
            if self._count(f"lost/{rank}"):
                return rank
        silent = [rank for rank in range(self._num_ranks) if before[rank] == after[rank] and not self._has_left(rank)]
        return silent[0] if silent else None

    def _counts(self) -> list[int] | None:
        counts = [self._count(f"beat/{rank}") for rank in range(self._num_ranks)]
        return None if any(count is None for count in counts) else [count or 0 for count in counts]

    def _count(self, key: str) -> int | None:
        return self._quietly(lambda: self._store.add(key, 0))

    def _has_left(self, rank: int) -> bool:
        return bool(self._count(f"left/{rank}"))

    def _lost_message(self, lost: int) -> str:
        key = f"failed/{lost}"
        if not self._quietly(lambda: self._store.check([key])):
            return (
                f"Rank {lost} was lost in the middle of a step, noticed by rank {self._rank}. Its process ended or its "
                f"machine cannot be reached; the others cannot go on without its part. See its own log, then start "
                f"again from the last checkpoint."
            )
        error = self._quietly(lambda: self._store.get(key).decode())
        return (
            f"Rank {lost} failed with an error of its own, noticed by rank {self._rank}: {error}. The others cannot go "
            f"on without its part. See its own log, then start again from the last checkpoint."
        )

    def _quietly(self, ask: Callable[[], T]) -> T | None:
        """Ask the store; None when it is gone."""
        try:
            with self._lock:
                return ask()
        except RuntimeError:
            return None

    def _beat(self) -> None:
        self._quietly(lambda: self._store.add(f"beat/{self._rank}", 1))

    def _run(self) -> None:
        watched = {(self._rank + step) % self._num_ranks for step in (1, 2)} - {self._rank}
        while not self._stop.wait(BEAT_SECONDS):
            self._beat()
            for rank in watched:
                if self._is_silent(rank):
                    self._stop.wait(_GRACE_SECONDS)
                    if not self._stop.is_set():
                        print(self._lost_message(rank), file=sys.stderr, flush=True)
                        os._exit(SILENT_EXIT)  # the main thread waits inside a collective that nothing else can end

    def _is_silent(self, rank: int) -> bool:
        count = self._count(f"beat/{rank}")
        if count is None:
            return False
        known, since = self._last_seen.get(rank, (-1, 0.0))
        if count != known:
            self._last_seen[rank] = (count, time.monotonic())
            return False
        return time.monotonic() - since > SILENT_SECONDS and not self._has_left(rank)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
