"""Operators that work on each element alone: functions, arithmetic, comparisons, casts, selection by mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import torch

from conjoin.ops.aten import CAST
from conjoin.ops.composites import OVERWRITE
from conjoin.ops.dtypes import Dtype
from conjoin.ops.samples import Sample, boolean, complex_pair, integer, random_shape, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec
from conjoin.ops.tensor_type import TensorType

POSITIVE = (0.2, 3.0)
UNIT = (-0.9, 0.9)

_unary = partial(OpSpec, index="... -> ...")
_binary = partial(OpSpec, index="..., ... -> ...")
_ternary = partial(OpSpec, index="..., ..., ... -> ...")


def _named(names: str, facts: OpSpec) -> list[OpSpec]:
    """The same facts declared of several operators."""
    return [replace(facts, name=name) for name in names.split()]


def _alike(count: int, *literals: object) -> Sample:
    """Operands of one shape, then literals."""

    def sample(rng: Random) -> Args:
        shape = random_shape(rng)
        return (*(real(*shape),) * count, *literals)

    return sample


def _of(kind: Callable[..., TensorType], count: int, *literals: object) -> Sample:
    """Operands of one shape and of the given kind (`boolean`, `integer`), then literals."""
    return lambda rng: (*(kind(*random_shape(rng)),) * count, *literals)


# Flops per element of transcendental functions are the customary 10-20 of vector math libraries' polynomial kernels.
_FLOAT = _unary("", dtype=Dtype.FLOAT, flops=10)
_FIRST = _unary("", dtype=Dtype.FIRST)
_FUNCTIONS = (
    *_named("exp exp2 expm1 sin cos tan sinh cosh tanh asinh atan erf erfc sigmoid sinc", _FLOAT),
    *_named("log log2 log10 log1p sqrt rsqrt reciprocal", replace(_FLOAT, domain=POSITIVE)),
    *_named("lgamma digamma", replace(_FLOAT, domain=POSITIVE, flops=30)),
    *_named("asin acos atanh erfinv", replace(_FLOAT, domain=UNIT)),
    _unary("acosh", dtype=Dtype.FLOAT, flops=10, domain=(1.2, 3.0)),
    *_named("gelu selu celu elu softplus hardswish hardsigmoid silu mish log_sigmoid", replace(_FIRST, flops=10)),
    *_named("relu relu6 leaky_relu hardtanh hardshrink softshrink square", _FIRST),
    *_named("abs", replace(_FIRST, dtype=Dtype.REAL)),
    *_named("neg positive negative", replace(_FIRST, terms="self")),
    *_named("floor ceil round trunc frac sign sgn nan_to_num", _FIRST),
    *_named("isnan isinf isfinite logical_not signbit", _unary("", dtype=Dtype.BOOL, smooth=False)),
    _unary("bitwise_not", dtype=Dtype.FIRST, smooth=False, sample=_of(boolean, 1)),
    _unary("round.decimals", sample={"decimals": (0, 1)}, dtype=Dtype.FIRST),
    _unary("logit", sample={"eps": (None, 1e-6)}, dtype=Dtype.FLOAT, flops=10, domain=(0.1, 0.9)),
    _unary("threshold", sample={"threshold": (0.5,), "value": (0.0,)}, dtype=Dtype.FIRST),
    _unary("clamp", sample={"min": (-1.0, None), "max": (1.0,)}, overloads=("clip",)),
    _ternary("clamp.Tensor", sample=_alike(3)),
    _unary("clamp_min", sample={"min": (-0.5,)}),
    _unary("clamp_max", sample={"max": (0.5,)}),
    _binary("clamp_min.Tensor", overloads=("clamp_max.Tensor",)),
    _unary("pow.Tensor_Scalar", sample={"exponent": (2, 3, 0.5)}, flops=10, domain=POSITIVE),
    _unary("pow.Scalar", sample={"self": (2.0, 0.5)}, flops=10),
    _unary("polygamma", sample=lambda rng: (rng.randint(0, 2), real(*random_shape(rng))), flops=30, dtype=Dtype.FLOAT,
           domain=POSITIVE),
)  # fmt: skip


def _prelu(call: Call) -> str:
    """One slope for all, or one for each channel (dim 1)."""
    x, slopes = (tensor.shape for tensor in call.tensors)
    names = [f"d{i}" for i in range(len(x))]
    slope = "1" if slopes == (1,) and (len(x) < 2 or x[1] != 1) else "d1" if slopes else ""
    return f"{' '.join(names)}, {slope} -> {' '.join(names)}"


def _prelu_sample(rng: Random) -> Args:
    shape = random_shape(rng, 2, 4)
    return real(*shape), real(rng.choice((1, shape[1])))


def _divided(call: Call) -> Dtype:
    """Whole numbers stay so where the quotient is rounded."""
    return Dtype.FLOAT if call["rounding_mode"] is None else Dtype.PROMOTE


_SCALED = {"other": (1.5, 2)}
_ARITHMETIC = (
    _binary("add.Tensor", terms="self + other", hands_on=("self", "other")),
    *_named("sub.Tensor subtract.Tensor", _binary("", terms="self + other", hands_on=("self",))),
    _binary("rsub.Tensor", terms="self + other", hands_on=("other",)),
    *_named("mul.Tensor multiply.Tensor", _binary("", terms="self other")),
    *_named(
        "div.Tensor divide.Tensor true_divide.Tensor", _binary("", dtype=Dtype.FLOAT, terms="self", domain=POSITIVE)
    ),
    *_named("maximum minimum max.other min.other fmax fmin fmod.Tensor remainder.Tensor", _binary("", domain=POSITIVE)),
    *_named("atan2 xlogy.Tensor", _binary("", dtype=Dtype.FLOAT, flops=10, domain=POSITIVE)),
    *_named("logaddexp logaddexp2 hypot", _binary("", flops=10, domain=POSITIVE)),
    _binary("_prelu_kernel", flops=2, sample=_alike(2)),
    _binary("pow.Tensor_Tensor", flops=10, domain=POSITIVE, dtype=Dtype.NUMERIC),
    _binary("floor_divide", domain=POSITIVE, smooth=False),
    _binary("copysign.Tensor", dtype=Dtype.FLOAT),
    _binary("heaviside", smooth=False, domain=POSITIVE),
    _binary("div.Tensor_mode", sample={"rounding_mode": ("floor", "trunc")}, domain=POSITIVE, dtype=_divided),
    *_named("add.Scalar sub.Scalar rsub.Scalar", _unary("", sample=_SCALED)),
    *_named("mul.Scalar multiply.Scalar", _unary("", sample=_SCALED, terms="self")),
    *_named("div.Scalar divide.Scalar", _unary("", sample=_SCALED, terms="self", dtype=Dtype.FLOAT)),
    _unary("div.Scalar_mode", sample={"other": (1.5,), "rounding_mode": ("floor",)}, dtype=_divided),
    _unary("remainder.Scalar", sample=_SCALED, overloads=("fmod.Scalar",)),
    _unary("floor_divide.Scalar", sample=_SCALED, smooth=False),
    _unary("xlogy.Scalar_Other", sample=_SCALED, terms="self", dtype=Dtype.FLOAT, flops=10),
    _unary("xlogy.Scalar_Self", sample={"self": (1.5,)}, dtype=Dtype.FLOAT, flops=10, domain=POSITIVE),
    _binary("lerp.Scalar", sample={"weight": (0.3,)}, terms="self + end", flops=3),
    _ternary("lerp.Tensor", sample=_alike(3), terms="self + end", flops=3),
    _ternary("addcmul", terms="self + tensor1 tensor2", flops=3),
    _ternary("addcdiv", terms="self + tensor1", flops=3, domain=POSITIVE),
    OpSpec("prelu", _prelu, _prelu_sample, flops=2),
)


_COMPARE = _binary("", dtype=Dtype.BOOL, smooth=False)
_BITS = _binary("", sample=_of(integer, 2), smooth=False)
_COMPARISONS = (
    *_named("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", _COMPARE),
    *_named("greater.Tensor greater_equal.Tensor less.Tensor less_equal.Tensor not_equal.Tensor isclose", _COMPARE),
    *_named("logical_and logical_or logical_xor", _COMPARE),
    *_named(
        "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar",
        _unary("", sample={"other": (0.5,)}, dtype=Dtype.BOOL, smooth=False),
    ),
    *_named(
        "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor", _BITS
    ),
    *_named("bitwise_left_shift.Tensor bitwise_right_shift.Tensor __lshift__.Tensor __rshift__.Tensor", _BITS),
    *_named(
        "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar __xor__.Scalar "
        "bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar",
        _unary("", sample=_of(integer, 1, 1), smooth=False),
    ),
)


def _masked(*values: TensorType | float) -> Sample:
    """A tensor, a mask that broadcasts to it, and what goes there."""

    def sample(rng: Random) -> Args:
        shape = random_shape(rng, 1, 3)
        return real(*shape), boolean(*shape[rng.randint(0, 1) :]), *values

    return sample


def _chosen(*choices: float | None) -> Sample:
    """A condition and what to choose from, tensors where None stands."""

    def sample(rng: Random) -> Args:
        shape = random_shape(rng)
        return boolean(*shape), *(real(*shape) if choice is None else choice for choice in choices)

    return sample


_SELECTION = (
    _ternary("where.self", sample=_chosen(None, None), terms="self + other"),
    _binary("where.ScalarOther", sample=_chosen(None, 0.0), terms=lambda call: "self" if call["other"] == 0 else ""),
    _binary("where.ScalarSelf", sample=_chosen(0.0, None), terms=lambda call: "other" if call["self"] == 0 else ""),
    _unary("where.Scalar", sample=_chosen(1.0, 0.0), smooth=False, dtype=Dtype.NUMBER),
    _binary("masked_fill.Scalar", sample=lambda rng: _masked(rng.choice((0, 0.5)))(rng), dtype=Dtype.FIRST,
            terms=lambda call: "self" if call["value"] == 0 else ""),
    OpSpec("masked_fill.Tensor", "..., ..., -> ...", sample=_masked(real()), dtype=Dtype.FIRST, terms="self + value"),
)  # fmt: skip


def _beside(call: Call) -> str:
    """The second operand only lends its dtype."""
    x, other = (len(tensor.shape) for tensor in call.tensors)
    names = " ".join(f"d{i}" for i in range(x))
    return f"{names}, {' '.join(f'e{i}!' for i in range(other))} -> {names}"


def _beside_sample(rng: Random) -> Args:
    return real(*random_shape(rng)), rng.choice((real(2), integer(2)))


_DTYPES = (torch.float64, torch.float64, torch.int64, torch.bool)
_same = partial(OpSpec, index="... -> ...", dtype=Dtype.FIRST, flops=0)
_cast = partial(OpSpec, index="... -> ...", dtype=Dtype.FIRST, flops=0, terms="self")
_IDENTITIES = (
    *_named("clone alias_copy lift_fresh_copy contiguous", _same("", terms="self")),
    _same("alias", view=True, terms="self"),
    _same("detach", view=True, smooth=False, terms="self"),
    _cast(CAST, sample={"dtype": (*_DTYPES, None)}, overloads=("to.dtype_layout",)),
    _cast("to.dtype", sample={"dtype": _DTYPES}),
    OpSpec("type_as", _beside, _beside_sample, dtype=Dtype.LAST, flops=0, terms="self", overloads=("to.other",),
           constants=("other",)),
    _same("fill.Scalar", sample={"value": (0.5,)}),
    OpSpec("fill.Tensor", "..., -> ...", lambda rng: (real(*random_shape(rng)), real()), dtype=Dtype.FIRST, flops=0,
           terms="value"),
    _binary("copy", dtype=Dtype.FIRST, flops=0, terms="src", sample=_alike(2), smooth=False),
    _binary(OVERWRITE, dtype=Dtype.FIRST, flops=0, terms="src", sample=_alike(2)),
)  # fmt: skip

_COMPLEX = (
    _binary("complex", dtype=Dtype.COMPLEX, flops=0, terms="real + imag", sample=_alike(2)),
    _binary("polar", dtype=Dtype.COMPLEX, flops=20, sample=_alike(2), domain=POSITIVE),
    *_named("real imag", _unary("", dtype=Dtype.REAL, flops=0, terms="self", view=True, sample=_of(complex_pair, 1))),
    *_named("_conj conj_physical resolve_conj", _same("", terms="self", sample=_of(complex_pair, 1))),
    _unary("angle", dtype=Dtype.REAL, flops=10, sample=_of(complex_pair, 1)),
    OpSpec("view_as_real", lambda call: Indexed("... -> ... p!", (("p", 2),)), dtype=Dtype.REAL, flops=0, terms="self",
           view=True, sample=_of(complex_pair, 1)),
    OpSpec("view_as_complex", "... p! -> ...", dtype=Dtype.COMPLEX, flops=0, terms="self", view=True,
           sample=lambda rng: (real(*random_shape(rng), 2),)),
)  # fmt: skip

_PASSES = {
    "square": 7, "pow.Tensor_Scalar": 7, "rsqrt": 7, "sqrt": 5, "abs": 5, "log1p": 5, "expm1": 5, "sin": 5, "cos": 7,
    "erf": 11, "reciprocal": 8,
}  # fmt: skip
"""Of functions whose gradients have no kernels of their own."""
_PLAIN = (*_FUNCTIONS, *_ARITHMETIC, *_COMPARISONS, *_SELECTION, *_IDENTITIES, *_COMPLEX)
OPS: tuple[OpSpec, ...] = tuple(replace(spec, backward_passes=_PASSES.get(spec.name, 0)) for spec in _PLAIN)
