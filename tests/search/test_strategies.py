"""The decisive facts of each strategy, read off its plans."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

from conjoin.errors import UsageError
from conjoin.frontends import capture
from conjoin.ir import REGATHER, Graph, LeafKind, MemoryAction, Plan, model_mark, parse_graph, sequential
from conjoin.machine import Machine
from conjoin.ops import Split
from conjoin.report import explain
from conjoin.search import make_plan
from tests.search.models import captured, lines_with, reshards


def plan_of(name: str, num_devices: int, strategy: str, batch_size: int = 4) -> Plan:
    return make_plan(captured(name, batch_size), Machine("local", 1, num_devices, "cpu"), strategy)


def test_a_plan_says_what_it_was_made_from_and_for() -> None:
    machine = Machine("local", 1, 2, "cpu")
    plan = make_plan(captured("lenet"), machine, "data-parallel")
    assert plan.model == model_mark(captured("lenet"))
    assert (plan.machine.name, plan.machine.fingerprint) == ("local", machine.fingerprint())
    assert plan.strategy == "data-parallel:dp=2"
    assert [s.name for s in plan.substitutions] == ["expand-cross_entropy_loss"]
    assert "expansion checked against the operator" in plan.substitutions[0].proof


@pytest.mark.parametrize("strategy", ["megatron:sp", "fsdp", "spatial", "sbp3d", "megatron:dp=2"])
def test_the_strategy_of_a_plan_makes_the_same_plan_again(strategy: str) -> None:
    first = plan_of("alexnet", 4, strategy)
    second = plan_of("alexnet", 4, first.strategy)
    assert (second.strategy, second.graph) == (first.strategy, first.graph)


def test_degrees_are_dealt_to_axes_in_the_order_asked_for() -> None:
    machine = Machine("two nodes", 2, 2, "cpu")
    inside, across = (make_plan(captured("mlp"), machine, f"megatron:tp=2{order}") for order in ("", "@d0,n0"))
    assert (inside.strategy, across.strategy) == ("megatron:tp=2,dp=2", "megatron:tp=2,dp=2@d0,n0")
    assert inside.mesh == across.mesh == machine.mesh
    weights = [[leaf.type.layout for leaf in plan.graph.leaves_of(LeafKind.PARAMETER)] for plan in (inside, across)]
    axes = [{axis for layout in layouts for axis, _ in layout} for layouts in weights]
    assert axes == [{"d0"}, {"n0"}]


def test_data_parallel_replicates_each_parameter_once_and_reduces_the_loss() -> None:
    plan = plan_of("mlp", 4, "data-parallel")
    assert reshards(plan) == {"replicate": len(plan.graph.leaves_of(LeafKind.PARAMETER)), "reduce": 1}
    assert all(not leaf.type.layout for leaf in plan.graph.leaves_of(LeafKind.PARAMETER))


def test_batch_norm_and_mean_loss_are_expanded_so_that_nothing_is_gathered() -> None:
    plan = plan_of("resnet-50", 4, "data-parallel")
    names = [s.name for s in plan.substitutions]
    assert names == ["expand-_native_batch_norm_legit_functional"] * 23 + ["expand-cross_entropy_loss"]
    assert set(reshards(plan)) == {"replicate", "reduce"}
    sums = Counter(collective.direction for collective in explain(plan).collectives)
    assert sums == {"forward": 23 + 2, "backward": 23 + 1}, "moments, loss, its count; moments', all weights"


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_parameters_are_stored_split_and_gathered_for_use(strategy: str) -> None:
    plan = plan_of("mlp-autoddl", 4, strategy)
    assert reshards(plan) == {"combine": 8, "replicate": 8, "reduce": 1}
    parameters = plan.graph.leaves_of(LeafKind.PARAMETER)
    assert all(leaf.type.layout == (("d0", Split(0)), ("d1", Split(0))) for leaf in parameters)
    regathered = tuple(MemoryAction(REGATHER, leaf.name) for leaf in parameters)
    assert plan.memory == (regathered if strategy == "fsdp" else ())


TRANSFORMERS = pytest.mark.parametrize(("name", "num_reduced"), [("bert-base", 8), ("gpt-125m", 7), ("llama-7b", 7)])
"""Words are looked up in pieces; two a block, of which there are two; exponentials and scores of targets in the loss.
BERT's pooler and next-sentence layer are one more pair."""


@TRANSFORMERS
def test_megatron_reduces_twice_a_block(name: str, num_reduced: int) -> None:
    plan = plan_of(name, 4, "megatron:tp=4")
    assert reshards(plan)["reduce"] == num_reduced
    assert "combine" not in reshards(plan)
    assert reshards(plan)["greatest"] == 1, "what is taken off before exponentials"


@TRANSFORMERS
def test_sequence_parallel_scatters_and_gathers_instead(name: str, num_reduced: int) -> None:
    plan = plan_of(name, 4, "megatron:tp=4,sp")
    scattered = [
        line for line in lines_with(plan, "conjoin::partition", "dim=1") if "[4,8,16]{d0:S(1),d1:S(1)}" in line
    ]
    assert reshards(plan)["reduce"] == num_reduced + 1, "the loss of all the samples"
    assert len(scattered) in (5, 6), "the words, the four sums, and BERT's words are added to those of sentences"
    assert len(lines_with(plan, "f32[4,8,16] = conjoin::combine", "dim=1")) == 5, "before each pair and the scores"


def test_one_block_of_megatron_is_columns_then_rows() -> None:
    plan = plan_of("mlp-autoddl", 2, "megatron")
    assert [
        line.replace('"', "'") for line in lines_with(plan, "param:layers.0") + lines_with(plan, "param:layers.1")
    ] == [
        "param:layers.0.weight f32[32,64]{d0:S(0)} trainable",
        "param:layers.0.bias f32[32]{d0:S(0)} trainable",
        "%1: f32[4,32]{d0:S(1)} = linear(%0, param:layers.0.weight, param:layers.0.bias)",
        "param:layers.1.weight f32[16,32]{d0:S(1)} trainable",
        "param:layers.1.bias f32[16] trainable",
        "%3: f32[16]{d0:P} = conjoin::assign(param:layers.1.bias, axes=['d0'])",
        "%4: f32[4,16]{d0:P} = linear(%2, param:layers.1.weight, %3)",
    ]


def test_the_default_degree_is_the_largest_that_splits_every_pair() -> None:
    assert plan_of("llama-70b", 8, "megatron").strategy == "megatron:tp=2,dp=4"  # two key-value heads
    two_nodes = make_plan(captured("mlp-autoddl"), Machine("office", 2, 2, "cpu"), "megatron")
    assert two_nodes.strategy == "megatron:tp=2,dp=2"
    assert {axis for leaf in two_nodes.graph.leaves_of(LeafKind.PARAMETER) for axis, _ in leaf.type.layout} == {"d0"}


@pytest.mark.parametrize(("flag", "gathered_again"), [("zero1", False), ("fsdp", True)])
def test_what_megatron_stores_is_split_over_the_data_parallel_devices_too(flag: str, gathered_again: bool) -> None:
    plan, plain = (plan_of("mlp-autoddl", 4, f"megatron:tp=2,dp=2{flags}") for flags in (f",{flag}", ""))
    assert plan.strategy == f"megatron:tp=2,dp=2,{flag}"
    stored, whole = (
        {leaf.name: leaf.type.layout for leaf in p.graph.leaves_of(LeafKind.PARAMETER)} for p in (plan, plain)
    )
    assert {axis for layout in whole.values() for axis, _ in layout} == {"d1"}
    for name, layout in stored.items():
        assert set(layout) - set(whole[name]) == {("d0", Split(0))}
    assert bool(plan.memory) == gathered_again


def test_no_piece_of_a_piece_is_empty() -> None:
    """Three rows on two devices are two and one: the one cannot be split again."""
    model = nn.Sequential(nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 5))
    graph = capture(model, (torch.randn(8, 16), torch.randn(8, 5)), functional.mse_loss)
    plan = make_plan(graph, Machine("office", 1, 4, "cpu"), "megatron:tp=2,dp=2,zero1")
    layouts = {leaf.name: leaf.type.layout for leaf in plan.graph.leaves_of(LeafKind.PARAMETER)}
    assert layouts["0.weight"] == (("d1", Split(0)), ("d0", Split(1)))


def test_parameters_are_gathered_once_or_again_but_not_both() -> None:
    with pytest.raises(UsageError, match="both zero1 and fsdp"):
        plan_of("mlp-autoddl", 4, "megatron:tp=2,zero1,fsdp")


@pytest.mark.parametrize("flags", ["", ",vocab"])
def test_the_vocabulary_is_split_from_the_words_to_the_loss(flags: str) -> None:
    plan = plan_of("llama-7b", 2, f"megatron:tp=2{flags}")
    assert "f32[4,8,16]{d0:P} = embedding(param:words.weight" in lines_with(plan, "= embedding(")[0]
    assert "{d0:P(max)} = conjoin::peak(" in lines_with(plan, "conjoin::peak(")[0]
    assert not lines_with(plan, "= cross_entropy_loss(")


class Scorer(nn.Module):
    """Words in, scores of words out, by one table; what is behind the scores may need all of them at once."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(32, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.whole = whole

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.words(words)
        h = h + self.down(self.up(h).relu())
        scores = functional.linear(h, self.words.weight)
        return scores.cumsum(-1) if self.whole else scores


@pytest.mark.parametrize("whole", [False, True])
def test_a_table_that_scores_too_is_split_where_the_scores_may_be(whole: bool) -> None:
    batch = torch.randint(0, 32, (4,)), torch.randint(0, 32, (4,))
    plan = make_plan(capture(Scorer(whole), batch, functional.cross_entropy), Machine("two", 1, 2, "cpu"), "megatron")
    (table,) = (leaf for leaf in plan.graph.leaves_of(LeafKind.PARAMETER) if leaf.name == "words.weight")
    assert table.type.layout == (() if whole else (("d0", Split(0)),))
    assert "combine" not in reshards(plan)


def test_one_weird_trick_gathers_once_before_the_fully_connected_layers() -> None:
    plan = plan_of("alexnet", 4, "one-weird-trick")
    assert all("S(0)" in line for line in lines_with(plan, "= conv2d("))
    placements = [line.partition("{")[2].partition("}")[0] for line in lines_with(plan, "= linear(")]
    assert placements == ["d0:S(1),d1:S(1)", "d0:P,d1:P", "d0:P,d1:P"]
    assert len(lines_with(plan, "conjoin::combine")) == 1


def test_tables_are_split_by_columns_and_exchanged_for_the_batch() -> None:
    plan = plan_of("dlrm", 4, "table-parallel")
    bags = lines_with(plan, "= conjoin::embedding_bag(")
    assert len(bags) == 4 and all("{d0:S(1),d1:S(1)}" in line for line in bags)
    exchanged = lines_with(plan, "conjoin::partition", "dim=0")
    assert len(exchanged) == 4, "together with the combine before it, an all-to-all"
    assert all("{d0:S(0),d1:S(0)}" in line for line in lines_with(plan, "= linear("))


def test_tables_that_are_too_narrow_are_split_by_rows() -> None:
    graph = parse_graph(
        'graph "narrow" train\nparam:table f32[64,2] trainable\ninput:ids i64[8]\ntakes [input:ids] in null\n'
        "%0: f32[8,2] = embedding(param:table, input:ids)\n%1: f32[8,2] = relu(%0)\n%2: f32[] = sum(%1)\n"
        "returns [%2] in null loss 0\n"
    )
    plan = make_plan(graph, Machine("local", 1, 4, "cpu"), "table-parallel")
    assert [line.partition(" = ")[0] for line in lines_with(plan, " = ")] == [
        "%0: i64[8]", "%1: i64[8]{d0:B,d1:B}",
        "%2: f32[8,2]{d0:P,d1:P}",
        "%3: f32[8,2]", "%4: f32[8,2]{d0:S(0),d1:S(0)}",
        "%5: f32[8,2]{d0:S(0),d1:S(0)}", "%6: f32[]{d0:P,d1:P}", "%7: f32[]",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["vgg13", "resnet-50"])
def test_images_stay_split_along_space_until_it_ends(name: str) -> None:
    plan = plan_of(name, 4, "spatial:h=2,w=2")
    layouts = [line.partition("{")[2].partition("}")[0] for line in lines_with(plan, "= conv2d(")]
    assert layouts and set(layouts) == {"d0:S(2),d1:S(3)"}
    assert all("{" not in line for line in lines_with(plan, "= linear("))


def test_space_is_gathered_when_it_becomes_too_small() -> None:
    plan = plan_of("lenet", 8, "spatial:h=8")
    assert ["S(2)" in line for line in lines_with(plan, "= conv2d(")] == [True, False]


def test_reduction_splits_every_sum() -> None:
    plan = plan_of("mlp-autoddl", 4, "reduction")
    assert all("{d0:P,d1:P} = linear(" in line for line in lines_with(plan, "= linear("))
    assert reshards(plan)["reduce"] == 4


def test_n_and_k_change_roles_from_layer_to_layer() -> None:
    """The n-axis is d1, the k-axis d2: columns on one, rows on the other; the last layer has no row to lead to."""
    plan = plan_of("mlp-autoddl", 8, "sbp3d")
    outputs = [line.partition("{")[2].partition("}")[0] for line in lines_with(plan, "= linear(")]
    assert outputs == ["d0:S(0),d1:S(1),d2:P", "d0:S(0),d2:S(1),d1:P", "d0:S(0),d1:S(1),d2:P", "d0:S(0),d2:S(1),d1:P"]


def test_outputs_beside_the_loss_lie_as_they_are_made_and_are_whole_without_one() -> None:
    def graph(loss: str) -> Graph:
        return parse_graph(
            'graph "two" train\nparam:w f32[4] trainable\ninput:x f32[8,4]\ntakes [input:x] in null\n'
            "%0: f32[8,4] = mul.Tensor(input:x, param:w)\n%1: f32[] = sum(%0)\n"
            "%2: f32[4] = sum.dim_IntList(%0, dim=[0])\n"
            f'returns [%0, %1, %2] in {{"kind":"tuple","keys":[],"children":[null,null,null]}}{loss}\n'
        )

    machine = Machine("local", 1, 2, "cpu")
    with_loss = make_plan(graph(" loss 1"), machine, "data-parallel").graph
    without = make_plan(graph(""), machine, "data-parallel").graph
    assert [str(value.type) for value in with_loss.outputs] == ["f32[8,4]{d0:S(0)}", "f32[]", "f32[4]"]
    assert [str(value.type) for value in without.outputs] == ["f32[8,4]", "f32[]", "f32[4]"]
    assert sequential(without) == graph("")


def test_weights_that_are_turned_first_are_still_stored_split() -> None:
    graph = parse_graph(
        'graph "turned" train\nparam:a f32[4,8] trainable\nparam:b f32[8,4] trainable\ninput:x f32[2,4]\n'
        "takes [input:x] in null\n%0: f32[8,4] = transpose.int(param:a, dim0=0, dim1=1)\n"
        "%1: f32[2,8] = linear(input:x, %0)\n%2: f32[2,8] = relu(%1)\n%3: f32[2,4] = matmul(%2, param:b)\n"
        "%4: f32[] = sum(%3)\nreturns [%4] in null loss 0\n"
    )
    plan = make_plan(graph, Machine("local", 1, 2, "cpu"), "megatron")
    assert [str(leaf.type) for leaf in plan.graph.leaves] == ["f32[4,8]{d0:S(1)}", "f32[8,4]{d0:S(0)}", "f32[2,4]"]
