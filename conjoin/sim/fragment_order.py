"""Where the fragments of a step stand, and in which order they run: those of a micro-batch once for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from conjoin.sim.engine import Fragment
from conjoin.sim.parts import PartSpan
from conjoin.sim.periods import Seam
from conjoin.sim.skeleton import LeftOut


@dataclass(frozen=True, slots=True)
class FragmentOrder:
    """The start, operators forward, the middle, operators backward in reverse, the wait for gradients, the update."""

    num_operators: int
    steps: int
    """Micro-batches one after the other, of all but the first and the last fragment."""
    parts: tuple[PartSpan, ...]
    """Operators that run in micro-batches of their own."""

    def forward(self, operator: int) -> int:
        """Where the forward fragment of an operator stands."""
        return 1 + operator

    def backward(self, operator: int) -> int:
        return 2 * self.num_operators + 1 - operator

    def unrolled(self, fragments: list[Fragment]) -> Sequence[Fragment]:
        """The fragments in the order they run."""
        if self.parts:
            return [fragments[place] for place in self._places()]
        if self.steps == 1:
            return fragments
        return (fragments[0], *fragments[1:-1] * self.steps, fragments[-1])

    def positions_of(self, fragments: Iterable[int]) -> list[int]:
        """Where fragments stand in the order they run, in ascending order."""
        if self.parts:
            wanted = set(fragments)
            return [position for position, place in enumerate(self._places()) if place in wanted]
        last = self._num_fragments - 1
        length = last - 1
        found: list[int] = []
        for position in fragments:
            repeated = 0 < position < last
            found += [position + i * length for i in range(self.steps)] if repeated else []
            found += [] if repeated else [position if position == 0 else 1 + self.steps * length]
        return sorted(found)

    def seams(self, gone: Sequence[LeftOut]) -> tuple[Seam, ...]:
        """Where fragments are left out, forward and backward."""
        forward = (Seam(self.forward(some.seam), some.count, some.length) for some in gone)
        backward = (Seam(self.backward(some.seam - 1), some.count, some.length) for some in reversed(gone))
        return (*forward, *backward)

    @property
    def _num_fragments(self) -> int:
        return 2 * self.num_operators + 4

    def _places(self) -> Iterator[int]:
        """The places of fragments in the order they run: those of a part as often as it has micro-batches."""
        spans = {}
        for part in self.parts:
            spans[self.forward(part.first)] = self.forward(part.last), part.times
            spans[self.backward(part.last)] = self.backward(part.first), part.times
        place = 0
        while place < self._num_fragments:
            last, count = spans.get(place, (place, 1))
            for _ in range(count):
                yield from range(place, last + 1)
            place = last + 1
