"""The door to the searches: a graph and a machine make the best plan that is found in the time given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.ir import Graph, Plan
from conjoin.machine import Machine
from conjoin.rules import Library
from conjoin.search.baselines import baselines
from conjoin.search.contest import Contest, Enough, Improvement, Outcome, Progress, Stopped, Variant, plan_of
from conjoin.search.descents import descend_everywhere, try_everything
from conjoin.search.hierarchy import first_rewrite_then_walk, search_in_levels
from conjoin.search.joint import JointSearch
from conjoin.search.placing_branches import place_branches
from conjoin.search.rewrites import ways_of
from conjoin.search.variants import as_variant, variants_of
from conjoin.search.walks import sample, walk_from_all
from conjoin.sim import OPTIMIZER_COPIES, MachinePrices, measure_memory

DEFAULT_BUDGET = 60.0
SEARCH_VERSION = 2
"""Raised when searches find other plans than before: what was found by an earlier one is then not remembered."""
_GIB = 2**30
_EARLY = 0.1
"""The part of the time in which branches of the best named strategy are tried beside each other, before all else."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a search."""

    search: str = "joint"
    budget: float = DEFAULT_BUDGET
    """Seconds; a search with none still returns the best named strategy."""
    optimizer: str = "adam"
    memory: int | None = None
    """Bytes of each device that may be used; None is all it has."""
    seed: int = 0
    steps: int | None = None
    """Plans that may be simulated; None is as many as there is time for."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan found, what it is compared with, and how the search went."""

    plan: Plan
    seconds_per_step: float
    peak_bytes: int
    baseline: str
    """The best named strategy, or a plan of the user's."""
    baseline_seconds_per_step: float
    stopped: Stopped
    search_seconds: float
    num_plans: int
    """Simulated."""
    history: tuple[Improvement, ...]

    @property
    def ratio(self) -> float:
        """How much faster than the baseline."""
        return self.baseline_seconds_per_step / self.seconds_per_step


Search = Callable[[Contest, Sequence[Outcome], Wish], None]


def _joint(contest: Contest, starts: Sequence[Outcome], wish: Wish) -> None:
    ways = ways_of(Library.shipped())
    aside = place_branches(contest, contest.elapsed + _EARLY * contest.time_left)
    try:
        JointSearch(contest, variants_of(contest.captured, starts), [as_variant(o) for o in starts], ways).run()
        found = place_branches(contest, contest.budget)
        if found is not None:
            contest.judge(found.entry, found.simulation)
    finally:  # also where the time is over
        if aside is not None:
            contest.judge(aside.entry, aside.simulation)
    if contest.best is not None:  # what only a timeline sees, such as overlap
        walk_from_all(contest, [contest.best], wish.seed)


def _named_only(contest: Contest, starts: Sequence[Outcome], wish: Wish) -> None:
    """The named strategies were judged already."""


def _variants(contest: Contest, starts: Sequence[Outcome]) -> tuple[Variant, ...]:
    return variants_of(contest.captured, starts)


SEARCHES: dict[str, Search] = {
    "joint": _joint,
    "unity": lambda contest, starts, wish: search_in_levels(contest, _variants(contest, starts)),
    "taso-then-flexflow": lambda contest, starts, wish: first_rewrite_then_walk(
        contest, _variants(contest, starts), wish.seed
    ),
    "mcmc": lambda contest, starts, wish: walk_from_all(contest, starts, wish.seed),
    "coordinate": lambda contest, starts, wish: descend_everywhere(contest, _variants(contest, starts), wish.seed),
    "exhaustive": lambda contest, starts, wish: try_everything(contest, _variants(contest, starts)),
    "random": lambda contest, starts, wish: sample(contest, _variants(contest, starts), wish.seed),
    "named": _named_only,
}


def search_names() -> tuple[str, ...]:
    """The searches that `find_plan` knows.

    >>> search_names()[0]
    'joint'
    """
    return tuple(SEARCHES)


def find_plan(
    graph: Graph,
    machine: Machine,
    costs: CostModel,
    wish: Wish | None = None,
    *,
    start: Sequence[Plan] = (),
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plan for training a model on a machine: never worse than the named strategies, or plans to start from.

    Ctrl-C ends the search, and the best plan so far is returned.
    """
    wish = wish or Wish()
    contest = open_contest(graph, machine, costs, wish, progress)
    stopped = Stopped.CONVERGED
    starts: list[Outcome] = []
    try:
        for plan in start:
            starts.append(contest.enter_plan(plan))
        for name, found in baselines(graph, machine):
            contest.tell(name)
            if found is not None:
                starts.append(contest.enter(found))
                contest.baseline = contest.best
        contest.check("the named strategies are judged")
        SEARCHES[wish.search](contest, starts, wish)
    except Enough as end:
        stopped = end.reason
    except KeyboardInterrupt:
        if contest.best is None:
            raise
        stopped = Stopped.INTERRUPTED
    if contest.best is None:
        raise _nothing_fits(contest, len(starts))
    return _result(contest, contest.best, stopped)


def open_contest(
    graph: Graph, machine: Machine, costs: CostModel, wish: Wish, progress: Callable[[Progress], None] | None = None
) -> Contest:
    """A contest for what is wished; UsageError where the wish makes no sense."""
    if wish.search not in SEARCHES:
        raise UsageError(
            f"The search {wish.search[:40]!r} was asked for. Known are {', '.join(SEARCHES)}. Name one of them."
        )
    if wish.optimizer not in OPTIMIZER_COPIES:
        raise UsageError(
            f"The optimizer {wish.optimizer[:40]!r} was asked for. Known are {', '.join(OPTIMIZER_COPIES)}. "
            f"Name the one that remembers as many tensors for a parameter as yours."
        )
    capacity = usable_bytes(machine, wish)
    prices = MachinePrices(machine, costs, wish.optimizer)
    return Contest(graph, machine, prices, wish.optimizer, capacity, wish.budget, progress, steps_left=wish.steps)


def usable_bytes(machine: Machine, wish: Wish) -> int:
    """Bytes that may be used of every device."""
    has = min(machine.device_type(rank).memory_bytes for rank in range(machine.num_devices))
    return has if wish.memory is None else min(has, wish.memory)


def _result(contest: Contest, best: Outcome, stopped: Stopped) -> SearchResult:
    baseline = contest.baseline or best
    return SearchResult(
        plan_of(best, contest.captured, contest.machine),
        best.seconds,
        best.peak_bytes or 0,
        baseline.entry.name,
        baseline.seconds,
        stopped,
        contest.elapsed,
        contest.num_entries,
        tuple(contest.history),
    )


def _nothing_fits(contest: Contest, num_plans: int) -> StrategyError:
    name, machine = contest.captured.name, contest.machine
    if contest.smallest is None or contest.smallest.peak_bytes is None:
        return StrategyError(
            f"No plan of {name} for {machine.name} was found; {num_plans} named strategies can be made. Most need "
            f"a batch that is not smaller than the number of devices. Try another batch size, or fewer devices."
        )
    need, (part, num_bytes) = contest.smallest.peak_bytes, _largest_part(contest, contest.smallest)
    return StrategyError(
        f"No plan of {name} was found that fits {machine.name}: the smallest ({contest.smallest.entry.name}) needs "
        f"{need / _GIB:.2f} GiB of a device, and {contest.capacity / _GIB:.2f} GiB may be used. Most of it, "
        f"{num_bytes / _GIB:.2f} GiB, is {part}. Use a smaller batch, more devices, or allow more memory."
    )


def _largest_part(contest: Contest, outcome: Outcome) -> tuple[str, int]:
    memory = measure_memory(outcome.simulation.program, contest.optimizer, contest.machine.device)
    parts = {
        "activations": memory.activations,
        "parameters": memory.parameters,
        "the optimizer's state": memory.optimizer_state,
    }
    return max(parts.items(), key=lambda part: part[1])
