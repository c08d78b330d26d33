"""The calls by which one device computes its piece of a call, on types alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conjoin.ops import (
    Call,
    Span,
    TensorType,
    bind_args,
    call_cache,
    map_tensors,
    operand_spans,
    output_types,
    run_local,
    spec_for,
    types_on_meta,
    walk_tensors,
)

Ranges = tuple[tuple[str, tuple[int, int]], ...]
"""Of every split index the range that is computed here."""


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call on local types, and the operands to which its backward gives a gradient."""

    call: Call
    needs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What stands for a tensor on the device."""

    type: TensorType
    needs: bool


@call_cache()
def local_calls(call: Call, pieces: Ranges, needs: tuple[int, ...] = ()) -> tuple[LocalCall, ...]:
    """What a device runs that computes these pieces of a declared call's indices: the call on local types, and what
    its local form needs around it; `needs` are the operands that get a gradient.

    >>> import torch
    >>> x, w = TensorType((8, 4), torch.float32), TensorType((6, 4), torch.float32)
    >>> (local,) = local_calls(Call("linear", (x, w, None)), (("n", (0, 3)),), (1,))
    >>> [str(tensor) for tensor in local.call.tensors], local.needs
    (['f32[8,4]', 'f32[3,4]'], (1,))
    """
    spec = spec_for(call)
    assert spec is not None, f"{call.op} is opaque: it has no pieces"
    found: list[LocalCall] = []

    def emit(op: str, *given: Any) -> Any:
        args = bind_args(op, given, {})
        inner = Call(op, map_tensors(op, args, lambda piece: piece.type), call.turned and op == call.op)
        declared = spec_for(inner)
        passing = [piece.needs for _, piece in walk_tensors(op, args)]
        passed = tuple(i for i, needed in enumerate(passing) if needed and (declared is None or declared.smooth))
        found.append(LocalCall(inner, passed))
        types = output_types(declared, inner) if declared is not None else types_on_meta(inner)
        assert types is not None, f"{op} cannot be asked for the types it returns"
        made = tuple(_Piece(type, bool(passed) and type.dtype.is_floating_point) for type in types)
        return made[0] if len(made) == 1 else made

    spans = operand_spans(spec, call, dict(pieces))
    tensors = zip(call.tensors, spans, strict=True)
    parts = [_Piece(_part(tensor, wanted), i in needs) for i, (tensor, wanted) in enumerate(tensors)]
    run_local(spec, call, dict(pieces), parts, emit)
    return tuple(found)


def _part(tensor: TensorType, spans: Sequence[Span]) -> TensorType:
    sizes = {span.dim: span.stop - span.start for span in spans}
    return TensorType(tuple(sizes.get(dim, size) for dim, size in enumerate(tensor.shape)), tensor.dtype)
