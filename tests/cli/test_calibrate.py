"""`calibrate`: a table, a machine file that answers, mistakes told before measuring; `test_run.py` has torchrun."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conjoin.cli.commands.calibrate import Calibration, _doubts, describe
from conjoin.cli.device_probe import Probe, Speeds, combine_probes
from conjoin.cli.host_speed import HostSpeed
from conjoin.cost import Measurement
from conjoin.machine import COLLECTIVE_KINDS, DeviceType, Machine
from conjoin.runtime import Communication, Timed
from tests.cli.conftest import Ran, check_machine
from tests.cli.processes import Forked
from tests.waiting import HUNG_SECONDS

Run = Callable[..., Ran]


def test_two_ranks_give_a_table_and_a_file_and_measure_every_call_of_a_plan(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("CONJOIN_COSTS", str(tmp_path_factory.mktemp("costs") / "kept.sqlite"))
    run("plan", "my_models.py:with_loss", "--machine", "local:2", "--strategy", "data-parallel", "-o", "plan.json")
    options = ("--machine", "local:2", "--seconds", "0.5", "--plan", "plan.json", "--optimizer", "sgd")
    shown = run("calibrate", *options, "-o", "machine.toml")
    assert shown.code == 0, shown.err
    assert shown.err == "calibrating local: 1 node × 2 cpu, axes d0:2 for about 0.5 s\n", "one line, of rank 0"
    lines = shown.out.splitlines()
    assert lines[0] == "local: 1 node × 2 cpu, axes d0:2" and lines[1].split()[0] == "axes"
    rows = [line.split() for line in lines if line.startswith("d0 ")]
    assert [row[1] for row in rows] == [*COLLECTIVE_KINDS, "point-to-point"]
    for row in rows:
        assert float(row[2]) >= 0 and float(row[4]) <= 1 and row[5].endswith("%")
    assert sum(line.startswith(("device", "efficiency", "operators")) for line in lines) == 3
    assert lines[-1].split() == ["saved", "machine.toml"]
    machine = Machine.load("machine.toml")
    check_machine(machine)
    assert len(machine.fits) == 5 and len(machine.topology.path(0, 1)) == 2
    assert sorted(os.listdir(folder)) == ["machine.toml", "my_models.py", "plan.json"], "nothing is left beside it"
    (line,) = (line for line in shown.out.splitlines() if line.startswith("measured"))
    number = int(line.split()[1])
    assert number >= 3 and line.split()[1:4] == [str(number), "of", str(number)]
    facts = json.loads(run("simulate", "plan.json", "--machine", "machine.toml", "--optimizer", "sgd", "--json").out)
    assert facts["sources"].pop("measured") > 0 and not any(facts["sources"].values()), "nothing is estimated"
    others = json.loads(run("simulate", "plan.json", "--machine", "machine.toml", "--json").out)
    assert others["sources"]["estimated"] > 0, "Adam's step was not measured"


def test_json_has_every_point(run: Run) -> None:
    shown = run("calibrate", "--machine", "local:2", "--seconds", "0.5", "--json")
    found = json.loads(shown.out)
    assert shown.code == 0 and found["saved"] is None and found["concurrency"] is None
    assert [(fit["kind"], fit["axes"]) for fit in found["collectives"]] == [(kind, ["d0"]) for kind in COLLECTIVE_KINDS]
    for fit in (*found["collectives"], *found["point_to_point"]):
        errors = [abs(point["fitted_seconds"] / point["seconds"] - 1) for point in fit["points"]]
        assert len(errors) >= 4 and max(errors) == pytest.approx(fit["largest_error"])
        last = fit["points"][-1]
        assert last["fitted_seconds"] == pytest.approx(fit["latency"] + fit["seconds_per_byte"] * last["bytes"])
    (device,) = found["devices"]
    assert device["peak_flops"]["float32"] > 0 and found["operator_error"] >= 0


def test_one_rank_has_only_its_device(run: Run) -> None:
    shown = run("calibrate", "--machine", "local:1", "--seconds", "0.5", "-o", "one.toml")
    assert shown.code == 0 and "collective" not in shown.out and "device  " in shown.out
    machine = Machine.load("one.toml")
    check_machine(machine)
    assert machine.fits == () and machine.num_devices == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--machine", "local:2", "--plan", "nowhere.json"), "nowhere.json"),
        (("--machine", "local:2", "--optimizer", "fastest"), "'fastest' was to be measured"),
        (("--machine", "local:2", "-o", "machine.txt"), "ends in .toml"),
        (("--machine", "local:2", "-o", "missing/machine.toml"), "there is no directory"),
        (("--machine", "summit:2"), "which has 2 nodes"),
        (("--machine", "local"), "named without a number"),
        (("--machine", "local:300"), "300 ranks were asked for"),
        (("--machine", "nowhere.toml"), "nowhere.toml"),
        (("--machine", "local:2", "--seconds", "0"), "--seconds"),
        (("--machine", "local:2", "--seconds", "soon"), "--seconds"),
    ],
)
def test_mistakes_are_told_before_measuring(run: Run, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in run("calibrate", *arguments).refused()


def test_devices_that_are_not_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert "8 CUDA devices. This host has 1" in run("calibrate", "--machine", "dgx-h100").refused()


def test_ctrl_c_leaves_nothing(fork: Callable[..., Forked], folder: Path) -> None:
    process = fork("calibrate", "--machine", "local:2", "--seconds", "60", "-o", "machine.toml")
    assert process.stderr.readline().startswith("calibrating ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HUNG_SECONDS)
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    assert os.listdir(folder) == ["my_models.py"]


# What a machine is made of.

DEVICE = DeviceType("core", "cpu", 2**33, 1e10, (("float32", 1e11),))


def timed(kind: str, axis: str, latency: float, rate: float) -> Timed:
    return Timed(kind, (axis,), tuple((x, latency + x / rate) for x in (256, 4096, 65536, 2**20)))


def test_links_are_as_fast_as_pairs_of_ranks_were() -> None:
    pairs = timed("point-to-point", "n0", 1e-4, 1e8), timed("point-to-point", "d0", 2e-5, 1e9)
    measured = Communication((timed("all-reduce", "d0", 1e-4, 1e9),), pairs, None)
    machine = describe(Machine("two", 2, 2, "cpu"), measured, [DEVICE] * 4)
    assert machine.fit_of("all-reduce", ("d0",)) is not None and machine.fit_of("all-reduce", ("n0",)) is None
    for ranks, latency, rate in (((0, 1), 2e-5, 1e9), ((0, 2), 1e-4, 1e8), ((1, 2), 1e-4, 1e8)):
        path = machine.topology.path(*ranks)
        assert sum(hop.latency for hop in path) == pytest.approx(latency)
        assert min(hop.bandwidth for hop in path) == pytest.approx(rate)
    single = describe(Machine("two", 2, 1, "cpu"), Communication((), pairs[:1], None), [DEVICE] * 2)
    (leaving, entering) = single.topology.path(0, 1)
    assert leaving.latency + entering.latency == pytest.approx(1e-4) and leaving.bandwidth == pytest.approx(1e8)


def test_figures_that_are_not_to_be_trusted_are_told() -> None:
    noisy = Timed("all-reduce", ("d0",), ((256, 1e-4), (4096, 9e-4), (65536, 1e-5), (2**20, 4e-4)))
    for each, error, doubts in ((timed("all-reduce", "d0", 1e-4, 1e9), 0.1, 0), (noisy, 0.1, 1), (noisy, 0.71, 2)):
        found = Calibration(Machine("two", 1, 2, "cpu"), Communication((each,), (), None), Speeds((DEVICE,), error), {})
        assert len(_doubts(found)) == doubts
    assert "1 of 1 fits are poor" in _doubts(found)[0] and "71%" in _doubts(found)[1]


def test_nodes_that_differ_are_kept_apart() -> None:
    slow = DeviceType("slow core", "cpu", 2**33, 1e10, (("float32", 1e10),))
    quiet = Communication((), (timed("point-to-point", "d0", 2e-5, 1e9),), None)
    machine = describe(Machine("mixed", 3, 1, "cpu"), Communication((), (), None), [DEVICE, slow, slow])
    assert [(kind.name, kind.count) for kind in machine.nodes] == [("node-0", 1), ("node-1", 2)]
    assert [machine.device_type(rank).name for rank in range(3)] == ["core", "slow core", "slow core"]
    stated = describe(Machine("mixed", 1, 2, "cpu"), quiet, [DEVICE, slow])
    again = describe(stated, quiet, [DEVICE, slow])
    assert again == stated, "what a machine says of its links stays"


def probe(device: DeviceType, seconds: float, *sizes: int) -> Probe:
    keys = [f"mm f32[{size},{size}] f32[{size},{size}] | grads 0,1" for size in sizes]
    return Probe(device, tuple(Measurement(key, seconds, 2 * seconds) for key in keys))


def test_ranks_of_one_kind_count_together_and_others_apart() -> None:
    fast = DeviceType("fast", "cpu", 2**33, 1e10, (("float32", 1e11),))
    small = DeviceType("fast", "cpu", 2**32, 3e10, (("float32", 3e11),))
    slow = DeviceType("slow", "cpu", 2**33, 1e10, (("float32", 1e9),))
    sizes = (1000, 1001, 1002, 1003)
    timings = ((fast, 0.02), (small, 0.08), (fast, 0.04), (slow, 4.0))
    probes = [probe(device, seconds, *sizes) for device, seconds in timings]
    speeds = combine_probes(Machine("four", 4, 1, "cpu"), probes)
    assert [device.name for device in speeds.devices] == ["fast", "fast", "fast", "slow"]
    first, last = speeds.devices[0], speeds.devices[3]
    assert (first.memory_bytes, first.memory_bandwidth, first.peak_flops) == (2**32, 1e10, (("float32", 1e11),))
    assert dict(first.efficiency)["contraction"] == pytest.approx(0.5, rel=0.05), "2·10⁹ flops in 40 ms"
    assert dict(last.efficiency)["contraction"] == pytest.approx(0.5, rel=0.05)
    assert speeds.error < 0.05


def test_the_host_of_a_gpu_is_compared_with_the_one_that_prices_were_measured_with() -> None:
    gpu = Machine.preset("dgx-h200").device_type(0)
    found = tuple(Measurement(f"mm bf16[{n},{n}] bf16[{n},{n}] | grads 0,1", 1e-3, 2e-3) for n in (64, 128, 256))
    probes = [Probe(gpu, found, factor) for factor in (3.0, 2.5, 40.0)]
    speeds = combine_probes(Machine("three", 1, 3, "cuda"), probes)
    assert [device.host_factor for device in speeds.devices] == [3.0, 3.0, 3.0], "the middle one's"
    there = combine_probes(Machine("one", 1, 1, "cpu"), [probe(DEVICE, 0.04, 1000, 1001, 1002)]).devices
    assert there[0].host_factor == 1.0


def test_a_small_step_tells_the_speed_of_the_host_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by the clock: what is read is how long the step took, of what is predicted for a host of such speed."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda place: None)
    gpu, cpu = Machine.preset("dgx-h200").device_type(0), torch.device("cpu")
    speed = HostSpeed(gpu, cpu)
    begun = time.perf_counter()
    factor = speed.read()
    taken = time.perf_counter() - begun
    slow = replace(gpu, host_factor=2.0)
    weak = replace(gpu, memory_bandwidth=gpu.memory_bandwidth / 2)
    assert 0.3 * taken < 5 * factor * speed.predicted < 1.5 * taken
    assert HostSpeed(slow, cpu).predicted == pytest.approx(2 * speed.predicted, rel=0.05)
    assert HostSpeed(weak, cpu).predicted == pytest.approx(speed.predicted, rel=0.05)


def test_what_a_machine_says_of_its_devices_stays() -> None:
    quiet = Communication((), (), None)
    stated = describe(Machine("one", 1, 1, "cpu"), quiet, [DEVICE])
    measured = DeviceType("x86_64 CPU, 1 thread", "cpu", 2**30, 1e9, (("float32", 5e9),))
    speeds = combine_probes(stated, [probe(measured, 0.04, 1000, 1001, 1002)])
    (device,) = speeds.devices
    assert (device.name, device.peak_flops, device.memory_bytes) == ("core", DEVICE.peak_flops, DEVICE.memory_bytes)
    assert dict(device.efficiency)["contraction"] == pytest.approx(0.5, rel=0.05)
    assert describe(stated, quiet, speeds.devices).device_type(0) == device
