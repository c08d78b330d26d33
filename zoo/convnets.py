"""The plain convolutional networks: LeNet-5, AlexNet and VGG13, each a chain of convolutions and then dense layers.

Shapes: N batch, C channels, HW the image, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from zoo.images import image_entry
from zoo.workload import Entry


@dataclass(frozen=True, slots=True)
class LeNetConfig:
    convs: tuple[int, int] = (6, 16)
    dense: tuple[int, int] = (120, 84)
    channels: int = 1
    image: int = 32
    classes: int = 10


@dataclass(frozen=True, slots=True)
class AlexNetConfig:
    convs: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256)
    dense: tuple[int, int] = (4096, 4096)
    dropout: float = 0.5
    channels: int = 3
    image: int = 224
    classes: int = 1000


@dataclass(frozen=True, slots=True)
class VGGConfig:
    stages: tuple[tuple[int, ...], ...] = ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512))
    """Output channels of the 3x3 convolutions of each stage; every stage ends by halving the image."""
    dense: tuple[int, int] = (4096, 4096)
    dropout: float = 0.5
    channels: int = 3
    image: int = 224
    classes: int = 1000


class ConvNet(nn.Module):
    """Features, flattened, then a classifier."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, x_NCHW: Tensor) -> Tensor:
        logits_NK: Tensor = self.classifier(self.features(x_NCHW).flatten(1))
        return logits_NK


def _pooled(side: int, kernel: int, stride: int) -> int:
    return (side - kernel) // stride + 1


def lenet(config: LeNetConfig) -> ConvNet:
    """LeNet-5: two 5x5 convolutions, each followed by 2x2 pooling, then three dense layers."""
    first, second = config.convs
    features = nn.Sequential(
        nn.Conv2d(config.channels, first, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2),
    )  # fmt: skip
    side = ((config.image - 4) // 2 - 4) // 2
    hidden, last = config.dense
    classifier = nn.Sequential(
        nn.Linear(second * side * side, hidden), nn.ReLU(),
        nn.Linear(hidden, last), nn.ReLU(),
        nn.Linear(last, config.classes),
    )  # fmt: skip
    return ConvNet(features, classifier)


def alexnet(config: AlexNetConfig) -> ConvNet:
    """AlexNet in its single-tower form: five convolutions, three overlapping poolings, three dense layers."""
    c1, c2, c3, c4, c5 = config.convs
    features = nn.Sequential(
        nn.Conv2d(config.channels, c1, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        nn.Conv2d(c1, c2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        nn.Conv2d(c2, c3, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c3, c4, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c4, c5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2),
    )  # fmt: skip
    side = _pooled(config.image + 4, 11, 4)
    for _ in range(3):
        side = _pooled(side, 3, 2)
    hidden, last = config.dense
    classifier = nn.Sequential(
        nn.Dropout(config.dropout), nn.Linear(c5 * side * side, hidden), nn.ReLU(),
        nn.Dropout(config.dropout), nn.Linear(hidden, last), nn.ReLU(),
        nn.Linear(last, config.classes),
    )  # fmt: skip
    return ConvNet(features, classifier)


def vgg(config: VGGConfig) -> ConvNet:
    """VGG without batch normalisation: stages of 3x3 convolutions closed by 2x2 pooling, and three dense layers."""
    layers: list[nn.Module] = []
    channels = config.channels
    for stage in config.stages:
        for inputs, outputs in pairwise((channels, *stage)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = stage[-1]
    side = config.image // 2 ** len(config.stages)
    hidden, last = config.dense
    classifier = nn.Sequential(
        nn.Linear(channels * side * side, hidden), nn.ReLU(), nn.Dropout(config.dropout),
        nn.Linear(hidden, last), nn.ReLU(), nn.Dropout(config.dropout),
        nn.Linear(last, config.classes),
    )  # fmt: skip
    for layer in layers:
        # Ten convolutions without normalisation: the default initialisation would shrink the signal at each.
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return ConvNet(nn.Sequential(*layers), classifier)


TINY_LENET = LeNetConfig(convs=(4, 8), dense=(24, 16), image=20)
TINY_ALEXNET = AlexNetConfig(convs=(8, 16, 24, 16, 16), dense=(32, 32), image=96, classes=10)
TINY_VGG = VGGConfig(stages=((4, 4), (8, 8), (16, 16), (32, 32), (32, 32)), dense=(64, 64), image=64, classes=10)

MODELS: dict[str, Entry] = {
    "lenet": image_entry(
        lenet, (LeNetConfig(), TINY_LENET), batch_size=64,
        source="LeCun et al. 1998, Fig. 2 (with ReLU and max pooling); batch of FlexFlow, thesis 3.7.1",
    ),
    "alexnet": image_entry(
        alexnet, (AlexNetConfig(), TINY_ALEXNET), batch_size=256,
        source="Krizhevsky 2014, 'One weird trick', one tower; batch of FlexFlow, thesis 3.7.1",
    ),
    "vgg13": image_entry(
        vgg, (VGGConfig(), TINY_VGG), batch_size=8,
        source="Simonyan and Zisserman 2015, Table 1 column B; batch per node of AutoDDL 5.2.2",
    ),
}  # fmt: skip
