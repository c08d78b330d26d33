"""A folder of checkpoints is held by the training that writes to it: a second one at the same time is refused."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from conjoin.machine import reason_of

_TAKEN = (
    "Another one that is running keeps its own there, and each would go on from what the other wrote",
    "Wait for it, or name another folder",
)


class FolderHold:
    """A lock beside a folder, for as long as a process lives; nothing is left of it when it is let go."""

    def __init__(self, folder: str) -> None:
        target = Path(os.path.abspath(folder))
        self._path = target.with_name(f".{target.name}.lock")
        self._file: int | None = None

    def take(self) -> tuple[str, str] | None:
        """Why a training may not keep anything there, and what to do; None where it may, and holds it now."""
        while True:
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                return f"No file can be made beside it: {reason_of(error)}", "Name another folder"
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return _TAKEN
            if self._is_there(file):
                self._file = file
                return None
            os.close(file)  # the one before let go of it in between

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def let_go(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None
