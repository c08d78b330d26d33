"""The search over pipelines: against brute force, against the plain model, and where one stage does not do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations, product
from math import inf
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conjoin import Wish, verify_plan
from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.frontends import capture
from conjoin.ir import Accumulation, Graph, Pipeline
from conjoin.machine import DeviceType, Link, Machine, NodeKind, devices_of, parse_machine
from conjoin.ops import LINEAR_RELU, Split
from conjoin.rules import Library
from conjoin.search import find_plan, make_pipeline
from conjoin.search.exact.space import OVERLAPS, objective_on
from conjoin.search.exact.table_sum import sum_of
from conjoin.search.pipeline_bound import PipelineBound
from conjoin.search.rewrites import ways_of
from conjoin.search.stages.cells import find_cells
from conjoin.search.stages.folds import shorten, stands_for
from conjoin.search.stages.parts import Division, Part, divisions
from conjoin.search.stages.plans import Judged, Model, build, crossings_of, judge, least_of_cutting, played
from conjoin.search.stages.programme import Cutting, Programme, Slot
from conjoin.search.stages.search import StageSearch, micro_batches
from conjoin.search.stages.tables import BACKWARD, FINISH, FORWARD, KEPT, PEAK
from conjoin.search.stages.ways import Solver, Way, lay_out_stage, ways_on
from conjoin.sim import MachinePrices, predict, predict_pipeline
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.tokens import next_token_loss


class Block(nn.Module):
    """A layer and a way around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Rows(nn.Module):
    """Something before and after equal blocks."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


@cache
def rows(depth: int, width: int, samples: int) -> Graph:
    with torch.device("meta"):
        model, batch = Rows(depth, width).train(), (torch.randn(samples, width), torch.randn(samples, 1))
    return capture(model, batch, nn.functional.mse_loss)


def cluster(name: str, devices: tuple[DeviceType, ...], rate: float) -> Machine:
    links = tuple(Link((str(i), "bus"), rate, 1e-6) for i in range(len(devices)))
    kind = NodeKind("node", 1, devices, switches=("bus",), links=links)
    return Machine(name, 1, len(devices), "cuda", nodes=(kind,))


def gpu(name: str, flops: float, memory: int = 2**36) -> DeviceType:
    return DeviceType(name, "cuda", memory, flops / 100, (("float32", flops),))


def machine_of(model: Graph, machine: Machine, memory: int | None = None) -> Model:
    return Model(model, machine, CostModel(), "adam", memory or machine.usable_bytes)


@pytest.mark.parametrize("seed", range(40))
def test_the_programme_finds_what_brute_force_finds(seed: int) -> None:
    draw = Random(seed)
    cells, granules, micro = draw.randint(2, 6), draw.randint(2, 4), draw.choice([1, 2, 4, 8])
    uneven = draw.random() < 0.5
    parts = {size: Part((size, 1, ())) for size in range(1, granules)}
    moves = tuple(
        tuple((size, part) for size, part in parts.items() if begin + size <= granules and (uneven or size == 1))
        for begin in range(granules)
    )
    division = Division(1, granules, moves, {})
    ways = [Way(f"way {i}") for i in range(3)]
    random = np.random.default_rng(seed)
    tables = {part: random.uniform(0.5, 2.0, (cells + 1, cells + 1, 3, 5)) for part in parts.values()}
    for table in tables.values():
        table[np.tril_indices(cells + 1)] = inf
    sent = random.uniform(0.0, 0.3, cells + 1)
    capacity = draw.choice([2.0, 3.0, inf])
    told = Programme(division, tables, dict.fromkeys(parts.values(), ways), sent, micro, capacity, granules)
    found: dict[int, float] = {}
    for cutting in told.solve():
        found.setdefault(len(cutting.slots), cutting.seconds)

    best: dict[int, float] = {}
    for sizes in _compositions(granules, granules if uneven else 1):
        for bounds in combinations(range(1, cells), len(sizes) - 1):
            edges = (0, *bounds, cells)
            taken, added = [], []
            for number, size in enumerate(sizes):
                flight = min(len(sizes) - number, micro)
                if size not in parts:
                    break
                some = tables[parts[size]][edges[number], edges[number + 1]]
                fits = [w for w in some if w[PEAK] + (flight - 1) * w[KEPT] <= capacity]
                ends = [(w[FORWARD] + w[BACKWARD] + w[FINISH] / micro, w[FINISH] / micro) for w in fits]
                taken.append(min(ends, default=(inf, 0.0))[0])
                added.append(taken[-1] - (min(ends, default=(inf, 0.0))[1] if number else 0.0))
            if len(taken) == len(sizes):
                total = sum(added) + sum(sent[edge] for edge in edges[:-1]) + (micro - 1) * max(taken)
                best[len(sizes)] = min(total, best.get(len(sizes), inf))
    assert found == pytest.approx({s: seconds for s, seconds in best.items() if seconds < inf})


def _compositions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for size in range(1, min(total, largest) + 1):
        yield from ((size, *rest) for rest in _compositions(total - size, largest))


def every_pipeline(model: Model) -> Iterator[float]:
    """What all pipelines of the family take, by brute force: every cut, parts, ways, micro-batches and schedules."""
    search = StageSearch(model, lambda: inf, lambda doing: None)
    solver = Solver(model.costs, model.optimizer, rules={rule.rule.name: rule for rule in model.rules})
    for micro in micro_batches(model.captured):
        tables = search._tables_for(micro)
        assert tables is not None
        for division in divisions(model.machine, model.machine.num_devices):
            for sizes in _compositions(division.count, 1 if division.is_even else division.count):
                yield from _all_of(model, solver, tables.cells, tables.accumulation, division, sizes)


def _ways_of(model: Model, machine: Machine) -> list[Way]:
    """Every way; where there are substitutions those that save no memory, solved too, with some of these or none."""
    if not model.rules:
        return list(ways_on(machine))
    plain = [way for way in ways_on(machine) if way.is_plain]
    ways = plain if machine.num_devices == 1 else [*plain, *(replace(way, is_solved=True) for way in plain)]
    names = [rule.rule.name for rule in model.rules]
    some = [found for count in range(len(names) + 1) for found in permutations(names, count)]
    return [replace(way, rules=found) for way in ways for found in some]


def _all_of(  # type: ignore[no-untyped-def]
    model: Model, solver: Solver, cells, accumulation, division: Division, sizes: tuple[int, ...]
) -> Iterator[float]:
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [dict(division.moves[begin]).get(size) for begin, size in zip(begins, sizes, strict=True)]
    if len(sizes) < 2 or None in parts:
        return
    for bounds in combinations(range(1, len(cells)), len(sizes) - 1):
        edges = (0, *bounds, len(cells))
        if not np.diff(cells.learning[list(edges)]).all():  # every stage has parameters of its own
            continue
        for ways in product(*(_ways_of(model, division.machines[part]) for part in parts if part is not None)):
            slots = tuple(
                Slot((edges[i], edges[i + 1]), (begins[i], begins[i] + sizes[i]), part, way)
                for i, (part, way) in enumerate(zip(parts, ways, strict=True))
                if part is not None
            )
            try:
                found = judge(model, build(model, solver, cells, accumulation, division, Cutting(slots, 0.0)))
            except StrategyError:
                continue
            if found.fits:
                yield found.seconds


@pytest.mark.parametrize("seed", range(4))
def test_a_search_is_as_good_as_brute_force(seed: int) -> None:
    draw = Random(seed)
    depth, width, samples = draw.choice([1, 2]), draw.choice([256, 1024]), draw.choice([2, 4])
    speeds = [draw.choice([1e13, 3e13]) for _ in range(2)]
    devices = tuple(gpu(f"gpu {flops:g}", flops) for flops in speeds)
    model = machine_of(rows(depth, width, samples), cluster("some", devices, draw.choice([1e9, 1e11])))
    search = StageSearch(model, lambda: inf, lambda doing: None)
    assert search.run()
    assert search.best is not None
    assert search.best.seconds <= 1.01 * min(every_pipeline(model))


RULES = {rule.rule.name: rule for rule in ways_of(Library.shipped())}


def _wide(speeds: tuple[float, ...], samples: int, rate: float) -> Model:
    """A model with much to do that is no product, on some devices."""
    with torch.device("meta"):
        made, batch = Rows(4 - len(speeds), 64).train(), (torch.randn(2, samples, 64), torch.randn(2, samples, 1))
    devices = tuple(gpu(f"gpu {flops:g}", flops) for flops in speeds)
    return machine_of(capture(made, batch, nn.functional.mse_loss), cluster("some", devices, rate))


def _found(model: Model) -> Judged:
    search = StageSearch(model, lambda: inf, lambda doing: None)
    assert search.run() and search.best is not None
    return search.best


@pytest.mark.parametrize(("speeds", "rate"), [((1e13, 3e12), 1e9), ((3e13, 1e13, 3e12), 1e11)])
def test_stages_are_rewritten_as_well_as_by_brute_force(speeds: tuple[float, ...], rate: float) -> None:
    """Over substitutions, layouts, cuts and devices: one substitution gains where it is applied, one loses."""
    model = _wide(speeds, 16384, rate)
    every = {rule.rule.name: rule for rule in ways_of(Library.shipped())}
    names = "relu-bias-to-bias", "bias-linear-to-linear-bias-back"
    free = replace(model, rules=tuple(every[name] for name in names[: 4 - model.machine.num_devices]))
    found = _found(free)
    assert found.seconds <= 1.001 * min(every_pipeline(free))
    assert found.seconds < 0.985 * _found(model).seconds
    assert {one.name for stage in found.pipeline.stages for one in stage.plan.substitutions} == {names[0]}


def test_a_schedule_with_less_of_a_bubble_than_the_formula_counts_is_not_given_up() -> None:
    """Two unequal stages are slower than three equal ones by the formula, and faster by the timeline."""
    assert [len(stage.ranks) for stage in _found(_wide((3e13, 1e13, 3e12), 4096, 1e11)).pipeline.stages] == [1, 2]


@pytest.mark.parametrize("bandwidth", [1e9, 1e6])
def test_a_cutting_takes_by_its_figures_what_its_pipeline_does(bandwidth: float) -> None:
    """Also where activations and gradients of one stage wait for each other on its uplink."""
    model = machine_of(rows(8, 256, 64), cluster("four", (gpu("gpu", 1e12),) * 4, bandwidth))
    search = StageSearch(model, lambda: inf, lambda doing: None, stages=4)
    search._short = search._shorten()
    compared = 0
    for trial in search._trials():
        if not trial.division.is_even or trial.micro not in (4, 16):
            continue
        cutting = search._solve(trial)[0]
        tables, crossings = search._tables_for(trial.micro), search._crossings(trial, cutting)
        cut = search._cells(model.captured, trial.micro)
        assert tables is not None and cut is not None and crossings.links is not None
        found = played(cutting, trial.micro, model.capacity, crossings)
        wanted = judge(model, build(model, search._solver, *cut, trial.division, cutting))
        assert wanted.prediction.times.links is not None
        assert found == pytest.approx(wanted.seconds, rel=0.03)
        crossings.links = None
        if bandwidth < 1e7:
            assert played(cutting, trial.micro, model.capacity, crossings) < 0.9 * found, "nothing waits"
        compared += 1
    assert compared == 2


def test_no_schedule_takes_less_than_a_cutting_at_least() -> None:
    rng, machine = Random(0), parse_machine("dgx-h100:1")
    for _ in range(20):
        count, micro = rng.randrange(2, 5), rng.randrange(1, 9)
        figures = [(*(rng.uniform(0, 2) for _ in range(3)), 1.0, 0.0) for _ in range(count)]
        slots = [Slot((i, i + 1), (i, i + 1), Part((1, 1, ())), Way("single"), figures[i]) for i in range(count)]
        cut = Cutting(tuple(slots), 0.0)
        crossings = crossings_of(cut, [rng.uniform(0, 1e9)] * (count - 1), 1, machine)
        taken, least = played(cut, micro, inf, crossings), least_of_cutting(cut, micro)
        assert least <= taken * (1 + 1e-12) and played(cut, micro, inf, crossings, least) == inf
        assert played(cut, micro, inf, crossings, taken * 1.01) == taken


def test_equal_blocks_are_of_one_kind_and_priced_once() -> None:
    graph = rows(12, 64, 8)
    cells = find_cells(graph, np.ones(len(graph.nodes)))
    assert len(cells) == 14
    assert len(set(cells.kinds)) == 3
    short = shorten(cells)
    assert short is not None
    fold = stands_for(find_cells(short, np.ones(len(short.nodes)), blocks_only=True), cells)
    assert fold is not None
    assert len(fold.short) == 4
    priced = []
    for depth in (6, 12):
        model = machine_of(rows(depth, 1024, 8), parse_machine("dgx-h100:1x2"))
        search = StageSearch(model, lambda: inf, lambda doing: None)
        search.run()
        priced.append(sum(tables.num_priced for tables in search._tables.values() if tables is not None))
    assert priced[1] <= priced[0] + 4, "more of the same blocks are priced once"


def test_as_few_blocks_are_run_again_as_are_enough() -> None:
    parts, ways = Part((1, 1, ())), [Way("some"), Way("some", "full")]
    division = Division(1, 2, (((1, parts),), ((1, parts),)), {})
    table = np.full((9, 9, 2, 5), inf)
    for begin, end in combinations(range(9), 2):
        table[begin, end, 0] = (end - begin) * np.array([1.0, 2.0, 0.0, 10.0, 10.0])
        table[begin, end, 1] = (end - begin) * np.array([1.0, 3.0, 0.0, 2.0, 2.0])
    best = Programme(division, {parts: table}, {parts: ways}, np.zeros(9), 4, 60.0, 2).solve(2)[0]
    assert [slot.cells for slot in best.slots] == [(0, 4), (4, 8)]
    assert 2 * (3 * 10 + 2) > 60 >= 2 * (2 * 10 + 2 * 2), "two micro-batches in flight, bytes by cell"
    assert [slot.way.blocks for slot in best.slots] == [2, None]
    assert best.slots[0].figures == (4.0, 10.0, 0.0, 24.0, 24.0)


def test_some_blocks_of_a_stage_are_run_again() -> None:
    graph, machine = rows(4, 1024, 512), parse_machine("dgx-h100:1x2")
    model = machine_of(graph, machine)
    solver, cells = Solver(model.costs, model.optimizer), find_cells(graph, np.ones(len(graph.nodes)))
    held = []
    for blocks in (1, 2, None):
        way = Way("single", "full", blocks)
        laid_out = lay_out_stage(cells.row(0, 4), devices_of(machine, range(1)), way, graph, solver)
        assert laid_out is not None
        held.append(len(laid_out.segments))
    assert held == [1, 2, 3]


def test_layouts_of_a_stage_are_solved() -> None:
    graph, machine = rows(4, 1024, 512), parse_machine("dgx-h100:1")
    model, way = machine_of(graph, machine), Way("data-parallel")
    solver, cells = Solver(model.costs, model.optimizer), find_cells(graph, np.ones(len(graph.nodes)))
    prices, sums = MachinePrices.of(graph, machine, model.costs, "adam"), []
    for some in (replace(way, is_solved=True), way, Way("megatron:tp=8")):
        laid_out = lay_out_stage(cells.row(1, 3), machine, some, graph, solver)
        assert laid_out is not None
        laid_out.simulate(machine, prices, {})
        objective = replace(objective_on(machine, prices, "adam", OVERLAPS[0], 0.0), is_stage=True)
        space = next(iter(solver._spaces.values()))
        told = sum_of(laid_out.skeleton, space, objective, laid_out.layouts, laid_out.regathered)
        assert told is not None
        sums.append(told)
    assert sums[0] < min(sums[1:]), "the least sum is below those of strategies, in the same space"


def test_a_slower_device_has_fewer_blocks() -> None:
    devices = gpu("fast", 4e13), gpu("slow", 1e13)
    graph, wish = rows(6, 2048, 64), Wish(budget=inf, steps=100, stages=2)
    found = find_plan(graph, cluster("two kinds", devices, 1e11), CostModel(), wish).plan
    assert isinstance(found, Pipeline)
    layers = [sum(node.op in ("linear", "matmul") for node in stage.plan.graph.nodes) for stage in found.stages]
    assert layers[0] > 2 * layers[1] > 0


def test_where_memory_is_short_pipelines_are_found_beside_plans_of_one_stage() -> None:
    model, machine = rows(6, 4096, 64), cluster("small", (gpu("a", 1e13),) * 2, 1e9)
    several = find_plan(model, machine, CostModel(), Wish(budget=inf, steps=100, stages=2))
    memory = int(1.01 * several.peak_bytes)
    found = find_plan(model, machine, CostModel(), Wish(budget=inf, steps=50, memory=memory))
    assert found.peak_bytes <= memory
    assert found.seconds_per_step <= 1.006 * several.seconds_per_step


def test_a_pipeline_that_is_found_is_told_and_remembered_like_a_plan(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from conjoin.search import Remembered, is_answer

    graph, machine, wish = rows(4, 64, 8), parse_machine("dgx-h100:1x2"), Wish(budget=600, stages=2)
    result = find_plan(graph, machine, CostModel(), wish)
    plan = result.plan
    assert isinstance(plan, Pipeline)
    assert result.seconds_per_step == predict_pipeline(plan, machine, CostModel()).seconds
    assert dict(plan.predictions)["seconds_per_step"] == result.seconds_per_step
    kept = Remembered(tmp_path)
    kept.keep(graph, machine, wish, "", result)
    again = kept.find(graph, machine, wish, "")
    assert again is not None
    assert again.plan == plan
    assert isinstance(result.certificate, PipelineBound) and again.certificate == result.certificate
    assert is_answer(again, wish)
    longer = find_plan(graph, machine, CostModel(), replace(wish, budget=900), start=again)
    assert longer.seconds_per_step <= result.seconds_per_step


def test_ctrl_c_keeps_the_best_pipeline() -> None:
    graph, machine = rows(6, 64, 16), parse_machine("dgx-h100:1x4")

    def stop(progress) -> None:  # type: ignore[no-untyped-def]
        if progress.best_seconds is not None:
            raise KeyboardInterrupt

    found = find_plan(graph, machine, CostModel(), Wish(budget=inf, stages=2), progress=stop)
    assert found.stopped.value == "interrupted"
    assert isinstance(found.plan, Pipeline)


@pytest.mark.parametrize(
    "wish", [Wish(stages=0), Wish(stages=2, fixed={"first.weight": "d0:S(0)"}), Wish(stages=2, search="mcmc")]
)
def test_stages_that_cannot_be_are_refused(wish: Wish) -> None:
    with pytest.raises(UsageError, match="stages"):
        find_plan(rows(2, 64, 8), parse_machine("dgx-h100:1x2"), CostModel(), wish)


def test_more_stages_than_devices_are_refused() -> None:
    with pytest.raises(StrategyError, match="in 5 stages"):
        find_plan(rows(2, 64, 8), parse_machine("dgx-h100:1x2"), CostModel(), Wish(stages=5, budget=inf))


@pytest.mark.parametrize(("devices", "stages"), [(2, 2), (4, 2), (4, 3)])
def test_pipelines_that_are_found_compute_what_the_model_does(devices: int, stages: int) -> None:
    torch.manual_seed(0)
    model, batch = Rows(3, 8).double().train(), (torch.randn(8, 8).double(), torch.randn(8, 1).double())
    graph, machine = capture(model, batch, nn.functional.mse_loss), parse_machine(f"dgx-h100:1x{devices}")
    found = find_plan(graph, machine, CostModel(), Wish(budget=inf, steps=100, stages=stages)).plan
    assert isinstance(found, Pipeline)
    assert len(found.stages) == stages
    verdict = verify_plan(found, model, batch, loss=nn.functional.mse_loss, num_steps=2)
    assert verdict.passed, verdict


def test_rewritten_stages_compute_what_the_model_does() -> None:
    torch.manual_seed(0)
    model, batch = Rows(2, 8).double().train(), (torch.randn(8, 8).double(), torch.randn(8, 1).double())
    graph, machine = capture(model, batch, nn.functional.mse_loss), parse_machine("dgx-h100:1x2")
    every = {rule.rule.name: rule for rule in ways_of(Library.shipped())}
    cells, division = find_cells(graph, np.ones(len(graph.nodes))), next(divisions(machine, 2))
    (part,), way = division.parts, Way("single", rules=("relu-bias-to-bias",))
    middle = len(cells) // 2
    slots = Slot((0, middle), (0, 1), part, way), Slot((middle, len(cells)), (1, 2), part, way)
    some, solver = machine_of(graph, machine), Solver(CostModel(), "adam", rules=every)
    found = build(some, solver, cells, None, division, Cutting(slots, 0.0))
    assert [sum(node.op == LINEAR_RELU for node in stage.plan.graph.nodes) for stage in found.stages] == [1, 1]
    verdict = verify_plan(found, model, batch, loss=nn.functional.mse_loss, num_steps=2)
    assert verdict.passed, verdict


def test_statistics_of_a_batch_are_not_taken_of_micro_batches_unasked() -> None:
    """A pipeline by name takes them so; one that is found computes what the model does."""
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)]
        model, batch = nn.Sequential(*layers, nn.Linear(64, 1)).train(), (torch.randn(16, 64), torch.randn(16, 1))
    graph, machine = capture(model, batch, nn.functional.mse_loss), parse_machine("dgx-h100:1x2")
    assert len(make_pipeline(graph, machine, "pipeline:pp=2,micro=4").stages) == 2
    search = StageSearch(machine_of(graph, machine), lambda: inf, lambda doing: None)
    search.run()
    assert search.best is None


def _stages_of_gpt() -> tuple[Pipeline, Machine]:
    config = GptConfig(2, 256, 8, length=32, vocabulary=64, by_head=True)
    with torch.device("meta"):
        graph = capture(Gpt(config).train(), gpt_batch(16, config), next_token_loss)
    machine = parse_machine("dgx-h100:4x4")
    return make_pipeline(graph, machine, "pipeline:pp=2,tp=4,micro=4"), machine


def test_passes_of_a_stage_add_up_to_the_step_of_a_plan_in_as_many_micro_batches() -> None:
    pipeline, machine = _stages_of_gpt()
    told = predict_pipeline(pipeline, machine, CostModel())
    for stage, mine in zip(pipeline.stages, told.stages, strict=True):
        part = devices_of(machine, stage.ranks)
        three, four = (
            predict(replace(stage.plan, accumulation=Accumulation(count, (), ())), part, CostModel()).seconds
            for count in (3, 4)
        )
        passes = mine.forward + mine.backward - 4 * CostModel().launch(part.device_type(0))  # what comes and goes
        assert passes == pytest.approx(four - three, rel=1e-6)
        assert mine.start + 3 * passes + mine.finish == pytest.approx(three, rel=0.01)


def test_gradients_of_layers_are_summed_over_nodes_once_in_a_step() -> None:
    pipeline, machine = _stages_of_gpt()
    stage = pipeline.stages[0]
    part = devices_of(machine, stage.ranks)
    sent = []
    for count in (3, 4):
        told = predict(replace(stage.plan, accumulation=Accumulation(count, (), ())), part, CostModel())
        between = [c for c in told.breakdown.collectives if {axis[0] for axis in c[1]} == {"n"}]
        sent.append(sum(num_bytes for *_, num_bytes in between))
    assert sent[1] - sent[0] < 0.01 * sent[0], "what one more micro-batch sends are gradients of biases at most"


def test_pieces_of_a_projection_by_head_are_heads() -> None:
    pipeline, _ = _stages_of_gpt()
    layouts = {leaf.name: leaf.type.layout for leaf in pipeline.stages[0].plan.graph.leaves}
    assert dict(layouts["blocks.0.attention.qkv.weight"]) == {"d0": Split(0), "d1": Split(0)}
    assert not pipeline.stages[0].plan.substitutions


def test_what_is_sent_does_not_unbalance_stages_of_many_devices() -> None:
    config = GptConfig(8, 256, 8, length=32, vocabulary=64)
    with torch.device("meta"):
        graph = capture(Gpt(config).train(), gpt_batch(64, config), next_token_loss)
    pipeline = make_pipeline(graph, parse_machine("dgx-h100:8"), "pipeline:pp=2,micro=2")
    counts = [sum(node.op == "scaled_dot_product_attention" for node in s.plan.graph.nodes) for s in pipeline.stages]
    assert counts == [4, 4]
