"""Sizes of dims that follow from each other: unknown, a sum after concatenation, a product where a dim is divided.

`Dims.unify` makes two dims the same. What one of them is made of the other is then made of too: adding two tensors of
which one is a concatenation tells where the other could be split (TASO's split trees, section 2.3.1).

Operators only ask that two sizes are the same, or that one is a multiple of another. A proof asks for more where dims
are made of parts: that the parts are the same one by one. What it asks for beyond the operators is `assumed`, in the
language of `conditions.py`, whichever side of a rule asks for it; with `needed` that is all that is known of the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from conjoin.rules.definitions.affine import Affine, number, symbol
from conjoin.rules.definitions.sums import Atom


class IllFormed(Exception):
    """A rule whose shapes cannot fit, whatever the sizes."""


class NotCovered(Exception):
    """A rule outside of what can be proven from definitions; it may be true."""


@dataclass(eq=False, slots=True)
class Dim:
    """A dim, or one of the digits its positions are made of; compare by identity after `find`."""

    name: str
    """Nobody else's."""
    words: str
    """Its size in conditions."""
    parent: Dim | None = None
    sum: tuple[Dim, Dim] | None = None
    """Two parts, one after the other."""
    product: tuple[Dim, Dim] | None = None
    """Two digits, the first varying slowest."""
    half: Dim | None = None
    """An odd size: twice this and one; this may be 0."""
    window: tuple[Dim, Dim | None, Affine, Affine] | None = None
    """As many as windows of a kernel, a stride and a padding fit into a dim; without kernel: padded alike (`same`)."""
    known: int | None = None
    is_made_up: bool = False
    """Of a constant, which is as large as it has to be."""

    def find(self) -> Dim:
        dim = self
        while dim.parent is not None:
            dim = dim.parent
        return dim

    @property
    def is_plain(self) -> bool:
        """Whether nothing is known of it."""
        return not (self.sum or self.product or self.half or self.window or self.known is not None)


@dataclass(slots=True)
class Dims:
    """All dims of a rule."""

    every: list[Dim] = field(default_factory=list)
    equations: list[tuple[Dim, Dim]] = field(default_factory=list)
    """Sizes that are the same although their parts are not."""
    meshes: set[Dim] = field(default_factory=set)
    """The dims that count devices."""
    cut: set[Dim] = field(default_factory=set)
    """The dims that are split and were not concatenated: into parts of any sizes."""
    parted: list[Dim] = field(default_factory=list)
    """All dims that are split."""
    joined_twice: list[Dim] = field(default_factory=list)
    """The dims that are concatenations in two ways, so that nothing says where they are split."""
    not_larger: list[tuple[Dim, Dim]] = field(default_factory=list)
    """The first is at most the second."""
    needed: list[str] = field(default_factory=list)
    """What sizes must satisfy so that the operators fit together, in words."""
    assumed: list[str] = field(default_factory=list)
    """What they need not satisfy for that, and is assumed nevertheless."""

    def new(self, words: str, **structure: object) -> Dim:
        dim = Dim(f"{words}#{len(self.every)}", words)
        for name, value in structure.items():
            setattr(dim, name, value)
        self.every.append(dim)
        return dim

    def split(self, dim: Dim) -> tuple[Dim, Dim]:
        """The two parts of a dim that was concatenated; of any other dim, parts of any sizes."""
        dim = dim.find()
        self.parted.append(dim)
        self._check_parts(dim)
        if dim.is_plain:
            dim.sum = (self.new(f"first part of {whole(dim)}"), self.new(f"second part of {whole(dim)}"))
            self.needed.append(f"{dim.words} is split")
            self.cut.add(dim)
        if dim.sum is None and dim.product is not None:
            self._split_slow(dim, *dim.product)
        if dim.sum is None:
            raise NotCovered("a dim that is no concatenation is split")
        return dim.sum

    def _split_slow(self, dim: Dim, slow: Dim, fast: Dim) -> None:
        """A divided dim split between its pieces."""
        if slow.find() in self.meshes:
            raise NotCovered("a dim that lies on several devices is split")
        if slow.find() in self.cut:  # no condition would say that both are split after as many pieces
            raise NotCovered("two dims that are divided alike are split")
        first, second = (self.times(part, fast) for part in self.split(slow))
        dim.sum = (first, second)
        self.assumed.append(f"first part of {whole(dim)} = {first.words}")

    def _check_parts(self, dim: Dim) -> None:
        """Refuse what is split although two concatenations say where."""
        if any(one.find() is dim for one in self.joined_twice) and any(one.find() is dim for one in self.parted):
            raise NotCovered("a dim is split that two concatenations are made of in different ways")

    def times(self, slow: Dim, fast: Dim) -> Dim:
        """A dim of two digits."""
        return self.new(f"{factor(slow)} * {factor(fast)}", product=(slow, fast))

    def assume_equal(self, one: Dim, other: Dim) -> None:
        """Make two dims the same, which no operator asks for."""
        if one.find() is not other.find():
            if one.find().words != other.find().words:
                self.assumed.append(f"{one.find().words} = {other.find().words}")
            self.unify(one, other, is_said=True)

    def divide(self, dim: Dim, parts: Dim) -> Dim:
        """The rest of a dim whose slow digit counts these parts."""
        dim, parts = dim.find(), parts.find()
        if dim.product and parts in self.meshes and dim.product[0].find() is not parts:
            return self._divide_more(dim.product[0].find(), dim.product[1], parts)
        if dim.is_plain:
            dim.product = (parts, self.new(f"{factor(dim)} / {whole(parts)}"))
            self.needed.append(f"{dim.words} is a multiple of {parts.words}")
        if dim.product is None and parts not in self.meshes:
            self._join_slow(dim)
        if dim.product is None:
            raise NotCovered("a dim is both divided and concatenated")
        if parts not in self.meshes and parts.known is None and dim.product[0].find() in self.meshes:
            return self._divide_pieces(dim.product[0], dim.product[1].find(), parts)
        self.assume_equal(dim.product[0], parts)  # other parts would fit as well
        return dim.product[1]

    def _join_slow(self, dim: Dim) -> None:
        """A concatenation of divided dims whose pieces are of one width is divided into all of these."""
        products = [part.find().product for part in dim.sum or ()]
        first, second = products if len(products) == 2 else (None, None)
        if first and second:
            self.assume_equal(first[1], second[1])
            dim.product = (self.join(first[0], second[0]), first[1])

    def join(self, first: Dim, second: Dim) -> Dim:
        """One dim after another."""
        parts = (first.find(), second.find())
        cut = (dim for dim in self.cut if dim.sum and tuple(part.find() for part in dim.sum) == parts)
        words = next((dim.words for dim in cut), f"{parts[0].words} + {parts[1].words}")
        return self.new(words, sum=(first, second))

    def join_divided(self, first: Dim, second: Dim) -> tuple[Dim, Dim]:
        """One dim after another, and the first of its digits in the first: of divided ones one row after another."""
        one, other = first.find().product, second.find().product
        if not (one and other):
            return self.join(first, second), first
        self.assume_equal(one[1], other[1])
        return self.times(self.join(one[0], other[0]), one[1]), one[0]

    def _divide_pieces(self, devices: Dim, piece: Dim, parts: Dim) -> Dim:
        """Divide a dim that lies on several devices: each of them has as many of the parts."""
        self.assumed.append(f"{parts.words} is a multiple of {devices.find().words}")
        if piece.is_plain:
            own = self.new(f"{factor(parts)} / {whole(devices)}")
            piece.product = (own, self.new(f"{factor(piece)} / {whole(own)}"))
            self.unify(parts, self.times(devices, own), is_said=True)
        elif piece.product:
            self.assume_equal(parts, self.times(devices, piece.product[0]))
        else:
            raise NotCovered("a dim is both divided and concatenated")
        return piece.product[1]

    def _divide_more(self, slow: Dim, fast: Dim, parts: Dim) -> Dim:
        """Divide the slow digit of a divided dim over devices: groups of channels, so many on each device."""
        if slow in self.meshes:
            raise NotCovered("a dim is divided over two mesh axes")
        self.assumed.append(f"{slow.words} is a multiple of {parts.words}")
        return self.times(self.divide(slow, parts), fast)

    def odd(self, dim: Dim) -> Dim:
        """The half of a dim of odd size."""
        dim = dim.find()
        if dim.known is not None:
            return self._half_of(dim.known)
        if dim.is_plain:
            dim.half = self.new(f"half of {whole(dim)}")
            self.assumed.append(f"{dim.words} is odd")
        if dim.half is None:
            raise NotCovered("a kernel is made of parts")
        return dim.half

    def _half_of(self, size: int) -> Dim:
        if size % 2 == 0:
            raise NotCovered(f"a kernel of even size {size} with equal padding on both sides")
        return self.new("half", known=size // 2)

    def unify(self, one: Dim, other: Dim, is_said: bool = False) -> None:
        """Make two dims the same, as an operator asks for; or as somebody else has said already."""
        one, other = one.find(), other.find()
        if one is other:
            return
        if (other.is_plain and (other.is_made_up or not one.is_plain)) or (one.known is not None and other.half):
            one, other = other, one
        self._check_apart(one, other)
        if not one.is_plain and self._unify_parts(one, other):
            one.parent = other
            self._check_parts(other)
            return
        if not (is_said or one.is_made_up or one.words == other.words):
            self.needed.append(f"{one.words} = {other.words}")
        if one.is_plain:
            self._check_apart(other, one)
            one.parent = other
        elif one.half and (other.half or other.known is not None):
            self.unify(self.odd(one), self.odd(other), is_said=True)
            one.parent = other
        else:
            self.equations.append((one, other))
            self._note_joined_twice(one, other)

    def _unify_parts(self, one: Dim, other: Dim) -> bool:
        """Make what two dims are made of the same, one by one, so that they are the same; whether that can be."""
        if one.product or other.product:
            self._unify_divided(one, other)
        elif one.sum and other.sum and len(_parts(one)) == len(_parts(other)):
            self._unify_sums(one, other)
        elif one.window and other.window and one.window[2:] == other.window[2:]:
            self._unify_windows(one, other)
        elif one.known is not None and other.known is not None:
            if one.known != other.known:
                raise IllFormed(f"a size is both {one.known} and {other.known}")
        else:
            return False
        return True

    def _unify_sums(self, one: Dim, other: Dim) -> None:
        """Part by part, those in nested concatenations too."""
        if _nesting(one) != _nesting(other):
            self._note_joined_twice(one, other)
        for a, b in zip(_parts(one), _parts(other), strict=True):
            self.assume_equal(a, b)

    def _note_joined_twice(self, *dims: Dim) -> None:
        self.joined_twice += dims
        for dim in dims:
            self._check_parts(dim)

    def _unify_divided(self, one: Dim, other: Dim) -> None:
        for dim in (one, other):
            if dim.product is None:
                self._join_slow(dim)
        if not (one.product and other.product):
            raise NotCovered("a dim is both divided and concatenated")
        self._unify_digits(list(self.digits(one)), list(self.digits(other)))

    def _unify_digits(self, left: list[Dim], right: list[Dim]) -> None:
        """Digit by digit, those in front that are the same first; a digit too few is made of those too many."""
        while left and right and left[0].find() is right[0].find():
            del left[0], right[0]
        while len(left) > 1 and len(right) > 1:
            self.assume_equal(left.pop(), right.pop())
        if left and right:  # follows where the others are the same
            self.unify(self._joined(left), self._joined(right))
        elif left or right:
            raise NotCovered("a dim is divided in two ways")

    def _joined(self, digits: list[Dim]) -> Dim:
        joined = digits[-1]
        for digit in reversed(digits[:-1]):
            joined = self.times(digit, joined)
        return joined

    def _unify_windows(self, one: Dim, other: Dim) -> None:
        """As many windows: other dims than the same, and other kernels, would have as many too."""
        assert one.window is not None and other.window is not None
        if (one.window[1] is None) != (other.window[1] is None):
            raise NotCovered("windows padded in different ways")
        self.assume_equal(one.window[0], other.window[0])
        if one.window[1] is not None and other.window[1] is not None:
            self.assume_equal(one.window[1], other.window[1])

    def _check_apart(self, part: Dim, whole: Dim) -> None:
        """A dim is no part of itself."""
        for child in (*(whole.sum or ()), *(whole.product or ())):
            if child.find() is part.find():
                raise IllFormed("a dim would be a part of itself")
            self._check_apart(part, child.find())

    def close(self) -> None:
        """Windows over the same dims are the same."""
        changed = True
        while changed:
            changed, seen = False, dict[object, Dim]()
            for dim in self.every:
                found = dim.find()
                if found.window is None:
                    continue
                whole, kernel, stride, padding = found.window
                key = (id(whole.find()), kernel and id(kernel.find()), stride, padding)
                known = seen.setdefault(key, found)
                if known is not found:
                    found.parent, changed = known, True

    def size(self, dim: Dim) -> Affine:
        """The size of a digit."""
        dim = dim.find()
        if dim.known is not None:
            return number(dim.known)
        if dim.sum:
            return self.size(dim.sum[0]) + self.size(dim.sum[1])
        if dim.half:
            return 2 * self.size(dim.half) + 1
        if dim.product:
            return self.size(dim.product[0]) * self.size(dim.product[1])
        return symbol(dim.name)

    def digits(self, dim: Dim) -> tuple[Dim, ...]:
        """What positions in a dim are made of, slowest first."""
        dim = dim.find()
        if dim.product:
            return (*self.digits(dim.product[0]), *self.digits(dim.product[1]))
        return (dim,)

    def facts(self) -> list[Atom]:
        """What holds of all sizes."""
        halves = {dim.find().half.find() for dim in self.every if dim.find().half is not None}  # type: ignore[union-attr]
        found = [Atom(self.size(one) - self.size(other), exact=True) for one, other in self.equations]
        found += [Atom(self.size(large) - self.size(small)) for small, large in self.not_larger]
        for dim in self.every:
            if dim.parent is None and (dim.is_plain or dim.window):
                found.append(Atom(self.size(dim) - (0 if dim in halves else 1)))
        return found


def _parts(dim: Dim) -> Sequence[Dim]:
    """The parts of nested sums, in order."""
    dim = dim.find()
    return (*_parts(dim.sum[0]), *_parts(dim.sum[1])) if dim.sum else (dim,)


def _nesting(dim: Dim) -> object:
    """How the parts of nested sums are put together."""
    dim = dim.find()
    return (_nesting(dim.sum[0]), _nesting(dim.sum[1])) if dim.sum else ()


def whole(dim: Dim) -> str:
    """A size that something is said of: in brackets where it is made of several."""
    words = dim.find().words
    return f"({words})" if any(f" {sign} " in words for sign in "+*/") else words


def factor(dim: Dim) -> str:
    """A size that is multiplied or divided by."""
    words = dim.find().words
    return f"({words})" if any(f" {sign} " in words for sign in "+/") else words
