"""Rings side by side: as many as brute force lays, never more than links carry, and as in a cube of NVLinks."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations, product
from pathlib import Path
from random import Random

import pytest

from conjoin.cost import collective_seconds
from conjoin.cost.ring_packing import joined, rings_rate
from conjoin.machine import Machine

MACHINES = Path(__file__).parents[2] / "benchmarks" / "machines"


def by_brute_force(num_members: int, room: dict[tuple[int, int], int]) -> int:
    """Rings of one unit, by every number of times that every cycle could be laid."""
    cycles = {
        frozenset(joined(a, b) for a, b in pairwise((0, *rest, 0))) for rest in permutations(range(1, num_members))
    }
    usable = [cycle for cycle in cycles if cycle <= room.keys()]
    most = max(room.values(), default=0)
    return max(
        sum(counts)
        for counts in product(range(most + 1), repeat=len(usable))
        if all(sum(n for n, c in zip(counts, usable, strict=True) if pair in c) <= room[pair] for pair in room)
    )


@pytest.mark.parametrize("seed", range(12))
def test_as_many_rings_as_brute_force_lays(seed: int) -> None:
    rng = Random(seed)
    pairs = list(combinations(range(4), 2))
    room = {pair: rng.choice((1, 2, 3)) for pair in rng.sample(pairs, rng.choice((4, 5, 6)))}
    halves = {pair: 2 * count for pair, count in room.items()}
    least = min(room.values())
    whole = 2.0 * by_brute_force(4, {pair: count // least for pair, count in room.items()}) * least
    half = 1.0 * by_brute_force(4, {pair: count // least for pair, count in halves.items()}) * least
    assert rings_rate(range(4), {pair: float(count) for pair, count in room.items()}) == max(whole, half)


def test_no_ring_where_a_member_hangs_on_one_link() -> None:
    assert rings_rate(range(3), {(0, 1): 1.0, (1, 2): 1.0}) == 0.0
    assert rings_rate(range(2), {(0, 1): 1.0}) == 0.0


def test_a_cube_of_nvlinks_carries_what_nccl_is_known_to_reach() -> None:
    """NVIDIA tells 20.6 GB/s of an NVLink of V100 (`src/graph/topo.h`), of which a GPU of DGX-1 has six: three rings in
    both directions. Halves of the cube have four links to a GPU: two rings.
    """
    machine = Machine.load(MACHINES / "dgx-1.toml")
    for axes, size, links in ((("d0", "d1", "d2"), 8, 6), (("d1", "d2"), 4, 4)):
        sent = 2**30
        seconds = collective_seconds(machine, "all-reduce", axes, sent).value
        assert sent / seconds == pytest.approx(links * 20.6e9, rel=0.03), size
