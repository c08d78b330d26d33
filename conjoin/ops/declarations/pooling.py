"""Pooling and unfolding: windows over spatial dims without weights, split with a halo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from conjoin.ops.declarations.convolution import KERNEL, OUT, each_dim
from conjoin.ops.dtypes import Dtype
from conjoin.ops.notation import NotationError
from conjoin.ops.samples import Sample, integer, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def _num_dims(op: str) -> int:
    return next(int(digit) for digit in op.split("pool")[1] if digit.isdigit())


def _pool(call: Call) -> Indexed:
    dims = _num_dims(call.op)
    kernel = each_dim(call["kernel_size"], dims)
    stride = each_dim(call["stride"] or kernel, dims)
    padding, dilation = each_dim(call["padding"], dims), each_dim(call["dilation"] or 1, dims)
    lead = " ".join(f"d{i}" for i in range(len(call.tensors[0].shape) - dims))
    windows = " ".join(f"{OUT[i]}*{stride[i]}+{KERNEL[i]}*{dilation[i]}-{padding[i]}" for i in range(dims))
    sizes = list(zip(KERNEL, kernel, strict=False))
    for i, size in enumerate(call.tensors[0].shape[-dims:]):
        reach = size + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1
        sizes.append((OUT[i], _num_windows(reach, stride[i], size + padding[i], bool(call["ceil_mode"]))))
    mark = "!" if _counts_positions(call) else ""
    out = " ".join(f"{name}{mark}" for name in OUT[:dims])
    outputs = 2 if "with_indices" in call.op else 1
    return Indexed(f"{lead} {windows} -> {', '.join([f'{lead} {out}'] * outputs)}", tuple(sizes))


def _counts_positions(call: Call) -> bool:
    """A divisor that counts what lies inside the tensor, and indices in it, are not the same in a padded piece."""
    if not call.op.startswith("avg"):
        return "with_indices" in call.op
    return bool(call["ceil_mode"]) or (not call["count_include_pad"] and any(each_dim(call["padding"], 1)))


def _num_windows(reach: int, stride: int, limit: int, ceil: bool) -> int:
    """torch's pooled size: with ceil_mode the last window must still start inside the input or its left padding."""
    if not ceil:
        return reach // stride + 1
    count = (reach + stride - 1) // stride + 1
    return count - 1 if (count - 1) * stride >= limit else count


def _pool_sample(dims: int, dilated: bool) -> Sample:
    def sample(rng: Random) -> Args:
        kernel = tuple(rng.randint(1, 3) for _ in range(dims))
        padding = tuple(rng.randint(0, k // 2) for k in kernel)
        stride = rng.choice(((), tuple(rng.randint(1, 3) for _ in range(dims))))
        batch = rng.choice(((), (2,), (3,)))
        x = real(*batch, rng.randint(1, 3), *(rng.randint(6, 9) for _ in range(dims)))
        if dilated:
            return x, kernel, stride, padding, tuple(rng.randint(1, 2) for _ in range(dims)), rng.random() < 0.3
        return x, kernel, stride, padding, rng.random() < 0.3, rng.random() < 0.6

    return sample


def _adaptive(outputs: int) -> Callable[[Call], Indexed]:
    """To size 1 an average is a plain mean; otherwise window sizes vary with the position: spatial dims stay whole."""

    def write(call: Call) -> Indexed:
        dims = _num_dims(call.op)
        shape = call.tensors[0].shape
        lead = " ".join(f"d{i}" for i in range(len(shape) - dims))
        target = call["output_size"]
        if len(target) != dims:
            raise NotationError(f"{call.op} is called for {len(target)} sizes, and makes {dims}")
        if all(n == 1 for n in target) and "avg" in call.op:
            averaged = " ".join(f"{name}~" for name in KERNEL[:dims])
            return Indexed(f"{lead} {averaged} -> {lead} {' '.join(['1'] * dims)}")
        left, right = (" ".join(f"{name}!" for name in names[:dims]) for names in (KERNEL, OUT))
        return Indexed(
            f"{lead} {left} -> {', '.join([f'{lead} {right}'] * outputs)}", tuple(zip(OUT, target, strict=False))
        )

    return write


def _adaptive_sample(dims: int) -> Sample:
    return lambda rng: (real(2, 3, *(rng.randint(4, 8) for _ in range(dims))), (rng.choice((1, 1, 2, 3)),) * dims)


def _im2col(call: Call) -> Indexed:
    """Windows written out: rows of windows may be split, the positions inside one stay whole."""
    kernel, stride = call["kernel_size"], call["stride"]
    windows = " ".join(f"{OUT[i]}*{stride[i]}+{KERNEL[i]}*{call['dilation'][i]}-{call['padding'][i]}" for i in (0, 1))
    batch = "n " * (len(call.tensors[0].shape) == 4)
    return Indexed(f"{batch}c {windows} -> {batch}(c r! q!) (y x)", tuple(zip(KERNEL, kernel, strict=False)))


def _im2col_sample(rng: Random) -> Args:
    kernel = (rng.randint(1, 3), rng.randint(1, 3))
    stride, padding = (rng.randint(1, 2), rng.randint(1, 2)), (rng.randint(0, 1), rng.randint(0, 1))
    return real(*rng.choice(((2,), ())), 2, 6, 5), kernel, (rng.randint(1, 2), 1), padding, stride


def _col2im(call: Call) -> Indexed:
    """Windows added up where they overlap."""
    batch = "n " * (len(call.tensors[0].shape) == 3)
    kernel, size = call["kernel_size"], call["output_size"]
    sizes = (("k", kernel[0] * kernel[1]), ("y", size[0]), ("x", size[1]))
    return Indexed(f"{batch}(c k!) l! -> {batch}c y! x!", sizes)


def _col2im_sample(rng: Random) -> Args:
    c, (r, q) = rng.randint(1, 3), (rng.randint(1, 3), rng.randint(1, 3))
    return real(2, c * r * q, (7 - r) * (6 - q)), (6, 5), (r, q), (1, 1), (0, 0), (1, 1)


def _unpool(call: Call) -> Indexed:
    """Values put back where their indices say; the rest is zero."""
    dims = len(call["output_size"])
    lead = " ".join(f"d{i}" for i in range(len(call.tensors[0].shape) - dims))
    small, large = (" ".join(f"{name}!" for name in names[:dims]) for names in (KERNEL, OUT))
    return Indexed(
        f"{lead} {small}, {lead} {small} -> {lead} {large}", tuple(zip(OUT, call["output_size"], strict=False))
    )


_PAIR = (Dtype.FIRST, Dtype.INT64)
_LOWEST = float("-inf")
_pooling = partial(OpSpec, kernels="pool", by_order=True)

OPS: tuple[OpSpec, ...] = (
    *(_pooling(f"max_pool{n}d", _pool, _pool_sample(n, True), pad_value=_LOWEST) for n in (1, 2, 3)),
    *(_pooling(f"max_pool{n}d_with_indices", _pool, _pool_sample(n, True), dtype=_PAIR) for n in (1, 2, 3)),
    *(_pooling(f"avg_pool{n}d", _pool, _pool_sample(n, False), terms="self") for n in (1, 2, 3)),
    *(_pooling(f"adaptive_avg_pool{n}d", _adaptive(1), _adaptive_sample(n), terms="self") for n in (1, 2, 3)),
    *(_pooling(f"_adaptive_avg_pool{n}d", _adaptive(1), _adaptive_sample(n), terms="self") for n in (2, 3)),
    *(_pooling(f"adaptive_max_pool{n}d", _adaptive(2), _adaptive_sample(n), dtype=_PAIR) for n in (1, 2, 3)),
    OpSpec("max_unpool2d", _unpool, lambda rng: (real(2, 3, 2, 2), integer(2, 3, 2, 2), (4, 4)), terms="self", flops=0),
    OpSpec("im2col", _im2col, _im2col_sample, terms="self", flops=0),
    OpSpec("col2im", _col2im, _col2im_sample, terms="self"),
)
