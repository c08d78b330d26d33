"""Variants by substitutions: applied everywhere, cheapest first, and computing what the model computes."""

from __future__ import annotations

import pytest
import torch

import zoo
from conjoin.frontends import capture
from conjoin.ir import Node
from conjoin.machine import Machine
from conjoin.ops import LINEAR_RELU
from conjoin.rules import Apply, Expr, Index, Library, inputs_of
from conjoin.runtime import Case, verify_in_process
from conjoin.search.contest import Contest
from conjoin.search.entries import Variant, make_variant, plan_of
from conjoin.search.exact.units import cuts
from conjoin.search.fold import fold
from conjoin.search.joint import JointSearch
from conjoin.search.rewrites import ALPHA, Backtracking, RuleWay, rewritten, rewritten_alike, ways_of
from tests.search.models import captured
from tests.search.prices import SlowDevices
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.tokens import next_token_loss

WAYS = ways_of(Library.shipped())


def count(variant: Variant, op: str) -> int:
    return sum(node.op == op for node in variant.graph.nodes)


def way(left: str, right: str) -> RuleWay:
    """The way from one operator to another, whatever the rule is called."""
    return next(w for w in WAYS if _last(w.rule.left) == left and _last(w.rule.right) == right)


def _last(side: tuple[Expr, ...]) -> str:
    return side[0].op if isinstance(side[0], Apply) else ""


def test_ways_go_both_ways_and_name_their_proof() -> None:
    ways = {w.rule.name: w.rule for w in WAYS}
    forth = {name: rule for name, rule in ways.items() if not name.endswith("-back")}
    one_way = {name for name, rule in forth.items() if {*inputs_of(*rule.left)} != {*inputs_of(*rule.right)}}
    assert {name for name in forth if f"{name}-back" not in ways} == one_way and len(one_way) < len(forth) // 10
    assert all({*inputs_of(*rule.right)} <= {*inputs_of(*rule.left)} for rule in ways.values())
    assert all(method and len(stamp) == 16 for method, _, stamp in (w.proof.partition(":") for w in WAYS))


def test_a_rule_is_applied_wherever_it_matches() -> None:
    variant = make_variant(captured("dlrm"))
    found = rewritten(variant, way("embedding_bag", "sum"), Index(variant.graph))
    assert found is not None and found.fault() == ""
    changed = found.variant
    assert count(variant, "conjoin::embedding_bag") > 1 and count(changed, "conjoin::embedding_bag") == 0
    assert changed.substitutions[-1].name == way("embedding_bag", "sum").rule.name


def test_a_rule_that_matches_nowhere_changes_nothing() -> None:
    variant = make_variant(captured("mlp"))
    assert rewritten(variant, way("embedding_bag", "sum"), Index(variant.graph)) is None


def test_where_blocks_repeat_all_rules_are_found_that_match_somewhere() -> None:
    """Though they are looked for among few of the blocks."""
    config = GptConfig(7, 32, 4, length=8, vocabulary=16)
    with torch.device("meta"):
        graph = capture(Gpt(config).train(), gpt_batch(2, config), next_token_loss)
    variant, index = make_variant(graph), Index(graph)
    folded = fold(graph)
    assert folded is not None and len(folded.short.nodes) < len(graph.nodes)
    found = Backtracking(lambda some: 1.0, WAYS)._everywhere(variant, index)
    assert [one.way for one in found] == [one for one in WAYS if rewritten(variant, one, index) is not None]


FUSED = way("relu", "bias")


def test_a_rule_may_be_applied_where_operators_are_laid_out_alike() -> None:
    variant = make_variant(captured("mlp"))
    layers = [node for node in variant.graph.nodes if node.op == "linear"]
    relus = count(variant, "relu")
    assert relus > 2
    laid_out = {layer: "columns" if i % 2 else "rows" for i, layer in enumerate(layers)}
    some = rewritten_alike(variant, FUSED, Index(variant.graph), laid_out)
    assert sorted(count(one.variant, LINEAR_RELU) for one in some) == [relus // 2, relus - relus // 2]
    assert rewritten_alike(variant, FUSED, Index(variant.graph), dict.fromkeys(layers, "rows")) == []


def test_layers_are_fused_only_where_that_pays() -> None:
    """Every second layer loses by it, as one does whose sums lie on several devices."""
    variant = make_variant(captured("mlp"))
    layers = [node for node in variant.graph.nodes if node.op == "linear"]
    loses = {layer.inputs[1] for layer in layers[::2]}

    def seconds(some: Variant) -> float:
        fused = [node.inputs[1] for node in some.graph.nodes if node.op == LINEAR_RELU]
        return 10.0 + sum(0.3 if weight in loses else -0.1 for weight in fused)

    def laid_out(some: Variant) -> dict[Node, bool]:
        return {node: node.inputs[1] in loses for node in some.graph.nodes if node.op == "linear"}

    work = Backtracking(seconds, (FUSED,), rank=seconds, laid_out=laid_out)
    work.start(variant)
    (best, total), *_ = sorted(work.run(), key=lambda pair: pair[1])
    assert total == work.best == pytest.approx(10.0 - 0.1 * count(best, LINEAR_RELU)) and count(best, LINEAR_RELU) > 0
    assert all(node.inputs[1] not in loses for node in best.graph.nodes if node.op == LINEAR_RELU)


def test_the_cheapest_variant_is_found_in_several_steps() -> None:
    variant = make_variant(captured("dlrm-cat"))

    def seconds(some: Variant) -> float:
        return 10.0 + count(some, "conjoin::embedding_bag") + count(some, "linear")

    work = Backtracking(seconds, WAYS)
    work.start(variant)
    found = list(work.run())
    assert max(total for _, total in found) <= ALPHA * seconds(variant)
    best = min(found, key=lambda pair: pair[1])[0]
    assert count(best, "conjoin::embedding_bag") == count(best, "linear") == 0
    assert len(best.substitutions) >= 2, "one rule after the other"


@pytest.mark.parametrize("name", ["dlrm-cat", "candle-uno", "bert-base"])
def test_plans_of_rewritten_variants_compute_what_the_model_computes(name: str) -> None:
    model, batch, _ = zoo.build(f"{name}:tiny", batch_size=4)
    graph, machine = captured(name), Machine("four", 2, 2, "cpu")
    variant, num_ways = make_variant(graph), 0
    for one in WAYS:
        changed = rewritten(variant, one, Index(variant.graph)) if num_ways < 3 else None
        if changed is not None:
            variant, num_ways = changed.variant, num_ways + 1
    assert num_ways == 3
    contest = Contest(graph, machine, SlowDevices(), "adam", 1 << 40, 60.0)
    joint = JointSearch(contest, [variant])
    outcome = joint.try_out(variant, next(cuts(machine.mesh, 2)), joint.objective(0.5))
    assert outcome is not None
    plan = plan_of(outcome, graph, machine)
    assert [s.name for s in plan.substitutions] and verify_in_process(Case(plan, graph, model, batch), 2).passed
