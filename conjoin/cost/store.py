"""A file of measurements that many processes may write at once and any of them may be killed in the midst of it.

SQLite with a rollback journal: every measurement is a transaction of its own, a writer that dies leaves a journal from
which the next one restores the file, and the file works where shared memory between processes does not. A file that is
damaged is set aside under another name, never overwritten or deleted; one that belongs to somebody else is refused.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from conjoin.cost.measurement import Absence, Measurement, Outcome
from conjoin.errors import UsageError

_log = logging.getLogger("conjoin")

VERSION = 1
_APPLICATION = 0x436F6E6A  # "Conj": tells our files from other programs' databases
_PATIENCE_SECONDS = 30.0
MAX_FILE_BYTES = 2**31
MAX_NAME_LENGTH = 200
_TABLE = f"""
create table measurements (
    device text not null check (length(device) between 1 and {MAX_NAME_LENGTH}),
    torch text not null check (length(torch) between 1 and {MAX_NAME_LENGTH}),
    key text not null,
    forward real, backward real, host_forward real, host_backward real, spread real,
    failure text,
    taken text not null,
    primary key (device, torch, key)
) without rowid
"""
_COLUMNS = "key, forward, backward, host_forward, host_backward, spread, failure"


class MeasurementStore:
    """Measurements of many devices in one file, by device, torch version and key; use it in one process and thread."""

    def __init__(self, path: str | Path, *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """Open the file, or make it; who else holds it is waited for so long."""
        self.path = Path(path)
        self._patience = patience_seconds
        self._connection = self._open()

    def __enter__(self) -> MeasurementStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; what was added is in it already."""
        self._connection.close()

    def add(self, device: str, torch_version: str, outcomes: Iterable[Outcome]) -> None:
        """Keep outcomes, all or none; the latest of a key replaces those before."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        rows = [(device, torch_version, *_row(outcome), now) for outcome in outcomes]
        with self._told("written to"):
            self._connection.execute("begin immediate")
            try:
                marks = ", ".join("?" * 10)
                statement = f"insert or replace into measurements (device, torch, {_COLUMNS}, taken) values ({marks})"
                self._connection.executemany(statement, rows)
                self._connection.execute("commit")
            except BaseException:
                self._connection.execute("rollback")
                raise

    def find(self, device: str, torch_version: str, key: str) -> Outcome | None:
        """What is known of one key."""
        query = f"select {_COLUMNS} from measurements where device = ? and torch = ? and key = ?"
        with self._told("read"):
            rows = self._connection.execute(query, (device, torch_version, key)).fetchall()
        return self._outcome(rows[0]) if rows else None

    def outcomes(self, device: str, torch_version: str | None = None) -> list[Outcome]:
        """All that is known of a device, with one version of torch or (None) the latest taken with any."""
        query = f"select {_COLUMNS} from measurements where device = ? and (? is null or torch = ?) order by taken"
        with self._told("read"):
            rows = self._connection.execute(query, (device, torch_version, torch_version)).fetchall()
        return list({row[0]: self._outcome(row) for row in rows}.values())

    def devices(self) -> tuple[tuple[str, str], ...]:
        """The devices and torch versions that there are measurements of."""
        with self._told("read"):
            return tuple(self._connection.execute("select distinct device, torch from measurements order by 1, 2"))

    def _outcome(self, row: tuple[Any, ...]) -> Outcome:
        key, *numbers, failure = row
        try:
            return Measurement(key, *numbers) if failure is None else Absence(key, failure)
        except ValueError as error:
            raise UsageError(
                f"The measurements in {str(self.path)!r} were asked for. One of them is malformed: {error}. "
                f"Move the file away, and measure again."
            ) from None

    def _open(self) -> sqlite3.Connection:
        self._check_size()
        try:
            return self._connect()
        except sqlite3.OperationalError as error:
            raise self._error("opened", error) from None
        except sqlite3.DatabaseError:
            self._set_aside()
        with self._told("opened"):
            return self._connect()

    def _check_size(self) -> None:
        try:
            size = self.path.stat().st_size
        except OSError:
            return  # not there yet, or not reachable, which opening will tell
        if size > MAX_FILE_BYTES:
            raise UsageError(
                f"The measurements in {str(self.path)!r} were to be opened. The file holds {size:,} bytes, the limit "
                f"is {MAX_FILE_BYTES:,}. Move it away, or set CONJOIN_COSTS to another path."
            )

    def _connect(self) -> sqlite3.Connection:
        """A connection to a file that is known to be ours, whole, and of this version."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from None
        connection = sqlite3.connect(self.path, timeout=self._patience, isolation_level=None)
        try:
            if self._read_marks(connection) == (0, 0):
                self._create(connection)
            self._check_marks(*self._read_marks(connection))
            found = connection.execute("pragma quick_check(1)").fetchone()
            if found != ("ok",):
                raise sqlite3.DatabaseError(str(found))
            connection.execute("select count(*) from measurements where torch is null").fetchone()
        except BaseException:
            connection.close()
            raise
        return connection

    def _read_marks(self, connection: sqlite3.Connection) -> tuple[int, int]:
        ((application,), (version,)) = (connection.execute(f"pragma {name}").fetchone() for name in _MARKS)
        return int(application), int(version)

    def _create(self, connection: sqlite3.Connection) -> None:
        """Make the table in a new file; of several processes that try, one does."""
        connection.execute("begin immediate")
        try:
            tables = connection.execute("select count(*) from sqlite_master").fetchone()
            if tables == (0,):
                connection.execute(_TABLE)
                connection.execute(f"pragma application_id = {_APPLICATION}")
                connection.execute(f"pragma user_version = {VERSION}")
            connection.execute("commit")
        except BaseException:
            connection.execute("rollback")
            raise

    def _check_marks(self, application: int, version: int) -> None:
        if application != _APPLICATION:
            raise UsageError(
                f"The measurements in {str(self.path)!r} were to be opened. The file is a database of another program. "
                f"Set CONJOIN_COSTS to another path."
            )
        if version != VERSION:
            raise UsageError(
                f"The measurements in {str(self.path)!r} were to be opened. Their format version is {version}, and "
                f"this release of conjoin reads version {VERSION}. "
                f"Move the file away, or set CONJOIN_COSTS to another path."
            )

    def _set_aside(self) -> None:
        """Rename a damaged file and its journal; of several processes that find it so, one does."""
        try:
            with open(self.path.with_name(f"{self.path.name}.lock"), "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._is_whole():
                    return
                stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
                aside = self.path.with_name(f"{self.path.name}.corrupt-{stamp}")
                for ending in ("-journal", "-wal", "-shm", ""):
                    part = self.path.with_name(self.path.name + ending)
                    if part.exists():
                        os.rename(part, aside.with_name(aside.name + ending))
        except OSError as error:
            raise self._error("opened", error) from None
        _log.warning("%s is damaged and was set aside as %s; measurements begin anew.", self.path, aside.name)

    def _is_whole(self) -> bool:
        """Whether another process has put a good file there meanwhile."""
        try:
            self._connect().close()
        except sqlite3.DatabaseError:
            return False
        return True

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:
            raise self._error(what, error) from None

    def _error(self, what: str, error: Exception) -> UsageError:
        reason = str(error).rstrip(".")[:200]
        if "locked" in reason:
            reason = f"another process held it for more than {self._patience:g} seconds"
        return UsageError(
            f"The measurements in {str(self.path)!r} could not be {what}. The reason is: {reason}. "
            f"See who else uses the file and whether it may be written, or set CONJOIN_COSTS to another path."
        )


_MARKS = ("application_id", "user_version")


def _row(outcome: Outcome) -> tuple[Any, ...]:
    match outcome:
        case Measurement(key, forward, backward, host_forward, host_backward, spread):
            return key, forward, backward, host_forward, host_backward, spread, None
        case Absence(key, reason):
            return key, None, None, None, None, None, reason
