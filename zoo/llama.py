"""LLaMA language models: rotary positions, RMS normalisation, gated feed-forward, and grouped keys and values.

Shapes: B samples, L positions, D model width, H query heads, G key and value heads, K width of a head, V words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.tokens import next_token_batch, next_token_loss
from zoo.workload import Entry


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A pre-norm decoder; `kv_heads` below `heads` means that groups of query heads share keys and values."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int
    rope_base: float = 10000.0


class Rotary(nn.Module):
    """Rotate the two halves of each head by an angle that grows with the position (Su et al. 2021, equation 34)."""

    cos_LK: Tensor
    sin_LK: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        head_width = config.width // config.heads
        frequencies = config.rope_base ** (-torch.arange(0, head_width, 2) / head_width)
        angles_LK = torch.outer(torch.arange(config.length).to(frequencies.dtype), frequencies).repeat(1, 2)
        self.register_buffer("cos_LK", angles_LK.cos(), persistent=False)
        self.register_buffer("sin_LK", angles_LK.sin(), persistent=False)

    def forward(self, x_BHLK: Tensor) -> Tensor:
        length = x_BHLK.shape[2]
        first, second = x_BHLK.chunk(2, dim=3)
        turned_BHLK = torch.cat((-second, first), dim=3)
        return x_BHLK * self.cos_LK[:length] + turned_BHLK * self.sin_LK[:length]


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions, in which each key and value head may serve several query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.heads * head_width, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * head_width, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * head_width, bias=False)
        self.output = nn.Linear(config.heads * head_width, config.width, bias=False)

    def forward(self, x_BLD: Tensor, rotary: Rotary) -> Tensor:
        q_BHLK = rotary(self.query(x_BLD).unflatten(2, (self.heads, -1)).transpose(1, 2))
        k_BGLK = rotary(self.key(x_BLD).unflatten(2, (self.kv_heads, -1)).transpose(1, 2))
        v_BGLK = self.value(x_BLD).unflatten(2, (self.kv_heads, -1)).transpose(1, 2)
        mixed_BHLK = F.scaled_dot_product_attention(
            q_BHLK, k_BGLK, v_BGLK, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        return self.output(mixed_BHLK.transpose(1, 2).flatten(2))


class GatedFeedForward(nn.Module):
    """SwiGLU: one projection, gated by the SiLU of another, projected back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.feed_forward, bias=False)
        self.up = nn.Linear(config.width, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))


class Block(nn.Module):
    """A transformer layer that normalises before attention and before the feed-forward."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = GroupedAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = GatedFeedForward(config)

    def forward(self, x_BLD: Tensor, rotary: Rotary) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotary)
        return x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD))


class Llama(nn.Module):
    """Word embedding, blocks, a last normalisation, and a head of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.rotary = Rotary(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(initialise)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.words(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD, self.rotary)
        return self.head(self.norm(x_BLD))


def initialise(module: nn.Module) -> None:
    """Draw every matrix from a normal of deviation 0.02."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def llama_batch(count: int, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Return random sequences of the model's full length and the tokens that follow."""
    return next_token_batch(count, config.length, config.vocabulary)


# Batches of 4 million tokens for LLaMA, 8 million for Llama 3 (its section 3.4.1, the 8192-token phase).
# layers, width, feed-forward width, query heads, key and value heads, vocabulary, length
_LLAMA_7B = LlamaConfig(32, 4096, 11008, 32, 32, 32000, 2048)
_LLAMA_8B = LlamaConfig(32, 4096, 14336, 32, 8, 128256, 8192, rope_base=500000.0)
_LLAMA_70B = LlamaConfig(80, 8192, 28672, 64, 8, 128256, 8192, rope_base=500000.0)
_TINY_MHA = LlamaConfig(2, 16, 24, 4, 4, 32, 8)
_TINY_GQA = LlamaConfig(2, 16, 24, 4, 2, 32, 8, rope_base=500000.0)


def _entry(config: LlamaConfig, tiny: LlamaConfig, batch_size: int, source: str) -> Entry:
    return Entry(
        model=partial(Llama, config),
        data=partial(llama_batch, config=config),
        tiny_model=partial(Llama, tiny),
        tiny_data=partial(llama_batch, config=tiny),
        batch_size=batch_size,
        tiny_batch_size=4,
        loss=next_token_loss,
        source=source,
    )


MODELS: dict[str, Entry] = {
    "llama-7b": _entry(_LLAMA_7B, _TINY_MHA, 2048, "LLaMA (Touvron et al. 2023), table 2: 4 million tokens a batch"),
    "llama-8b": _entry(_LLAMA_8B, _TINY_GQA, 1024, "Llama 3 (Grattafiori et al. 2024), table 3"),
    "llama-70b": _entry(_LLAMA_70B, _TINY_GQA, 1024, "Llama 3 (Grattafiori et al. 2024), table 3"),
}
