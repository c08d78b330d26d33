"""Multi-layer perceptrons: Unity's 16 layers of 8192, and the four layers on which AutoDDL compares its searches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.workload import Entry


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """The widths from the input to the output: one dense layer between each two neighbours."""

    widths: tuple[int, ...]


class Mlp(nn.Module):
    """Dense layers with a ReLU after each but the last."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(config.widths))

    def forward(self, x_BI: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x_BI = F.relu(layer(x_BI))
        return self.layers[-1](x_BI)


def regression_batch(count: int, config: MlpConfig) -> tuple[Tensor, Tensor]:
    """Return standard normal inputs and standard normal targets."""
    return torch.randn(count, config.widths[0]), torch.randn(count, config.widths[-1])


def _entry(config: MlpConfig, tiny: MlpConfig, batch_size: int, source: str) -> Entry:
    return Entry(
        model=partial(Mlp, config),
        data=partial(regression_batch, config=config),
        tiny_model=partial(Mlp, tiny),
        tiny_data=partial(regression_batch, config=tiny),
        batch_size=batch_size,
        tiny_batch_size=4,
        loss=F.mse_loss,
        source=source,
    )


MODELS: dict[str, Entry] = {
    "mlp": _entry(
        MlpConfig((8192,) * 17),
        MlpConfig((16,) * 17),
        256,
        "Unity, section 6.1: 16 dense layers with a hidden dimension of 8192, 256 samples per GPU",
    ),
    # The paper gives no batch size here: 4096 leaves one sample to each of the 4096 nodes of the larger experiment.
    "mlp-autoddl": _entry(
        MlpConfig((32768, 16384, 4096, 2048, 512)),
        MlpConfig((64, 32, 16, 8, 4)),
        4096,
        "AutoDDL, section 4.6 and figure 8: a 4-layer MLP of 32768-16384-4096-2048-512",
    ),
}
