"""Calls of the operators that people use at sizes over the whole range, drawn from no model: what curves rest on.

Every function below is applied to parameters of its own, on the meta device, and captured: so the calls are those that
a model would make, with their casts and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import log2
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = tuple(2**power for power in (14, 17, 20, 22, 24, 26, 28))
"""Elements of what functions of single elements are applied to."""

IN_EIGHT_BITS = tuple(
    (rows, inner, outer)
    for rows in (1024, 4096, 16384)
    for inner, outer in ((1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096), (8192, 8192))
)
"""Rows and widths of layers that no model is written with: plans make them of others."""
_IMAGE_RANK, _JUDGED = 4, 64

Shape = tuple[int, ...]


class Case(NamedTuple):
    """A function and the shapes of what it is applied to."""

    function: Callable[..., Tensor]
    shapes: tuple[Shape, ...]


def sweep() -> Iterator[Case]:
    """All cases."""
    parts = (
        _elementwise, _movement, _reductions, _norms, _products, _convolutions, _attention, _lookups,
        _drawn_convolutions, _channels_last, _dilated, _narrow, _factored, _scattered, _channels_last_beside, _resized,
        _across, _films, _odd,
    )  # fmt: skip
    for part in parts:
        yield from part()


def _elementwise() -> Iterator[Case]:
    unary: tuple[Callable[[Tensor], Tensor], ...] = (
        F.relu, F.gelu, F.silu, F.hardswish, F.hardsigmoid, F.leaky_relu, F.relu6, torch.sigmoid, torch.tanh, torch.exp,
        torch.log, torch.sqrt, torch.rsqrt, torch.square, torch.neg, torch.abs, torch.sin, torch.cos, F.softplus, F.elu,
        lambda x: F.gelu(x, approximate="tanh"), lambda x: x**3, lambda x: F.dropout(x, 0.1), lambda x: x * 0.5,
        lambda x: x + 1.0, lambda x: x / 8.0, lambda x: x.clamp(min=-1.0), lambda x: x.float(), lambda x: x.bfloat16(),
        lambda x: x.masked_fill(x > 0, 0.0),
    )  # fmt: skip
    binary: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        torch.add, torch.sub, torch.mul, torch.div, torch.maximum, lambda x, y: torch.where(x > 0, x, y),
    )  # fmt: skip
    for size in SIZES:
        x = (size // 1024, 1024)
        yield from (Case(function, (x,)) for function in unary)
        yield from (Case(function, (x, x)) for function in binary)
        for function in binary[:3]:
            yield Case(function, (x, (1024,)))
            yield Case(function, (x, (size // 1024, 1)))
            yield Case(function, ((size // 2**12, 64, 8, 8), (64, 1, 1)))


def _movement() -> Iterator[Case]:
    for size in SIZES:
        x = (size // 1024, 1024)
        heads = (size // 2**14, 16, 16, 64)
        yield Case(lambda x: x.clone(), (x,))
        yield Case(lambda x: x.transpose(1, 2).contiguous(), (heads,))
        yield Case(lambda x, y: torch.cat((x, y), -1), (x, x))
        yield Case(lambda x, y: torch.cat((x, y), 0), (x, x))
        yield Case(lambda x: torch.stack(x.chunk(2, -1)), (x,))
        yield Case(lambda x: F.pad(x, (1, 1)), (x,))
        yield Case(lambda x: torch.roll(x, (3, 3), (1, 2)), (heads,))
        yield Case(lambda x: x.tril(), (x,))
        yield Case(lambda x: x.flip(0), (x,))
        yield Case(lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), ((size // 2**12, 16, 16, 16),))
        yield Case(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), ((size // 2**12, 16, 16, 16),))


def _reductions() -> Iterator[Case]:
    for size in SIZES:
        for width in (64, 1024, 32768):
            x = (size // width, width)
            if not size // width:
                continue
            for over in (-1, 0):
                yield Case(lambda x, over=over: x.sum(over), (x,))
                yield Case(lambda x, over=over: x.mean(over), (x,))
            yield Case(lambda x: x.amax(-1), (x,))
            yield Case(lambda x: x.softmax(-1), (x,))
            yield Case(lambda x: x.softmax(-1, dtype=torch.float32), (x,))
            yield Case(lambda x: x.log_softmax(-1), (x,))
            yield Case(lambda x: x.cumsum(-1), (x,))
            if width > 64:
                yield Case(lambda x: F.cross_entropy(x, _rows(x.shape[0], x)), (x,))
        yield Case(lambda x: x.mean((2, 3)), ((size // 2**12, 64, 8, 8),))
        yield Case(torch.sum, ((size // 1024, 1024),))
        yield Case(lambda x, y: F.mse_loss(x, y), ((size // 1024, 1024),) * 2)
        for pixels in (14, 56):
            x4 = (max(1, size // (64 * pixels**2)), 64, pixels, pixels)
            yield Case(lambda x: F.max_pool2d(x, 3, 2, 1), (x4,))
            yield Case(lambda x: F.max_pool2d(x, 2, 2), (x4,))
            yield Case(lambda x: F.avg_pool2d(x, 2, 2), (x4,))
            yield Case(lambda x: F.adaptive_avg_pool2d(x, 1), (x4,))


def _norms() -> Iterator[Case]:
    for size in SIZES:
        for width in (96, 256, 1024, 4096):
            x = (max(1, size // width), width)
            yield Case(lambda x, w, b: F.layer_norm(x, w.shape, w, b), (x, (width,), (width,)))
            yield Case(lambda x, w: F.rms_norm(x, w.shape, w), (x, (width,)))
        yield Case(lambda x, w, b: F.group_norm(x, 8, w, b), ((size // 2**12, 64, 8, 8), (64,), (64,)))
    stages = (
        (16, 112), (32, 112), (64, 56), (96, 56), (128, 28), (256, 56), (256, 28), (512, 28), (512, 14), (1024, 14),
        (2048, 7),
    )  # fmt: skip
    for channels, pixels in stages:
        for batch in (8, 32, 128):
            yield Case(_batch_norm, ((batch, channels, pixels, pixels), (channels,), (channels,)))


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, variance = torch.zeros_like(weight, dtype=x.dtype), torch.ones_like(weight, dtype=x.dtype)
    return F.batch_norm(x, mean.detach(), variance.detach(), weight, bias, training=True)


def _products() -> Iterator[Case]:
    layers = (256, 1024), (768, 768), (768, 3072), (1024, 1024), (2048, 2048), (384, 1536), (4096, 4096)
    for rows in (128, 1024, 4096, 16384):
        for inner, outer in layers:
            yield Case(F.linear, ((rows, inner), (outer, inner), (outer,)))
            yield Case(F.linear, ((rows, inner), (outer, inner)))
    for rows in (512, 4096):
        for outer in (1000, 30522, 32000, 50257, 50304, 151936):
            yield Case(F.linear, ((rows, 1024), (outer, 1024)))
    for count in (16, 128, 512):
        for length in (64, 128, 512, 1024):
            for width in (32, 64, 128):
                if count * length**2 <= 2**28:
                    scores, values = (count, length, length), (count, length, width)
                    yield Case(torch.matmul, (scores, values))
                    yield Case(lambda x, y: x @ y.transpose(1, 2), (values, values))


def _conv(kernel: int, stride: int = 1, groups: int = 1, padding: int | None = None) -> Callable[..., Tensor]:
    pad = kernel // 2 if padding is None else padding
    return lambda x, w: F.conv2d(x, w, None, stride, pad, 1, groups)


def _convolutions() -> Iterator[Case]:
    stages = ((32, 112), (64, 56), (96, 56), (128, 28), (192, 28), (256, 14), (384, 14), (512, 14), (768, 7), (960, 7))
    for batch in (16, 64):
        for channels, pixels in stages:
            yield from _stage((batch, channels, pixels, pixels))
        for kernel, stride, outer in ((3, 2, 32), (7, 2, 64), (4, 4, 96), (16, 16, 768)):
            stem = _conv(kernel, stride, padding=0 if stride == kernel else None)
            yield Case(stem, ((batch, 3, 224, 224), (outer, 3, kernel, kernel)))
        for width, length in ((80, 750), (80, 3000), (512, 750), (512, 3000)):
            yield Case(lambda x, w: F.conv1d(x, w, None, 1, 1), ((batch, width, length), (512, width, 3)))
        for channels, pixels in ((64, 28), (128, 14), (256, 7)):
            shapes = (batch // 8, channels, 8, 2 * pixels, 2 * pixels), (channels, channels, 3, 3, 3)
            yield Case(lambda x, w: F.conv3d(x, w, None, 1, 1), shapes)
        yield Case(lambda x, w: F.conv_transpose2d(x, w, None, 2), ((batch, 64, 28, 28), (64, 32, 2, 2)))


def _stage(x: Shape) -> Iterator[Case]:
    """What networks have at one resolution: depthwise, grouped, pointwise and whole."""
    channels = x[1]
    for kernel, stride in ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1)):
        yield Case(_conv(kernel, stride, channels), (x, (channels, 1, kernel, kernel)))
    for width in (8, 32, 64):
        if channels % width == 0 and channels > width:
            yield Case(_conv(3, 1, channels // width), (x, (channels, width, 3, 3)))
    for outer in (channels // 4, channels, 4 * channels):
        yield Case(_conv(1), (x, (outer, channels, 1, 1)))
    yield Case(_conv(1, 2), (x, (2 * channels, channels, 1, 1)))
    yield Case(_conv(3), (x, (channels, channels, 3, 3)))
    yield Case(_conv(3, 2), (x, (2 * channels, channels, 3, 3)))


def _drawn_convolutions() -> Iterator[Case]:
    """Convolutions of any widths and batches: which kernel runs hangs on more than their size."""
    rng = Random(0)

    def width(least: int, most: int) -> int:
        return 8 * round(2 ** rng.uniform(log2(least / 8), log2(most / 8)))

    for _ in range(300):
        batch, pixels = rng.choice((16, 32, 64, 128, 256)), rng.choice((7, 8, 13, 14, 16, 27, 28, 32, 56, 64, 112))
        inner, outer = width(8, 1536), width(8, 1536)
        if batch * max(inner, outer) * pixels**2 > 2**27:
            continue
        x = (batch, inner, pixels, pixels)
        yield Case(_conv(1), (x, (outer, inner, 1, 1)))
        kernel, stride = rng.choice(((3, 1), (3, 1), (3, 2), (5, 1), (7, 1))), rng.choice((1, 1, 2))
        yield Case(_conv(kernel[0], stride, inner), (x, (inner, 1, kernel[0], kernel[0])))
        group = rng.choice((4, 8, 16, 24, 32, 40, 48, 56, 64, 112, 128))
        groups = rng.choice((2, 4, 8, 16, 32))
        if batch * group * groups * pixels**2 <= 2**26:
            wide = (batch, group * groups, pixels, pixels)
            yield Case(_conv(3, stride, groups), (wide, (group * groups, group, 3, 3)))
        if inner * outer <= 2**18:
            yield Case(_conv(3, kernel[1]), (x, (outer, inner, 3, 3)))


def _spread(kernel: int, dilation: int, groups: int = 1) -> Callable[..., Tensor]:
    return lambda x, w: F.conv2d(x, w, None, 1, dilation * (kernel // 2), dilation, groups)


def _dilated() -> Iterator[Case]:
    """Convolutions whose windows have gaps, as networks that label every pixel or sample have."""
    rng = Random(1)
    for _ in range(56):
        batch, pixels = rng.choice((4, 6, 12, 24)), rng.choice((14, 24, 28, 33, 40, 48, 65))
        inner, outer = (rng.choice((48, 64, 96, 128, 192, 256, 320, 512, 768, 1024, 2048)) for _ in range(2))
        dilation = rng.choice((2, 2, 3, 4, 6, 12, 18))
        if inner * outer <= 2**20 and batch * max(inner, outer) * pixels**2 <= 2**26:
            x = (batch, inner, pixels, pixels)
            yield Case(_spread(3, dilation), (x, (outer, inner, 3, 3)))
            kernel = rng.choice((3, 3, 5))
            yield Case(_spread(kernel, dilation, inner), (x, (inner, 1, kernel, kernel)))
    for width, length, dilation in product((64, 256), (500, 2000), (2, 8, 64)):
        yield Case(
            lambda x, w, d=dilation: F.conv1d(x, w, None, 1, d, d), ((12, width, length), (width, width, 3))
        )


def _narrow() -> Iterator[Case]:
    """Convolutions to few channels, as networks have whose layers all add some to what those before them made."""
    rng = Random(2)
    for _ in range(48):
        batch, pixels = rng.choice((12, 24, 48, 96)), rng.choice((8, 14, 28, 48, 56))
        inner, outer = 16 * rng.choice((2, 3, 4, 6, 8, 10, 12, 16)), 8 * rng.choice((1, 2, 3, 4, 5, 6))
        yield Case(_conv(3), ((batch, inner, pixels, pixels), (outer, inner, 3, 3)))
        wide = 16 * rng.choice((5, 7, 9, 11, 14, 18, 24, 34, 44, 60))
        yield Case(_conv(1), ((batch, wide, pixels, pixels), (inner, wide, 1, 1)))


def _factored() -> Iterator[Case]:
    """Convolutions of films along space, and along time."""
    for channels, frames, pixels in ((64, 8, 56), (96, 16, 28), (192, 8, 28), (256, 4, 14), (480, 8, 14)):
        for outer, kernel in product((channels, 2 * channels), ((1, 3, 3), (3, 1, 1))):
            pad = tuple(n // 2 for n in kernel)
            shapes = (4, channels, frames, pixels, pixels), (outer, channels, *kernel)
            yield Case(lambda x, w, pad=pad: F.conv3d(x, w, None, 1, pad), shapes)


def _films() -> Iterator[Case]:
    """Convolutions of films at any widths, whole, along space or along time, and of each channel alone."""
    rng = Random(4)
    kernels = (1, 3, 3), (3, 1, 1), (1, 1, 1), (3, 3, 3), (1, 7, 7)
    for _ in range(44):
        batch, frames, pixels = rng.choice((2, 4, 6, 12)), rng.choice((2, 4, 8, 16)), rng.choice((7, 14, 28, 56, 112))
        inner, outer = (round(2 ** rng.uniform(3, 9.5)) for _ in range(2))
        if batch * frames * pixels**2 * max(inner, outer) > 2**26:
            continue
        x, kernel = (batch, inner, frames, pixels, pixels), rng.choice(kernels)
        stride = rng.choice(((1, 1, 1), (1, 2, 2), (2, 1, 1) if kernel[0] > 1 else (1, 1, 1)))
        yield Case(_over_film(kernel, stride), (x, (outer, inner, *kernel)))
        alone = _over_film((3, 3, 3), rng.choice(((1, 1, 1), (1, 2, 2), (1, 4, 4))), inner)
        yield Case(alone, (x, (inner, 1, 3, 3, 3)))
    for batch, outer, pixels in ((4, 24, 112), (2, 64, 112), (6, 45, 224)):
        yield Case(_over_film((1, 7, 7), (1, 2, 2)), ((batch, 3, 8, pixels, pixels), (outer, 3, 1, 7, 7)))


def _over_film(kernel: Shape, stride: Shape, groups: int = 1) -> Callable[..., Tensor]:
    pad = tuple(n // 2 for n in kernel)
    return lambda x, w: F.conv3d(x, w, None, stride, pad, 1, groups)


def _odd() -> Iterator[Case]:
    """Products whose rows or widths no power of two divides, as windows, patches and a token of classes make them."""
    rng = Random(5)
    for _ in range(40):
        rows, inner, outer = (rng.randint(2**low, 2**high) for low, high in ((8, 15), (6, 12), (6, 12)))
        inner, outer = (8 * (size // 8) if rng.random() < 0.7 else size for size in (inner, outer))
        yield Case(F.linear, ((rows, inner), (outer, inner), (outer,)))
    for _ in range(30):
        count, queries, keys = rng.randint(8, 400), rng.randint(17, 1600), rng.randint(17, 800)
        width = rng.choice((32, 64, 96, 128))
        if count * queries * keys <= 2**27:
            yield Case(torch.matmul, ((count, queries, keys), (count, keys, width)))
            yield Case(lambda x, y: x @ y.transpose(1, 2), ((count, queries, width), (count, keys, width)))


def _scattered() -> Iterator[Case]:
    """What is picked out by an index for every element, norms of parts, and copies side by side."""
    for size in SIZES:
        x = (size // 1024, 1024)
        yield Case(lambda x: x.gather(-1, torch.zeros(x.shape, dtype=torch.long, device=x.device)), (x,))
        yield Case(lambda x: torch.linalg.vector_norm(x, 2, -1, keepdim=True), (x,))
        yield Case(lambda x: torch.linalg.vector_norm(x, 2, (1, 2), keepdim=True), ((size // 2**14, 16, 16, 64),))
        yield Case(lambda x: x.repeat(2, 1), (x,))
        yield Case(F.hardtanh, (x,))


def _channels_last() -> Iterator[Case]:
    """Convolutions of images whose channels lie last: of every second case above but those of 64 images, which is the
    batch of the models that predictions are judged by.
    """

    every = [*_convolutions(), *_drawn_convolutions()]
    for case in [case for case in every if len(case.shapes[0]) == _IMAGE_RANK and case.shapes[0][0] != _JUDGED][::2]:
        yield Case(_turned(case.function), case.shapes)
    for batch, channels, pixels in ((16, 80, 56), (32, 128, 56), (128, 160, 28), (32, 320, 14), (16, 512, 14)):
        x = (batch, channels, pixels, pixels)
        yield Case(_turned(_conv(2, 2, padding=0)), (x, (2 * channels, channels, 2, 2)))
        yield Case(_turned(_conv(7, 1, channels)), (x, (channels, 1, 7, 7)))


def _turned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of images whose channels lie last."""
    return lambda x, *more: function(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), *more)


def _channels_last_beside() -> Iterator[Case]:
    """What stands between convolutions, of such images: norms and pools."""
    stages = ((16, 112), (32, 112), (64, 112), (64, 56), (128, 28), (256, 56), (512, 28), (1024, 14), (2048, 7))
    for channels, pixels in stages:
        for batch in (8, 32, 128):
            x = (batch, channels, pixels, pixels)
            yield Case(_turned(_batch_norm), (x, (channels,), (channels,)))
            yield Case(_turned(lambda x: F.max_pool2d(x, 3, 2, 1)), (x,))
            yield Case(_turned(lambda x: F.avg_pool2d(x, 2, 2)), (x,))
            yield Case(_turned(lambda x: F.adaptive_avg_pool2d(x, 1)), (x,))


def _resized() -> Iterator[Case]:
    """Smooth upsampling: what it takes hangs on the pixels that it makes, and back on how many are made of one."""
    rng = Random(3)
    for _ in range(48):
        batch, channels = rng.choice((2, 4, 12, 24)), rng.choice((16, 21, 64, 150, 256, 512))
        pixels, factor = rng.choice((7, 12, 16, 28, 32, 64, 80, 128)), rng.choice((2, 2, 4, 8, 16))
        if batch * channels * (pixels * factor) ** 2 <= 2**26:
            size = (pixels * factor,) * 2

            def function(x: Tensor, size: tuple[int, int] = size) -> Tensor:
                return F.interpolate(x, size, mode="bilinear")

            shape = (batch, channels, pixels, pixels)
            yield Case(function, (shape,))


def _across() -> Iterator[Case]:
    """Classes of pixels: what is taken over a dim that is not the last."""
    for batch, classes, pixels in (
        (16, 10, 64), (4, 1000, 32), (4, 21, 128), (2, 64, 256), (8, 19, 256), (2, 2, 512), (4, 150, 256), (4, 32, 512),
    ):  # fmt: skip
        x = (batch, classes, pixels, pixels)
        yield Case(lambda x: F.cross_entropy(x, x.new_zeros((x.shape[0], *x.shape[2:]), dtype=torch.long)), (x,))
        yield Case(lambda x: x.softmax(1), (x,))
        yield Case(lambda x: x.log_softmax(1), (x,))


def _attention() -> Iterator[Case]:
    def attend(
        causal: bool, dropout: float = 0.0, masked: bool = False, grouped: bool = False
    ) -> Callable[..., Tensor]:
        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = torch.zeros(1, 1, q.shape[2], k.shape[2], dtype=q.dtype, device=q.device) if masked else None
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=grouped)

        return function

    for length in (128, 256, 512, 1024, 2048, 4096, 8192):
        count = max(1, 8192 // length)
        for width in (32, 64, 80, 96, 128, 256):
            shapes = ((count, 16, length, width),) * 3
            if length <= 2048 or width in (64, 128):
                yield from (Case(attend(causal), shapes) for causal in (False, True))
            if width == 64 and length <= 2048:
                yield Case(attend(False, 0.1), shapes)
                yield Case(attend(True, 0.1), shapes)
                yield Case(attend(False, masked=True), shapes)
            if width in (64, 128) and length <= 2048:
                fewer = (count, 4, length, width)
                yield Case(attend(True, grouped=True), (shapes[0], fewer, fewer))
    for length in (16384, 32768, 65536):
        for width in (64, 128):
            yield from (Case(attend(causal), ((1, 8, length, width),) * 3) for causal in (False, True))
            yield Case(attend(True, grouped=True), ((1, 8, length, width), *((1, 2, length, width),) * 2))


def _lookups() -> Iterator[Case]:
    for rows in (512, 4096, 32768):
        for words, width in ((30000, 768), (50000, 1024), (150000, 1024)):
            yield Case(lambda w, rows=rows: F.embedding(_rows(rows, w), w), ((words, width),))
            yield Case(lambda x, rows=rows: x.index_select(0, _rows(rows, x)), ((words, width),))


def _rows(count: int, like: Tensor) -> Tensor:
    return torch.zeros(count, dtype=torch.long, device=like.device)


class Swept(nn.Module):
    """Some cases as one model in a dtype: every function of parameters of its own, and the sum of all."""

    def __init__(self, cases: list[Case], dtype: torch.dtype) -> None:
        super().__init__()
        self.cases = cases
        self.of_case = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in case.shapes)
            for case in cases
        )

    def forward(self, factor: Tensor) -> Tensor:
        made = (case.function(*given) for case, given in zip(self.cases, self.of_case, strict=True))
        return factor * torch.stack([x.sum().float() for x in made]).sum()
