"""Parts of machines: the first nodes and devices, with the links and fits that hold for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conjoin.cost import collective_seconds
from conjoin.errors import UsageError
from conjoin.machine import CollectiveFit, Machine, parse_machine, part_of, parts_of, preset_names
from tests.ir.wording import assert_three_sentences


@pytest.mark.parametrize("name", preset_names())
def test_every_part_of_a_preset_has_its_devices_and_links(name: str) -> None:
    machine = parse_machine(name)
    found = list(parts_of(machine))
    assert found[0] is machine and found[-1].num_devices == 1
    for part in found[1:]:
        assert machine.num_devices % part.num_devices == 0 and part.num_devices < machine.num_devices
        assert part.device_type(0) == machine.device_type(0) and len(part.nodes[0].devices) == part.devices_per_node
        if part.mesh.axes:
            assert collective_seconds(part, "all-reduce", part.mesh.names, 1 << 20).value > 0


def test_a_collective_of_a_part_takes_as_long_as_among_the_same_devices_of_the_whole() -> None:
    machine = Machine.preset("dgx-h100", nodes=2)
    part = part_of(machine, 1, 4)
    one = collective_seconds(part, "all-gather", part.mesh.names, 1 << 24)
    assert one == collective_seconds(machine, "all-gather", ("d1", "d2"), 1 << 24)


def test_fits_follow_their_axes() -> None:
    def fit(*axes: str) -> CollectiveFit:
        return CollectiveFit("all-reduce", axes, latency=1e-5 * len(axes), seconds_per_byte=1e-9, r_squared=1.0)

    machine = replace(Machine("office", 2, 4, "cpu"), fits=(fit("n0"), fit("d0"), fit("d1"), fit("d0", "d1")))
    assert [found.axes for found in part_of(machine, 1, 4).fits] == [("d0",), ("d1",), ("d0", "d1")]
    assert part_of(machine, 2, 2).fits == (fit("n0"), replace(fit("d1"), axes=("d0",))), "d1 runs along neighbours"
    odd = replace(Machine("office", 1, 6, "cpu"), fits=(fit("d0"), fit("d1")))
    assert part_of(odd, 1, 2).fits == (), "devices 0 and 1 are no axis of 2 × 3"
    assert part_of(odd, 1, 3).fits == (replace(fit("d1"), axes=("d0",)),)


def test_links_between_nodes_that_are_left_out_are_left_out() -> None:
    machine = parse_machine("k80-cluster:4")
    wired = replace(machine, links=tuple(_ring(4)), switches=())
    part = part_of(wired, 2, 4)
    assert [link.ends for link in part.links] == [("0", "1")] and part_of(wired, 1, 4).links == ()


def _ring(num_nodes: int) -> list[object]:
    link = Machine.preset("k80-cluster", nodes=2).nodes[0].links[0]
    return [replace(link, ends=(str(i), str((i + 1) % num_nodes))) for i in range(num_nodes)]


def test_parts_are_named_in_one_word(tmp_path: object) -> None:
    assert parse_machine("summit:2x3") == part_of(Machine.preset("summit", nodes=2), 2, 3)
    assert parse_machine("a100-2x16:1x4") == part_of(Machine.preset("a100-2x16"), 1, 4)
    assert parse_machine("local:1x4").num_devices == 4
    path = f"{tmp_path}/mine.toml"
    Machine("office", 3, 4, "cuda").save(path)
    assert parse_machine(f"{path}:2x2") == Machine("office:2x2", 2, 2, "cuda")
    for part in parts_of(Machine.preset("summit", nodes=4)):
        assert part.num_devices == 24 or parse_machine(part.name).mesh == part.mesh, part.name


@pytest.mark.parametrize("word", ["summit:0x2", "summit:2x7", "local:2x2", "laptop:2x1", "sumit:1x1", "summit:1xx1"])
def test_what_is_no_part_is_told(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_machine(word)
    assert_three_sentences(caught.value)
