"""What is asked of a search, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conjoin.errors import UsageError
from conjoin.ir import Pipeline, Plan
from conjoin.machine import Machine
from conjoin.rules import OwnRules
from conjoin.search.certificate import Certificate
from conjoin.search.contest import Improvement, Stopped
from conjoin.search.notes import Notes
from conjoin.search.pipeline_bound import PipelineBound
from conjoin.sim import OPTIMIZER_COPIES

DEFAULT_BUDGET = 60.0
SEARCH_VERSION = 9
"""Raised when searches find other plans than before: what was found by an earlier one is then not remembered."""
OBJECTIVES = ("time", "cost")


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a search."""

    search: str = "joint"
    budget: float = DEFAULT_BUDGET
    """Seconds; a search with none still returns the best named strategy."""
    optimizer: str = "adam"
    memory: int | None = None
    """Bytes that tensors may take of each device, beside which a GPU has a context and workspaces; None is all it has
    but a reserve for these."""
    seed: int = 0
    steps: int | None = None
    """Plans that may be simulated, and sums worked out for substitutions; None is as many as there is time for."""
    cpu_budget: float | None = None
    """Seconds of this process beside those on the wall: on a shared host they say more of what was done."""
    at_most: float | None = None
    """Seconds that a training step may take."""
    objective: str = "time"
    """What is to be small: the `time` of a step, or its `cost`, which is time times the devices used."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Layouts of given tensors, as plan files name and write them: `{"fc.weight": "d0:S(0)"}`."""
    forbidden_axes: tuple[str, ...] = ()
    """Axes of the mesh over which nothing is split: all devices along them do the same."""
    rules: OwnRules | None = None
    """Substitutions of the user's own, proven, that are tried beside those of the library."""
    stages: int | None = None
    """How many stages the plan is to have; None is as many as are fastest, 1 is no pipeline."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan found, what it is compared with, and how the search went."""

    plan: Plan | Pipeline
    """A pipeline where several stages are faster, or alone fit."""
    seconds_per_step: float
    peak_bytes: int
    baseline: str
    """The best named strategy, or a plan of the user's; empty where none keeps to what was asked."""
    baseline_seconds_per_step: float
    stopped: Stopped
    search_seconds: float
    num_plans: int
    """Simulated."""
    history: tuple[Improvement, ...]
    cpu_seconds: float = 0.0
    """Of this process, spent on the search."""
    steps: int = 0
    """What `Wish.steps` counts."""
    certificate: Certificate | PipelineBound | None = None
    """How far the plan can be from the best, where that is known."""
    objective: str = "time"
    error: float = 0.0
    """The part by which the predicted seconds may be off."""
    baseline_devices: int = 0
    """Devices of the baseline where they can differ from the plan's; else 0."""
    notes: Notes = field(default_factory=Notes, compare=False, repr=False)
    """What was tried, for a search that goes on from here."""

    @property
    def dropped(self) -> Mapping[str, str]:
        """Substitutions that were not used, since something else came of them when they were rehearsed, and what."""
        return self.notes.dropped

    @property
    def num_devices(self) -> int:
        """How many devices the plan uses."""
        return self.plan.mesh.size

    @property
    def baseline_cost(self) -> float:
        """Seconds of the baseline, or for the objective `cost` those of all its devices."""
        devices = self.baseline_devices or self.num_devices if self.objective == "cost" else 1
        return devices * self.baseline_seconds_per_step

    @property
    def ratio(self) -> float:
        """How much faster than the baseline, or for the objective `cost` how much cheaper."""
        if not self.seconds_per_step:
            return 1.0  # a model in which nothing takes time
        return self.baseline_cost / (self.seconds_per_step * (self.num_devices if self.objective == "cost" else 1))


def check_wish(wish: Wish, searches: Sequence[str]) -> None:
    """UsageError where a wish makes no sense, whatever the model and machine."""
    for what, given, known in (
        ("search", wish.search, searches),
        ("objective", wish.objective, OBJECTIVES),
    ):
        if given not in known:
            raise UsageError(
                f"The {what} {given[:40]!r} was asked for. Known are {', '.join(known)}. Name one of them."
            )
    if wish.optimizer not in OPTIMIZER_COPIES:
        raise UsageError(
            f"The optimizer {wish.optimizer[:40]!r} was asked for. Known are {', '.join(OPTIMIZER_COPIES)}. "
            f"Name the one that remembers as many tensors for a parameter as yours."
        )
    limits = {"budget": wish.budget, "cpu_budget": wish.cpu_budget, "steps": wish.steps}
    for name, value in limits.items():
        if value is not None and not (isinstance(value, int | float) and value >= 0):
            raise UsageError(
                f"The limit {name}={value!r} was given. A limit is a number from 0. Give another, or leave it out."
            )
    for name, value in {"memory": wish.memory, "at_most": wish.at_most}.items():
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise UsageError(
                f"The limit {name}={value!r} was given. No plan keeps to a limit that is not a number above 0. Give "
                f"another, or leave it out."
            )
    _check_stages(wish)
    if not isinstance(wish.rules, OwnRules | None):
        raise UsageError(
            f"Substitutions were given as {type(wish.rules).__name__}. A search uses only those that are proven. Write "
            f"rules=conjoin.prove_rules('mine.toml')."
        )
    if not isinstance(wish.fixed, Mapping):
        raise UsageError(
            f"Layouts of tensors were given as {type(wish.fixed).__name__}. They are a mapping from names to layouts, "
            f"both as plan files write them. Write {{'fc.weight': 'd0:S(0)'}}."
        )


def _check_stages(wish: Wish) -> None:
    """UsageError where so many stages make no sense, or not with what else is wished."""
    if wish.stages is not None and not (isinstance(wish.stages, int) and wish.stages > 0):
        raise UsageError(
            f"A plan of {wish.stages!r} stages was asked for. It has a whole number of them, from 1. Give another, or "
            f"leave it out: then there are as many as are fastest."
        )
    if (wish.stages or 1) > 1 and (wish.fixed or wish.forbidden_axes or wish.search not in ("joint", "named")):
        raise UsageError(
            f"A plan of {wish.stages} stages was asked for together with layouts of tensors, axes to leave alone, or "
            f"the search {wish.search}. Stages have devices and axes of their own, and only the joint search looks for "
            f"them. Leave out one or the other."
        )


def usable_bytes(machine: Machine, wish: Wish) -> int:
    """Bytes that may be used of every device: what was asked for, if it has so much; else all but a reserve."""
    has = machine.usable_bytes
    return has if wish.memory is None else min(has, wish.memory)
