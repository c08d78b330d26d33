"""What neighbours send each other, and how much of it goes from node to node."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

from conjoin.comm import ExchangedBytes, move_regions, node_exchanges
from conjoin.comm.exchanges import _flow
from conjoin.frontends import capture
from conjoin.ir import Region, RegionMove, num_elements, operand_move, place
from conjoin.machine import Machine
from conjoin.search import make_plan

SIDE = 4 * 8 * 1 * 16 * 4
"""Bytes of one row or column of 4 images of 8 channels and 16 × 16 points."""


def halo(strategy: str, num_nodes: int, devices_per_node: int) -> ExchangedBytes:
    """What is exchanged for a convolution of 3 × 3."""
    model, batch = nn.Conv2d(8, 8, 3, padding=1), (torch.randn(4, 8, 16, 16), torch.randn(4, 8, 16, 16))
    graph = capture(model.train(), batch, nn.functional.mse_loss)
    plan = make_plan(graph, Machine("some", num_nodes, devices_per_node, "cpu"), strategy)
    node = next(node for node in plan.graph.nodes if node.op == "conv2d")
    found = node_exchanges(node, place(node, plan.mesh), plan.mesh).operands[0]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("strategy", "nodes", "devices", "sent", "load"),
    [
        ("spatial:h=4", 2, 2, 2 * SIDE, 2 * SIDE),
        ("spatial:h=4", 4, 1, 2 * SIDE, 2 * SIDE),
        ("spatial:h=4", 1, 4, 2 * SIDE, 2 * SIDE),
        ("spatial:h=2,dp=2@d0,n0", 2, 2, SIDE // 2, SIDE // 2),
        ("spatial:h=2,dp=2", 2, 2, SIDE // 2, SIDE // 2),
    ],
)
def test_neighbours_in_a_row_are_what_a_row_is(strategy: str, nodes: int, devices: int, sent: int, load: int) -> None:
    found = halo(strategy, nodes, devices)
    assert (found.forward.largest, found.forward_load) == (sent, load)


def test_on_a_grid_every_rank_of_a_node_sends_to_the_other_node() -> None:
    """Half a side and a corner each, where in a row one rank sends one side: a row with that load has more to send."""
    found = halo("spatial:h=2,w=2", 2, 2)
    corner = SIDE // 16
    assert found.forward.largest == SIDE + corner
    assert found.forward_load == 2 * 2 * (SIDE // 2 + corner) > found.forward.largest
    inside = halo("spatial:h=2,w=2", 1, 4)
    assert inside.forward_load == inside.forward.largest


@pytest.mark.parametrize("strategy", ["spatial:h=2,dp=6", "spatial:h=2,w=3,dp=2", "spatial:h=4,dp=3@d0,n0,d1"])
def test_all_groups_exchange_as_many(strategy: str) -> None:
    """Whatever other axes split, also unevenly: asked of every rank one by one."""
    model, batch = nn.Conv2d(8, 8, 3, padding=1), (torch.randn(14, 8, 10, 16), torch.randn(14, 8, 10, 16))
    graph = capture(model.train(), batch, nn.functional.mse_loss)
    plan = make_plan(graph, Machine("some", 2, 6, "cpu"), strategy)
    node = next(node for node in plan.graph.nodes if node.op == "conv2d")
    placed = place(node, plan.mesh)
    found = node_exchanges(node, placed, plan.mesh).operands[0]
    assert found is not None
    for rank in range(plan.mesh.size):
        move = operand_move(node, 0, placed, plan.mesh, rank)
        sends = [] if move is None else move_regions(move.have, move.want, move.group, rank).sends
        others = [part for place, part in sends if move is not None and move.group[place] != rank]
        assert found.forward[rank] == 4 * sum(map(num_elements, others))


@pytest.mark.parametrize("seed", range(20))
def test_all_members_at_once_as_by_the_table_of_each(seed: int) -> None:
    """The judge are the tables that ranks run by; regions in one and two dims, some of which several members have."""
    rng = Random(seed)
    rows, columns, copies = rng.randint(1, 5), rng.choice([1, 1, 3]), rng.choice([1, 1, 2, 3])
    pieces = [((3 * i, 3 * i + 3), (4 * j, 4 * j + 4)) for i in range(rows) for j in range(columns)]
    have = tuple(pieces * copies)

    def around(region: Region) -> Region:
        low, high = rng.randint(0, 4), rng.randint(0, 4)
        return tuple((max(0, start - low), stop + high) for start, stop in region)

    want = tuple(around(rng.choice(have)) if rng.random() < 0.3 else around(region) for region in have)
    move = RegionMove(tuple(range(len(have))), have, want)
    flow = _flow(move)
    sent = zip(flow.senders.tolist(), flow.receivers.tolist(), flow.elements.tolist(), strict=True)
    tables = (move_regions(have, want, move.group, rank).sends for rank in move.group)
    judged = [(me, to, num_elements(part)) for me, table in enumerate(tables) for to, part in table if to != me]
    assert sorted(sent) == judged
