"""Recurrent cells and whole recurrent layers: the batch may be split, time and state stay whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random

from conjoin.ops.dtypes import Dtype
from conjoin.ops.sampling import Sample, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


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


_cells = partial(OpSpec, index=_cell, flops=_cell_flops, dtype=Dtype.FIRST, family="recurrent")
_layers = partial(
    OpSpec, index=_layer, flops=_layer_flops, dtype=Dtype.FIRST, rate="dropout", family="recurrent"
)

OPS: tuple[OpSpec, ...] = (
    _cells("lstm_cell", sample=_cell_sample(4, 2)),
    _cells("gru_cell", sample=_cell_sample(3, 1)),
    _cells("rnn_tanh_cell", sample=_cell_sample(1, 1), overloads=("rnn_relu_cell",)),
    _layers("lstm.input", sample=_layer_sample(4, 2)),
    _layers("gru.input", sample=_layer_sample(3, 1)),
    _layers("rnn_tanh.input", sample=_layer_sample(1, 1), overloads=("rnn_relu.input",)),
)
