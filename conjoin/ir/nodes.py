"""The parts of a graph: leaves (what comes from outside), nodes (calls of operators), values (what they make).

Leaves and nodes are hash-consed: building the same one twice gives the same object, so equality is identity and a graph
of any depth is compared and hashed in constant time. The table holds them weakly and is the only global state here.
They are pickled as the calls that make them, so that in the process that loads them they are in its table too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, assert_never
from weakref import WeakValueDictionary

from conjoin.ops import Args, Call, Kind, OpSpec, TensorType, call_on, spec_for, walk_tensors


class LeafKind(Enum):
    """Where a leaf comes from."""

    INPUT = "input"
    PARAMETER = "param"
    BUFFER = "buffer"
    CONSTANT = "const"


@dataclass(frozen=True, slots=True)
class Section:
    """Which part of a packed weight a leaf is: query, key or value of a tensor that holds all three, one after the
    other along a dim."""

    of: str
    """The name of the whole tensor."""
    dim: int
    start: int
    whole: int
    """The size of the dim in the whole tensor."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Leaf:
    """A tensor from outside the graph; `aliases` are further names of the same tensor (tied weights)."""

    kind: LeafKind
    name: str
    type: TensorType
    trainable: bool = False
    aliases: tuple[str, ...] = ()
    data: bytes | None = None
    """The values of a constant, row by row, where they are known."""
    channels_last: bool = False
    """Whether it is images, or windows over them, whose channels lie last in memory."""
    section: Section | None = None
    """Where it is a part of a packed weight: names and aliases of a user are those of the whole."""

    @property
    def names(self) -> tuple[str, ...]:
        """The user's names of the tensor, or of the packed weight that it is a part of."""
        return (self.name if self.section is None else self.section.of, *self.aliases)

    @property
    def is_trained(self) -> bool:
        """Whether it is a parameter that a step changes; of a stage's input a gradient may be asked, too."""
        return self.trainable and self.kind is LeafKind.PARAMETER

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(make_leaf, trainable=self.trainable, aliases=self.aliases, data=self.data)
        make = partial(make, channels_last=self.channels_last, section=self.section)
        return make, (self.kind, self.name, self.type)


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class Node:
    """One call of an operator; arguments stand in the order of its signature, values where tensors go."""

    op: str
    args: Args
    types: tuple[TensorType, ...]
    occurrence: int = 0
    """Tells equal calls apart that must not be merged: random draws, and copies whose gradients add up separately."""
    pinned: bool = False
    """Computed in the dtypes written, whatever autocast the caller runs under."""
    _inputs: tuple[Value, ...] | None = field(default=None, init=False)
    """Kept once asked for, as is the call: there are few nodes, and they are asked often."""
    _call: Call | None = field(default=None, init=False)

    def __repr__(self) -> str:
        """The call alone: with its inputs spelled out, and theirs, it would be as long as the graph has paths."""
        return f"<Node {self.op} -> {', '.join(map(str, self.types))}>"

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(make_node, occurrence=self.occurrence, pinned=self.pinned)
        return make, (self.op, self.args, self.types)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values this node reads, in order, lists flattened."""
        if self._inputs is None:
            object.__setattr__(self, "_inputs", tuple(value for _, value in walk_tensors(self.op, self.args)))
        return self._inputs  # type: ignore[return-value] # just set

    @property
    def call(self) -> Call:
        """The call on types, as the declarations take it."""
        if self._call is None:
            object.__setattr__(self, "_call", call_on(self.op, self.args, lambda value: value.type))
        return self._call  # type: ignore[return-value] # just set

    @property
    def spec(self) -> OpSpec | None:
        """The declaration of the operator; None when it is opaque, or used in a form nobody declared."""
        return spec_for(self.call)

    def outputs(self) -> Iterator[Value]:
        """The values this node makes."""
        return (Value(self, i) for i in range(len(self.types)))


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph: a leaf, or one output of a node."""

    owner: Leaf | Node
    index: int = 0

    @property
    def type(self) -> TensorType:
        return self.owner.type if isinstance(self.owner, Leaf) else self.owner.types[self.index]


def fits(kind: Kind, argument: Any) -> bool:
    """Whether an argument is of the kind a parameter takes: a number may stand for a tensor, a value for no literal."""
    match kind:
        case Kind.ATTRIBUTE:
            return not _holds_value(argument)
        case Kind.TENSOR:
            return argument is None or isinstance(argument, Value | bool | int | float | complex)
        case Kind.TENSORS:
            if argument is None:
                return True
            return isinstance(argument, tuple) and all(isinstance(item, Value | None) for item in argument)
        case _:
            assert_never(kind)


def _holds_value(item: Any) -> bool:
    return any(map(_holds_value, item)) if isinstance(item, tuple) else isinstance(item, Value)


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's program a node comes from: file, line, and the module's path inside the model."""

    file: str
    line: int
    module: str = ""
    segment: int = 0
    """Which of the segments that the user asked to be run again in the backward pass it stands in; 0 for none."""

    def __str__(self) -> str:
        return in_one_line(f"{self.file}:{self.line}" + (f" ({self.module})" if self.module else ""))


def in_one_line(text: str) -> str:
    """A text from a stranger's file as people may be shown it: what a terminal would act on is escaped.

    >>> print(in_one_line("a\\tb"))
    a\\tb
    """
    return text if text.isprintable() else ascii(text)[1:-1]


_interned: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def typed_key(value: Any) -> Any:
    """What stands for a literal, a value or a tuple of them in comparisons: 1, 1.0 and True differ, as do 0.0 and -0.0;
    nan is equal to itself.
    """
    if isinstance(value, tuple):
        return tuple(typed_key(item) for item in value)
    return type(value), repr(value) if isinstance(value, float | complex) else value


def make_leaf(  # noqa: PLR0913 – all that a leaf is
    kind: LeafKind,
    name: str,
    type: TensorType,
    *,
    trainable: bool = False,
    aliases: tuple[str, ...] = (),
    data: bytes | None = None,
    channels_last: bool = False,
    section: Section | None = None,
) -> Leaf:
    """The leaf with these properties; the same object every time."""
    key = (kind, name, type, trainable, aliases, data, channels_last, section)
    return _interned.setdefault(key, Leaf(*key))  # type: ignore[no-any-return]


def retype(leaf: Leaf, type: TensorType) -> Leaf:
    """The leaf with another type."""
    return _remade(leaf, type, leaf.trainable)


def frozen(leaf: Leaf) -> Leaf:
    """The leaf as one that has no gradient."""
    return _remade(leaf, leaf.type, trainable=False)


def _remade(leaf: Leaf, type: TensorType, trainable: bool) -> Leaf:
    return make_leaf(
        leaf.kind, leaf.name, type, trainable=trainable, aliases=leaf.aliases, data=leaf.data,
        channels_last=leaf.channels_last, section=leaf.section,
    )  # fmt: skip


def make_node(op: str, args: Args, types: tuple[TensorType, ...], *, occurrence: int = 0, pinned: bool = False) -> Node:
    """The node with these properties; the same object every time."""
    key = (op, typed_key(args), types, occurrence, pinned)
    return _interned.setdefault(key, Node(op, args, types, occurrence, pinned))  # type: ignore[no-any-return]


def permutation(node: Node) -> tuple[int, ...] | None:
    """Which dim of what it reads each dim is that a node makes; None where it does more than turn dims."""
    if node.op == "permute":
        return node.call.dims("dims")
    if node.op == "transpose.int":
        order = list(range(len(node.types[0].shape)))
        one, other = node.call.dim("dim0"), node.call.dim("dim1")
        order[one], order[other] = other, one
        return tuple(order)
    if node.op in ("t", "numpy_T"):
        return tuple(reversed(range(len(node.types[0].shape))))
    return None
