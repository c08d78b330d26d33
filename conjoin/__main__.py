"""`python -m conjoin`, and the script `conjoin`: a process that Ctrl-C ends with code 130 at any moment."""

import signal
import sys
from typing import NoReturn

_INTERRUPTED = 130


def be_command() -> NoReturn:
    """Run a command and end with its exit code; once it is over Ctrl-C does not disturb its end."""
    try:
        from conjoin.cli import main

        code = main()
    except KeyboardInterrupt:  # while it was loaded, or for the second time
        print("stopped", file=sys.stderr)
        code = _INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    be_command()
