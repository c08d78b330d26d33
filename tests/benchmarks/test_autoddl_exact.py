"""AutoDDL's grids: the reference is right, figure 3 comes out, and the exact core reaches what units can say."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.autoddl_exact import (
    BATCH,
    SIZES,
    between_bytes,
    bytes_of,
    end_bytes,
    grids,
    least_attention,
    least_over_grids,
    megatron_share,
    skeleton_of_chain,
    solve_counted,
    solve_on_units,
    weights_bytes,
)
from conjoin.machine import parse_machine


@pytest.mark.parametrize("nodes", [2, 8])
def test_the_reference_is_the_least_of_all_grids(nodes: int) -> None:
    sizes = SIZES[1:]
    totals = []
    for path in product(grids(nodes), repeat=3):
        own = sum(weights_bytes(grid, a, b) for grid, a, b in zip(path, sizes, sizes[1:], strict=False))
        moved = sum(between_bytes(path[i], path[i + 1], BATCH, sizes[i + 1]) for i in range(2))
        totals.append(own + moved + end_bytes(path[-1], BATCH, sizes[-1]))
    assert least_over_grids(nodes, sizes, BATCH)[0] == pytest.approx(min(totals))


def test_figure_3() -> None:
    assert least_attention(64, 4) == (least_attention(64, 4)[0], (4, 8, 2), (4, 4, 4))
    assert (least_attention(64, 4)[0] * 384, megatron_share(4, 16) * 384) == (96, 180)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_with_a_unit_for_every_axis_the_exact_core_finds_the_least(nodes: int) -> None:
    """8 nodes are 3 axes of 2: every grid of every layer is among the choices.

    The core takes what 64 bytes cost for the latency of small parameters: a few hundred bytes of a hundred million.
    """
    mesh = parse_machine(f"piz-daint:{nodes}").mesh
    found = solve_on_units(skeleton_of_chain(), mesh, len(mesh.axes))
    assert found.bytes == pytest.approx(least_over_grids(nodes, SIZES, BATCH)[0], rel=5e-6)


def test_on_more_axes_than_units_nothing_below_the_least_is_claimed() -> None:
    mesh = parse_machine("piz-daint:128").mesh
    two, three = (solve_on_units(skeleton_of_chain(), mesh, units).bytes for units in (2, 3))
    least = least_over_grids(128, SIZES, BATCH)[0]
    assert least * (1 - 1e-9) <= three <= two and three < 1.1 * least


@pytest.mark.parametrize("nodes", [2, 8, 128, 4096])
def test_counted_axes_reach_the_least_of_all_grids_and_so_do_their_names(nodes: int) -> None:
    """Up to what is taken for the latency of small parameters: at most 64 bytes for each of eight, there and back."""
    found = solve_counted(skeleton_of_chain(), parse_machine(f"piz-daint:{nodes}").mesh)
    least, path = least_over_grids(nodes, SIZES, BATCH)
    assert found.bytes == pytest.approx(least, abs=1024)
    assert bytes_of(path, SIZES, BATCH) == pytest.approx(least) == bytes_of(found.grids, SIZES, BATCH)
    assert found.named_bytes == pytest.approx(found.bytes, rel=1e-9)
