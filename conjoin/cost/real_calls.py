"""A call made real on a device: random operands with valid values, and what runs it as the runtime does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conjoin.ops import Call, TensorType, find_operator, map_tensors, space_of, spec_for, spread_args

Run = Callable[[], Any]

_PATTERN = 2**20
"""Random elements that are drawn; a larger tensor repeats them, since drawing billions takes longer than measuring."""


def make_operands(call: Call, device: torch.device, generator: torch.Generator) -> list[Tensor]:
    """Tensors of a call's types: floats in the operator's domain, addresses inside the index they address."""
    spec = spec_for(call)
    if spec is None:
        return [_fill(tensor, (-2.0, 2.0), 1, device, generator) for tensor in call.tensors]
    space = space_of(spec, call)
    bounds = [space.sizes[a.addresses] if a.addresses else 2 for a in space.notation.operands]
    made = [_fill(t, spec.domain, bound, device, generator) for t, bound in zip(call.tensors, bounds, strict=True)]
    if call.turned:
        at = call.operand_names.index("attn_mask") if spec.family == "attention" else 0
        made[at] = _turned(made[at])
    return made


def _turned(tensor: Tensor) -> Tensor:
    """The same, its second dim last in memory: the channels of images, the heads of a mask."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def _fill(
    kind: TensorType, domain: tuple[float, float], bound: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    count = kind.num_elements
    pattern = _draw(min(count, _PATTERN), kind.dtype, domain, bound, device, generator)
    if count <= _PATTERN:
        return pattern.reshape(kind.shape)
    flat = torch.empty(count, dtype=kind.dtype, device=device)
    for start in range(0, count, _PATTERN):
        part = flat[start : start + _PATTERN]
        part.copy_(pattern[: part.numel()])
    return flat.reshape(kind.shape)


def _draw(
    count: int,
    dtype: torch.dtype,
    domain: tuple[float, float],
    bound: int,
    device: torch.device,
    generator: torch.Generator,
) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        low, high = domain
        uniform = torch.rand(count, device=device, generator=generator) * (high - low) + low
        return uniform.to(dtype)
    if dtype == torch.bool:
        return torch.rand(count, device=device, generator=generator) < 0.5
    largest = min(max(bound, 1), 2**31 if dtype.itemsize > 2 else torch.iinfo(dtype).max)
    return torch.randint(0, largest, (count,), dtype=dtype, device=device, generator=generator)


def bind_run(call: Call, tensors: Sequence[Tensor], device: torch.device) -> Run:
    """The call on these operands, ready to be made; a tensor that it makes of nothing is made on the device."""
    feed = iter(tensors)
    args = map_tensors(call.op, call.args, lambda _: next(feed))
    positional, keywords = spread_args(call.op, args, None if tensors else device)
    function = run_batch_norm if call.op == "_native_batch_norm_legit_functional" else find_operator(call.op)
    return partial(function, *positional, **keywords)


def run_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *attributes: Any
) -> tuple[Tensor, ...]:
    """Batch norm by the operator users call, as programs run it: it takes the device's own kernels."""
    mean, var = mean.clone(), var.clone()
    training, momentum, eps = attributes
    y = torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, torch.backends.cudnn.enabled)
    return y, mean, var


def tensors_in(result: Any) -> Iterator[Tensor]:
    """The tensors that a call returned, lists flattened."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from tensors_in(item)
