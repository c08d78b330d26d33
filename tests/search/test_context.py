"""Sequences that are split from the words to the loss, judged by a plain model from a library and by counting bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import Machine, parse_machine
from conjoin.report import explain
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.search.models import captured, compared
from tests.zoo.graphs import shared

BATCH, LENGTH, WIDTH, HEADS, LAYERS = 4, 8, 16, 4, 2


def llama(**options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    config = LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=2, use_cache=False, **options)
    words = torch.randint(0, 64, (BATCH, LENGTH))
    return LlamaForCausalLM(config), {"input_ids": words, "labels": words}


@cache
def captured_llama() -> tuple[Graph, nn.Module, dict[str, Tensor]]:
    model, batch = llama()
    return shared("llama of a library", lambda: capture(model, batch)), model, batch


STRATEGIES = (
    "context:cp=4",
    "context:cp=2,dp=2",
    "context:cp=2,dp=2,heads",
    "context:cp=4,ring",
    "zero1+context:cp=2,ring+megatron:tp=2,sp+recompute=full",
    "fsdp+context:cp=2",
    "hsdp:shard=2+context:cp=2+recompute=full",
    "zero1+context:cp=2+megatron:tp=2,sp",
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_llama_of_a_library_trains_as_on_one_device(strategy: str) -> None:
    graph, model, batch = captured_llama()
    plan = make_plan(graph, parse_machine("local:4"), strategy)
    assert compared(plan, graph, model, batch).passed


class FeaturesFirst(nn.Module):
    """Attention whose heads are the fastest dim of a layer: the features of one lie apart in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.end = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x_BLD: Tensor) -> Tensor:
        made = self.make(x_BLD).view(*x_BLD.shape[:2], 3, WIDTH // HEADS, HEADS).permute(2, 0, 4, 1, 3)
        seen = functional.scaled_dot_product_attention(*made.unbind(), is_causal=True)
        y: Tensor = self.end(seen.transpose(1, 2).flatten(2))
        return y


@pytest.mark.parametrize("flag", ["", ",ring", ",heads"])
def test_features_of_a_head_may_lie_apart(flag: str) -> None:
    torch.manual_seed(0)
    model, batch = FeaturesFirst(), (torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, 4))
    plan = conjoin.plan(model, batch, "local:2", loss=functional.mse_loss, strategy=f"context:cp=2{flag}")
    assert conjoin.verify_plan(plan, model, batch, loss=functional.mse_loss, num_steps=1).passed


def forward_bytes(plan: Plan) -> dict[str, int]:
    return {total.kind: total.forward.total for total in explain(plan).totals if total.forward.total}


@pytest.mark.parametrize(("flags", "kind"), [("", "all-gather"), (",heads", "all-to-all")])
def test_only_what_attention_needs_is_sent(flags: str, kind: str) -> None:
    """Keys and values go to one other device; of queries, keys, values and results each device keeps half."""
    plan = make_plan(captured("llama-7b", BATCH), parse_machine("local:4"), f"context:cp=2,dp=2{flags}")
    tensor = 4 * BATCH * LENGTH * WIDTH
    scalars = forward_bytes(plan).pop("all-reduce")
    assert forward_bytes(plan)[kind] == LAYERS * (2 * tensor if kind == "all-gather" else 4 * tensor // 2)
    assert set(forward_bytes(plan)) == {kind, "all-reduce"} and scalars < 100, "the loss and its count"


def test_the_loss_keeps_tokens_in_their_dims_and_its_value() -> None:
    """Also where scores are cast and made logarithms before the loss, and where targets never had two dims."""

    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.head(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def loss(scores: Tensor, wanted: Tensor) -> Tensor:
        chances = functional.log_softmax(scores.reshape(-1, 12).double(), dim=-1)
        each = functional.nll_loss(chances, wanted, reduction="none", ignore_index=3)
        return each.square().mean() + functional.nll_loss(chances, wanted)

    torch.manual_seed(1)
    model, batch = Scorer(), (torch.randn(2, 6, 8), torch.randint(12, (12,)))
    plan = conjoin.plan(model, batch, "local:3", loss=loss, strategy="context:cp=3")
    assert "unflatten-reshape" in {substitution.name for substitution in plan.substitutions}
    assert conjoin.verify_plan(plan, model, batch, loss=loss).passed


ERRORS = [
    ("mlp-autoddl", "context:cp=2", "The sequences of"),
    ("llama-7b", "context:cp=16", "They are 8 long, the second dim of"),
    ("alexnet", "context:cp=2", "None of its 0 calls of scaled_dot_product_attention can be"),
]


@pytest.mark.parametrize(("name", "strategy", "why"), ERRORS)
def test_what_cannot_be_split_says_why(name: str, strategy: str, why: str) -> None:
    with pytest.raises(StrategyError) as raised:
        make_plan(captured(name), Machine("many", 1, 16 if "16" in strategy else 2, "cpu"), strategy)
    assert why in str(raised.value)
    assert_three_sentences(str(raised.value))


def test_reshapes_that_others_read_stay() -> None:
    """What is flattened for more than a loss is not taken from it."""

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.head(functional.scaled_dot_product_attention(x, x, x)).reshape(-1, 4)
            return scores, scores.cumsum(0)

    batch = (torch.randn(2, 6, 4), torch.randint(4, (12,)))
    graph = capture(Read(), batch, lambda out, t: functional.cross_entropy(out[0], t) + out[1].mean())
    plan = make_plan(graph, parse_machine("local:2"), "context:cp=2")
    assert not [s for s in plan.substitutions if s.name.startswith("unflatten")]
