"""GPT language models from 125 million to 175 billion parameters, including the shapes AutoDDL and AlpaComm train.

Shapes: B samples, L positions, D model width, H heads, K width of a head, V words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.tokens import next_token_batch, next_token_loss
from zoo.workload import Entry


@dataclass(frozen=True, slots=True)
class GptConfig:
    """A pre-norm decoder whose feed-forward width is four times the model width."""

    layers: int
    width: int
    heads: int
    length: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.1
    by_head: bool = False
    """Whether query, key and value of a head stand side by side in their layer, as in Megatron-LM: pieces of the layer
    are then heads."""


class CausalAttention(nn.Module):
    """Multi-head attention of every position to those before it."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads, self.by_head = config.heads, config.by_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        parts = (self.heads, 3, -1) if self.by_head else (3, self.heads, -1)
        qkv = self.qkv(x_BLD).unflatten(2, parts).unbind(dim=3 if self.by_head else 2)
        q_BHLK, k_BHLK, v_BHLK = (part_BLHK.transpose(1, 2) for part_BLHK in qkv)
        mixed_BHLK = F.scaled_dot_product_attention(
            q_BHLK, k_BHLK, v_BHLK, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.output(mixed_BHLK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two dense layers with a GELU between them."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BLD), approximate="tanh"))


class Block(nn.Module):
    """A transformer layer that normalises before attention and before the feed-forward."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalAttention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.dropout(self.attention(self.attention_norm(x_BLD)))
        return x_BLD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BLD)))


class GptEmbeddings(nn.Module):
    """Sum of the word and the learned position embedding; `words` also serves as the output head."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        where_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        return self.dropout(self.words(tokens_BL) + self.positions(where_L))


class Gpt(nn.Module):
    """Embeddings, blocks, a last normalisation, and a head tied to the word embedding."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.embeddings = GptEmbeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        initialise(self, config.layers)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.embeddings(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return F.linear(self.norm(x_BLD), self.embeddings.words.weight)


def initialise(model: nn.Module, layers: int) -> None:
    """Draw matrices from a normal of deviation 0.02, smaller where they end a residual branch (GPT-2, section 2.3)."""
    residual_std = 0.02 / math.sqrt(2 * layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=residual_std if name.endswith((".output", ".down")) else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def gpt_batch(count: int, config: GptConfig) -> tuple[Tensor, Tensor]:
    """Return random sequences of the model's full length and the tokens that follow."""
    return next_token_batch(count, config.length, config.vocabulary)


_TINY = GptConfig(layers=2, width=16, heads=4, length=8, vocabulary=32)


def _entry(config: GptConfig, batch_size: int, source: str) -> Entry:
    return Entry(
        model=partial(Gpt, config),
        data=partial(gpt_batch, config=config),
        tiny_model=partial(Gpt, _TINY),
        tiny_data=partial(gpt_batch, config=_TINY),
        batch_size=batch_size,
        tiny_batch_size=4,
        loss=next_token_loss,
        source=source,
    )


# Batch sizes count the sequences of the global batch.  GPT-3 XL's printed 24 heads of 128 do not make its width of
# 2048; 16 heads of 128 do.  GPT-3 13B's printed width of 5140 is not 40 heads of 128; 5120 is.
_GPT3 = "GPT-3 (Brown et al. 2020), table 2.1"
_AUTODDL = "AutoDDL, section "

MODELS: dict[str, Entry] = {
    "gpt-125m": _entry(GptConfig(12, 768, 12), 512, f"{_GPT3}; length and vocabulary of GPT-2"),
    "gpt-350m": _entry(GptConfig(24, 1024, 16), 2048, f"{_GPT3}; {_AUTODDL}5.3.3, small: 2048 sequences of 1024"),
    "gpt-1.3b": _entry(GptConfig(24, 2048, 16, length=2048), 512, _GPT3),
    "gpt-2.6b": _entry(
        GptConfig(32, 2560, 32, vocabulary=51200), 1024, "AlpaComm, table 3; shape from Alpa's public GPT suite"
    ),
    "gpt-6.7b": _entry(GptConfig(32, 4096, 32, length=2048), 1024, _GPT3),
    "gpt-13b": _entry(GptConfig(40, 5120, 40, length=2048), 1024, _GPT3),
    "gpt-175b": _entry(GptConfig(96, 12288, 96, length=2048), 1536, _GPT3),
    "gpt-autoddl-8l": _entry(GptConfig(8, 8192, 64), 1024, f"{_AUTODDL}5.2.3, 64 nodes"),
    "gpt-autoddl-20l": _entry(GptConfig(20, 8192, 64), 1024, f"{_AUTODDL}5.2.3, 128 nodes; 5.4, wide"),
    "gpt-autoddl-44l": _entry(GptConfig(44, 8192, 64), 1024, f"{_AUTODDL}5.2.3, 256 nodes"),
    "gpt-autoddl-large": _entry(GptConfig(28, 4096, 32), 2048, f"{_AUTODDL}5.3.3, large"),
    "gpt-autoddl-deep": _entry(GptConfig(36, 4096, 32), 512, f"{_AUTODDL}5.4, deep: 512 sequences on 64 nodes"),
}
