"""What the user is told when something cannot be done: what was asked, why it cannot be, what to change."""

from __future__ import annotations


class ConjoinError(Exception):
    """A mistake or a limit the user can act on: the message says what was asked, why it cannot be, what to change."""


class CaptureError(ConjoinError):
    """A model that cannot be turned into a graph."""


class GraphError(ConjoinError):
    """A graph that is malformed, or a file that does not hold one."""


class PlanError(ConjoinError):
    """A plan that is malformed or not legal, or that does not fit the model, the machine or the ranks that run it."""


class ScheduleError(ConjoinError):
    """A pipeline schedule that is incomplete, cannot come to its end, or needs more memory than there is."""


class DeclarationError(ConjoinError):
    """What a user declares, proves or registers, and that is not so."""


class StrategyError(ConjoinError):
    """A named strategy that does not fit a model or a machine."""


class RankError(ConjoinError):
    """A rank that was lost, or that disagrees with the others."""

    ranks: tuple[int, ...] = ()
    """Those that were lost, where that is known."""


class CheckpointError(ConjoinError):
    """A checkpoint that cannot be written, is damaged, or does not fit."""


class UsageError(ConjoinError):
    """A request that names something which is not there."""
