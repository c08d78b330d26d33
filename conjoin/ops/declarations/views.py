"""Views: the same elements in the same order under another shape; splits travel through them."""

from __future__ import annotations

from functools import partial
from math import prod
from random import Random
from typing import Any

from conjoin.ops.declarations.reshaping import reshape_notation, resolve_shape, trivial_notation
from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import LocalForm
from conjoin.ops.samples import random_shape, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def _reshape(call: Call) -> Indexed:
    shape = call.tensors[0].shape
    return reshape_notation(shape, resolve_shape(call["size"] or call["shape"] or (), prod(shape)))


def _reshape_sample(rng: Random) -> Args:
    left = random_shape(rng, 1, 4)
    flat = list(left)
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(flat))
        if rng.random() < 0.5 and at + 1 < len(flat):
            flat[at : at + 2] = [flat[at] * flat[at + 1]]
        else:
            factor = rng.choice([d for d in range(1, flat[at] + 1) if flat[at] % d == 0])
            flat[at : at + 1] = [factor, flat[at] // factor]
    return real(*left), tuple(rng.choice((flat, flat, [prod(flat)], sorted(flat))))


def _names(rank: int) -> list[str]:
    return [f"d{i}" for i in range(rank)]


def _permuted(order: list[int]) -> str:
    names = _names(len(order))
    return f"{' '.join(names)} -> {' '.join(names[i] for i in order)}"


def _permute(call: Call) -> str:
    return _permuted(list(call.dims("dims")))


def _transpose(call: Call) -> str:
    order = list(range(len(call.tensors[0].shape)))
    if order:
        a, b = (call.dim(name) for name in (("axis0", "axis1") if call.op == "swapaxes" else ("dim0", "dim1")))
        order[a], order[b] = order[b], order[a]
    return _permuted(order)


def _movedim(call: Call) -> str:
    rank = len(call.tensors[0].shape)
    source, target = call.dims("source"), call.dims("destination")
    order = [-1] * rank
    for s, t in zip(source, target, strict=True):
        order[t] = s
    rest = iter(i for i in range(rank) if i not in source)
    return _permuted([next(rest) if i < 0 else i for i in order])


def _expanded(shape: tuple[int, ...], size: tuple[int, ...], like: str = "") -> Indexed:
    """New leading dims, and dims of size 1 repeated: those are new indices of the output."""
    lead = len(size) - len(shape)
    target = [shape[i - lead] if n == -1 else n for i, n in enumerate(size)]
    names = _names(len(target))
    grown = {i for i, n in enumerate(target) if i < lead or (shape[i - lead] == 1 and n != 1)}
    left = " ".join("1" if i in grown else names[i] for i in range(lead, len(target)))
    return Indexed(f"{left}{like} -> {' '.join(names)}", tuple((names[i], target[i]) for i in sorted(grown)))


def _expand(call: Call) -> Indexed:
    return _expanded(call.tensors[0].shape, call["size"])


def _expand_as(call: Call) -> Indexed:
    """To the shape of another tensor, whose values do not matter."""
    target = call["other"].shape
    return _expanded(call["self"].shape, target, _beside(target))


def _reshape_as(call: Call) -> Indexed:
    target = call["other"].shape
    declared = reshape_notation(call["self"].shape, target)
    left, _, right = declared.text.partition("->")
    return Indexed(f"{left}{_beside(target)} -> {right}", declared.sizes)


def _beside(shape: tuple[int, ...]) -> str:
    """An operand that only lends its shape: any piece of it would do, so it stays whole."""
    return f", {' '.join(f'e{i}!' for i in range(len(shape)))}"


def _expand_sample(rng: Random) -> Args:
    shape = random_shape(rng, 1, 3)
    lead = tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 2)))
    return real(*(1 if rng.random() < 0.4 else n for n in shape)), (*lead, *shape)


def _expand_as_sample(rng: Random) -> Args:
    x, size = _expand_sample(rng)
    return x, real(*size)


def _unsqueeze(call: Call) -> str:
    names = _names(len(call.tensors[0].shape))
    grown = list(names)
    grown.insert(call.dim(rank=len(names) + 1), "1")
    return f"{' '.join(names)} -> {' '.join(grown)}"


def _squeeze(call: Call) -> str:
    shape = call.tensors[0].shape
    dropped = {i for i in call.dims(empty=False) if shape[i] == 1} if shape else set()
    names = ["1" if i in dropped else f"d{i}" for i in range(len(shape))]
    return f"{' '.join(names)} -> {' '.join(name for name in names if name != '1')}"


def _reshape_locally(form: LocalForm) -> Any:
    """To the local shape itself: a piece of size 1 must not be taken for a dim to drop."""
    return form.emit("reshape", form["self"], form.output_shapes[0])


def _expand_locally(form: LocalForm) -> Any:
    return form.emit("expand", form["self"], form.output_shapes[0])


def _flatten(call: Call) -> Indexed:
    shape = call.tensors[0].shape
    if not shape:
        return trivial_notation((), (1,))
    start, end = call.dim("start_dim"), call.dim("end_dim")
    return reshape_notation(shape, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))


def _unflatten(call: Call) -> Indexed:
    shape, dim = call.tensors[0].shape, call.dim()
    sizes = resolve_shape(call["sizes"], shape[dim])
    return reshape_notation(shape, (*shape[:dim], *sizes, *shape[dim + 1 :]))


def _reversed(call: Call) -> str:
    return _permuted(list(reversed(range(len(call.tensors[0].shape)))))


def _matrix_transposed(call: Call) -> str:
    rank = len(call.tensors[0].shape)
    return _permuted([*range(rank - 2), rank - 1, rank - 2])


def _permute_sample(rng: Random) -> Args:
    shape = random_shape(rng)
    return real(*shape), tuple(rng.sample(range(len(shape)), len(shape)))


def _two_dims(rng: Random) -> Args:
    shape = random_shape(rng, 2, 4)
    return real(*shape), rng.randrange(-len(shape), len(shape)), rng.randrange(len(shape))


def _one_dim(rng: Random) -> Args:
    shape = random_shape(rng)
    return real(*shape), rng.randrange(-len(shape), len(shape))


def _flatten_sample(rng: Random) -> Args:
    shape = random_shape(rng)
    start = rng.randrange(len(shape))
    return real(*shape), start, rng.randrange(start, len(shape))


def _grown(rank: int, names: list[str]) -> list[str]:
    """`atleast_2d` and `atleast_3d` put new dims of size 1 where torch puts them."""
    if rank == 2:
        return ["1"] * (2 - len(names)) + names
    return {0: ["1", "1", "1"], 1: ["1", *names, "1"], 2: [*names, "1"]}.get(len(names), names)


def _at_least(call: Call) -> str:
    names = _names(len(call.tensors[0].shape))
    return f"{' '.join(names)} -> {' '.join(_grown(int(call.op[8]), names))}"


def _ravel(call: Call) -> Indexed:
    return reshape_notation(call.tensors[0].shape, (prod(call.tensors[0].shape),))


def _as_sample(rng: Random) -> Args:
    x, shape = _reshape_sample(rng)
    return x, real(*shape)


def _unflatten_sample(rng: Random) -> Args:
    return real(3, 4, 2), *rng.choice(((1, (2, 2)), (1, (-1, 2)), (0, (3, 1)), (-1, (2, 1))))


_view = partial(OpSpec, dtype=Dtype.FIRST, flops=0, view=True, terms="self")
_reshaped = partial(_view, local=_reshape_locally, asks_where=())
_SHAPE = {"size": "shape", "shape": "shape"}

OPS: tuple[OpSpec, ...] = (
    _view("view", _reshape, _reshape_sample, overloads=("reshape", "_unsafe_view"), follows=_SHAPE),
    _view("view_copy", _reshape, _reshape_sample, follows=_SHAPE, view=False),
    _view("permute_copy", _permute, _permute_sample, view=False),
    _view("expand_copy", _expand, _expand_sample, follows=_SHAPE, view=False),
    _reshaped("view_as", _reshape_as, _as_sample, overloads=("reshape_as",), constants=("other",)),
    _view("ravel", _ravel, lambda rng: (real(*random_shape(rng)),)),
    _view("permute", _permute, _permute_sample),
    _view("transpose.int", _transpose, _two_dims, overloads=("swapaxes", "swapdims")),
    _view("movedim.int", _movedim, _two_dims, overloads=("moveaxis.int",)),
    _view("movedim.intlist", _movedim, lambda rng: (real(2, 3, 4), (0, -1), tuple(rng.sample(range(3), 2)))),
    _view("t", _reversed, lambda rng: (real(*random_shape(rng, 1, 2)),)),
    _view("numpy_T", _reversed, lambda rng: (real(*random_shape(rng, 2, 2)),)),
    _view("mT", _matrix_transposed, lambda rng: (real(*random_shape(rng, 2, 4)),), overloads=("adjoint",)),
    _view("expand", _expand, _expand_sample, overloads=("broadcast_to",), follows=_SHAPE),
    _view("expand_as", _expand_as, _expand_as_sample, local=_expand_locally, asks_where=(), constants=("other",)),
    _view("unsqueeze", _unsqueeze, _one_dim),
    _reshaped("squeeze.dim", _squeeze, _one_dim),
    _reshaped("squeeze.dims", _squeeze, lambda rng: (real(1, 3, 1, 2), (0, rng.choice((1, 2))))),
    _reshaped("squeeze", _squeeze, lambda rng: (real(*random_shape(rng)),)),
    _reshaped("atleast_2d", _at_least, lambda rng: (real(*random_shape(rng, 0, 3)),), overloads=("atleast_3d",)),
    _view("flatten.using_ints", _flatten, _flatten_sample),
    _reshaped("unflatten.int", _unflatten, _unflatten_sample),
)  # fmt: skip
