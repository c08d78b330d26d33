"""The parts of a step add up to it, to the last tick: by hand, and on simulated plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from conjoin.cost import Source
from conjoin.ir import Plan
from conjoin.sim import Breakdown, Instruction, Phase, Timeline, break_down, engine, run, simulate, to_ticks
from conjoin.sim.engine import BETWEEN, COMPUTE, INSIDE, State, Ticks
from tests.sim.conftest import RoundPrices


def compute(ticks: int | list[int], phase: Phase = Phase.FORWARD, *waits: int, host: int = 0) -> Instruction:
    amount = np.array(ticks, np.int64) if isinstance(ticks, list) else ticks
    return Instruction("compute", COMPUTE, amount, host, waits=waits, phase=phase, source=Source.ESTIMATED)


def send(ticks: int, stream: int = BETWEEN, *, sent: int = 0, group: tuple[int, ...] = ()) -> Instruction:
    axes = ("n0",) if stream == BETWEEN else ("d0",)
    return Instruction("all-reduce", stream, ticks, group=group, waits=(COMPUTE,), axes=axes, sent=sent)


def ticks_of(found: Breakdown) -> dict[str, int]:
    names = ("forward", "backward", "update", "exposed", "waiting", "hidden")
    return {name: to_ticks(getattr(found, name)) for name in names}


def assert_adds_up(found: Breakdown, timeline: Timeline) -> None:
    ticks = ticks_of(found)
    assert min(ticks.values()) >= 0
    assert sum(ticks.values()) - ticks["hidden"] == timeline.ticks
    assert found.step == pytest.approx(timeline.seconds, rel=1e-12)


def test_communication_is_hidden_as_long_as_something_is_computed() -> None:
    step = [(compute(4), send(6)), (compute(3, Phase.BACKWARD),), (compute(2, Phase.UPDATE, BETWEEN),)]
    timeline = run(step)
    found = break_down(timeline)
    assert ticks_of(found) == {"forward": 4, "backward": 3, "update": 2, "exposed": 3, "waiting": 0, "hidden": 3}
    assert_adds_up(found, timeline)


def test_a_device_waits_for_the_host() -> None:
    timeline = run([(compute(2, host=5), compute(2, host=5)), (send(4), compute(1, Phase.UPDATE, BETWEEN))])
    found = break_down(timeline)
    assert ticks_of(found) == {"forward": 4, "backward": 0, "update": 1, "exposed": 4, "waiting": 8, "hidden": 0}
    assert_adds_up(found, timeline)


def test_what_the_host_holds_up_is_estimated() -> None:
    """Of 13 ticks 5 are measured; a step that is bound by the host is as uncertain as the times of hosts."""
    work = replace(compute(2, host=5), source=Source.MEASURED)
    found = break_down(run([(work, work), (replace(compute(1, Phase.UPDATE), source=Source.MEASURED),)]))
    sources = {source: to_ticks(seconds) for source, seconds in found.sources}
    assert sources == {Source.MEASURED: 5, Source.INTERPOLATED: 0, Source.ESTIMATED: 8}
    last = break_down(run([(work, replace(compute(0, host=9), source=Source.MEASURED))]))
    assert dict(last.sources)[Source.ESTIMATED] == pytest.approx(12e-12), "the host is done last"


def test_waiting_for_a_slower_device_is_as_certain_as_that_device() -> None:
    measured = replace(compute([1, 5]), source=Source.MEASURED)
    found = break_down(run([(measured, send(10, group=(0,)))], 0, (2,)))
    assert to_ticks(found.waiting) == 4 and dict(found.sources)[Source.ESTIMATED] == 0


def test_a_device_waits_for_a_slower_one() -> None:
    timeline = run([(compute([1, 5]), send(10, group=(0,)), compute(2, Phase.UPDATE, BETWEEN))], 0, (2,))
    found = break_down(timeline)
    assert ticks_of(found) == {"forward": 1, "backward": 0, "update": 2, "exposed": 10, "waiting": 4, "hidden": 0}
    assert_adds_up(found, timeline)


def test_the_device_that_is_done_last_is_told() -> None:
    timeline = run([(compute([1, 7, 3]),)], 0, (3,))
    assert ticks_of(break_down(timeline))["forward"] == 7 == timeline.ticks


def test_two_links_at_once_are_exposed_once() -> None:
    timeline = run([(compute(1), send(5), send(8, INSIDE), compute(0, Phase.UPDATE, BETWEEN, INSIDE))])
    found = break_down(timeline)
    assert ticks_of(found)["exposed"] == 8
    assert_adds_up(found, timeline)


def test_collectives_are_counted_by_kind_and_axes() -> None:
    found = break_down(run([(compute(1), send(5, sent=100), send(7, sent=30), send(2, INSIDE, sent=8))]))
    told = {axes: (kind, count, to_ticks(seconds), sent) for kind, axes, count, seconds, sent in found.collectives}
    assert told == {("n0",): ("all-reduce", 2, 12, 130), ("d0",): ("all-reduce", 1, 2, 8)}
    sources = {source: to_ticks(seconds) for source, seconds in found.sources}
    assert sources == {Source.MEASURED: 14, Source.INTERPOLATED: 0, Source.ESTIMATED: 1}


def test_nothing_takes_no_time() -> None:
    assert set(ticks_of(break_down(run([])))) and break_down(run([])).step == 0


@pytest.mark.parametrize("host", [0.0, 5e-6])
@pytest.mark.parametrize(
    "asked",
    [
        ("mlp", "local:4", "data-parallel", 4),
        ("bert-base", "local:4", "megatron", 4),
        ("gpt-125m", "summit:1", "fsdp", 11),
        ("alexnet", "local:4", "spatial", 4),
        ("dlrm", "local:4", "table-parallel", 11),
    ],
    ids=lambda asked: f"{asked[0]} {asked[2]}",
)
def test_the_parts_of_a_plan_add_up(
    asked: tuple[str, str, str, int], host: float, tiny_plan: Callable[..., Plan], prices: RoundPrices
) -> None:
    prices.host = host
    timeline = simulate(tiny_plan(*asked), prices).timeline
    found = break_down(timeline)
    assert_adds_up(found, timeline)
    assert min(found.forward, found.backward, found.update) > 0
    assert sum(seconds for _, seconds in found.sources) >= found.step - found.waiting - 1e-12


def test_the_end_of_a_timeline_is_not_asked_for_with_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through all events: asked for with every task it takes minutes on a step of many micro-batches."""
    asked, own = 0, engine._latest

    def latest(times: State) -> Ticks:
        nonlocal asked
        asked += 1
        return own(times)

    monkeypatch.setattr(engine, "_latest", latest)
    counts = []
    for length in (5, 50):
        timeline = run([(compute([2, 3], host=1), send(1))] * length, shape=(2,))
        asked = 0
        assert_adds_up(break_down(timeline), timeline)
        counts.append(asked)
    assert counts[0] == counts[1]
