"""All named strategies and searches side by side: predicted step, where it goes, memory, seconds of search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.ir import Graph, Pipeline, Plan
from conjoin.machine import Machine
from conjoin.search.baselines import baseline_names
from conjoin.search.best_plan import find_plan
from conjoin.search.constraints import make_constraints
from conjoin.search.contest import NOT_TRIED, Progress, Stopped
from conjoin.search.named_pipelines import make_pipeline
from conjoin.search.named_plans import make_plan
from conjoin.search.searches import search_names
from conjoin.search.strategies import PIPELINE, read_request
from conjoin.search.wishes import Wish, check_wish, usable_bytes
from conjoin.sim import PipelinePrediction, Prediction, predict, predict_pipeline, take_apart


@dataclass(frozen=True, slots=True)
class Row:
    """One way to make a plan, and what it comes to; without a prediction, why there is none."""

    name: str
    search_seconds: float
    prediction: Prediction | PipelinePrediction | None = None
    capacity: int = 0
    """Bytes that may be used of a device."""
    reason: str = ""
    stopped: Stopped | None = None
    """Why a search ended."""

    @property
    def fits(self) -> bool:
        return self.prediction is not None and self.prediction.memory.peak <= self.capacity

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        found = self.prediction
        if found is None:
            return {"name": self.name, "search_seconds": self.search_seconds, "reason": self.reason}
        parts = found.breakdown
        return {
            "name": self.name,
            "search_seconds": self.search_seconds,
            "stopped": None if self.stopped is None else self.stopped.value,
            "seconds_per_step": found.seconds,
            "expected_error": found.error,
            "forward": parts.forward,
            "backward": parts.backward,
            "update": parts.update,
            "exposed": parts.exposed,
            "waiting": parts.waiting,
            "hidden": parts.hidden,
            "peak_bytes": found.memory.peak,
            "fits": self.fits,
        }


def compare_plans(  # noqa: PLR0913 – what may be put side by side
    graph: Graph,
    machine: Machine,
    costs: CostModel,
    wish: Wish,
    searches: Sequence[str],
    *,
    strategies: Sequence[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Row]:
    """A row for every strategy and search on the whole machine, the fastest that fit first; without strategies all
    named ones, with the degrees that people try.

    Ctrl-C ends the comparison: what there is of it is returned, and the rest as not tried.
    """
    for name in (wish.search, *searches):
        check_wish(replace(wish, search=name), search_names())
    capacity = usable_bytes(machine, wish)
    constraints = make_constraints(graph, machine.mesh, wish.fixed, wish.forbidden_axes)
    named = baseline_names(machine.mesh) if strategies is None else dict.fromkeys(strategies)
    ways: list[tuple[str, Callable[[], Made]]] = [(name, partial(_make, graph, machine, costs, name)) for name in named]
    for search in searches:
        asked = replace(wish, search=search, objective="time")
        ways.append((f"search: {search}", partial(_find, graph, machine, costs, asked, progress)))
    rows: list[Row] = []
    try:
        for name, make in ways:
            started = perf_counter()
            try:
                plan, stopped = make()
                took = perf_counter() - started
                if isinstance(plan, Pipeline):
                    seen = predict_pipeline(plan, machine, costs, wish.optimizer)
                    rows.append(Row(name, took, seen, capacity))
                    continue
                broken = constraints.broken_by(*take_apart(plan)) if constraints else None
                if broken is not None:
                    rows.append(Row(name, took, reason=f"It does not keep to {broken}."))
                    continue
                found = predict(plan, machine, costs, wish.optimizer)
                rows.append(Row(name, took, found, capacity, stopped=stopped))
                if stopped is Stopped.INTERRUPTED:
                    break
            except StrategyError as error:
                rows.append(Row(name, perf_counter() - started, reason=str(error)))
    except KeyboardInterrupt:
        if not rows:
            raise
    rows += [Row(name, 0.0, reason=NOT_TRIED) for name, _ in ways[len(rows) :]]
    return sorted(rows, key=lambda r: (r.prediction is None, not r.fits, r.prediction.seconds if r.prediction else 0.0))


Made = tuple[Plan | Pipeline, Stopped | None]


def _make(graph: Graph, machine: Machine, costs: CostModel, strategy: str) -> Made:
    if read_request(strategy).name == PIPELINE:
        return make_pipeline(graph, machine, strategy, costs), None
    return make_plan(graph, machine, strategy), None


def _find(
    graph: Graph, machine: Machine, costs: CostModel, wish: Wish, progress: Callable[[Progress], None] | None
) -> Made:
    found = find_plan(graph, machine, costs, wish, progress=progress)
    return found.plan, found.stopped
