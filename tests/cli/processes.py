"""`python -m` in a process of its own that need not import torch and conjoin first: a fork of one that has.

It is first in a group of its own, has a folder, an environment and an end of its own, and nothing in it is as a test
has changed it. What starts its ranks, if it has any, need not import them either, and does all else that it does in an
interpreter of its own (as for the ranks of the tests themselves).
"""

from __future__ import annotations

import gc
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from conjoin.runtime.ranks import fork_server, rank_processes
from conjoin.runtime.ranks.fork_server import server_for
from tests.waiting import HUNG_SECONDS

_LOOK_SECONDS = 0.01
COLLECTED_AT = 400_000, 50, 100
"""At what thresholds tests and what they fork look for garbage: seldom, since there is much that stays."""


class Forked:
    """A module that runs in a process of its own, with as much of `subprocess.Popen` as tests ask for."""

    def __init__(self, folder: Path, module: str, words: Sequence[str]) -> None:
        self._server = server = server_for(begin_either)
        self.returncode: int | None = None
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self.stdout = os.fdopen(out, encoding="utf-8")
        self.stderr = os.fdopen(err, encoding="utf-8")
        with tempfile.TemporaryFile() as told:
            pickle.dump((str(folder), dict(os.environ), module, list(words)), told)
            told.flush()
            self.pid = server.fork([told.fileno(), to_out, to_err])
        os.close(to_out)
        os.close(to_err)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it still prints, until it ends."""
        with ThreadPoolExecutor(2) as readers, self.stdout, self.stderr:
            out, err = (readers.submit(stream.read) for stream in (self.stdout, self.stderr))
            printed = out.result(timeout), err.result(timeout)
        until = time.monotonic() + timeout
        while (code := self._server.status(self.pid)) is None:
            assert time.monotonic() < until, "it prints no more, and does not end"
            time.sleep(_LOOK_SECONDS)
        self.returncode = code
        return printed


def begin_either(files: list[int]) -> None:
    """In the fork: be a rank, which has four files, or a command."""
    gc.set_threshold(*COLLECTED_AT)
    (rank_processes._begin if len(files) == 4 else begin)(files)


def begin(files: list[int]) -> None:
    """In the fork: be what `python -m` is."""
    os.setsid()
    told, out, err = files
    with open(told, "rb") as file:
        file.seek(0)
        folder, environment, module, words = pickle.load(file)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, folder)
    sys.argv = [module, *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fork_server.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=Interpreter, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Interpreter:
    """As much of `subprocess.Popen` as the server of ranks asks for: `python -c`, in a fork that has all modules."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], stdin: int) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                (kept,) = pass_fds
                os.closerange(3, kept)
                os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
                exec(command[2], {})
            finally:
                os._exit(0)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float = HUNG_SECONDS) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("python", timeout)
            time.sleep(_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
