"""Inception-v3: parallel branches of factorised convolutions, concatenated, with an auxiliary classifier in training.

The modules are numbered by the figures of Szegedy et al. 2016: A is Figure 5, C is Figure 6, E is Figure 7, and B and D
are the grid reductions of Figure 10.  Channel counts in this file are the published ones; `chain` divides them all by
`width_divisor`.  Shapes: N batch, C channels, HW the image, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.images import image_entry
from zoo.workload import Entry

AUX_WEIGHT = 0.4
"""Weight of the auxiliary loss, as in the released training code; section 4 of the paper gives no number."""
BN_EPS = 1e-3


@dataclass(frozen=True, slots=True)
class InceptionConfig:
    a_pools: tuple[int, ...] = (32, 64, 64)
    """Channels of the pooling branch of each module A."""
    c_widths: tuple[int, ...] = (128, 160, 160, 192)
    """Inner channels of each module C."""
    num_e: int = 2
    width_divisor: int = 1
    aux_pool: tuple[int, int] = (5, 3)
    """Kernel and stride of the pooling before the auxiliary classifier."""
    aux_kernel: int = 5
    dropout: float = 0.5
    channels: int = 3
    image: int = 299
    classes: int = 1000


@dataclass(frozen=True, slots=True)
class Conv:
    """One convolution of a chain: published channels, (height, width) of the kernel, stride, whether it pads."""

    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    same: bool = True


THREE, FIVE, ROW, COLUMN = (3, 3), (5, 5), (1, 7), (7, 1)


class Branches(nn.Module):
    """Apply several branches to the same input and concatenate their channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return torch.cat([branch(x_NCHW) for branch in self.branches], dim=1)


def chain(inputs: int, divisor: int, *convs: Conv) -> nn.Sequential:
    """Convolution, batch normalisation and ReLU for each entry of `convs`; `inputs` is an actual channel count."""
    layers: list[nn.Module] = []
    for conv in convs:
        outputs = conv.channels // divisor
        height, width = conv.kernel
        padding = (height // 2, width // 2) if conv.same else (0, 0)
        layers += [
            nn.Conv2d(inputs, outputs, conv.kernel, stride=conv.stride, padding=padding, bias=False),
            nn.BatchNorm2d(outputs, eps=BN_EPS),
            nn.ReLU(),
        ]
        inputs = outputs
    return nn.Sequential(*layers)


def pool_branch(inputs: int, divisor: int, channels: int) -> nn.Sequential:
    """The branch that averages before its 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), *chain(inputs, divisor, Conv(channels)))


def module_a(inputs: int, d: int, pool: int) -> Branches:
    """Figure 5: 224 + pool channels out; a 5x5 convolution stays beside the pair of 3x3, as in the released model."""
    return Branches(
        chain(inputs, d, Conv(64)),
        chain(inputs, d, Conv(48), Conv(64, FIVE)),
        chain(inputs, d, Conv(64), Conv(96, THREE), Conv(96, THREE)),
        pool_branch(inputs, d, pool),
    )


def module_b(inputs: int, d: int) -> Branches:
    """Figure 10: halve the grid; inputs + 480 channels out."""
    return Branches(
        chain(inputs, d, Conv(384, THREE, stride=2, same=False)),
        chain(inputs, d, Conv(64), Conv(96, THREE), Conv(96, THREE, stride=2, same=False)),
        nn.MaxPool2d(3, stride=2),
    )


def module_c(inputs: int, d: int, c: int) -> Branches:
    """Figure 6 with n = 7: 768 channels out."""
    return Branches(
        chain(inputs, d, Conv(192)),
        chain(inputs, d, Conv(c), Conv(c, ROW), Conv(192, COLUMN)),
        chain(inputs, d, Conv(c), Conv(c, COLUMN), Conv(c, ROW), Conv(c, COLUMN), Conv(192, ROW)),
        pool_branch(inputs, d, 192),
    )


def module_d(inputs: int, d: int) -> Branches:
    """Halve the grid again: inputs + 512 channels out."""
    last = Conv(192, THREE, stride=2, same=False)
    return Branches(
        chain(inputs, d, Conv(192), Conv(320, THREE, stride=2, same=False)),
        chain(inputs, d, Conv(192), Conv(192, ROW), Conv(192, COLUMN), last),
        nn.MaxPool2d(3, stride=2),
    )


def module_e(inputs: int, d: int) -> Branches:
    """Figure 7, the expanded filter bank: 2048 channels out."""

    def fan_out() -> Branches:
        return Branches(chain(384 // d, d, Conv(384, (1, 3))), chain(384 // d, d, Conv(384, (3, 1))))

    return Branches(
        chain(inputs, d, Conv(320)),
        nn.Sequential(*chain(inputs, d, Conv(384)), fan_out()),
        nn.Sequential(*chain(inputs, d, Conv(448), Conv(384, THREE)), fan_out()),
        pool_branch(inputs, d, 192),
    )


def _stem(config: InceptionConfig) -> nn.Sequential:
    d = config.width_divisor
    first = (Conv(32, THREE, stride=2, same=False), Conv(32, THREE, same=False), Conv(64, THREE))
    return nn.Sequential(
        *chain(config.channels, d, *first), nn.MaxPool2d(3, stride=2),
        *chain(64 // d, d, Conv(80), Conv(192, THREE, same=False)), nn.MaxPool2d(3, stride=2),
    )  # fmt: skip


def _auxiliary(config: InceptionConfig, inputs: int) -> nn.Sequential:
    d, (kernel, stride) = config.width_divisor, config.aux_pool
    last = Conv(768, (config.aux_kernel, config.aux_kernel), same=False)
    return nn.Sequential(
        nn.AvgPool2d(kernel, stride=stride), *chain(inputs, d, Conv(128), last),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768 // d, config.classes),
    )  # fmt: skip


class InceptionV3(nn.Module):
    """Returns (logits, auxiliary logits) in training mode and logits alone in evaluation mode."""

    def __init__(self, config: InceptionConfig) -> None:
        super().__init__()
        d, channels = config.width_divisor, 192 // config.width_divisor
        body: list[nn.Module] = [_stem(config)]
        for pool in config.a_pools:
            body.append(module_a(channels, d, pool))
            channels = (224 + pool) // d
        body.append(module_b(channels, d))
        channels += 480 // d
        for width in config.c_widths:
            body.append(module_c(channels, d, width))
            channels = 768 // d
        self.body = nn.Sequential(*body)
        self.auxiliary = _auxiliary(config, channels)
        top: list[nn.Module] = [module_d(channels, d)]
        channels += 512 // d
        for _ in range(config.num_e):
            top.append(module_e(channels, d))
            channels = 2048 // d
        self.top = nn.Sequential(*top)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(config.dropout), nn.Linear(channels, config.classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x_NCHW: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h_NCHW = self.body(x_NCHW)
        logits_NK: Tensor = self.classifier(self.top(h_NCHW))
        return (logits_NK, self.auxiliary(h_NCHW)) if self.training else logits_NK


def inception_loss(output: Tensor | tuple[Tensor, Tensor], target_N: Tensor) -> Tensor:
    """Cross entropy of the logits, plus in training 0.4 of that of the auxiliary logits."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output, target_N)
    logits_NK, aux_NK = output
    return F.cross_entropy(logits_NK, target_N) + AUX_WEIGHT * F.cross_entropy(aux_NK, target_N)


TINY = InceptionConfig(
    a_pools=(32,), c_widths=(128,), num_e=1, width_divisor=8,
    aux_pool=(3, 1), aux_kernel=3, image=107, classes=10,
)  # fmt: skip

MODELS: dict[str, Entry] = {
    "inception-v3": image_entry(
        InceptionV3, (InceptionConfig(), TINY), batch_size=64, loss=inception_loss,
        source="Szegedy et al. 2016, Table 1 and the released model; batch of FlexFlow, thesis 3.7.1, and Unity 6.1",
    ),
}  # fmt: skip
