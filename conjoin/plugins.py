"""Packages that extend conjoin: what they register is loaded when something is asked for that nobody here knows.

A package names a module, or a function without parameters, as an entry point of the group `conjoin.plugins`. Nothing is
loaded when conjoin is imported.
"""

from __future__ import annotations

import logging

GROUP = "conjoin.plugins"
_log = logging.getLogger(__name__)
_loaded: dict[str, str] = {}
"""The entry points that were loaded in this process, and what they name."""
_asked: list[str] = []
"""Why they were looked for; once in a process is enough."""


def load_plugins(wanted: str) -> bool:
    """Load all packages that extend conjoin, since something is not known; whether any was loaded just now."""
    if _asked:
        return False
    from importlib.metadata import entry_points  # takes a while, and is seldom needed

    _asked.append(wanted)
    for entry in entry_points(group=GROUP):
        try:
            made = entry.load()
            if callable(made):
                made()
        except (Exception, SystemExit) as error:  # a stranger's package may raise anything; it is told
            _log.warning("the plugin %s is not used: %s: %s", entry.name, type(error).__name__, str(error)[:200])
        else:
            _loaded[entry.name] = entry.value
    return bool(_loaded)


def forget_plugins() -> None:
    """Look for packages again when something is not known the next time: one was installed meanwhile."""
    _asked.clear()
