"""How much work a call is: floating-point operations, and bytes read and written."""

from __future__ import annotations

from math import prod

from conjoin.ops.notation import dim_size
from conjoin.ops.spec import Call, OpSpec, output_types, space_of


def flops(spec: OpSpec, call: Call) -> float:
    """Floating-point operations of one forward call; of a table that is looked up only the rows looked up count.

    >>> import torch
    >>> from conjoin.ops import TensorType, find_spec
    >>> x, w = TensorType((8, 4), torch.float32), TensorType((16, 4), torch.float32)
    >>> flops(find_spec("linear"), Call("linear", (x, w, None)))
    1024.0
    """
    space = space_of(spec, call)
    if callable(spec.flops):
        return float(spec.flops(call, space.sizes))
    if spec.flops == 0:
        return 0.0
    addressed = {access.addresses for access in space.notation.operands}
    return float(spec.flops) * prod(space.sizes[i] for i in space.notation.indices() if i not in addressed)


def bytes_read(spec: OpSpec, call: Call) -> int:
    """Bytes of operands that a call reads; of a table that is looked up, the rows looked up.

    Where its rows are matrices that are multiplied with, what is written says nothing of their size.
    """
    if spec.view or spec.name.startswith("new_") or spec.name.endswith("_like"):  # only a type is read
        return 0
    space = space_of(spec, call)
    if spec.reads is not None:
        return spec.reads(call, space.sizes)
    addressed = {access.addresses for access in space.notation.operands if access.addresses}
    total = 0
    for access, tensor in zip(space.notation.operands, call.tensors, strict=True):
        looked_up = addressed & access.indices()
        if looked_up and spec.flops and (access.indices() - looked_up) & space.notation.summed():
            addresses = (dim_size(d, space.sizes) for a in space.notation.operands if a.addresses for d in a.dims)
            total += min(tensor.bytes, prod(addresses) * tensor.bytes // prod(space.sizes[i] for i in looked_up))
        else:
            total += min(tensor.bytes, bytes_written(spec, call)) if looked_up else tensor.bytes
    return total


def bytes_written(spec: OpSpec, call: Call) -> int:
    """Bytes of outputs that a call writes; none for a view."""
    return 0 if spec.view else sum(output.bytes for output in output_types(spec, call))
