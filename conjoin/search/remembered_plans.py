"""Plans that were found before, kept by what they were asked for: the same question is answered at once.

Which rules the library has is part of the question: what was found by a rule that is no longer there is no answer. So
are a user's own rules, and what users declare of operators.
A question is answered when its search had converged, or had spent as much as is allowed now. Otherwise what was found
is where a search goes on: files have what was tried. They are written aside and renamed, so that one which is
interrupted while it is written leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch

from conjoin.errors import ConjoinError, PlanError
from conjoin.ir import (
    Graph,
    Plan,
    check_pipeline,
    check_plan,
    declared_in,
    fingerprint,
    library_digest,
    model_mark,
    pipeline_from_json,
    pipeline_to_json,
    plan_from_json,
    plan_to_json,
    read_json,
    write_file,
)
from conjoin.machine import Machine
from conjoin.search.certificate import Certificate
from conjoin.search.contest import FOR_FINISHING, Stopped
from conjoin.search.notes import notes_from_json
from conjoin.search.pipeline_bound import PipelineBound
from conjoin.search.searches import go_on
from conjoin.search.wishes import SEARCH_VERSION, SearchResult, Wish

_log = logging.getLogger(__name__)
_FORMAT = "conjoin.found"
_VERSION = 6
_WHOLE = ("peak_bytes", "num_plans", "steps", "baseline_devices")
_NUMBERS = ("seconds_per_step", "baseline_seconds_per_step", "search_seconds", "cpu_seconds", "error", *_WHOLE)


class Remembered:
    """Results of searches in a directory, one file for each question."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, graph: Graph, machine: Machine, wish: Wish, costs: str) -> SearchResult | None:
        """What was found for the same model, machine, costs and wish, whatever its budgets.

        A file that cannot be read, or is of another release, is as good as none.
        """
        path = self._path(graph, machine, wish, costs)
        if not path.is_file():
            return None
        try:
            found = _from_json(read_json(path, "remembered plan", PlanError))
        except ConjoinError:
            return None
        same_mesh = found.plan.mesh == machine.mesh or wish.objective == "cost"
        return found if same_mesh and found.plan.model.fingerprint == model_mark(graph).fingerprint else None

    def keep(self, graph: Graph, machine: Machine, wish: Wish, costs: str, result: SearchResult) -> None:
        """Remember a result in place of what was known before; where that cannot be, the answer is no worse for it."""
        path = self._path(graph, machine, wish, costs)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(_to_json(result)), "remembered plan", PlanError)
        except (OSError, PlanError) as error:
            _log.warning("what was found is not remembered: %s", error)

    def _path(self, graph: Graph, machine: Machine, wish: Wish, costs: str) -> Path:
        asked = asdict(replace(wish, budget=0.0, cpu_budget=None, steps=None, at_most=None, rules=None))
        own = [wish.rules.digest] if wish.rules is not None else []
        made_by = [_VERSION, SEARCH_VERSION, library_digest(), torch.__version__, *own, *declared_in(graph)]
        facts: list[object] = [made_by, fingerprint(graph), machine.speed_fingerprint(), costs, asked]
        if wish.objective == "cost":
            facts.append(wish.at_most)  # by which another part of the machine is the right one
        return self._directory / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}.json"


def is_answer(found: SearchResult, wish: Wish) -> bool:
    """Whether a remembered result is all that a search for a wish would give: nothing is left, or no more time than a
    search keeps to finish its plan."""
    if wish.at_most is not None and found.seconds_per_step > wish.at_most:
        return False
    part, cpu_budget = 1 - FOR_FINISHING, inf if wish.cpu_budget is None else wish.cpu_budget
    spent = found.search_seconds >= part * wish.budget or found.cpu_seconds >= part * cpu_budget
    return found.stopped is Stopped.CONVERGED or spent or go_on(wish, found).steps == 0


def _to_json(result: SearchResult) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        **{name: getattr(result, name) for name in _NUMBERS},
        "baseline": result.baseline,
        "objective": result.objective,
        "stopped": result.stopped.name,
        "certificate": None if result.certificate is None else asdict(result.certificate),
        "notes": result.notes.to_json(),
        "plan": plan_to_json(result.plan) if isinstance(result.plan, Plan) else pipeline_to_json(result.plan),
    }


def _from_json(data: Any) -> SearchResult:
    try:
        if data["format"] != _FORMAT or data["version"] != _VERSION:
            raise ValueError("it is of another kind or release")
        numbers = {name: _number(data[name], int if name in _WHOLE else float) for name in _NUMBERS}
        plan = data["plan"]
        several = isinstance(plan, dict) and bool(plan.get("stages"))
        return SearchResult(
            plan=check_pipeline(pipeline_from_json(plan)) if several else check_plan(plan_from_json(plan)),
            baseline=str(data["baseline"]),
            stopped=Stopped[data["stopped"]],
            history=(),
            objective=str(data["objective"]),
            certificate=_certificate(data["certificate"]),
            notes=notes_from_json(data["notes"]),
            **numbers,  # type: ignore[arg-type]
        )
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise PlanError(f"A remembered plan cannot be read: {error}. It was damaged. Search again.") from None


def _number(value: Any, kind: type[int] | type[float]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value >= 0):
        raise ValueError(f"{value!r} is not a number from 0")
    return kind(value)


def _certificate(data: Any) -> Certificate | PipelineBound | None:
    if data is None:
        return None
    if "looked_at" in data:
        whole = {name: int(_number(data[name], int)) for name in ("looked_at", "among")}
        seconds = {name: _number(data[name], float) for name in ("step", "least_step", "computing")}
        return PipelineBound(**seconds, **whole)  # type: ignore[arg-type]
    numbers = {name: _number(data[name], float) for name in ("hidden", "seconds", "least", "step", "least_step")}
    memory = None if data["memory"] is None else int(_number(data["memory"], int))
    return Certificate(str(data["units"]), **numbers, is_exact=bool(data["is_exact"]), memory=memory)
