"""Where the ranks of this host come from: a process with everything imported and no threads, which forks when asked.

A process that has threads must not be forked: a lock that another thread held stays locked in the child for ever, and
the threads of OpenMP that a convolution made are missing there. So an interpreter is started once, with `exec`; it
imports what ranks need and does nothing else. It ends with the process that started it, and ends its children first.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

from conjoin.errors import RankError
from conjoin.runtime.torch_private import import_compiler, leave_operators_registered

_MESSAGE = struct.Struct("!2q")
_FORK, _STATUS = 0, 1
_MAX_FILES = 8
_END_SECONDS = 2.0
"""How long it may take to end by itself; it looks at nothing while it imports."""

Entry = Callable[[list[int]], None]
"""What a child does, with the files it was given."""


class ForkServer:
    """The other process, as seen by the one that started it."""

    def __init__(self, entry: Entry) -> None:
        assert isinstance(entry, FunctionType)
        ours, theirs = socket.socketpair()
        self._socket, self._lock = ours, threading.Lock()
        begin = (
            # The process that starts this one decides on Ctrl-C, for children too, and while this one still imports;
            # and on SIGTERM, which a scheduler sends to all processes of a job.
            "import signal; [signal.signal(x, signal.SIG_IGN) for x in (signal.SIGINT, signal.SIGTERM)]",
            "import gc; gc.disable()",  # a fifth of the time would go into looking through what stays
            f"import sys; sys.path[:] = {sys.path!r}",
            f"import {', '.join(_own_modules())}",
            f"from {__name__} import serve; from {entry.__module__} import {entry.__name__} as entry",
            f"serve({theirs.fileno()}, entry)",
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "\n".join(begin)], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def fork(self, files: list[int]) -> int:
        """A child that runs the entry with copies of these files; its process id."""
        return self._ask(_FORK, 0, files)[0]

    def status(self, process: int) -> int | None:
        """The exit code of a child, negative for a signal; None while it runs. Its id is its own until then."""
        over, code = self._ask(_STATUS, process, [])
        return code if over else None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the other process and all children that it still has."""
        atexit.unregister(self.close)
        self._socket.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _forget(self) -> None:
        """In a fork of this process: the server is not its own, and must not be kept from ending."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.returncode = 0

    def _ask(self, kind: int, argument: int, files: list[int]) -> tuple[int, int]:
        with self._lock:
            try:
                socket.send_fds(self._socket, [_MESSAGE.pack(kind, argument)], files)
                answer = self._socket.recv(_MESSAGE.size, socket.MSG_WAITALL)
            except BaseException as error:  # an interrupt too: whose answer comes next would not be known any more
                self.close()
                if isinstance(error, OSError):
                    raise _gone() from error
                raise
        if len(answer) != _MESSAGE.size:
            self.close()
            raise _gone()
        first, second = _MESSAGE.unpack(answer)
        return first, second


def _own_modules() -> list[str]:
    """What this process has of the package: most of it is named in what ranks are sent, and would be loaded by each."""
    package = __name__.partition(".")[0]
    return [name for name in sorted(sys.modules) if name.partition(".")[0] == package]


def _gone() -> RankError:
    return RankError(
        "The process that starts ranks ended, and its ranks end with it. It was killed, or could not import conjoin; "
        "then its message stands above. Start again from the last checkpoint."
    )


def serve(handle: int, entry: Entry) -> None:
    """Fork for the process at the other end of a socket until it is gone; returns in the children, too."""
    import_compiler()
    leave_operators_registered()
    gc.collect()
    gc.freeze()  # children share what is here already
    gc.enable()
    children: set[int] = set()
    with socket.socket(fileno=handle) as launcher:
        while True:
            message, files, *_ = _receive(launcher)
            if len(message) != _MESSAGE.size:
                break
            kind, argument = _MESSAGE.unpack(message)
            if kind == _STATUS:
                launcher.sendall(_MESSAGE.pack(*_status(argument, children)))
                continue
            child = os.fork()
            if child == 0:
                launcher.close()
                return entry(files)
            children.add(child)
            for file in files:
                os.close(file)
            launcher.sendall(_MESSAGE.pack(child, 0))
    for child in children:
        os.kill(child, signal.SIGKILL)
    return None


def _receive(launcher: socket.socket) -> Any:
    try:
        return socket.recv_fds(launcher, _MESSAGE.size, _MAX_FILES)
    except ConnectionError:
        return b"", []


def _status(child: int, children: set[int]) -> tuple[int, int]:
    found, status = os.waitpid(child, os.WNOHANG)
    if not found:
        return 0, 0
    children.discard(child)
    return 1, os.waitstatus_to_exitcode(status)


_servers: dict[int, ForkServer] = {}
"""That of this process, by its id: a fork of this process has none until it starts its own."""


def server_for(entry: Entry) -> ForkServer:
    """The server of this process; the first call starts it, which takes as long as importing torch."""
    held = _servers.get(os.getpid())
    if held is None or not held.is_alive:
        _servers[os.getpid()] = held = ForkServer(entry)
    return held
