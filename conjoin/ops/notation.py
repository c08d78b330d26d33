"""Index notation: what each dim of each tensor of an operator stands for.

    "... k, n k, n -> ... n"                        linear: k is missing on the right, so it is summed
    "b s (h d) -> b h s d"                          a dim made of two indices, the first one varying slowest
    "b k! -> b k!"                                  softmax: k must stay whole
    "b k~ -> b"                                     mean: k is averaged, not summed
    "b k^ -> b"                                     maximum: the greatest along k, which carries no gradient
    "v d, b s@v -> b s d"                           embedding: the values of the second operand address v
    "n c y*2+r*1-1, o c r -> n o y"                 a window: the input position y*stride + r*dilation - padding
    "n c (y-r*1+0)/2, c o r -> n o y"               its inverse (transposed convolution)

`1` is a dim without index (size 1, broadcast). `...` stands for any number of leading dims, aligned at the right and
broadcast as torch does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod


class NotationError(ValueError):
    """A notation that does not parse, or does not fit the shapes it is used on."""


@dataclass(frozen=True, slots=True)
class Factors:
    """A dim whose position is made of these indices, slowest first; none of them: a dim of size 1."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """An input dim read at `out * stride + kernel * dilation - padding`."""

    out: str
    stride: int
    kernel: str
    dilation: int
    padding: int

    def size_of_out(self, dim_size: int, kernel_size: int) -> int:
        """How many window positions fit when both sides are padded alike and the last one is complete."""
        return (dim_size + 2 * self.padding - self.dilation * (kernel_size - 1) - 1) // self.stride + 1

    def reach(self, lo: int, hi: int, kernel_size: int) -> tuple[int, int]:
        """The input range that output positions [lo, hi) read; it may lie outside the tensor, in the padding."""
        return lo * self.stride - self.padding, (hi - 1) * self.stride + (
            kernel_size - 1
        ) * self.dilation + 1 - self.padding


@dataclass(frozen=True, slots=True)
class Spread:
    """An input dim read at `(out - kernel * dilation + padding) / stride` where that is whole: a window inverted."""

    out: str
    stride: int
    kernel: str
    dilation: int
    padding: int

    def reach(self, lo: int, hi: int, kernel_size: int) -> tuple[int, int]:
        """The input range that reaches output positions [lo, hi), long enough for its own reach to cover them."""
        last = (hi - 1 + self.padding) // self.stride
        gap = last * self.stride - self.padding + (kernel_size - 1) * self.dilation + 1 < hi
        return (lo + self.padding - (kernel_size - 1) * self.dilation) // self.stride, last + 1 + gap


DimExpr = Factors | Window | Spread


@dataclass(frozen=True, slots=True)
class Access:
    """How one tensor is indexed; `addresses` names the index its values point into, if they do."""

    dims: tuple[DimExpr, ...]
    addresses: str | None = None

    def indices(self) -> set[str]:
        """All indices that occur in this tensor."""
        return {name for dim in self.dims for name in _names(dim)}


@dataclass(frozen=True, slots=True)
class Notation:
    """A parsed notation; `whole` indices cannot be split, `averaged` ones are summed and divided by their size.

    Of `greatest` ones the largest value is taken.
    """

    operands: tuple[Access, ...]
    outputs: tuple[Access, ...]
    whole: frozenset[str]
    averaged: frozenset[str]
    greatest: frozenset[str] = frozenset()

    def indices(self) -> tuple[str, ...]:
        """All indices in order of first appearance."""
        dims = (dim for access in (*self.operands, *self.outputs) for dim in access.dims)
        return tuple(dict.fromkeys(name for dim in dims for name in _names(dim)))

    def summed(self) -> frozenset[str]:
        """The indices that no output has."""
        kept = {name for output in self.outputs for name in output.indices()}
        return frozenset(name for name in self.indices() if name not in kept)


def _names(dim: DimExpr) -> tuple[str, ...]:
    return dim.names if isinstance(dim, Factors) else (dim.out, dim.kernel)


_NAME = r"[A-Za-z_]\w*"
_TOKEN = re.compile(
    rf"\s*(?:(?P<window>(?P<wo>{_NAME})\*(?P<ws>\d+)\+(?P<wk>{_NAME})\*(?P<wd>\d+)-(?P<wp>\d+))"
    rf"|(?P<spread>\((?P<so>{_NAME})-(?P<sk>{_NAME})\*(?P<sd>\d+)\+(?P<sp>\d+)\)/(?P<ss>\d+))"
    rf"|(?P<group>\((?:\s*{_NAME}[!~^]?)*\s*\))|(?P<name>{_NAME}[!~^]?)|(?P<one>1)|(?P<dots>\.\.\.!?)|@(?P<addresses>{_NAME}))\s*"
)
_DOTS = "..."


def _parse_token(match: re.Match[str], marks: set[str]) -> DimExpr:
    if match["window"]:
        return Window(match["wo"], int(match["ws"]), match["wk"], int(match["wd"]), int(match["wp"]))
    if match["spread"]:
        return Spread(match["so"], int(match["ss"]), match["sk"], int(match["sd"]), int(match["sp"]))
    if match["one"]:
        return Factors(())
    if match["dots"]:
        marks.update({match["dots"]} - {_DOTS})
        return Factors((_DOTS,))
    words = (match["group"] or match["name"]).strip("()").split()
    marks.update(word for word in words if word[-1] in "!~^")
    return Factors(tuple(word.rstrip("!~^") for word in words))


def _parse_access(text: str, marks: set[str]) -> Access:
    dims: list[DimExpr] = []
    addresses = None
    position, text = 0, text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.end() == position:
            raise NotationError(f"cannot read {text[position:]!r} in {text!r}")
        position = match.end()
        if match["addresses"]:
            addresses = match["addresses"]
        else:
            dims.append(_parse_token(match, marks))
    repeated = [name for name, count in Counter(name for dim in dims for name in _names(dim)).items() if count > 1]
    if repeated:
        raise NotationError(f"{', '.join(repeated)} stands twice in {text!r}")
    return Access(tuple(dims), addresses)


@lru_cache(maxsize=65536)
def parse_notation(text: str) -> Notation:
    """Parse a notation without binding it to shapes.

    >>> parse_notation("b k~ -> b").averaged
    frozenset({'k'})
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise NotationError(f"{text!r} has no '->'")
    marks: set[str] = set()
    operands = tuple(_parse_access(part, marks) for part in left.split(",")) if left.strip() else ()
    outputs = tuple(_parse_access(part, marks) for part in right.split(","))
    kernels = {dim.kernel for access in operands for dim in access.dims if not isinstance(dim, Factors)}
    whole = frozenset(mark[:-1] for mark in marks if mark[-1] == "!") | kernels
    averaged, greatest = (frozenset(mark[:-1] for mark in marks if mark[-1] == kind) for kind in "~^")
    return Notation(operands, outputs, whole, averaged, greatest)


def _dots_width(access: Access, rank: int) -> int:
    return rank - len(access.dims) + 1 if Factors((_DOTS,)) in access.dims else 0


def _expand_access(access: Access, shape: Sequence[int] | None, sizes: Sequence[int]) -> Access:
    """Replace `...` by named leading dims; a size-1 dim against a larger one is broadcast and has no index."""
    if Factors((_DOTS,)) not in access.dims:
        return access
    place = access.dims.index(Factors((_DOTS,)))
    width = len(sizes) if shape is None else _dots_width(access, len(shape))
    dims: list[DimExpr] = []
    for i in range(width):
        slot = len(sizes) - width + i
        broadcast = shape is not None and shape[place + i] == 1 and sizes[slot] != 1
        dims.append(Factors(() if broadcast else (f"d{slot}",)))
    return replace(access, dims=(*access.dims[:place], *dims, *access.dims[place + 1 :]))


def broadcast_shape(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape that all broadcast to, as torch does it."""
    columns: list[int] = []
    for shape in shapes:
        columns = [1] * (len(shape) - len(columns)) + columns
        for i, size in enumerate(reversed(shape), 1):
            if size != 1 and columns[-i] not in (1, size):
                raise NotationError(f"sizes {columns[-i]} and {size} do not broadcast")
            columns[-i] = size if columns[-i] == 1 else columns[-i]
    return tuple(columns)


def broadcast_names(names: Sequence[str], shape: Sequence[int], full: Sequence[int]) -> str:
    """Name the dims of a tensor that broadcasts to a shape: aligned at the right, `1` where it is repeated.

    >>> broadcast_names(["b", "h", "l"], (1, 5), (2, 4, 5))
    '1 l'
    """
    if len(shape) > len(names):
        raise NotationError(f"a shape {tuple(shape)} does not broadcast to {tuple(full)}")
    lead = len(names) - len(shape)
    return " ".join("1" if n == 1 and full[lead + i] != 1 else names[lead + i] for i, n in enumerate(shape))


def expand_dots(notation: Notation, shapes: Sequence[Sequence[int]]) -> Notation:
    """Give every dim that `...` stands for a name of its own, `d0 d1 …`.

    >>> [len(a.dims) for a in expand_dots(parse_notation("... k, n k -> ... n"), [(2, 3, 4), (5, 4)]).outputs]
    [3]
    """
    if not notation.operands and len(shapes) == 1:
        notation = replace(notation, operands=(Access(()),))  # nothing before the arrow: an operand without dims
    if len(shapes) != len(notation.operands):
        raise NotationError(f"{len(notation.operands)} operands expected, {len(shapes)} given")
    leading = []
    for access, shape in zip(notation.operands, shapes, strict=True):
        width = _dots_width(access, len(shape))
        if width < 0 or (width == 0 and Factors((_DOTS,)) not in access.dims and len(shape) != len(access.dims)):
            raise NotationError(
                f"an operand of shape {tuple(shape)} has not the {len(access.dims)} dims of the notation"
            )
        place = access.dims.index(Factors((_DOTS,))) if Factors((_DOTS,)) in access.dims else 0
        leading.append(tuple(shape[place : place + width]))
    sizes = broadcast_shape(leading)
    return Notation(
        tuple(_expand_access(a, s, sizes) for a, s in zip(notation.operands, shapes, strict=True)),
        tuple(_expand_access(a, None, sizes) for a in notation.outputs),
        notation.whole | ({f"d{i}" for i in range(len(sizes))} if _DOTS in notation.whole else set()),
        notation.averaged,
        notation.greatest,
    )


def bind_sizes(notation: Notation, shapes: Sequence[Sequence[int]], given: Mapping[str, int]) -> dict[str, int]:
    """The size of every index, from the operands' shapes and what the declaration gives besides.

    >>> bind_sizes(parse_notation("b (h d) -> b h d"), [(2, 12)], {"d": 4})
    {'d': 4, 'b': 2, 'h': 3}
    """
    sizes = dict(given)
    pending = [(d, n) for a, s in zip(notation.operands, shapes, strict=True) for d, n in zip(a.dims, s, strict=True)]
    while pending:
        left = [(dim, size) for dim, size in pending if not _bind_dim(dim, size, sizes)]
        if len(left) == len(pending):
            names = sorted({name for dim, _ in left for name in _names(dim) if name not in sizes})
            raise NotationError(
                f"the sizes of {', '.join(names)} do not follow from the shapes {[tuple(s) for s in shapes]}"
            )
        pending = left
    return sizes


def _bind_dim(dim: DimExpr, size: int, sizes: dict[str, int]) -> bool:
    """Learn what this dim tells; False when another dim must be read first."""
    match dim:
        case Factors(names):
            unknown = [name for name in names if name not in sizes]
            known = prod(sizes[name] for name in names if name in sizes)
            if len(unknown) > 1 or (unknown and known == 0):
                return False
            if unknown and size % known == 0:
                sizes[unknown[0]] = size // known
            elif known != size:
                raise NotationError(
                    f"a dim of size {size} is not {' x '.join(f'{n}={sizes.get(n)}' for n in names) or '1'}"
                )
        case Window():
            if dim.out not in sizes:
                if dim.kernel not in sizes:
                    return False
                sizes[dim.out] = dim.size_of_out(size, sizes[dim.kernel])
        case Spread():
            return dim.out in sizes and dim.kernel in sizes
    return True


def output_shapes(notation: Notation, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """The shape of every output once the sizes of the indices are known."""
    return tuple(tuple(dim_size(dim, sizes) for dim in output.dims) for output in notation.outputs)


def dim_size(dim: DimExpr, sizes: Mapping[str, int]) -> int:
    """The size of a dim made of whole indices."""
    if not isinstance(dim, Factors):
        raise NotationError("an output cannot be indexed through a window")
    missing = [name for name in dim.names if name not in sizes]
    if missing:
        raise NotationError(f"the size of {', '.join(missing)} is not given and follows from no operand")
    return prod(sizes[name] for name in dim.names)
