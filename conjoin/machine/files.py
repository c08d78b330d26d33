"""How every file of the package is put in its place: written aside and then renamed, never half."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from stat import S_ISDIR, S_ISREG


def write_aside(path: Path, content: bytes) -> None:
    """Write a file beside its place, then rename it; the name beside is short, so that any name can be written."""
    target = place_of(path)
    aside = target.with_name(f".conjoin-{uuid.uuid4().hex}")
    try:
        with aside.open("xb") as file:
            file.write(content)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def place_of(path: Path) -> Path:
    """Where links lead; OSError for a device or a pipe there, since renaming would put a file in its place."""
    target = Path(os.path.realpath(path))
    try:
        mode = target.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    if not S_ISREG(mode):
        raise OSError("it is a directory" if S_ISDIR(mode) else "it is not a plain file")
    return target


def reason_of(error: OSError | ValueError) -> str:
    """Why a file could not be read or written, in the words of the system where it has some."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
