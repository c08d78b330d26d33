"""What is found on few of many equal blocks is what is found on all of them: drafts, least sums and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from random import Random

import pytest
import torch

from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, Value, cut_in_stages, graph_form, parse_graph
from conjoin.machine import parse_machine
from conjoin.search import Wish
from conjoin.search.baselines import baseline_names
from conjoin.search.drafts import Draft, Settled, draft_in_full, lay_out, settle_draft
from conjoin.search.entries import Entry, make_variant
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.space import Objective
from conjoin.search.exact.stack import StackProblem, Uneven
from conjoin.search.exact.table_sum import sum_of
from conjoin.search.facts import Facts
from conjoin.search.fold import fold
from conjoin.search.folded_drafts import DraftsByForm, draft_folded
from conjoin.search.joint import JointSearch
from conjoin.search.named_plans import drafter
from conjoin.search.searches import open_contest
from conjoin.search.strategies import read_request
from conjoin.search.variants import variants_of
from conjoin.sim import take_graph_apart
from tests.search.exact.test_problem import space_of
from tests.search.models import captured
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.llama import Llama, LlamaConfig, llama_batch
from zoo.tokens import next_token_loss

MACHINE = parse_machine("dgx-h100:2x4")
LARGE = (14,)
"""Stacks whose tables are too large to be eliminated as they are."""
DO_NOT_REPEAT = ("inception-v3", "u-transformer", "moe-8x7b")


@cache
def gpt(layers: int) -> Graph:
    config = GptConfig(layers, 32, 4, length=16, vocabulary=64)
    with torch.device("meta"):
        return capture(Gpt(config).train(), gpt_batch(32, config), next_token_loss)


@cache
def llama(layers: int) -> Graph:
    config = LlamaConfig(layers, 32, 64, 4, 2, vocabulary=64, length=16)
    with torch.device("meta"):
        return capture(Llama(config).train(), llama_batch(32, config), next_token_loss)


def stack(rng: Random, count: int) -> Graph:
    """Blocks of a few random operators one after the other, each with weights of its own; some read a shared input."""
    recipe = [(rng.choice(("weights", "mm", "add", "relu", "t", "around")), rng.random()) for _ in range(4)]
    lines, current, weights = ["%0: f32[8,8] = relu(input:y)"], "input:x", 0
    for _ in range(count):
        values = [current]
        for kind, where in recipe:
            one = values[int(where * len(values))]
            match kind:
                case "weights":
                    call, weights = f"mm({one}, param:w{weights})", weights + 1
                case "mm":
                    call = f"mm({one}, {values[-1]})"
                case "add":
                    call = f"add.Tensor({one}, {values[-1]}, alpha=1)"
                case "around":
                    call = f"add.Tensor({values[-1]}, %0, alpha=1)"
                case function:
                    call = f"{function}({values[-1]})"
            values.append(f"%{len(lines)}")
            lines.append(f"%{len(lines)}: f32[8,8] = {call}")
        current = f"%{len(lines)}"
        lines.append(f"%{len(lines)}: f32[8,8] = add.Tensor({values[0]}, {values[-1]}, alpha=1)")
    lines.append(f"%{len(lines)}: f32[] = sum({current})")
    parameters = [f"param:w{i} f32[8,8] trainable" for i in range(weights)]
    inputs = ["input:x f32[8,8]", "input:y f32[8,8]", "takes [input:x, input:y] in null"]
    returns = f"returns [%{len(lines) - 1}] in null loss 0"
    return parse_graph("\n".join(['graph "stack" train', *parameters, *inputs, *lines, returns, ""]))


def settled(graph: Graph, name: str, *, folded: bool) -> Settled | None:
    strategy = drafter(MACHINE, read_request(name))
    try:
        return settle_draft(graph, strategy, draft_folded if folded else draft_in_full)
    except StrategyError:
        return None


def check_drafts(graph: Graph, names: Sequence[str]) -> None:
    """Strategies make the same of a graph, folded or not."""
    for name in names:
        short, full = (settled(graph, name, folded=folded) for folded in (True, False))
        assert (short is None) == (full is None), name
        if short is not None and full is not None:
            assert (short.graph, short.substitutions) == (full.graph, full.substitutions), name
            assert lay_out(short) == lay_out(full), name
            assert set(short.draft.memory) == set(full.draft.memory), name


@pytest.mark.parametrize(("model", "places"), [(gpt, (0, 2)), (llama, (1,))])
def test_strategies_decide_the_same_on_few_blocks(model: Callable[[int], Graph], places: tuple[int, ...]) -> None:
    """Each strategy on one of the models; by their places, each of which has some of all kinds."""
    graph = model(7)
    found = fold(graph)
    assert found is not None and found.stretch.count >= 6 and len(found.short.nodes) < 0.75 * len(graph.nodes)
    names = baseline_names(MACHINE.mesh)
    check_drafts(graph, [name for place, name in enumerate(names) if place % 3 in places])


@pytest.mark.parametrize("name", ["megatron:tp=2,dp=4,sp,fsdp", "fsdp", "data-parallel"])
def test_stages_that_are_alike_are_drafted_once_and_as_each_alone(name: str) -> None:
    graph = gpt(7)
    stages = [stage.graph for stage in cut_in_stages(graph, _stage_of_blocks(graph))]
    asked, drafts, strategy = list[Graph](), DraftsByForm(), drafter(MACHINE, read_request(name))

    def noted(facts: Facts) -> Draft:
        asked.append(facts.graph)
        return strategy(facts)

    for stage in stages:
        once, alone = settle_draft(stage, noted, drafts.draft), settle_draft(stage, strategy)
        assert (once.graph, once.substitutions) == (alone.graph, alone.substitutions)
        assert lay_out(once, is_stage=True) == lay_out(alone, is_stage=True)
        assert set(once.draft.memory) == set(alone.draft.memory)
    assert len(stages) == 7 and {one.name for one in asked} == {f"Gpt stage {number}" for number in (0, 1, 6)}


def _stage_of_blocks(graph: Graph) -> list[int]:
    """The block that each node stands in, or comes after, by the module it comes from."""
    found, current = [], 0
    for node in graph.nodes:
        source = graph.source_of(node)
        number = next((part for part in (source.module if source else "").split(".") if part.isdigit()), None)
        current = current if number is None else max(current, int(number))
        found.append(current)
    return found


def test_forms_tell_graphs_apart_by_all_but_names() -> None:
    def form(call: str, name: str = "x") -> object:
        head = [f"input:{name} f32[8]", "input:y f32[8]", f"takes [input:{name}, input:y] in null"]
        lines = [f"%0: f32[8] = {call}", "returns [%0] in null", ""]
        return graph_form(parse_graph("\n".join(['graph "g" train', *head, *lines])))

    assert form("mul.Tensor(input:x, input:y)") == form("mul.Tensor(input:z, input:y)", "z")
    others = ["mul.Tensor(input:x, 1)", "mul.Tensor(input:y, input:x)", "mul.Tensor(input:x, 1.0)", "relu(input:x)"]
    assert len({form("mul.Tensor(input:x, input:y)"), *map(form, others)}) == 5


def test_models_that_do_not_repeat_are_drafted_as_ever() -> None:
    """None of them is folded; one is drafted."""
    assert [name for name in DO_NOT_REPEAT if fold(captured(name)) is not None] == []
    graph = captured(DO_NOT_REPEAT[-1])
    short, full = (settled(graph, "megatron:tp=2", folded=folded) for folded in (True, False))
    assert short is not None and full is not None and lay_out(short) == lay_out(full)


def test_the_short_graph_of_a_deeper_model_is_the_same_size() -> None:
    found = [fold(stack(Random(0), count)) for count in (6, 9, 30)]
    assert len({len(one.short.nodes) for one in found if one is not None}) == 1 and None not in found


def test_what_others_read_inside_of_blocks_is_not_folded() -> None:
    lines = ["%0: f32[8,8] = relu(input:x)", *(f"%{i}: f32[8,8] = relu(%{i - 1})" for i in range(1, 9))]
    head = ['graph "tapped" train', "input:x f32[8,8]", "takes [input:x] in null"]
    plain = parse_graph("\n".join([*head, *lines, "returns [%8] in null", ""]))
    tapped = replace(plain, outputs=(Value(plain.nodes[3]), *plain.outputs))
    assert fold(plain) is not None and fold(tapped) is None


@pytest.mark.parametrize("seed", range(40))
def test_the_power_of_a_block_has_the_least_sum_of_all_blocks(seed: int) -> None:
    rng = Random(seed)
    graph, space = stack(rng, rng.choice((6, 7, 9))), space_of("local:4", link=10 ** rng.uniform(5, 8))
    objective = Objective(rng.choice((0.0, 0.6)), rng.choice((0.0, 1e-9)))
    skeleton, found = take_graph_apart(graph)[0], fold(graph)
    whole = Problem(skeleton, space, objective).solve()
    assert found is not None
    try:
        power = StackProblem(skeleton, found, space, objective)
    except Uneven:  # tables would be large, and are made smaller first
        assert seed in LARGE
        return
    solution = power.solve()
    assert solution.is_exact and solution.total == pytest.approx(whole.total, rel=1e-9)
    assert sum_of(skeleton, space, objective, *power.layouts(solution)) == pytest.approx(whole.total, rel=1e-9)


@pytest.mark.parametrize("model", [gpt, llama])
def test_layouts_of_a_model_are_those_of_all_its_blocks(model: Callable[[int], Graph]) -> None:
    graph = model(7)
    contest = open_contest(graph, MACHINE, CostModel(), Wish(budget=inf))
    search = JointSearch(contest, variants_of(graph, ()))
    units, objective = search.cuts()[1], search.objective(0.6)
    for variant in search.variants:
        stacked, whole = search.stacked(variant, units, objective), search.problem(variant, units, objective)
        assert isinstance(stacked, StackProblem) and whole is not None
        one, other = stacked.solve(), whole.solve()
        assert one.total == pytest.approx(other.total, rel=1e-9)
        entries = [Entry("found", variant, *p.layouts(s)) for p, s in ((stacked, one), (whole, other))]
        first, second = (contest.simulate(entry).seconds for entry in entries)
        assert first == pytest.approx(second, rel=1e-3)


def test_a_parameter_that_all_blocks_share_is_not_folded_away() -> None:
    lines = [f"%{i}: f32[8,8] = mm({f'%{i - 1}' if i else 'input:x'}, param:w)" for i in range(8)]
    head = ['graph "tied" train', "param:w f32[8,8] trainable", "input:x f32[8,8]", "takes [input:x] in null"]
    graph = parse_graph("\n".join([*head, *lines, "%8: f32[] = sum(%7)", "returns [%8] in null loss 0", ""]))
    found = fold(graph)
    assert found is not None
    with pytest.raises(Uneven):
        StackProblem(make_variant(graph).skeleton, found, space_of("local:4"), Objective())
