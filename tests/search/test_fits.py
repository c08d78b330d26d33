"""Every strategy on every architecture is a legal plan or says why there is none; which is which is a golden table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conjoin.errors import StrategyError
from conjoin.ir import Graph, Plan, sequential
from conjoin.machine import Machine
from conjoin.search import make_plan, strategy_names
from conjoin.search.drafts import settle_draft
from conjoin.search.request import parse_request
from conjoin.search.strategies import STRATEGIES
from tests.ir.wording import assert_three_sentences
from tests.search.models import DEEP_FAMILIES, FAMILIES, LARGE_FAMILIES, captured

GOLDEN = Path(__file__).parent / "fits.txt"
"""Write it anew by running this file: `python -m tests.search.test_fits`."""


def cell(name: str, num_devices: int, strategy: str) -> str:
    """The degrees that a strategy takes for a model, or a dash where it does not fit."""
    graph = captured(name)
    try:
        plan = make_plan(graph, Machine("local", 1, num_devices, "cpu"), strategy)
    except StrategyError as error:
        assert_three_sentences(error)
        return "-"
    assert sequential(plan.graph) == rewritten(graph, num_devices, plan)
    return plan.strategy.partition(":")[2] or "yes"


def rewritten(graph: Graph, num_devices: int, plan: Plan) -> Graph:
    """The captured graph with the plan's substitutions made, and nothing else."""
    if not plan.substitutions:
        return graph
    found = STRATEGIES[plan.strategy.partition(":")[0]]
    request = parse_request(plan.strategy, {found.name: found.keys})
    mesh = Machine("local", 1, num_devices, "cpu").mesh
    return settle_draft(graph, lambda facts: found.draft(facts, mesh, request)).graph


def rows(name: str) -> list[str]:
    """One line for each strategy but `single`."""
    return [
        f"{name:<13} {strategy:<16} " + "".join(f"{n}: {cell(name, n, strategy):<12} " for n in counts).rstrip()
        for strategy, counts in numbers_of_devices(name)
    ]


def numbers_of_devices(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """By strategy; with models of many operators in turns, so that each strategy and each model meets every number."""
    turn = DEEP_FAMILIES.index(name) if name in DEEP_FAMILIES else None
    for place, strategy in enumerate(each for each in strategy_names() if each != "single"):
        if name in LARGE_FAMILIES:
            yield strategy, (4,)
        else:
            yield strategy, (2, 4, 8) if turn is None else (2 << (place + turn) % 3,)


@pytest.mark.parametrize("name", [*FAMILIES, *LARGE_FAMILIES])
def test_the_table_of_what_fits_what(name: str) -> None:
    expected = [line for line in GOLDEN.read_text().splitlines() if line.split()[0] == name]
    assert rows(name) == expected


def test_single_fits_everything_on_one_device_and_nothing_on_two() -> None:
    graph = captured("mlp-autoddl")
    assert make_plan(graph, Machine("one", 1, 1, "cpu"), "single").graph == graph
    with pytest.raises(StrategyError, match="on 2 devices") as error:
        make_plan(graph, Machine("two", 1, 2, "cpu"), "single")
    assert_three_sentences(error.value)


@pytest.mark.parametrize("strategy", strategy_names())
def test_one_device_is_the_simplest_machine_of_all(strategy: str) -> None:
    graph = captured("lenet")
    assert make_plan(graph, Machine("one", 1, 1, "cpu"), strategy).graph == graph


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{row}\n" for name in (*FAMILIES, *LARGE_FAMILIES) for row in rows(name)))
