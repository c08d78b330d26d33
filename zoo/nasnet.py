"""NASNet-A for ImageNet: a stack of two searched cells, each a small graph of separable convolutions and poolings.

A cell is a table (Zoph et al. 2018, Figure 4): state 0 is the output of the cell below, state 1 that of the cell below
that, and each block adds one state, the sum of two operations on earlier states.
Shapes: N batch, C channels, HW the image, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.images import image_entry
from zoo.workload import Entry

BN_EPS = 1e-3
STEM_FILTERS = 32

Operation = Literal["identity", "average 3", "maximum 3", "separable 3", "separable 5", "separable 7"]
Edge = tuple[Operation, int]
"""An operation and the state it reads."""


@dataclass(frozen=True, slots=True)
class Wiring:
    blocks: tuple[tuple[Edge, Edge], ...]
    outputs: tuple[int, ...]
    """The states concatenated into the cell's output."""
    stride: int
    """Stride of the operations that read states 0 and 1."""


NORMAL = Wiring(
    blocks=(
        (("separable 5", 0), ("separable 3", 1)),
        (("separable 5", 1), ("separable 3", 1)),
        (("average 3", 0), ("identity", 1)),
        (("average 3", 1), ("average 3", 1)),
        (("separable 3", 0), ("identity", 0)),
    ),
    outputs=(1, 2, 3, 4, 5, 6),
    stride=1,
)
REDUCTION = Wiring(
    blocks=(
        (("separable 5", 0), ("separable 7", 1)),
        (("maximum 3", 0), ("separable 7", 1)),
        (("average 3", 0), ("separable 5", 1)),
        (("identity", 3), ("average 3", 2)),
        (("separable 3", 2), ("maximum 3", 0)),
    ),
    outputs=(3, 4, 5, 6),
    stride=2,
)


@dataclass(frozen=True, slots=True)
class NASNetConfig:
    repeats: int = 4
    """Normal cells in each of the three stages: the N of Figure 2."""
    filters: int = 44
    """Filters of the first stage; the penultimate layer has 6 * 4 * filters = 1056 channels."""
    dropout: float = 0.5
    channels: int = 3
    image: int = 224
    classes: int = 1000


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=BN_EPS)


def separable(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    """ReLU, depthwise, pointwise, batch normalisation; all of it twice, the stride on the first."""
    layers: list[nn.Module] = []
    for channels, step in ((inputs, stride), (outputs, 1)):
        layers += [
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel, step, padding=kernel // 2, groups=channels, bias=False),
            nn.Conv2d(channels, outputs, 1, bias=False),
            _norm(outputs),
        ]
    return nn.Sequential(*layers)


def operation(name: Operation, inputs: int, outputs: int, stride: int) -> nn.Module:
    """The module for one edge of a cell; poolings and the identity keep the number of channels."""
    match name:
        case "identity":
            assert stride == 1
            return nn.Identity()
        case "average 3":
            return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        case "maximum 3":
            return nn.MaxPool2d(3, stride, padding=1)
        case "separable 3" | "separable 5" | "separable 7":
            return separable(inputs, outputs, int(name[-1]), stride)
        case _:
            assert_never(name)


def squeeze(inputs: int, outputs: int) -> nn.Sequential:
    """ReLU, 1x1 convolution and batch normalisation: brings a state to the cell's number of filters."""
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), _norm(outputs))


class FactorizedReduction(nn.Module):
    """Halve the image without losing half of it: one 1x1 convolution on even pixels, another on odd pixels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, bias=False)
        self.norm = _norm(outputs)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x_NCHW = F.relu(x_NCHW)
        shifted_NCHW = F.pad(x_NCHW, (0, 1, 0, 1))[:, :, 1:, 1:]
        even_NCHW = self.even(F.avg_pool2d(x_NCHW, 1, stride=2))
        odd_NCHW = self.odd(F.avg_pool2d(shifted_NCHW, 1, stride=2))
        y_NCHW: Tensor = self.norm(torch.cat([even_NCHW, odd_NCHW], dim=1))
        return y_NCHW


class Cell(nn.Module):
    """One cell; `fit` brings the older input (of `older` channels once fitted) to the shape of the newer one."""

    def __init__(self, wiring: Wiring, filters: int, newer: int, fit: nn.Module, older: int) -> None:
        super().__init__()
        self.wiring = wiring
        self.squeeze = squeeze(newer, filters)
        self.fit = fit
        channels = (filters, older, *[filters] * len(wiring.blocks))
        self.edges = nn.ModuleList(
            operation(name, channels[state], filters, wiring.stride if state < 2 else 1)
            for block in wiring.blocks
            for name, state in block
        )

    def forward(self, newer_NCHW: Tensor, older_NCHW: Tensor) -> Tensor:
        states = [self.squeeze(newer_NCHW), self.fit(older_NCHW)]
        for index, ((_, left), (_, right)) in enumerate(self.wiring.blocks):
            states.append(self.edges[2 * index](states[left]) + self.edges[2 * index + 1](states[right]))
        return torch.cat([states[state] for state in self.wiring.outputs], dim=1)


class NASNet(nn.Module):
    """A strided convolution, two reduction cells as stem, then three stages of normal cells with reductions between."""

    def __init__(self, config: NASNetConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(config.channels, STEM_FILTERS, 3, stride=2, bias=False), _norm(STEM_FILTERS)
        )
        self.cells = nn.ModuleList()
        older, newer = (STEM_FILTERS, 0), (STEM_FILTERS, 0)  # (channels, how often the image was halved)
        for wiring, filters in _cell_plan(config):
            # The first cell has nothing older than the stem: it reads the stem twice, the second time as it is.
            first = len(self.cells) == 0
            fit, fitted = (nn.Identity(), STEM_FILTERS) if first else (_fit(older, newer[1], filters), filters)
            self.cells.append(Cell(wiring, filters, newer[0], fit, fitted))
            older, newer = newer, (filters * len(wiring.outputs), newer[1] + wiring.stride - 1)
        self.classifier = nn.Sequential(
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(config.dropout), nn.Linear(newer[0], config.classes),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x_NCHW: Tensor) -> Tensor:
        newer_NCHW = older_NCHW = self.stem(x_NCHW)
        for cell in self.cells:
            newer_NCHW, older_NCHW = cell(newer_NCHW, older_NCHW), newer_NCHW
        logits_NK: Tensor = self.classifier(newer_NCHW)
        return logits_NK


def _cell_plan(config: NASNetConfig) -> list[tuple[Wiring, int]]:
    plan = [(REDUCTION, config.filters // 4), (REDUCTION, config.filters // 2)]
    for stage in range(3):
        filters = config.filters * 2**stage
        plan += [(REDUCTION, filters)] * (stage > 0) + [(NORMAL, filters)] * config.repeats
    return plan


def _fit(older: tuple[int, int], halvings: int, filters: int) -> nn.Module:
    channels, older_halvings = older
    return squeeze(channels, filters) if older_halvings == halvings else FactorizedReduction(channels, filters)


TINY = NASNetConfig(repeats=1, filters=8, image=64, classes=10)

MODELS: dict[str, Entry] = {
    "nasnet-a": image_entry(
        NASNet, (NASNetConfig(), TINY), batch_size=64,
        source="Zoph et al. 2018, Figure 4 and Table 3, NASNet-A (4 @ 1056); TASO measures it at batch 1",
    ),
}  # fmt: skip
