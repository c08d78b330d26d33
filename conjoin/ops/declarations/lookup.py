"""Operators whose integer operand addresses a dim: embedding, gather, scatter, indexing."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch

from conjoin.ops.aten import CAST
from conjoin.ops.composites import EMBEDDING_BAG, RAGGED_EMBEDDING_BAG
from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import LocalForm, move_addresses
from conjoin.ops.notation import NotationError, broadcast_names, broadcast_shape
from conjoin.ops.samples import integer, random_shape, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def names_but(rank: int, dim: int, special: str) -> str:
    """Names of all dims, one of them special."""
    return " ".join(special if i == dim else f"d{i}" for i in range(rank))


def _check_dense(call: Call, name: str) -> None:
    if call[name]:
        raise NotationError(f"{call.op} with {name} has a sparse gradient, which cannot be summed over devices")


def _embedding(call: Call) -> str:
    """Gradients scaled by how often a row is looked up need all addresses and all rows."""
    _check_dense(call, "sparse")
    return "v! d, ...!@v -> ...! d" if call["scale_grad_by_freq"] else "v d, ...@v -> ... d"


def _gather(call: Call) -> str:
    """Off the gathered dim the index may cover a part of the input only; then that dim is whole."""
    _check_dense(call, "sparse_grad")
    dim = call.dim()
    shape, index = call["self"].shape, call["index"].shape
    plain = [n == m for n, m in zip(shape, index, strict=True)]
    left = [("k" if i == dim else f"d{i}" if plain[i] else f"u{i}!") for i in range(len(shape))]
    right = [("j" if i == dim else f"d{i}" if plain[i] else f"w{i}!") for i in range(len(shape))]
    return f"{' '.join(left)}, {' '.join(right)}@k -> {' '.join(right)}"


def _take_along(call: Call) -> str:
    """Off the dim taken along, input and indices broadcast."""
    dim, shapes = call.dim(), [list(call[name].shape) for name in ("self", "indices")]
    for shape in shapes:
        shape[dim] = 1
    full = broadcast_shape(shapes)
    sides = [broadcast_names([f"d{i}" for i in range(len(full))], shape, full).split() for shape in shapes]
    kept = [f"d{i}" for i in range(len(full))]
    for names, letter in zip((*sides, kept), "kjj", strict=True):
        names[dim] = letter
    return f"{' '.join(sides[0])}, {' '.join(sides[1])}@k -> {' '.join(kept)}"


def _index_select(call: Call) -> str:
    rank, dim = len(call["self"].shape), call.dim()
    return f"{names_but(rank, dim, 'k')}, j@k -> {names_but(rank, dim, 'j')}"


def _indexed_dims(call: Call) -> list[int]:
    """The dims that x[i, :, j] indexes with integers."""
    taken = [i for i, index in enumerate(call["indices"]) if index is not None]
    if not taken:
        raise NotationError(f"{call.op} is called without indices")
    if any(call["indices"][i].dtype in (torch.bool, torch.uint8) for i in taken):
        raise NotationError(f"{call.op} with a mask has a shape that depends on the mask's values")
    return taken


def _index(call: Call) -> Indexed:
    """x[i, :, j]: indexed dims are whole, the broadcast index dims come where torch puts them, the rest pass."""
    left, sides, right, sizes = indexing(call, "")
    return Indexed(f"{left}, {', '.join(sides)} -> {' '.join(right)}", sizes)


def indexing(call: Call, mark: str) -> tuple[str, list[str], list[str], tuple[tuple[str, int], ...]]:
    """Notation of the tensor, of each index, of what reading gives, and the sizes of the index dims."""
    rank, given, taken = len(call["self"].shape), call["indices"], _indexed_dims(call)
    broadcast = broadcast_shape(given[i].shape for i in taken)
    new = [f"j{i}{mark}" for i in range(len(broadcast))]
    kept = [f"d{i}" for i in range(rank) if i not in taken]
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    before = taken[0] if adjacent else 0
    left = " ".join(f"k{i}!" if i in taken else f"d{i}" for i in range(rank))
    sides = [f"{broadcast_names(new, given[i].shape, broadcast)}@k{i}" for i in taken]
    sizes = tuple((f"j{i}", n) for i, n in enumerate(broadcast))
    return left, sides, [*kept[:before], *new, *kept[before:]], sizes


def _bag_ragged(call: Call) -> Indexed:
    """Bags of any length: the indices are whole; table columns may be split, and rows where bags add up."""
    rows = "v" if call["mode"] == "sum" and call["padding_idx"] is None else "v!"
    weights = ", i!" if call["per_sample_weights"] is not None else ""
    bags = call["offsets"].shape[0] - int(call["include_last_offset"])
    return Indexed(f"{rows} d, i!@v, o!@start{weights} -> b! d", (("b", bags), ("start", 1)))


def _bag_regular(call: Call) -> str:
    """Bags of one length l: the batch may be split; rows and l where the bag is a sum."""
    total = call["mode"] == "sum" and call["padding_idx"] is None
    rows, length = ("v", "l") if total else ("v!", "l!")
    weights = f", b {length}" if call["per_sample_weights"] is not None else ""
    return f"{rows} d, b {length}@v{weights} -> b d"


def _bag_terms(call: Call) -> str:
    """A maximum is not linear."""
    return "weight per_sample_weights" if call["mode"] != "max" else ""


def _local_bag(form: LocalForm) -> Any:
    """Rows outside the piece get weight zero."""
    if "v" not in form.pieces:
        return form.run()
    moved, inside = move_addresses(form["indices"], form.pieces["v"], form.emit)
    weights = form.emit(CAST, inside, form.call["weight"].dtype)
    if form["per_sample_weights"] is not None:
        weights = form.emit("mul.Tensor", form["per_sample_weights"], weights)
    return form.run(indices=moved, per_sample_weights=weights)


def _one_hot(call: Call) -> Indexed:
    if call["num_classes"] < 0:
        raise NotationError("one_hot without a number of classes has a shape that depends on its values")
    return Indexed("... -> ... c!", (("c", call["num_classes"]),))


def _membership(call: Call) -> str:
    """Each element is looked for in all of the others."""
    searched, among = ("elements", "test_elements") if call.op.startswith("isin") else ("self", "boundaries")
    whole = " ".join(f"k{i}!" for i in range(len(call[among].shape)))
    names = " ".join(f"d{i}" for i in range(len(call[searched].shape)))
    return f"{names}, {whole} -> {names}"


def _searchsorted(call: Call) -> str:
    """Rows of values looked for in sorted rows; in one sorted row, any values."""
    rank = len(call["self"].shape)
    lead = [f"d{i}" for i in range(rank - 1)]
    rows = lead if len(call["sorted_sequence"].shape) > 1 else []
    values = " ".join([*lead, "m"] if rank else [])
    sorter = f", {' '.join([*rows, 'k!'])}" if call["sorter"] is not None else ""
    return f"{' '.join([*rows, 'k!'])}, {values}{sorter} -> {values}"


def _embedding_sample(rng: Random) -> Args:
    rows = rng.randint(2, 6)
    padding = rng.choice((-1, rng.randrange(rows)))
    return real(rows, rng.randint(1, 4)), integer(*random_shape(rng, 1, 3)), padding, rng.random() < 0.2


def _gather_sample(rng: Random) -> Args:
    shape = [rng.randint(2, 4) for _ in range(rng.randint(1, 3))]
    dim = rng.randrange(len(shape))
    index = [rng.randint(1, 5) if i == dim else n - (rng.random() < 0.2) for i, n in enumerate(shape)]
    return real(*shape), dim, integer(*index)


def _take_along_sample(rng: Random) -> Args:
    shape = [rng.randint(2, 4) for _ in range(rng.randint(1, 3))]
    dim = rng.randrange(-len(shape), len(shape))
    index = [1 if rng.random() < 0.2 else n for n in shape]
    index[dim] = rng.randint(1, 5)
    return real(*shape), integer(*index), dim


def _index_select_sample(rng: Random) -> Args:
    shape = random_shape(rng)
    return real(*shape), rng.randrange(-len(shape), len(shape)), integer(rng.randint(1, 4))


def _index_sample(rng: Random) -> Args:
    a, b = integer(2, 3), integer(3)
    return real(4, 5, 3), rng.choice(((a,), (None, a), (a, b), (a, None, b), (None, a, b), (None, b)))


def _ragged_sample(rng: Random) -> Args:
    mode, i = rng.choice(("sum", "sum", "mean", "max")), rng.randint(3, 6)
    weights = real(i) if mode == "sum" and rng.random() < 0.5 else None
    padding = rng.choice((None, None, 1))
    return real(5, rng.randint(1, 4)), integer(i), integer(1), weights, mode, False, padding


def _regular_sample(rng: Random) -> Args:
    mode = rng.choice(("sum", "sum", "mean", "max"))
    b, length = rng.randint(1, 4), rng.randint(1, 4)
    weights = real(b, length) if mode == "sum" and rng.random() < 0.5 else None
    padding = rng.choice((None, None, 1))
    return real(rng.randint(2, 5), rng.randint(1, 4)), integer(b, length), weights, mode, padding


def _among_sample(rng: Random) -> Args:
    return real(*random_shape(rng, 0, 3)), real(rng.randint(1, 5))


def _searchsorted_sample(rng: Random) -> Args:
    shape = random_shape(rng)
    return real(*rng.choice(((), shape[:-1])), rng.randint(1, 5)), real(*shape)


_read = partial(OpSpec, flops=0, dtype=Dtype.FIRST)
_bag = partial(OpSpec, dtype=Dtype.FIRST, terms=_bag_terms, local=_local_bag, domain=(0.1, 2.0))
_search = partial(OpSpec, flops=8, smooth=False, dtype=lambda call: Dtype.INT32 if call["out_int32"] else Dtype.INT64)

OPS: tuple[OpSpec, ...] = (
    _read("embedding", _embedding, _embedding_sample, terms="weight", follows={"padding_idx": "@v"}),
    _bag(EMBEDDING_BAG, _bag_regular, _regular_sample),
    _bag(RAGGED_EMBEDDING_BAG, _bag_ragged, _ragged_sample),
    _read("gather", _gather, _gather_sample, terms="self"),
    _read("take_along_dim", _take_along, _take_along_sample, terms="self"),
    _read("index_select", _index_select, _index_select_sample, terms="self"),
    _read("index.Tensor", _index, _index_sample, terms="self", overloads=("_unsafe_index.Tensor",)),
    OpSpec(
        "one_hot",
        _one_hot,
        lambda rng: (integer(*random_shape(rng, 1, 3)), 5),
        dtype=Dtype.INT64,
        flops=0,
        smooth=False,
    ),
    _search("isin.Tensor_Tensor", _membership, _among_sample, dtype=Dtype.BOOL),
    _search("bucketize.Tensor", _membership, _among_sample),
    _search("searchsorted.Tensor", _searchsorted, _searchsorted_sample),
)
