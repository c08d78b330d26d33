"""From the ranks of one stage to those of another: which rank sends which part of a tensor to whom."""

from __future__ import annotations

from dataclasses import dataclass

from conjoin.ir import Region, overlap, region_of
from conjoin.machine import Mesh
from conjoin.ops import Layout


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor on some ranks, which stand on a mesh in this order."""

    layout: Layout
    mesh: Mesh
    ranks: tuple[int, ...]

    def regions(self, shape: tuple[int, ...]) -> dict[int, Region]:
        """What every rank holds."""
        return {rank: region_of(shape, self.layout, self.mesh, place) for place, rank in enumerate(self.ranks)}


@dataclass(frozen=True, slots=True)
class Sending:
    """A part of a tensor from one rank to another."""

    sender: int
    receiver: int
    region: Region


def direct_messages(shape: tuple[int, ...], source: Held, target: Held) -> tuple[Sending, ...]:
    """Every part straight from a rank that has it to every rank that wants it; copies take turns to send.

    A rank that has what it wants sends it to itself.
    """
    holders: dict[Region, list[int]] = {}
    for rank, region in source.regions(shape).items():
        holders.setdefault(region, []).append(rank)
    turns = dict.fromkeys(holders, 0)
    found: list[Sending] = []
    for receiver, wanted in target.regions(shape).items():
        for region, ranks in holders.items():
            part = overlap(region, wanted)
            if part is not None:
                own = receiver in ranks
                found.append(Sending(receiver if own else ranks[turns[region] % len(ranks)], receiver, part))
                turns[region] += not own
    return tuple(found)
