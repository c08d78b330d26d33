"""What is told when a search finds nothing that keeps to what was asked: the tightest constraint, and what lifts it."""

from __future__ import annotations

from math import inf

from conjoin.errors import StrategyError, UsageError
from conjoin.ir import Pipeline, Plan, model_mark
from conjoin.search.contest import Contest
from conjoin.search.entries import Outcome
from conjoin.search.wishes import SearchResult, Wish
from conjoin.sim import measure_memory


def check_start(contest: Contest, plan: Plan | Pipeline) -> None:
    """UsageError where a plan to start from is of another model or for other devices."""
    machine, mark = contest.machine, model_mark(contest.captured)
    if plan.mesh != machine.mesh:
        raise UsageError(
            f"A plan for {plan.mesh.told} was given to start from. The machine {machine.name} has {machine.mesh.told}. "
            f"Make the plan for this machine."
        )
    if plan.model.fingerprint != mark.fingerprint:
        raise UsageError(
            f"A plan of {plan.model.name} was given to start from. It was made for another model or batch than this "
            f"{mark.name}, their fingerprints differ. Make the plan for this model and batch."
        )
    values = {leaf.name: leaf.data for leaf in contest.captured.leaves if leaf.data is not None}
    other = [leaf.name for leaf in plan.graph.leaves if leaf.data is not None and values.get(leaf.name) != leaf.data]
    if values and other:
        raise UsageError(
            f"A plan of {plan.model.name} was given to start from. It holds other values of the constant {other[0]} "
            f"than this {mark.name} has, and would compute with them. Make the plan for this model."
        )


def check_stages(contest: Contest, plan: Plan | Pipeline, stages: int | None) -> None:
    """UsageError where a plan to start from has another number of stages than was asked for, or cannot be compared."""
    has = len(plan.stages) if isinstance(plan, Pipeline) else 1
    if stages is not None and has != stages:
        raise UsageError(
            f"A search for {stages} stage{'' if stages == 1 else 's'} was to start from {plan.strategy[:60]!r}. That "
            f"has {has}. Leave one of the two out, or start from another plan."
        )
    if isinstance(plan, Pipeline) and contest.constraints:
        raise UsageError(
            f"The pipeline {plan.strategy[:60]!r} was given to start from, with layouts fixed or axes forbidden. These "
            f"are asked of plans of one stage: a stage has axes of its own. Leave one of the two out."
        )


def nothing_found(contest: Contest, num_plans: int, stages: int | None) -> StrategyError:
    """Why there is no plan at all."""
    if contest.smallest is not None and contest.smallest.peak_bytes is not None:
        return _nothing_fits(contest, contest.smallest, contest.smallest.peak_bytes)
    name, machine, constraints = contest.captured.name, contest.machine, contest.constraints
    if (stages or 1) > 1:
        return StrategyError(
            f"A plan of {name} in {stages} stages was asked for on {machine.name}, which has {machine.num_devices} "
            f"devices. None was found that fits into {_size(contest.capacity)} of each. Ask for another number of "
            f"stages, a larger batch or {_more(contest)}."
        )
    if constraints:
        asked, hint = [*map(str, constraints.fixed), *(f"{a} unused" for a in constraints.forbidden)], _lifted(contest)
        return StrategyError(
            f"No plan of {name} for {machine.name} was found that keeps to {', '.join(asked)[:300]}: {num_plans} were "
            f"tried. {hint} Ask for less of it{_without_stages(contest)}."
        )
    return StrategyError(
        f"No plan of {name} for {machine.name} was found; {num_plans} named strategies can be made. Most need "
        f"a batch that is not smaller than the number of devices. Try another batch size, fewer devices, or a longer "
        f"search."
    )


def _nothing_fits(contest: Contest, smallest: Outcome, need: int) -> StrategyError:
    hint = _lifted(contest)
    if contest.without is None:
        part, num_bytes = _largest_part(contest, smallest)
        hint = f"Most of it, {_size(num_bytes)}, is {part}."
    change = "Use a smaller batch, more devices," if contest.without is None else "Lift that constraint,"
    return StrategyError(
        f"No plan of {contest.captured.name} was found that fits {contest.machine.name}: the smallest "
        f"({smallest.entry.name}) needs {_size(need)} of a device for its tensors, and {_size(contest.capacity)} may "
        f"be used. {hint} {change} {_longer(contest)}or allow {_size(need)}{_without_stages(contest)}."
    )


def _without_stages(contest: Contest) -> str:
    """That pipelines were left out because of what was asked for."""
    bound = contest.constraints and contest.machine.num_devices > 1
    return "; pipelines are looked for only where no layout is fixed and no axis forbidden" if bound else ""


def _longer(contest: Contest) -> str:
    """What to change where the answer may hang on the time that there was."""
    return f"{_more(contest)}, " if contest.time_left <= 0 and contest.budget else ""


def _more(contest: Contest) -> str:
    """More of what a search ended by."""
    seconds = min(contest.budget, contest.cpu_budget)
    return "more steps" if seconds == inf else f"a budget of more than {seconds:.0f} s"


def _lifted(contest: Contest) -> str:
    """A sentence: what there would be without the constraint that is in the way."""
    found = contest.without
    if found is None:
        return "Nothing else was found that fits, either."
    broken = contest.constraints.broken_by(found.entry.variant.skeleton, found.entry.layouts)
    return f"Without {broken}, {found.entry.name} takes {_milliseconds(found.seconds)} a step and fits."


class TooSlow(StrategyError):
    """The fastest plan found takes longer than a step may; the search could go on from it."""

    def __init__(self, message: str, result: SearchResult) -> None:
        super().__init__(message)
        self.result = result


def check_seconds(contest: Contest, wish: Wish, result: SearchResult) -> None:
    """TooSlow where the fastest plan takes longer than a step may."""
    seconds = result.seconds_per_step
    if wish.at_most is None or seconds <= wish.at_most:
        return
    faster = contest.without is not None and contest.without.seconds <= wish.at_most
    hint = _lifted(contest) if faster else f"That is {seconds / wish.at_most:.2f} times as long."
    raise TooSlow(
        f"A step of {contest.captured.name} on {contest.machine.name} was to take {_milliseconds(wish.at_most)} at "
        f"most, and the fastest plan found ({result.plan.strategy}) takes {_milliseconds(seconds)}. {hint} Allow so "
        f"long, search for longer than {contest.elapsed:.0f} s, or use more devices.",
        result,
    )


def _size(num_bytes: float) -> str:
    """Bytes in the largest unit of which there is at least a tenth.

    >>> _size(2**30), _size(2**24), _size(500)
    ('1.00 GiB', '16.00 MiB', '0.49 KiB')
    """
    power = next((p for p in (3, 2) if num_bytes >= 2 ** (10 * p) / 10), 1)
    return f"{num_bytes / 2 ** (10 * power):.2f} {' KMG'[power]}iB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _largest_part(contest: Contest, outcome: Outcome) -> tuple[str, int]:
    memory = measure_memory(outcome.simulation.program, contest.optimizer, contest.machine.device)
    parts = {
        "activations": memory.activations,
        "parameters": memory.parameters,
        "the optimizer's state": memory.optimizer_state,
    }
    return max(parts.items(), key=lambda part: part[1])
