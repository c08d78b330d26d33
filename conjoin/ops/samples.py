"""Random calls and tensors for testing declarations, drawn from the declarations themselves."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from conjoin.ops.aten import Kind, signature
from conjoin.ops.notation import Access, Factors, parse_notation
from conjoin.ops.spec import Args, Call, OpSpec, bind_args, space_of
from conjoin.ops.tensor_type import TensorType

Sample = Callable[[Random], Args]
"""Random arguments for a call, `TensorType` where a tensor goes."""


def real(*shape: int) -> TensorType:
    """A float64 operand."""
    return TensorType(shape, torch.float64)


def integer(*shape: int) -> TensorType:
    """An int64 operand."""
    return TensorType(shape, torch.int64)


def boolean(*shape: int) -> TensorType:
    """A bool operand."""
    return TensorType(shape, torch.bool)


def complex_pair(*shape: int) -> TensorType:
    """A complex128 operand."""
    return TensorType(shape, torch.complex128)


def random_shape(rng: Random, min_rank: int = 1, max_rank: int = 4) -> tuple[int, ...]:
    """A small shape; sizes of 1 are rare so that there is something to split."""
    return tuple(rng.choice((1, 2, 3, 4, 5, 6)) for _ in range(rng.randint(min_rank, max_rank)))


def random_call(spec: OpSpec, rng: Random, op: str | None = None) -> Call:
    """A call with random shapes and attributes, of the overload asked for."""
    op = op or spec.name
    if callable(spec.sample):
        return Call(op, bind_args(op, spec.sample(rng), {}))
    return Call(op, _args_from_notation(spec, op, rng))


def _args_from_notation(spec: OpSpec, op: str, rng: Random) -> Args:
    assert isinstance(spec.index, str) and not callable(spec.sample), f"{spec.name} needs a sample of its own"
    accesses = iter(parse_notation(spec.index).operands)
    sizes: dict[str, int] = {}
    leading = random_shape(rng, 0, 3)
    values: dict[str, object] = {}
    for parameter in signature(op).parameters:
        if parameter.name in spec.sample:
            values[parameter.name] = rng.choice(spec.sample[parameter.name])
        elif parameter.kind is Kind.TENSOR:
            optional = parameter.has_default
            access = next(accesses, None)
            if access is not None and not (optional and rng.random() < 0.4):
                values[parameter.name] = _draw_tensor(access, sizes, leading, rng)
    return bind_args(op, (), values)


def _draw_tensor(access: Access, sizes: dict[str, int], leading: tuple[int, ...], rng: Random) -> TensorType:
    shape: list[int] = []
    for dim in access.dims:
        assert isinstance(dim, Factors), "windows need a sample of their own"
        if dim.names == ("...",):
            kept = leading[rng.choice((0, 0, 0, min(1, len(leading)))) :]
            shape += [1 if rng.random() < 0.15 else size for size in kept]
        else:
            size = 1
            for name in dim.names:
                size *= sizes.setdefault(name, rng.choice((1, 2, 3, 4, 5)))
            shape.append(size)
    return integer(*shape) if access.addresses else real(*shape)


def random_tensors(spec: OpSpec, call: Call, seed: int) -> list[Tensor]:
    """Tensors of the types of a call, floats in the operator's domain, addresses inside the index they address."""
    generator = torch.Generator().manual_seed(seed)
    space = space_of(spec, call)
    tensors = []
    for name, access, tensor in zip(call.operand_names, space.notation.operands, call.tensors, strict=True):
        bound = space.sizes[access.addresses] if access.addresses else 2
        values = _random_tensor(tensor, spec.domain, bound, generator)
        numeric = values.is_floating_point() or values.is_complex()
        differentiable = spec.smooth and name not in spec.constants and numeric
        tensors.append(values.requires_grad_(differentiable))
    return tensors


def _random_tensor(kind: TensorType, domain: tuple[float, float], bound: int, generator: torch.Generator) -> Tensor:
    low, high = domain
    if kind.dtype.is_complex:
        parts = torch.rand((2, *kind.shape), generator=generator, dtype=kind.dtype.to_real()) * (high - low) + low
        return torch.complex(parts[0], parts[1])
    if kind.dtype.is_floating_point:
        return torch.rand(kind.shape, generator=generator, dtype=kind.dtype) * (high - low) + low
    if kind.dtype == torch.bool:
        return torch.rand(kind.shape, generator=generator) < 0.5
    return torch.randint(0, max(bound, 1), kind.shape, generator=generator, dtype=kind.dtype)


def random_cuts(size: int, num_pieces: int, rng: Random) -> tuple[int, ...]:
    """Boundaries of `num_pieces` pieces of a dim, even or not, none of them empty."""
    inner = rng.sample(range(1, size), min(num_pieces, size) - 1)
    return (0, *sorted(inner), size)
