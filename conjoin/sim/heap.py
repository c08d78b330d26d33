"""Blocks of memory, who holds them, and the most that is held at once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Heap:
    """Blocks of memory with the number of their holders."""

    live: int = 0
    peak: int = 0
    """Since it was last asked."""
    sizes: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> int:
        self.sizes.append(num_bytes)
        self.holders.append(1)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        return len(self.sizes) - 1

    def hold(self, block: int) -> int:
        self.holders[block] += 1
        return block

    def drop(self, block: int) -> None:
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self.live -= self.sizes[block]

    def pass_by(self, num_bytes: int) -> None:
        """What is there for a moment."""
        self.peak = max(self.peak, self.live + num_bytes)

    def take_peak(self) -> int:
        peak, self.peak = self.peak, self.live
        return peak
