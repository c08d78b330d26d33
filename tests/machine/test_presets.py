"""Known machines are as the papers describe them."""

from __future__ import annotations

import re

import pytest

from conjoin.errors import UsageError
from conjoin.machine import NETWORK, Machine, preset_names
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
    "dgx-a100-40": (1, 8, "cuda"),
    "dgx-b200": (1, 8, "cuda"),
    "gb200-nvl72": (1, 72, "cuda"),
    "h100-pcie": (1, 8, "cuda"),
    "h100-nvl": (1, 8, "cuda"),
    "mi300x": (1, 8, "cuda"),
    "p4d.24xlarge": (1, 8, "cuda"),
    "p5.48xlarge": (1, 8, "cuda"),
    "a3-highgpu-8g": (1, 8, "cuda"),
    "a3-megagpu-8g": (1, 8, "cuda"),
    "nd96asr-a100-v4": (1, 8, "cuda"),
    "nd96isr-h100-v5": (1, 8, "cuda"),
    "g6e.48xlarge": (1, 8, "cuda"),
    "g5.48xlarge": (1, 8, "cuda"),
    "g4dn.12xlarge": (1, 4, "cuda"),
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
        ("h100", None, ["Machines with such devices: dgx-h100, h100-pcie, ", "dgx-h100:1x4 is four of them"]),
        ("g5.12xlarge", None, ["Machines of this family: g5.48xlarge; g5.48xlarge:1x4 is four devices of it"]),
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


def bottleneck(machine: Machine, sender: int, receiver: int) -> float:
    """Gigabytes per second of the narrowest link on the way."""
    return min(link.bandwidth for link in machine.topology.path(sender, receiver)) / 1e9


def test_summit_is_wired_in_triples() -> None:
    summit = Machine.preset("summit", nodes=2)
    assert [bottleneck(summit, 0, other) for other in range(1, 6)] == [50, 50, 32, 32, 32]
    assert bottleneck(summit, 0, 6) == 12.5
    paths = [summit.topology.path(rank, rank + 6) for rank in range(6)]
    rails = {link.source for path in paths for link in path if link.target == NETWORK}
    assert rails == {"rail0", "rail1"}


def test_the_clusters_of_flexflow() -> None:
    p100, k80 = (Machine.preset(name, nodes=2) for name in ("p100-cluster", "k80-cluster"))
    assert {bottleneck(p100, a, b) for a in range(4) for b in range(4) if a != b} == {20}
    assert (bottleneck(p100, 0, 4), bottleneck(k80, 0, 4)) == (12.5, 7)
    # Adjacent K80 talk over a switch of their own, the others over the shared one.
    lengths = {(a, b): len(k80.topology.path(a, b)) for a, b in ((0, 1), (2, 3), (1, 2), (0, 3))}
    assert lengths == {(0, 1): 2, (2, 3): 2, (1, 2): 4, (0, 3): 4}
    shared = {link.wire for link in k80.topology.path(0, 2)} & {link.wire for link in k80.topology.path(1, 3)}
    assert len(shared) == 2


@pytest.mark.parametrize(
    ("name", "inside", "between"),
    [
        ("p3.8xlarge", 50, 1.25),
        ("piz-daint", None, 8.5),
        ("a100-2x16", 300, 12.5),
        ("dgx-a100", 300, 25),
        ("dgx-h100", 450, 50),
        ("dgx-h200", 450, 50),
        ("dgx-b200", 900, 50),
        ("gb200-nvl72", 900, 50),
        ("mi300x", 64, 50),
        ("h100-nvl", 64, 50),
        ("p4d.24xlarge", 300, 12.5),
        ("p5.48xlarge", 450, 50),
        ("a3-highgpu-8g", 450, 25),
        ("g5.48xlarge", 32, 12.5),
    ],
)
def test_rates_of_the_others(name: str, inside: float | None, between: float) -> None:
    machine = Machine.preset(name, nodes=2)
    per_node = machine.devices_per_node
    assert bottleneck(machine, 0, 2 * per_node - 1) == between
    assert inside is None or bottleneck(machine, 0, per_node - 1) == inside


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-h200"])
def test_every_gpu_of_a_dgx_has_a_network_card(name: str) -> None:
    machine = Machine.preset(name, nodes=2)
    assert len({machine.topology.path(rank, rank + 8)[1].wire for rank in range(8)}) == 8


def test_rates_are_dense_peaks() -> None:
    h100, h200 = (Machine.preset(name).device_type(0) for name in ("dgx-h100", "dgx-h200"))
    assert h100.flops_of("bfloat16") == 989.5e12 == h200.flops_of("bfloat16") and h100.flops_of("float32") == 67e12
    assert h200.memory_bandwidth == 4.8e12
    assert Machine.preset("summit").device_type(5).flops_of("float16") == 125e12


def test_float64_runs_on_tensor_cores_where_there_are_any_for_it() -> None:
    """A float64 product of 8192 × 8192 matrices ran at 56.7 teraflops on an H200: more than its vector units give."""
    rates = {name: Machine.preset(name).device_type(0) for name in ("dgx-h200", "dgx-a100", "summit", "p100-cluster")}
    assert [rate.flops_of("float64") / 1e12 for rate in rates.values()] == [67, 19.5, 7.8, 5.3]
    assert all(device.flops_of("float64") == device.flops_of("float32") for device in list(rates.values())[:2])


# What vendors say of whole systems, dense rates in petaflops, memory in decimal gigabytes, all cards' gigabits.
@pytest.mark.parametrize(
    ("name", "dtype", "petaflops", "gigabytes", "gigabits"),
    [
        ("dgx-h100", "float8", 32 / 2, 640, 3200),
        ("dgx-h200", "float8", 32 / 2, 1128, 3200),
        ("dgx-b200", "float8", 72 / 2, 1440, 3200),
        ("gb200-nvl72", "bfloat16", 360 / 2, 13_400, 28_800),
        ("dgx-a100", "bfloat16", 5 / 2, 640, 1600),
        ("mi300x", "float16", 10.5, 1536, 3200),
        ("p4d.24xlarge", "float16", 2.5, 320, 400),
        ("p5.48xlarge", "bfloat16", 16 / 2, 640, 3200),
        ("a3-megagpu-8g", "bfloat16", 16 / 2, 640, 1600),
        ("g4dn.12xlarge", "float16", 0.26, 64, 50),
    ],
)
def test_systems_add_up(name: str, dtype: str, petaflops: float, gigabytes: float, gigabits: float) -> None:
    machine = Machine.preset(name)
    (node,) = machine.nodes
    assert sum(device.flops_of(dtype) for device in node.devices) / 1e15 == pytest.approx(petaflops, rel=0.02)
    assert sum(device.memory_bytes for device in node.devices) / 1e9 == pytest.approx(gigabytes, rel=0.085)
    cards = [link for link in node.links if NETWORK in link.ends]
    assert sum(link.bandwidth for link in cards) * 8 / 1e9 == pytest.approx(gigabits)


# From `torch.cuda.get_device_properties(0).total_memory` and `nvidia-smi`.
@pytest.mark.parametrize(("name", "seen"), [("dgx-h200", 150_109_880_320), ("a100-2x16", 42_405_855_232)])
def test_memory_is_what_torch_sees(name: str, seen: int) -> None:
    assert 0.995 * seen < Machine.preset(name).device_type(0).memory_bytes <= seen


def test_plans_leave_some_memory_free() -> None:
    """Of 80 GB: a context, communicators where there is somebody to speak with, and a few percent."""
    one, many = Machine.preset("dgx-h100").device_type(0), Machine.preset("dgx-h100")
    assert 3 < (one.memory_bytes - many.usable_bytes) / 2**30 < 5
    assert Machine.preset("laptop").usable_bytes == Machine.preset("laptop").device_type(0).memory_bytes


def test_p3_8xlarge_is_half_a_dgx_1() -> None:
    """`nvidia-smi topo -m` shows NV1 or NV2 for every pair; AWS gives 200 GB/s of NVLink, two ways, for a GPU."""
    p3 = Machine.preset("p3.8xlarge")
    links = [[bottleneck(p3, a, b) / 25 if a != b else 0 for b in range(4)] for a in range(4)]
    assert links == [[0, 1, 1, 2], [1, 0, 2, 1], [1, 2, 0, 2], [2, 1, 2, 0]]
    assert sum(links[0]) * 2 * 25 == 200
