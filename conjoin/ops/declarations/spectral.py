"""Fourier transforms: linear, over dims that are whole; every other dim may be split."""

from __future__ import annotations

from functools import partial
from random import Random

from conjoin.ops.dtypes import Dtype
from conjoin.ops.samples import Sample, complex_pair, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def _transformed(call: Call) -> dict[int, int]:
    """The dims that are transformed, in order, and how many values of each go in (or, back to reals, come out)."""
    shape, one = call["self"].shape, call.op.endswith("t")
    sizes = ([call["n"]] if call["n"] is not None else None) if one else call["s"]
    dims = [call["dim"]] if one else call["dim"]
    if dims is None:
        dims = range(len(shape) - len(shape if sizes is None else sizes), len(shape))
    dims = [dim % len(shape) for dim in dims]
    sizes = [-1] * len(dims) if sizes is None else list(sizes)
    to_reals = call.op.startswith("fft_ir")
    kept = [2 * (shape[d] - 1) if to_reals and d == dims[-1] else shape[d] for d in dims]
    return {dim: own if size == -1 else size for dim, size, own in zip(dims, sizes, kept, strict=True)}


def _spectrum(call: Call) -> Indexed:
    dims = _transformed(call)
    names = [f"k{i}!" if i in dims else f"d{i}" for i in range(len(call["self"].shape))]
    out = [f"f{i}!" if i in dims else name for i, name in enumerate(names)]
    if call.op.startswith("fft_r"):
        last = next(reversed(dims))
        dims[last] = dims[last] // 2 + 1
    return Indexed(f"{' '.join(names)} -> {' '.join(out)}", tuple((f"f{dim}", size) for dim, size in dims.items()))


def _sample_of(name: str) -> Sample:
    given = complex_pair if name.startswith("fft_i") else real

    def line(rng: Random) -> Args:
        return given(3, 4, 5), rng.choice((None, 4)), rng.choice((-1, 1)), rng.choice((None, "ortho"))

    def plane(rng: Random) -> Args:
        dims = rng.choice(((-2, -1), (2, 0))) if name.endswith("2") else rng.choice((None, (1, 2)))
        return given(3, 4, 5), rng.choice((None, (4, 3))), dims, rng.choice((None, "forward"))

    return plane if name[-1] in "2n" else line


_NAMES = [f"fft_{kind}{rank}" for kind in ("fft", "ifft", "rfft", "irfft") for rank in ("", "2", "n")]
_spectral = partial(OpSpec, flops=30, terms="self")
OPS: tuple[OpSpec, ...] = tuple(
    _spectral(name, _spectrum, _sample_of(name), dtype=Dtype.REAL if name.startswith("fft_ir") else Dtype.COMPLEX)
    for name in _NAMES
)
