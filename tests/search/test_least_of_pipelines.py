"""What no pipeline takes less than, against all cuts, devices, ways and schedules of small tables and small models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from math import inf
from random import Random

import numpy as np
import pytest

from conjoin.cost import CostModel
from conjoin.ir import Pipeline
from conjoin.machine import parse_machine
from conjoin.schedules import Times, chain, play, zero_bubble
from conjoin.search.pipeline_bound import PipelineBound
from conjoin.search.stages.least import least_seconds
from conjoin.search.stages.parts import Division, Part
from conjoin.search.stages.plans import Model, crossings_of, played
from conjoin.search.stages.programme import Cutting, Slot
from conjoin.search.stages.search import StageSearch
from conjoin.search.stages.ways import Way, ways_on
from tests.search.everything import MOST_IN_A_PIPELINE, drawn, pipelines

ONE, TWO = Part((1, 1, ())), Part((2, 1, ()))
WAYS = Way("single"), Way("fsdp"), Way("single", "full")
CELLS = 4


def division_of(rng: Random) -> Division:
    """Granules that stages have one of, or one or two."""
    count, is_even = rng.randrange(2, 5), rng.random() < 0.5
    moves = [((1, ONE),) if is_even or begin + 2 > count else ((1, ONE), (2, TWO)) for begin in range(count)]
    return Division(1, count, tuple(moves), {})


def table_of(rng: Random) -> np.ndarray:
    """Figures of all rows; what is run again takes longer and holds less."""
    table = np.full((CELLS + 1, CELLS + 1, len(WAYS), 5), inf)
    for begin, end in combinations(range(CELLS + 1), 2):
        for way in range(2):
            if rng.random() < 0.9:
                table[begin, end, way] = [rng.uniform(0, 2) * (end - begin) for _ in range(5)]
        more = rng.uniform(0, 1), rng.uniform(0.2, 1)
        table[begin, end, 2] = table[begin, end, 0] * np.array([1.0, 1.0, 1.0, more[1], more[1]])
        table[begin, end, 2, 1] += more[0]
    return table


def cuttings(
    division: Division, tables: dict[Part, np.ndarray], begin: int = 0, cell: int = 0
) -> Iterator[tuple[Slot, ...]]:
    """All cuts, devices and ways from a granule and a cell on."""
    if (begin == division.count) != (cell == CELLS):
        return
    if cell == CELLS:
        yield ()
        return
    for (size, part), end in product(division.moves[begin], range(cell + 1, CELLS + 1)):
        for number, way in enumerate(WAYS):
            figures = tables[part][cell, end, number]
            if np.isfinite(figures).all():
                slot = Slot((cell, end), (begin, begin + size), part, way, tuple(figures))
                yield from ((slot, *rest) for rest in cuttings(division, tables, begin + size, end))


@pytest.mark.parametrize("seed", range(30))
def test_no_cutting_takes_less_by_any_schedule(seed: int) -> None:
    assert gap_of(seed) >= -1e-12


def gap_of(seed: int) -> float:
    """How far the best of all cuttings of some tables is from the bound."""
    rng, machine = Random(seed), parse_machine("dgx-h100:1")
    division, micro, capacity = division_of(rng), rng.randrange(1, 7), rng.choice([inf, rng.uniform(4, 30)])
    tables = {part: table_of(rng) for part in (ONE, TWO)}
    best = inf
    for slots in cuttings(division, tables):
        if len(slots) > 1:
            cut = Cutting(slots, 0.0)
            crossings = crossings_of(cut, [0.0] * (len(slots) - 1), 1, machine)
            best = min(best, played(cut, micro, capacity, crossings, limit=best))
    ways = dict.fromkeys(tables, WAYS)
    least = least_seconds(division, tables, ways, micro, capacity, range(2, CELLS + 1))
    return 0.0 if best == inf else best / least - 1


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_where_gradients_are_apart_every_stage_holds_as_much(num_stages: int) -> None:
    times = Times.alike(num_stages, chain(num_stages), seconds=(1, 1, 1), transfer=0.0)
    for micro in (1, 2, 4, 7):
        held = play(zero_bubble(num_stages, micro), times).peaks.in_flight
        assert set(held) == {min(num_stages, micro)}


@pytest.mark.parametrize("seed", [0, 5, 9, 11])
def test_no_pipeline_takes_less(seed: int) -> None:
    """Of small models, with all named strategies and those solved, and all run again that can be."""
    assert pipeline_gap(seed, inf) >= -1e-9


def pipeline_gap(seed: int, limit: float) -> float:
    """How far the best pipeline of a small model is from the bound, where memory has a limit."""
    graph, _, machine, _ = drawn(seed)
    model = Model(graph, machine, CostModel(), "adam", limit)  # type: ignore[arg-type]
    search, least = StageSearch(model, lambda: inf, lambda doing: None), inf
    for trial in search._trials():
        tables, division = search._tables_for(trial.micro), trial.division
        if tables is None or trial.micro > MOST_IN_A_PIPELINE:
            continue
        ways = {part: list(_every_way(division, part)) for part in division.parts}
        filled = {part: tables.fill(part, some, len(tables)) for part, some in ways.items()}
        found = least_seconds(division, filled, ways, trial.micro, limit, range(2, len(tables) + 1))
        least = min(least, found)
    best = min((judged.seconds for judged in pipelines(model, inf) if _all_learn(judged.pipeline)), default=inf)
    assert search.ideal <= best
    return 0.0 if best == inf else best / least - 1


def _all_learn(pipeline: Pipeline) -> bool:
    """Whether every stage has parameters of its own, as those have that are looked for."""
    return all(any(leaf.is_trained for leaf in stage.plan.graph.leaves) for stage in pipeline.stages)


def _every_way(division: Division, part: Part) -> Iterator[Way]:
    for way in ways_on(division.machines[part]):
        yield from (way, replace(way, is_solved=True)) if part.num_devices > 1 else (way,)


def test_a_bound_is_told_with_what_was_looked_at() -> None:
    told = str(PipelineBound(step=1.2, least_step=1.0, looked_at=3, among=20, computing=0.8))
    assert "within 20.0% of the least of all pipelines with the 3 of 20" in told and "within 50%" in told
    assert "counts no transfers" in told and "transfers" not in str(PipelineBound(1.04, 1.0, 3, 20, 0.8))
    assert PipelineBound(1.0, 0.0, 3, 20, 0.0).gap == PipelineBound(1.0, 0.0, 3, 20, 0.0).step_gap == inf
