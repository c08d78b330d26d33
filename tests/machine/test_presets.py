"""Known machines are as the papers describe them."""

from __future__ import annotations

import re

import pytest

from conjoin.errors import UsageError
from conjoin.machine import Machine, preset_names
from tests.ir.wording import assert_three_sentences

SHAPES = {
    "summit": (1, 6, "cuda"),
    "p3.8xlarge": (1, 4, "cuda"),
    "p100-cluster": (1, 4, "cuda"),
    "k80-cluster": (1, 4, "cuda"),
    "piz-daint": (1, 1, "cuda"),
    "a100-2x16": (2, 16, "cuda"),
    "dgx-a100": (1, 8, "cuda"),
    "dgx-h100": (1, 8, "cuda"),
    "dgx-h200": (1, 8, "cuda"),
    "laptop": (1, 1, "cpu"),
}


def test_every_preset_has_its_shape() -> None:
    machines = {name: Machine.preset(name) for name in preset_names()}
    assert {name: (m.num_nodes, m.devices_per_node, m.device) for name, m in machines.items()} == SHAPES
    assert all(machine.name == name for name, machine in machines.items())


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "laptop"])
def test_every_preset_names_its_source(name: str) -> None:
    assert re.search(r"Source: .+\.$", Machine.preset(name).description)


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("a100-2x16", "laptop")])
def test_the_number_of_nodes_can_be_chosen(name: str) -> None:
    machine = Machine.preset(name, nodes=32)
    assert (machine.num_nodes, machine.devices_per_node) == (32, SHAPES[name][1])


def test_a_fixed_number_of_nodes_may_be_repeated() -> None:
    assert Machine.preset("a100-2x16", nodes=2) == Machine.preset("a100-2x16")


@pytest.mark.parametrize(
    ("name", "nodes", "pieces"),
    [
        ("Sumit", None, ["no machine named 'Sumit'", "Did you mean summit?", ".toml"]),
        ("dgx-h10", None, ["Did you mean dgx-h100?"]),
        ("???", None, ["Use one of summit, p3.8xlarge, "]),
        ("x" * 5000, None, ["(5,000 characters)"]),
        ("a100-2x16", 3, ["a100-2x16 was asked for with 3 nodes", "always has 2", "Leave the number out"]),
        ("laptop", 4, ["laptop was asked for with 4 nodes", "always has 1", "local:4"]),
        ("summit", 0, ["num_nodes is 0", "from 1 to 1,048,576"]),
        ("summit", True, ["num_nodes is true"]),
        ("laptop", True, ["num_nodes is true"]),
        ("summit", 2**20, ["1,048,576 nodes of 6 devices", "6,291,456 devices, the limit is 1,048,576"]),
    ],
)
def test_what_is_no_preset(name: str, nodes: int | None, pieces: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        Machine.preset(name, nodes)
    assert_three_sentences(caught.value)
    assert [piece for piece in pieces if piece not in str(caught.value)] == []
