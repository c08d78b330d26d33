"""When messages come: worked out by hand on links of one byte a second, and as the runtime gets ready."""

from __future__ import annotations

import pytest

from conjoin.machine import DeviceType, Link, Machine, NodeKind
from conjoin.runtime.pipelines import stage_transfers
from conjoin.sim import message_times
from conjoin.sim.message_times import Posted, arrival_seconds


def machine(nodes: int) -> Machine:
    """One rank on each node, behind a card that lets a megabyte pass each way in a second."""
    device = DeviceType("slow", "cpu", 2**33, 1e10, (("float32", 5e10),))
    links = (Link(("0", "card"), 1e15, 0.0), Link(("card", "network"), 1e6, 0.0))
    return Machine("m", nodes, 1, "cpu", nodes=(NodeKind("node", nodes, (device,), links, ("card",)),))


MB = 1_000_000
BEFORE = (Posted(1, 2, 2 * MB, 0, -1),)
CASES = {
    "two share what leaves a rank, and the longer one goes on alone": (
        3, (Posted(0, 1, MB, 0, -1), Posted(0, 2, 3 * MB, 0, -1)), 4,
    ),
    "of one way one after the other": (2, (Posted(0, 1, MB, 0, -1), Posted(0, 1, MB, 1, -1)), 2),
    "what is limited elsewhere leaves its share to others": (
        4, (Posted(0, 2, MB, 0, -1), Posted(1, 2, MB, 0, -1), Posted(1, 3, MB, 0, -1)), 2,
    ),
    "a chain passes on what came while the next comes": (
        3, (Posted(0, 1, MB, 0, -1), Posted(0, 1, MB, 1, -1), Posted(1, 2, MB, 1, 0), Posted(1, 2, MB, 2, 1)), 3,
    ),
    "who waits for nothing sends at once, also in a later round": (3, (*BEFORE, Posted(0, 1, MB, 1, 0)), 2),
    "a receiver is not ready before what it waits for": (3, (*BEFORE, Posted(0, 2, MB, 1, 0)), 3),
    "then who sends to it does not go on either": (4, (*BEFORE, Posted(0, 2, MB, 1, 0), Posted(0, 3, MB, 2, 1)), 4),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_messages_come_when_they_are_expected_by_hand(case: str) -> None:
    nodes, messages, seconds = CASES[case]
    assert arrival_seconds(messages, machine(nodes)) == pytest.approx(seconds, abs=1e-3)


def test_ranks_get_ready_as_early_as_in_the_runtime() -> None:
    assert message_times.AHEAD == stage_transfers.AHEAD
