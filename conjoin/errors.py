"""What the user is told when something cannot be done: what was asked, why it cannot be, what to change."""

from __future__ import annotations


class ConjoinError(Exception):
    """A mistake or a limit the user can act on: the message says what was asked, why it cannot be, what to change."""


class CaptureError(ConjoinError):
    """A model that cannot be turned into a graph."""


class GraphError(ConjoinError):
    """A graph that is malformed, or a file that does not hold one."""


class UsageError(ConjoinError):
    """A request that names something which is not there."""
