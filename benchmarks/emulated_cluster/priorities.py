"""Who goes first on the cores of this host: the switch, then the ranks, in turns with each other, then other work."""

from __future__ import annotations

import os

_RANKS, _SWITCH = 1, 2
"""Priorities in real time; all are above normal work."""


def put_switch_first() -> bool:
    """Put this process before ranks that compute, as hardware would; whether that was allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_SWITCH))
    except PermissionError:
        return False
    return True


def go_ahead() -> None:
    """Put all threads of this process, now one, before all normal work, in turns with those of other ranks.

    Gloo serves connections by a thread that tries again and again while another one holds a connection's lock. A normal
    thread that wakes may take the core from the very one that holds it, and then tries until the kernel's next tick,
    4 ms at 250 Hz; in turns, nobody is interrupted by its equals.
    """
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_RANKS))
