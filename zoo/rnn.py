"""Recurrent models unrolled step by step: RNNTC and RNNLM of FlexFlow, NasRNN of TASO.

Every layer has one cell, shared by all steps, and every step of every layer is an operator of its own in the graph,
because FlexFlow places each of them separately.  `rnnlm-fused` is the same language model with whole `nn.LSTM` layers.

Shapes: B samples, L steps, H hidden units, V words, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.tokens import next_token_batch, next_token_loss
from zoo.workload import Batch, Entry

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class RnnConfig:
    """A stack of recurrent layers over embedded words; `outputs` is the number of classes, or of words to predict."""

    vocabulary: int
    hidden: int
    layers: int
    steps: int
    outputs: int


class UnrolledLstm(nn.Module):
    """Layers of LSTM cells applied one step at a time, from a zero state unless another is given."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(layers))

    def forward(self, steps_BH: list[Tensor], states: list[State] | None = None) -> tuple[list[Tensor], list[State]]:
        """Return the top layer's output at each step, and every layer's last state."""
        if states is None:
            zero_BH = torch.zeros_like(steps_BH[0])
            states = [(zero_BH, zero_BH)] * len(self.cells)
        states = list(states)
        outputs = []
        for x_BH in steps_BH:
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x_BH, states[layer])
                x_BH = states[layer][0]
            outputs.append(x_BH)
        return outputs, states


class TextClassifier(nn.Module):
    """RNNTC: an unrolled LSTM whose last output is classified."""

    def __init__(self, config: RnnConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.recurrent = UnrolledLstm(config.hidden, config.layers)
        self.head = nn.Linear(config.hidden, config.outputs)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        outputs, _ = self.recurrent(list(self.embedding(tokens_BL).unbind(dim=1)))
        return self.head(outputs[-1])


class LanguageModel(nn.Module):
    """RNNLM: an unrolled LSTM that predicts the next word after every step."""

    def __init__(self, config: RnnConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.recurrent = UnrolledLstm(config.hidden, config.layers)
        self.head = nn.Linear(config.hidden, config.outputs)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        outputs, _ = self.recurrent(list(self.embedding(tokens_BL).unbind(dim=1)))
        return self.head(torch.stack(outputs, dim=1))


class FusedLanguageModel(nn.Module):
    """RNNLM with whole LSTM layers: the same function, but every layer runs over all steps as one operator."""

    def __init__(self, config: RnnConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(
            nn.LSTM(config.hidden, config.hidden, batch_first=True) for _ in range(config.layers)
        )
        self.head = nn.Linear(config.hidden, config.outputs)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLH = self.embedding(tokens_BL)
        for layer in self.layers:
            x_BLH, _ = layer(x_BLH)
        return self.head(x_BLH)


class Combine(nn.Module):
    """One leaf pair of a NAS cell's tree: the input times one matrix, and the state times another."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(hidden, hidden, bias=False)
        self.state = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BH: Tensor, h_BH: Tensor) -> tuple[Tensor, Tensor]:
        return self.input(x_BH), self.state(h_BH)


class NasCell(nn.Module):
    """The recurrent cell found by architecture search: a binary tree over eight combinations, with a memory."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(Combine(hidden) for _ in range(8))

    def forward(self, x_BH: Tensor, state: State) -> State:
        """Follow the tree from its leaves: eight combinations, four pairs, then the memory and the output."""
        h_BH, c_BH = state
        (a0, b0), (a1, b1), (a2, b2), (a3, b3), (a4, b4), (a5, b5), (a6, b6), (a7, b7) = (
            leaf(x_BH, h_BH) for leaf in self.leaves
        )
        pair0 = torch.tanh(torch.sigmoid(a0 + b0) * F.relu(a1 + b1))
        pair1 = torch.tanh(torch.sigmoid(a2 + b2) + F.relu(a3 * b3))
        pair2 = torch.tanh(torch.tanh(a4 + b4) * torch.sigmoid(a5 + b5))
        pair3 = torch.sigmoid(torch.tanh(a6 + b6) + torch.sigmoid(a7 + b7))
        memory = torch.tanh(pair0 + c_BH) * pair1
        return torch.tanh(memory * torch.tanh(pair2 + pair3)), memory


class TasoCell(nn.Module):
    """TASO's variant of the cell: the same kind of tree, every leaf a sum, and no memory."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(Combine(hidden) for _ in range(8))

    def forward(self, x_BH: Tensor, state: State) -> State:
        h_BH, c_BH = state
        t = [torch.add(*leaf(x_BH, h_BH)) for leaf in self.leaves]
        left = torch.sigmoid(torch.sigmoid(t[1]) + torch.tanh(t[2])) + torch.tanh(
            torch.sigmoid(t[4]) * torch.tanh(t[5])
        )
        right = torch.tanh(F.relu(t[0]) + torch.sigmoid(t[3])) * torch.tanh(torch.sigmoid(t[6]) * F.relu(t[7]))
        return torch.tanh(torch.tanh(left) * torch.tanh(right)), c_BH


class NasLanguageModel(nn.Module):
    """NasRNN: layers of NAS cells, unrolled, that predict the next word after every step."""

    def __init__(self, config: RnnConfig, cell: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.cells = nn.ModuleList(cell(config.hidden) for _ in range(config.layers))
        self.head = nn.Linear(config.hidden, config.outputs)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLH = self.embedding(tokens_BL)
        zero_BH = torch.zeros_like(x_BLH[:, 0])
        states = [(zero_BH, zero_BH)] * len(self.cells)
        outputs = []
        for x_BH in x_BLH.unbind(dim=1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x_BH, states[layer])
                x_BH = states[layer][0]
            outputs.append(x_BH)
        return self.head(torch.stack(outputs, dim=1))


def classification_batch(count: int, config: RnnConfig) -> tuple[Tensor, Tensor]:
    """Return random sentences and one random class for each."""
    return torch.randint(config.vocabulary, (count, config.steps)), torch.randint(config.outputs, (count,))


def language_batch(count: int, config: RnnConfig) -> tuple[Tensor, Tensor]:
    """Return random sentences and the words that follow."""
    return next_token_batch(count, config.steps, config.vocabulary)


@dataclass(frozen=True, slots=True)
class _Task:
    model: Callable[[RnnConfig], nn.Module]
    data: Callable[..., Batch]
    loss: Callable[..., Tensor]


_CLASSIFY = _Task(TextClassifier, classification_batch, F.cross_entropy)
_PREDICT = _Task(LanguageModel, language_batch, next_token_loss)
_PREDICT_FUSED = _Task(FusedLanguageModel, language_batch, next_token_loss)
_PREDICT_NAS = _Task(partial(NasLanguageModel, cell=NasCell), language_batch, next_token_loss)
_PREDICT_TASO = _Task(partial(NasLanguageModel, cell=TasoCell), language_batch, next_token_loss)


def _entry(task: _Task, config: RnnConfig, tiny: RnnConfig, source: str, batch_size: int = 64) -> Entry:
    return Entry(
        model=partial(task.model, config),
        data=partial(task.data, config=config),
        tiny_model=partial(task.model, tiny),
        tiny_data=partial(task.data, config=tiny),
        batch_size=batch_size,
        tiny_batch_size=4,
        loss=task.loss,
        source=source,
    )


# Vocabularies: 18765 words for Movie Reviews (Kim 2014, table 1), 10000 for Penn Treebank (Zaremba et al. 2014).
_FLEXFLOW = "FlexFlow (thesis section 3.7.1, table 3.3): "
_RNNTC = RnnConfig(vocabulary=18765, hidden=1024, layers=4, steps=40, outputs=2)
_RNNLM = RnnConfig(vocabulary=10000, hidden=2048, layers=2, steps=40, outputs=10000)
_RNNLM_2 = RnnConfig(vocabulary=10000, hidden=2048, layers=2, steps=2, outputs=10000)
_NASRNN = RnnConfig(vocabulary=10000, hidden=512, layers=2, steps=40, outputs=10000)
_NASRNN_TASO = RnnConfig(vocabulary=10000, hidden=512, layers=1, steps=5, outputs=10000)
_TINY_RNNTC = RnnConfig(vocabulary=32, hidden=8, layers=4, steps=4, outputs=2)
_TINY_RNNLM = RnnConfig(vocabulary=32, hidden=8, layers=2, steps=4, outputs=32)
_TINY_RNNLM_2 = RnnConfig(vocabulary=32, hidden=8, layers=2, steps=2, outputs=32)
_TINY_TASO = RnnConfig(vocabulary=32, hidden=8, layers=1, steps=3, outputs=32)

MODELS: dict[str, Entry] = {
    "rnntc": _entry(_CLASSIFY, _RNNTC, _TINY_RNNTC, _FLEXFLOW + "4 LSTM layers of 1024, 40 steps"),
    "rnnlm": _entry(_PREDICT, _RNNLM, _TINY_RNNLM, _FLEXFLOW + "2 LSTM layers of 2048, 40 steps"),
    "rnnlm-2step": _entry(_PREDICT, _RNNLM_2, _TINY_RNNLM_2, "FlexFlow (thesis section 3.7.5): RNNLM of 2 steps"),
    "rnnlm-fused": _entry(_PREDICT_FUSED, _RNNLM, _TINY_RNNLM, _FLEXFLOW + "RNNLM, each layer one operator"),
    "nasrnn": _entry(
        _PREDICT_NAS, _NASRNN, _TINY_RNNLM, "Zoph and Le 2017, cell of the appendix; 512 units as in TASO"
    ),
    "nasrnn-taso": _entry(_PREDICT_TASO, _NASRNN_TASO, _TINY_TASO, "TASO, public example: 512 units, 5 steps", 1),
}
