"""`run` on a whole graph: parts, accuracy and what is learned are told, and losses are those of one device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_a_graph_trains_in_parts_that_are_learned(run: Callable[..., Any], folder: Path) -> None:
    told = {}
    for devices, strategy in ((1, "single"), (2, "vertex-parallel")):
        plan, log = f"{strategy}.json", f"{strategy}.log"
        made = run("plan", "gcn-reddit:tiny", "--batch", "40", "--machine", f"local:{devices}", "--strategy", strategy,
                   "-o", plan)  # fmt: skip
        assert made.code == 0, made.err
        shown = run("run", plan, "gcn-reddit:tiny", "--batch", "40", "--steps", "4", "--lr", "0.1", "--log", log)
        assert shown.code == 0, shown.err
        told[devices] = [json.loads(line) for line in (folder / log).read_text().splitlines()], shown.out
    steps = {devices: [line for line in lines if line["kind"] == "step"] for devices, (lines, _) in told.items()}
    for key in ("loss", "accuracy"):
        wanted, found = ([line[key] for line in steps[devices]] for devices in (1, 2))
        assert found == pytest.approx(wanted, rel=1e-4)
    parts = [line for line in told[2][0] if line["kind"] == "parts"]
    assert [len(line["seconds"]) for line in parts] == [2] * 4 and parts[0]["predicted"] is None
    assert len(parts[-1]["predicted"]) == 2 and parts[-1]["weights"]
    assert "accuracy" in told[2][1] and "times the mean; learned" in told[2][1]
    assert "parts" not in told[1][1]
