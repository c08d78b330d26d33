"""Substitutions in a joint search: variants of the best graph, each judged by the least sum over its layouts."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING

from conjoin.ir import Node
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Variant, digest
from conjoin.search.exact.space import OVERLAPS
from conjoin.search.exact.units import Units, shown
from conjoin.search.rewrites import Backtracking
from conjoin.search.variants import as_variant
from conjoin.sim import take_graph_apart

if TYPE_CHECKING:
    from conjoin.search.joint import JointSearch

REWRITING = 0.4
"""The part of the time left that is spent on substitutions."""


def substitute(search: JointSearch) -> Variant | None:
    """Substitutions in the best variant, as far as they lower the sum on its units; the best variant, if any does."""
    contest, best, promising = search.contest, search.contest.best, search.promising()
    if best is None or not promising or not search.ways:
        return None
    units, left = promising[0], contest.share(REWRITING)
    start, where = as_variant(best).entry.variant, f"{search.kinds_of(units)}, {search.price:g}"
    trial = f"substitutions in {digest(start)} on {where}"
    if not contest.is_new(trial):
        return None
    sums = _Sums(search, units, where)
    dropped = contest.notes.dropped
    work = Backtracking(sums.seconds, search.ways, left, contest.seconds_alone, sums.laid_out, dropped)
    work.start(start)
    least, fresh = work.best, None
    for variant, total in work.run():
        if total < least:
            least, fresh = total, variant
            for overlap in OVERLAPS:
                search.try_out(variant, units, search.objective(overlap, search.price))
    if fresh is not None:
        search.variants = (fresh, *search.variants)
    _end(contest, trial, work)
    return fresh


def _end(contest: Contest, trial: str, work: Backtracking) -> None:
    """Take down that nothing is left to try, or that there is."""
    if work.is_cut_short:
        contest.cut_short = True
    else:
        contest.note(trial)


class _Sums:
    """The least sums of variants on units, and the layouts that have them."""

    def __init__(self, search: JointSearch, units: Units, where: str) -> None:
        self.search, self.units, self.where = search, units, where
        self.objective = search.objective(OVERLAPS[0], search.price)

    def seconds(self, variant: Variant) -> float:
        contest = self.search.contest
        contest.check(f"substitutions, {shown(self.units)} devices")
        sums, name = contest.notes.sums, f"{contest.machine.name}: {digest(variant)} on {self.where}"
        if name not in sums:
            contest.count_step()
            problem = self.search.stacked(variant, self.units, self.objective)
            sums[name] = variant.steps * problem.solve().total if problem is not None else inf
        return sums[name]

    def laid_out(self, variant: Variant) -> dict[Node, Hashable]:
        problem = self.search.stacked(variant, self.units, self.objective)
        if problem is None:
            return {}
        layouts, _ = problem.layouts(problem.solve())
        return {op.node: choice for op, choice in zip(variant.skeleton.operators, layouts.choices, strict=True)}


def substitute_alone(search: JointSearch) -> None:
    """Substitutions for one device, where layouts decide nothing: each is judged by the timeline."""
    contest = search.contest
    best, left = contest.best or contest.smallest, contest.share(REWRITING)
    trial = "" if best is None else f"substitutions in {digest(as_variant(best).entry.variant)}"
    if best is None or not search.ways or not contest.is_new(trial):
        return

    def seconds(variant: Variant) -> float:
        contest.check("substitutions on one device")
        layouts = take_graph_apart(variant.graph)[1]
        return contest.enter(Entry("substitutions on one device", variant, layouts)).seconds

    work = Backtracking(seconds, search.ways, left, dropped=contest.notes.dropped)
    work.start(as_variant(best).entry.variant)
    for _ in work.run():
        pass
    _end(contest, trial, work)
