"""What no machine with speeds is, in Python and in files; the bad key is named by its path."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conjoin.errors import UsageError
from conjoin.machine import (
    NETWORK,
    Axis,
    CollectiveFit,
    DeviceType,
    Link,
    Machine,
    NodeKind,
    machine_file_problems,
    preset_names,
)
from tests.ir.wording import assert_three_sentences

TEXT = Machine.preset("k80-cluster", nodes=2).to_toml()
FIT = CollectiveFit("all-reduce", ("n0", "d1"), 1.25e-5, 8.1e-11, 0.987, 4096, 3e-6, 1e-9)
FIT_TEXT = replace(Machine.preset("k80-cluster", nodes=2), fits=(FIT,)).to_toml()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_round_trips(name: str) -> None:
    machine = Machine.preset(name)
    assert Machine.from_toml(machine.to_toml()) == machine


def test_everything_round_trips() -> None:
    device = DeviceType(
        "odd", "cpu", 123456789, 1.1e10 / 3, (("float32", 1e11 / 7), ("float64", 5e10 / 7)),
        (("matmul", 0.7 / 3), ("a b", 0.5)), 1.7e-6, 1.3 / 3,
    )  # fmt: skip
    links = (
        Link(("0", "s"), 1e9 / 3, 1e-6 / 7, "PCIe", shared=False),
        Link(("1", "s"), 1e9, 0.0, duplex=False),
        Link(("s", NETWORK), 2e9, 1e-6),
    )
    kinds = (NodeKind("a", 2, (device, device), links, ("s",)), NodeKind("b", 1, (device, device), links, ("s",)))
    between = tuple(Link((str(i), "core"), 1e9, 1e-5) for i in range(3))
    axes = (Axis("host", 3, True), Axis("cpu", 2))
    fit = replace(FIT, axes=("host", "cpu"), latency=1e-5 / 3, seconds_per_byte=1e-10 / 3)
    machine = Machine("all", 3, 2, "cpu", "Text.", kinds, between, ("core",), (fit,), axes)
    text = machine.to_toml()
    assert Machine.from_toml(text) == machine and Machine.from_toml(text).to_toml() == text
    assert machine.fit_of("all-reduce", ("cpu", "host")) == fit and machine.fit_of("all-gather", ("cpu",)) is None


BAD: list[tuple[str, str, str, list[str]]] = [
    ("negative", "gigabytes_per_second = 7.0", "gigabytes_per_second = -7.0",
     ["node[0].link[7].gigabytes_per_second is -7", "from 1e-06 to 1e+06 gigabytes per second"]),
    ("zero", "gigabytes_per_second = 7.0", "gigabytes_per_second = 0", ["node[0].link[7].gigabytes_per_second is 0"]),
    ("nan", "gigabytes_per_second = 7.0", "gigabytes_per_second = nan", ["gigabytes_per_second is NaN"]),
    ("infinite", "gigabytes_per_second = 7.0", "gigabytes_per_second = inf", ["gigabytes_per_second is Infinity"]),
    ("absurd", "gigabytes_per_second = 7.0", "gigabytes_per_second = 7e9", ["is 7", "wrong unit"]),
    ("text", "gigabytes_per_second = 7.0", 'gigabytes_per_second = "7"', ["gigabytes_per_second is '7'"]),
    ("latency", "latency_microseconds = 0.75", "latency_microseconds = -1", ["node[0].link[7].latency_microseconds"]),
    ("memory", "memory_gigabytes = 11", "memory_gigabytes = 0.0 #", ["device_type[0].memory_gigabytes is 0"]),
    ("flops", "float32 = 4.365", "float32 = true", ["device_type[0].teraflops.float32 is true"]),
    ("dtype", "float64 = 1.455", "floot64 = 1.455", ["rate for 'floot64'", "Did you mean float64?", "device_type[0]"]),
    ("no float32", "float32 = 4.365", "int8 = 4.365", ["no rate for float32"]),
    ("unknown key", "kind = \"InfiniBand\"", "kid = \"InfiniBand\"", ["'node[0].link[7].kid'", "Did you mean kind?"]),
    ("unknown table", "[[device_type]]", "[[device_typ]]", ["'device_typ'", "Did you mean device_type?"]),
    ("missing", "count = 2\n", "", ["node[0] lacks count", "count = 4"]),
    ("vertex", '"nic", "network"', '"nci", "network"', ["link to 'nci'", "Did you mean nic?", "at node[0]"]),
    ("device", '"3", "pair1"', '"4", "pair1"', ["link to '4'", "0 to 3"]),
    ("same ends", '"3", "pair1"', '"3", "3"', ["ends are the same", "at node[0].link[3]"]),
    ("twice", '"3", "pair1"', '"2", "pair1"', ["2 links between '2' and 'pair1'", "rates added"]),
    ("lost device", '"3", "pair1"', '"pair0", "pair1"', ["none of them lead from '0' to '3'"]),
    ("lost network", '"nic", "network"', '"nic", "0"', ["none of them lead from '0' to 'network'"]),
    ("three ends", '["3", "pair1"]', '["3", "pair1", "2"]', ["node[0].link[3].between", "list of two texts"]),
    ("switch", '"pair0", "pair1", "root", "nic"', '"pair0", "pair1", "root", "nic", "nic"', ["switch named 'nic'"]),
    ("switch number", 'switches = ["pair0",', 'switches = ["7", "pair0",', ["switch named '7'"]),
    ("count", "count = 2", "count = 3", ["2 nodes, and its node kinds count 3"]),
    ("count text", "count = 2", 'count = "2"', ["count is '2'"]),
    ("type", 'devices = "K80-12GB"', 'devices = "K80-12G"', ["node[0].devices names", "Did you mean"]),
    ("too few", 'devices = "K80-12GB"', 'devices = ["K80-12GB"]', ["node[0].devices names 1 devices", "has 4"]),
    ("no list", "link = [", "kink = [", ["'node[0].kink'", "Did you mean link?"]),
    ("shared", 'kind = "InfiniBand"', "shared = 1", ["node[0].link[7].shared is 1", "true or false"]),
    ("duplicate type", "[[node]]", '[[device_type]]\nname = "K80-12GB"\nmemory_gigabytes = 1\n'
     "memory_gigabytes_per_second = 1\nteraflops = {float32 = 1}\n[[node]]", ["two device types"]),
    ("axes product", "device = \"cuda\"", 'device = "cuda"\naxes = [{name = "a", size = 2, between_nodes = true}]',
     ["inside a node make 1 devices", "at axes"]),
    ("axes prime", "device = \"cuda\"", 'device = "cuda"\naxes = [{name = "a", size = 4}]', ["axis a has size 4"]),
    ("axis name", "device = \"cuda\"", 'device = "cuda"\naxes = [{name = "rack-0", size = 2}]',
     ["axis named 'rack-0'", "Write rack_0 instead", "at axes"]),
    ("version 1", "version = 2", "version = 1", ["unknown key 'device_type'"]),
    ("network", "device = \"cuda\"", 'device = "cuda"\nlink = [{between = ["0", "2"], gigabytes_per_second = 1, '
     "latency_microseconds = 1}]", ["The network has a link to '2'", "0 to 1", "at link"]),
    ("axis of fit", 'axes = ["n0", "d1"]', 'axes = ["d1", "n0"]', ["fit of all-reduce over the axes d1 n0"]),
    ("kind of fit", 'kind = "all-reduce"', 'kind = "all-redux"', ["'all-redux'", "Did you mean all-reduce?"]),
    ("fit number", "r_squared = 0.987", "r_squared = 2", ["fit[0].r_squared is 2"]),
    ("break", "break_bytes = 4096", "break_bytes = -1", ["break_bytes", "-1", "at fit[0]"]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "pieces"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_key_is_named(tmp_path: Path, old: str, new: str, pieces: list[str]) -> None:
    assert old in FIT_TEXT
    text = FIT_TEXT.replace(old, new, 1)
    with pytest.raises(UsageError) as caught:
        Machine.from_toml(text)
    assert_three_sentences(caught.value)
    assert [piece for piece in pieces if piece not in str(caught.value)] == []
    file = tmp_path / "bad.toml"
    file.write_text(text)
    problems = machine_file_problems(file)
    assert problems and str(caught.value).startswith(problems[0])
    for problem in problems:
        assert_three_sentences(problem)


def test_every_problem_is_listed(tmp_path: Path) -> None:
    text = TEXT.replace("gigabytes_per_second = 16.0", "gigabytes_per_second = 0", 2)
    text = text.replace("float32 = 4.365", "float32 = nan").replace('"nic", "network"', '"nic"')
    file = tmp_path / "bad.toml"
    file.write_text(text)
    problems = machine_file_problems(file)
    paths = ["device_type[0].teraflops.float32", "link[0].gigabytes", "link[1].gigabytes", "link[7].between"]
    assert all(any(path in problem for problem in problems) for path in paths)
    with pytest.raises(UsageError, match=r"and \d more, which `conjoin machine check` lists"):
        Machine.from_toml(text)
    file.write_text(TEXT)
    assert machine_file_problems(file) == ()
    assert "could not be read" in machine_file_problems(tmp_path / "none.toml")[0]


HEAD = 'format = "conjoin.machine"\nversion = 2\nname = "x"\nnum_nodes = 1\ndevice = "cpu"\ndevices_per_node = '
TYPE = '[[device_type]]\nname = "A"\nmemory_gigabytes = 1\nmemory_gigabytes_per_second = 1\nteraflops = {float32 = 1}\n'
NODE = '[[node]]\nname = "n"\ncount = 1\ndevices = "A"\n'
MANY = ", ".join(f'"s{i}"' for i in range(50_000))
HUGE: list[tuple[str, str, str]] = [
    ("switches", f"{HEAD}2\n{TYPE}{NODE}switches = [{MANY}]\n", "50,000 switches. The limit is 4,096"),
    ("nodes", f"{HEAD}1048576\n{TYPE}{NODE * 200}", "list node has 200 tables. The limit is 100"),
    ("devices", f"{HEAD}1048576\n{TYPE}{NODE * 100}", "node[0].devices is 1048576"),
    ("fits", f"{HEAD}2\nfit = [{'{a = 1, b = 2}, ' * 9_000}]", "unknown key 'fit[0].a'"),
    ("links", f"{HEAD}2\nlink = [{'{between = 1}, ' * 9_000}]", "list link has 9,000 tables"),
    ("teraflops", TYPE.replace("float32 = 1", ", ".join(f"a{i} = 1" for i in range(9_000))), "teraflops is of type"),
]


@pytest.mark.parametrize(("text", "piece"), [case[1:] for case in HUGE], ids=[case[0] for case in HUGE])
def test_huge_lists_are_refused_soon(tmp_path: Path, text: str, piece: str) -> None:
    file = tmp_path / "huge.toml"
    file.write_text(text if text.startswith(HEAD) else f"{HEAD}2\n{text}")
    started = time.process_time()
    problems = machine_file_problems(file)
    assert time.process_time() - started < 3
    assert piece in problems[0] and len(problems) < 250
    assert_three_sentences(problems[0])


CPU = DeviceType("cpu", "cpu", 2**30, 1e10, (("float32", 1e11),))
PAIR = NodeKind("node", 1, (CPU, CPU), (Link(("0", "1"), 1e9, 1e-6),))
MACHINE = Machine("office", 1, 2, "cpu", nodes=(PAIR,))
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Link(("0", "1"), float("nan"), 0.0), "bandwidth of the link between '0' and '1' is nan"),
    (lambda: Link(("0", "1"), 1e9, -1e-6), "latency of the link"),
    (lambda: DeviceType("a", "tpu", 2**30, 1e9, (("float32", 1e9),)), "device is 'tpu'"),
    (lambda: DeviceType("a", "cpu", 1.5e9, 1e9, (("float32", 1e9),)), "memory of a is"),  # type: ignore[arg-type]
    (lambda: DeviceType("a", "cpu", 2**30, 0.0, (("float32", 1e9),)), "memory bandwidth of a is 0"),
    (lambda: DeviceType("a", "cpu", 2**30, 1e9, (("float32", 1e9),) * 2), "gives a rate twice"),
    (lambda: DeviceType("a", "cpu", 2**30, 1e9, (("float32", 1e9),), (("mm", 0.0),)), "efficiency of a for mm is 0"),
    (lambda: DeviceType("a", "cuda", 2**30, 1e9, (("float32", 1e9),), host_factor=0.0), "host factor of a is 0"),
    (lambda: NodeKind("n", 0, (CPU,)), "node kind n's count is 0"),
    (lambda: replace(MACHINE, devices_per_node=3), "has 2 devices, and the machine has 3"),
    (lambda: replace(MACHINE, device="cuda"), "devices of kind cpu, and the machine's device is cuda"),
    (lambda: replace(MACHINE, num_nodes=2), "2 nodes, and its node kinds count 1"),
    (lambda: replace(MACHINE, num_nodes=2, nodes=(PAIR, PAIR)), "two node kinds named 'node'"),
    (lambda: replace(MACHINE, num_nodes=2, nodes=(replace(PAIR, count=2),)), "from '0' to 'network'"),
    (lambda: replace(MACHINE, nodes=(), links=(Link(("0", "1"), 1e9, 0.0),)), "nodes without links"),
    (lambda: replace(MACHINE, fits=(replace(FIT, axes=("d0",)),) * 2), "two fits of one collective"),
    (lambda: replace(MACHINE, fits=(replace(FIT, axes=()),)), "over the axes (none)"),
    (lambda: replace(MACHINE, axes=(Axis("a", 2), Axis("a", 2))), "two axes named 'a'"),
    (lambda: replace(MACHINE, axes=(Axis("d0:S", 2),)), "Write d0_S instead"),
    (lambda: replace(MACHINE, axes=(Axis("2²", 2),)), "Write axis_2_ instead"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "piece"), WRONG, ids=[piece for _, piece in WRONG])
def test_what_no_machine_is_in_python(make: Callable[[], Any], piece: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert_three_sentences(caught.value)
    assert piece in str(caught.value)


def test_rates_of_types_that_are_not_listed() -> None:
    device = DeviceType("a", "cuda", 2**30, 1e9, (("float32", 8e9), ("float16", 9e9), ("float8", 10e9)))
    rates = {"float16": 9e9, "float8_e4m3fn": 10e9, "bfloat16": 8e9, "float64": 4e9, "int64": 4e9, "bool": 8e9}
    assert {name: device.flops_of(name) for name in rates} == rates


def test_a_machine_of_another_size() -> None:
    machine = replace(MACHINE, fits=(replace(FIT, axes=("d0",)),))
    linked = replace(PAIR, links=(*PAIR.links, Link(("0", NETWORK), 1e9, 0.0)))
    larger = replace(machine, nodes=(linked,)).with_nodes(4)
    assert larger.num_nodes == 4 and larger.nodes[0].count == 4 and larger.fits == machine.fits
    over_nodes = replace(larger, fits=(replace(FIT, axes=("n0",)),))
    assert over_nodes.with_nodes(2).fits == () and over_nodes.with_nodes(4) is over_nodes
    with pytest.raises(UsageError, match="asked for with 3 nodes"):
        replace(machine, axes=(Axis("a", 2),), fits=()).with_nodes(3)


def test_speeds_change_predictions_and_not_plans() -> None:
    faster = replace(MACHINE, nodes=(replace(PAIR, links=(Link(("0", "1"), 2e9, 1e-6),)),))
    assert faster.fingerprint() == MACHINE.fingerprint()
    assert faster.speed_fingerprint() != MACHINE.speed_fingerprint() and faster != MACHINE
    assert hash(replace(MACHINE)) == hash(MACHINE) and replace(MACHINE) == MACHINE
