"""What an operator is: one declaration of facts, and a call of it on tensors known by type only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from conjoin.ops.aten import PLACEMENT_PARAMETERS, Kind, Signature, signature
from conjoin.ops.dtypes import Dtype, Number, output_dtype
from conjoin.ops.notation import Notation, NotationError, bind_sizes, expand_dots, output_shapes, parse_notation
from conjoin.ops.tensor_type import TensorType

if TYPE_CHECKING:
    from conjoin.ops.local import LocalForm

Args = tuple[Any, ...]
"""Arguments in the order of the signature: tensors (or what stands for them), None, or literals; lists are tuples."""

Shapes = tuple[tuple[int, ...], ...]
"""Of a call's operands, as a rank holds them."""


@dataclass(frozen=True, slots=True)
class KernelBytes:
    """Memory that a kernel takes besides its operands, its outputs and their gradients."""

    kept: int
    """For the backward pass; without one it is gone after the call."""
    workspace: int = 0
    """During the forward pass, and again during the backward pass."""
    keeps_operands: bool = False
    """Whether it keeps all that it reads, and not what meta would."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """A notation together with the sizes that no operand shows."""

    text: str
    sizes: tuple[tuple[str, int], ...] = ()


def is_alike(one: Any, other: Any) -> bool:
    """Whether equal literals, or tuples of them, are of the same types too: 1, 1.0 and True differ, 0.0 and -0.0 do."""
    if one is other:
        return True
    if isinstance(one, tuple):
        return all(map(is_alike, one, other))
    return type(one) is type(other) and (not isinstance(one, _INEXACT) or repr(one) == repr(other))


_INEXACT = (float, complex)
_NO_TENSOR = (bool, int, float, complex, NoneType)
"""What may be given for a tensor and is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An operator applied to tensors of given types; equal only to a call with arguments of the same types.

    >>> call = Call("linear", (TensorType((2, 4), torch.float32), TensorType((3, 4), torch.float32), None))
    >>> call["weight"].shape, len(call.tensors)
    ((3, 4), 2)
    """

    op: str
    args: Args
    turned: bool = False
    """Whether what it reads lies in another order in memory, so that other kernels run for the same result: images with
    their channels last, a mask whose rows are not in one piece."""
    _hash: int | None = field(default=None, init=False, repr=False)
    """Kept, as are the operands: calls are looked up all the time."""
    _tensors: tuple[TensorType, ...] | None = field(default=None, init=False, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Call):
            return NotImplemented
        return self is other or (
            self.op == other.op
            and self.args == other.args
            and self.turned == other.turned
            and is_alike(self.args, other.args)
        )

    def __hash__(self) -> int:
        if self._hash is None:
            object.__setattr__(self, "_hash", hash((self.op, self.args)))
        return self._hash  # type: ignore[return-value] # just set

    def __reduce__(self) -> tuple[type[Call], tuple[str, Args, bool]]:
        """Without what is kept: hashes are other ones in another process."""
        return Call, (self.op, self.args, self.turned)

    @property
    def signature(self) -> Signature:
        return signature(self.op)

    @property
    def tensors(self) -> tuple[TensorType, ...]:
        """The operands, lists flattened, absent ones left out."""
        if self._tensors is None:
            object.__setattr__(self, "_tensors", tuple(value for _, value in walk_tensors(self.op, self.args)))
        return self._tensors  # type: ignore[return-value] # just set

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The parameter each operand was given for."""
        return tuple(name for name, _ in walk_tensors(self.op, self.args))

    def __getitem__(self, name: str) -> Any:
        place = self.signature.position(name)
        return None if place < 0 else self.args[place]

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """The non-negative dim that an attribute names, on the first operand unless a rank is given."""
        rank = len(self.tensors[0].shape) if rank is None else rank
        if self[name] is None:
            raise NotationError(f"{self.op} is called without {name}")
        return int(self[name]) % max(rank, 1)

    def dims(self, name: str = "dim", *, empty: bool = True) -> tuple[int, ...]:
        """The dims that an attribute names; all of them where it is absent or, if torch takes it so, empty."""
        rank = len(self.tensors[0].shape)
        value = self[name]
        if value == () and not empty:
            raise NotationError(f"an empty {name} means another thing in {self.op} than in other operators")
        if value is None or value == ():
            return tuple(range(rank))
        return tuple(dim % max(rank, 1) for dim in (value if isinstance(value, tuple) else (value,)))


def call_on(op: str, args: Args, type_of: Callable[[Any], TensorType]) -> Call:
    """The call on what stands for tensors, by their types: the same object for equal ones, which are so looked up
    without comparing what they are given.

    >>> f32 = TensorType((2,), torch.float32)
    >>> call_on("relu", ("x",), lambda _: f32) is call_on("relu", (f32,), lambda type: type)
    True
    """
    return _only(Call(op, map_tensors(op, args, type_of)))


@lru_cache(1 << 16)
def _only(call: Call) -> Call:
    return call


def walk_tensors(op: str, args: Args) -> Iterator[tuple[str, Any]]:
    """Every operand of a call with the name of its parameter; literals given for a tensor are not operands."""
    for parameter, value in zip(signature(op).parameters, args, strict=True):
        if parameter.kind is Kind.TENSOR and not isinstance(value, _NO_TENSOR):
            yield parameter.name, value
        elif parameter.kind is Kind.TENSORS and value is not None:
            yield from ((parameter.name, item) for item in value if item is not None)


def map_tensors(op: str, args: Args, change: Callable[[Any], Any]) -> Args:
    """The arguments with every operand changed."""

    def changed(kind: Kind, value: Any) -> Any:
        if kind is Kind.TENSOR and not isinstance(value, _NO_TENSOR):
            return change(value)
        if kind is Kind.TENSORS and value is not None:
            return tuple(None if item is None else change(item) for item in value)
        return value

    return tuple(changed(p.kind, value) for p, value in zip(signature(op).parameters, args, strict=True))


def bind_args(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Args:
    """Line arguments up with the signature; what only says where to run is left out.

    >>> bind_args("zeros", ([2, 3],), {"device": "cpu"})
    ((2, 3), None, None, None, None)
    """
    bound = []
    for i, parameter in enumerate(signature(op).parameters):
        value = args[i] if i < len(args) else kwargs.get(parameter.name, parameter.default)
        bound.append(None if parameter.name in PLACEMENT_PARAMETERS else _frozen(value))
    return tuple(bound)


def spread_args(op: str, args: Sequence[Any], device: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as torch takes them: by position, and those that it takes by name only, where they say anything.

    A device is where a call makes a tensor of nothing.

    >>> spread_args("div.Tensor_mode", ("x", "y", None))
    (['x', 'y'], {'rounding_mode': None})
    """
    parameters = signature(op).parameters
    pairs = [(p, device if p.name == "device" else v) for p, v in zip(parameters, args, strict=False)]
    positional = [list(v) if p.kind is Kind.TENSORS and v is not None else v for p, v in pairs if not p.keyword_only]
    said = [(p, v) for p, v in pairs if p.keyword_only and (v is not None or not p.has_default)]
    return positional, {parameter.name: value for parameter, value in said}


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One operator, declared in facts; everything else about it is derived from them."""

    name: str
    """The name in graphs; `overloads` lists further ATen overloads that mean the same."""
    index: str | Callable[[Call], str | Indexed]
    """Index notation (see `notation.py`), or how to write it for a given call."""
    sample: Callable[[Random], Args] | Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Random arguments for tests with `TensorType` where a tensor goes; or values to choose each attribute from, the
    tensors then being drawn from the notation."""
    overloads: tuple[str, ...] = ()
    terms: str | Callable[[Call], str] = ""
    """The output as a sum of products of operands, `input weight + bias`; what is not named is not linear. Or how to
    write it for a given call, where a literal decides."""
    dtype: Dtype | tuple[Dtype, ...] | Callable[[Call], Dtype] = Dtype.PROMOTE
    """Of each output, or of all; or how it follows from a literal of the call."""
    flops: float | Callable[[Call, Mapping[str, int]], float] = 1.0
    """Per point of the index space, or for the whole call; 0 for what only moves data."""
    reads: Callable[[Call, Mapping[str, int]], int] | None = None
    """Bytes of operands that a call reads, where it reads some of them more than once."""
    follows: Mapping[str, str] = field(default_factory=dict)
    """Attributes that are the size of an index, or (`shape`) the shape of the output, and shrink with a split; or
    (`@v`) an address in an index, which moves with it and is -1 on devices that do not have it."""
    pad_value: float = 0.0
    """What a window reads outside the tensor."""
    view: bool = False
    """The output aliases the input: nothing is read or written."""
    reaches: Mapping[str, Callable[[Call, str, tuple[int, int]], tuple[int, int]]] = field(default_factory=dict)
    """By index, the part of the dim of an operand that a piece of it needs, where that is more than its own: ranks then
    exchange parts. Asked with the call, the name of the operand and the piece."""
    owned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By index, operands without it that may lie split along their first dim where it is split: every device then owns
    a part of them, and what needs it goes there."""
    dealt: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By index, operands that may lie split so beside the owned ones: each of their rows goes where it is used."""
    local: Callable[[LocalForm], Any] | None = None
    """How a piece is computed where the operator on the pieces of its operands is not the piece of its output."""
    asks_where: tuple[str, ...] | None = None
    """The indices of which its own local form asks where a piece starts, not only how long it is; None for any."""
    grows: tuple[str, ...] = ()
    """The indices of which a later piece has more to do than an earlier one of the same length."""
    expansion: Callable[[LocalForm], Any] | None = None
    """The same operator as a composition of others, which may be split where this one may not, and is as fast."""
    by_parts: Callable[[LocalForm], Any] | None = None
    """The same where the dims that it takes whole are split; it goes over its operands more often."""
    random: bool = False
    """Each element is drawn on its own: shards draw independently, copies draw alike."""
    rate: str = ""
    """The attribute that says how often something is dropped: at 0 nothing is drawn."""
    one_dtype: bool = False
    """Runs on operands of one floating-point dtype only, though torch may give a type for others; autocast brings them
    to its own."""
    domain: tuple[float, float] = (-2.0, 2.0)
    """Where test values lie."""
    smooth: bool = True
    """Whether gradients pass; False where the outputs carry none."""
    constants: tuple[str, ...] = ()
    """Operands that never carry a gradient."""
    by_order: bool = False
    """Whether other kernels run where the channels of its first operand lie last in memory; of attention, where the
    rows of its mask do not."""
    by_rows: bool = False
    """Whether its kernels read rows of its first operand in one piece; of others a copy is made."""
    family: str = ""
    """The kind of kernels that run it, where notation cannot tell: several products in one, windows that are
    convolutions, or that what is taken whole is a small part of what is read."""
    num_kernels: tuple[int, int] = (1, 1)
    """Of it and of its backward, where it is written in several of which all but one or two are tiny."""
    backward_passes: int = 0
    """How often tensors are read and written by a gradient for which there is no kernel of its own: that of a square is
    `grad * (2 * x.pow(1))`, three kernels. One kernel would read two tensors and write one."""
    hands_on: tuple[str, ...] = ()
    """Operands whose gradient is the output's own where they are as large; what `alpha` scales is not."""
    kernels: str = ""
    """What its kernels are called together with those of its kind, where reductions of that kind have their own."""
    blocks: Callable[[Call], int] | None = None
    """In how many parts a GPU's kernel does a call at a time, where few of them leave most of the GPU idle."""
    gpu_bytes: Callable[[Call, Shapes], KernelBytes | None] | None = None
    """What a GPU's own kernel takes for operands of these shapes, where torch on meta runs another form of it; or any
    device's, where meta has none."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.overloads)


@dataclass(frozen=True, slots=True)
class Space:
    """The index space of one call: its notation, bound to sizes."""

    notation: Notation
    sizes: Mapping[str, int]

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        return output_shapes(self.notation, self.sizes)


def _drop_absent(text: str, call: Call) -> str:
    """Leave out the operands of a declared notation that this call does not have."""
    left, _, right = text.partition("->")
    parts = left.split(",")
    present = call.operand_names
    if len(parts) > len(present):
        tensor_names = [p.name for p in call.signature.parameters if p.kind is Kind.TENSOR]
        parts = [part for part, name in zip(parts, tensor_names, strict=False) if name in present]
    return f"{','.join(parts)}->{right}"


@lru_cache(maxsize=65536)
def _space(index: str, given: tuple[tuple[str, int], ...], shapes: tuple[tuple[int, ...], ...]) -> Space:
    try:
        notation = expand_dots(parse_notation(index), shapes)
        return Space(notation, bind_sizes(notation, shapes, dict(given)))
    except NotationError as error:
        raise NotationError(f"{index!r} does not fit the shapes {', '.join(map(str, shapes))}: {error}") from None


def _indexed(index: str | Callable[[Call], str | Indexed], call: Call) -> Indexed:
    """What is declared of a call, for the operands it has."""
    declared = index if isinstance(index, str) else index(call)
    if isinstance(declared, str):
        declared = Indexed(declared)
    return Indexed(_drop_absent(declared.text, call), declared.sizes)


@lru_cache(maxsize=1 << 16)
def _space_of(index: str | Callable[[Call], str | Indexed], call: Call) -> Space:
    declared = _indexed(index, call)
    return _space(declared.text, declared.sizes, tuple(tensor.shape for tensor in call.tensors))


def space_of(spec: OpSpec, call: Call) -> Space:
    """The index space of a call; NotationError when the declaration does not fit it."""
    return _space_of(spec.index, call)


def notation_of(spec: OpSpec, call: Call) -> tuple[Notation, Mapping[str, int]]:
    """The notation of a call with every dim named, and the sizes given besides: what holds whatever its shapes are.

    >>> spec = OpSpec("linear", "... k, n k, n -> ... n")
    >>> notation, _ = notation_of(spec, Call("linear", (TensorType((2, 4), torch.float32),) * 2 + (None,)))
    >>> notation.indices(), notation.summed()
    (('d0', 'k', 'n'), frozenset({'k'}))
    """
    declared = _indexed(spec.index, call)
    shapes = [tensor.shape for tensor in call.tensors]
    return expand_dots(parse_notation(declared.text), shapes), dict(declared.sizes)


def _numbers(call: Call) -> list[Number]:
    """The literals that count for the dtype as operands do."""
    return [
        value
        for parameter, value in zip(call.signature.parameters, call.args, strict=True)
        if (parameter.kind is Kind.TENSOR or parameter.name in _PROMOTING) and isinstance(value, Number)
    ]


_PROMOTING = frozenset({"self", "other", "exponent", "min", "max", "fill_value", "start", "end", "step"})


def output_types(spec: OpSpec, call: Call, default: torch.dtype = torch.float32) -> tuple[TensorType, ...]:
    """Shapes and dtypes of the outputs, derived from the declaration; floats without a dtype are of the default one."""
    shapes = space_of(spec, call).output_shapes
    declared = spec.dtype(call) if callable(spec.dtype) else spec.dtype
    rules = declared if isinstance(declared, tuple) else (declared,) * len(shapes)
    numbers = _numbers(call)
    if isinstance(call["dtype"], torch.dtype):
        return tuple(TensorType(shape, call["dtype"]) for shape in shapes)
    operands = [call.tensors[i if rule is Dtype.EACH else 0 :] for i, rule in enumerate(rules)]
    dtypes = (output_dtype(rule, given, numbers, default) for rule, given in zip(rules, operands, strict=True))
    return tuple(map(TensorType, shapes, dtypes))
