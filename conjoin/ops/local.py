"""The local form of an operator: what one device computes when some indices of a call are split.

Given the piece [lo, hi) of each split index: `operand_spans` says which part of every operand is needed, halo included,
and `run_local` computes the piece of the output from those parts. Calls go through `emit(op, *args)`, so that the same
text runs on tensors, builds graph nodes, or prints code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conjoin.ops.notation import Access, Factors, Spread, Window
from conjoin.ops.sharding import find_index, unit_of
from conjoin.ops.spec import Args, Call, OpSpec, Space, map_tensors, space_of

Pieces = Mapping[str, tuple[int, int]]
"""For each split index the range of it that is computed here."""
Emit = Callable[..., Any]
"""`emit(op, *args)` applies an operator by name, arguments in the order of its signature, trailing ones optional."""


@dataclass(frozen=True, slots=True)
class Span:
    """The part [start, stop) of a dim that a piece needs, and how far its window reaches beyond the tensor."""

    dim: int
    start: int
    stop: int
    pad_before: int = 0
    pad_after: int = 0


def _span(access: Access, shape: tuple[int, ...], index: str, piece: tuple[int, int], space: Space) -> Span | None:
    place = find_index(access, index, space)
    if place is None:
        return None
    dim = access.dims[place]
    if isinstance(dim, Factors):
        unit = unit_of(dim, index, space)
        return Span(place, piece[0] * unit, piece[1] * unit)
    size = shape[place]
    lo, hi = dim.reach(*piece, space.sizes[dim.kernel])
    start = min(max(lo, 0), size)
    stop = max(min(hi, size), start)
    return Span(place, start, stop, max(0, min(hi, 0) - lo), max(0, hi - max(size, lo)))


def operand_spans(spec: OpSpec, call: Call, pieces: Pieces) -> tuple[tuple[Span, ...], ...]:
    """For every operand the parts of its dims that the pieces need."""
    if not pieces:
        return ((),) * len(call.tensors)
    space = space_of(spec, call)
    spans = []
    for access, tensor, name in zip(space.notation.operands, call.tensors, call.operand_names, strict=True):
        needed = {index: _reached(spec, call, name, index, piece) for index, piece in pieces.items()}
        found = (_span(access, tensor.shape, index, piece, space) for index, piece in needed.items())
        spans.append(tuple(span for span in found if span is not None))
    return tuple(spans)


def _reached(spec: OpSpec, call: Call, operand: str, index: str, piece: tuple[int, int]) -> tuple[int, int]:
    return spec.reaches[index](call, operand, piece) if index in spec.reaches else piece


def output_spans(spec: OpSpec, call: Call, pieces: Pieces) -> tuple[tuple[Span, ...], ...]:
    """For every output the parts of its dims that the pieces make."""
    space = space_of(spec, call)
    return tuple(
        tuple(
            Span(place, lo * unit_of(access.dims[place], index, space), hi * unit_of(access.dims[place], index, space))
            for index, (lo, hi) in pieces.items()
            if (place := find_index(access, index, space)) is not None
        )
        for access in space.notation.outputs
    )


@dataclass(frozen=True, slots=True)
class LocalForm:
    """What a declaration's own `local` is given: the call, its space, the pieces, and the operands' parts by name."""

    spec: OpSpec
    call: Call
    space: Space
    pieces: Pieces
    args: Args
    """The arguments as the generic form would pass them: local parts padded, following attributes shrunk."""
    emit: Emit

    def __getitem__(self, name: str) -> Any:
        return self.args[self.call.signature.position(name)]

    def with_args(self, **changes: Any) -> Args:
        """The arguments with some replaced."""
        names = [parameter.name for parameter in self.call.signature.parameters]
        assert set(changes) <= set(names), f"{self.call.op} has no parameter {set(changes) - set(names)}"
        return tuple(changes.get(name, value) for name, value in zip(names, self.args, strict=True))

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the outputs on this device."""
        return Space(self.space.notation, local_sizes(self.space, self.pieces)).output_shapes

    def run(self, **changes: Any) -> Any:
        """The operator itself on the local parts."""
        return self.emit(self.call.op, *self.with_args(**changes))


def local_sizes(space: Space, pieces: Pieces) -> dict[str, int]:
    """The sizes of all indices on this device."""
    return {**space.sizes, **{index: hi - lo for index, (lo, hi) in pieces.items()}}


def _local_attributes(form: LocalForm) -> dict[str, Any]:
    local = Space(form.space.notation, local_sizes(form.space, form.pieces))
    followed = {
        name: _following(form.call[name], source, local, form.pieces)
        for name, source in form.spec.follows.items()
        if form.call.signature.position(name) >= 0
    }
    return followed | _window_attributes(form.call, form.space, form.pieces)


def _following(value: Any, source: str, local: Space, pieces: Pieces) -> Any:
    if source == "shape":
        return local.output_shapes[0]
    if not source.startswith("@"):
        return local.sizes[source]
    lo, hi = pieces.get(source[1:], (0, local.sizes[source[1:]]))
    return value - lo if lo <= value < hi else -1


def _cut(part: Any, spans: Sequence[Span], shape: tuple[int, ...], emit: Emit) -> Any:
    """Leave out what no output reaches, along the dims that came whole."""
    for span in spans:
        if (span.start, span.stop) != (0, shape[span.dim]):
            part = emit("slice.Tensor", part, span.dim, span.start, span.stop, 1)
    return part


def _pad(spec: OpSpec, part: Any, spans: Sequence[Span], rank: int, emit: Emit) -> Any:
    """Put back what the windows read outside the tensor."""
    if not any(span.pad_before or span.pad_after for span in spans):
        return part
    pads = [0] * (2 * rank)
    for span in spans:
        pads[2 * (rank - 1 - span.dim)] = span.pad_before
        pads[2 * (rank - 1 - span.dim) + 1] = span.pad_after
    return emit("constant_pad_nd", part, tuple(pads), spec.pad_value)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Addresses moved into a piece of the index they address, and which of them fall in it."""

    parts: tuple[Any, ...]
    inside: Any
    access: Access


def move_addresses(addresses: Any, piece: tuple[int, int], emit: Emit) -> tuple[Any, Any]:
    """Addresses counted from the start of a piece, those outside set to one inside; and a mask of the true ones."""
    lo, hi = piece
    shifted = emit("sub.Tensor", addresses, lo)
    inside = emit("logical_and", emit("ge.Scalar", shifted, 0), emit("lt.Scalar", shifted, hi - lo))
    return emit("clamp", shifted, 0, hi - lo - 1), inside


def _look_up(space: Space, pieces: Pieces, parts: Sequence[Any], emit: Emit) -> _Lookup | None:
    for place, access in enumerate(space.notation.operands):
        if access.addresses is not None and access.addresses in pieces:
            moved, inside = move_addresses(parts[place], pieces[access.addresses], emit)
            return _Lookup((*parts[:place], moved, *parts[place + 1 :]), inside, access)
    return None


def _mask_output(form: LocalForm, output: Any, found: _Lookup) -> Any:
    """Zero the positions whose address fell outside the piece: they belong to another device."""
    names = [dim.names for dim in found.access.dims if isinstance(dim, Factors) and dim.names]
    sizes = local_sizes(form.space, form.pieces)
    shape = tuple(
        sizes[dim.names[0]] if isinstance(dim, Factors) and dim.names in names else 1
        for dim in form.space.notation.outputs[0].dims
    )
    outside = form.emit("logical_not", form.emit("reshape", found.inside, shape))
    return form.emit("masked_fill.Scalar", output, outside, 0)


def indices_by_place(spec: OpSpec, call: Call) -> frozenset[str]:
    """The indices of which the local form of a call depends on where a piece lies: of others its length says it all.

    >>> from conjoin.ops import find_spec
    >>> from conjoin.ops.tensor_type import TensorType
    >>> import torch
    >>> rows = TensorType((8, 4), torch.float32)
    >>> indices_by_place(find_spec("linear"), Call("linear", (rows, rows, None)))
    frozenset()
    """
    space = space_of(spec, call)
    windows = {dim.out for dim in _windows(space)}
    followed = {source[1:] for source in spec.follows.values() if source.startswith("@")}
    addressed = {access.addresses for access in space.notation.operands if access.addresses is not None}
    asked = () if spec.local is None else space.sizes if spec.asks_where is None else spec.asks_where
    return frozenset({*windows, *followed, *addressed, *spec.reaches, *asked})


def run_local(spec: OpSpec, call: Call, pieces: Pieces, parts: Sequence[Any], emit: Emit) -> tuple[Any, ...]:
    """Compute the pieces of the outputs from the parts of the operands that `operand_spans` names."""
    space = space_of(spec, call)
    given, asked = operand_spans(spec, call, pieces), pieces
    pieces = _with_windows(space, asked)
    wanted = given if pieces == asked else operand_spans(spec, call, pieces)
    padded = []
    for part, have, want, tensor in zip(parts, given, wanted, call.tensors, strict=True):
        cut = _cut(part, [span for span in want if span not in have], tensor.shape, emit)
        padded.append(_pad(spec, cut, want, len(tensor.shape), emit))
    found = None if spec.local is not None else _look_up(space, pieces, padded, emit)
    feed = iter(found.parts if found else padded)
    form = LocalForm(spec, call, space, pieces, map_tensors(call.op, call.args, lambda _: next(feed)), emit)
    form = replace(form, args=form.with_args(**_local_attributes(form)))
    result = form.run() if spec.local is None else spec.local(form)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    if found:
        outputs[0] = _mask_output(form, outputs[0], found)
    return tuple(_scale(form, _crop(form, output)) for output in outputs)


def _windows(space: Space) -> list[Window | Spread]:
    return [dim for access in space.notation.operands for dim in access.dims if not isinstance(dim, Factors)]


def _with_windows(space: Space, pieces: Pieces) -> dict[str, tuple[int, int]]:
    """Where one window is split all are treated as pieces, so that every padding is explicit."""
    outs = [dim.out for dim in _windows(space)]
    if not any(out in pieces for out in outs):
        return dict(pieces)
    return {**{out: (0, space.sizes[out]) for out in outs}, **pieces}


def _window_attributes(call: Call, space: Space, pieces: Pieces) -> dict[str, Any]:
    """Padding is done by `_pad`: the operator itself pads nothing."""
    windows = _windows(space)
    if not any(dim.out in pieces for dim in windows):
        return {}
    zeros = (0,) * len(windows)
    changes: dict[str, Any] = {"padding": "valid" if isinstance(call["padding"], str) else zeros}
    changes |= {"output_padding": zeros} if call["output_padding"] is not None else {}
    return changes | ({"ceil_mode": False} if call["ceil_mode"] is not None else {})


def _crop(form: LocalForm, output: Any) -> Any:
    """A spread computes whole strides around the piece: cut the piece out."""
    for access in form.space.notation.operands:
        for dim in access.dims:
            if isinstance(dim, Spread) and dim.out in form.pieces:
                lo, hi = form.pieces[dim.out]
                first = dim.reach(lo, hi, form.space.sizes[dim.kernel])[0] * dim.stride - dim.padding
                place = next(i for i, d in enumerate(form.space.notation.outputs[0].dims) if d == Factors((dim.out,)))
                output = form.emit("slice.Tensor", output, place, lo - first, hi - first, 1)
    return output


def _scale(form: LocalForm, output: Any) -> Any:
    """A mean over a piece counts for as much as the piece is of the whole; over nothing it is none, and counts 0."""
    for index, (lo, hi) in form.pieces.items():
        if index in form.space.notation.averaged:
            output = form.emit("nan_to_num", output, 0.0) if hi == lo else output
            output = form.emit("mul.Tensor", output, (hi - lo) / form.space.sizes[index])
    return output
