"""Random draws: a process has one generator for each device, and threads that play ranks share it."""

from __future__ import annotations

import threading

drawing = threading.RLock()
"""Held while a generator is set, drawn from and put back."""
