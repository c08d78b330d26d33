"""Residual networks of bottleneck blocks: ResNet-50, ResNet-101, and ResNeXt-50 with its grouped convolutions.

Shapes: N batch, C channels, HW the image, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zoo.images import image_entry
from zoo.workload import Entry

EXPANSION = 4
"""A bottleneck block of ResNet puts out four times the channels of its 3x3 convolution (He et al. 2016, Table 1)."""


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    blocks: tuple[int, ...]
    """Bottleneck blocks in each stage; each stage after the first halves the image and doubles the channels."""
    groups: int = 1
    group_width: int = 64
    """Channels of one group of the 3x3 convolutions in the first stage."""
    stem: int = 64
    channels: int = 3
    image: int = 224
    classes: int = 1000


class Bottleneck(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions beside a shortcut, which is a projection only where the shape changes."""

    def __init__(self, inputs: int, width: int, outputs: int, *, groups: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, groups=groups, bias=False),
            nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y_NCHW: Tensor = self.relu(self.branch(x_NCHW) + self.shortcut(x_NCHW))
        return y_NCHW


class ResNet(nn.Module):
    """A strided 7x7 stem, stages of bottleneck blocks, global average pooling and one dense layer."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(config.channels, config.stem, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(config.stem), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        inputs = config.stem
        stages: list[nn.Module] = []
        for index in range(len(config.blocks)):
            outputs = EXPANSION * config.stem * 2**index
            stages.append(_stage(config, index, inputs, outputs))
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_NCHW: Tensor) -> Tensor:
        features_NC = self.pool(self.stages(self.stem(x_NCHW))).flatten(1)
        logits_NK: Tensor = self.classifier(features_NC)
        return logits_NK


def _stage(config: ResNetConfig, index: int, inputs: int, outputs: int) -> nn.Sequential:
    width = config.groups * config.group_width * 2**index
    strides = (1 if index == 0 else 2, *[1] * (config.blocks[index] - 1))
    return nn.Sequential(
        *[
            Bottleneck(inputs if place == 0 else outputs, width, outputs, groups=config.groups, stride=stride)
            for place, stride in enumerate(strides)
        ]
    )


RESNET_50 = ResNetConfig(blocks=(3, 4, 6, 3))
RESNET_101 = ResNetConfig(blocks=(3, 4, 23, 3))
RESNEXT_50 = ResNetConfig(blocks=(3, 4, 6, 3), groups=32, group_width=4)

TINY_RESNET_50 = ResNetConfig(blocks=(1, 2, 2, 1), group_width=8, stem=8, image=64, classes=10)
TINY_RESNET_101 = ResNetConfig(blocks=(1, 2, 4, 1), group_width=8, stem=8, image=64, classes=10)
TINY_RESNEXT_50 = ResNetConfig(blocks=(1, 2, 2, 1), groups=8, group_width=2, stem=8, image=64, classes=10)

MODELS: dict[str, Entry] = {
    "resnet-50": image_entry(
        ResNet, (RESNET_50, TINY_RESNET_50), batch_size=64,
        source="He et al. 2016, Table 1 (stride on the 3x3 convolution)",
    ),
    "resnet-101": image_entry(
        ResNet, (RESNET_101, TINY_RESNET_101), batch_size=64,
        source="He et al. 2016, Table 1 (stride on the 3x3 convolution); batch of FlexFlow, thesis 3.7.1",
    ),
    "resnext-50": image_entry(
        ResNet, (RESNEXT_50, TINY_RESNEXT_50), batch_size=64,
        source="Xie et al. 2017, Table 1, 32x4d; batch of Unity 6.1",
    ),
}  # fmt: skip
