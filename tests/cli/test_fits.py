"""`fits`: every batch that it tells is planned and simulated again, and so is the next larger one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import conjoin
from conjoin.machine import Machine
from conjoin.search import FitQuestion, make_plan
from conjoin.sim import predict
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
MODEL = ("gpt-125m:tiny", "--length", "1024", "--size", "layers=3")
"""Of two layers recompute=selective saves nothing: the peak is in the attention of the last, beside all that was made
again."""
MACHINE = ("--machine", "p3.8xlarge:1x2")


def memory_of(run: Run, batch: int, strategy: str) -> dict[str, Any]:
    """What `plan` and `simulate` say of a batch."""
    asked = ("plan", *MODEL, "--batch", str(batch), *MACHINE, "--strategy", strategy, "-o", "plan.json", "--json")
    assert run(*asked).code == 0
    found: dict[str, Any] = json.loads(run("simulate", "plan.json", *MACHINE, "--json").out)["memory"]
    return found


def test_the_largest_batch_fits_and_the_next_larger_does_not(run: Run, folder: Path) -> None:
    shown = run("fits", *MODEL, *MACHINE, "--strategy", "fsdp", "--json")
    assert shown.code == 0, shown.err
    rows = json.loads(shown.out)["fits"]
    assert {row["recompute"] for row in rows} == {"none", "selective", "full"} and rows[-1]["micro_batches"] == 2
    for row in (rows[0], rows[-1]):
        within, beyond = memory_of(run, row["batch"], row["strategy"]), row["next_larger"]
        assert row["fits"] and within["fits"] and within["peak"] == row["peak_bytes"] <= row["capacity"]
        assert beyond["batch"] - row["batch"] == 2 * row["micro_batches"], "one sample more for each part"
        over = memory_of(run, beyond["batch"], row["strategy"])
        assert not over["fits"] and over["peak"] == beyond["peak_bytes"] > row["capacity"]
    by_mode = {row["recompute"]: row["batch"] for row in rows[:3]}
    assert by_mode["none"] < by_mode["selective"] < by_mode["full"]


@pytest.mark.parametrize("strategy", ["fsdp+recompute=full+micro=4", "pipeline:pp=2,micro=4+recompute=full"])
def test_a_strategy_may_say_its_micro_batches(strategy: str, run: Run, folder: Path) -> None:
    (row,) = json.loads(run("fits", *MODEL, *MACHINE, "--strategy", strategy, "--json").out)["fits"]
    assert row["fits"] and row["micro_batches"] == 4 and row["batch"] % 4 == 0 and row["strategy"] == strategy
    over = row["next_larger"]
    found = [memory_of(run, batch, strategy) for batch in (row["batch"], over["batch"])]
    assert [memory["fits"] for memory in found] == [True, False]
    assert [memory["peak"] for memory in found] == [row["peak_bytes"], over["peak_bytes"]]


def test_the_best_is_told_in_micro_batches_also_where_it_runs_blocks_again(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is memory for one sample on each device, where blocks are run again."""
    peak = memory_of(run, 4, "fsdp+recompute=full+micro=2")["peak"]
    monkeypatch.setattr(Machine, "usable_bytes", property(lambda machine: peak))
    rows = json.loads(run("fits", *MODEL, *MACHINE, "--strategy", "fsdp", "--json").out)["fits"]
    assert [row["strategy"] for row in rows if row["fits"]] == ["fsdp+recompute=full", "fsdp+recompute=full+micro=2"]
    assert {row["recompute"] for row in rows if row["fits"]} == {"full"}


def test_what_is_told_to_people(run: Run) -> None:
    lines = run("fits", *MODEL, *MACHINE, "--strategy", "fsdp+recompute=full").out.splitlines()
    assert (
        lines[0].startswith("gpt-125m:tiny with adam, ")
        and "of each device of p3.8xlarge:1x2: 1 node × 2 cuda" in lines[0]
    )
    assert lines[1].split("  ")[0] == "strategy" and lines[2].startswith("fsdp+recompute=full ")
    assert " takes " in lines[2] and "micro-batches of" in lines[3] and lines[-1].startswith("In micro-batches")


def test_the_smallest_machine_for_a_batch(run: Run) -> None:
    shown = run("fits", *MODEL, "--machine", "p3.8xlarge", "--batch", "2048", "--strategy", "fsdp", "--json")
    rows = json.loads(shown.out)["fits"]
    assert shown.code == 0 and [row["devices"] for row in rows][:2] == [2, 4]
    model = conjoin.capture(*_workload(2048))
    for row in rows:
        machine = Machine.preset("p3.8xlarge")
        where = machine if row["devices"] == 4 else conjoin.machine.part_of(machine, 1, row["devices"])
        again = predict(make_plan(model, where, row["strategy"]), where, conjoin.api.known_costs())
        assert again.fits == row["fits"] and again.memory.peak == row["peak_bytes"]
        assert not row["fits"] or again.seconds == row["seconds_per_step"]
    assert rows[-1]["fits"]


def _workload(batch: int) -> tuple[Any, Any, Any]:
    import zoo

    made = zoo.build(MODEL[0], batch_size=batch, device="meta", sizes={"length": 1024, "layers": 3})
    return made.model.train(), made.batch, made.loss


def test_what_fits_nowhere_is_told_with_its_bytes(run: Run) -> None:
    shown = run("fits", "gpt-175b", "--size", "layers=2", *MACHINE, "--strategy", "data-parallel")
    assert shown.code == 0 and "no batch by data-parallel: parameters, gradients and optimizer take" in shown.out
    assert "Use more devices" in shown.out


@pytest.mark.parametrize(
    ("asked", "last", "told"),
    [((), "fsdp", "no batch by other ways: Ctrl-C came"), (("--batch", "64"), "data-parallel", "2        no ")],
    ids=["batch", "machine"],
)
def test_ctrl_c_tells_what_was_found_until_then(
    run: Run, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], last: str, told: str
) -> None:
    tried = FitQuestion.predict

    def interrupted(question: FitQuestion, machine: Machine, strategy: str, batch: int) -> Any:
        if strategy.startswith(last):
            raise KeyboardInterrupt
        return tried(question, machine, strategy, min(batch, 2))

    monkeypatch.setattr(FitQuestion, "predict", interrupted)
    shown = run("fits", "lenet:tiny", *MACHINE, *asked)
    assert shown.code == 0 and told in shown.out and "Ctrl-C came before it was tried" in shown.out


def test_questions_that_cannot_be_answered(run: Run, folder: Path) -> None:
    assert run("inspect", "lenet:tiny", "-o", "graph.json").code == 0
    assert "Its batch was fixed at capture" in run("fits", "graph.json", *MACHINE).refused()
    assert "Did you mean fsdp" in run("fits", "lenet:tiny", *MACHINE, "--strategy", "fsbp").refused()
    assert "takes no batch_size" in run("fits", "my_models.py:fixed", *MACHINE).refused()


def test_sizes_of_models(run: Run) -> None:
    short, long = (
        json.loads(run("inspect", "gpt-125m:tiny", "--json", *extra).out)
        for extra in ([], ["--length", "16", "--size", "layers=3"])
    )
    assert long["input_bytes"] == 2 * short["input_bytes"] and long["num_parameters"] > short["num_parameters"]
    own = json.loads(run("inspect", "my_models.py:sized", "--json", "--size", "width=6").out)
    assert own["num_parameters"] == 6 * 3 + 3


def test_sizes_that_a_model_does_not_have(run: Run) -> None:
    told = run("inspect", "gpt-125m:tiny", "--size", "lenght=16").refused()
    assert "Its sizes are layers, width, heads, length, vocabulary. Did you mean length?" in told
    assert "not to be changed" in run("inspect", "mlp:tiny", "--length", "4").refused()
    assert "Its sizes are" in run("inspect", "my_models.py:small", "--length", "4").refused()
    assert "whole number" in run("inspect", "gpt-125m:tiny", "--size", "length").refused()
    assert "as 4 and as 5" in run("inspect", "gpt-125m:tiny", "--length", "4", "--size", "length=5").refused()
