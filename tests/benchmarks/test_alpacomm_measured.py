"""What `alpacomm_measured.py` measures: by every way each rank gets its piece, and another plan is noticed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import alpacomm_measured
from benchmarks.alpacomm_measured import (
    OURS,
    PLANNED,
    RESULTS,
    Case,
    Row,
    carry_out,
    figure_5,
    summary,
    table_2,
    told_again,
    ways_of,
)
from conjoin.comm import InRounds, SentWhole
from conjoin.machine import Axis, Mesh
from conjoin.runtime import run_ranks


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks need not come at the same moment where nothing is measured."""
    monkeypatch.setattr(alpacomm_measured, "_READY_SECONDS", 0.0)


CASES = {case.name: case for case in (*table_2((16, 16, 8), (24, 16, 10)), *figure_5(960))}


def run(case: Case, plans: dict[str, InRounds]) -> None:
    mesh = Mesh((Axis("node", case.nodes, True), Axis("place", case.places)))
    found = run_ranks(mesh, lambda world: carry_out(world, case, plans, 1))
    assert all(len(seconds) == 1 for rank in found for seconds in rank.values())


@pytest.mark.parametrize("name", CASES)
def test_every_way_brings_every_rank_its_piece(name: str) -> None:
    ways = ways_of(CASES[name], 1e6, 1e-4)
    is_passed_on = name in ("case 7", "case 8", "1 -> 2 x 2", "1 -> 3 x 2", "1 -> 4 x 2")
    assert (PLANNED in ways, len(ways)) == (is_passed_on, 8 + is_passed_on)
    assert all(way.predicted > 0 for way in ways.values())
    run(CASES[name], {name: way.plan for name, way in ways.items()})


def test_a_plan_that_leaves_something_out_is_noticed() -> None:
    case = CASES["case 3"]
    plan = ways_of(case, 1e6, 1e-4)["send/receive"].plan
    assert isinstance(plan, SentWhole)
    half = tuple(tuple(replace(m, end=m.end // 2) for m in messages) for messages in plan.messages)
    with pytest.raises(AssertionError, match=r"case 3 by half: rank \d+ got something else"):
        run(case, {"half": SentWhole(half)})


def test_pieces_are_those_of_the_paper() -> None:
    """Case 9, `R S0 R` to `R R S0`: columns by host, then the last dim by host, the same on all devices of one."""
    whole = torch.arange(2048).view(16, 16, 8)
    case = CASES["case 9"]
    assert torch.equal(case.piece(whole, 0, 5), whole[:, 8:])
    assert torch.equal(case.piece(whole, 1, 8), whole[..., :4])
    assert case.piece(whole, 0, 8) is None and case.piece(whole, 1, 7) is None


def test_pairs_that_are_told_in_the_wrong_order_are_named() -> None:
    rows = [Row("case 1", OURS, 10.0, 12.0, [12.0], 9.0), Row("case 1", "naive", 9.0, 20.0, [20.0], 10.0)]
    found = summary([*rows, Row("case 2", "naive", 50.0, 1.0, [1.0], 50.0)])
    wrong = [found[which]["pairs_in_wrong_order"] for which in ("predicted", "simulated")]
    assert (found["pairs_apart"], wrong) == (1, [["case 1: ours / naive"], []])


def test_the_simulator_tells_what_was_measured() -> None:
    """Of some cases, among them those that the paper's model tells in the wrong order."""
    stored = json.loads((RESULTS / "alpacomm_measured.json").read_text(encoding="utf-8"))
    some = [row for row in stored["rows"] if row["case"] in ("case 2", "case 4", "case 9", "1 -> 2 x 2")]
    rows = told_again({**stored, "rows": some})
    found = summary(rows)
    assert len(found["predicted"]["pairs_in_wrong_order"]) > 0 == len(found["simulated"]["pairs_in_wrong_order"])
    assert max(abs(row.simulated_error) for row in rows if row.way == OURS) < 0.1
