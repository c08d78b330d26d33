"""U-Transformer: a U-Net with attention and long skips, whose traffic between pipeline stages AlpaComm hides.

The network predicts the noise in an image, given the diffusion time and a sequence of context vectors.  Going down,
each level convolves, attends and halves the image; going up, each level joins the result with what the same level
produced on the way down, convolves, attends and doubles the image.  The lowest level does not attend, and has one stage
more on the way up, for what entered it.

Shapes: B samples, C channels, Y and X the image, P = Y * X pixels, S context vectors, H heads, K width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.workload import Entry


@dataclass(frozen=True, slots=True)
class UConfig:
    """One entry of `channels` for each level, from the largest image to the smallest."""

    channels: tuple[int, ...]
    image: int
    layers: int
    heads: int
    groups: int
    attention_groups: int
    inputs: int = 3
    outputs: int = 4

    @property
    def lowest(self) -> int:
        return len(self.channels) - 1

    @property
    def time_width(self) -> int:
        return 4 * self.channels[0]

    @property
    def context_width(self) -> int:
        return self.channels[-1]

    @property
    def context_length(self) -> int:
        return (self.image // 2**self.lowest) ** 2


class TimeEmbedding(nn.Module):
    """Sines and cosines of the diffusion time, through two dense layers."""

    frequencies: Tensor

    def __init__(self, config: UConfig) -> None:
        super().__init__()
        half = config.channels[0] // 2
        frequencies = torch.exp(torch.arange(half) * (-math.log(10000.0) / half))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.first = nn.Linear(config.channels[0], config.time_width)
        self.second = nn.Linear(config.time_width, config.time_width)

    def forward(self, time_B: Tensor) -> Tensor:
        angles = time_B.to(self.frequencies.dtype).unsqueeze(1) * self.frequencies
        return self.second(F.silu(self.first(torch.cat((angles.cos(), angles.sin()), dim=1))))


class Residual(nn.Module):
    """Two normalised convolutions, with the time added between them, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, config: UConfig) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(config.groups, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(config.time_width, outputs)
        self.second_norm = nn.GroupNorm(config.groups, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x_BCYX: Tensor, time_BT: Tensor) -> Tensor:
        h_BCYX = self.first(F.silu(self.first_norm(x_BCYX)))
        h_BCYX = h_BCYX + self.time(F.silu(time_BT)).unsqueeze(2).unsqueeze(3)
        return self.shortcut(x_BCYX) + self.second(F.silu(self.second_norm(h_BCYX)))


class Attention(nn.Module):
    """Multi-head attention of the pixels to a memory: the pixels themselves, or the context."""

    def __init__(self, width: int, memory_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(memory_width, width, bias=False)
        self.value = nn.Linear(memory_width, width, bias=False)
        self.output = nn.Linear(width, width)

    def _split(self, x_BPC: Tensor) -> Tensor:
        return x_BPC.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x_BPC: Tensor, memory_BSM: Tensor) -> Tensor:
        q_BHPK = self._split(self.query(x_BPC))
        k_BHSK, v_BHSK = self._split(self.key(memory_BSM)), self._split(self.value(memory_BSM))
        mixed_BHPK = F.scaled_dot_product_attention(q_BHPK, k_BHSK, v_BHSK)
        return self.output(mixed_BHPK.transpose(1, 2).flatten(2))


class SpatialTransformer(nn.Module):
    """A transformer layer over the pixels: self-attention, attention to the context, gated feed-forward."""

    def __init__(self, width: int, config: UConfig) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(config.attention_groups, width)
        self.project_in = nn.Conv2d(width, width, 1)
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, width, config.heads)
        self.context_norm = nn.LayerNorm(width)
        self.context_attention = Attention(width, config.context_width, config.heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)
        self.project_out = nn.Conv2d(width, width, 1)

    def forward(self, x_BCYX: Tensor, context_BSM: Tensor) -> Tensor:
        image = x_BCYX.shape[2:]
        h_BPC = self.project_in(self.norm(x_BCYX)).flatten(2).transpose(1, 2)
        normed_BPC = self.self_norm(h_BPC)
        h_BPC = h_BPC + self.self_attention(normed_BPC, normed_BPC)
        h_BPC = h_BPC + self.context_attention(self.context_norm(h_BPC), context_BSM)
        linear_BPF, gate_BPF = self.up(self.feed_forward_norm(h_BPC)).chunk(2, dim=2)
        h_BPC = h_BPC + self.down(linear_BPF * F.gelu(gate_BPF))
        return x_BCYX + self.project_out(h_BPC.transpose(1, 2).unflatten(2, image))


class Stage(nn.Module):
    """A residual block and, unless on the lowest level, a transformer layer after it."""

    def __init__(self, inputs: int, outputs: int, attends: bool, config: UConfig) -> None:
        super().__init__()
        self.residual = Residual(inputs, outputs, config)
        self.transformer = SpatialTransformer(outputs, config) if attends else None

    def forward(self, x_BCYX: Tensor, time_BT: Tensor, context_BSM: Tensor) -> Tensor:
        x_BCYX = self.residual(x_BCYX, time_BT)
        return x_BCYX if self.transformer is None else self.transformer(x_BCYX, context_BSM)


def _down_stages(config: UConfig) -> nn.ModuleList:
    """Return the stages of each level on the way down; the first of a level changes the number of channels."""
    levels, entering = nn.ModuleList(), config.channels[0]
    for level, width in enumerate(config.channels):
        inputs = (entering,) + (width,) * (config.layers - 1)
        levels.append(nn.ModuleList(Stage(i, width, level < config.lowest, config) for i in inputs))
        entering = width
    return levels


def _up_stages(config: UConfig) -> nn.ModuleList:
    """Return the stages of each level on the way up; each takes one skip, and the lowest level has one stage more."""
    levels, entering = nn.ModuleList(), config.channels[-1]
    for level, width in reversed(tuple(enumerate(config.channels))):
        inputs = (entering + width,) + (2 * width,) * (config.layers - 1)
        if level == config.lowest:
            inputs += (width + config.channels[level - 1],)
        levels.append(nn.ModuleList(Stage(i, width, level < config.lowest, config) for i in inputs))
        entering = width
    return levels


class UTransformer(nn.Module):
    """The whole U: `down` and `up` hold the stages of each level, in the order in which they run."""

    def __init__(self, config: UConfig) -> None:
        super().__init__()
        channels = config.channels
        self.lowest = config.lowest
        self.time = TimeEmbedding(config)
        self.entry = nn.Conv2d(config.inputs, channels[0], 3, padding=1)
        self.down = _down_stages(config)
        self.shrink = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for width in channels[:-1])
        self.middle_in = Stage(channels[-1], channels[-1], True, config)
        self.middle_out = Stage(channels[-1], channels[-1], False, config)
        self.up = _up_stages(config)
        self.enlarge = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for width in reversed(channels[1:]))
        self.exit_norm = nn.GroupNorm(config.groups, channels[0])
        self.exit = nn.Conv2d(channels[0], config.outputs, 3, padding=1)

    def forward(self, image_BCYX: Tensor, time_B: Tensor, context_BSM: Tensor) -> Tensor:
        time_BT = self.time(time_B)
        x_BCYX = self.entry(image_BCYX)
        skips: list[Tensor] = []
        for level, stages in enumerate(self.down):
            if level == self.lowest:
                skips.append(x_BCYX)
            for stage in cast(nn.ModuleList, stages):
                x_BCYX = stage(x_BCYX, time_BT, context_BSM)
                skips.append(x_BCYX)
            if level < self.lowest:
                x_BCYX = self.shrink[level](x_BCYX)
        x_BCYX = self.middle_out(self.middle_in(x_BCYX, time_BT, context_BSM), time_BT, context_BSM)
        for level, stages in enumerate(self.up):
            for stage in cast(nn.ModuleList, stages):
                x_BCYX = stage(torch.cat((x_BCYX, skips.pop()), dim=1), time_BT, context_BSM)
            if level < self.lowest:
                x_BCYX = self.enlarge[level](F.interpolate(x_BCYX, scale_factor=2.0, mode="nearest"))
        return self.exit(F.silu(self.exit_norm(x_BCYX)))


def denoising_batch(count: int, config: UConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return noisy images, diffusion times, context vectors, and the noise to predict."""
    return (
        torch.randn(count, config.inputs, config.image, config.image),
        torch.randint(1000, (count,)),
        torch.randn(count, config.context_length, config.context_width),
        torch.randn(count, config.outputs, config.image, config.image),
    )


_FULL = UConfig((672, 1344, 2688, 2688), image=32, layers=1, heads=8, groups=4, attention_groups=32)
_TINY = UConfig((8, 16, 32, 32), image=8, layers=1, heads=2, groups=2, attention_groups=4)

MODELS: dict[str, Entry] = {
    "u-transformer": Entry(
        model=partial(UTransformer, _FULL),
        data=partial(denoising_batch, config=_FULL),
        tiny_model=partial(UTransformer, _TINY),
        tiny_data=partial(denoising_batch, config=_TINY),
        batch_size=2048,
        tiny_batch_size=4,
        loss=F.mse_loss,
        source="AlpaComm, table 3 and section 5.2: 2.1 billion parameters; widths from Alpa's public U-Net suite",
    ),
}
