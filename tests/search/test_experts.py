"""Experts over devices: what is sent where the rows have slots and where none is dropped, and models by others."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, LeafKind, Plan
from conjoin.machine import Machine, parse_machine
from conjoin.ops import EXPERT_NETWORK, ROUTED_EXPERTS, Copies, Partial, Split
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.search import make_plan
from conjoin.search.baselines import baselines
from conjoin.sim import predict
from tests.ir.wording import assert_three_sentences
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample
from tests.search.models import captured, compared, reshards
from tests.zoo.graphs import shared

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # raised while transformers and what it imports are loaded
    import transformers as hf

pytestmark = pytest.mark.filterwarnings("ignore:::transformers")

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 16, "head_dim": 4},
    "Mixtral, one expert": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "Qwen2Moe, one expert": {
        "num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 1,
    },
}  # fmt: skip


@cache
def built(name: str) -> tuple[Graph, nn.Module, dict[str, Any]]:
    cls = getattr(hf, f"{name.partition(',')[0]}ForCausalLM")
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**SMALL, **MODELS[name]})).train()
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    return shared(f"experts of {name}", lambda: capture(model, batch)), model, batch


def plan_of(graph: Graph, num_devices: int, strategy: str) -> Plan:
    return make_plan(graph, Machine("local", 1, num_devices, "cpu"), strategy)


@pytest.mark.parametrize(
    ("name", "num_devices", "strategies"),
    [
        ("Mixtral", 4, ("megatron", "expert:ep=2", "fsdp+expert:ep=4")),
        ("Mixtral", 4, ("expert:ep=2+context:cp=2,ring",)),
        ("Mixtral", 8, ("fsdp+expert:ep=2+megatron:tp=2,sp",)),
        ("Qwen2Moe", 2, ("data-parallel", "expert")),
        ("Qwen3Moe", 4, ("zero1+expert:ep=4+recompute=none", "expert:ep=2+megatron:tp=2")),
    ],
)
def test_plans_train_like_one_device(name: str, num_devices: int, strategies: tuple[str, ...]) -> None:
    graph, model, batch = built(name)
    for strategy in strategies:
        plan = plan_of(graph, num_devices, strategy)
        assert compared(plan, graph, model, batch).passed, plan.strategy


@pytest.mark.parametrize(
    ("name", "num_devices", "strategies"),
    [
        ("Mixtral", 8, ("fsdp+expert:ep=4,dp=1+megatron:tp=2,sp",)),
        ("Mixtral, one expert", 4, ("zero1+expert:ep=2+megatron:tp=2,sp",)),
        ("Mixtral, one expert", 8, ("hsdp:shard=2,replicate=1+expert:ep=2+megatron:tp=2,sp",)),
        ("Qwen2Moe, one expert", 6, ("fsdp+expert:ep=2+megatron:tp=3",)),  # 16 features on three devices
    ],
)
def test_experts_split_inside_train_like_one_device(name: str, num_devices: int, strategies: tuple[str, ...]) -> None:
    graph, model, batch = built(name)
    for strategy in strategies:
        plan = plan_of(graph, num_devices, strategy)
        assert "route-conjoin::expert_network" in {substitution.name for substitution in plan.substitutions}
        (node,) = (node for node in plan.graph.nodes if node.op == ROUTED_EXPERTS)
        innermost = plan.mesh.names[-1]
        inside = [dict(value.type.layout)[innermost] for value in node.inputs]
        assert inside == [Copies(), Split(2), Split(1), Copies(), Split(2)], "features, of what gates them too"
        assert compared(plan, graph, model, batch).passed, plan.strategy


def test_on_processes_experts_split_inside_train_like_the_library(tmp_path: Path) -> None:
    graph, model, batch = built("Mixtral, one expert")
    plan = plan_of(graph, 4, "fsdp+expert:ep=2+megatron:tp=2,sp")
    want = copy.deepcopy(model)
    loss = want(**batch).loss
    loss.backward()
    norms = {name: p.grad.norm().item() for name, p in want.named_parameters()}
    sample = Sample(plan.graph, model, ())

    def program(ranks: Communicator) -> tuple[float, dict[str, float]]:
        module = module_on(plan, sample, ranks)
        found = module(**batch).loss
        found.backward()
        return found.item(), {name: p.grad.norm().item() for name, p in module.named_parameters()}

    for found, gradients in run_processes(plan.mesh, program, tmp_path):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        assert gradients == pytest.approx(norms, rel=1e-4, abs=1e-8), "gradients know that they are pieces"


def test_matrices_of_experts_are_stored_in_pieces_on_all_devices() -> None:
    """What gates lies beside what is gated in one parameter: each is a section, split by itself, and none is moved."""
    graph = built("Mixtral")[0]
    plan = plan_of(graph, 8, "expert:ep=4,dp=1+megatron:tp=2")
    stored = {leaf.name: leaf.type for leaf in plan.graph.leaves_of(LeafKind.PARAMETER) if "experts" in leaf.name}
    assert [len(type.layout) for type in stored.values()] == [3, 3, 3]
    kinds = Counter((c.kind, c.direction) for c in explain(plan).collectives if c.axes == ("d2",))
    assert {kind for kind, _ in kinds} == {"all-reduce"}


def test_searches_begin_with_experts_beside_tensor_parallelism() -> None:
    machine = parse_machine("dgx-h100:1x8")
    found = dict(baselines(built("Mixtral")[0], machine, lambda name: "expert,fsdp" not in name))
    assert [name for name, entry in found.items() if entry is not None] == [
        "megatron:tp=2,sp,expert,fsdp", "megatron:tp=4,sp,expert,fsdp",
    ]  # fmt: skip
    plan = make_plan(built("Mixtral")[0], machine, "megatron:tp=2,sp,expert,fsdp")
    assert plan.strategy == "megatron:tp=2,ep=4,dp=1,fsdp,sp"
    told = predict(plan, machine, CostModel())
    assert 0 < told.seconds < 1 and told.memory.peak > 0
    assert not any(entry for _, entry in baselines(captured("mlp"), machine, lambda name: "expert" not in name))


def sent_forward(plan: Plan, model: nn.Module, batch: Mapping[str, Any]) -> list[int]:
    """The bytes that each rank sends in a forward pass."""
    sample = Sample(plan.graph, model, ())

    def program(ranks: Communicator) -> int:
        module = module_on(plan, sample, ranks)
        ranks.bytes_sent = 0
        with torch.no_grad():
            module(**batch)
        return ranks.bytes_sent

    return run_ranks(plan.mesh, program)


def test_experts_split_inside_send_what_is_told() -> None:
    """Rows and answers go between devices that have other experts; counted by the library's own router."""
    graph, model, batch = built("Mixtral, one expert")
    chosen = model(**batch, output_router_logits=True).router_logits[0].argmax(-1)
    plan = plan_of(graph, 4, "expert:ep=2,dp=1+megatron:tp=2")
    sent = sent_forward(plan, model, batch)
    way = "all-to-all", "forward", ("d0",)
    routed = [c for c in explain(plan).collectives if (c.kind, c.direction, c.axes) == way]
    for rank, mine in enumerate(chosen.view(2, -1).repeat_interleave(2, 0)):
        own = chosen // 2 == rank // 2
        leaving, arriving = int((mine // 2 != rank // 2).sum()), int(own.sum() - (mine // 2 == rank // 2).sum())
        others = sum(c.sent[rank] for c in explain(plan).collectives if c.direction == "forward" and c not in routed)
        assert sent[rank] == others + 8 * 2 + 4 * 16 * (leaving + arriving)


def test_data_parallel_gathers_no_rows() -> None:
    plan = plan_of(built("Mixtral")[0], 4, "data-parallel")
    assert set(reshards(plan)) == {"replicate", "reduce"}


def test_megatron_splits_experts_where_others_have_pairs_of_layers() -> None:
    plan = plan_of(built("Mixtral")[0], 2, "megatron")
    (node,) = (node for node in plan.graph.nodes if node.op == EXPERT_NETWORK)
    assert [dict(value.type.layout).get("d0") for value in node.inputs[1:3]] == [Split(0), Split(0)]
    assert "combine" not in reshards(plan), "nothing is gathered"


def test_what_beside_experts_uses_a_parameter_alike_shares_its_storage() -> None:
    """Matrices of experts lie where these are, and in pieces over the others; all else in pieces over all devices."""
    plan = plan_of(built("Mixtral")[0], 4, "fsdp+expert:ep=2")
    assert plan.strategy == "expert:ep=2,dp=2,fsdp"
    layouts = {leaf.name.rpartition("model.layers.0.")[2]: leaf.type.layout for leaf in plan.graph.leaves}
    assert layouts["mlp.experts.down_proj"] == (("d1", Split(0)), ("d0", Split(0)))
    assert layouts["self_attn.q_proj.weight"] == (("d0", Split(0)), ("d1", Split(0)))
    joined = plan_of(built("Mixtral")[0], 8, "hsdp:shard=2,replicate=1+expert:ep=2+megatron:tp=2")
    assert joined.strategy == "megatron:tp=2,ep=2,shard=2,replicate=1,hsdp"
    chosen = plan_of(built("Mixtral")[0], 8, "expert+megatron:tp=2,dp=1")
    assert chosen.strategy == "megatron:tp=2,ep=4,dp=1", "as many devices as there are experts"


def test_without_slots_rows_go_to_their_experts_and_back() -> None:
    """Each to two devices at most, not to all four: half of what is sent where they are gathered."""
    plan = plan_of(built("Mixtral")[0], 4, "expert:ep=4,dp=1")
    assert "route-conjoin::expert_network" in {substitution.name for substitution in plan.substitutions}
    kinds = Counter((collective.kind, collective.direction) for collective in explain(plan).collectives)
    assert kinds["all-to-all", "forward"] == 3 and kinds["all-to-all", "backward"] == 2
    assert not any(kind in ("all-gather", "reduce-scatter") for kind, _ in kinds)
    rows = 64 * 16 * 4 * 3 // 4  # of 64 rows three quarters have their expert elsewhere, if all are chosen alike
    told = [c.sent.total for c in explain(plan).collectives if (c.kind, c.direction) == ("all-to-all", "forward")]
    assert told == [8 * 3 * 4, rows, rows]


@pytest.mark.parametrize("skewed", [False, True])
def test_bytes_are_those_of_rows_whose_expert_is_elsewhere(skewed: bool) -> None:
    """As the library's own router says; also where all rows want the same experts, and some devices get none."""
    graph, model, batch = built("Mixtral")
    model = copy.deepcopy(model)
    if skewed:
        with torch.no_grad():
            model.get_submodule("model.layers.0.mlp.gate").weight.zero_()
    chosen = model(**batch, output_router_logits=True).router_logits[0].topk(2, -1).indices
    plan = plan_of(graph, 4, "expert:ep=4,dp=1")
    sent = sent_forward(plan, model, batch)
    counts = 8 * 3
    others = [explain_other(plan, rank) for rank in range(4)]
    for rank, mine in enumerate(chosen.view(4, -1)):
        leaving = int((mine != rank).sum())
        arriving = int((chosen == rank).sum() - (mine == rank).sum())
        assert sent[rank] == others[rank] + counts + 4 * 16 * (leaving + arriving)


def explain_other(plan: Plan, rank: int) -> int:
    """What a rank sends forward beside rows and answers."""
    found = (c for c in explain(plan).collectives if c.direction == "forward" and c.kind != "all-to-all")
    return sum(collective.sent[rank] for collective in found)


def test_where_rows_have_as_many_experts_as_there_are_devices_they_are_gathered_once_and_sums_scattered() -> None:
    plan = plan_of(built("Mixtral")[0], 2, "expert:ep=2,dp=1")
    split = {leaf.name for leaf in plan.graph.leaves_of(LeafKind.PARAMETER) if leaf.type.layout}
    assert {name.rpartition(".")[2] for name in split} == {"gate_up_proj", "down_proj"}
    (node,) = (node for node in plan.graph.nodes if node.op == EXPERT_NETWORK)
    assert [dict(value.type.layout)["d0"] for value in node.inputs] == [Copies(), Split(0), Split(0), Copies()]
    assert dict(node.types[0].layout)["d0"] == Partial()
    sent = [collective for collective in explain(plan).collectives if not collective.of_gradient]
    kinds = Counter(collective.kind for collective in sent)
    assert kinds["reduce-scatter"] == 1, "of tokens, after the answers of a token's experts are added up"
    assert kinds["all-gather"] == 3, "tokens, their experts, and what these count"
    scattered = next(collective for collective in sent if collective.kind == "reduce-scatter")
    assert max(scattered.sent.values) == 32 * 16 * 4 // 2, "one row for each token, not for each of its experts"


@pytest.mark.parametrize(("name", "num_layers"), [("moe-8x7b", 2), ("moe-gpt-1.3b-8e", 2)])
def test_with_slots_rows_go_to_their_experts_and_back_by_all_to_all(name: str, num_layers: int) -> None:
    plan = plan_of(captured(name), 4, "expert")
    assert plan.strategy == "expert:ep=4,dp=1"
    kinds = Counter((collective.kind, collective.direction) for collective in explain(plan).collectives)
    assert kinds["all-to-all", "forward"] == kinds["all-to-all", "backward"] == 2 * num_layers
    assert not any(kind in ("all-gather", "reduce-scatter") for kind, _ in kinds)


def test_experts_over_some_axes_and_the_batch_over_all() -> None:
    plan = plan_of(captured("moe-8x7b"), 4, "expert:ep=2")
    assert plan.strategy == "expert:ep=2,dp=2"
    layouts = {leaf.name: leaf.type.layout for leaf in plan.graph.leaves}
    assert layouts["blocks.0.moe.experts.up_EDF"] == (("d1", Split(0)),)
    over_all = (("d0", Split(0)), ("d1", Split(0)))
    assert all(layouts[leaf.name] == over_all for leaf in plan.graph.leaves_of(LeafKind.INPUT))


def test_more_devices_than_experts() -> None:
    with pytest.raises(StrategyError, match=r"layers of experts has 4 of them.* Ask for ep=4 or less") as error:
        plan_of(captured("moe-8x7b"), 8, "expert:ep=8")
    assert_three_sentences(error.value)


def test_without_slots_no_device_is_left_without_an_expert_either() -> None:
    graph = built("Qwen2Moe, one expert")[0]
    assert str(plan_of(graph, 4, "expert").strategy) == "expert:ep=2,dp=2"
    with pytest.raises(StrategyError, match=r"layers of experts has 2 of them.* Ask for ep=2 or less"):
        plan_of(graph, 4, "expert:ep=4")
