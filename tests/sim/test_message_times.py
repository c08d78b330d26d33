"""When messages come: worked out by hand on links of a megabyte a second, and followed one by one on any machine."""

from __future__ import annotations

import random
from itertools import product
from time import process_time

import pytest

from conjoin.comm import SENDER_WAYS, Form, Grid, InRounds, Streams, WholeSlices, plan_transfer, streams_of
from conjoin.machine import Axis, DeviceType, Link, Machine, Mesh, NodeKind
from conjoin.ops import Invariant, Layout, Split
from conjoin.runtime.pipelines import stage_transfers
from conjoin.sim import crossing_seconds, message_phases, message_times, pair_classes, streams_seconds
from conjoin.sim.message_phases import seconds_in_phases
from conjoin.sim.pair_classes import ROUNDING, PairClasses, Pairs
from tests.sim import messages_one_by_one
from tests.sim.messages_one_by_one import Posted, busiest_link_seconds


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
    found = streams_seconds(Streams.of_messages(messages), machine(nodes))
    assert found == pytest.approx(seconds, abs=1e-3)
    assert messages_one_by_one.arrival_seconds(messages, machine(nodes)) == pytest.approx(found, rel=1e-12)


def test_ranks_get_ready_as_early_as_in_the_runtime() -> None:
    assert message_times.AHEAD == stage_transfers.AHEAD == messages_one_by_one.AHEAD


MACHINES = {"dgx-h100": 8, "summit": 6, "p3.8xlarge": 4, "piz-daint": 1, "h100-pcie": 8, "g5.48xlarge": 8}
"""With devices of a node: links of their own, shared ones, switches, and nodes of one device."""


def transfer(seed: int) -> tuple[InRounds, int, Machine]:
    """Any layouts of any shape between any hosts, also some in common, by our plan or by another way."""
    draw = random.Random(seed)
    name = draw.choice([*MACHINES])
    shape = tuple(draw.choice([6, 12, 16, 64, 100, 250]) for _ in range(draw.randint(1, 2)))
    placements = [Invariant(), *(Split(dim) for dim in range(len(shape)))]
    sides, num_nodes = [], 0
    for side in range(2):
        hosts, per_host = draw.randint(1, 6), draw.choice([1, max(1, MACHINES[name] // 2), MACHINES[name]])
        first = draw.randint(0, num_nodes) if side and draw.random() < 0.25 else num_nodes
        devices = [(first + host) * MACHINES[name] + place for host, place in product(range(hosts), range(per_host))]
        x, y = draw.choice(placements), draw.choice(placements)
        if x == y and isinstance(x, Split) and shape[x.dim] < hosts * per_host:
            y = Invariant()
        mesh = Mesh((Axis("x", hosts, True), Axis("y", per_host)))
        grid = Grid(mesh, tuple(devices), tuple(device // MACHINES[name] for device in devices))
        sides.append(((("x", x), ("y", y)), grid))
        num_nodes = max(num_nodes, first + hosts)
    itemsize, machine = draw.choice([4, 256, 4096]), Machine.preset(name, nodes=num_nodes)
    if draw.random() < 0.2:
        slices, form = WholeSlices(shape, *sides), draw.choice([*Form])
        order = SENDER_WAYS["longest first"](slices.tasks(form, 1.0))
        return slices.carried(form, order, chunks=draw.randint(1, 6)), itemsize, machine
    return plan_transfer(shape, itemsize, *sides, chunks=draw.choice([1, 2, 3, 8, 20])), itemsize, machine


def followed(plan: InRounds, itemsize: int, machine: Machine) -> float:
    """Every message of a transfer followed by itself."""
    found = [
        Posted(m.sender, m.receiver, (m.end - m.begin) * itemsize, number, m.after)
        for number, messages in enumerate(plan.rounds())
        for m in messages
        if m.sender != m.receiver
    ]
    if any(message.after >= 0 for message in found):
        return messages_one_by_one.arrival_seconds(found, machine)
    return busiest_link_seconds(found, machine)


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_what_is_alike_takes_as_long_as_all_messages_one_by_one(
    first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first_seed, first_seed + 50):
        found = transfer(seed)
        expected = followed(*found)
        assert crossing_seconds(*found) == pytest.approx(expected, rel=2 * ROUNDING), seed
        with monkeypatch.context() as exact:
            exact.setattr(pair_classes, "ROUNDING", 0.0)
            assert crossing_seconds(*found) == pytest.approx(expected, rel=1e-9), seed


SPLITS = {"rows": Split(0), "columns": Split(1)}


def laid_out(grid: Grid, between: str, inside: str) -> Layout:
    """Split between hosts and inside them, by the names of dims; whole where it is `all`."""
    axes = [(axis.name, between if axis.between_nodes else inside) for axis in grid.mesh.axes]
    return tuple((name, SPLITS[how]) for name, how in axes if how in SPLITS)


@pytest.mark.parametrize("source", [("all", "all"), ("rows", "rows"), ("all", "columns"), ("columns", "rows")])
@pytest.mark.parametrize("target", [("all", "all"), ("all", "rows"), ("rows", "all")])
def test_between_many_devices_few_messages_are_followed(source: tuple[str, str], target: tuple[str, str]) -> None:
    """A million of them are a few thousand, since hosts do the same."""
    grids = Grid.of_hosts(32, 8), Grid.of_hosts(32, 8, 256, 32)
    sides = [(laid_out(grid, *how), grid) for grid, how in zip(grids, (source, target), strict=True)]
    plan = plan_transfer((4096, 4096), 2, sides[0], sides[1], chunks=16)
    found = Pairs.of(streams_of(plan, 2), Machine.preset("dgx-h100", nodes=64))
    if not found.streams.is_at_once:
        assert len(PairClasses.of(found).messages) < 5000


@pytest.mark.parametrize(("name", "per_host"), [("dgx-a100", 8), ("p3.8xlarge", 4)])
@pytest.mark.parametrize("hosts", [(2, 3), (3, 2)])
def test_phase_by_phase_takes_about_as_long_as_all_messages_one_by_one(
    name: str, per_host: int, hosts: tuple[int, int]
) -> None:
    """Uneven pieces over cards of their own and over one card of a host, in one chunk and in more."""
    first, second = hosts
    grids = Grid.of_hosts(first, per_host), Grid.of_hosts(second, per_host, first * per_host, first)
    machine = Machine.preset(name, nodes=first + second)
    for shape, source, target in product(
        [(1003, 2047), (6011, 5122)], [("rows", "rows"), ("columns", "rows")], [("all", "all"), ("columns", "all")]
    ):
        sides = [(laid_out(grid, *how), grid) for grid, how in zip(grids, (source, target), strict=True)]
        plan = plan_transfer(shape, 4, sides[0], sides[1], chunks=5)
        found = seconds_in_phases(Pairs.of(streams_of(plan, 4), machine))
        assert found == pytest.approx(followed(plan, 4, machine), rel=0.12), (shape, source, target)


def test_what_comes_again_in_every_frame_is_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as many chunks of the same size are a hundred times as long, and no more work."""
    grids = Grid.of_hosts(2, 4), Grid.of_hosts(4, 4, 8, 2)
    machine, seconds, work = Machine.preset("p3.8xlarge", nodes=6), [], []
    gone: list[object] = []
    whole = message_phases._Phase.go_through
    monkeypatch.setattr(message_phases._Phase, "go_through", lambda x, ends: (gone.append(x), whole(x, ends)))
    for chunks in (40, 4000):
        plan = plan_transfer((1003 * chunks, 2047), 4, ((), grids[0]), ((), grids[1]), chunks=chunks)
        before = len(gone)
        seconds.append(seconds_in_phases(Pairs.of(streams_of(plan, 4), machine)))
        work.append(len(gone) - before)
    assert work[0] == work[1] < 40
    assert seconds[1] == pytest.approx(100 * seconds[0], rel=0.1)


@pytest.mark.parametrize("layouts", [(("rows", "all"), ("columns", "all")), (("rows", "rows"), ("all", "columns"))])
def test_uneven_pieces_of_five_hundred_devices_are_priced_in_about_a_second(
    layouts: tuple[tuple[str, str], tuple[str, str]],
) -> None:
    grids = Grid.of_hosts(64, 8), Grid.of_hosts(64, 8, 512, 64)
    sides = [(laid_out(grid, *how), grid) for grid, how in zip(grids, layouts, strict=True)]
    plan = plan_transfer((6000, 5122), 4, sides[0], sides[1], chunks=1)
    begun = process_time()
    assert crossing_seconds(plan, 4, Machine.preset("dgx-a100", nodes=128)) > 0
    assert process_time() - begun < 4.0
