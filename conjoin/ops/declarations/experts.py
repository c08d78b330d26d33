"""Layers of experts: a row addresses the matrices of its expert, as a word addresses its row of a table.

Split by rows they are data parallel; split by experts every device does the rows of its own, which gives a partial sum.
Routed, they are split by rows and experts at once: rows go to the device that has their expert, and back. Features
between the two layers may be split where what gates them is a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

from conjoin.ops.composites import EXPERT_LINEAR, EXPERT_NETWORK, ROUTED_EXPERTS
from conjoin.ops.experts import ACTIVATIONS
from conjoin.ops.local import LocalForm
from conjoin.ops.notation import NotationError
from conjoin.ops.samples import integer, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec

_OPERATORS: Mapping[str, tuple[str, ...]] = {
    "silu": ("silu",), "relu": ("relu",), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"),
}  # fmt: skip
"""The activations as operators, with their attributes."""


def _choices(call: Call) -> tuple[tuple[str, int], ...]:
    """How many neighbouring rows read a row of x."""
    num_rows, num_read = call["expert"].shape[0], call["x"].shape[0]
    if not num_read or num_rows % num_read:
        raise NotationError(f"{num_rows} rows cannot be dealt to {num_read} rows of x alike")
    return (("c", num_rows // num_read),)


def _linear(call: Call) -> Indexed:
    return Indexed("t k, e k n, (t c)@e -> (t c) n", _choices(call))


def _network(call: Call) -> Indexed:
    wide, width = call["inward"].shape[2], call["outward"].shape[1]
    if wide not in (width, 2 * width) or call["activation"] not in ACTIVATIONS:
        raise NotationError(f"{wide} features become {width} by {call['activation']!r}, as neither layer nor gate does")
    return Indexed("t k!, e k! h!, e f! n, (t c)@e -> (t c) n", _choices(call))


def _routed(call: Call) -> Indexed:
    """Where features come one for one out of every matrix, those of an expert may be split."""
    as_one = _network(call)
    if call["gate"] is None and call["inward"].shape[2] != call["outward"].shape[1]:
        return as_one
    gate = "" if call["gate"] is None else ", e k! f"
    return Indexed(f"t k!, e k! f, e f n, (t c)@e{gate} -> (t c) n", _choices(call))


def _flops(call: Call, sizes: Mapping[str, int]) -> float:
    """A row meets one expert; of the rows of a part of the experts as many are theirs as if all were chosen alike."""
    matrices = [tensor.shape for tensor in call.tensors if len(tensor.shape) == 3]
    products = call["expert"].shape[0] * sum(k * n for _, k, n in matrices)
    return float(2 * products * sizes["e"] / call["experts"])


def _local(form: LocalForm) -> Any:
    """Experts are counted from the first one here: what is none of these is left out."""
    first = form.pieces["e"][0] if "e" in form.pieces else 0
    return form.run(expert=form.emit("sub.Tensor", form["expert"], first)) if first else form.run()


def _two_layers(form: LocalForm) -> Any:
    """The layers and what is between them, each by itself: their features may then be split."""
    emit, width = form.emit, form.call["outward"].shape[1]
    op, *attributes = _OPERATORS[form.call["activation"]]
    h = emit(EXPERT_LINEAR, form["x"], form["inward"], form["expert"], form["experts"])
    if form.call["inward"].shape[2] == width:
        h = emit(op, h, *attributes)
    else:
        gate, up = emit("split.Tensor", h, width, 1)
        h = emit("mul.Tensor", emit(op, gate, *attributes), up)
    return emit(EXPERT_LINEAR, h, form["outward"], form["expert"], form["experts"])


def _linear_sample(rng: Random) -> Args:
    t, c, e, k, n = (rng.randint(1, 4) for _ in range(5))
    return real(t, k), real(e, k, n), integer(t * c), e


def _routed_sample(rng: Random) -> Args:
    x, inward, outward, *others = _network_sample(rng)
    is_one = inward.shape[2] == outward.shape[1]
    return x, inward, outward, *others, rng.choice((None, real(*inward.shape))) if is_one else None


def _network_sample(rng: Random) -> Args:
    t, c, e, k, f, n = (rng.randint(1, 4) for _ in range(6))
    activation, ways = rng.choice(tuple(ACTIVATIONS)), rng.choice((1, 2))
    return real(t, k), real(e, k, ways * f), real(e, f, n), integer(t * c), e, activation


_of_experts = partial(OpSpec, flops=_flops, one_dtype=True, local=_local)
_of_network = partial(_of_experts, terms="outward", family="contraction")

OPS: tuple[OpSpec, ...] = (
    _of_experts(EXPERT_LINEAR, _linear, _linear_sample, terms="x weight"),
    _of_network(ROUTED_EXPERTS, _routed, _routed_sample, owned={"t": ("inward", "outward", "gate")}),
    _of_network(EXPERT_NETWORK, _network, _network_sample, expansion=_two_layers),
)
