"""Who sends what to whom in a step: tables of regions that all members of a group derive alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conjoin.comm.pieces import held_regions
from conjoin.comm.steps import Step, StepKind
from conjoin.ir import Region, holds, overlap
from conjoin.machine import Mesh


@dataclass(frozen=True, slots=True)
class Movement:
    """One rank's part of an exchange inside a group of ranks; all regions are in global coordinates.

    `sends` and `receives` pair a position in the group with a region; the rank is among them for what it keeps.
    """

    group: tuple[int, ...]
    have: Region
    want: Region
    sends: tuple[tuple[int, Region], ...]
    receives: tuple[tuple[int, Region], ...]


def move_regions(have: Sequence[Region], want: Sequence[Region], group: tuple[int, ...], rank: int) -> Movement:
    """The table of one rank when each member of a group has a region and wants another.

    `have` and `want` are by position in the group. Regions that members have are the same or disjoint; regions that
    they want may overlap, as halos do. What a member has it keeps; what several others have, they send in turn.

    >>> halo = move_regions([((0, 4),), ((4, 8),)], [((0, 5),), ((3, 8),)], (0, 1), 1)
    >>> halo.sends
    ((0, ((4, 5),)), (1, ((4, 8),)))
    >>> halo.receives
    ((0, ((3, 4),)), (1, ((4, 8),)))
    """
    me = group.index(rank)
    holders: dict[Region, list[int]] = {}
    for position, region in enumerate(have):
        holders.setdefault(region, []).append(position)
    receives = []
    for region, members in holders.items():
        part = overlap(region, want[me])
        if part is not None:
            sender = members[0] if len(members) == 1 else _senders(region, members, want)[me]
            receives.append((sender, part))
    sends = []
    senders = _senders(have[me], holders[have[me]], want)
    for position, sender in senders.items():
        part = overlap(have[me], want[position])
        if sender == me and part is not None:
            sends.append((position, part))
    return Movement(group, have[me], want[me], tuple(sorted(sends)), tuple(sorted(receives)))


def _senders(region: Region, holders: list[int], want: Sequence[Region]) -> dict[int, int]:
    """From which holder each member that wants a part of the region gets it."""
    wanting = [position for position, wanted in enumerate(want) if overlap(region, wanted) is not None]
    keeping = {position: position for position in wanting if position in holders}
    others = [position for position in wanting if position not in keeping]
    return keeping | {position: holders[i % len(holders)] for i, position in enumerate(others)}


def movement(step: Step, shape: tuple[int, ...], mesh: Mesh, rank: int) -> Movement:
    """One rank's table for a step that moves regions.

    In a reduce-scatter everyone sends to each member that member's target region out of its own partial sum; all that
    a rank receives is of the same region, and is to be summed. So in a reduce, where one rank receives.
    """
    group = mesh.group(rank, step.axes)
    held, wanted = (held_regions(shape, layout, mesh) for layout in (step.source, step.target))
    have = [held[member] for member in group]
    want = [wanted[member] for member in group]
    match step.kind:
        case (
            StepKind.ALL_GATHER
            | StepKind.ALL_TO_ALL
            | StepKind.BROADCAST
            | StepKind.GATHER
            | StepKind.SCATTER
            | StepKind.SEND
        ):
            return move_regions(have, want, group, rank)
        case StepKind.REDUCE_SCATTER:
            me = group.index(rank)
            receives = tuple((position, want[me]) for position in range(len(group)))
            return Movement(group, have[me], want[me], tuple(enumerate(want)), receives)
        case StepKind.REDUCE:
            me = group.index(rank)
            roots = [place for place, member in enumerate(group) if holds(step.target, mesh, member)]
            sends = tuple((root, want[root]) for root in roots)
            receives = tuple((place, want[me]) for place in range(len(group))) if me in roots else ()
            return Movement(group, have[me], want[me], sends, receives)
        case _:
            raise ValueError(f"{step.kind.value} moves no regions between ranks")
