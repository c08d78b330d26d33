"""Images read at other places: upsampling, grids, pixel shuffles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from random import Random
from typing import Any

from conjoin.ops.local import LocalForm, local_sizes
from conjoin.ops.notation import NotationError
from conjoin.ops.samples import Sample, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def _upsample(call: Call) -> Indexed:
    """Spatial dims are whole: where they are read from depends on both sizes."""
    shape = call.tensors[0].shape
    size = call["output_size"] or tuple(int(n * f) for n, f in zip(shape[2:], call["scale_factors"], strict=True))
    left = " ".join(f"s{i}!" for i in range(len(size)))
    right = " ".join(f"t{i}!" for i in range(len(size)))
    return Indexed(f"n c {left} -> n c {right}", tuple((f"t{i}", n) for i, n in enumerate(size)))


def _vec_sample(dims: int, *corners: bool) -> Sample:
    """Scale factors or a size; `corners` where the overload asks how corners align."""

    def sample(rng: Random) -> Args:
        x = real(rng.randint(1, 3), rng.randint(1, 3), *(rng.randint(2, 4) for _ in range(dims)))
        if rng.random() < 0.5:
            return x, None, *corners, (rng.choice((2.0, 1.5)),) * dims
        return x, tuple(rng.randint(2, 6) for _ in range(dims)), *corners, None

    return sample


def _size_sample(dims: int, *corners: bool) -> Sample:
    def sample(rng: Random) -> Args:
        x, *_ = _vec_sample(dims, *corners)(rng)
        return x, tuple(rng.randint(2, 6) for _ in range(dims)), *corners

    return sample


def _pixel_shuffle(call: Call) -> Indexed:
    """Channels (c a b) to an a by b block of pixels."""
    factor = call["upscale_factor"]
    lead = _lead(call)
    return Indexed(f"{lead} (c a b) y x -> {lead} c (y a) (x b)", (("a", factor), ("b", factor)))


def _pixel_unshuffle(call: Call) -> Indexed:
    factor = call["downscale_factor"]
    lead = _lead(call)
    return Indexed(f"{lead} c (y a) (x b) -> {lead} (c a b) y x", (("a", factor), ("b", factor)))


def _lead(call: Call) -> str:
    return " ".join(f"d{i}" for i in range(len(call.tensors[0].shape) - 3))


def _channel_shuffle(call: Call) -> Indexed:
    rest = " ".join(f"s{i}" for i in range(len(call.tensors[0].shape) - 2))
    return Indexed(f"n (g c) {rest} -> n (c g) {rest}", (("g", call["groups"]),))


_NUM_MODES, _NUM_PADDINGS = {2: 3, 3: 2}, 3
"""Bilinear, nearest, and bicubic in two dims only."""


def _grid(call: Call) -> str:
    """Every output position reads anywhere in the image: the image is whole, the positions are not."""
    dims = len(call["input"].shape) - 2
    if call["interpolation_mode"] not in range(_NUM_MODES[dims]) or call["padding_mode"] not in range(_NUM_PADDINGS):
        raise NotationError("a mode that does not exist leaves its memory as it was found")
    image = " ".join(f"s{i}!" for i in range(dims))
    places = " ".join(f"t{i}" for i in range(dims))
    return f"n c {image}, n {places} e! -> n c {places}"


def _affine_grid(call: Call) -> Indexed:
    """Positions of a grid of the given size, moved by one matrix for each sample."""
    places = call["size"][2:]
    names = " ".join(f"t{i}!" for i in range(len(places)))
    sizes = (*((f"t{i}", n) for i, n in enumerate(places)), ("e", len(places)))
    return Indexed(f"n e! f! -> n {names} e!", sizes)


def _local_affine_grid(form: LocalForm) -> Any:
    """The size is that of the images: only its first number follows the batch."""
    return form.run(size=(local_sizes(form.space, form.pieces)["n"], *form.call["size"][1:]))


def _affine_sample(rng: Random) -> Args:
    n, sizes = rng.randint(1, 4), tuple(rng.randint(1, 4) for _ in range(rng.choice((2, 3))))
    return real(n, len(sizes), len(sizes) + 1), (n, 2, *sizes), rng.random() < 0.5


def _grid_sample(dims: int, last_mode: int) -> Sample:
    """An image and where to read it; modes: bilinear, nearest, bicubic in two dims only."""

    def sample(rng: Random) -> Args:
        image, places = (tuple(rng.randint(2, 4) for _ in range(dims)) for _ in range(2))
        modes = (rng.randint(0, last_mode), rng.randint(0, 2), rng.random() < 0.5)
        return real(2, 3, *image), real(2, *places, dims), *modes

    return sample


def _of_each(flops: float) -> Callable[[Call, Mapping[str, int]], float]:
    """So many for every element that is written: what is read for it are a few neighbours, not the whole image."""
    return lambda call, sizes: flops * prod(size for name, size in sizes.items() if name[0] not in "se")


def _blocks(call: Call) -> int:
    """A thread makes one pixel of all images, one after the other; 1024 threads are a block."""
    return -(-prod(size for _, size in _upsample(call).sizes) // 1024)


_gridded = partial(OpSpec, index=_grid, terms="input", domain=(-0.9, 0.9))
_moved = partial(OpSpec, flops=0, terms="self")
_resized = partial(OpSpec, flops=0, terms="input")
_SMOOTH = (("linear1d", 1, 4), ("bilinear2d", 2, 8), ("trilinear3d", 3, 16), ("bicubic2d", 2, 32))
_NEAREST = ("upsample_nearest", "_upsample_nearest_exact")

OPS: tuple[OpSpec, ...] = (
    *(_resized(f"{name}{n}d.vec", _upsample, _vec_sample(n)) for name in _NEAREST for n in (1, 2, 3)),
    *(_moved(f"{name}{n}d", _upsample, _size_sample(n)) for name in _NEAREST for n in (1, 2, 3)),
    *(_resized(f"upsample_{name}.vec", _upsample, _vec_sample(n, False), flops=_of_each(f), blocks=_blocks)
      for name, n, f in _SMOOTH),
    *(_moved(f"upsample_{name}", _upsample, _size_sample(n, False), flops=_of_each(f), blocks=_blocks)
      for name, n, f in _SMOOTH),
    _resized("_upsample_bilinear2d_aa.vec", _upsample, _vec_sample(2, False), flops=_of_each(16)),
    _resized("_upsample_bicubic2d_aa.vec", _upsample, _vec_sample(2, False), flops=_of_each(48)),
    _moved("pixel_shuffle", _pixel_shuffle, lambda rng: (real(*rng.choice(((2,), ())), 8, 3, 3), 2)),
    _moved("pixel_unshuffle", _pixel_unshuffle, lambda rng: (real(*rng.choice(((2,), ())), 2, 4, 6), 2)),
    _moved("channel_shuffle", _channel_shuffle, lambda rng: (real(2, 6, *(3,) * rng.randint(1, 2)), 2)),
    _gridded("grid_sampler_2d", sample=_grid_sample(2, 2), flops=_of_each(12), overloads=("grid_sampler",)),
    _gridded("grid_sampler_3d", sample=_grid_sample(3, 1), flops=_of_each(24)),
    OpSpec("affine_grid_generator", _affine_grid, _affine_sample, terms="theta", flops=8, local=_local_affine_grid),
)  # fmt: skip
