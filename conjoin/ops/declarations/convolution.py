"""Convolutions: windows over spatial dims, split with a halo; transposed ones, which spread instead."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from random import Random

from conjoin.ops.samples import Sample, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec

OUT, KERNEL = ("y", "x", "w"), ("r", "q", "p")
"""Names of up to three spatial positions and of the positions inside a window there."""


def each_dim(value: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    """One number for every spatial dim."""
    given = value if isinstance(value, tuple) else (value,)
    return given * dims if len(given) == 1 else given


def _padding(call: Call, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    """`same` padding puts the smaller half first."""
    padding = call["padding"]
    if isinstance(padding, str):
        return tuple(d * (k - 1) // 2 if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True))
    return each_dim(padding, len(kernel))


def _conv(call: Call) -> Indexed:
    """Spatial dims after batch and channel; groups are the slow part of both channel dims."""
    if call["transposed"]:
        return _conv_transpose(call)
    weight = call["weight"].shape
    dims = len(weight) - 2
    stride, dilation = each_dim(call["stride"], dims), each_dim(call["dilation"], dims)
    padding = _padding(call, weight[2:], dilation)
    windows = " ".join(f"{OUT[i]}*{stride[i]}+{KERNEL[i]}*{dilation[i]}-{padding[i]}" for i in range(dims))
    batch = "" if len(call["input"].shape) == dims + 1 else "n "
    out, kernel = " ".join(OUT[:dims]), " ".join(KERNEL[:dims])
    sizes: tuple[tuple[str, int], ...] = (("g", call["groups"]),)
    if call["padding"] == "same":
        sizes += tuple(zip(OUT, call["input"].shape[-dims:], strict=False))
    return Indexed(f"{batch}(g c) {windows}, (g o) c {kernel}, (g o) -> {batch}(g o) {out}", sizes)


def _conv_transpose(call: Call) -> Indexed:
    weight, shape = call["weight"].shape, call["input"].shape
    dims = len(weight) - 2
    attributes = ("stride", "padding", "output_padding", "dilation")
    stride, padding, extra, dilation = (each_dim(call[name], dims) for name in attributes)
    spreads = " ".join(f"({OUT[i]}-{KERNEL[i]}*{dilation[i]}+{padding[i]})/{stride[i]}" for i in range(dims))
    sizes = [("g", call["groups"])]
    for i, size in enumerate(shape[-dims:]):
        reach = dilation[i] * (weight[2 + i] - 1) + extra[i] + 1
        sizes.append((OUT[i], (size - 1) * stride[i] - 2 * padding[i] + reach))
    out, kernel = " ".join(OUT[:dims]), " ".join(KERNEL[:dims])
    batch = "" if len(shape) == dims + 1 else "n "
    return Indexed(f"{batch}(g c) {spreads}, (g c) o {kernel}, (g o) -> {batch}(g o) {out}", tuple(sizes))


def _conv_flops(call: Call, sizes: Mapping[str, int]) -> float:
    """Every output element meets every weight of its group once; transposed, every input element does."""
    weight = call["weight"]
    dims = len(weight.shape) - 2
    if call["transposed"] or "transpose" in call.op:
        return float(2 * sizes.get("n", 1) * prod(call["input"].shape[-dims:]) * weight.num_elements)
    return float(2 * sizes.get("n", 1) * prod(sizes[name] for name in OUT[:dims]) * weight.num_elements)


def _sample(dims: int, transposed: bool = False) -> Sample:
    def sample(rng: Random) -> Args:
        groups, c, o = rng.choice((1, 1, 2, 3)), rng.randint(1, 3), rng.randint(1, 3)
        kernel = tuple(rng.randint(1, 3) for _ in range(dims))
        stride = tuple(rng.randint(1, 3) for _ in range(dims))
        dilation = tuple(rng.randint(1, 2) for _ in range(dims))
        padding = tuple(rng.randint(0, d * (k - 1) // 2 + 1) for k, d in zip(kernel, dilation, strict=True))
        spatial = tuple(rng.randint(5, 9) for _ in range(dims))
        bias = rng.choice((real(groups * o), None))
        x = real(*rng.choice(((), (2,), (3,))), groups * c, *spatial)
        if transposed:
            extra = tuple(rng.randrange(s) for s in stride)
            return x, real(groups * c, o, *kernel), bias, stride, padding, extra, groups, dilation
        return x, real(groups * o, c, *kernel), bias, stride, padding, dilation, groups

    return sample


def _same_sample(dims: int) -> Sample:
    def sample(rng: Random) -> Args:
        kernel, dilation = tuple(rng.randint(1, 4) for _ in range(dims)), tuple(rng.randint(1, 2) for _ in range(dims))
        padding = rng.choice(("same", "valid"))
        return real(2, 4, *(8,) * dims), real(2, 2, *kernel), None, (1,) * dims, padding, dilation, 2

    return sample


def _general_sample(rng: Random) -> Args:
    """The one overload that all convolutions decompose to."""
    transposed = rng.random() < 0.5
    x, weight, bias, stride, padding, *rest = _sample(2, transposed)(rng)
    x = real(2, *x.shape[-3:])
    if transposed:
        extra, groups, dilation = rest
        return x, weight, bias, stride, padding, dilation, True, extra, groups
    dilation, groups = rest
    return x, weight, bias, stride, padding, dilation, False, (0, 0), groups


_conv_spec = partial(
    OpSpec, flops=_conv_flops, terms="input weight + bias", follows={"groups": "g"}, one_dtype=True, by_order=True,
    family="convolution",
)

OPS: tuple[OpSpec, ...] = (
    *(_conv_spec(f"conv{dims}d", _conv, _sample(dims)) for dims in (1, 2, 3)),
    *(_conv_spec(f"conv{dims}d.padding", _conv, _same_sample(dims)) for dims in (1, 2, 3)),
    _conv_spec("conv_transpose1d", _conv_transpose, _sample(1, True)),
    *(_conv_spec(f"conv_transpose{dims}d.input", _conv_transpose, _sample(dims, True)) for dims in (2, 3)),
    _conv_spec("convolution", _conv, _general_sample),
)
