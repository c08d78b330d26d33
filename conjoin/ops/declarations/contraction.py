"""Products summed over an index: linear layers, matrix products, einsum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from conjoin.ops.composites import LINEAR_RELU, SCALED_LINEAR
from conjoin.ops.dtypes import Dtype
from conjoin.ops.notation import broadcast_names, broadcast_shape
from conjoin.ops.samples import random_shape, real
from conjoin.ops.spec import Args, Call, OpSpec


def _matmul(call: Call) -> str:
    left, right = (len(tensor.shape) for tensor in call.tensors)
    if left == 1 and right == 1:
        return "k, k -> "
    if left == 1:
        return "k, ... k n -> ... n"
    return "... m k, k -> ... m" if right == 1 else "... m k, ... k n -> ... m n"


def _inner(call: Call) -> str:
    """The last dims are summed over, all others kept; a number multiplies."""
    left, right = (len(tensor.shape) for tensor in call.tensors)
    names = [" ".join(f"{letter}{i}" for i in range(rank - 1)) for letter, rank in (("m", left), ("n", right))]
    if left == 0 or right == 0:
        return "..., ... -> ..."
    return f"{names[0]} k, {names[1]} k -> {names[0]} {names[1]}"


def _einsum(call: Call) -> str:
    """The equation is index notation already: letters become names; what an implicit output leaves out is summed."""
    equation = str(call["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) - {",", "."} if left.count(letter) == 1))
        right = ("..." if "..." in left else "") + right
    return f"{','.join(_spelled(part) for part in left.split(','))} -> {_spelled(right)}"


def _spelled(letters: str) -> str:
    """`...ab` as `... a b`."""
    return " ".join(letters.replace("...", ".")).replace(".", "...")


def _tensordot(call: Call) -> str:
    """Dims of both operands paired and summed over; the rest of the first, then of the second, remain."""
    ranks = [len(tensor.shape) for tensor in call.tensors]
    paired = [[dim % rank for dim in call[name]] for name, rank in zip(("dims_self", "dims_other"), ranks, strict=True)]
    sides = [
        [f"k{dims.index(i)}" if i in dims else f"{letter}{i}" for i in range(rank)]
        for letter, dims, rank in zip("mn", paired, ranks, strict=True)
    ]
    kept = [name for side in sides for name in side if not name.startswith("k")]
    return f"{' '.join(sides[0])}, {' '.join(sides[1])} -> {' '.join(kept)}"


def _kron(call: Call) -> str:
    """Each dim of the result is made of one of both, the first varying slower; missing leading dims have size 1."""
    ranks = [len(tensor.shape) for tensor in call.tensors]
    full = max(ranks)
    names = [[f"{letter}{i}" for i in range(full - rank, full)] for letter, rank in zip("ab", ranks, strict=True)]
    known = {*names[0], *names[1]}
    dims = [" ".join(f"{letter}{i}" for letter in "ab" if f"{letter}{i}" in known) for i in range(full)]
    return f"{' '.join(names[0])}, {' '.join(names[1])} -> {' '.join(f'({dim})' for dim in dims)}"


def _plus(product: str) -> Callable[[Call], str]:
    """What is added to a product broadcasts to its shape."""

    def write(call: Call) -> str:
        left, right = (dims.split() for dims in product.split("->")[0].split(","))
        sizes = dict(zip([*left, *right], [*call.tensors[-2].shape, *call.tensors[-1].shape], strict=False))
        names = product.split("->")[1].split()
        return f"{broadcast_names(names, call.tensors[0].shape, [sizes[name] for name in names])}, {product}"

    return write


def _cosine(call: Call) -> str:
    """Broadcast operands; the dim that is normalised and summed over is whole."""
    full = broadcast_shape(tensor.shape for tensor in call.tensors)
    dim = call.dim(rank=len(full))
    names = ["k!" if i == dim else f"d{i}" for i in range(len(full))]
    sides = [broadcast_names(names, tensor.shape, full) for tensor in call.tensors]
    return f"{', '.join(sides)} -> {' '.join(name for name in names if name != 'k!')}"


def _cosine_sample(rng: Random) -> Args:
    shape = random_shape(rng, 1, 3)
    return real(*shape), real(*shape[rng.randint(0, 1) :]), -1


def _matmul_sample(rng: Random) -> Args:
    m, k, n, b = (rng.randint(1, 5) for _ in range(4))
    left: tuple[int, ...] = rng.choice(((k,), (m, k), (b, m, k), (1, m, k), (2, b, m, k)))
    right: tuple[int, ...] = rng.choice(((k,), (k, n), (b, k, n)))
    return real(*left), real(*right)


def _inner_sample(rng: Random) -> Args:
    k = rng.randint(1, 4)
    left, right = random_shape(rng, 0, 2), random_shape(rng, 0, 2)
    return rng.choice(((real(*left, k), real(*right, k)), (real(*left, k), real()), (real(), real(k))))


_EQUATIONS = (
    "bsd,btd->bst", "bhld,bhsd->bhls", "ij,jk", "bi,bj->bij", "bsec,bsd->ecbd", "abc->ca", "bd,bd->b", "bd,de,be->b",
    "...ij,...jk->...ik", "...a,ab",
)  # fmt: skip


def _einsum_sample(rng: Random) -> Args:
    equation = rng.choice(_EQUATIONS)
    sizes = {letter: (rng.randint(1, 4),) for letter in "abcdehijklst"} | {".": random_shape(rng, 0, 2)}
    operands = equation.split("->")[0].replace("...", ".").split(",")
    return equation, tuple(real(*sum((sizes[letter] for letter in operand), ())) for operand in operands), None


def _tensordot_sample(rng: Random) -> Args:
    k, j = rng.randint(1, 4), rng.randint(1, 4)
    return rng.choice(
        (
            (real(2, k, 3), real(k, 4), (1,), (0,)),
            (real(k, 3, j), real(j, k, 2), (0, -1), (1, 0)),
            (real(k), real(k), (0,), (0,)),
            (real(k, 2), real(3, j), (), ()),
        )
    )


def _linear_sample(rng: Random) -> Args:
    k, n = rng.randint(1, 5), rng.randint(1, 5)
    return real(*random_shape(rng, 0, 3), k), real(n, k), rng.choice((real(n), None))


def _linear_relu_sample(rng: Random) -> Args:
    k, n = rng.randint(1, 5), rng.randint(1, 5)
    return real(*random_shape(rng, 0, 3), k), real(n, k), real(n)


def _addmm_sample(rng: Random) -> Args:
    m, k, n = (rng.randint(2, 5) for _ in range(3))
    return rng.choice((real(m, n), real(n), real(m, 1), real(1, n), real())), real(m, k), real(k, n)


def _baddbmm_sample(rng: Random) -> Args:
    b, m, k, n = (rng.randint(2, 4) for _ in range(4))
    return rng.choice((real(b, m, n), real(m, n), real(b, 1, n))), real(b, m, k), real(b, k, n)


def _addbmm_sample(rng: Random) -> Args:
    b, m, k, n = (rng.randint(1, 4) for _ in range(4))
    return rng.choice((real(m, n), real(n))), real(b, m, k), real(b, k, n)


def _bilinear_sample(rng: Random) -> Args:
    i, j, o = (rng.randint(1, 4) for _ in range(3))
    batch = random_shape(rng, 1, 2)
    return real(*batch, i), real(*batch, j), real(o, i, j), rng.choice((real(o), None))


def _square_sample(rng: Random) -> Args:
    side = rng.randint(1, 3)
    return (real(*random_shape(rng, 0, 2), side, side),)


def _cubic(call: Call, sizes: Mapping[str, int]) -> float:
    """A factorisation of every matrix, and as much again to use it."""
    return float(2 * call.tensors[0].num_elements * sizes["n"])


def _triangular(call: Call) -> str:
    return "... m! k!, ... m! n -> ... m! n" if call["left"] else "... n! k!, ... m n! -> ... m n!"


def _triangular_sample(rng: Random) -> Args:
    side, columns, left = rng.randint(1, 3), rng.randint(1, 4), rng.random() < 0.5
    batch = random_shape(rng, 0, 2)
    right = (side, columns) if left else (columns, side)
    return real(*batch, side, side), real(*batch, *right), rng.random() < 0.5, left, rng.random() < 0.5


_product = partial(OpSpec, flops=2, one_dtype=True)

OPS: tuple[OpSpec, ...] = (
    _product("linear", "... k, n k, n -> ... n", _linear_sample, terms="input weight + bias"),
    _product(SCALED_LINEAR, "... k, n k, n -> ... n", _linear_sample, terms="input weight + bias"),
    _product(LINEAR_RELU, "... k!, n k!, n -> ... n", _linear_relu_sample),
    _product("matmul", _matmul, _matmul_sample, terms="self other"),
    _product("mm", "m k, k n -> m n", terms="self mat2"),
    _product("bmm", "b m k, b k n -> b m n", terms="self mat2"),
    _product("mv", "m k, k -> m", terms="self vec"),
    _product("dot", "k, k -> ", terms="self tensor"),
    _product("vdot", "k, k -> ", terms="self other"),
    _product("inner", _inner, _inner_sample, terms="self other"),
    OpSpec("outer", "m, n -> m n", terms="self vec2", overloads=("ger",)),
    OpSpec(
        "kron", _kron, lambda rng: (real(*random_shape(rng, 1, 2)), real(*random_shape(rng, 1, 2))), terms="self other"
    ),
    _product("tensordot", _tensordot, _tensordot_sample, terms="self other"),
    _product("addmm", _plus("m k, k n -> m n"), _addmm_sample, terms="self + mat1 mat2"),
    _product("addmv", _plus("m k, k -> m"), lambda rng: (real(4), real(4, 3), real(3)), terms="self + mat vec"),
    OpSpec("addr", _plus("m, n -> m n"), lambda rng: (real(4, 3), real(4), real(3)), terms="self + vec1 vec2", flops=3),
    _product("baddbmm", _plus("b m k, b k n -> b m n"), _baddbmm_sample, terms="self + batch1 batch2"),
    _product("addbmm", _plus("b m k, b k n -> m n"), _addbmm_sample, terms="self + batch1 batch2"),
    _product("einsum", _einsum, _einsum_sample, terms="tensors*"),
    _product("bilinear", "... i, ... j, o i j, o -> ... o", _bilinear_sample, terms="input1 input2 weight + bias"),
    OpSpec("linalg_inv", "... m! n! -> ... m! n!", _square_sample, flops=_cubic, overloads=("inverse",)),
    OpSpec(
        "linalg_solve_triangular", _triangular, _triangular_sample,
        terms="B", domain=(0.5, 2.0), flops=1, one_dtype=True,
    ),
    OpSpec("linalg_det", "... m! n! -> ...", _square_sample, flops=_cubic, overloads=("det",)),
    OpSpec("cosine_similarity", _cosine, _cosine_sample, flops=6, dtype=Dtype.FLOAT),
)
