"""Sizes of a rule whose shapes contradict each other, as far as the prover sees: good enough to guess instances.

A rule may be false, or not covered by the prover, and still run on some tensors; those are what refutes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conjoin.rules.definitions.dims import Dim, Dims, IllFormed, NotCovered


@dataclass(slots=True)
class LenientDims(Dims):
    """Dims of which those that contradict each other are left apart."""

    made: dict[tuple[int, ...], tuple[Dim, ...]] = field(default_factory=dict)

    def unify(self, one: Dim, other: Dim, is_said: bool = False) -> None:
        try:
            Dims.unify(self, one, other, is_said)
        except (IllFormed, NotCovered):
            return

    def split(self, dim: Dim) -> tuple[Dim, Dim]:
        try:
            return Dims.split(self, dim)
        except (IllFormed, NotCovered):
            first, second = self._instead(dim.find(), 2)
            return first, second

    def divide(self, dim: Dim, parts: Dim) -> Dim:
        try:
            return Dims.divide(self, dim, parts)
        except (IllFormed, NotCovered):
            return self._instead(dim.find(), 1)[0]

    def odd(self, dim: Dim) -> Dim:
        try:
            return Dims.odd(self, dim)
        except (IllFormed, NotCovered):
            return self._instead(dim.find(), 1)[0]

    def _instead(self, dim: Dim, count: int) -> tuple[Dim, ...]:
        """New dims in place of parts that a dim does not have, always the same ones."""
        key = (id(dim), count)
        if key not in self.made:
            self.made[key] = tuple(self.new(dim.words) for _ in range(count))
        return self.made[key]
