"""A prediction as lines and as data: what is shown is what was predicted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conjoin.cost import CostModel, Source
from conjoin.ir import Plan
from conjoin.machine import Machine
from conjoin.report import format_bytes, format_seconds, prediction_text, prediction_to_json
from conjoin.sim import Prediction, predict
from tests.report.plans import make_case

MACHINE = Machine.preset("p3.8xlarge")


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = make_case("mlp", 8).plan("p3.8xlarge", "fsdp")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def found(plan: Plan) -> Prediction:
    return predict(plan, MACHINE, CostModel(profiles=()))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 µs"), (1e-9, "0.0 µs"), (2.5e-6, "2.5 µs"), (1e-3, "1.0 ms"), (0.25, "250.0 ms"), (1.0, "1.0 s")],
)
def test_seconds_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_every_part_has_its_line(found: Prediction, plan: Plan) -> None:
    lines = prediction_text(found, plan, MACHINE).splitlines()
    assert lines[:5] == [
        "prices       all estimated from data sheets; published steps on V100 were off by 8% in the median, "
        "17% at worst",
        f"plan         {plan}",
        "precision    float32, as the model is",
        f"machine      {MACHINE}",
        f"step         {format_seconds(found.seconds)} ± 35%",
    ]
    shares = [line for line in lines if line.endswith("%") and line.startswith("  ")]
    assert [float(line.split()[-1].removesuffix("%")) for line in shares] == pytest.approx(
        [100 * part / found.seconds for part in _parts(found)], abs=0.051
    )
    assert f"memory       {format_bytes(found.memory.peak)} of 13.9 GiB on the fullest device" in lines
    assert sum(line.startswith("collectives") for line in lines) == len(found.breakdown.collectives) > 0
    assert lines[-1] == "sources      estimated 100%" and not any("does not fit" in line for line in lines)


def _parts(found: Prediction) -> list[float]:
    parts = found.breakdown
    return [parts.forward, parts.backward, parts.update, parts.exposed, parts.waiting]


def test_sources_are_told_apart(found: Prediction, plan: Plan) -> None:
    mixed = replace(
        found.breakdown, sources=((Source.MEASURED, 3.0), (Source.INTERPOLATED, 0.0), (Source.ESTIMATED, 1.0))
    )
    assert "\nsources      measured 75%, estimated 25%\n" in prediction_text(
        replace(found, breakdown=mixed), plan, MACHINE
    )
    silent = replace(found.breakdown, sources=())
    assert "\nsources      nothing takes time\n" in prediction_text(replace(found, breakdown=silent), plan, MACHINE)


def test_what_does_not_fit_is_said_with_numbers(found: Prediction, plan: Plan) -> None:
    full = replace(found, capacity=found.memory.peak - 3 * 2**20)
    assert "\n  does not fit: 3.0 MiB too much\n" in prediction_text(full, plan, MACHINE)
    assert prediction_to_json(full, plan, MACHINE)["memory"]["fits"] is False


def test_without_samples_there_is_no_rate(found: Prediction, plan: Plan) -> None:
    assert " samples/s, " in prediction_text(found, plan, MACHINE)
    assert "samples/s" not in prediction_text(replace(found, num_samples=None), plan, MACHINE)


def test_data_says_the_same(found: Prediction, plan: Plan) -> None:
    data = prediction_to_json(found, plan, MACHINE)
    assert json.loads(json.dumps(data)) == data
    assert (data["plan"], data["model"], data["machine"], data["devices"]) == (
        "fsdp:dp=4",
        plan.model.name,
        MACHINE.name,
        4,
    )
    assert data["seconds_per_step"] == found.seconds and data["samples_per_second"] == found.samples_per_second
    assert list(data["seconds"].values()) == [*_parts(found), found.breakdown.hidden]
    assert (data["memory"]["peak"], data["memory"]["capacity"]) == (found.memory.peak, found.capacity)
    sent = {(entry["kind"], *entry["axes"]): entry["bytes_sent"] for entry in data["collectives"]}
    assert sent["all-gather", "d0", "d1"] > sent["all-reduce", "d0", "d1"] > 0
    assert data["tasks"] == found.simulation.num_tasks > 0
