"""Models as people write them whose attention has query, key and value in one weight, or whose MLP has gate and up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH, BATCH = 16, 4, 24, 6, 4


class NanoAttention(nn.Module):
    """As nanoGPT has it: one linear layer, split along its features."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        parts = self.c_attn(x).split(c, dim=2)
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class TimmAttention(nn.Module):
    """As timm has it: reshaped to three, the three first, then taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class GroupedAttention(nn.Module):
    """As Phi-3 has it: fewer heads of keys and values than of queries, all in one weight, sliced."""

    def __init__(self, num_groups: int = 2) -> None:
        super().__init__()
        self.size, self.groups = WIDTH // HEADS, num_groups
        self.qkv_proj = nn.Linear(WIDTH, WIDTH + 2 * num_groups * self.size, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv, rest = self.qkv_proj(x), self.groups * self.size
        q, k, v = qkv[..., :WIDTH], qkv[..., WIDTH : WIDTH + rest], qkv[..., WIDTH + rest :]
        q, k, v = (part.view(b, t, -1, self.size).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, WIDTH))


class LowRank(nn.Module):
    """A layer that stays as it is, and a narrow pair beside it that learns (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base, self.narrow = base.requires_grad_(False), nn.Linear(base.in_features, rank, bias=False)
        self.wide = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.wide(self.narrow(x)) * 0.5


class PlainMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class GatedMlp(nn.Module):
    """As Phi-3 and GLM have it: gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), attention
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Words(nn.Module):
    """Blocks between a table of words and the layer that scores them."""

    def __init__(self, attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module], num_blocks: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList(Block(attention(), mlp()) for _ in range(num_blocks))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class TorchWords(nn.Module):
    """Torch's own layers between a table and a head: the encoder's in_proj_weight is packed, and so is the decoder's,
    which uses that of its second attention for two sequences."""

    def __init__(self, decoder: bool = False) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        options = {"dim_feedforward": 2 * WIDTH, "dropout": 0.0, "batch_first": True}
        encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, **options)
        self.encoder = nn.TransformerEncoder(encoder, 1, enable_nested_tensor=False)
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, **options) if decoder else None
        self.decoder = None if layer is None else nn.TransformerDecoder(layer, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        made = self.encoder(x)
        return self.lm_head(made if self.decoder is None else self.decoder(x, made))


def gpt2(**options: Any) -> nn.Module:
    """Hugging Face's GPT-2, whose Conv1D has its weights the other way around."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=1, n_head=HEADS, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False, attn_implementation="sdpa", **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def adapted() -> nn.Module:
    """nanoGPT with a low-rank pair beside every layer of its blocks."""
    model = Words(NanoAttention, PlainMlp)
    for block in model.h:
        for owner, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            setattr(owner, name, LowRank(getattr(owner, name)))
    return model


class Logits(nn.Module):
    """A model of a library that gives its scores by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nanogpt": lambda: Words(NanoAttention, PlainMlp),
    "timm": lambda: Words(TimmAttention, PlainMlp, 1),
    "phi3": lambda: Words(GroupedAttention, GatedMlp),
    "encoder": TorchWords,
    "decoder": lambda: TorchWords(decoder=True),
    "gpt2": lambda: Logits(gpt2()),
    "lora": adapted,
}
PACKED = ("c_attn", "qkv", "in_proj", "gate_up")
"""What the packed weights are called."""


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def make_batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())
