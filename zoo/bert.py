"""BERT for pre-training, with attention spelled out operator by operator because the papers rewrite inside it.

Sequences are packed to full length, so there is no padding mask.

Shapes: B samples, L positions, D model width, H heads, K width of a head, V words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.workload import Entry

_IGNORED = -100
_MASKED_FRACTION = 0.15  # Devlin et al. 2018, section 3.1, task 1


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The sizes of Devlin et al. 2018, section 3; the feed-forward width is four times the model width."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 30522
    positions: int = 512
    dropout: float = 0.1


class Embeddings(nn.Module):
    """Sum of word, position and sentence embeddings, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.sentences = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BL: Tensor, sentences_BL: Tensor) -> Tensor:
        where_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        x_BLD = self.words(tokens_BL) + self.sentences(sentences_BL) + self.positions(where_L)
        return self.dropout(self.norm(x_BLD))


class SelfAttention(nn.Module):
    """Multi-head attention as three projections, two matrix products, a softmax and a dropout."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def _split(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q_BHLK = self._split(self.query(x_BLD))
        k_BHLK = self._split(self.key(x_BLD))
        v_BHLK = self._split(self.value(x_BLD))
        scores_BHLL = torch.matmul(q_BHLK, k_BHLK.transpose(2, 3)) / math.sqrt(q_BHLK.shape[3])
        weights_BHLL = self.dropout(torch.softmax(scores_BHLL, dim=3))
        mixed_BHLK = torch.matmul(weights_BHLL, v_BHLK)
        return self.output(mixed_BHLK.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer layer that normalises after each residual sum."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.output_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = self.attention_norm(x_BLD + self.dropout(self.attention(x_BLD)))
        return self.output_norm(x_BLD + self.dropout(self.down(F.gelu(self.up(x_BLD)))))


class Bert(nn.Module):
    """The encoder with both heads: masked words (weights tied to the word embedding) and next sentence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width)
        self.next_sentence = nn.Linear(config.width, 2)
        self.transform = nn.Linear(config.width, config.width)
        self.transform_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.word_bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.apply(_initialise)

    def forward(self, tokens_BL: Tensor, sentences_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of every word at every position, and of the two answers for every pair of sentences."""
        x_BLD = self.embeddings(tokens_BL, sentences_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        pooled_BD = torch.tanh(self.pooler(x_BLD[:, 0]))
        words_BLD = self.transform_norm(F.gelu(self.transform(x_BLD)))
        return F.linear(words_BLD, self.embeddings.words.weight, self.word_bias), self.next_sentence(pooled_BD)


def _initialise(module: nn.Module) -> None:
    """Draw matrices from a normal of deviation 0.02 (Devlin et al. 2018, released configuration), biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def pretraining_batch(count: int, config: BertConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, sentence numbers, the words to find (as many in every sample), and next-sentence answers."""
    shape = (count, config.positions)
    rank_BL = torch.rand(shape).argsort(dim=1).argsort(dim=1)
    masked_BL = rank_BL < max(1, round(_MASKED_FRACTION * config.positions))
    words_BL = torch.where(masked_BL, torch.randint(config.vocabulary, shape), _IGNORED)
    sentences_BL = (torch.arange(config.positions) >= config.positions // 2).long().expand(shape).contiguous()
    return torch.randint(config.vocabulary, shape), sentences_BL, words_BL, torch.randint(2, (count,))


def pretraining_loss(logits: tuple[Tensor, Tensor], words_BL: Tensor, next_B: Tensor) -> Tensor:
    """Return the sum of the masked-word and the next-sentence cross-entropies."""
    words_BLV, next_B2 = logits
    masked = F.cross_entropy(words_BLV.flatten(0, 1), words_BL.flatten(), ignore_index=_IGNORED)
    return masked + F.cross_entropy(next_B2, next_B)


_TINY = BertConfig(layers=2, width=16, heads=4, vocabulary=32, positions=8)


def _entry(config: BertConfig, source: str) -> Entry:
    return Entry(
        model=partial(Bert, config),
        data=partial(pretraining_batch, config=config),
        tiny_model=partial(Bert, _TINY),
        tiny_data=partial(pretraining_batch, config=_TINY),
        batch_size=4,
        tiny_batch_size=4,
        loss=pretraining_loss,
        source=source,
    )


MODELS: dict[str, Entry] = {
    "bert-base": _entry(BertConfig(layers=12, width=768, heads=12), "Devlin et al. 2018, section 3"),
    "bert-large": _entry(
        BertConfig(layers=24, width=1024, heads=16), "Devlin et al. 2018, section 3; Unity section 6.1: 4 per GPU"
    ),
}
