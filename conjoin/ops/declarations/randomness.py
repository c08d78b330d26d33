"""Operators that draw random numbers: what is drawn once for several elements keeps their dims whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from random import Random

from conjoin.ops.declarations.creation import SIZED, like_sample, shape_sample, sized
from conjoin.ops.dtypes import Dtype
from conjoin.ops.samples import random_shape, real
from conjoin.ops.spec import Args, Call, Indexed, KernelBytes, OpSpec, Shapes


def _multinomial(call: Call) -> Indexed:
    """Every row is drawn from on its own."""
    row = "n " * (len(call.tensors[0].shape) == 2)
    return Indexed(f"{row}k! -> {row}s!", (("s", call["num_samples"]),))


def _randperm(call: Call) -> Indexed:
    return Indexed("-> k!", (("k", call["n"]),))


def _features(call: Call) -> str:
    """Whole channels are dropped: all their elements meet the same draw."""
    inner = " ".join(f"s{i}!" for i in range(len(call.tensors[0].shape) - 2))
    return f"n c {inner} -> n c {inner}"


def _noise(*names: str) -> Callable[[Random], Args]:
    """A tensor to be shaped like, then numbers of the law."""
    return lambda rng: (real(*random_shape(rng)), *(float(name) for name in names))


def _dropped_bytes(call: Call, shapes: Shapes) -> KernelBytes | None:
    """A truth value for every element; meta would keep a number."""
    return KernelBytes(prod(shapes[0])) if call["train"] and 0 < call["p"] < 1 else None



_draw = partial(OpSpec, flops=0, smooth=False, random=True, dtype=Dtype.FIRST)
_like = partial(_draw, smooth=True)  # torch gives what these read a gradient of zeros
_drop = partial(OpSpec, random=True, dtype=Dtype.FIRST)
_TRAINING = {"p": (0.3,), "train": (True,)}


def _features_sample(rng: Random) -> Args:
    return real(*random_shape(rng, 2, 4)), 0.3, True


OPS: tuple[OpSpec, ...] = (
    _draw("empty.memory_format", sized, shape_sample(), follows=SIZED),
    _draw("new_empty", sized, like_sample, follows=SIZED),
    _draw("empty_like", "... -> ..."),
    _draw("rand", sized, shape_sample(), overloads=("randn",), follows=SIZED),
    _draw("randint", sized, lambda rng: (5, random_shape(rng)), follows=SIZED, dtype=Dtype.INT64),
    _draw("randint.low", sized, lambda rng: (1, 5, random_shape(rng)), follows=SIZED, dtype=Dtype.INT64),
    _draw("rand_like", "... -> ...", overloads=("randn_like",)),
    _draw("randint_like", "... -> ...", {"high": (5,)}),
    _draw("randint_like.low_dtype", "... -> ...", {"low": (1,), "high": (5,)}),
    _draw("randperm", _randperm, lambda rng: (rng.randint(1, 5),), dtype=Dtype.INT64),
    _like("bernoulli", "... -> ...", domain=(0.0, 1.0)),
    _draw("bernoulli.p", "... -> ...", {"p": (0.4,)}),
    _draw("normal_functional", "... -> ...", _noise("0", "1")),
    _like("uniform", "... -> ...", _noise("0", "1"), overloads=("log_normal", "cauchy")),
    _like("exponential", "... -> ...", _noise("1")),
    _like("geometric", "... -> ...", _noise("0.5")),
    _like("poisson", "... -> ...", domain=(0.5, 4.0)),
    _like("normal.Tensor_Tensor", "..., ... -> ...", dtype=Dtype.FLOAT, domain=(0.1, 2.0)),
    _like("normal.float_Tensor", "... -> ...", {"mean": (0.0,)}, dtype=Dtype.FLOAT, domain=(0.1, 2.0)),
    _like("normal.Tensor_float", "... -> ...", {"std": (0.5,)}, dtype=Dtype.FLOAT),
    _draw("multinomial", _multinomial, lambda rng: (real(*rng.choice(((5,), (3, 5)))), 2), dtype=Dtype.INT64,
          domain=(0.1, 1.0)),
    _drop("dropout", "... -> ...", _TRAINING, flops=2, gpu_bytes=_dropped_bytes),
    _drop("native_dropout", "... -> ..., ...", _TRAINING, dtype=(Dtype.FIRST, Dtype.BOOL), flops=2),
    _drop("alpha_dropout", "... -> ...", _TRAINING, flops=4),
    _drop("feature_dropout", _features, _features_sample, overloads=("feature_alpha_dropout",), flops=2),
    _drop("rrelu", "... -> ...", {"training": (True,)}, flops=2),
)  # fmt: skip
