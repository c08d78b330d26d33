"""Recurrent cells and whole recurrent layers: the batch may be split, time and state stay whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from random import Random

from conjoin.ops.dtypes import Dtype
from conjoin.ops.samples import Sample, real
from conjoin.ops.spec import Args, Call, Indexed, KernelBytes, OpSpec, Shapes


def _cell(call: Call) -> str:
    states = 2 if call.op == "lstm_cell" else 1
    weights = ["g0! i!", "g1! h!", "g2!", "g3!"][: len(call.tensors) - 1 - states]
    return f"{', '.join(['b i!', *['b h!'] * states, *weights])} -> {', '.join(['b h!'] * states)}"


def _cell_flops(call: Call, sizes: Mapping[str, int]) -> float:
    return float(2 * sizes.get("b", 1) * (call["w_ih"].num_elements + call["w_hh"].num_elements))


def _layer(call: Call) -> Indexed:
    """Input, states (layers, batch, hidden), then weights of every layer and direction, each whole."""
    batched = len(call["input"].shape) == 3
    steps = ("b t!" if call["batch_first"] else "t! b") if batched else "t!"
    states = call["hx"] if isinstance(call["hx"], tuple) else (call["hx"],)
    state = [f"{'l! b' if batched else 'l!'} h{k}!" for k in range(len(states))]
    weights = [" ".join(f"p{i}_{k}!" for k in range(len(w.shape))) for i, w in enumerate(call["params"])]
    width = states[0].shape[-1] * (2 if call["bidirectional"] else 1)
    left = ", ".join([f"{steps} i!", *state, *weights])
    return Indexed(f"{left} -> {', '.join([f'{steps} o!', *state])}", (("o", width),))


def _layer_flops(call: Call, sizes: Mapping[str, int]) -> float:
    steps = sizes.get("b", 1) * sizes["t"]
    return float(2 * steps * sum(w.num_elements for w in call["params"] if len(w.shape) == 2))


def _cell_sample(gates: int, states: int) -> Sample:
    def sample(rng: Random) -> Args:
        b, i, h = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4)
        state = (real(b, h),) * 2 if states == 2 else real(b, h)
        bias = rng.choice(((real(gates * h), real(gates * h)), (None, None)))
        return real(b, i), state, real(gates * h, i), real(gates * h, h), *bias

    return sample


def _layer_sample(gates: int, states: int) -> Sample:
    def sample(rng: Random) -> Args:
        b, t, i, h = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3)
        layers, first, both = rng.randint(1, 2), rng.random() < 0.5, rng.random() < 0.3
        ways = 2 if both else 1
        params = []
        for layer in range(layers):
            for _ in range(ways):
                width = i if layer == 0 else h * ways
                params += [real(gates * h, width), real(gates * h, h), real(gates * h), real(gates * h)]
        state = real(layers * ways, b, h)
        x = real(b, t, i) if first else real(t, b, i)
        return x, (state,) * 2 if states == 2 else state, tuple(params), True, layers, 0.0, True, both, first

    return sample


def _cell_bytes(gates: int, made: int) -> Callable[[Call, Shapes], KernelBytes]:
    """For each hidden unit the gates of the input and of the state, and what the kernel made of them."""
    return lambda call, shapes: KernelBytes((2 * gates + made) * prod(shapes[1]) * call.tensors[1].dtype.itemsize)


_LAYER_WORKSPACE = 8 * 2**20


def _layer_bytes(reserved: int, worked: int) -> Callable[[Call, Shapes], KernelBytes]:
    """cuDNN's reserve with the weights packed into one block, and its workspace: so many numbers for each hidden unit
    and step.

    A layer reserves its gates and states for every step, and its output where another layer reads it; with dropout
    between layers a bit for every element of that. Weights that lie in one block already are packed all the same in
    this count: a plan stores each on its own. Fitted to 135 calls on an H200 with cuDNN 9.19 (2026-11-15); off by 2 %
    in the median, and at most by 8 % for an LSTM, 12 % for a GRU and 32 % for a plain recurrence.
    """

    def found(call: Call, shapes: Shapes) -> KernelBytes:
        itemsize, num_layers = call.tensors[0].dtype.itemsize, call["num_layers"]
        ways = 2 if call["bidirectional"] else 1
        outputs = prod(shapes[0][:-1]) * ways * shapes[1][-1]
        weights = sum(map(prod, shapes[len(shapes) - len(call["params"]) :])) * itemsize
        reserve = (num_layers * reserved + num_layers - 1) * outputs * itemsize
        masks = (num_layers - 1) * outputs // 8 if call["dropout"] else 0
        workspace = weights + num_layers * ways * _LAYER_WORKSPACE + worked * outputs * itemsize
        return KernelBytes(reserve + masks + weights, workspace)

    return found


_cells = partial(OpSpec, index=_cell, flops=_cell_flops, dtype=Dtype.FIRST, family="recurrent")
_layers = partial(
    OpSpec, index=_layer, flops=_layer_flops, dtype=Dtype.FIRST, rate="dropout", family="recurrent"
)

OPS: tuple[OpSpec, ...] = (
    _cells("lstm_cell", sample=_cell_sample(4, 2), gpu_bytes=_cell_bytes(4, 4)),
    _cells("gru_cell", sample=_cell_sample(3, 1), gpu_bytes=_cell_bytes(3, 5)),
    _cells("rnn_tanh_cell", sample=_cell_sample(1, 1), overloads=("rnn_relu_cell",)),
    _layers("lstm.input", sample=_layer_sample(4, 2), gpu_bytes=_layer_bytes(5, 7)),
    _layers("gru.input", sample=_layer_sample(3, 1), gpu_bytes=_layer_bytes(6, 6)),
    _layers("rnn_tanh.input", sample=_layer_sample(1, 1), overloads=("rnn_relu.input",), gpu_bytes=_layer_bytes(1, 6)),
)
