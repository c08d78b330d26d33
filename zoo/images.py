"""What the image classifiers share: synthetic labelled images, and how to make a catalogue row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.workload import Batch, Entry

TINY_BATCH_SIZE = 4


class ImageConfig(Protocol):
    """What a classifier's configuration says about its data: square images in, one of `classes` labels out."""

    @property
    def channels(self) -> int: ...
    @property
    def image(self) -> int: ...
    @property
    def classes(self) -> int: ...


Config = TypeVar("Config", bound=ImageConfig)


def labelled_images(config: ImageConfig, n: int) -> Batch:
    """Random images of shape (n, channels, image, image) and their n random labels."""
    x_NCHW = torch.randn(n, config.channels, config.image, config.image)
    return x_NCHW, torch.randint(config.classes, (n,))


def image_entry(
    model: Callable[[Config], nn.Module],
    sizes: tuple[Config, Config],
    *,
    batch_size: int,
    source: str,
    loss: Callable[..., Tensor] = F.cross_entropy,
) -> Entry:
    """A catalogue row for the classifier `model`, given its (published, tiny) configurations."""
    full, tiny = sizes
    return Entry(
        model=partial(model, full),
        data=partial(labelled_images, full),
        tiny_model=partial(model, tiny),
        tiny_data=partial(labelled_images, tiny),
        batch_size=batch_size,
        tiny_batch_size=TINY_BATCH_SIZE,
        loss=loss,
        source=source,
    )
