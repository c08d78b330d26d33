"""Traces: what Perfetto needs to show rows with names, and a file that is whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conjoin.cost import CostModel
from conjoin.errors import UsageError
from conjoin.machine import Machine
from conjoin.report import Event, save_trace, simulated_events, trace_json
from conjoin.sim import Prediction, predict
from tests.ir.wording import assert_three_sentences
from tests.report.plans import make_case

EVENTS = (
    Event("rank 0", "compute", "linear", 0.0, 2.5, (("phase", "forward"),)),
    Event("rank 0", "links", "all-reduce", 2.5, 1.0),
    Event("rank 1", "compute", "linear", 0.5, 2.0),
)


def predicted(batch_size: int, *, unfold: bool = False) -> Prediction:
    plan = make_case("mlp", batch_size).plan("p3.8xlarge", "data-parallel")
    assert plan is not None
    return predict(plan, Machine.preset("p3.8xlarge"), CostModel(profiles=()), unfold=unfold)


def test_golden_trace() -> None:
    def name(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}}

    assert trace_json(EVENTS) == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            name("process_name", 0, 0, "rank 0"),
            name("process_name", 1, 0, "rank 1"),
            name("thread_name", 0, 0, "compute"),
            name("thread_name", 0, 1, "links"),
            name("thread_name", 1, 2, "compute"),
            {"ph": "X", "pid": 0, "tid": 0, "name": "linear", "ts": 0.0, "dur": 2.5, "args": {"phase": "forward"}},
            {"ph": "X", "pid": 0, "tid": 1, "name": "all-reduce", "ts": 2.5, "dur": 1.0},
            {"ph": "X", "pid": 1, "tid": 2, "name": "linear", "ts": 0.5, "dur": 2.0},
        ],
    }
    assert trace_json([])["traceEvents"] == []


@pytest.mark.parametrize(
    ("batch_size", "unfold", "devices"),
    [
        (8, False, ["predicted: rank 0 and those like it"]),
        (8, True, [f"predicted: rank {i}" for i in range(4)]),
        (9, False, [f"predicted: rank {i}" for i in range(4)]),
    ],
)
def test_devices_that_behave_alike_are_one_row(batch_size: int, unfold: bool, devices: list[str]) -> None:
    found = predicted(batch_size, unfold=unfold)
    events = list(simulated_events(found.simulation))
    assert list(dict.fromkeys(event.device for event in events)) == devices
    assert min(event.start for event in events) >= 0 and min(event.duration for event in events) > 0
    assert max(event.start + event.duration for event in events) == pytest.approx(1e6 * found.seconds, rel=1e-9)


def test_events_of_a_stream_do_not_overlap() -> None:
    rows: dict[tuple[str, str], float] = {}
    for event in simulated_events(predicted(9).simulation, "mine"):
        assert event.start >= rows.get((event.device, event.stream), 0.0) - 1e-6
        rows[event.device, event.stream] = event.start + event.duration
    assert ("mine: rank 3", "compute") in rows and ("mine: rank 0", "links inside the node") in rows


def test_a_collective_tells_its_axes_and_bytes() -> None:
    for event in simulated_events(predicted(8).simulation):
        details = dict(event.details)
        assert {"phase", "source"} <= set(details)
        assert ("bytes sent" in details) == (event.stream != "compute")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    save_trace(EVENTS, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace_json(EVENTS)
    for path in (tmp_path / "missing" / "trace.json", tmp_path):
        with pytest.raises(UsageError, match="The trace could not be written") as error:
            save_trace(EVENTS, path)
        assert_three_sentences(error.value)
    assert os.listdir(tmp_path) == ["trace.json"]
