"""Models that mix huge embedding tables or many inputs with small dense networks: DLRM, XDL and CANDLE Uno.

Shapes: B samples, T tables, N indices in a bag, D embedding width, P pairs of features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.workload import Batch, Entry


def dense_stack(widths: Sequence[int], *, last_relu: bool, bias: bool = True) -> nn.Sequential:
    """Return dense layers between neighbouring widths, with a ReLU after each, or after each but the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Tables(nn.Module):
    """One embedding table for each categorical feature; a bag of indices gives the sum of its rows."""

    def __init__(self, rows: tuple[int, ...], width: int) -> None:
        super().__init__()
        bags = [nn.EmbeddingBag(count, width, mode="sum") for count in rows]
        for count, bag in zip(rows, bags, strict=True):
            nn.init.uniform_(bag.weight, -1 / math.sqrt(count), 1 / math.sqrt(count))
        self.bags = nn.ModuleList(bags)

    def forward(self, indices_BTN: Tensor) -> list[Tensor]:
        return [bag(indices_BN) for bag, indices_BN in zip(self.bags, indices_BTN.unbind(dim=1), strict=True)]


def random_indices(count: int, rows: tuple[int, ...], bag: int) -> Tensor:
    """Return indices_BTN with valid rows of every table."""
    return torch.stack([torch.randint(size, (count, bag)) for size in rows], dim=1)


@dataclass(frozen=True, slots=True)
class DlrmConfig:
    """`bottom` and `top` list output widths; `dot` takes products of all pairs of features, else they are joined."""

    rows: tuple[int, ...]
    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    dot: bool
    bag: int = 1


class DotInteraction(nn.Module):
    """The dense feature, followed by the inner products of all pairs of different features."""

    pairs_P: Tensor

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        first_P, second_P = torch.tril_indices(features, features, offset=-1).unbind()
        self.register_buffer("pairs_P", first_P * features + second_P, persistent=False)
        self.outputs = width + features * (features - 1) // 2

    def forward(self, features: list[Tensor]) -> Tensor:
        features_BTD = torch.stack(features, dim=1)
        products_BTT = torch.bmm(features_BTD, features_BTD.transpose(1, 2))
        products_BP = products_BTT.flatten(1).index_select(1, self.pairs_P)
        return torch.cat((features[0], products_BP), dim=1)


class JoinInteraction(nn.Module):
    """All features side by side."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.outputs = width * features

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.cat(features, dim=1)


class Dlrm(nn.Module):
    """Dense features through the bottom network, categorical ones through tables, interaction, top network."""

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        width, features = config.bottom[-1], len(config.rows) + 1
        self.tables = Tables(config.rows, width)
        self.bottom = dense_stack((config.dense, *config.bottom), last_relu=True)
        self.interaction = DotInteraction(features, width) if config.dot else JoinInteraction(features, width)
        self.top = dense_stack((self.interaction.outputs, *config.top), last_relu=False)

    def forward(self, dense_BI: Tensor, indices_BTN: Tensor) -> Tensor:
        features = [self.bottom(dense_BI), *self.tables(indices_BTN)]
        return self.top(self.interaction(features)).squeeze(1)


def dlrm_batch(count: int, config: DlrmConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense features, table indices, and whether the advertisement was clicked."""
    clicked_B = torch.randint(2, (count,)).to(torch.get_default_dtype())
    return torch.randn(count, config.dense), random_indices(count, config.rows, config.bag), clicked_B


@dataclass(frozen=True, slots=True)
class XdlConfig:
    """Tables of one width, and the output widths of the network above them."""

    rows: tuple[int, ...]
    width: int
    top: tuple[int, ...]
    bag: int = 1


class Xdl(nn.Module):
    """Tables whose rows are joined and classified: no dense features and no interaction."""

    def __init__(self, config: XdlConfig) -> None:
        super().__init__()
        self.tables = Tables(config.rows, config.width)
        self.top = dense_stack((config.width * len(config.rows), *config.top), last_relu=False, bias=False)

    def forward(self, indices_BTN: Tensor) -> Tensor:
        return self.top(torch.cat(self.tables(indices_BTN), dim=1))


def xdl_batch(count: int, config: XdlConfig) -> tuple[Tensor, Tensor]:
    """Return table indices and one class for each sample."""
    return random_indices(count, config.rows, config.bag), torch.randint(config.top[-1], (count,))


@dataclass(frozen=True, slots=True)
class UnoConfig:
    """Input widths of the cell and of a drug's two descriptions, and the output widths of the networks."""

    cell: int
    descriptors: int
    fingerprints: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


class CandleUno(nn.Module):
    """One network for each group of cell or drug features, and one above them all that predicts the response."""

    def __init__(self, config: UnoConfig) -> None:
        super().__init__()
        self.cell = dense_stack((config.cell, *config.bottom), last_relu=True)
        self.descriptors = dense_stack((config.descriptors, *config.bottom), last_relu=True)
        self.fingerprints = dense_stack((config.fingerprints, *config.bottom), last_relu=True)
        self.top = dense_stack((3 * config.bottom[-1], *config.top), last_relu=False)

    def forward(self, cell_BI: Tensor, descriptors_BI: Tensor, fingerprints_BI: Tensor) -> Tensor:
        towers = (self.cell(cell_BI), self.descriptors(descriptors_BI), self.fingerprints(fingerprints_BI))
        return self.top(torch.cat(towers, dim=1)).squeeze(1)


class CandleUnoPair(nn.Module):
    """The same for a cell treated with two drugs: five networks, and the two doses join their outputs."""

    def __init__(self, config: UnoConfig) -> None:
        super().__init__()
        self.cell = dense_stack((config.cell, *config.bottom), last_relu=True, bias=False)
        self.drugs = nn.ModuleList(
            dense_stack((width, *config.bottom), last_relu=True, bias=False)
            for width in (config.descriptors, config.fingerprints) * 2
        )
        self.top = dense_stack((5 * config.bottom[-1] + 2, *config.top), last_relu=False, bias=False)

    def forward(
        self,
        doses_B2: Tensor,
        cell_BI: Tensor,
        desc1_BI: Tensor,
        print1_BI: Tensor,
        desc2_BI: Tensor,
        print2_BI: Tensor,
    ) -> Tensor:
        """Take both doses, the cell, and the descriptors and fingerprints of each drug."""
        inputs = (desc1_BI, print1_BI, desc2_BI, print2_BI)
        drugs = [tower(x_BI) for tower, x_BI in zip(self.drugs, inputs, strict=True)]
        return self.top(torch.cat((doses_B2, self.cell(cell_BI), *drugs), dim=1)).squeeze(1)


def uno_batch(count: int, config: UnoConfig) -> tuple[Tensor, ...]:
    """Return the features of a cell and of a drug, and a response between 0 and 1."""
    widths = (config.cell, config.descriptors, config.fingerprints)
    return *(torch.randn(count, width) for width in widths), torch.rand(count)


def uno_pair_batch(count: int, config: UnoConfig) -> tuple[Tensor, ...]:
    """Return the doses, the features of a cell and of two drugs, and a response between 0 and 1."""
    widths = (2, config.cell, *(config.descriptors, config.fingerprints) * 2)
    return *(torch.randn(count, width) for width in widths), torch.rand(count)


Config = DlrmConfig | XdlConfig | UnoConfig

# Rows of the 26 tables of Criteo Kaggle, as preprocessed by DLRM's public code without a frequency threshold.
_CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
_DLRM = DlrmConfig(_CRITEO_ROWS, 13, (512, 512, 64), (1024, 1024, 1024, 1), dot=True)
_DLRM_CAT = DlrmConfig(_CRITEO_ROWS, 13, (512, 512, 64), (1024, 1024, 1024, 1), dot=False)
_TINY_DLRM = DlrmConfig((7, 5, 11, 3), 13, (16, 16, 8), (16, 16, 16, 1), dot=True)
_TINY_DLRM_CAT = DlrmConfig((7, 5, 11, 3), 13, (16, 16, 8), (16, 16, 16, 1), dot=False)
_XDL = XdlConfig((1000000,) * 4, 64, (256, 256, 2))
_TINY_XDL = XdlConfig((11,) * 4, 8, (16, 16, 2))
_UNO = UnoConfig(942, 5270, 2048, (1000,) * 3, (1000, 1000, 1000, 1))
_TINY_UNO = UnoConfig(6, 10, 8, (12,) * 3, (12, 12, 12, 1))
_UNO_PAIR = UnoConfig(942, 5270, 2048, (4192,) * 8, (4192,) * 4 + (1,))
_TINY_UNO_PAIR = UnoConfig(6, 10, 8, (12,) * 8, (12,) * 4 + (1,))


@dataclass(frozen=True, slots=True)
class _Kind:
    model: Callable[..., nn.Module]
    data: Callable[..., Batch]
    loss: Callable[..., Tensor]
    batch_size: int


_CLICKS = _Kind(Dlrm, dlrm_batch, F.binary_cross_entropy_with_logits, 1024)
_ADS = _Kind(Xdl, xdl_batch, F.cross_entropy, 1024)
_RESPONSE = _Kind(CandleUno, uno_batch, F.mse_loss, 256)
_PAIR_RESPONSE = _Kind(CandleUnoPair, uno_pair_batch, F.mse_loss, 256)


def _entry(kind: _Kind, config: Config, tiny: Config, source: str) -> Entry:
    return Entry(
        model=partial(kind.model, config),
        data=partial(kind.data, config=config),
        tiny_model=partial(kind.model, tiny),
        tiny_data=partial(kind.data, config=tiny),
        batch_size=kind.batch_size,
        tiny_batch_size=4,
        loss=kind.loss,
        source=source,
    )


_THESIS = "FlexFlow (thesis section 3.7.3)"

MODELS: dict[str, Entry] = {
    "dlrm": _entry(_CLICKS, _DLRM, _TINY_DLRM, f"{_THESIS}; interaction of Naumov et al. 2019"),
    "dlrm-cat": _entry(_CLICKS, _DLRM_CAT, _TINY_DLRM_CAT, f"{_THESIS}, features concatenated; Unity figure 16b"),
    "xdl": _entry(_ADS, _XDL, _TINY_XDL, "Unity, table 1; sizes from FlexFlow's public XDL example"),
    "candle-uno": _entry(_RESPONSE, _UNO, _TINY_UNO, _THESIS),
    "candle-uno-pair": _entry(_PAIR_RESPONSE, _UNO_PAIR, _TINY_UNO_PAIR, "FlexFlow's public CANDLE Uno example"),
}
