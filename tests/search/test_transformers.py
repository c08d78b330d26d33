"""Models written by others: Hugging Face's transformers, whose layers are found by flow and not by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from conjoin.frontends import capture
from conjoin.machine import Machine
from conjoin.search import make_plan
from tests.search.models import reshards

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # raised while transformers and what it imports are loaded
    import transformers as hf

pytestmark = pytest.mark.filterwarnings("ignore:::transformers")

SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2() -> nn.Module:
    """Query, key and value are one product on flattened tokens, with weights the other way round."""
    config = hf.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Two heads share each key-value head."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=2))


@pytest.mark.parametrize("model", [gpt2, llama], ids=["gpt2", "llama"])
def test_megatron_reduces_twice_a_block(model: Callable[[], nn.Module]) -> None:
    ids = torch.randint(3, 100, (4, 8))
    graph = capture(model().train(), {"input_ids": ids, "labels": ids})
    plan = make_plan(graph, Machine("local", 1, 2, "cpu"), "megatron")
    assert plan.strategy == "megatron:tp=2,dp=1"
    assert reshards(plan)["reduce"] == 4 + 3, "two a block; words are looked up, and their scores added up, in pieces"
    assert "combine" not in reshards(plan)
