"""A rewrite tried before it is used: what it takes away against what it puts there, on small tensors of its own dtypes.

Both are run call by call with torch's operators, forward and backward, at several small sizes that differ where they
may (`small_sizes.py`); nothing is asked of the rule, its proof or how it was matched. In double precision they must
agree to rounding; in the dtypes that they have, the new calls may be no further from double precision than the old
ones are.

What counts as rounding is seen from the old calls: how far they are off themselves, and how far their results move when
what they read is one rounding apart. Each of the additions and products that make an element may round once, so that
many roundings are allowed. In half precision large numbers are no numbers any more: there the new calls may also not
make larger ones than the old ones did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from conjoin.ir import Leaf, LeafKind, Node, Replacement, Value, make_leaf, make_node
from conjoin.ops import (
    AGGREGATE,
    EXPERT_LAYERS,
    TOKEN_ENTROPY,
    TOKEN_LIKELIHOOD,
    TensorType,
    call_on,
    execute,
    map_tensors,
    output_types,
    spec_for,
)
from conjoin.rules.graphs.small_sizes import Scaling, TooTight

_SIZES = ((2, 3, 5, 7, 4), (5, 2, 4, 3, 7), (3, 4, 2, 5, 6))
"""What free sizes are, rehearsal by rehearsal."""
_AS_LARGE: tuple[int, ...] = ()
_MOST_WORK = 1 << 27
"""Products and moves of a rehearsal: a tenth of a second. Only calls that cannot be made small come near it."""
_FIRST_DIGITS = 1e-6
"""Of what somebody wrote by hand, all are right, or it is another thing; few samples make rounding errors large."""
_MOST_GROWTH = 1.5
"""Of the largest number in half precision. Sums over more or products in another order grow by the smallest size, 2, at
least; random numbers alone do not grow so much."""

_LOSSES_OF_CLASSES = {"cross_entropy_loss": 1, "nll_loss_nd": 1, TOKEN_ENTROPY: -1, TOKEN_LIKELIHOOD: -1}
"""And along which dim of scores for samples the classes are."""


def rehearse(rewrite: Replacement) -> str:
    """Why a rewrite is not what it should be, or cannot be known to be; empty where it is.

    >>> from conjoin.ir import parse_graph
    >>> calls = "%0: f32[64,64] = relu(input:x)\\n%1: f32[64,64] = t(input:x)"
    >>> takes, gives = "input:x f32[64,64]\\ntakes [input:x] in null", "returns [%1] in null"
    >>> one, other = parse_graph(f'graph "g" train\\n{takes}\\n{calls}\\n{gives}\\n').nodes
    >>> rehearse(Replacement((one,), (one,), ((Value(one), Value(one)),)))
    ''
    >>> "its result is off by" in rehearse(Replacement((one,), (other,), ((Value(one), Value(other)),)))
    True
    """
    return _rehearsed(_plain(rewrite), True, _SIZES)[0] if rewrite.outputs else ""


def find_fault(rewrite: Replacement, *, as_large: bool = False) -> str:
    """In what a rewrite was seen to differ, in double precision; empty where it does not, or cannot be run. It is tried
    at the sizes that it has where it is to be `as_large`, for numbers in it that say how much there is of something."""
    reason, was_seen = _rehearsed(_plain(rewrite), False, (_AS_LARGE, _AS_LARGE) if as_large else _SIZES)
    return reason if was_seen else ""


def at_small_sizes(node: Node) -> Iterator[Node]:
    """A call on inputs of each of the sizes that are tried; none where it cannot be so small."""
    for sizes in _SIZES:
        scaling = Scaling((node,), ())
        scaling.settle(sizes)
        try:
            (op, args), shapes = scaling.call(node), {value: scaling.shape(value) for value in node.inputs}
        except TooTight:
            return
        read = {value: replace(value.type.laid_out(()), shape=shape) for value, shape in shapes.items()}
        leaves = {value: _leaf(value, type, str(i)) for i, (value, type) in enumerate(read.items())}
        args = map_tensors(op, args, leaves.__getitem__)
        call = call_on(op, args, lambda value: value.type)
        if (spec := spec_for(call)) is not None:
            yield make_node(op, args, output_types(spec, call))


def _leaf(value: Value, type: TensorType, name: str) -> Value:
    """An input in place of a value; a buffer, of which nobody asks for a gradient, where it is one."""
    return Value(make_leaf(LeafKind.BUFFER if _is_buffer(value) else LeafKind.INPUT, name, type))


def _plain(rewrite: Replacement) -> Replacement:
    """The same calls on inputs without names: what is alike is rehearsed once."""
    now: dict[Value, Value] = {}

    def value(old: Value) -> Value:
        if old not in now:
            now[old] = _leaf(old, old.type.laid_out(()), str(len(now)))
        return now[old]

    def rebuilt(node: Node) -> Node:
        types = tuple(type.laid_out(()) for type in node.types)
        made = make_node(node.op, map_tensors(node.op, node.args, value), types)
        now.update(zip(node.outputs(), made.outputs(), strict=True))
        return made

    old, new = (tuple(dict.fromkeys(map(rebuilt, nodes))) for nodes in (_with_makers(rewrite), rewrite.new))
    return Replacement(old, new, tuple((value(one), value(other)) for one, other in rewrite.outputs))


def _with_makers(rewrite: Replacement) -> tuple[Node, ...]:
    """The old calls, and before them what makes their operands where the new calls make it, too."""
    old = dict.fromkeys(rewrite.old)
    wanted = {*(value for node in old for value in node.inputs), *(one for one, _ in rewrite.outputs)}
    makers: list[Node] = []
    for node in reversed(rewrite.new):
        if node not in old and not wanted.isdisjoint(node.outputs()):
            makers.append(node)
            wanted.update(node.inputs)
    return (*reversed(makers), *old)


@lru_cache(maxsize=1 << 12)
def _rehearsed(rewrite: Replacement, in_own_dtypes: bool, tried: Sequence[tuple[int, ...]]) -> tuple[str, bool]:
    """Why not, and whether that was seen: both have been run."""
    for number, sizes in enumerate(tried):
        try:
            reason = _Rehearsal(rewrite, number).run(sizes, in_own_dtypes)
        except TooTight:
            return "it is too large to be rehearsed, and cannot be made smaller", False
        except Exception as error:  # whatever an operator says of sizes and numbers that it does not take
            return f"it does not run: {(str(error).splitlines() or [type(error).__name__])[0][:100]}", False
        if reason:
            return reason, True
    return "", True


@dataclass(frozen=True)
class _Results:
    """What calls gave: results, then gradients of all inputs; and the largest number that they met."""

    tensors: tuple[Tensor | None, ...]
    largest: float


class _Rehearsal:
    """The old and the new calls at some sizes."""

    def __init__(self, rewrite: Replacement, number: int) -> None:
        self.old, self.new = (tuple(ends) for ends in zip(*rewrite.outputs, strict=True))
        self.first, self.nodes = rewrite.old, tuple(dict.fromkeys((*rewrite.old, *rewrite.new)))
        made = {value for node in self.nodes for value in node.outputs()}
        read = (*(value for node in self.nodes for value in node.inputs), *self.old, *self.new)
        self.inputs = tuple(dict.fromkeys(value for value in read if value not in made))
        self.is_positive = number == 1
        """Roots and quotients have values then, and no sum cancels."""
        self.generator = torch.Generator().manual_seed(number)
        self.scaling = Scaling(self.nodes, rewrite.outputs)

    def run(self, sizes: Sequence[int], in_own_dtypes: bool) -> str:
        """Compare, at sizes as small as these where that goes: in double precision, and in the dtypes that they have.
        """
        self.scaling.settle(sizes)
        if sum(map(self.scaling.work, self.nodes)) > _MOST_WORK:
            raise TooTight
        self.calls = {node: self.scaling.call(node) for node in self.nodes}
        tensors = [self._draw(value) for value in self.inputs]
        wide = [tensor.double() if tensor.dtype.is_floating_point else tensor for tensor in tensors]
        exact, near, found = self._three(wide, torch.float64)
        if not in_own_dtypes:
            return self._judged(exact, (exact, near, found), _FIRST_DIGITS)
        reason = self._judged(exact, (exact, near, found))
        grown, halves = found.largest > _MOST_GROWTH * exact.largest, any(t.dtype is torch.float16 for t in tensors)
        if not reason and self.is_positive and grown and halves:
            return f"it makes numbers {found.largest / exact.largest:.2g} times as large, and half precision ends soon"
        if reason or all(a is b for a, b in zip(tensors, wide, strict=True)):
            return reason
        try:
            self._results(self.first, self.old, tensors, None)
        except RuntimeError:  # this host has no kernels for the dtype, and double precision has to do
            return ""
        return self._judged(exact, self._three(tensors, None))

    def _three(self, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> tuple[_Results, _Results, _Results]:
        """The old calls, the same on inputs a rounding apart, and the new calls."""
        beside = [_a_rounding_apart(tensor, self.generator) for tensor in tensors]
        old, near = (self._results(self.first, self.old, given, dtype) for given in (tensors, beside))
        return old, near, self._results(self.nodes, self.new, tensors, dtype)

    def _draw(self, value: Value) -> Tensor:
        shape, dtype = self.scaling.shape(value), value.type.dtype
        if dtype.is_floating_point or dtype.is_complex:
            drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
            return (drawn.abs() + 0.25 if self.is_positive else drawn).to(dtype)
        return torch.randint(0, min(self._counts(), default=100), shape, generator=self.generator).to(dtype)

    def _counts(self) -> Iterator[int]:
        """How much there is of what whole numbers may be indices of: rows, vertices, experts, classes."""
        for node in self.nodes:
            if "embedding" in node.op or node.op == AGGREGATE:
                yield self.scaling.shape(node.inputs[0])[0]
            if node.op == AGGREGATE:
                yield self.scaling.shape(Value(node))[0]
            if node.op in EXPERT_LAYERS:
                yield self.scaling.shape(node.inputs[1])[0]
            if node.op in _LOSSES_OF_CLASSES:
                yield self.scaling.shape(node.inputs[0])[_LOSSES_OF_CLASSES[node.op]]

    def _results(
        self, nodes: Sequence[Node], outputs: Sequence[Value], tensors: Sequence[Tensor], dtype: torch.dtype | None
    ) -> _Results:
        leaves = [
            tensor.detach().requires_grad_(tensor.dtype.is_floating_point and not _is_buffer(value))
            for value, tensor in zip(self.inputs, tensors, strict=True)
        ]
        values: dict[Value, Tensor] = dict(zip(self.inputs, leaves, strict=True))
        for node in nodes:
            op, args = self.calls[node]
            made = execute(op, *_in_dtype(map_tensors(op, args, values.__getitem__), dtype))
            values.update(zip(node.outputs(), made if isinstance(made, tuple) else (made,), strict=True))
        found = [values[value] for value in outputs]
        gradients = self._gradients(found, list(values.values()))
        everything = (*values.values(), *(gradient for gradient in gradients.values() if gradient is not None))
        largest = max((_largest(tensor) for tensor in everything), default=0.0)
        return _Results((*(t.detach() for t in found), *(gradients.get(id(leaf)) for leaf in leaves)), largest)

    def _gradients(self, outputs: Sequence[Tensor], values: Sequence[Tensor]) -> dict[int, Tensor | None]:
        """Of all values, by their identity, for other numbers coming back to every element."""
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        inner = [tensor for tensor in values if tensor.requires_grad]
        if not trained:
            return {}
        back: list[Tensor] = []
        for tensor in trained:
            drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(back)), dtype=torch.float64)
            back.append((drawn.abs() if self.is_positive else drawn).to(tensor.dtype))
        found = torch.autograd.grad(trained, inner, back, allow_unused=True)
        return {id(tensor): gradient for tensor, gradient in zip(inner, found, strict=True)}

    def _judged(self, exact: _Results, runs: tuple[_Results, _Results, _Results], unit: float = 0.0) -> str:
        """Why the new calls do not give what the old ones do, to some part of the largest number; empty where they do.
        """
        names = [*("result" for _ in self.old), *("gradient" for _ in self.inputs)]
        num_roundings = sum(map(self._num_roundings, self.nodes))
        old, near, new = (run.tensors for run in runs)
        for name, true, a, b, c in zip(names, exact.tensors, old, near, new, strict=True):
            reason = _compared((true, a, b, c), exact.largest, num_roundings, unit)
            if reason:
                return f"its {name} {reason}"
        return ""

    def _num_roundings(self, node: Node) -> int:
        """How many additions there are at most in one element of what a call makes, or of a gradient."""
        tensors = (*node.inputs, *node.outputs())
        return self.scaling.work(node) // max(1, min(prod(self.scaling.shape(value)) for value in tensors))


def _is_buffer(value: Value) -> bool:
    """Whether nobody asks for its gradient."""
    return isinstance(value.owner, Leaf) and value.owner.kind is LeafKind.BUFFER


def _in_dtype(args: Sequence[Any], dtype: torch.dtype | None) -> Iterator[Any]:
    """Arguments that say a floating dtype, saying another one."""
    for value in args:
        floats = isinstance(value, torch.dtype) and value.is_floating_point
        yield dtype if floats and dtype is not None else value


def _a_rounding_apart(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return tensor + tensor * signs * torch.finfo(tensor.dtype).eps


def _largest(tensor: Tensor) -> float:
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return 0.0
    return float(tensor.detach().double().nan_to_num(0, 0, 0).abs().max())


def _compared(found: tuple[Tensor | None, ...], largest: float, num_roundings: int, unit: float) -> str:
    """What is wrong with a new result, of which the old one is known in double precision, as it is and nearly so."""
    true, old, near, new = found
    if old is None and new is None:
        return ""
    like = new if old is None else old
    assert like is not None
    zeros = torch.zeros_like(like)
    z, x, w, y = (zeros if tensor is None else tensor for tensor in (true, old, near, new))
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"is {y.dtype} {list(y.shape)} where {x.dtype} {list(x.shape)} was"
    if not x.dtype.is_floating_point:
        return "" if torch.equal(x, y) else "differs"
    z, x, w, y = (tensor.double() for tensor in (z, x, w, y))
    if (x.isfinite() & ~y.isfinite()).any():
        return "is no number where there was one"
    numbers = z.isfinite() & x.isfinite() & w.isfinite()
    if not numbers.any():
        return ""
    off, own, moved = (float((a - b)[numbers].abs().max()) for a, b in ((y, z), (x, z), (x, w)))
    explained = max(unit * largest, num_roundings * max(own, moved, torch.finfo(like.dtype).eps * largest))
    return f"is off by {off:.2g} where rounding explains {explained:.0e}" if off > explained else ""
