"""Models that sort rows by expert, written by others: captured in the rows' own order, they train as they do."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.ops import EXPERT_LINEAR, EXPERT_NETWORK, bind_args, execute
from conjoin.runtime import to_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # raised while transformers and what it imports are loaded
    import transformers as hf

pytestmark = pytest.mark.filterwarnings("ignore:::transformers")

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "n_shared_experts": 1, "topk_group": 1,
}  # fmt: skip
SHARED = {"num_experts": 4, "moe_intermediate_size": 32}
OPEN = {"num_local_experts": 4, "head_dim": 4, "layer_types": ["full_attention"], "rope_parameters": None}
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "Mixtral": ({"num_local_experts": 4, "num_hidden_layers": 2}, {EXPERT_NETWORK: 2}),
    "Qwen2Moe": ({**SHARED, "shared_expert_intermediate_size": 32}, {EXPERT_NETWORK: 1}),
    "Qwen3Moe": ({**SHARED, "head_dim": 4}, {EXPERT_NETWORK: 1}),
    "Olmoe": ({"num_experts": 4, "eos_token_id": 1}, {EXPERT_NETWORK: 1}),
    "DeepseekV2": ({**LATENT, "n_group": 1, "head_dim": 4, "num_hidden_layers": 2}, {EXPERT_NETWORK: 1}),
    "DeepseekV3": ({**LATENT, "n_group": 2, "first_k_dense_replace": 0}, {EXPERT_NETWORK: 1}),
    "GptOss": (OPEN, {EXPERT_LINEAR: 2}),  # with biases, and a gate of its own
}


def build(name: str, how: str) -> nn.Module:
    cls = getattr(hf, f"{name}ForCausalLM")
    torch.manual_seed(0)
    made: nn.Module = cls(cls.config_class(**{**SMALL, **MODELS[name][0], "experts_implementation": how}))
    return made.train().double()


def experts_of(graph: Graph) -> dict[str, int]:
    return dict(Counter(node.op for node in graph.nodes if node.op in (EXPERT_LINEAR, EXPERT_NETWORK)))


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_sorted_and_training_is_that_of_the_plain_model(name: str) -> None:
    """In double precision, which torch's product of groups does not take: the judge loops over the experts."""
    model, plain = build(name, "grouped_mm"), build(name, "eager")
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    graph = capture(model, batch)
    assert [node.op for node in graph.nodes if node.spec is None or node.op in ("sort", "empty_like")] == []
    assert experts_of(graph) == MODELS[name][1]
    module = to_module(graph, model)
    sums = [torch.optim.SGD(each.parameters(), 0.1) for each in (module, plain)]
    for _ in range(2):
        losses = [each(**batch).loss for each in (module, plain)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0.0)
        for loss, optimizer in zip(losses, sums, strict=True):
            optimizer.zero_grad()
            loss.backward()
        mine = dict(module.named_parameters())
        for key, parameter in plain.named_parameters():
            torch.testing.assert_close(mine[key].grad, parameter.grad, rtol=1e-8, atol=1e-10, msg=key)
        for optimizer in sums:
            optimizer.step()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value, rtol=1e-10, atol=1e-12, msg=key)


class Sorted(nn.Module):
    """A layer of experts as libraries write it, with what a test wants to be otherwise."""

    def __init__(self, each: int = 2, strange: str = "") -> None:
        super().__init__()
        self.each, self.strange = each, strange
        self.score = nn.Linear(8, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(4, 8, 8))
        self.bias = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        gate, ids = self.score(x).softmax(-1).topk(self.each)
        experts, order = torch.sort(ids.reshape(-1))
        ends = torch.cumsum(torch.histc(experts.float(), bins=4, min=0, max=3), 0, dtype=torch.int32)
        rows = x[order // self.each]
        if self.strange == "rows in order":
            rows = rows.cumsum(0)
        rows, weight = rows.bfloat16(), self.weight.bfloat16()
        y = torch.nn.functional.grouped_mm(rows, weight, offs=ends).float() + self.bias[experts]
        if self.strange == "read in order":
            y = y * torch.arange(len(y)).unsqueeze(1)
        y = y * gate.reshape(-1)[order].unsqueeze(1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        y = y[back].view(len(x), self.each, 8).sum(1)
        return y.square().mean()


@pytest.mark.parametrize("each", [1, 2])
def test_one_layer_with_a_bias_and_torchs_own_product(each: int) -> None:
    torch.manual_seed(0)
    model, x = Sorted(each), torch.randn(10, 8)
    graph = capture(model, x)
    assert experts_of(graph) == {EXPERT_LINEAR: 1}
    assert not [node.op for node in graph.nodes if node.op in ("sort", "cumsum", "histc", "index_put", "_grouped_mm")]
    plain = copy.deepcopy(model)
    module = to_module(graph, model)
    module(x).backward()
    plain(x).backward()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("strange", ["rows in order", "read in order"])
def test_what_depends_on_the_order_is_left_as_it_is(strange: str) -> None:
    torch.manual_seed(0)
    graph = capture(Sorted(strange=strange), torch.randn(10, 8))
    ops = [node.op for node in graph.nodes]
    assert experts_of(graph) == {} and ops.count("_grouped_mm") == 1 and ops.count("sort") == 1


def test_an_unsorted_layer_is_a_loop_over_rows() -> None:
    """The judge of the judge: what the rewritten layer is taken for, worked out by hand."""
    torch.manual_seed(0)
    x, weight, ids = torch.randn(3, 2), torch.randn(2, 2, 5), torch.tensor([0, 1, 1, 0, 1, 1])
    made = execute(EXPERT_LINEAR, *bind_args(EXPERT_LINEAR, (x, weight, ids, 2), {}))
    by_hand = torch.stack([x[i // 2] @ weight[e] for i, e in enumerate(ids.tolist())])
    torch.testing.assert_close(made, by_hand)
