"""Operators between one tensor and several: concatenate, stack, split, unbind, mesh grids."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from random import Random

from conjoin.ops.declarations.movement import spell
from conjoin.ops.dtypes import Dtype
from conjoin.ops.notation import NotationError, broadcast_names, broadcast_shape
from conjoin.ops.samples import Sample, integer, random_shape, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def _cat(call: Call) -> Indexed:
    """Alike but for one dim, which is whole everywhere; torch leaves empty vectors out."""
    rank = max(len(tensor.shape) for tensor in call.tensors)
    dim = _cat_dim(call, rank)
    left = [spell(rank, dim, f"j{i}") if len(t.shape) == rank else f"empty{i}!" for i, t in enumerate(call.tensors)]
    total = sum(tensor.shape[dim] for tensor in call.tensors if len(tensor.shape) == rank)
    return Indexed(f"{', '.join(left)} -> {spell(rank, dim, 'k')}", (("k", total),))


def _cat_dim(call: Call, rank: int) -> int:
    """`hstack` joins dim 1 of anything but vectors, `vstack` dim 0 of matrices and above."""
    if call.op == "hstack":
        return min(rank - 1, 1)
    return 0 if call.op == "vstack" else call.dim(rank=rank)


def _stacked_rows(call: Call) -> Indexed:
    """`vstack` takes vectors for rows."""
    if len(call.tensors[0].shape) != 1:
        return _cat(call)
    return Indexed(f"{', '.join(['d0'] * len(call.tensors))} -> k! d0", (("k", len(call.tensors)),))


def _stacked_columns(call: Call) -> Indexed:
    """`column_stack` takes vectors for columns."""
    if len(call.tensors[0].shape) != 1:
        left = [
            " ".join(["d0", f"j{i}!", *(f"d{k}" for k in range(2, len(t.shape)))]) for i, t in enumerate(call.tensors)
        ]
        rest = [f"d{k}" for k in range(2, len(call.tensors[0].shape))]
        total = sum(tensor.shape[1] for tensor in call.tensors)
        return Indexed(f"{', '.join(left)} -> {' '.join(['d0', 'k!', *rest])}", (("k", total),))
    return Indexed(f"{', '.join(['d0'] * len(call.tensors))} -> d0 k!", (("k", len(call.tensors)),))


def _stack(call: Call) -> Indexed:
    names = [f"d{i}" for i in range(len(call.tensors[0].shape))]
    dim = call.dim(rank=len(names) + 1)
    grown = [*names[:dim], "k!", *names[dim:]]
    left = ", ".join([" ".join(names)] * len(call.tensors))
    return Indexed(f"{left} -> {' '.join(grown)}", (("k", len(call.tensors)),))


def _block_diag(call: Call) -> Indexed:
    """Matrices along a diagonal."""
    if any(len(tensor.shape) != 2 for tensor in call.tensors):
        raise NotationError("block_diag of vectors or numbers takes them for rows")
    left = ", ".join(f"m{i}! n{i}!" for i in range(len(call.tensors)))
    rows, columns = (sum(tensor.shape[dim] for tensor in call.tensors) for dim in (0, 1))
    return Indexed(f"{left} -> m! n!", (("m", rows), ("n", columns)))


def _sizes(call: Call, total: int) -> list[int]:
    """The sizes of the pieces, as each overload spells them."""
    if call["split_sizes"] is not None or isinstance(call["split_size"], tuple):
        return list(call["split_sizes"] or call["split_size"])
    if call["indices"] is not None:
        cuts = [0, *(min(max(i + total if i < 0 else i, 0), total) for i in call["indices"]), total]
        return [max(0, hi - lo) for lo, hi in pairwise(cuts)]
    if call["sections"] is not None:
        return [total // call["sections"] + (i < total % call["sections"]) for i in range(call["sections"])]
    step = call["split_size"] or -(-total // call["chunks"])
    return [min(step, total - at) for at in range(0, max(total, 1), max(step, 1))]


def _split(call: Call) -> Indexed:
    """Pieces alike but for one dim, which is whole everywhere."""
    dim, rank = call.dim(), len(call.tensors[0].shape)
    sizes = _sizes(call, call.tensors[0].shape[dim])
    right = ", ".join(spell(rank, dim, f"j{i}") for i in range(len(sizes)))
    return Indexed(f"{spell(rank, dim, 'k')} -> {right}", tuple((f"j{i}", n) for i, n in enumerate(sizes)))


def _unbind(call: Call) -> str:
    shape, dim = call.tensors[0].shape, call.dim()
    kept = " ".join(f"d{i}" for i in range(len(shape)) if i != dim)
    return f"{spell(len(shape), dim, 'k')} -> {', '.join([kept] * shape[dim])}"


def _meshgrid(call: Call) -> str:
    """Vector i varies along dim i of every output; `xy` exchanges the first two dims."""
    names = [f"d{i}" for i in range(len(call.tensors))]
    grid = names[:2][::-1] + names[2:] if call["indexing"] == "xy" else names
    left = ", ".join(name if tensor.shape else "" for name, tensor in zip(names, call.tensors, strict=True))
    return f"{left} -> {', '.join([' '.join(grid)] * len(names))}"


def _broadcast(call: Call) -> str:
    """Every output has the shape that all broadcast to."""
    full = broadcast_shape(tensor.shape for tensor in call.tensors)
    names = [f"d{i}" for i in range(len(full))]
    left = ", ".join(broadcast_names(names, tensor.shape, full) for tensor in call.tensors)
    return f"{left} -> {', '.join([' '.join(names)] * len(call.tensors))}"


def _broadcast_sample(rng: Random) -> Args:
    return (tuple(rng.sample((real(2, 1), real(3), integer(2, 3)), rng.randint(1, 3))),)


def _list_sample(*rest: object, rank: int = 1) -> Sample:
    """Tensors alike but for one dim, and that dim."""

    def sample(rng: Random) -> Args:
        shape = random_shape(rng, rank, 3)
        dim = rng.randrange(-len(shape), len(shape))
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
        along = dim % len(shape)
        return tuple(real(*(n if i == along else m for i, m in enumerate(shape))) for n in sizes), dim, *rest

    return sample


def _stack_sample(rng: Random) -> Args:
    shape = random_shape(rng, 0, 3)
    return (real(*shape),) * rng.randint(1, 3), rng.randrange(-len(shape) - 1, len(shape) + 1)


def _hstack_sample(rng: Random) -> Args:
    return (rng.choice(((real(2), real(3)), (real(3, 2), real(3, 1)), (real(3, 2, 2), real(3, 1, 2)))),)


def _vstack_sample(rng: Random) -> Args:
    return (rng.choice(((real(3), real(3)), (real(3, 2), real(1, 2)), (real(3, 2, 2), real(2, 2, 2)))),)


def _column_sample(rng: Random) -> Args:
    return (rng.choice(((real(3), real(3)), (real(3, 2), real(3, 1)), (real(3, 2, 2), real(3, 1, 2)))),)


def _split_sample(rng: Random) -> Args:
    shape = random_shape(rng)
    dim = rng.randrange(-len(shape), len(shape))
    return real(*shape), rng.randint(1, shape[dim]), dim


def _sizes_sample(rng: Random) -> Args:
    first = rng.randint(1, 3)
    return real(3, first + 2, 2), (first, 2), rng.choice((1, -2))


_join = partial(OpSpec, flops=0, terms="tensors")
_part = partial(OpSpec, flops=0, terms="self", dtype=Dtype.FIRST, view=True)

OPS: tuple[OpSpec, ...] = (
    _join("cat", _cat, _list_sample(), overloads=("concat", "concatenate")),
    _join("stack", _stack, _stack_sample),
    _join("hstack", _cat, _hstack_sample),
    _join("vstack", _stacked_rows, _vstack_sample),
    _join("column_stack", _stacked_columns, _column_sample),
    _join("block_diag", _block_diag, lambda rng: ((real(2, 3), real(rng.randint(1, 3), 2)),)),
    _join("meshgrid", _meshgrid, lambda rng: ((real(2), real(3), real(4))[: rng.randint(1, 3)],), view=True),
    _join("meshgrid.indexing", _meshgrid, lambda rng: ((real(2), real(3)), rng.choice(("ij", "xy"))), view=True),
    _join("broadcast_tensors", _broadcast, _broadcast_sample, view=True, dtype=Dtype.EACH),
    _part("split.Tensor", _split, _split_sample, overloads=("chunk", "unsafe_split.Tensor", "unsafe_chunk")),
    _part("split_with_sizes", _split, _sizes_sample, overloads=("split.sizes", "unsafe_split_with_sizes")),
    _part("tensor_split.sections", _split, _split_sample),
    _part("tensor_split.indices", _split, lambda rng: (real(3, 6, 2), rng.choice(((2,), (1, 4), (4, -1))), 1)),
    _part("unbind.int", _unbind, lambda rng: (real(3, 2, 4), rng.randrange(-3, 3))),
)  # fmt: skip
