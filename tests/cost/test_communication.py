"""Seconds of collectives: exact against hand computation, measured where there is a fit, and quick to ask for."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from conjoin.cost import NO_SECONDS, Source, collective_seconds, point_to_point_seconds
from conjoin.cost.communication import collective_lines
from conjoin.cost.patterns import SHARES, SOFTWARE_SECONDS
from conjoin.errors import UsageError
from conjoin.machine import COLLECTIVE_KINDS, NETWORK, Axis, CollectiveFit, DeviceType, Link, Machine, NodeKind
from tests.ir.wording import assert_three_sentences

CPU = DeviceType("cpu", "cpu", 2**30, 1e10, (("float32", 1e11),))
SOFTWARE = SOFTWARE_SECONDS["cpu"]
MIB = 2**20


def make(num_nodes: int, num_devices: int, links: list[Link], switches: tuple[str, ...] = ()) -> Machine:
    kind = NodeKind("node", num_nodes, (CPU,) * num_devices, tuple(links), switches)
    return Machine("test", num_nodes, num_devices, "cpu", nodes=(kind,))


def flat(num_nodes: int, bandwidth: float = 1e9, latency: float = 5e-6) -> Machine:
    """One device a node, all on one switch."""
    return make(num_nodes, 1, [Link(("0", NETWORK), bandwidth, latency)])


def shared_card() -> Machine:
    """Two nodes of two devices: 10 GB/s and 1 µs inside, one card of 1 GB/s and 4 µs for both."""
    links = [Link(("0", "1"), 10e9, 1e-6), *(Link((device, "nic"), 5e9, 1e-6) for device in "01")]
    return make(2, 2, [*links, Link(("nic", NETWORK), 1e9, 3e-6)], ("nic",))


def line(machine: Machine, kind: str, axes: tuple[str, ...], name: str) -> tuple[float, float]:
    """Latency, and seconds for each byte sent, of one of the ways."""
    (found,) = (line for line in collective_lines(machine, kind, axes) if line.name == name)
    return found.latency, found.seconds_per_byte


def seconds(machine: Machine, kind: str, axes: tuple[str, ...], sent: int) -> float:
    return collective_seconds(machine, kind, axes, sent).value


@pytest.mark.parametrize("p", [3, 5, 7])
def test_on_a_flat_network_it_is_the_table_of_the_paper(p: int) -> None:
    """AutoDDL, table 2, with 2 (p - 1) α for the all-reduce; on a prime number of nodes no way is better."""
    machine, size = flat(p), 100 * MIB
    alpha, beta = 2 * 5e-6 + SOFTWARE, 1 / 1e9
    one = (p - 1) * alpha + (p - 1) / p * size * beta
    assert seconds(machine, "all-gather", ("n0",), (p - 1) * size // p) == pytest.approx(one, rel=1e-7)
    assert seconds(machine, "reduce-scatter", ("n0",), (p - 1) * size // p) == pytest.approx(one, rel=1e-7)
    assert seconds(machine, "all-to-all", ("n0",), (p - 1) * size // p) == pytest.approx(one, rel=1e-7)
    assert seconds(machine, "all-reduce", ("n0",), 2 * (p - 1) * size // p) == pytest.approx(2 * one, rel=1e-7)


def test_two_exchange_the_whole_at_once() -> None:
    alpha = 2 * 5e-6 + SOFTWARE
    assert seconds(flat(2), "all-reduce", ("n0",), MIB) == pytest.approx(alpha + MIB / 1e9)


def test_the_ring_of_any_number_of_nodes_is_the_table_of_the_paper() -> None:
    machine = flat(12)
    alpha = 2 * 5e-6 + SOFTWARE
    assert line(machine, "all-reduce", ("n0", "n1", "n2"), "ring") == pytest.approx((22 * alpha, 1e-9))
    assert line(machine, "all-gather", ("n0", "n1", "n2"), "ring") == pytest.approx((11 * alpha, 1e-9))
    # Halving axis by axis sends as much, in 1 + 1 + 2 messages instead of 11.
    assert line(machine, "all-gather", ("n0", "n1", "n2"), "recursive") == pytest.approx((4 * alpha, 1e-9))
    assert line(machine, "all-reduce", ("n0", "n1", "n2"), "doubling")[0] == pytest.approx(4 * alpha)


def test_groups_that_share_a_link_divide_it() -> None:
    machine = shared_card()
    # Along n0 there are two groups, {0, 2} and {1, 3}; in each, both members send half of S over the card at once.
    alpha = 2 * (1e-6 + 3e-6) + SOFTWARE
    assert seconds(machine, "all-gather", ("n0",), MIB) == pytest.approx(alpha + 2 * MIB / 1e9)
    # Along d0 nobody uses the card.
    assert seconds(machine, "all-gather", ("d0",), MIB) == pytest.approx(1e-6 + SOFTWARE + MIB / 10e9)


def test_first_inside_then_between_by_hand() -> None:
    machine, axes = shared_card(), ("n0", "d0")
    inside, between = 1e-6 + SOFTWARE, 8e-6 + SOFTWARE
    # Of S: halves move inside at 10 GB/s; then of what is left, S/2, halves of both groups move over one card.
    per_byte = 1 / 2 / 10e9 + 2 * 1 / 4 / 1e9
    expected = (2 * (inside + between), per_byte * 4 / 3)
    assert line(machine, "all-reduce", axes, "ring inside, ring between") == pytest.approx(expected)
    # A flat ring crosses the card once each way, three rounds of S/4.
    assert line(machine, "all-reduce", axes, "ring") == pytest.approx((6 * between, 3 / 4 / 1e9 * 4 / 3))
    # Everyone to everyone: two senders with two pieces each for the other node.
    assert line(machine, "all-gather", axes, "direct") == pytest.approx((3 * between, 4 / 4 / 1e9 * 4 / 3))


def test_hierarchy_wins_where_every_device_has_a_card() -> None:
    links = [Link((f"{i}", "switch"), 100e9, 1e-6) for i in range(4)]
    links += [Link((f"{i}", NETWORK), 10e9, 2e-6) for i in range(4)]
    machine, axes = make(3, 4, links, ("switch",)), ("n0", "d0", "d1")
    ring, nested = (line(machine, "all-reduce", axes, name)[1] for name in ("ring", "ring inside, ring between"))
    # Of S: 3/4 inside at 100 GB/s, then 2/3 of S/4 between at 10 GB/s; the flat ring crosses with 11/12 of S.
    assert nested == pytest.approx((3 / 4 / 100e9 + 2 / 3 / 4 / 10e9) * 12 / 11)
    assert ring == pytest.approx(11 / 12 / 10e9 * 12 / 11)
    assert nested < ring
    assert seconds(machine, "all-reduce", axes, 100 * MIB) < 100 * MIB * ring


def test_an_asymmetric_node() -> None:
    """Devices 0 and 2 on one switch, 1 and 3 on the other: the ring keeps pairs together."""
    links = [Link((f"{i}", f"pair{i % 2}"), 16e9, 1e-6) for i in range(4)]
    machine = make(1, 4, [*links, Link(("pair0", "pair1"), 4e9, 2e-6)], ("pair0", "pair1"))
    axes = ("d0", "d1")
    # 0 → 2 → 1 → 3 → 0 crosses once in each direction; 0 → 1 → 2 → 3 would cross twice in each.
    alpha = 4e-6 + SOFTWARE
    assert line(machine, "all-gather", axes, "ring") == pytest.approx((3 * alpha, 3 / 4 / 4e9 * 4 / 3))
    # Along d0 the groups are {0, 2} and {1, 3}, each on its switch; along d1 both cross.
    assert seconds(machine, "all-gather", ("d0",), MIB) == pytest.approx(2e-6 + SOFTWARE + MIB / 16e9)
    assert seconds(machine, "all-gather", ("d1",), MIB) == pytest.approx(alpha + 2 * MIB / 4e9)


def test_links_of_one_pair_each_carry_more_than_a_ring() -> None:
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    machine = make(1, 4, [Link((f"{a}", f"{b}"), 1e9, 1e-6) for a, b in pairs])
    ring, direct = (line(machine, "all-gather", ("d0", "d1"), name)[1] for name in ("ring", "direct"))
    assert (ring, direct) == pytest.approx((1 / 1e9, 1 / 3e9))


def ring_of_nodes(num_nodes: int) -> Machine:
    machine = make(num_nodes, 1, [Link(("0", NETWORK), 8e9, 0.0)])
    links = tuple(Link((str(i), str((i + 1) % num_nodes)), 1e9, 1e-6) for i in range(num_nodes))
    return replace(machine, links=links)


def test_a_ring_of_nodes() -> None:
    machine = ring_of_nodes(4)
    alpha = 1e-6 + SOFTWARE
    assert line(machine, "all-gather", ("n0", "n1"), "ring") == pytest.approx((3 * alpha, 1 / 1e9))
    # Along n0 are the groups {0, 2} and {1, 3}: a message takes two links, and on each it meets one of the other group.
    found = seconds(machine, "all-gather", ("n0",), MIB)
    assert found == pytest.approx(2e-6 + SOFTWARE + 2 * MIB / 1e9)
    assert seconds(machine, "all-gather", ("n1",), MIB) == pytest.approx(1e-6 + SOFTWARE + MIB / 1e9)
    # To the nodes on both sides, and to the one across by one side: the busiest link carries 1 + 2.
    assert seconds(machine, "all-to-all", ("n0", "n1"), 3 * MIB) == pytest.approx(3 * (2e-6 + SOFTWARE) + 3 * MIB / 1e9)


def test_an_oversubscribed_switch_slows_what_crosses_it() -> None:
    machine = flat(4, 4e9)
    leaves = [Link((str(i), f"leaf{i // 2}"), 4e9, 0.0) for i in range(4)]
    slow = replace(machine, links=(*leaves, Link(("leaf0", "leaf1"), 2e9, 0.0)), switches=("leaf0", "leaf1"))
    assert seconds(slow, "all-gather", ("n1",), MIB) == seconds(machine, "all-gather", ("n1",), MIB)
    extra = seconds(slow, "all-gather", ("n0",), MIB) - seconds(machine, "all-gather", ("n0",), MIB)
    assert extra == pytest.approx(2 * MIB / 2e9 - MIB / 4e9)


def test_half_duplex_and_unshared_links() -> None:
    half = make(1, 2, [Link(("0", "1"), 1e9, 0.0, duplex=False)])
    assert seconds(half, "all-gather", ("d0",), MIB) == pytest.approx(SOFTWARE + 2 * MIB / 1e9)
    card = Link(("0", NETWORK), 1e9, 0.0, shared=False)
    alone = make(3, 1, [card])
    assert seconds(alone, "all-to-all", ("n0",), 2 * MIB) == pytest.approx(2 * SOFTWARE + MIB / 1e9)


def test_neighbours() -> None:
    # In the middle a node sends half of it each way over its link.
    alpha = 10e-6 + SOFTWARE
    assert seconds(flat(3), "exchange", ("n0",), 2 * MIB) == pytest.approx(2 * alpha + 2 * MIB / 1e9)
    assert seconds(flat(2), "exchange", ("n0",), MIB) == pytest.approx(alpha + MIB / 1e9)
    # Of two nodes with two devices one device crosses, the other does not.
    found = seconds(shared_card(), "exchange", ("n0", "d0"), 2 * MIB)
    assert found == pytest.approx(2 * (8e-6 + SOFTWARE) + MIB / 1e9)


def test_kinds_of_nodes_the_slowest_decides() -> None:
    kinds = tuple(
        NodeKind(name, 1, (CPU,), (Link(("0", NETWORK), rate, latency),))
        for name, rate, latency in (("a", 1e9, 1e-6), ("b", 4e9, 9e-6), ("c", 2e9, 2e-6))
    )
    machine = Machine("mixed", 3, 1, "cpu", nodes=kinds)
    assert seconds(machine, "all-gather", ("n0",), 2 * MIB) == pytest.approx(2 * (18e-6 + SOFTWARE) + 2 * MIB / 1e9)


def test_axes_of_its_own_move_the_groups() -> None:
    machine = shared_card()
    turned = replace(machine, axes=(Axis("inner", 2), Axis("outer", 2, True)))
    for ours, theirs in ((("outer",), ("n0",)), (("inner",), ("d0",)), (("inner", "outer"), ("n0", "d0"))):
        assert seconds(turned, "all-reduce", ours, MIB) == seconds(machine, "all-reduce", theirs, MIB)


def test_a_measured_collective_is_taken_as_it_was_measured() -> None:
    fit = CollectiveFit("all-reduce", ("n0", "d0"), 1e-4, 2e-9, 0.99, break_bytes=1000, small_latency=5e-5)
    machine = replace(shared_card(), fits=(fit,))
    found = collective_seconds(machine, "all-reduce", ("d0", "n0"), MIB)
    assert (found.value, found.source) == (1e-4 + 2e-9 * MIB, Source.MEASURED)
    assert collective_seconds(machine, "all-reduce", ("n0", "d0"), 10).value == 5e-5
    assert collective_seconds(machine, "all-gather", ("n0", "d0"), MIB).source is Source.ESTIMATED


def _enumerated(machine: Machine, axes: tuple[str, ...]) -> tuple[float, float]:
    """α and the seconds for each byte of a piece, message by message over every pair of ranks of every group."""
    loads: dict[str, float] = {}
    latency = 0.0
    for group in machine.mesh.groups(axes):
        for sender, receiver in permutations(group, 2):
            path = machine.topology.path(sender, receiver)
            latency = max(latency, sum(link.latency for link in path))
            for link in path:
                share = SHARES[link.kind] if machine.device == "cuda" else 1.0
                loads[link.wire] = loads.get(link.wire, 0.0) + 1 / (share * link.bandwidth)
    return latency + SOFTWARE_SECONDS[machine.device], max(loads.values())


def _leaf_and_spine() -> Machine:
    machine = replace(shared_card(), name="leaves").with_nodes(6)
    leaves = [Link((str(i), f"leaf{i % 2}"), 3e9, i * 1e-7) for i in range(6)]
    between = (*leaves, Link(("leaf0", "leaf1"), 2e9, 5e-7, duplex=False))
    return replace(machine, links=between, switches=("leaf0", "leaf1"))


@pytest.mark.parametrize(
    "machine",
    [*(Machine.preset(name, 4) for name in ("summit", "p3.8xlarge", "k80-cluster", "dgx-h100")), _leaf_and_spine()],
    ids=lambda machine: machine.name,
)
def test_looking_at_one_node_of_a_kind_gives_what_looking_at_all_gives(machine: Machine) -> None:
    names = machine.mesh.names
    for axes in (axes for count in (1, 2, 3) for axes in combinations(names, count)):
        size = len(machine.mesh.group(0, axes))
        alpha, load = _enumerated(machine, axes)
        found = line(machine, "all-to-all", axes, "direct")
        assert found[1] == pytest.approx(load / (size - 1)), axes
        # The slowest way out and the slowest way in need not belong to one message.
        assert (size - 1) * alpha <= found[0] * (1 + 1e-9) and found[0] < (size - 1) * (alpha + 1e-6)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("name", ["summit", "k80-cluster", "p3.8xlarge", "dgx-h100"])
def test_more_bytes_take_longer(kind: str, name: str) -> None:
    machine = Machine.preset(name, nodes=4)
    for axes in (machine.mesh.names, machine.mesh.names[:1], machine.mesh.names[-1:], machine.mesh.names[1:3]):
        times = [seconds(machine, kind, axes, 4**i) for i in range(16)]
        assert times == sorted(times) and 0 < times[0] < times[-1] < 60


def test_a_group_of_one_takes_no_time() -> None:
    assert collective_seconds(flat(3), "all-reduce", (), MIB) == NO_SECONDS


def test_point_to_point() -> None:
    machine = shared_card()
    found = point_to_point_seconds(machine, 0, 3, MIB)
    assert found.value == pytest.approx(SOFTWARE + 8e-6 + MIB / 1e9) and found.source is Source.ESTIMATED
    assert point_to_point_seconds(machine, 2, 3, MIB).value == pytest.approx(SOFTWARE + 1e-6 + MIB / 10e9)
    assert point_to_point_seconds(machine, 1, 1, MIB) == NO_SECONDS


def test_what_links_carry_between_gpus_is_what_protocols_leave_of_it() -> None:
    """Whatever is sent over NVLink: 369 of 450 GB/s, as an all-gather."""
    machine, sent = Machine.preset("dgx-h100"), 2**30
    axes, least = machine.mesh.names, sent / (0.82 * 450e9)
    for kind in ("all-to-all", "broadcast", "exchange"):
        assert least <= seconds(machine, kind, axes, sent) < 1.1 * least, kind
    assert least <= point_to_point_seconds(machine, 0, 1, sent).value < 1.1 * least
    assert least <= seconds(machine, "all-gather", axes, sent) < 1.1 * least


@pytest.mark.parametrize(
    ("machine", "kind", "axes", "piece"),
    [
        (flat(2), "all-redux", ("n0",), "Collectives are all-reduce"),
        (flat(2), "all-reduce", ("n7",), "has the axes n0:2"),
        (Machine("bare", 2, 1, "cpu"), "all-reduce", ("n0",), "conjoin calibrate"),
    ],
)
def test_what_has_no_time(machine: Machine, kind: str, axes: tuple[str, ...], piece: str) -> None:
    with pytest.raises(UsageError) as caught:
        collective_seconds(machine, kind, axes, MIB)
    assert_three_sentences(caught.value)
    assert piece in str(caught.value)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_a_thousand_devices_are_quick(kind: str) -> None:
    machine = Machine.preset("dgx-a100", nodes=128)
    started = time.process_time()
    seconds(machine, kind, machine.mesh.names, MIB)
    assert time.process_time() - started < 1
    started = time.process_time()
    for sent in range(1000):
        seconds(machine, kind, machine.mesh.names, sent)
    assert time.process_time() - started < 0.1
