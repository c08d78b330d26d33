"""What a GPU's own kernels keep and need, where torch on meta runs another form of the same operator.

Measured on an H200 with torch 2.11, CUDA 13.0 and cuDNN 9.19 (2026-11-15). What is kept is as measured but for some
hundred bytes a call. cuDNN's workspace is a fit over 135 calls, off by 2 % in the median; at most it is off by 8 % for
an LSTM, 12 % for a GRU, and 32 % for a plain recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from conjoin.ops import Call

Shapes = tuple[tuple[int, ...], ...]
"""Of a call's operands, as a rank holds them."""


@dataclass(frozen=True, slots=True)
class KernelBytes:
    """Memory that a kernel takes besides its operands, its outputs and their gradients."""

    kept: int
    """For the backward pass; without one it is gone after the call."""
    workspace: int
    """During the forward pass, and again during the backward pass."""
    keeps_operands: bool = False
    """Whether it keeps all that it reads, and not what meta would."""


def kernel_bytes(call: Call, shapes: Shapes) -> KernelBytes | None:
    """The bytes of a kernel that meta does not know; None where meta tells the truth."""
    kernel = _KERNELS.get(call.op)
    return None if kernel is None else kernel(call, shapes)


def attention_workspace(shapes: Shapes) -> int:
    """The backward of fused attention sums up the gradient of the query in float32."""
    return prod(shapes[0]) * torch.float32.itemsize


def numbers_not_kept(call: Call, shapes: Shapes) -> int:
    """Bytes that meta would keep of dropout inside attention which is spelled out: a GPU keeps truth values.

    >>> from conjoin.ops import TensorType, bind_args
    >>> x = TensorType((2, 4, 8, 16), torch.bfloat16)
    >>> op = "scaled_dot_product_attention"
    >>> drops = Call(op, bind_args(op, (x, x, x, None, 0.1), {}))
    >>> numbers_not_kept(drops, (x.shape,) * 3) == 2 * 4 * 8 * 8 * 3
    True
    """
    if not 0 < (call["dropout_p"] or 0.0) < 1:
        return 0
    wide = max(call.tensors[0].dtype.itemsize, torch.float32.itemsize)
    return prod(shapes[0][:-1]) * shapes[1][-2] * (wide - torch.bool.itemsize)


def _dropout(call: Call, shapes: Shapes) -> KernelBytes | None:
    """A truth value for every element; meta would keep a number."""
    return KernelBytes(prod(shapes[0]), 0) if call["train"] and 0 < call["p"] < 1 else None


def _rms_norm(call: Call, shapes: Shapes) -> KernelBytes:
    """One number for each row; meta runs it spelled out, and keeps a copy of the rows in float32."""
    rows = prod(shapes[0]) // max(prod(call["normalized_shape"]), 1)
    return KernelBytes(rows * torch.float32.itemsize, 0, keeps_operands=True)


def _cell(call: Call, shapes: Shapes) -> KernelBytes:
    """The gates of the input and of the state, and what the kernel made of them."""
    gates, made = _CELLS[call.op]
    return KernelBytes((2 * gates + made) * prod(shapes[1]) * call.tensors[1].dtype.itemsize, 0)


def _layers(call: Call, shapes: Shapes) -> KernelBytes:
    """cuDNN's reserve with the weights packed into one block, and its workspace.

    A layer reserves its gates and states for every step, and its output where another layer reads it; with dropout
    between layers a bit for every element of that. Weights that lie in one block already are packed all the same in
    this count: a plan stores each on its own.
    """
    reserved, worked = _LAYERS[call.op.removesuffix(".input")]
    itemsize = call.tensors[0].dtype.itemsize
    ways = 2 if call["bidirectional"] else 1
    state, num_layers = shapes[1], call["num_layers"]
    outputs = prod(shapes[0][:-1]) * ways * state[-1]
    first = len(shapes) - len(call["params"])
    weights = sum(map(prod, shapes[first:])) * itemsize
    reserve = (num_layers * reserved + num_layers - 1) * outputs * itemsize
    masks = (num_layers - 1) * outputs // 8 if call["dropout"] else 0
    workspace = weights + num_layers * ways * _LAYER_WORKSPACE + worked * outputs * itemsize
    return KernelBytes(reserve + masks + weights, workspace)


_LAYER_WORKSPACE = 8 * 2**20
_CELLS = {"lstm_cell": (4, 4), "gru_cell": (3, 5)}
"""Numbers for each hidden unit: in the gates of the input or of the state, and in what the kernel makes of them."""
_LAYERS = {"lstm": (5, 7), "gru": (6, 6), "rnn_tanh": (1, 6), "rnn_relu": (1, 6)}
"""Numbers for each hidden unit and step: in the reserve of a layer, and in the workspace."""
_KERNELS: Mapping[str, Callable[[Call, Shapes], KernelBytes | None]] = {
    "dropout": _dropout,
    "rms_norm": _rms_norm,
    **dict.fromkeys(_CELLS, _cell),
    **{f"{name}.input": _layers for name in _LAYERS},
}
