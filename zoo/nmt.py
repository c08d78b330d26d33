"""FlexFlow's translation model: an LSTM encoder and an LSTM decoder, unrolled, with attention above the decoder.

Shapes: B samples, S source steps, T target steps, H hidden units, V words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.rnn import UnrolledLstm
from zoo.tokens import next_token_batch, next_token_loss
from zoo.workload import Entry


@dataclass(frozen=True, slots=True)
class NmtConfig:
    """Encoder and decoder have the same number of layers, of units and of steps, and vocabularies of the same size."""

    vocabulary: int
    hidden: int
    layers: int
    steps: int


class Attention(nn.Module):
    """Multiplicative attention of a decoder step over the encoder's outputs (Luong et al. 2015, equations 5, 8)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, h_BH: Tensor, memory_BSH: Tensor) -> Tensor:
        query_B1H = self.query(h_BH).unsqueeze(1)
        context_B1H = F.scaled_dot_product_attention(query_B1H, memory_BSH, memory_BSH, scale=1.0)
        return torch.tanh(self.combine(torch.cat((context_B1H.squeeze(1), h_BH), dim=1)))


class Nmt(nn.Module):
    """Encode the source, decode the target from the encoder's last states, attend at each step, predict each word."""

    def __init__(self, config: NmtConfig) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.target_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.encoder = UnrolledLstm(config.hidden, config.layers)
        self.decoder = UnrolledLstm(config.hidden, config.layers)
        self.attention = Attention(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        encoded, states = self.encoder(list(self.source_embedding(source_BS).unbind(dim=1)))
        decoded, _ = self.decoder(list(self.target_embedding(target_BT).unbind(dim=1)), states)
        memory_BSH = torch.stack(encoded, dim=1)
        attended = [self.attention(h_BH, memory_BSH) for h_BH in decoded]
        return self.head(torch.stack(attended, dim=1))


def translation_batch(count: int, config: NmtConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return random source sentences, random target sentences, and the words that follow in the target."""
    source_BS = torch.randint(config.vocabulary, (count, config.steps))
    return source_BS, *next_token_batch(count, config.steps, config.vocabulary)


# The thesis does not state the vocabulary; 20480 words is the setting of FlexFlow's public NMT program.
_FULL = NmtConfig(vocabulary=20480, hidden=1024, layers=2, steps=40)
_TINY = NmtConfig(vocabulary=32, hidden=8, layers=2, steps=4)

MODELS: dict[str, Entry] = {
    "nmt": Entry(
        model=partial(Nmt, _FULL),
        data=partial(translation_batch, config=_FULL),
        tiny_model=partial(Nmt, _TINY),
        tiny_data=partial(translation_batch, config=_TINY),
        batch_size=64,
        tiny_batch_size=4,
        loss=next_token_loss,
        source="FlexFlow (thesis section 3.7.1, table 3.3): encoder and decoder of 2 LSTM layers of 1024, 40 steps",
    ),
}
