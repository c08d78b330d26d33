"""Plans in micro-batches, where memory is short: the named strategies for parts of the batch, one after the other.

Where none of them fits, what takes little memory is tried at once (`Fitting.spare`): parameters in pieces and all
blocks run again, then in micro-batches besides, for which layers are split where a device would be left without
samples. A search that knows something that fits need not judge what is slower, and tries those that are fast in as few
micro-batches as are enough (`Fitting.enter`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from conjoin.comm import held_bytes
from conjoin.errors import StrategyError
from conjoin.ir import LeafKind, cut_in_micro_batches
from conjoin.machine import Mesh
from conjoin.search.baselines import baselines, with_blocks_again
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Outcome, Variant, make_variant
from conjoin.search.named_relief import relieve_by_name
from conjoin.search.strategies import read_request
from conjoin.sim import OPTIMIZER_COPIES

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


def _strategies(
    contest: Contest,
    variant: Variant,
    takes: Callable[[str], bool] = lambda name: True,
    rank: Callable[[str], float] = lambda name: 0,
) -> Iterator[Entry]:
    """The named strategies for micro-batches, all or some."""
    for _, entry in baselines(variant.graph, contest.machine, lambda name: not takes(name), rank):
        if entry is not None:
            made = replace(entry.variant, accumulation=variant.accumulation)
            yield replace(entry, name=f"{entry.name}+micro={variant.steps}", variant=made)


@dataclass
class Fitting:
    """Named strategies that do not fit, each in as few micro-batches as are enough for it."""

    contest: Contest
    known: dict[str, Outcome] = field(default_factory=dict)
    """Those that were judged as they are."""
    _tried: set[str] = field(default_factory=set)
    _parts: dict[int, Variant | None] = field(default_factory=dict)
    _sparing: Iterator[Entry] = field(init=False)
    _spared: Outcome | None = None

    def __post_init__(self) -> None:
        self._sparing = self._least_memory()

    def spare(self, judge: Callable[[Entry], Outcome], left: Callable[[], float]) -> None:
        """Judge what takes less and less memory until something fits, while there is time; from what was tried on."""
        contest, smallest = self.contest, self.contest.smallest
        while contest.least_seconds == inf and left() > 0 and (entry := next(self._sparing, None)) is not None:
            contest.tell(entry.name)
            self._spared = contest.named[entry.name] = judge(entry)
        if contest.best is not None:
            contest.smallest = smallest  # what is relieved otherwise are the strategies themselves

    def _least_memory(self) -> Iterator[Entry]:
        """Parameters in pieces and blocks run again, by the strategy of those that leave every device samples that
        splits layers the fewest ways: of the whole batch, then in as many micro-batches as should be enough for that,
        and in twice as many."""
        steps = 1
        while steps <= MAX_STEPS:
            entry = self._in_pieces(steps)
            if entry is not None:
                yield with_blocks_again(entry, "full") or entry
            if steps == 1 and self._spared is not None:
                steps = max(1, self._fewest_steps(self._spared) // 2)
            steps *= 2

    def _in_pieces(self, steps: int) -> Entry | None:
        if steps == 1:
            names = sorted(filter(_is_in_pieces, self.known), key=_layers_split)
            return self.known[names[0]].entry if names else None
        variant = self._in_parts(steps)
        return None if variant is None else next(_strategies(self.contest, variant, _is_in_pieces, _layers_split), None)

    def enter(self) -> None:
        """Enter the fastest that were not tried; a few in all, while there is time for other ways to fit."""
        contest, known, smallest = self.contest, self.known, self.contest.smallest
        allowed = [name for name in known if name not in self._tried and contest.allows(known[name].entry)]
        for name in sorted(allowed, key=lambda name: known[name].seconds):
            is_over = len(self._tried) == _TRIED_AT_ONCE or contest.time_left_of_given <= _FOR_OTHERS
            if is_over or known[name].seconds >= contest.least_seconds:
                break
            steps = self._fewest_steps(known[name])
            if steps and _has_samples(known[name].entry, contest.machine.mesh, steps):
                self._tried.add(name)
                self._enter(name, steps)
                if steps > 2 and contest.least_seconds > _WORTH_RELIEF * known[name].seconds:
                    self._enter_larger(name, steps // 2)
        contest.smallest = smallest  # what is relieved otherwise are the strategies themselves

    def _enter(self, name: str, steps: int) -> None:
        """A strategy in so many micro-batches; in twice as many where it takes more than it was thought to."""
        for count in (steps, 2 * steps):
            variant = self._in_parts(count)
            found = _strategies(self.contest, variant, name.__eq__) if variant is not None else ()
            if all(self._fits(self.contest.enter(entry)) for entry in found):
                return

    def _enter_larger(self, name: str, steps: int) -> None:
        """A strategy in fewer micro-batches than fit, with blocks run again."""
        variant = self._in_parts(steps)
        if variant is not None:
            entries = _strategies(self.contest, variant, name.__eq__)
            relieve_by_name(self.contest, [self.contest.enter(entry) for entry in entries])

    def _fits(self, outcome: Outcome) -> bool:
        return outcome.peak_bytes is None or outcome.peak_bytes <= self.contest.capacity

    def _fewest_steps(self, outcome: Outcome) -> int:
        """In how many micro-batches a plan may fit, 0 for none.

        What stays does not become less, and there are gradients that wait for those of others.
        """
        contest, held = self.contest, Counter[LeafKind]()
        skeleton, layouts = outcome.entry.variant.skeleton, outcome.entry.layouts
        for root, layout in layouts.leaves.items():
            leaf = skeleton.graph.leaves[root]
            held[leaf.kind] += held_bytes(leaf.type.laid_out(layout), contest.machine.mesh)[0]
        trained = held[LeafKind.PARAMETER]
        stays = sum(held.values()) - held[LeafKind.INPUT] + OPTIMIZER_COPIES[contest.optimizer] * trained
        room, comes = contest.capacity - stays - trained, (outcome.peak_bytes or 0) - stays
        steps = 2
        while steps * room < comes and steps < MAX_STEPS:
            steps *= 2
        return steps if steps * room >= comes and self._in_parts(steps) is not None else 0

    def _in_parts(self, steps: int) -> Variant | None:
        if steps not in self._parts:
            self._parts[steps] = _in_parts(self.contest, steps) if steps <= MAX_STEPS else None
        return self._parts[steps]


def _has_samples(entry: Entry, mesh: Mesh, steps: int) -> bool:
    """Whether devices that share the inputs have samples for every micro-batch."""
    for i, leaf in enumerate(entry.variant.skeleton.graph.leaves):
        part = held_bytes(leaf.type.laid_out(entry.layouts.leaves[i]), mesh)[0]
        is_split = leaf.kind is LeafKind.INPUT and part < leaf.type.bytes
        if is_split and leaf.type.shape[0] * part < steps * leaf.type.bytes:
            return False
    return True


def _is_in_pieces(name: str) -> bool:
    return name.endswith(_IN_PIECES)


def _layers_split(name: str) -> float:
    """In how many ways a strategy splits layers: data parallelism comes first."""
    return max((degree for _, degree in read_request(name).degrees.items()), default=0)
