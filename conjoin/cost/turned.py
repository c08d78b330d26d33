"""What calls take that read numbers which lie apart in memory: transposed rows, or what only a copy can give a shape.

A kernel that needs rows in one piece copies them first, normalization before its backward, too. Others read numbers as
they lie, one by one, which takes about as long as a copy: a GPU reads a whole sector of memory for each of them.
"""

from __future__ import annotations

from dataclasses import replace

from conjoin.cost.work import ELEMENTWISE, MOVEMENT, REDUCTION, work_of
from conjoin.machine import DeviceType
from conjoin.ops import Call, TensorType, bind_args, spec_for

_SECTOR = 32
"""Bytes that a GPU reads for a number whose neighbours it does not: an H200 copies 150 thousand million such numbers a
second, of 2 or 4 bytes, in the median of 12 shapes (108 to 214; 2026-11-19), its memory's rate over these bytes."""


def is_of_turned(call: Call) -> bool:
    """Whether a call reads numbers that lie apart, for which it has no kernels of their own."""
    spec = spec_for(call)
    return call.turned and spec is not None and not spec.by_order


def bare(call: Call) -> Call:
    """The same of numbers that lie together."""
    return replace(call, turned=False)


def copy_of_turned(call: Call) -> tuple[Call, TensorType]:
    """The copy of what is read, were it in one piece, and what that is."""
    largest = max(call.tensors, key=lambda tensor: tensor.num_elements)
    return Call("clone", bind_args("clone", (largest,), {})), largest


def seconds_to_read(tensor: TensorType, device: DeviceType) -> float:
    """What reading all numbers one by one takes a GPU; a CPU finds their neighbours in its caches later."""
    return tensor.num_elements * _SECTOR / device.memory_bandwidth if device.kind == "cuda" else 0.0


def copies(call: Call) -> tuple[bool, bool]:
    """Whether they are copied before the call's own kernel, and before that of its backward.

    >>> import torch
    >>> x = TensorType((8, 8), torch.float32)
    >>> copies(Call("softmax.int", bind_args("softmax.int", (x, 1), {}))), copies(Call("relu", (x,)))
    ((True, False), (False, False))
    """
    spec, family = spec_for(call), work_of(call, ()).family
    if spec is None or family in (ELEMENTWISE, MOVEMENT):
        return False, False
    return True, family == REDUCTION and spec.kernels != "softmax"
