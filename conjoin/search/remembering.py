"""Plans that were found before, kept by what they were asked for: the same question is answered at once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conjoin.errors import ConjoinError, PlanError
from conjoin.ir import Graph, check_plan, fingerprint, plan_from_json, plan_to_json, read_json, write_file
from conjoin.machine import Machine
from conjoin.rules import operators_version
from conjoin.search.contest import Stopped
from conjoin.search.searching import SEARCH_VERSION, SearchResult, Wish

_FORMAT = "conjoin.found"
_VERSION = 1
_NUMBERS = ("seconds_per_step", "peak_bytes", "baseline_seconds_per_step", "search_seconds", "num_plans")


class Remembered:
    """Results of searches in a directory, one file for each question."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, graph: Graph, machine: Machine, wish: Wish, costs: str) -> SearchResult | None:
        """What was found for the same model, machine, costs and wish; a search that had converged serves any budget.

        A file that cannot be read, or is of another release, is as good as none.
        """
        for budget in (None, wish.budget):
            path = self._path(graph, machine, wish, budget, costs)
            if path.is_file():
                try:
                    return _from_json(read_json(path, "remembered plan", PlanError))
                except ConjoinError:
                    continue
        return None

    def keep(self, graph: Graph, machine: Machine, wish: Wish, costs: str, result: SearchResult) -> None:
        """Remember a result; one that was interrupted is not worth it."""
        if result.stopped is Stopped.INTERRUPTED:
            return
        budget = None if result.stopped is Stopped.CONVERGED else wish.budget
        path = self._path(graph, machine, wish, budget, costs)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(_to_json(result)), "remembered plan", PlanError)

    def _path(self, graph: Graph, machine: Machine, wish: Wish, budget: float | None, costs: str) -> Path:
        asked = {**asdict(replace(wish, budget=0.0)), "budget": budget}
        made_by = [_VERSION, SEARCH_VERSION, operators_version()]
        facts = [made_by, fingerprint(graph, constants=False), machine.speed_fingerprint(), costs, asked]
        return self._directory / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}.json"


def _to_json(result: SearchResult) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        **{name: getattr(result, name) for name in _NUMBERS},
        "baseline": result.baseline,
        "stopped": result.stopped.name,
        "plan": plan_to_json(result.plan),
    }


def _from_json(data: Any) -> SearchResult:
    try:
        if data["format"] != _FORMAT or data["version"] != _VERSION:
            raise ValueError("it is of another kind or release")
        seconds, peak, baseline_seconds, search_seconds, num_plans = (float(data[name]) for name in _NUMBERS)
        return SearchResult(
            check_plan(plan_from_json(data["plan"])),
            seconds,
            int(peak),
            str(data["baseline"]),
            baseline_seconds,
            Stopped[data["stopped"]],
            search_seconds,
            int(num_plans),
            (),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise PlanError(f"A remembered plan cannot be read: {error}. It was damaged. Search again.") from None
