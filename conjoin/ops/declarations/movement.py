"""Operators that move elements: join, cut, pad, repeat, roll, triangles; the dim they work along stays whole."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from conjoin.ops.declarations.reductions import along
from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import LocalForm
from conjoin.ops.samples import Sample, random_shape, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def spell(rank: int, dim: int, special: str) -> str:
    """Names of all dims, one of them whole under a name of its own.

    >>> spell(3, 1, "k")
    'd0 k! d2'
    """
    return " ".join(f"{special}!" if i == dim else f"d{i}" for i in range(rank))


def _resized(call: Call, dim: int, size: int) -> Indexed:
    """One dim has another size in the output, and is whole on both sides."""
    rank = len(call.tensors[0].shape)
    return Indexed(f"{spell(rank, dim, 'k')} -> {spell(rank, dim, 'j')}", (("j", size),))


def slice_range(call: Call, size: int) -> tuple[int, int, int]:
    """Start, stop and step of a slice, clipped as Python clips them."""
    return slice(call["start"], call["end"], call["step"]).indices(size)


def _slice(call: Call) -> Indexed:
    dim = call.dim()
    size = call.tensors[0].shape[dim]
    start, stop, step = slice_range(call, size)
    if (start, stop, step) == (0, size, 1):
        names = " ".join(f"d{i}" for i in range(len(call.tensors[0].shape)))
        return Indexed(f"{names} -> {names}")
    return _resized(call, dim, len(range(start, stop, step)))


def _local_slice(form: LocalForm) -> Any:
    """A slice that takes the whole dim takes the whole piece."""
    size = form.call.tensors[0].shape[form.call.dim()]
    whole = slice_range(form.call, size) == (0, size, 1)
    return form.run(start=None, end=None) if whole else form.run()


def _narrow(call: Call) -> Indexed:
    return _resized(call, call.dim(), call["length"])


def _select(call: Call) -> str:
    rank, dim = len(call.tensors[0].shape), call.dim()
    kept = " ".join(f"d{i}" for i in range(rank) if i != dim)
    return f"{spell(rank, dim, 'k')} -> {kept}"


def _written(call: Call) -> str:
    """A source written into a part of a dim; the rest of it lies like the target."""
    rank, dim = len(call["self"].shape), call.dim()
    target = spell(rank, dim, "k")
    source = spell(rank, dim, "j").replace("j!", "" if call.op == "select_scatter" else "j!")
    return f"{target}, {source} -> {target}"


def _diagonal_length(rows: int, columns: int, offset: int) -> int:
    return max(0, min(rows + min(offset, 0), columns - max(offset, 0)))


def _diagonal(call: Call) -> Indexed:
    shape = call.tensors[0].shape
    ends = (call.dim("dim1"), call.dim("dim2"))
    left = " ".join(f"d{i}!" if i in ends else f"d{i}" for i in range(len(shape)))
    kept = " ".join(f"d{i}" for i in range(len(shape)) if i not in ends)
    length = _diagonal_length(shape[ends[0]], shape[ends[1]], call["offset"])
    if call["src"] is not None:
        return Indexed(f"{left}, {kept} k! -> {left}", (("k", length),))
    return Indexed(f"{left} -> {kept} k!", (("k", length),))


def _diag_embed(call: Call) -> Indexed:
    """The last dim becomes the diagonal of a matrix at two dims of the output."""
    shape = call.tensors[0].shape
    rank = len(shape) + 1
    ends = (call.dim("dim1", rank), call.dim("dim2", rank))
    side = shape[-1] + abs(call["offset"])
    kept = iter(f"d{i}" for i in range(len(shape) - 1))
    right = " ".join(f"m{i}!" if i in ends else next(kept) for i in range(rank))
    return Indexed(f"{' '.join(f'd{i}' for i in range(rank - 2))} k! -> {right}", tuple((f"m{i}", side) for i in ends))


def _diag(call: Call) -> Indexed:
    """A vector as the diagonal of a matrix, or the diagonal of a matrix."""
    shape, offset = call.tensors[0].shape, call["diagonal"]
    if len(shape) == 1:
        side = shape[0] + abs(offset)
        return Indexed("k! -> m! n!", (("m", side), ("n", side)))
    return Indexed("m! n! -> k!", (("k", _diagonal_length(shape[0], shape[1], offset)),))


def _pad(call: Call) -> Indexed:
    shape, pads = call.tensors[0].shape, call["pad"] or call["padding"] or ()
    left, right, sizes = [], [], []
    for i, size in enumerate(shape):
        at = 2 * (len(shape) - 1 - i)
        before, after = pads[at : at + 2] if at < len(pads) else (0, 0)
        changed = bool(before or after)
        left.append(f"d{i}!" if changed else f"d{i}")
        right.append(f"j{i}!" if changed else f"d{i}")
        sizes += [(f"j{i}", size + before + after)] if changed else []
    return Indexed(f"{' '.join(left)} -> {' '.join(right)}", tuple(sizes))


def _pad_terms(call: Call) -> str:
    """Linear unless a number other than zero is put around, which each device would add."""
    return "" if call["value"] else "self"


def _repeats(call: Call) -> tuple[int, ...]:
    """How often each dim is repeated; `tile` may leave leading dims out."""
    given = call["dims"] if call.op == "tile" else call["repeats"]
    return (1,) * (len(call.tensors[0].shape) - len(given)) + tuple(given)


def _repeat(call: Call) -> Indexed:
    """A dim of size n repeated r times is (r n): the copies vary slowest."""
    repeats = _repeats(call)
    lead = len(repeats) - len(call.tensors[0].shape)
    right = [f"r{i}" if i < lead else f"(r{i} d{i})" if n != 1 else f"d{i}" for i, n in enumerate(repeats)]
    left = [f"d{i}" for i in range(lead, len(repeats))]
    return Indexed(f"{' '.join(left)} -> {' '.join(right)}", tuple((f"r{i}", n) for i, n in enumerate(repeats)))


def _local_repeat(form: LocalForm) -> Any:
    """Where the copies are split each device makes its own."""
    pieces = ((form.pieces.get(f"r{i}", (0, n))) for i, n in enumerate(_repeats(form.call)))
    repeats = tuple(hi - lo for lo, hi in pieces)
    return form.run(dims=repeats) if form.call.op == "tile" else form.run(repeats=repeats)


def _repeat_interleave(call: Call) -> Indexed:
    shape, dim = call.tensors[0].shape, call.dim()
    left = [f"d{i}" for i in range(len(shape))]
    right = [f"(d{i} r!)" if i == dim else f"d{i}" for i in range(len(shape))]
    return Indexed(f"{' '.join(left)} -> {' '.join(right)}", (("r", call["repeats"]),))


def _local_interleave(form: LocalForm) -> Any:
    return form.run(output_size=None)


def _local_triangle(form: LocalForm) -> Any:
    """A piece that starts at row m0 and column n0 sees the diagonal moved."""
    row, column = (form.pieces.get(name, (0, 0))[0] for name in ("m", "n"))
    return form.run(diagonal=form.call["diagonal"] + row - column)


def _rot90(call: Call) -> Indexed:
    """A quarter turn exchanges two dims and reverses one of them."""
    shape = call.tensors[0].shape
    a, b = call.dims("dims")
    right = list(range(len(shape)))
    if call["k"] % 2:
        right[a], right[b] = b, a
    mark = {a: "!", b: "!"}
    return Indexed(" -> ".join(" ".join(f"d{i}{mark.get(i, '')}" for i in side) for side in (range(len(shape)), right)))


def _unfold(call: Call) -> Indexed:
    rank, dim = len(call.tensors[0].shape), call.dim("dimension")
    count = (call.tensors[0].shape[dim] - call["size"]) // call["step"] + 1
    return Indexed(f"{spell(rank, dim, 'k')} -> {spell(rank, dim, 'j')} w!", (("j", count), ("w", call["size"])))


def _glu(call: Call) -> Indexed:
    dim = call.dim()
    return _resized(call, dim, call.tensors[0].shape[dim] // 2)


def _slice_sample(rng: Random) -> Args:
    dim = rng.randrange(-3, 3)
    return real(3, 6, 4), dim, *rng.choice(((None, None, 1), (1, 5, 2), (-3, 2**63 - 1, 1), (0, 2, 1)))


def _select_sample(rng: Random) -> Args:
    shape = random_shape(rng)
    dim = rng.randrange(len(shape))
    return real(*shape), dim, rng.randrange(-shape[dim], shape[dim])


def _select_scatter_sample(rng: Random) -> Args:
    shape = random_shape(rng, 2, 3)
    dim = rng.randrange(len(shape))
    return real(*shape), real(*(n for i, n in enumerate(shape) if i != dim)), dim, rng.randrange(shape[dim])


def _pad_sample(rng: Random) -> Args:
    shape = random_shape(rng, 2, 4)
    pads = tuple(rng.choice((0, 0, 1, 2)) for _ in range(2 * rng.randint(1, 2)))
    return real(*shape), pads, rng.choice((0.0, 0.0, 1.5))


def _pad_mode_sample(rng: Random) -> Args:
    return real(2, 3, 5, 5), (1, 2, 0, 1), *rng.choice((("reflect",), ("replicate",), ("circular",), ("constant", 0.5)))


def _mirror_sample(dims: int) -> Sample:
    return lambda rng: (real(2, 3, *(5,) * dims), tuple(rng.randint(0, 2) for _ in range(2 * dims)))


def _repeat_sample(rng: Random) -> Args:
    shape = random_shape(rng, 1, 3)
    return real(*shape), tuple(rng.randint(1, 3) for _ in range(len(shape) + rng.randint(0, 1)))


def _tile_sample(rng: Random) -> Args:
    shape = random_shape(rng, 1, 3)
    return real(*shape), tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 4)))


def _interleave_sample(rng: Random) -> Args:
    shape = random_shape(rng, 1, 3)
    return real(*shape), rng.randint(1, 3), rng.randrange(len(shape))


_moved = partial(OpSpec, dtype=Dtype.FIRST, flops=0, terms="self")
_cut = partial(OpSpec, dtype=Dtype.FIRST, flops=0, terms="self", view=True)
_insert = partial(OpSpec, dtype=Dtype.FIRST, flops=0, terms="self + src")

OPS: tuple[OpSpec, ...] = (
    _cut("slice.Tensor", _slice, _slice_sample, local=_local_slice, asks_where=()),
    _cut("narrow", _narrow, lambda rng: (real(3, 6, 4), 1, rng.randint(0, 2), rng.randint(1, 3))),
    _cut("select.int", _select, _select_sample),
    _cut("diagonal", _diagonal, lambda rng: (real(3, 4, 5), rng.randint(-1, 1), *rng.sample(range(3), 2))),
    _cut("unfold", _unfold, lambda rng: (real(3, 6, 2), 1, rng.randint(1, 3), rng.randint(1, 2))),
    _insert("select_scatter", _written, _select_scatter_sample),
    _insert("slice_scatter", _written, lambda rng: (real(3, 6, 2), real(3, 2, 2), 1, 1, 5, 2)),
    _insert("diagonal_scatter", _diagonal, lambda rng: (real(3, 4, 3), real(4, 3), 0, 0, 2)),
    _moved("diag_embed", _diag_embed, lambda rng: (real(2, 3), rng.randint(-1, 1), *rng.choice(((-2, -1), (0, 2))))),
    _moved("diag", _diag, lambda rng: (real(*random_shape(rng, 1, 2)), rng.randint(-1, 0))),
    _moved("constant_pad_nd", _pad, _pad_sample, terms=_pad_terms),
    _moved("pad", _pad, _pad_mode_sample, terms=_pad_terms),
    *(_moved(f"{mode}_pad{n}d", _pad, _mirror_sample(n)) for mode in ("reflection", "replication") for n in (1, 2, 3)),
    _moved("repeat", _repeat, _repeat_sample, local=_local_repeat),
    _moved("tile", _repeat, _tile_sample, local=_local_repeat),
    _moved("repeat_interleave.self_int", _repeat_interleave, _interleave_sample, local=_local_interleave),
    _moved("roll", along("dims"), lambda rng: (real(3, 4, 5), (rng.randint(-2, 2),), (rng.randrange(3),))),
    _moved("flip", along("dims"), lambda rng: (real(3, 4, 5), (rng.randrange(3),))),
    _moved("rot90", _rot90, lambda rng: (real(3, 4, 5), rng.randint(-1, 3), tuple(rng.sample(range(3), 2)))),
    _moved("tril", "... m n -> ... m n", lambda rng: (real(*random_shape(rng, 2, 3)), rng.randint(-2, 2)),
           overloads=("triu",), local=_local_triangle),
    OpSpec("glu", _glu, lambda rng: (real(3, 4, 2), 1), flops=12),
)  # fmt: skip
