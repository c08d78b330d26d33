"""Operators that write at addresses: scatter, index_add, index_put; what adds up may be split over what is added."""

from __future__ import annotations

from functools import partial
from random import Random

import torch

from conjoin.ops.declarations.lookup import indexing, names_but
from conjoin.ops.dtypes import Dtype
from conjoin.ops.notation import NotationError, broadcast_names
from conjoin.ops.samples import boolean, integer, random_shape, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def _adds(call: Call) -> bool:
    return call.op == "scatter_add" or bool(call["reduce"] == "sum" and call["include_self"])


def _scatter(call: Call) -> str:
    """The scattered dim is whole; off it, dims that index, source and target share may be split.

    What adds up lets the scattered positions be split too: each device adds its own into a partial sum.
    """
    shape, index, dim = call["self"].shape, call["index"].shape, call.dim()
    source = index if call["src"] is None else call["src"].shape
    plain = [n == m == s for n, m, s in zip(shape, index, source, strict=True)]
    from_each = "j" if _adds(call) and call["src"] is not None else "j!"
    along = {"t": "t!", "j": from_each, "s": from_each if index[dim] == source[dim] else "s!"}
    if along["s"] == "s!":
        along["j"] = "j!"
    target, addresses, sources = (
        " ".join(along[letter] if i == dim else f"d{i}" if plain[i] else f"{letter}{i}!" for i in range(len(shape)))
        for letter in "tjs"
    )
    return f"{target}, {addresses}@t{'' if call['src'] is None else f', {sources}'} -> {target}"


def _scatter_terms(call: Call) -> str:
    return "self + src" if _adds(call) else ""


def _index_add(call: Call) -> str:
    """Rows added at addresses: each device may add some of them into a partial sum."""
    rank, dim = len(call["self"].shape), call.dim()
    return f"{names_but(rank, dim, 'k!')}, j@k, {names_but(rank, dim, 'j')} -> {names_but(rank, dim, 'k!')}"


def _index_copy(call: Call) -> str:
    rank, dim = len(call["self"].shape), call.dim()
    return f"{names_but(rank, dim, 'k!')}, j!@k, {names_but(rank, dim, 'j!')} -> {names_but(rank, dim, 'k!')}"


def _index_fill(call: Call) -> str:
    rank, dim = len(call["self"].shape), call.dim()
    value = "," if len(call.tensors) > 2 else ""
    return f"{names_but(rank, dim, 'k!')}, j!@k{value} -> {names_but(rank, dim, 'k!')}"


def _index_put(call: Call) -> Indexed:
    """x[i, :, j] = values; where they are added, each device may add some of them into a partial sum."""
    if call["indices"] and call["indices"][0] is not None and call["indices"][0].dtype == torch.bool:
        return _mask_put(call)
    left, sides, right, sizes = indexing(call, "" if call["accumulate"] else "!")
    full = dict(sizes) | {f"d{i}": n for i, n in enumerate(call["self"].shape)}
    values = broadcast_names(right, call["values"].shape, [full[name.rstrip("!")] for name in right])
    if call["accumulate"] and any(name not in values.split() for name in right if name.startswith("j")):
        left, sides, right, sizes = indexing(call, "!")
        values = broadcast_names(right, call["values"].shape, [full[name.rstrip("!")] for name in right])
    return Indexed(f"{left}, {', '.join(sides)}, {values} -> {left}", sizes)


def _mask_put(call: Call) -> Indexed:
    """x[mask] = one number: every element on its own."""
    rank, mask = len(call["self"].shape), call["indices"][0]
    if len(call["indices"]) > 1 or call["values"].num_elements != 1:
        raise NotationError(f"{call.op} with a mask gives each element the value of its rank in the mask")
    names = [f"d{i}" for i in range(rank)]
    value = " ".join("1" for _ in call["values"].shape)
    return Indexed(f"{' '.join(names)}, {' '.join(names[: len(mask.shape)])}, {value} -> {' '.join(names)}")


def _put_terms(call: Call) -> str:
    """Values added, or one number under a mask; otherwise addresses that repeat make the order count."""
    masked = call["indices"][0] is not None and call["indices"][0].dtype == torch.bool
    return "self + values" if call["accumulate"] or masked else ""


def _scatter_sample(rng: Random) -> Args:
    shape = [rng.randint(2, 4) for _ in range(rng.randint(1, 3))]
    dim = rng.randrange(len(shape))
    index = [rng.randint(1, n) if i == dim else n - (rng.random() < 0.15) for i, n in enumerate(shape)]
    return real(*shape), dim, integer(*index), real(*index)


def _index_add_sample(rng: Random) -> Args:
    shape, count = random_shape(rng, 1, 3), rng.randint(1, 4)
    dim = rng.randrange(len(shape))
    return real(*shape), dim, integer(count), real(*(count if i == dim else n for i, n in enumerate(shape)))


def _index_copy_sample(rng: Random) -> Args:
    shape, dim, _, _ = _index_add_sample(rng)
    return shape, dim, integer(1), real(*(1 if i == dim else n for i, n in enumerate(shape.shape)))


def _put_sample(rng: Random) -> Args:
    indices, values = rng.choice(
        (
            ((integer(2),), (2, 5, 3)),
            ((None, integer(2)), (4, 2, 3)),
            ((integer(2, 1), integer(3)), (2, 3, 3)),
            ((integer(2),), (1,)),
            ((boolean(4, 5),), ()),
            ((boolean(4),), (1,)),
        )
    )
    return real(4, 5, 3), indices, real(*values), indices[0] is None or indices[0].dtype != torch.bool


_write = partial(OpSpec, dtype=Dtype.FIRST)

OPS: tuple[OpSpec, ...] = (
    _write("scatter.src", _scatter, _scatter_sample, flops=0),
    _write("scatter.value", _scatter, lambda rng: (*_scatter_sample(rng)[:3], 0.5), flops=0),
    _write("scatter_add", _scatter, _scatter_sample, terms=_scatter_terms),
    _write("scatter_reduce.two", _scatter, lambda rng: (*_scatter_sample(rng), rng.choice(("amax", "sum", "mean"))),
           terms=_scatter_terms),
    _write("index_add", _index_add, _index_add_sample, terms="self + source", one_dtype=True),
    _write("index_copy", _index_copy, _index_copy_sample, flops=0, one_dtype=True),
    _write("index_fill.int_Scalar", _index_fill, lambda rng: (*_index_add_sample(rng)[:3], 0.5), flops=0),
    _write("index_fill.int_Tensor", _index_fill, lambda rng: (*_index_add_sample(rng)[:3], real()), flops=0,
           terms="self + value"),
    _write("index_put", _index_put, _put_sample, terms=_put_terms),
)  # fmt: skip
