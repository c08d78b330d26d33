"""SIGTERM, with which schedulers end jobs, asks a training to stop after its step; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

STOPPED = 128 + signal.SIGTERM
"""The exit code of a training that was asked to stop."""
_SAME_SECONDS = 2.0
"""Signals within this time are one: a job's processes get it from the scheduler, and from whoever started them too."""


class StopRequest:
    """While it is open, whether this process was asked to stop."""

    def __init__(self) -> None:
        self.is_made = False
        self._first = 0.0
        self._before: object = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]  # what it was

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_made and time.monotonic() - self._first > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.is_made:
            self.is_made, self._first = True, time.monotonic()
