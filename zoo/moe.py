"""Mixture-of-experts transformers in static shapes: every token goes to its best experts while they have room.

Routing follows GShard (Lepikhin et al. 2020, algorithm 1), each sequence being a group: an expert takes at most C
tokens of a sequence, first all first choices in order of position, then the second choices; a token that finds no room
passes through the residual alone.  With a capacity factor of at least E / K nothing is ever dropped.

Shapes: B samples, L positions, D model width, F expert width, E experts, K choices of a token, C slots of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import gpt, llama
from zoo.tokens import next_token_loss
from zoo.workload import Batch, Entry

_Makers = tuple[Callable[[], nn.Module], Callable[[int], Batch]]

_BALANCE_WEIGHT = 0.01  # Fedus et al. 2021 (Switch Transformer), section 2.2


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of one layer; `gated` experts are SwiGLU as in Mixtral, others two layers with a GELU."""

    width: int
    expert_width: int
    experts: int
    choices: int
    gated: bool
    capacity_factor: float = 1.25

    def capacity(self, length: int) -> int:
        """Return how many tokens of a sequence one expert takes."""
        return min(length, math.ceil(self.capacity_factor * self.choices * length / self.experts))


class Experts(nn.Module):
    """The feed-forward networks of all experts, their weights stacked along the first dimension."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        inward = (config.experts, config.width, config.expert_width)
        outward = (config.experts, config.expert_width, config.width)
        self.up_EDF = nn.Parameter(torch.empty(inward))
        self.gate_EDF = nn.Parameter(torch.empty(inward)) if config.gated else None
        self.down_EFD = nn.Parameter(torch.empty(outward))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x_EBCD: Tensor) -> Tensor:
        h_EBCF = torch.einsum("ebcd,edf->ebcf", x_EBCD, self.up_EDF)
        if self.gate_EDF is None:
            h_EBCF = F.gelu(h_EBCF, approximate="tanh")
        else:
            h_EBCF = h_EBCF * F.silu(torch.einsum("ebcd,edf->ebcf", x_EBCD, self.gate_EDF))
        return torch.einsum("ebcf,efd->ebcd", h_EBCF, self.down_EFD)


class Router(nn.Module):
    """Decide which expert, in which of its slots, takes each token, and how much its answer counts."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.score = nn.Linear(config.width, config.experts, bias=False)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dispatch_BLEC of zeros and ones, combine_BLEC of gate values, and the load-balancing loss."""
        length = x_BLD.shape[1]
        probability_BLE = torch.softmax(self.score(x_BLD), dim=2)
        gate_BLK, choice_BLK = torch.topk(probability_BLE, self.config.choices, dim=2)
        gate_BLK = gate_BLK / gate_BLK.sum(dim=2, keepdim=True)
        chosen_BKLE = _one_hot(choice_BLK, self.config.experts).transpose(1, 2)
        queue_BQE = chosen_BKLE.flatten(1, 2).long()
        slot_BKLE = (queue_BQE.cumsum(dim=1) - queue_BQE).unflatten(1, (self.config.choices, length))
        in_slot_BKLEC = _one_hot(slot_BKLE, self.config.capacity(length))
        taken_BLKEC = (in_slot_BKLEC & chosen_BKLE.unsqueeze(4)).transpose(1, 2).to(x_BLD.dtype)
        combine_BLEC = torch.einsum("blk,blkec->blec", gate_BLK, taken_BLKEC)
        return taken_BLKEC.sum(dim=2), combine_BLEC, _imbalance(probability_BLE, chosen_BKLE[:, 0])


def _one_hot(index: Tensor, count: int) -> Tensor:
    """Return a new last dimension that is true where it equals the index; nowhere, for an index past the end."""
    return index.unsqueeze(-1) == torch.arange(count, device=index.device)


def _imbalance(probability_BLE: Tensor, first_BLE: Tensor) -> Tensor:
    """Return, over the sequences, the mean of E x sum over experts of (share of first choices x mean probability)."""
    share_BE = first_BLE.to(probability_BLE.dtype).mean(dim=1)
    return probability_BLE.shape[2] * (share_BE * probability_BLE.mean(dim=1)).sum(dim=1).mean()


class MoeLayer(nn.Module):
    """A feed-forward layer in which each token uses only its chosen experts."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        dispatch_BLEC, combine_BLEC, imbalance = self.router(x_BLD)
        y_EBCD = self.experts(torch.einsum("blec,bld->ebcd", dispatch_BLEC, x_BLD))
        return torch.einsum("blec,ebcd->bld", combine_BLEC, y_EBCD), imbalance


class MixtralBlock(nn.Module):
    """A LLaMA layer whose feed-forward is a mixture of experts."""

    def __init__(self, config: llama.LlamaConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = llama.GroupedAttention(config)
        self.moe_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.moe = MoeLayer(moe)

    def forward(self, x_BLD: Tensor, rotary: llama.Rotary) -> tuple[Tensor, Tensor]:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotary)
        y_BLD, imbalance = self.moe(self.moe_norm(x_BLD))
        return x_BLD + y_BLD, imbalance


class Mixtral(nn.Module):
    """LLaMA with experts in every layer; returns the logits and the mean load-balancing loss."""

    def __init__(self, config: llama.LlamaConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.rotary = llama.Rotary(config)
        self.blocks = nn.ModuleList(MixtralBlock(config, moe) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(llama.initialise)

    def forward(self, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        x_BLD = self.words(tokens_BL)
        imbalances = []
        for block in self.blocks:
            x_BLD, imbalance = block(x_BLD, self.rotary)
            imbalances.append(imbalance)
        return self.head(self.norm(x_BLD)), torch.stack(imbalances).mean()


class MoeGptBlock(nn.Module):
    """A GPT layer whose feed-forward is a mixture of experts."""

    def __init__(self, config: gpt.GptConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = gpt.CausalAttention(config)
        self.moe_norm = nn.LayerNorm(config.width)
        self.moe = MoeLayer(moe)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        x_BLD = x_BLD + self.dropout(self.attention(self.attention_norm(x_BLD)))
        y_BLD, imbalance = self.moe(self.moe_norm(x_BLD))
        return x_BLD + self.dropout(y_BLD), imbalance


class MoeGpt(nn.Module):
    """GPT with experts in every second layer; returns the logits and the mean load-balancing loss."""

    def __init__(self, config: gpt.GptConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.embeddings = gpt.GptEmbeddings(config)
        self.dense_blocks = nn.ModuleList(gpt.Block(config) for _ in range(config.layers // 2))
        self.moe_blocks = nn.ModuleList(MoeGptBlock(config, moe) for _ in range(config.layers // 2))
        self.norm = nn.LayerNorm(config.width)
        gpt.initialise(self, config.layers)

    def forward(self, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        x_BLD = self.embeddings(tokens_BL)
        imbalances = []
        for dense_block, moe_block in zip(self.dense_blocks, self.moe_blocks, strict=True):
            x_BLD, imbalance = moe_block(dense_block(x_BLD))
            imbalances.append(imbalance)
        return F.linear(self.norm(x_BLD), self.embeddings.words.weight), torch.stack(imbalances).mean()


def moe_loss(outputs: tuple[Tensor, Tensor], targets_BL: Tensor) -> Tensor:
    """Return the next-token loss plus the weighted load-balancing loss."""
    logits_BLV, imbalance = outputs
    return next_token_loss(logits_BLV, targets_BL) + _BALANCE_WEIGHT * imbalance


def _mixtral(config: llama.LlamaConfig, moe: MoeConfig) -> _Makers:
    return partial(Mixtral, config, moe), partial(llama.llama_batch, config=config)


def _moe_gpt(config: gpt.GptConfig, moe: MoeConfig) -> _Makers:
    return partial(MoeGpt, config, moe), partial(gpt.gpt_batch, config=config)


def _entry(full: _Makers, tiny: _Makers, batch_size: int, source: str) -> Entry:
    return Entry(
        model=full[0],
        data=full[1],
        tiny_model=tiny[0],
        tiny_data=tiny[1],
        batch_size=batch_size,
        tiny_batch_size=4,
        loss=moe_loss,
        source=source,
    )


# No paper states a batch size for these two: about a million and half a million tokens, as GPT-3 uses at such sizes.
MODELS: dict[str, Entry] = {
    "moe-8x7b": _entry(
        _mixtral(
            llama.LlamaConfig(32, 4096, 14336, 32, 8, 32000, 4096, rope_base=1e6),
            MoeConfig(width=4096, expert_width=14336, experts=8, choices=2, gated=True),
        ),
        _mixtral(
            llama.LlamaConfig(2, 16, 24, 4, 2, 32, 8, rope_base=1e6),
            MoeConfig(width=16, expert_width=24, experts=4, choices=2, gated=True),
        ),
        256,
        "Mixtral of experts (Jiang et al. 2024), table 1; routing of GShard (Lepikhin et al. 2020)",
    ),
    "moe-gpt-1.3b-8e": _entry(
        _moe_gpt(
            gpt.GptConfig(24, 2048, 16),
            MoeConfig(width=2048, expert_width=8192, experts=8, choices=2, gated=False),
        ),
        _moe_gpt(
            gpt.GptConfig(4, 16, 4, length=8, vocabulary=32),
            MoeConfig(width=16, expert_width=64, experts=4, choices=2, gated=False),
        ),
        512,
        "GPT-3 XL's shape with experts in every second layer, as in GShard (Lepikhin et al. 2020), section 2.1",
    ),
}
