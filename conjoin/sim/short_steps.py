"""Steps of models in which the same operators come again and again: a step with few of them tells of all.

An operator is *like* another where it is the same task in the same layouts, and reads and makes at the same distance
what is read at the same distances; what is read all over the model is the same tensor. Where operators are like those a
period before, again and again, periods in the middle are left out (`shorten`): what reads from these reads from the
periods before instead. The program of that short step takes as many more ticks, and holds as many more bytes, as every
further period adds (`periods.py`, `measure_peak`): exactly as the whole one, or it is not told by the short one at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from conjoin.comm import BUNDLES_AHEAD, ParameterBundle, Use
from conjoin.ir import Segment
from conjoin.sim.fragments import Drafts
from conjoin.sim.parameter_uses import FoundBundles
from conjoin.sim.program import Program
from conjoin.sim.skeleton import Layouts, LeftOut, Skeleton, find_readers
from conjoin.sim.stretches import Stretch, find_stretches

_BEFORE, _AFTER = 3, 3
"""Periods that are left before what is left out and behind it: they are timed until they are steady, and compared."""
_WIDE = 4
"""What is read over more than such a part of the model is no matter of one period."""
_NEAR = 2
"""Periods from which something is read, or in which what is on its way is used."""
_Cuts = tuple[tuple[int, int, int], ...]
"""From which operator on how many are left out, in periods of which length."""


@lru_cache(64)
def repeats(skeleton: Skeleton) -> bool:
    """Whether operators come again and again, in whatever layouts: else a step is not told by fewer."""
    kinds = np.array(_kinds(skeleton)[0], np.int64)
    return bool(find_stretches(kinds, _BEFORE + _AFTER + 1))


def short_program(
    skeleton: Skeleton,
    layouts: Layouts,
    drafts: Drafts,
    regathered: frozenset[str],
    segments: tuple[Segment, ...],
    known: FoundBundles,
) -> Program | None:
    """The program of a step with few of its periods; None where it has no more, or is not told by these."""
    most = len(skeleton.operators) // _WIDE
    is_wide = [len(_span(bundle)) > most for bundle in known[0]]
    wide = [bundle for bundle, far in zip(known[0], is_wide, strict=True) if far]
    narrow = (bundle for bundle, far in zip(known[0], is_wide, strict=True) if not far)
    near = [bundle for bundle in narrow if not bundle.is_alone(drafts.bundle_bytes)]
    codes = _codes(skeleton, layouts, regathered, segments, near, wide)
    stretches = find_stretches(codes, _BEFORE + _AFTER + 1)
    cuts = tuple(cut for s in stretches if _is_gathered_soon(s, known[0], drafts) and (cut := _cut(s, near)))
    short = shorten(skeleton, cuts) if cuts else None
    if short is None:
        return None
    moved = (_moved_bundle(bundle, cuts, far) for bundle, far in zip(known[0], is_wide, strict=True))
    bundles = tuple(bundle for bundle in moved if bundle is not None)
    used = {value: known[1][value] for bundle in bundles for value, _ in bundle.entries}
    numbers = {value: _moved_root(root, skeleton, short, cuts) for value, root in used.items()}
    if any(number < 0 for number in numbers.values()):
        return None
    chosen = [choice for place, choice in enumerate(layouts.choices) if not _is_gone(place, cuts)]
    again = [
        Segment(s[0] - by, s[1] - by, [place - by for place in s.kept])
        for s in segments
        if not _is_gone(s[0], cuts)
        for by in [_shift(s[0], cuts)]
    ]
    made = Program(
        short, Layouts(layouts.leaves, tuple(chosen), layouts.results), drafts, regathered, tuple(again),
        bundles=(bundles, numbers),
    )  # fmt: skip
    return None if made.parts or made.leave_at_start() else made


def _span(bundle: ParameterBundle) -> range:
    """From the first operator that has to do with a bundle to the last."""
    return range(min(bundle.wanted, bundle.use.reads[0]), max(bundle.use.last_kept, bundle.use.reads[-1]))


def _cut(stretch: Stretch, packed: Sequence[ParameterBundle]) -> tuple[int, int, int] | None:
    """Where periods are left out: between two bundles."""
    first = stretch.start + _BEFORE * stretch.length
    over = {place for bundle in packed for place in _span(bundle)}
    seam = next((place for place in range(first, first + stretch.length) if place - 1 not in over), None)
    return None if seam is None else (seam, (stretch.count - _BEFORE - _AFTER) * stretch.length, stretch.length)


def _is_gathered_soon(stretch: Stretch, bundles: Sequence[ParameterBundle], drafts: Drafts) -> bool:
    """Whether what is gathered ahead is used soon: of every kind there is enough in a few periods."""
    period = range(stretch.start + stretch.length, stretch.start + 2 * stretch.length)
    num_bytes: dict[Hashable, int] = {}
    for bundle in bundles:
        if bundle.kind.gathered and bundle.use.reads[0] in period:
            num_bytes[bundle.kind] = num_bytes.get(bundle.kind, 0) + bundle.num_bytes
    return min(num_bytes.values(), default=inf) * _NEAR >= BUNDLES_AHEAD * drafts.bundle_bytes


def _shift(place: int, cuts: _Cuts) -> int:
    """How many operators are left out before one."""
    return sum(count for seam, count, _ in cuts if place >= seam + count)


def _is_gone(place: int, cuts: _Cuts) -> bool:
    return any(seam <= place < seam + count for seam, count, _ in cuts)


def _moved_root(root: int, skeleton: Skeleton, short: Skeleton, cuts: _Cuts) -> int:
    """The number in the short step of a leaf, or of what one is cast to; none, -1, where that is left out."""
    maker = skeleton.roots[root].maker
    if maker < 0:
        return root
    return -1 if _is_gone(maker, cuts) else short.operators[maker - _shift(maker, cuts)].makes[skeleton.outputs[root]]


def _moved_bundle(bundle: ParameterBundle, cuts: _Cuts, is_wide: bool) -> ParameterBundle | None:
    """A bundle in the short step: one that is used all over is all there, of others those that are used there."""
    use = bundle.use
    if is_wide:
        reads = tuple(place - _shift(place, cuts) for place in use.reads if not _is_gone(place, cuts))
        last = use.last_kept - (_shift(use.last_kept, cuts) if use.last_kept >= 0 else 0)
        return replace(bundle, use=Use(reads, last, use.back), wanted=bundle.wanted - _shift(bundle.wanted, cuts))
    if _is_gone(use.reads[0], cuts):
        return None
    by = _shift(use.reads[0], cuts)
    moved = Use(tuple(place - by for place in use.reads), use.last_kept - by if use.last_kept >= 0 else -1, use.back)
    return replace(bundle, use=moved, wanted=bundle.wanted - by)


def _codes(
    skeleton: Skeleton,
    layouts: Layouts,
    regathered: frozenset[str],
    segments: Sequence[Segment],
    near: Sequence[ParameterBundle],
    wide: Sequence[ParameterBundle],
) -> NDArray[np.int64]:
    """For every operator a number, the same for those that are alike as they are laid out and run again, and read from
    bundles alike; those at which one that is used all over begins or is waited for are like no others."""
    kinds, own = _kinds(skeleton)
    leaves = skeleton.graph.leaves
    stored = {root: (layout, leaves[root].name in regathered) for root, layout in layouts.leaves.items()}
    again: dict[int, Hashable] = {}
    for segment in segments:
        kept = segment.kept
        again |= {p: (segment[0] - p, segment[1] - p, p in kept) for p in range(segment[0], segment[1] + 1)}
    read: dict[int, list[Hashable]] = {}
    for bundle in near:
        use = bundle.use
        for p in use.reads:
            rest = tuple(place - p for place in (*use.reads, use.last_kept, bundle.wanted))
            read.setdefault(p, []).append((rest, use.last_kept < 0, bundle.num_bytes))
    known: dict[Hashable, int] = {}
    found = [
        known.setdefault(
            (kind, choice, tuple(map(stored.__getitem__, roots)), again.get(place), *read.get(place, ())), len(known)
        )
        for place, (kind, choice, roots) in enumerate(zip(kinds, layouts.choices, own, strict=True))
    ]
    for place in {place for b in wide for place in (b.use.reads[0], b.use.last_kept, b.wanted) if place >= 0}:
        found[place] = len(known) + place
    return np.array(found, np.int64)


@lru_cache(64)
def _kinds(skeleton: Skeleton) -> tuple[list[int], list[tuple[int, ...]]]:
    """For every operator a number, the same for those that are alike in whatever layouts; and the leaves it reads."""
    tasks, wide = skeleton.tasks[1], _wide(skeleton)
    results, draws, known = {*skeleton.results}, {*skeleton.draws}, dict[Hashable, int]()
    kinds, own = [], []
    for place, operator in enumerate(skeleton.operators):
        reads = tuple(_told(skeleton, root, place, wide) for root in operator.reads)
        makes = tuple(
            root if root in wide or root in results else tuple((p - place, i) for p, i in skeleton.readers[root])
            for root in operator.makes
        )
        told = operator.needs, operator.keeps, operator.remembers, operator.is_kept, place in draws
        kinds.append(known.setdefault((tasks[place], reads, makes, told), len(known)))
        own.append(tuple(root for root in operator.reads if skeleton.roots[root].leaf is not None))
    return kinds, own


def _wide(skeleton: Skeleton) -> set[int]:
    """The tensors that are read over a large part of the model, and leaves that nobody reads."""
    most, found = len(skeleton.operators) // _WIDE, set[int]()
    for root, readers in enumerate(skeleton.readers):
        places = [place for place, _ in readers]
        maker = skeleton.roots[root].maker
        if not places or max(places) - (min(places) if maker < 0 else maker) > most:
            found.add(root)
    return found


def _told(skeleton: Skeleton, root: int, place: int, wide: set[int]) -> Hashable:
    """What an operator sees of a tensor that it reads."""
    if root in wide:
        return root
    made, leaf = skeleton.roots[root], skeleton.roots[root].leaf
    readers = tuple((reader - place, operand) for reader, operand in skeleton.readers[root])
    if leaf is None:
        return place - made.maker, skeleton.outputs[root], readers
    return leaf.kind, leaf.is_trained, bool(leaf.aliases), root in skeleton.results, readers


@lru_cache(64)
def shorten(skeleton: Skeleton, cuts: _Cuts) -> Skeleton | None:
    """A skeleton without some operators; None where something is read from further back than the period before the
    last."""
    operators, roots, wide, num_leaves = skeleton.operators, skeleton.roots, _wide(skeleton), len(skeleton.graph.leaves)
    ends = [(seam + count, count, length) for seam, count, length in cuts]
    reads: dict[int, tuple[int, ...]] = {}
    for place, operator in enumerate(operators):
        if _is_gone(place, cuts):
            continue
        reads[place] = operator.reads
        end, count, length = max((one for one in ends if one[0] <= place), default=(0, 0, 0))
        begins = [end if root in wide else _begins(skeleton, root) for root in operator.reads]
        if min(begins, default=end) < end:  # what came from periods that are left out comes from those before
            if place - min(begins) > _NEAR * length:
                return None
            pairs = zip(begins, operator.reads, operators[place - count].reads, strict=True)
            reads[place] = tuple(before if begin < end else root for begin, root, before in pairs)
    stays = [*range(num_leaves), *(root for place in reads for root in operators[place].makes)]
    numbers = {root: number for number, root in enumerate(stays)}
    short = [
        replace(operators[p], reads=tuple(map(numbers.__getitem__, some)),
                makes=tuple(map(numbers.__getitem__, operators[p].makes)))
        for p, some in reads.items()
    ]  # fmt: skip
    makers = ((root, roots[root].maker) for root in stays)
    return Skeleton(
        skeleton.graph,
        tuple(replace(roots[root], maker=maker - _shift(maker, cuts)) for root, maker in makers),
        tuple(short),
        tuple(numbers[root] for root in skeleton.results),
        find_readers(short, len(stays)),
        tuple(place - _shift(place, cuts) for place in skeleton.draws if not _is_gone(place, cuts)),
        tuple(_told_left_out(skeleton, cut, cuts, wide) for cut in cuts),
    )


def _told_left_out(skeleton: Skeleton, cut: tuple[int, int, int], cuts: _Cuts, wide: set[int]) -> LeftOut:
    """A cut in the short skeleton, with the leaves of what it leaves out."""
    seam, count, length = cut
    leaves = []
    for root in range(len(skeleton.graph.leaves)):
        if root not in wide and seam <= (place := skeleton.readers[root][0][0]) < seam + count:
            operand, phase = skeleton.readers[root][0][1], (place - seam) % length
            before = skeleton.operators[seam - length + phase].reads[operand]
            leaves.append((root, before, skeleton.operators[seam + count + phase].reads[operand]))
    return LeftOut(seam - _shift(seam, cuts), count, length, tuple(leaves))


def _begins(skeleton: Skeleton, root: int) -> int:
    """The operator that makes a tensor, or is the first to read a leaf."""
    maker = skeleton.roots[root].maker
    return maker if maker >= 0 else skeleton.readers[root][0][0]
