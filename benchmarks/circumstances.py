"""Where and with what figures were taken, as a result file says it."""

from __future__ import annotations

import platform
import subprocess
from datetime import date

import torch


def circumstances(command: str, machine: str) -> dict[str, str]:
    """The command, the day, the commit, the versions, and the machine after its kind."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, encoding="utf-8", check=False)
    return {
        "command": command,
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {machine}",
    }
