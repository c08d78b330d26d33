"""The best plan for what is wished: the fastest, or the cheapest on a part of the machine; anew, or going on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time

from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.ir import Graph, LeafKind, Pipeline, Plan
from conjoin.machine import Machine, parts_of
from conjoin.search.constraints import make_constraints
from conjoin.search.contest import Progress, Stopped
from conjoin.search.refusals import TooSlow
from conjoin.search.searches import SEARCHES, Beginning, go_on, search_on
from conjoin.search.wishes import SearchResult, Wish, check_wish

_HOPEFUL = 2.0
"""Parts on which a named strategy costs more than the cheapest by this factor are not searched."""
_BETWEEN_COLLECTIONS = 200_000
"""Objects made between two looks for garbage; with Python's 700 they took a sixth of a search."""
_MAX_PARTS = 4
"""Parts that are searched, those with the cheapest named strategies first."""
_WORST = (Stopped.INTERRUPTED, Stopped.OUT_OF_TIME, Stopped.OUT_OF_STEPS, Stopped.CONVERGED)


def find_plan(
    graph: Graph,
    machine: Machine,
    costs: CostModel,
    wish: Wish | None = None,
    *,
    start: Sequence[Plan | Pipeline] | SearchResult = (),
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plan for training a model on a machine: never worse than the named strategies, or plans to start from.

    Ctrl-C ends the search, and the best plan so far is returned. Started from an earlier result for the same wish it
    goes on where that ended: from its plan, without what was tried, for what was left of the budgets.
    """
    wish = wish or Wish()
    check_wish(wish, tuple(SEARCHES))
    _check_batch(graph)
    if isinstance(start, SearchResult):
        left, begin = go_on(wish, start), Beginning((), start.plan, deepcopy(start.notes))
    else:
        left, begin = wish, Beginning(tuple(start))
    try:
        with _seldom_collected():
            if wish.objective == "cost":
                found = _Cheapest(graph, machine, costs, left, begin, progress).find()
            else:
                found = search_on(graph, machine, costs, left, begin, progress)
    except TooSlow as error:
        if isinstance(start, SearchResult):
            error.result = _added(start, error.result)
        raise
    return _added(start, found) if isinstance(start, SearchResult) else found


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Look for garbage in cycles seldom: a search makes many small objects that stay, and hardly a cycle."""
    before = gc.get_threshold()
    gc.set_threshold(_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _check_batch(graph: Graph) -> None:
    """UsageError where there is nothing to compute."""
    inputs = [leaf for leaf in graph.leaves if leaf.kind is LeafKind.INPUT and leaf.type.shape]
    if inputs and not any(leaf.type.num_elements for leaf in inputs):
        raise UsageError(
            f"A plan of {graph.name} was asked for with an input {inputs[0].name} of shape "
            f"{list(inputs[0].type.shape)}. It has 0 elements, so that a step would compute nothing. Give a batch with "
            f"samples in it."
        )


def _added(before: SearchResult, after: SearchResult) -> SearchResult:
    """What two searches found, one after the other; the named strategies may not all have been judged again."""
    if before.baseline and (not after.baseline or before.baseline_cost < after.baseline_cost):
        after = replace(
            after,
            baseline=before.baseline,
            baseline_seconds_per_step=before.baseline_seconds_per_step,
            baseline_devices=before.baseline_devices or (before.num_devices if after.objective == "cost" else 0),
        )
    later = [replace(i, elapsed=i.elapsed + before.search_seconds) for i in after.history]
    improved = [i for i in later if i.seconds < before.seconds_per_step] if after.objective == "time" else later
    return replace(
        after,
        search_seconds=before.search_seconds + after.search_seconds,
        cpu_seconds=before.cpu_seconds + after.cpu_seconds,
        num_plans=before.num_plans + after.num_plans,
        steps=before.steps + after.steps,
        history=(*before.history, *improved),
        certificate=after.certificate or (before.certificate if after.plan == before.plan else None),
    )


@dataclass
class _Cheapest:
    """A search for the least time times devices, over the parts of a machine, under way.

    On every part the fastest plan is the cheapest. First the named strategies are judged everywhere, then the parts
    on which they cost least share the time that is left.
    """

    graph: Graph
    machine: Machine
    costs: CostModel
    wish: Wish
    begin: Beginning
    progress: Callable[[Progress], None] | None
    started: float = field(default_factory=perf_counter)
    cpu_started: float = field(default_factory=process_time)
    steps: int = 0
    num_plans: int = 0
    interrupted: bool = False
    refused: list[StrategyError] = field(default_factory=list)

    def find(self) -> SearchResult:
        """The cheapest plan; StrategyError of the whole machine where there is none."""
        parts = [part for part in parts_of(self.machine) if self._can_keep(part)]
        self._check_plans(parts)
        named = self._judge_named(parts)
        found, stopped = dict(named), [Stopped.CONVERGED]
        chosen = self._hopeful(parts, named) if self.wish.search != "named" else []
        for position, part in enumerate(chosen):
            result = None if self.interrupted else self._search(part, self._left(len(chosen) - position))
            if result is None:
                continue
            stopped.append(result.stopped)
            if part not in found or result.seconds_per_step < found[part].seconds_per_step:
                found[part] = result
        stopped += [Stopped.INTERRUPTED] if self.interrupted else []
        return self._cheapest(named, found, min(stopped, key=_WORST.index))

    def _check_plans(self, parts: Sequence[Machine]) -> None:
        """UsageError where a plan to start from is for no part of the machine."""
        for plan in self.begin.plans:
            if all(plan.mesh != part.mesh for part in parts):
                raise UsageError(
                    f"A plan for {plan.mesh.told} was given to start from. Neither the machine "
                    f"{self.machine.name} nor a part of it that is considered has these axes. Leave the plan out."
                )

    def _can_keep(self, part: Machine) -> bool:
        """Whether a part has the axes that the wish names; UsageError where the whole machine has not."""
        try:
            make_constraints(self.graph, part.mesh, self.wish.fixed, self.wish.forbidden_axes)
        except UsageError:
            if part is self.machine:
                raise
            return False
        return True

    def _judge_named(self, parts: Sequence[Machine]) -> dict[Machine, SearchResult]:
        """The best named strategy on every part; when the time is over, on those that were reached. First come those
        for which there is a plan to start from: the result is not to be worse.
        """
        found: dict[Machine, SearchResult] = {}
        given = {plan.mesh for plan in (*self.begin.plans, self.begin.before) if plan is not None}
        for part in sorted((*parts[:1], *reversed(parts[1:])), key=lambda part: part.mesh not in given):
            enough = self._left(1).budget <= 0 and len(found) > 1 and any(map(self._is_quick, found.values()))
            if (enough and part.mesh not in given) or self.interrupted:
                break
            result = self._search(part, replace(self._left(1), search="named"))
            if result is not None:
                found[part] = result
        return found

    def _hopeful(self, parts: Sequence[Machine], named: dict[Machine, SearchResult]) -> list[Machine]:
        """Parts to search: where named strategies cost least; where none is quick enough, the quickest."""
        if not named:
            return list(parts[:1])
        quick = [cost_of(result) for result in named.values() if self._is_quick(result)]
        if not quick:
            return sorted(named, key=lambda part: named[part].seconds_per_step)[:_MAX_PARTS]
        near = [part for part, result in named.items() if cost_of(result) <= _HOPEFUL * min(quick)]
        return sorted(near, key=lambda part: cost_of(named[part]))[:_MAX_PARTS]

    def _is_quick(self, result: SearchResult) -> bool:
        return self.wish.at_most is None or result.seconds_per_step <= self.wish.at_most

    def _left(self, shares: int) -> Wish:
        """The wish for one of so many parts that are still to be searched."""
        spent, cpu = perf_counter() - self.started, process_time() - self.cpu_started
        wish = self.wish
        return replace(
            wish,
            objective="time",
            at_most=None,
            budget=max(0.0, wish.budget - spent) / shares,
            cpu_budget=None if wish.cpu_budget is None else max(0.0, wish.cpu_budget - cpu) / shares,
            steps=None if wish.steps is None else max(0, wish.steps - self.steps) // shares,
        )

    def _search(self, part: Machine, wish: Wish) -> SearchResult | None:
        """What is found on a part; None where nothing fits there."""
        offset = perf_counter() - self.started
        plans = tuple(plan for plan in self.begin.plans if plan.mesh == part.mesh)
        before = self.begin.before if self.begin.before and self.begin.before.mesh == part.mesh else None
        begin = replace(self.begin, plans=plans, before=before)
        try:
            found = search_on(self.graph, part, self.costs, wish, begin, self._told(part, offset))
        except StrategyError as error:
            self.refused.append(error)
            return None
        except KeyboardInterrupt:
            if not self.num_plans:
                raise
            self.interrupted = True
            return None
        self.interrupted = found.stopped is Stopped.INTERRUPTED
        self.steps += found.steps
        self.num_plans += found.num_plans
        return replace(found, history=tuple(replace(i, elapsed=i.elapsed + offset) for i in found.history))

    def _told(self, part: Machine, offset: float) -> Callable[[Progress], None] | None:
        if self.progress is None:
            return None
        show, wish = self.progress, self.wish

        def tell(now: Progress) -> None:
            doing, elapsed = f"{part.num_devices} devices, {now.doing}", now.elapsed + offset
            show(replace(now, elapsed=elapsed, budget_left=max(0.0, wish.budget - elapsed), doing=doing))

        return tell

    def _cheapest(
        self, named: dict[Machine, SearchResult], found: dict[Machine, SearchResult], stopped: Stopped
    ) -> SearchResult:
        if not found:
            raise self.refused[0]
        quick = [result for result in found.values() if self._is_quick(result)]
        if not quick:
            raise self._too_slow(min(found.values(), key=lambda result: result.seconds_per_step))
        best = min(quick, key=cost_of)
        usual = [result for result in named.values() if self._is_quick(result) and result.baseline]
        baseline = min(usual, key=cost_of, default=best)
        return replace(
            best,
            baseline=baseline.baseline,
            baseline_seconds_per_step=baseline.baseline_seconds_per_step,
            baseline_devices=baseline.num_devices,
            stopped=stopped,
            search_seconds=perf_counter() - self.started,
            cpu_seconds=process_time() - self.cpu_started,
            steps=self.steps,
            num_plans=self.num_plans,
            objective="cost",
            notes=self.begin.notes,
        )

    def _too_slow(self, fastest: SearchResult) -> TooSlow:
        assert self.wish.at_most is not None
        return TooSlow(
            f"A step of {self.graph.name} on {self.machine.name} or a part of it was to take "
            f"{self.wish.at_most * 1e3:.4g} ms at most. The fastest plan found ({fastest.plan.strategy}, on "
            f"{fastest.num_devices} devices) takes {fastest.seconds_per_step * 1e3:.4g} ms. Allow so long, or use a "
            f"larger machine.",
            fastest,
        )


def cost_of(result: SearchResult) -> float:
    """Seconds of a step times the devices that it takes."""
    return result.seconds_per_step * result.num_devices
