"""Every rule operator by the torch operator it stands for: what ties the definitions in `operators.py` to torch.

Nothing is broadcast: operands that do not fit as the operator's definition says are a `Misfit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.rules.patterns import Parameter

Shape = tuple[int, ...]
Params = Mapping[str, Parameter]
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "square": torch.square,
}


class Misfit(Exception):
    """Operands or parameters that do not fit an operator."""


def reference(op: str, params: Params, args: Sequence[Tensor], shape: Shape = ()) -> Tensor:
    """One operator by torch; all parameters are numbers, a split has `first` and a spreading operator `devices`.

    >>> reference("sum", {"axis": 0}, [torch.ones(3, 2)])
    tensor([3., 3.])
    """
    try:
        return _REFERENCES[op](params, tuple(args), shape)
    except (RuntimeError, IndexError, ValueError) as error:
        raise Misfit(f"{op}: {str(error).splitlines()[0]}") from None


Reference = Callable[[Params, tuple[Tensor, ...], Shape], Tensor]


def _need(fits: bool, why: str) -> None:
    if not fits:
        raise Misfit(why)


def _alike(function: Callable[..., Tensor]) -> Reference:
    """An elementwise operator, on operands of one shape."""

    def run(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
        _need(len({tuple(arg.shape) for arg in args}) == 1, f"shapes {[tuple(arg.shape) for arg in args]} differ")
        return function(*args)

    return run


def _plain(function: Callable[..., Tensor]) -> Reference:
    return lambda params, args, shape: function(*args)


def _scale(x: Tensor, factor: Tensor) -> Tensor:
    _need(factor.dim() == 0, f"a factor of shape {tuple(factor.shape)} is no number")
    return torch.mul(x, factor)


def _bias(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    x, vector = args
    _need(vector.shape == x.shape[-1:], f"a vector of shape {tuple(vector.shape)} for {tuple(x.shape)}")
    return _activated(params, torch.add(x, vector))


def _gain(x: Tensor, vector: Tensor) -> Tensor:
    _need(vector.shape == x.shape[-1:], f"a vector of shape {tuple(vector.shape)} for {tuple(x.shape)}")
    return torch.mul(x, vector)


def _unflatten(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    (x,), parts = args, int(params["parts"])
    _need(x.dim() > 0 and x.shape[-1] % parts == 0, f"the last dim of {tuple(x.shape)} has no {parts} parts")
    return torch.unflatten(x, -1, (parts, x.shape[-1] // parts))


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    _need(x.dim() >= 2 and x.shape[:-2] == y.shape[:-2], f"{tuple(x.shape)} and {tuple(y.shape)} are no matrices alike")
    return torch.matmul(x, y)


def _conv(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    """Without groups said they follow from the shapes."""
    x, weight = args
    groups = params["groups"]
    if groups == "?":
        _need(x.shape[1] % weight.shape[1] == 0, f"{x.shape[1]} channels do not divide into {weight.shape[1]}")
        groups = x.shape[1] // weight.shape[1]
    padding = tuple(_padding(params, size) for size in weight.shape[2:])
    made = functional.conv2d(x, weight, None, int(params["stride"]), padding, 1, int(groups))
    return _activated(params, made)


def _activated(params: Params, made: Tensor) -> Tensor:
    return made if params["act"] == "none" else FUNCTIONS[str(params["act"])](made)


def _padding(params: Params, kernel: int) -> int:
    if params["pad"] == "same":
        _need(kernel % 2 == 1, f"a kernel of even size {kernel} cannot be padded alike on both sides")
        return kernel // 2
    return 0 if params["pad"] == "valid" else int(params["pad"])


def _enlarge(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    (weight,), kernel = args, int(params["kernel"])
    rows, columns = (kernel - size for size in weight.shape[-2:])
    _need(min(rows, columns) >= 0 and rows % 2 == columns % 2 == 0, f"{tuple(weight.shape)} cannot grow to {kernel}")
    return functional.pad(weight, (columns // 2, columns // 2, rows // 2, rows // 2))


def _avg_pool(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    kernel = int(params["kernel"])
    pad = _padding(params, kernel)
    return functional.avg_pool2d(args[0], kernel, int(params["stride"]), pad, count_include_pad=True)


def _max_pool(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    kernel = int(params["kernel"])
    return functional.max_pool2d(args[0], kernel, int(params["stride"]), _padding(params, kernel))


def _concat(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    _need(args[0].dim() == args[1].dim(), "operands of different ranks")
    return torch.cat(args, int(params["axis"]))


def _split(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    (x,), axis, first = args, int(params["axis"]), int(params["first"])
    _need(0 < first < x.shape[axis], f"dim {axis} of {tuple(x.shape)} has no first part of {first}")
    return torch.split(x, [first, x.shape[axis] - first], axis)[int(params["part"])]


def _over_axis(function: Callable[[Tensor, int], Tensor]) -> Reference:
    return lambda params, args, shape: function(args[0], int(params["axis"]))


def _embedding(table: Tensor, indices: Tensor) -> Tensor:
    return functional.embedding(_whole(indices), table)


def _embedding_bag(table: Tensor, indices: Tensor) -> Tensor:
    bags = _whole(indices).reshape(-1, indices.shape[-1])
    return functional.embedding_bag(bags, table, mode="sum").reshape(*indices.shape[:-1], table.shape[1])


def _aggregate(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    """As people write it: a row for every edge, put together at its target."""
    rows, (x, source, target, *weight) = int(params["vertices"]), args
    _need(source.shape == target.shape and all(w.shape == target.shape for w in weight), "edges of different numbers")
    source, target = _whole(source), _whole(target)
    for indices, most in ((source, x.shape[0]), (target, rows)):
        _need(bool(((indices >= 0) & (indices < most)).all()), "edges of vertices that do not exist")
    messages = x[source]
    for each in weight:
        messages = messages * each[:, None]
    return x.new_zeros(rows, x.shape[1]).index_add(0, target, messages)


def _aggregate_mean(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    total = _aggregate(params, args, shape)
    return total / torch.bincount(_whole(args[2]), minlength=len(total)).clamp(min=1)[:, None]


def _whole(indices: Tensor) -> Tensor:
    _need(bool((indices == indices.round()).all()), "rows are looked up by numbers that are not whole")
    return indices.long()


def _identity(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    _need(len(shape) >= 2 and shape[-1] == shape[-2], f"no identity matrix is {shape}")
    return torch.eye(shape[-1], dtype=torch.float64).expand(shape)


def _identity_kernel(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    features, channels, *window = shape
    kernel = int(params["kernel"])
    _need(features == channels and window == [kernel, kernel] and kernel % 2 == 1, f"no identity kernel is {shape}")
    made = torch.zeros(shape, dtype=torch.float64)
    return torch.nn.init.dirac_(made)


def _pool_kernel(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    kernel = int(params["kernel"])
    _need(shape[1:] == (1, kernel, kernel), f"no kernel that averages is {shape}")
    return torch.full(shape, 1 / kernel**2, dtype=torch.float64)


def _partition(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    (x,), axis, devices = args, int(params["axis"]), int(params["devices"])
    _need(x.shape[axis] % devices == 0, f"dim {axis} of {tuple(x.shape)} does not divide into {devices}")
    return torch.stack(torch.split(x, x.shape[axis] // devices, axis))


def _combine(params: Params, args: tuple[Tensor, ...], shape: Shape) -> Tensor:
    return torch.cat(tuple(args[0]), int(params["axis"]))


_REFERENCES: Mapping[str, Reference] = {
    **{name: _alike(function) for name, function in FUNCTIONS.items()},
    "add": _alike(torch.add),
    "sub": _alike(torch.sub),
    "mul": _alike(torch.mul),
    "div": _alike(torch.div),
    "neg": _alike(torch.neg),
    "scale": _plain(_scale),
    "bias": _bias,
    "matmul": _plain(_matmul),
    "linear": _plain(functional.linear),
    "gain": _plain(_gain),
    "transpose": _plain(lambda x: torch.transpose(x, -1, -2)),
    "swap": _plain(lambda x: torch.transpose(x, -3, -2)),
    "flatten": _plain(lambda x: torch.flatten(x, -2, -1)),
    "unflatten": _unflatten,
    "conv": _conv,
    "enlarge": _enlarge,
    "avg_pool": _avg_pool,
    "max_pool": _max_pool,
    "concat": _concat,
    "split": _split,
    "sum": _over_axis(torch.sum),
    "mean": _over_axis(torch.mean),
    "softmax": _over_axis(torch.softmax),
    "embedding": _plain(_embedding),
    "embedding_bag": _plain(_embedding_bag),
    "aggregate": _aggregate,
    "aggregate_weighted": _aggregate,
    "aggregate_mean": _aggregate_mean,
    "ones": lambda params, args, shape: torch.ones(shape, dtype=torch.float64),
    "identity": _identity,
    "identity_kernel": _identity_kernel,
    "pool_kernel": _pool_kernel,
    "partition": _partition,
    "combine": _combine,
    "replicate": lambda params, args, shape: args[0].expand(int(params["devices"]), *args[0].shape),
    "reduce": lambda params, args, shape: torch.sum(args[0], 0),
}
