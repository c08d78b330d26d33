"""`python -m conjoin`, and the script `conjoin`: a process that Ctrl-C ends with code 130 at any moment."""

import atexit
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130


def be_command() -> NoReturn:
    """Run a command and end with its exit code; once it is over Ctrl-C does not disturb its end."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
        signal.signal(signal.SIGINT, note)
    try:
        from conjoin.cli import main

        code = main()
    except BaseException as error:  # while it was loaded, or for the second time
        if not came and not isinstance(error, KeyboardInterrupt):
            raise
        # Modules in C that were being imported lose the interrupt, and fail with something else.
        print("stopped", file=sys.stderr)
        code = _INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code == _INTERRUPTED:
        _end(code)
    sys.exit(code)


def _end(code: int) -> NoReturn:
    """End with this code: where an interrupt went through `exec`, the interpreter would end by the signal instead."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # nobody reads on, or it was closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    be_command()
