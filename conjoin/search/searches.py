"""The door to the searches: a graph and a machine make the best plan that is found in the time given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf

from conjoin.cost import CostModel
from conjoin.ir import Graph, Mark, Pipeline, Plan
from conjoin.machine import Machine
from conjoin.rules import Library
from conjoin.search.baselines import baselines, least_bytes, stored_otherwise
from conjoin.search.branch_places import with_branches_aside
from conjoin.search.certificate import Certificate, certify
from conjoin.search.chunk_count import try_chunks
from conjoin.search.constraints import make_constraints
from conjoin.search.contest import Contest, Enough, Progress, Stopped
from conjoin.search.entries import Outcome, Variant, plan_of
from conjoin.search.exact.space import OVERLAPS
from conjoin.search.joint import JointSearch
from conjoin.search.kept_count import try_keeping
from conjoin.search.memory_front import relieve_front
from conjoin.search.micro_batches import Fitting
from conjoin.search.named_relief import relieve_by_name
from conjoin.search.notes import Notes
from conjoin.search.papers.descents import descend_everywhere, try_everything
from conjoin.search.papers.hierarchy import first_rewrite_then_lay_out, first_rewrite_then_walk, search_in_levels
from conjoin.search.papers.walks import sample, walk_from_all
from conjoin.search.pipeline_bound import PipelineBound
from conjoin.search.refusals import check_seconds, check_stages, check_start, nothing_found
from conjoin.search.relief import relieve
from conjoin.search.rewrites import RuleWay, ways_of
from conjoin.search.stages.contest_entry import enter_pipeline, search_stages
from conjoin.search.variants import as_variant, variants_of
from conjoin.search.wishes import SearchResult, Wish, check_wish, usable_bytes
from conjoin.sim import OPTIMIZER_COPIES, MachinePrices, break_down, expected_error

_GRACE_SECONDS = 1.0
"""How long after its time a search may still judge named strategies, as far as can be told, or look for what fits."""
_LATE = 0.05
"""By which part of its time a search may be late beyond that where nothing fits yet."""
_FOR_NAMED = 0.5
"""The part of the time that is left to the search where a named strategy would be the fastest and does not fit."""
_FIRST_NAMED = 3
"""After how many that do not fit these are taken in micro-batches: something that fits is found early."""
_FOR_FRONT = 0.3
"""The part of the time left to random changes in which what they find is relieved, where memory decides."""
_NEARLY_ALL = 0.9
"""Of the time left: some is kept to finish the best plan."""
_SLOW = 1.3
"""How much slower than the best a named strategy is that is not tried again with its parameters stored otherwise."""

Search = Callable[[Contest, Sequence[Outcome], Wish], None]


def _joint(contest: Contest, starts: Sequence[Outcome], wish: Wish) -> None:
    search = JointSearch(contest, _variants(contest, starts), [as_variant(o) for o in starts], _ways(wish))
    with_branches_aside(contest, search.run)
    best = contest.best or contest.smallest  # what only a timeline sees, such as overlap and peaks of memory
    if best is not None:
        kept = _FOR_FRONT if contest.memory_decides else 0.0
        walk_from_all(contest, [best, *starts], wish.seed, kept)
        relieve_front(contest, contest.share(_NEARLY_ALL))


def _named_only(contest: Contest, starts: Sequence[Outcome], wish: Wish) -> None:
    """The named strategies were judged already."""


def _ways(wish: Wish) -> tuple[RuleWay, ...]:
    """The substitutions of the library, and a user's own."""
    return _ways_of(Library.shipped(), wish.rules)


_ways_of = lru_cache(ways_of)


def _variants(contest: Contest, starts: Sequence[Outcome]) -> tuple[Variant, ...]:
    return variants_of(contest.captured, [*(outcome.entry for outcome in starts), *contest.slow.values()])


SEARCHES: dict[str, Search] = {
    "joint": _joint,
    "unity": lambda contest, starts, wish: search_in_levels(contest, _variants(contest, starts), _ways(wish)),
    "sequential": lambda contest, starts, wish: first_rewrite_then_lay_out(
        contest, _variants(contest, starts), _ways(wish), wish.seed
    ),
    "taso-then-flexflow": lambda contest, starts, wish: first_rewrite_then_walk(
        contest, _variants(contest, starts), _ways(wish), wish.seed
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


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a search begins with besides the named strategies."""

    plans: tuple[Plan | Pipeline, ...] = ()
    """Of the user's: the result is compared with them."""
    before: Plan | Pipeline | None = None
    """The best of an earlier search, which this one goes on with."""
    notes: Notes = field(default_factory=Notes)
    """What that has tried; what this one tries is added."""


def search_on(
    graph: Graph,
    machine: Machine,
    costs: CostModel,
    wish: Wish,
    begin: Beginning,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The fastest plan that is found on all devices of a machine: never worse than what it begins with."""
    contest = open_contest(graph, machine, costs, wish, progress)
    contest.notes = begin.notes
    stopped = Stopped.CONVERGED
    starts, fitting = list[Outcome](), Fitting(contest)
    try:
        if (wish.stages or 1) > 1:
            _look_for_stages(contest, begin, wish, costs)
        else:
            _look(fitting, begin, wish, starts, costs)
    except Enough as end:
        stopped = end.reason
    except KeyboardInterrupt:
        if contest.least_seconds == inf:
            raise
        stopped = Stopped.INTERRUPTED
    if stopped is not Stopped.INTERRUPTED and not _relieve_last(fitting):
        stopped = Stopped.INTERRUPTED
    if stopped is Stopped.CONVERGED and wish.search != "named":
        stopped = _finish_best(contest)
    if stopped is Stopped.CONVERGED and contest.cut_short:
        stopped = Stopped.OUT_OF_TIME if contest.steps_left is None else Stopped.OUT_OF_STEPS
    if contest.least_seconds == inf:
        raise nothing_found(contest, len(starts), wish.stages)
    result = _result(contest, stopped)
    check_seconds(contest, wish, result)
    return result


def _look(fitting: Fitting, begin: Beginning, wish: Wish, starts: list[Outcome], costs: CostModel) -> None:
    """Judge what there is to begin with, look for pipelines in a part of the time, and search."""
    contest = fitting.contest
    _begin(fitting, begin, wish, starts, costs)
    if contest.best is None and contest.constraints and wish.search != "named":
        starts += _within(contest, starts)
    contest.check("the named strategies are judged")
    if wish.search == "joint" and wish.stages is None:
        search_stages(contest, costs, _ways(wish))
        contest.check("one stage")
    SEARCHES[wish.search](contest, starts, wish)


def _look_for_stages(contest: Contest, begin: Beginning, wish: Wish, costs: CostModel) -> None:
    """Look for pipelines of so many stages alone."""
    _enter_given(contest, begin, wish, costs)
    if isinstance(begin.before, Pipeline):
        check_start(contest, begin.before)
        enter_pipeline(contest, begin.before, costs)
    contest.check(f"{wish.stages} stages")
    search_stages(contest, costs, _ways(wish), wish.stages)


def _relieve_last(fitting: Fitting) -> bool:
    """Have what comes nearest to fitting run some of it again, where nothing else fits; whether it came to its end."""
    contest = fitting.contest
    is_named = contest.best is contest.baseline  # a search that found nothing better may have fewer blocks run again
    if contest.smallest is None or (contest.best is not None and not (is_named and contest.best.entry.segments)):
        return True

    grace = _GRACE_SECONDS + contest.for_finishing if contest.least_seconds == inf else 0.0

    def left() -> float:
        return contest.time_left + grace

    try:
        if contest.least_seconds == inf and contest.mesh.size > 1:
            fitting.spare(
                lambda entry: contest.judge(entry, contest.simulate(entry)),  # there may be no step left to count
                lambda: left() + _LATE * contest.time_spent,
            )
        if left() > 0:
            relieve(contest, contest.smallest, left)
        relieve_front(contest, lambda: contest.left)
    except KeyboardInterrupt:
        if contest.least_seconds == inf:
            raise
        return False
    return True


def _finish_best(contest: Contest) -> Stopped:
    """Have parameters of the best plan stay gathered and its products go in chunks, where that is faster; why that
    came to its end."""
    try:
        try_keeping(contest)
        try_chunks(contest)
    except Enough as end:
        return end.reason
    except KeyboardInterrupt:
        return Stopped.INTERRUPTED
    return Stopped.CONVERGED


def _enter_given(contest: Contest, begin: Beginning, wish: Wish, costs: CostModel) -> list[Outcome]:
    """Judge the user's plans; those of one stage, to go on from."""
    found = []
    for plan in begin.plans:
        check_start(contest, plan)
        check_stages(contest, plan, wish.stages)
        if isinstance(plan, Pipeline):
            here = Mark(contest.machine.name, contest.machine.fingerprint())
            enter_pipeline(contest, replace(plan, machine=here), costs)
            contest.pipeline_given = True
        else:
            found.append(contest.enter_plan(plan, is_counted=False))
    return found


def _begin(fitting: Fitting, begin: Beginning, wish: Wish, starts: list[Outcome], costs: CostModel) -> None:
    """Judge the user's plans, the named strategies, and the best of an earlier search."""
    contest = fitting.contest
    starts += _enter_given(contest, begin, wish, costs)
    before = begin.before
    if before is not None:
        check_start(contest, before)
    try:
        _enter_named(fitting, starts)
    finally:  # what an earlier search has found is not lost, however little may be spent now
        if isinstance(before, Plan):
            starts.insert(0, contest.enter_plan(before, is_counted=False))
        elif before is not None:
            enter_pipeline(contest, before, costs)


def _enter_named(fitting: Fitting, starts: list[Outcome]) -> None:
    """Judge the named strategies; where they do not fit, also in micro-batches and with blocks run again."""
    contest, known = fitting.contest, fitting.known
    least = partial(_least_bytes, contest)
    named = baselines(
        contest.captured,
        contest.machine,
        lambda name: _is_hopeless(contest, known, name) or (bool(known) and least(name) > contest.capacity),
        lambda name: max(0.0, least(name) - contest.capacity),  # first what may fit
    )
    for name, found in named:
        contest.tell(name)
        if found is not None and contest.is_slow(found):
            contest.slow[name] = found
        elif found is not None:
            known[name] = contest.enter(found)
            starts.append(known[name])
            if len(known) == 1:
                contest.keep_for_finishing()
            if len(known) == _FIRST_NAMED and contest.is_too_small:
                _spare(fitting)
            contest.baseline = contest.best
        if known and contest.time_left < contest.time_spent / len(known) - _GRACE_SECONDS:
            raise Enough(Stopped.OUT_OF_TIME)  # the next may take as long as those so far
        if known and contest.memory_decides and contest.time_left_of_given < _FOR_NAMED:
            break  # for which named strategies know less than the search
    if known and contest.is_too_small:
        _spare(fitting)
    if contest.memory_decides:
        fitting.enter()
    starts += relieve_by_name(contest, [known[name] for name in known if least(name) <= contest.capacity])
    contest.baseline = contest.best


def _spare(fitting: Fitting) -> None:
    """Look for something that fits, while there is time for other ways to."""
    contest = fitting.contest

    def left() -> float:
        contest.check("what takes less memory")
        return 1.0

    fitting.spare(contest.enter, left)


def _least_bytes(contest: Contest, name: str) -> float:
    return least_bytes(name, contest.captured, contest.machine.mesh, OPTIMIZER_COPIES[contest.optimizer])


def _is_hopeless(contest: Contest, known: Mapping[str, Outcome], name: str) -> bool:
    """Whether a strategy stores parameters in pieces for one that is slow anyway: there is then more to send, and
    nothing to win where something else fits."""
    alike = stored_otherwise(name)
    plain = known.get(alike)
    is_slow = plain is not None and contest.best is not None and plain.seconds > _SLOW * contest.best.seconds
    return is_slow or alike in contest.slow


def _within(contest: Contest, starts: Sequence[Outcome]) -> list[Outcome]:
    """A plan that keeps to the constraints, where no named strategy does: a place to start from."""
    tables = JointSearch(contest, _variants(contest, starts))
    for units in tables.cuts():
        for variant in tables.variants:
            contest.tell("within the constraints")
            found = tables.try_out(variant, units, tables.objective(OVERLAPS[0]))
            if found is not None:
                return [found]
    return []


def open_contest(
    graph: Graph, machine: Machine, costs: CostModel, wish: Wish, progress: Callable[[Progress], None] | None = None
) -> Contest:
    """A contest for what is wished; UsageError where the wish makes no sense."""
    check_wish(wish, tuple(SEARCHES))
    constraints = make_constraints(graph, machine.mesh, wish.fixed, wish.forbidden_axes)
    capacity, prices = usable_bytes(machine, wish), MachinePrices.of(graph, machine, costs, wish.optimizer)
    return Contest(
        graph,
        machine,
        prices,
        wish.optimizer,
        capacity,
        wish.budget,
        progress,
        steps_left=wish.steps,
        cpu_budget=inf if wish.cpu_budget is None else wish.cpu_budget,
        constraints=constraints,
    )


def _result(contest: Contest, stopped: Stopped) -> SearchResult:
    """The best of one stage, or of several where these are faster."""
    baseline, one, several = contest.baseline, contest.best, contest.pipeline
    assert one is not None or several is not None
    certificate: Certificate | PipelineBound | None
    if several is not None and contest.pipeline_leads:
        predictions = ("seconds_per_step", several.seconds), ("peak_bytes", float(several.peak))
        plan: Plan | Pipeline = replace(several.pipeline, predictions=predictions)
        seconds, peak, error = several.seconds, several.peak, several.error
        certificate = None if contest.bound is None else replace(contest.bound, step=seconds)
    else:
        assert one is not None
        plan = plan_of(one, contest.captured, contest.machine)
        certificate = _certificate(contest, one, stopped)
        seconds, peak = one.seconds, one.peak_bytes or 0
        error = expected_error(break_down(one.simulation.timeline).sources)
    return SearchResult(
        plan,
        seconds,
        peak,
        baseline.entry.name if baseline is not None else "",
        baseline.seconds if baseline is not None else seconds,
        stopped,
        contest.elapsed,
        contest.num_entries,
        tuple(contest.history),
        cpu_seconds=contest.cpu_elapsed,
        steps=contest.steps,
        certificate=certificate,
        error=error,
        notes=contest.notes,
    )


def _certificate(contest: Contest, best: Outcome, stopped: Stopped) -> Certificate | None:
    """What bounds the plan from below; not worked out for somebody who wants an end."""
    try:
        return None if stopped is Stopped.INTERRUPTED else certify(contest, best)
    except KeyboardInterrupt:
        return None


def go_on(wish: Wish, before: SearchResult) -> Wish:
    """What is left of a wish after what a search has spent; its budgets count both searches together."""
    return replace(
        wish,
        budget=max(0.0, wish.budget - before.search_seconds),
        cpu_budget=None if wish.cpu_budget is None else max(0.0, wish.cpu_budget - before.cpu_seconds),
        steps=None if wish.steps is None else max(0, wish.steps - before.steps),
    )
