"""Plans in micro-batches, where memory is short: the named strategies for parts of the batch, one after the other.

Where none of them fits, those that are fast are tried at once in as few micro-batches as are enough (`Fitting`):
a search that knows something that fits need not judge what is slower. Where nothing was found that fits and the time is
over, parameters in pieces, the smallest micro-batches and all blocks run again are the least that a named strategy
takes: `enter_smallest`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace

from conjoin.errors import StrategyError
from conjoin.ir import cut_in_micro_batches
from conjoin.search.baselines import baselines, with_blocks_again
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Outcome, Variant, make_variant
from conjoin.search.named_relief import relieve_by_name
from conjoin.search.strategies import read_request
from conjoin.sim import measure_memory

MAX_STEPS = 64
"""Micro-batches of a step that are tried at most."""
_IN_PIECES = "fsdp"
"""How strategies end that keep parameters in pieces."""
_TRIED_AT_ONCE = 4
"""Strategies that are, the fastest first."""
_FOR_OTHERS = 0.3
"""The part of the time that is left to other ways to fit."""
_WORTH_RELIEF = 1.15
"""How much longer than a whole batch micro-batches take where fewer, run again in part, may be faster: about half of
what running all blocks again takes."""


def micro_variants(contest: Contest) -> Iterator[Variant]:
    """The model in 2, 4, 8 ... micro-batches, as far as its batch has that many parts."""
    steps = 2
    while steps <= MAX_STEPS and (variant := _in_parts(contest, steps)) is not None:
        yield variant
        steps *= 2


def _in_parts(contest: Contest, steps: int) -> Variant | None:
    try:
        graph, accumulation = cut_in_micro_batches(contest.captured, steps)
    except StrategyError:
        return None
    return make_variant(graph, (), accumulation)


def enter_strategies(contest: Contest, variant: Variant) -> list[Outcome]:
    """The named strategies for micro-batches, judged; those that do not fit also relieved."""
    found = []
    for entry in _strategies(contest, variant):
        contest.check(entry.name)
        found.append(contest.enter(entry))
    relieve_by_name(contest, found)
    return found


def _strategies(contest: Contest, variant: Variant, names: Container[str] | None = None) -> Iterator[Entry]:
    """The named strategies for micro-batches, all or some."""
    left_out = (lambda name: False) if names is None else (lambda name: name not in names)
    for _, entry in baselines(variant.graph, contest.machine, left_out):
        if entry is not None:
            made = replace(entry.variant, accumulation=variant.accumulation)
            yield replace(entry, name=f"{entry.name}+micro={variant.steps}", variant=made)


@dataclass
class Fitting:
    """Named strategies that do not fit, each in as few micro-batches as are enough for it."""

    contest: Contest
    _tried: set[str] = field(default_factory=set)
    _parts: dict[int, Variant | None] = field(default_factory=dict)

    def enter(self, known: Mapping[str, Outcome]) -> None:
        """Enter the fastest that were not tried; a few in all, while there is time for other ways to fit."""
        contest, smallest = self.contest, self.contest.smallest
        allowed = [name for name in known if name not in self._tried and contest.allows(known[name].entry)]
        for name in sorted(allowed, key=lambda name: known[name].seconds):
            is_over = len(self._tried) == _TRIED_AT_ONCE or contest.time_left_of_given <= _FOR_OTHERS
            if is_over or known[name].seconds >= contest.least_seconds:
                break
            steps = self._fewest_steps(known[name])
            if steps:
                self._tried.add(name)
                self._enter(name, steps)
                if steps > 2 and contest.least_seconds > _WORTH_RELIEF * known[name].seconds:
                    self._enter_larger(name, steps // 2)
        contest.smallest = smallest  # what is relieved otherwise are the strategies themselves

    def _enter(self, name: str, steps: int) -> None:
        """A strategy in so many micro-batches; in twice as many where it takes more than it was thought to."""
        for count in (steps, 2 * steps):
            variant = self._in_parts(count)
            found = _strategies(self.contest, variant, (name,)) if variant is not None else ()
            if all(self._fits(self.contest.enter(entry)) for entry in found):
                return

    def _enter_larger(self, name: str, steps: int) -> None:
        """A strategy in fewer micro-batches than fit, with blocks run again."""
        variant = self._in_parts(steps)
        if variant is not None:
            entries = _strategies(self.contest, variant, (name,))
            relieve_by_name(self.contest, [self.contest.enter(entry) for entry in entries])

    def _fits(self, outcome: Outcome) -> bool:
        return outcome.peak_bytes is None or outcome.peak_bytes <= self.contest.capacity

    def _fewest_steps(self, outcome: Outcome) -> int:
        """In how many micro-batches a plan may fit, 0 for none.

        What stays does not become less, and there are gradients that wait for those of others.
        """
        contest = self.contest
        memory = measure_memory(outcome.simulation.program, contest.optimizer, contest.machine.device)
        stays = memory.parameters + memory.buffers + memory.optimizer_state
        room, comes = contest.capacity - stays - memory.gradients, memory.peak - stays
        steps = 2
        while steps * room < comes and steps < MAX_STEPS:
            steps *= 2
        return steps if steps * room >= comes and self._in_parts(steps) is not None else 0

    def _in_parts(self, steps: int) -> Variant | None:
        if steps not in self._parts:
            self._parts[steps] = _in_parts(self.contest, steps) if steps <= MAX_STEPS else None
        return self._parts[steps]


def enter_smallest(contest: Contest, left: Callable[[], float]) -> None:
    """Parameters in pieces in as many micro-batches as leave every device samples, with blocks run again: by data
    parallelism, then with layers split more and more ways while there is time left, until something fits."""
    for variant in reversed(tuple(micro_variants(contest))):
        named = baselines(variant.graph, contest.machine, lambda name: not name.endswith(_IN_PIECES), _layers_split)
        entries = ((name, entry) for name, entry in named if name.endswith(_IN_PIECES))
        for name, entry in entries:
            if name == _IN_PIECES and entry is None:
                break
            if entry is not None:
                made = replace(entry.variant, accumulation=variant.accumulation)
                smaller = replace(entry, name=f"{entry.name}+micro={variant.steps}", variant=made)
                again = with_blocks_again(smaller, "full") or smaller
                contest.judge(again, contest.simulate(again))  # not entered: there may be no step left to count
            if contest.best is not None or left() <= 0:
                return


def _layers_split(name: str) -> float:
    """In how many ways a strategy splits layers: data parallelism comes first."""
    return max((degree for _, degree in read_request(name).degrees.items()), default=0)
