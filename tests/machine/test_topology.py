"""Ways between devices: the widest, then the quickest, the same each time; cheap for large machines."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from conjoin.errors import UsageError
from conjoin.machine import NETWORK, Axis, DeviceType, Link, Machine, NodeKind
from tests.ir.wording import assert_three_sentences

CPU = DeviceType("cpu", "cpu", 2**30, 1e10, (("float32", 1e11),))


def machine(links: list[Link], switches: tuple[str, ...] = (), *, nodes: int = 1, devices: int = 2) -> Machine:
    kind = NodeKind("node", nodes, (CPU,) * devices, tuple(links), switches)
    return Machine("test", nodes, devices, "cpu", nodes=(kind,))


def ends(found: Machine, sender: int, receiver: int) -> list[str]:
    path = found.topology.path(sender, receiver)
    return [path[0].source, *(link.target for link in path)] if path else []


def test_the_wider_way_is_taken_though_it_is_longer() -> None:
    found = machine([Link(("0", "1"), 1e9, 1e-6), Link(("0", "s"), 2e9, 1e-3), Link(("s", "1"), 2e9, 1e-3)], ("s",))
    assert ends(found, 0, 1) == ["0", "s", "1"] and ends(found, 1, 0) == ["1", "s", "0"]


def test_among_wide_ways_the_quicker_is_taken() -> None:
    links = [Link(("0", "s"), 2e9, 3e-6), Link(("s", "1"), 4e9, 3e-6), Link(("0", "t"), 3e9, 1e-6)]
    found = machine([*links, Link(("t", "1"), 2e9, 1e-6)], ("s", "t"))
    assert ends(found, 0, 1) == ["0", "t", "1"]
    assert [link.bandwidth for link in found.topology.path(0, 1)] == [3e9, 2e9]
    assert [link.latency for link in found.topology.path(0, 1)] == [1e-6, 1e-6]


def test_among_equal_ways_the_first_described_is_taken() -> None:
    links = [Link((a, b), 1e9, 1e-6) for a, b in (("0", "s"), ("0", "t"), ("s", "1"), ("t", "1"))]
    assert ends(machine(links, ("s", "t")), 0, 1) == ["0", "s", "1"]
    swapped = [links[1], links[0], *links[2:]]
    assert ends(machine(swapped, ("s", "t")), 0, 1) == ["0", "t", "1"]


def test_devices_pass_nothing_on_unless_there_is_no_other_way() -> None:
    chain = [Link(("0", "1"), 9e9, 1e-6), Link(("1", "2"), 9e9, 1e-6)]
    assert ends(machine(chain, devices=3), 0, 2) == ["0", "1", "2"]
    slow = [Link((device, "s"), 1e9, 1e-3) for device in "02"]
    assert ends(machine([*chain, *slow], ("s",), devices=3), 0, 2) == ["0", "s", "2"]


def test_directions_have_wires_of_their_own_unless_they_take_turns() -> None:
    for duplex, num_wires in ((True, 2), (False, 1)):
        found = machine([Link(("0", "1"), 1e9, 0.0, duplex=duplex)])
        assert len({found.topology.path(a, b)[0].wire for a, b in ((0, 1), (1, 0))}) == num_wires


def test_between_nodes() -> None:
    links = [Link(("0", "nic"), 5e9, 1e-6), Link(("1", "nic"), 5e9, 1e-6), Link(("nic", NETWORK), 1e9, 2e-6)]
    found = machine(links, ("nic",), nodes=3)
    assert ends(found, 0, 5) == ["0", "nic", NETWORK, "nic", "1"]
    assert ends(found, 0, 1) == ["0", "nic", "1"] and ends(found, 4, 4) == []
    wires = [link.wire for link in found.topology.path(1, 2)]
    assert wires == ["node 0: 1>", "node 0: 2>", "node 1: 2<", "node 1: 0<"]
    assert found.topology.path(1, 2) is found.topology.path(1, 2)


def ring_of_nodes(num_nodes: int) -> Machine:
    base = machine([Link(("0", NETWORK), 4e9, 0.0)], nodes=num_nodes, devices=1)
    links = tuple(Link((str(i), str((i + 1) % num_nodes)), 1e9, 1e-6) for i in range(num_nodes))
    return replace(base, links=links)


def test_a_ring_of_nodes() -> None:
    found = ring_of_nodes(5)
    assert ends(found, 0, 2) == ["0", NETWORK, "1", "2", NETWORK, "0"] or len(found.topology.path(0, 2)) == 4
    assert [link.wire for link in found.topology.path(0, 4)] == ["node 0: 0>", "network: 4<", "node 4: 0<"]


def test_an_oversubscribed_switch() -> None:
    base = machine([Link(("0", NETWORK), 4e9, 0.0)], nodes=4, devices=1)
    leaves = [Link((str(i), f"leaf{i // 2}"), 4e9, 1e-6) for i in range(4)]
    found = replace(base, links=(*leaves, Link(("leaf0", "leaf1"), 2e9, 1e-6)), switches=("leaf0", "leaf1"))
    assert min(link.bandwidth for link in found.topology.path(0, 1)) == 4e9
    assert min(link.bandwidth for link in found.topology.path(0, 2)) == 2e9


def test_kinds_of_nodes_have_devices_and_ways_of_their_own() -> None:
    fast = DeviceType("fast", "cpu", 2**34, 1e11, (("float32", 1e12),))
    slow_kind = NodeKind("old", 2, (CPU, CPU), (Link(("0", "1"), 1e9, 0.0), Link(("0", NETWORK), 1e8, 0.0)))
    fast_kind = NodeKind("new", 1, (CPU, fast), (Link(("0", "1"), 7e9, 0.0), Link(("1", NETWORK), 1e8, 0.0)))
    found = Machine("mixed", 3, 2, "cpu", nodes=(slow_kind, fast_kind))
    assert [found.device_type(rank).name for rank in range(6)] == ["cpu"] * 5 + ["fast"]
    assert found.device_types == (CPU, fast)
    assert [found.topology.path(a, b)[0].bandwidth for a, b in ((0, 1), (2, 3), (4, 5))] == [1e9, 1e9, 7e9]
    assert ends(found, 1, 4) == ["1", "0", NETWORK, "1", "0"]
    assert Machine.from_toml(found.to_toml()) == found


def test_axes_say_where_ranks_are() -> None:
    base = Machine("office", 2, 6, "cuda")
    axes = (Axis("gpu", 3), Axis("host", 2, True), Axis("pair", 2))
    found = replace(base, axes=axes)
    locations = [found.location(rank) for rank in range(12)]
    assert sorted(locations) == [(node, device) for node in range(2) for device in range(6)]
    assert locations[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)] and locations[4] == (0, 2)
    assert [base.location(rank) for rank in range(12)] == [divmod(rank, 6) for rank in range(12)]
    assert Machine.from_toml(found.to_toml()) == found and str(found.mesh) == "gpu:3 host:2 pair:2"
    assert found.fingerprint() == base.fingerprint() and found.speed_fingerprint() != base.speed_fingerprint()


@pytest.mark.parametrize("ask", [lambda m: m.topology, lambda m: m.device_type(0)])
def test_without_speeds_the_user_is_told_what_to_do(ask) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as caught:
        ask(Machine("office", 2, 6, "cuda"))
    assert_three_sentences(caught.value)
    assert "conjoin calibrate" in str(caught.value) and "[[" in str(caught.value)


def test_devices_without_links() -> None:
    kind = NodeKind("node", 1, (CPU, CPU))
    found = Machine("half", 1, 2, "cpu", nodes=(kind,))
    assert found.device_type(1) == CPU and not found.has_links
    with pytest.raises(UsageError, match="The links of the machine half were asked for"):
        found.topology  # noqa: B018
    assert Machine.preset("laptop").has_links and Machine.preset("laptop").topology.path(0, 0) == ()


def test_thousands_of_devices_are_cheap() -> None:
    started = time.process_time()
    found = Machine.preset("dgx-h100", nodes=512)
    total = sum(len(found.topology.path(0, rank)) for rank in range(found.num_devices))
    assert time.process_time() - started < 2
    assert total == 7 * 2 + 511 * 8 * 4
