"""What blocks of a model may be run again in the backward pass, and what operators hold for it then.

A block has *modes*: nothing of it is run again, what is cheap for its bytes, or all (`blocks.py`). Each says of every
operator whether it is run again, and which tensors it holds: as the simulator counts them, views are free, and what
several keep is held once (`conjoin.sim`). The batch is there from the beginning to the end of a step, split as it is
read: whoever reads a tensor of it first holds it. A mode is a variable of its block beside the choices of its
operators, so that what is run again is decided together with layouts and storage; eliminating it takes, entry by entry,
the least of the block's tables for all its modes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from conjoin.comm import run_again
from conjoin.ir import LeafKind, Segment, asked_segments
from conjoin.search.blocks import block_segments, cheap_parts
from conjoin.sim import Kept, Skeleton, kept_of


@dataclass(frozen=True, slots=True)
class Held:
    """What an operator holds for the backward pass, and whether it is run again there."""

    again: bool = False
    operands: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra: int = 0
    """Bytes beside them, of the whole operator."""


NOTHING = Held()


@dataclass(frozen=True)
class Recompute:
    """The blocks of a model with their modes; the first is to run nothing again."""

    skeleton: Skeleton
    kind: str
    """Of devices."""
    blocks: tuple[Segment, ...]

    @cached_property
    def modes(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        """By block, what is run again in each of its modes; the same number for all."""
        parts = cheap_parts(self.skeleton.graph, self.blocks)
        return tuple(((), some or (block,), (block,)) for block, some in zip(self.blocks, parts, strict=True))

    @cached_property
    def block_of(self) -> dict[int, int]:
        """The block of every operator that is in one."""
        return {place: i for i, block in enumerate(self.blocks) for place in range(block[0], block[1] + 1)}

    @cached_property
    def held(self) -> tuple[tuple[Held, ...], ...]:
        """By operator, what it holds in every mode of its block; in the only one where it is in none."""
        found: list[tuple[Held, ...]] = [(NOTHING,)] * len(self.skeleton.operators)
        for rest in _runs_outside(self.block_of, len(found)):
            for place, held in zip(rest, self._hold(rest, ()), strict=True):
                found[place] = (held,)
        for block, modes in zip(self.blocks, self.modes, strict=True):
            places = range(block[0], block[1] + 1)
            each = [self._hold(places, segments) for segments in modes]
            for place, modes_of in zip(places, zip(*each, strict=True), strict=True):
                found[place] = modes_of
        return tuple(found)

    @cached_property
    def _kept(self) -> tuple[Kept | None, ...]:
        operators = self.skeleton.operators
        return tuple(
            kept_of(op.call, op.node.types, op.needs, self.kind) if op.remembers and not op.is_kept else None
            for op in operators
        )

    @cached_property
    def _memory(self) -> dict[int, int]:
        """For every tensor that is a view the one whose memory it shares."""
        found: dict[int, int] = {}
        for op, kept in zip(self.skeleton.operators, self._kept, strict=True):
            for made, shared in zip(op.makes, kept.views if kept is not None else (), strict=False):
                if shared >= 0:
                    found[made] = found.get(op.reads[shared], op.reads[shared])
        return found

    @cached_property
    def _first_readers(self) -> dict[int, tuple[int, int]]:
        """For every tensor of the batch the operator that reads it first, and as which operand."""
        leaves = enumerate(root.leaf for root in self.skeleton.roots)
        fed = [i for i, leaf in leaves if leaf is not None and leaf.kind is LeafKind.INPUT]
        return {i: min(self.skeleton.readers[i]) for i in fed if self.skeleton.readers[i]}

    def _hold(self, places: Sequence[int], segments: Sequence[Segment]) -> list[Held]:
        """What operators in a row hold where segments of them are run again; each tensor the first that needs it."""
        operators, roots = self.skeleton.operators, self.skeleton.roots
        spans = run_again(segments, [op.remembers for op in operators])
        span_of = {place: span for span in spans for place in range(span[0], span[1] + 1)}
        known: set[int] = set()
        found: list[Held] = []
        for place in places:
            op, kept, span = operators[place], self._kept[place], span_of.get(place)
            reads = [self._memory.get(root, root) for root in op.reads]
            makes = [self._memory.get(root, root) for root in op.makes]
            if span is None:
                held = list(kept.operands) if kept is not None else []
                made = list(kept.outputs) if kept is not None else []
            else:  # what is given to the segment stays, and what is not run again
                held = [i for i, root in enumerate(reads) if not span[0] <= roots[root].maker <= span[1]]
                made = [i for i, root in enumerate(op.makes) if makes[i] == root] if place in span.kept else []
            mine, own = list[int](), list[int]()
            for numbers, tensors, into in ((held, reads, mine), (made, makes, own)):
                for i in numbers:
                    if roots[tensors[i]].leaf is None and tensors[i] not in known:
                        known.add(tensors[i])
                        into.append(i)
            mine += [i for i, root in enumerate(op.reads) if self._first_readers.get(root) == (place, i)]
            extra = kept.extra if kept is not None and span is None else 0
            found.append(Held(span is not None and place not in span.kept, tuple(mine), tuple(own), extra))
        return found

    def mode_of(self, block: int, segments: frozenset[Segment]) -> int | None:
        """The mode in which some segments are run again of a block; None where there is none."""
        first, last = self.blocks[block]
        mine = {segment for segment in segments if first <= segment[0] <= last}
        return next((i for i, mode in enumerate(self.modes[block]) if set(mode) == mine), None)


def _runs_outside(block_of: dict[int, int], count: int) -> Iterator[list[int]]:
    """Operators in a row that are in no block."""
    run: list[int] = []
    for place in range(count + 1):
        if place < count and place not in block_of:
            run.append(place)
        elif run:
            yield run
            run = []


@lru_cache(16)
def find_recompute(skeleton: Skeleton, kind: str, blocks: tuple[Segment, ...] | None = None) -> Recompute:
    """The blocks of a model that may be run again; none where the model itself says what is."""
    graph = skeleton.graph
    found = block_segments(graph) if blocks is None else blocks
    return Recompute(skeleton, kind, () if asked_segments(graph) else found)
