"""Plans that do not fit, relieved: segments of the model are run again in the backward pass, as few as are enough.

Where few bytes cross from what was computed to what comes, the graph is narrow: between the layers of a transformer, or
the blocks of a convolutional network. Segments go from one narrow place to another. How long they should be depends on
the model: short ones keep much between them, long ones make much anew at once; so several lengths are tried, and of
each as many segments as are needed, those first that save the most bytes for a second. How many that may be is guessed
from what all of a length save; only memory as it is measured decides. A length with which the step would be much slower
than the best is left. On GPUs what segments make may lie on the host instead (`memory_chain.py`), or single tensors and
optimizer states (`host_relief.py`), or inputs (`input_relief.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from conjoin.ir import Segment
from conjoin.search.branch_places import without_places
from conjoin.search.contest import Contest
from conjoin.search.entries import NOTHING_OFFLOADED, Entry, Outcome
from conjoin.search.host_relief import relieve_by_host
from conjoin.search.input_relief import inputs_in_pieces, relieve_by_inputs
from conjoin.search.memory_chain import relieve_by_chains
from conjoin.search.variants import as_variant
from conjoin.sim import Layouts, Skeleton, gain_of

_MAX_PARTS = 128
"""Into how many segments a model is cut at most."""
_FOR_HOST = 0.1
"""The part of the time left in which single tensors and states are put on the host."""
_SLOWER = 1.05
"""What is expected to be slower than the best by more than this is not tried."""


def relieve(contest: Contest, outcome: Outcome, left: Callable[[], float] = lambda: 1.0) -> None:
    """Enter a plan that does not fit again, with segments run again until it does; while there is time left for it.

    Whatever comes of it, it is not to be tried again.
    """
    start = as_variant(outcome)
    contest.relieved.append(outcome.entry)
    if not without_places([start]):  # who does not run an operator would not run its segment again
        return
    entry = replace(start.entry, segments=(), offloads=NOTHING_OFFLOADED)
    pieces = inputs_in_pieces(entry)
    if pieces is not None and contest.allows(pieces):
        contest.relieved.append(pieces)
        found = contest.judge(pieces, contest.simulate(pieces))
        if contest.best is found:
            return
        if found.seconds <= outcome.seconds:
            entry, outcome = pieces, found
    heavy = relieve_by_inputs(contest, entry, left) if not start.entry.offloads.inputs else []
    _relieve_further(contest, entry, outcome, left)
    for streamed in heavy:
        if streamed.seconds < contest.seconds_to_beat:
            _relieve_further(contest, streamed.entry, streamed, left)


def _relieve_further(contest: Contest, entry: Entry, outcome: Outcome, left: Callable[[], float]) -> None:
    program = outcome.simulation.program
    peak = outcome.simulation.peak_bytes(contest.optimizer, contest.machine.device)
    ways = segmentations(entry.variant.skeleton)
    if contest.mesh.size == 1:
        relieve_by_chains(contest, entry, program, ways, left)
    for segments in ways:
        if left() <= 0:
            contest.cut_short = True
            return
        contest.tell(f"{len(segments)} segments run again, {entry.name}")
        gains = {segment: gain_of(program, segment, contest.machine.device) for segment in segments}
        worth = [s for s in segments if gains[s].num_bytes > 0]
        worth.sort(key=lambda s: -gains[s].num_bytes / max(gains[s].seconds, 1e-12))
        if not worth:
            continue
        seconds, needed = _enter(contest, entry, worth)
        if needed > contest.capacity:
            continue
        saved = list(accumulate(gains[s].num_bytes for s in worth))
        part = (peak - contest.capacity) / max(peak - needed, 1)
        guess = bisect_left(saved, part * saved[-1]) + 1
        expected = outcome.seconds + guess / len(worth) * (seconds - outcome.seconds)
        if expected < _SLOWER * contest.seconds_to_beat:
            _enter_fewest(contest, entry, worth, guess, left)
    if contest.mesh.size > 1:
        relieve_by_chains(contest, entry, program, ways, left)
    if outcome.seconds < contest.seconds_to_beat:
        relieve_by_host(contest, entry, program, contest.share(_FOR_HOST))


def mix(contest: Contest, light: Outcome, heavy: Outcome, left: Callable[[], float] = lambda: 1.0) -> None:
    """Enter what lies between a plan that fits and a faster one that does not: operators are as in the second up to
    one of them, and from there on as in the first; as many as fit.

    A price of a byte alone does not find such a plan: where two parts of a model are alike, it has them do the same.
    """
    fits, too_many = 0, len(light.entry.layouts.choices)
    if light.entry.variant.graph is not heavy.entry.variant.graph or len(without_places([light, heavy])) < 2:
        return
    if {light.entry.offloads, heavy.entry.offloads} != {NOTHING_OFFLOADED}:  # what is on the host, segments may make
        return
    while too_many - fits > 1 and left() > 0:
        tried = (fits + too_many) // 2
        contest.tell(f"between {light.entry.name} and what does not fit")
        _, peak = _judged(contest, _between(light.entry, heavy.entry, tried))
        fits, too_many = (tried, too_many) if peak <= contest.capacity else (fits, tried)


def _between(light: Entry, heavy: Entry, count: int) -> Entry:
    """A plan whose first operators are those of a heavy one, and the others those of a light one."""
    skeleton, one, other = light.variant.skeleton, heavy.layouts, light.layouts
    first = [min((position for position, _ in readers), default=count) < count for readers in skeleton.readers]
    leaves = {root: (one if first[root] else other).leaves[root] for root in other.leaves}
    makers = [skeleton.roots[root].maker < count for root in skeleton.results]
    results = tuple(a if is_first else b for is_first, a, b in zip(makers, one.results, other.results, strict=True))
    names = {skeleton.roots[root].leaf.name: first[root] for root in leaves if skeleton.roots[root].leaf is not None}  # type: ignore[union-attr]
    again = {name for name, is_first in names.items() if name in (heavy if is_first else light).regathered}
    segments = [*(s for s in heavy.segments if s[1] < count), *(s for s in light.segments if s[0] >= count)]
    layouts = Layouts(leaves, (*one.choices[:count], *other.choices[count:]), results)
    return replace(light, layouts=layouts, regathered=frozenset(again), segments=tuple(segments))


def _enter_fewest(
    contest: Contest, entry: Entry, segments: Sequence[Segment], guess: int, left: Callable[[], float]
) -> None:
    """Enter an entry with the fewest of some segments, in their order, with which it fits, as it does with all; or,
    when there is no time left, with the fewest found."""
    too_few, enough, step = 0, len(segments), 1
    tried = min(guess, enough - 1)
    while enough - too_few > 1 and left() > 0:
        if _enter(contest, entry, segments[:tried])[1] <= contest.capacity:
            enough = tried
            tried = max(enough - step, (too_few + enough) // 2)
        else:
            too_few = tried
            tried = min(too_few + step, max(too_few + 1, (too_few + enough) // 2))
        step *= 2


def _enter(contest: Contest, entry: Entry, segments: Sequence[Segment]) -> tuple[float, int]:
    """Seconds and bytes of an entry with some segments run again; it is judged, so that the best is kept."""
    name = f"{entry.name}, {len(segments)} segment{'s' if len(segments) > 1 else ''} run again"
    return _judged(contest, replace(entry, name=name, segments=tuple(sorted(segments))))


def _judged(contest: Contest, made: Entry) -> tuple[float, int]:
    """Seconds and bytes of an entry that was judged."""
    simulation = contest.simulate(made)
    found = contest.judge(made, simulation)
    peak = found.peak_bytes
    if peak is None:
        peak = simulation.peak_bytes(contest.optimizer, contest.machine.device)
    return found.seconds, peak


def segmentations(skeleton: Skeleton) -> list[tuple[Segment, ...]]:
    """The model cut at narrow places, in ways from long to short segments."""
    found: dict[tuple[Segment, ...], None] = {}
    crossing, made = crossing_bytes(skeleton), _made_bytes(skeleton)
    parts = 2
    while parts <= min(_MAX_PARTS, len(skeleton.operators)):
        found[_cut(crossing, made, sum(made) / parts)] = None
        parts *= 2
    return [segments for segments in found if segments]


def crossing_bytes(skeleton: Skeleton) -> list[int]:
    """For every operator the bytes of what was made up to it and is read after it."""
    count = len(skeleton.operators)
    change = [0] * (count + 1)
    for root, readers in zip(skeleton.roots, skeleton.readers, strict=True):
        last = max((position for position, _ in readers), default=-1)
        if root.maker >= 0 and last > root.maker:
            change[root.maker] += root.type.bytes
            change[last] -= root.type.bytes
    found, crossing = [], 0
    for position in range(count):
        crossing += change[position]
        found.append(crossing)
    return found


def _made_bytes(skeleton: Skeleton) -> list[int]:
    """What every operator makes, where autograd may keep anything of it."""
    roots = skeleton.roots
    return [sum(roots[i].type.bytes for i in op.makes) if op.remembers else 0 for op in skeleton.operators]


def _cut(crossing: Sequence[int], made: Sequence[int], size: float) -> tuple[Segment, ...]:
    """Segments that make about so many bytes each: from half of it to half more, each to where the graph is narrowest.

    What comes after the last is not run again: its backward begins as soon as it has run.
    """
    segments: list[Segment] = []
    first = 0
    while (last := _end(crossing, made, size, first)) < len(made) - 1:
        segments += [Segment(first, last)] if last > first else []
        first = last + 1
    return tuple(segments)


def _end(crossing: Sequence[int], made: Sequence[int], size: float, first: int) -> int:
    """Where a segment ends that begins with an operator."""
    inside, found = 0, -1
    for position in range(first, len(made)):
        inside += made[position]
        if inside > 1.5 * size:
            return found if found >= 0 else position
        if inside >= size / 2 and (found < 0 or crossing[position] < crossing[found]):
            found = position
    return len(made) - 1
