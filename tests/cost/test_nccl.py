"""What NCCL takes for collectives: as its own model reckons, and as measured on machines that people told of."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from benchmarks.collectives import Published, a100_cluster, published, quickest
from conjoin.cost import collective_seconds
from conjoin.cost.nccl import Way, nccl_ways
from conjoin.cost.patterns import Groups
from conjoin.machine import Machine

GB, MIB = 1e9, 2**20


def ways(machine: Machine, kind: str, axes: tuple[str, ...] | None = None) -> dict[str, Way]:
    groups = Groups.along(machine, machine.mesh.names if axes is None else axes)
    return {way.name: way for way in nccl_ways(groups, kind)}


ROWS = list(published())
H100 = Machine.preset("dgx-h100", 1)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.source}, {row.num_bytes}" for row in ROWS])
def test_collectives_take_what_people_measured(row: Published) -> None:
    assert abs(error(row)) < 0.2


def error(row: Published) -> float:
    way = quickest(row.machine, row.kind, row.num_bytes, row.without)
    return way.seconds(row.num_bytes) * 1e6 / row.microseconds - 1


def test_most_are_near() -> None:
    assert median(abs(error(row)) for row in ROWS) < 0.1


def test_a_ring_on_one_node_by_hand() -> None:
    found = ways(H100, "all-gather")
    assert found["ring Simple"].latency == pytest.approx((8.4 + 7 * 3.4) * 1e-6)
    assert found["ring Simple"].bandwidth == pytest.approx(450 * GB * 0.82 * 8 / 7)
    assert found["ring LL"].bandwidth == pytest.approx(141 * GB * 8 / 7)
    reduced = ways(H100, "all-reduce")
    assert reduced["ring LL"].latency == pytest.approx((6.6 + 14 * 0.6) * 1e-6)
    assert reduced["tree LL"].latency == pytest.approx((6.8 + 2 * 7 * 0.6) * 1e-6)


def test_a_ring_between_nodes_by_hand() -> None:
    """Three of 31 steps leave a node, and each such step waits for 2.5 µs of wires."""
    found = ways(Machine.preset("dgx-h100", 4), "all-gather")
    assert found["ring LL"].latency == pytest.approx((6.6 + 28 * 1.0 + 3 * (2.7 + 2.5)) * 1e-6)
    assert found["ring Simple"].latency == pytest.approx((8.4 + 28 * 3.4 + 3 * (14.0 + 2 * 2.5)) * 1e-6)


def test_every_card_of_a_node_is_used() -> None:
    one, two, eight = (ways(a100_cluster(4, n), "all-gather")["ring Simple"].bandwidth for n in (1, 2, 8))
    assert two == pytest.approx(2 * one) and eight == pytest.approx(8 * one)


def test_groups_of_one_member_a_node_have_a_card_each_or_share_it() -> None:
    apart, shared = (ways(a100_cluster(4, n), "all-gather", ("n0", "n1"))["ring Simple"].bandwidth for n in (8, 1))
    assert apart == pytest.approx(25 * GB * 0.95 * 4 / 3) and shared == pytest.approx(apart / 8)


def test_what_a_generation_has() -> None:
    assert "NVLS" in ways(H100, "all-reduce") and "NVLS" not in ways(Machine.preset("dgx-a100", 1), "all-reduce")
    assert "NVLS tree" in ways(Machine.preset("dgx-h100", 2), "all-reduce")
    assert not any("LL128" in name for name in ways(Machine.preset("k80-cluster", 2), "all-reduce"))
    assert "PAT" in ways(Machine.preset("piz-daint", 4), "all-gather")
    assert "PAT" not in ways(Machine.preset("dgx-h100", 4), "all-gather")


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-h200", "dgx-b200"])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_sums_in_the_switch_take_no_more_than_the_links_carry(name: str, size: int, num_nodes: int) -> None:
    """A member sends S into the sums and S/p of the result; NCCL leaves two to a ring."""
    machine = Machine.preset(name, num_nodes)
    inside = [axis.name for axis in machine.mesh.axes if not axis.between_nodes]
    between = [axis.name for axis in machine.mesh.axes if axis.between_nodes]
    axes = tuple(between + inside[: {2: 1, 4: 2, 8: 3}[size]])
    found = ways(machine, "all-reduce", axes)
    line = max(link.bandwidth for link in machine.nodes[0].links if link.kind == "NVLink")
    for way in (way for key, way in found.items() if "NVLS" in key):
        assert size > 2 and way.bandwidth * (1 + 1 / size) <= 0.82 * line * (1 + 1e-9)
    assert any("NVLS" in key for key in found) == (size > 2)
    rate = 2 * (size - 1) / size * max(way.bandwidth for way in found.values())
    assert num_nodes > 1 or size > 2 or rate <= 0.82 * line * (1 + 1e-9), "two send what a ring sends"


@pytest.mark.parametrize("num_nodes", [1, 4, 128])
def test_small_messages_take_trees_and_short_protocols(num_nodes: int) -> None:
    machine = Machine.preset("dgx-h100", num_nodes)
    found = ways(machine, "all-reduce")
    quickest = min(found, key=lambda name: found[name].seconds(1024))
    assert quickest in ("ring LL", "tree LL") and (num_nodes == 1 or quickest == "tree LL")


def test_a_gather_over_a_thousand_takes_its_thousand_steps() -> None:
    """25 MiB over 1,024 GPUs: no call of NCCL's does it in the time of ten steps."""
    machine = Machine.preset("dgx-h100", 128)
    found = collective_seconds(machine, "all-gather", machine.mesh.names, 25 * MIB).value
    assert 1.5e-3 < found < 4e-3


def test_measured_links_are_taken_as_they_are() -> None:
    plain = a100_cluster(1, 8)
    (kind,) = plain.nodes
    measured = replace(kind, links=tuple(replace(link, kind="measured") for link in kind.links))
    found = ways(replace(plain, nodes=(measured,)), "all-gather")["ring Simple"]
    assert found.bandwidth == pytest.approx(300 * GB * 8 / 7)
