"""Reductions and scans: a dim is summed, averaged, or must be whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from conjoin.ops.composites import PEAK
from conjoin.ops.declarations.by_parts import log_sum_by_parts, softmax_by_parts
from conjoin.ops.dtypes import Dtype
from conjoin.ops.notation import NotationError, broadcast_names, broadcast_shape
from conjoin.ops.samples import Sample, random_shape, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def reduce_over(mark: str, outputs: int = 1, *, empty: bool = True) -> Callable[[Call], str]:
    """Notation of a reduction over `dim` (all dims when absent or, for most operators, `empty`).

    The mark says how: summed, averaged `~`, whole `!`.
    """

    def write(call: Call) -> str:
        dims = call.dims(empty=empty)
        names = [f"d{i}" for i in range(len(call.tensors[0].shape))]
        left = [name + mark if i in dims else name for i, name in enumerate(names)]
        kept = [("1" if call["keepdim"] else "") if i in dims else name for i, name in enumerate(names)]
        return f"{' '.join(left)} -> {', '.join([' '.join(kept)] * outputs)}"

    return write


def _peak(call: Call) -> str:
    """The greatest along some dims, which stay."""
    dims = call.dims(empty=False)
    names = [f"d{i}" for i in range(len(call.tensors[0].shape))]
    marked = " ".join(name + "^" * (i in dims) for i, name in enumerate(names))
    return f"{marked} -> {' '.join('1' if i in dims else name for i, name in enumerate(names))}"


def along(name: str = "dim", outputs: int = 1) -> Callable[[Call], str]:
    """Notation of scans and sorts: the dim named by an attribute stays, and stays whole."""

    def write(call: Call) -> str:
        rank, dims = len(call.tensors[0].shape), call.dims(name)
        marked = " ".join(f"d{i}!" if i in dims else f"d{i}" for i in range(rank))
        return f"{marked} -> {', '.join([marked] * outputs)}"

    return write


def _topk(call: Call) -> Indexed:
    rank, dim = len(call.tensors[0].shape), call.dim()
    left = [f"d{i}!" if i == dim else f"d{i}" for i in range(rank)]
    right = ["k!" if i == dim else f"d{i}" for i in range(rank)]
    return Indexed(f"{' '.join(left)} -> {' '.join(right)}, {' '.join(right)}", (("k", call["k"]),))


def _matrix_norm(call: Call) -> str:
    """A norm of two dims, the last if nothing else is said."""
    rank, dims = len(call.tensors[0].shape), call.dims()
    left = " ".join(f"d{i}!" if i in dims else f"d{i}" for i in range(rank))
    return f"{left} -> {' '.join('1' * bool(call['keepdim']) if i in dims else f'd{i}' for i in range(rank))}"


def _diff(call: Call) -> Indexed:
    """Differences of neighbours, n times over, each time one less; values before and after only lengthen the dim."""
    rank, dim = len(call["self"].shape), call.dim()
    sides = [" ".join(f"k{place}!" if i == dim else f"d{i}" for i in range(rank)) for place in range(len(call.tensors))]
    if call["n"] < 1:
        raise NotationError(f"{call.op} is called for {call['n']} differences, which leaves values as they are")
    length = max(0, sum(tensor.shape[dim] for tensor in call.tensors) - call["n"])
    return Indexed(f"{', '.join(sides)} -> {sides[0].replace('k0!', 'j!')}", (("j", length),))


def _histogram(call: Call) -> Indexed:
    """Counts add up, unless the range they are counted in is found from all the values."""
    mark = "!" if call["min"] == call["max"] else ""
    names = " ".join(f"d{i}{mark}" for i in range(len(call.tensors[0].shape)))
    return Indexed(f"{names} -> b!", (("b", call["bins"]),))


def _diff_sample(rng: Random) -> Args:
    dim = rng.randrange(3)
    ends = [
        real(*(1 if i == dim else n for i, n in enumerate((4, 5, 3)))) if rng.random() < 0.4 else None for _ in "ab"
    ]
    return real(4, 5, 3), rng.randint(1, 2), dim, *ends


def _histogram_sample(rng: Random) -> Args:
    return real(*random_shape(rng)), rng.randint(1, 5), *rng.choice(((-2.0, 2.0), (0, 0), (-1, 1)))


def _renorm(call: Call) -> str:
    """Every slice along a dim is scaled down by its own norm."""
    names = " ".join(f"d{i}" if i == call.dim() else f"d{i}!" for i in range(len(call.tensors[0].shape)))
    return f"{names} -> {names}"


def _cross(call: Call) -> str:
    """Products of vectors of three along a dim."""
    full = broadcast_shape(tensor.shape for tensor in call.tensors)
    dim = call.dim(rank=len(full))
    names = ["k!" if i == dim else f"d{i}" for i in range(len(full))]
    return f"{', '.join(broadcast_names(names, t.shape, full) for t in call.tensors)} -> {' '.join(names)}"


def _distance(call: Call) -> str:
    """The last dim is reduced, the rest broadcasts."""
    kept = " 1" if call["keepdim"] else ""
    return f"... k!, ... k! -> ...{kept}"


def _all_sample(rng: Random) -> Args:
    return (real(*random_shape(rng)),)


def _dims_sample(rng: Random) -> Args:
    shape = random_shape(rng)
    dims = tuple(rng.sample(range(len(shape)), rng.randint(1, len(shape))))
    return real(*shape), dims, rng.random() < 0.5


def _dim_sample(rng: Random) -> Args:
    shape = random_shape(rng)
    return real(*shape), rng.randrange(-len(shape), len(shape)), rng.random() < 0.5


def _scan_sample(rng: Random) -> Args:
    return _dim_sample(rng)[:2]


def _stable_sample(rng: Random) -> Args:
    x, dim = _scan_sample(rng)
    return x, True, dim


def _ranked_sample(rng: Random) -> Args:
    x, dim = _scan_sample(rng)
    return x, rng.randint(1, x.shape[dim]), dim


def _some(*rest: object) -> Sample:
    """A tensor with dims of two and more, dims to reduce, and further arguments."""
    return lambda rng: (real(3, 4, 5), tuple(rng.sample(range(3), rng.randint(1, 2))), *rest)


def _norm_sample(rng: Random) -> Args:
    return real(3, 4, 5), rng.choice((2, 1, float("inf"))), rng.choice(((1,), (0, 2), None)), rng.random() < 0.5


def _rows_sample(rng: Random) -> Args:
    m, n, k = (rng.randint(1, 4) for _ in range(3))
    batch = rng.choice(((), (2,)))
    return real(*batch, m, k), real(*batch, n, k)


def _cross_sample(rng: Random) -> Args:
    shape = [*random_shape(rng, 1, 2), 3]
    return real(*shape), real(*(1 if rng.random() < 0.2 and n != 3 else n for n in shape)), -1


_PAIR = (Dtype.FIRST, Dtype.INT64)
_sum = partial(OpSpec, index=reduce_over(""), terms="self", dtype=Dtype.TOTAL)
_mean = partial(OpSpec, index=reduce_over("~"), terms="self", dtype=Dtype.FIRST)
_extreme = partial(OpSpec, index=reduce_over("!"), dtype=Dtype.FIRST)
_extreme_at = partial(OpSpec, index=reduce_over("!", 2), dtype=_PAIR)
_truth = partial(OpSpec, index=reduce_over("!"), dtype=Dtype.BOOL, smooth=False)
_count = partial(OpSpec, index=reduce_over(""), dtype=Dtype.INT64, smooth=False)
_spread = partial(OpSpec, index=reduce_over("!"), dtype=Dtype.REAL, flops=4)
_moments = partial(OpSpec, index=reduce_over("!", 2), dtype=(Dtype.REAL, Dtype.FIRST), flops=5)
_length = partial(OpSpec, index=reduce_over("!"), dtype=Dtype.REAL, flops=2)
_scan = partial(OpSpec, index=along(), sample=_scan_sample)
_order = partial(OpSpec, index=along(outputs=2), dtype=_PAIR, flops=10)

OPS: tuple[OpSpec, ...] = (
    _sum("sum", sample=_all_sample),
    _sum("nansum", index=reduce_over("", empty=False), sample=_dims_sample, terms=""),
    _sum("sum.dim_IntList", sample=_dims_sample),
    _mean("mean", sample=_all_sample),
    _mean("mean.dim", sample=_dims_sample),
    _extreme("nanmean", index=reduce_over("!", empty=False), sample=_dims_sample),
    _extreme("quantile.scalar", sample=lambda rng: (real(3, 4, 5), 0.3, rng.choice((None, 1, -1)), rng.random() < 0.5)),
    OpSpec(
        "trapezoid.dx", reduce_over("!"), lambda rng: (real(3, 4, 5), 0.5, rng.randrange(-3, 3)), terms="y",
        dtype=Dtype.FLOAT,
    ),
    _extreme("amax", sample=_dims_sample, overloads=("amin",)),
    _extreme("max", sample=_all_sample, overloads=("min", "median")),
    _extreme_at("max.dim", sample=_dim_sample, overloads=("min.dim", "median.dim", "mode")),
    _extreme_at("kthvalue", sample=lambda rng: (*_ranked_sample(rng), rng.random() < 0.5)),
    _extreme("prod", sample=_all_sample, dtype=Dtype.TOTAL),
    _extreme("prod.dim_int", sample=_dim_sample, dtype=Dtype.TOTAL),
    _truth("any", sample=_all_sample, overloads=("all",)),
    _truth("any.dim", sample=_dim_sample, overloads=("all.dim",)),
    _truth("any.dims", index=reduce_over("!", empty=False), sample=_dims_sample, overloads=("all.dims",)),
    OpSpec("argmax", reduce_over("!"), _dim_sample, overloads=("argmin",), dtype=Dtype.INT64, smooth=False),
    _count("count_nonzero.dim_IntList", sample=lambda rng: _dims_sample(rng)[:2]),
    _count("count_nonzero", sample=_all_sample),
    _spread("var.correction", sample=_some(), overloads=("std.correction",)),
    _spread("var.dim", sample=_some(), overloads=("std.dim",)),
    _spread("var", sample=lambda rng: (real(3, 4),), overloads=("std",)),
    _moments("var_mean.correction", sample=_some(), overloads=("std_mean.correction",)),
    _moments("var_mean.dim", sample=_some(), overloads=("std_mean.dim",)),
    _length("linalg_vector_norm", sample=_norm_sample, ),
    _length("norm.ScalarOpt_dim", sample=lambda rng: (real(3, 4, 5), 2, (rng.randrange(3),))),
    _length("norm.Scalar", sample=lambda rng: (real(3, 4, 5), 2)),
    _length("linalg_norm", sample=lambda rng: (real(3, 4, 5), None, (rng.randrange(3),), rng.random() < 0.5)),
    OpSpec("linalg_matrix_norm.str_ord", _matrix_norm, lambda rng: (real(2, 3, 4), "fro"), dtype=Dtype.REAL, flops=2),
    OpSpec("logsumexp", reduce_over("!", empty=False), _dims_sample, flops=12, dtype=Dtype.FLOAT,
           by_parts=log_sum_by_parts, kernels="softmax"),
    OpSpec(PEAK, _peak, lambda rng: _dims_sample(rng)[:2], dtype=Dtype.FIRST, smooth=False),
    _scan("cumsum", terms="self", dtype=Dtype.TOTAL, kernels="scan"),
    _scan("cumprod", dtype=Dtype.TOTAL, kernels="scan"),
    _scan("logcumsumexp", flops=12, dtype=Dtype.FIRST, kernels="scan"),
    OpSpec("cummax", along(outputs=2), _scan_sample, overloads=("cummin",), dtype=_PAIR, kernels="scan"),
    _scan("diff", index=_diff, sample=_diff_sample, terms="self + prepend + append"),
    OpSpec("histc", _histogram, _histogram_sample, dtype=Dtype.FIRST, flops=4, smooth=False),
    _order("sort", sample=_scan_sample),
    _order("sort.stable", sample=_stable_sample),
    _scan("argsort", dtype=Dtype.INT64, flops=10, smooth=False),
    _scan("argsort.stable", sample=_stable_sample, dtype=Dtype.INT64, flops=10, smooth=False),
    OpSpec("topk", _topk, _ranked_sample, dtype=_PAIR, flops=4),
    _scan("softmax.int", overloads=("log_softmax.int",), flops=12, dtype=Dtype.FIRST, by_parts=softmax_by_parts,
          kernels="softmax"),
    _scan("_softmax", sample=lambda rng: (*_scan_sample(rng), False), overloads=("_log_softmax",), flops=12,
          by_parts=softmax_by_parts, kernels="softmax"),
    OpSpec("renorm", _renorm, lambda rng: (real(3, 4, 5), 2, rng.randrange(3), 1.0), dtype=Dtype.FIRST, flops=4),
    OpSpec("cdist", "... m k!, ... n k! -> ... m n", _rows_sample, flops=3, dtype=Dtype.FIRST),
    OpSpec("pairwise_distance", _distance, lambda rng: (real(3, 4), real(*rng.choice(((3,), ())), 4)), flops=3),
    OpSpec("linalg_cross", _cross, _cross_sample, flops=3, overloads=("cross",), terms="self other"),
    OpSpec("trace", "m! n! -> ", lambda rng: (real(*random_shape(rng, 2, 2)),), terms="self", dtype=Dtype.TOTAL),
)  # fmt: skip
