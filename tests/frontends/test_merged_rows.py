"""Rows and heads that torch's own attention puts into one dim for a while do not stand in the way of any split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conjoin
from conjoin.api import make_named
from conjoin.frontends import run_plainly
from conjoin.ir import Graph
from conjoin.machine import parse_machine
from conjoin.runtime import Case, PlainModel, verify_in_process


class Translator(nn.Module):
    """An encoder and a decoder of torch's own layers, with padding and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.layers = nn.Transformer(16, 2, 1, 1, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 20)
        self.double()

    def forward(self, source: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
        mask, padding = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64), source == 0
        h = self.layers(
            self.words(source), self.words(target), tgt_mask=mask, tgt_is_causal=True, src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )  # fmt: skip
        return F.cross_entropy(self.head(h).flatten(0, 1), wanted.flatten())


class Queries(nn.Module):
    """Learned queries that read a set, as detectors and resamplers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(48, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        read, weights = self.attention(self.queries.expand(x.shape[0], -1, -1), x, x)
        return self.head(read.flatten(1)).square().mean() + weights.square().sum()


def _words(*shape: int) -> Tensor:
    return torch.randint(0, 20, shape)


CASES: dict[str, tuple[type[nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "translator": (Translator, lambda: (_words(8, 7).index_fill(1, torch.tensor([0]), 3), _words(8, 5), _words(8, 5))),
    "queries": (Queries, lambda: (torch.randn(8, 6, 16, dtype=torch.float64),)),
}


STRATEGIES = ("data-parallel+micro=2", "fsdp+micro=2", "pipeline:pp=2,micro=2", "megatron")


@cache
def captured(case: str) -> tuple[nn.Module, tuple[Tensor, ...], Graph]:
    torch.manual_seed(0)
    make, batch = CASES[case]
    model, given = make(), batch()
    return model, given, conjoin.capture(model, given)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_torchs_attention_trains_exactly_in_micro_batches_stages_and_by_heads(case: str, strategy: str) -> None:
    """One of the plans with the model itself beside the graph."""
    model, given, graph = captured(case)
    plain = PlainModel(model, None, run_plainly) if strategy == STRATEGIES[0] else None
    plan = make_named(graph, parse_machine("local:2"), strategy)
    assert verify_in_process(Case(plan, graph, model, given, plain), 2).passed


def _moved(graph: Graph) -> Counter[str]:
    return Counter(node.op.removeprefix("conjoin::") for node in graph.nodes if node.op.startswith("conjoin::"))


def test_data_parallelism_moves_no_activations_of_torchs_layers() -> None:
    torch.manual_seed(0)
    plan = conjoin.plan(Translator(), CASES["translator"][1](), "local:2", strategy="data-parallel")
    assert set(_moved(plan.graph)) == {"replicate", "reduce"}  # copies of weights, and the loss


def test_heads_of_torchs_layers_are_split_as_in_megatron() -> None:
    """Each block, of attention or of two products, is summed up once; no tensor is gathered."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    x = torch.randn(4, 6, 16)
    plan = conjoin.plan(model, x, "local:2", strategy="megatron", loss=lambda out: out.square().mean())
    moved = _moved(plan.graph)
    assert (moved["reduce"], moved["combine"]) == (4, 0)
    attention = [node for node in plan.graph.nodes if node.op == "scaled_dot_product_attention"]
    assert [str(node.types[0]) for node in attention] == ["f32[4,2,6,8]{d0:S(1)}"] * 2


class OneNumber(nn.Module):
    """A number that is brought into dims of one, as people do with losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x).square().sum()).reshape(1, 1, 1).squeeze() + self.layer(x).mean().view(1)[0]


def test_a_number_has_no_rows() -> None:
    torch.manual_seed(0)
    model, x = OneNumber(), torch.randn(8, 4, dtype=torch.float64)
    plan = conjoin.plan(model, x, "local:2", strategy="data-parallel")
    assert conjoin.verify_plan(plan, model, x, num_steps=2).passed
