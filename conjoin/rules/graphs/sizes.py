"""The sizes that a rule's tensors have in a graph, checked and completed.

The proof of a rule says how its sizes hang together: which are equal, which are sums after a concatenation or products
where a dim is divided (`dims.py`). A match fits when the shapes of its tensors can be these sizes; the shapes on the
right side, and with them where to split and how large constants are, then follow. Parallelization operators count as
if there was one device along each axis, since graphs state whole shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

from conjoin.rules.definitions.dims import Dim, IllFormed, NotCovered
from conjoin.rules.definitions.proof import Frame, prove
from conjoin.rules.definitions.ranks import Ranks
from conjoin.rules.graphs.terms import Shape
from conjoin.rules.operators import BY_NAME
from conjoin.rules.parameters import with_groups
from conjoin.rules.patterns import Apply, Expr, Rule, walk


class Misfit(Exception):
    """Shapes that a rule is not about; says which."""


def observed_on(expr: Apply) -> Expr:
    """The expression whose dim the parameter `axis` names."""
    return expr.args[0] if BY_NAME[expr.op].kind == "reduce" else expr


def position_of(axis: int, rank: int) -> int:
    """The dim that a number means in a tensor of so many dims."""
    if not -rank <= axis < rank:
        raise Misfit(f"dim {axis} is asked for in a tensor of {rank} dims")
    return axis % rank


@dataclass(frozen=True, slots=True)
class Sizes:
    """What follows for the right side of a rule."""

    shapes: Mapping[Expr, Shape]
    """Of its expressions, as far as they are not left open."""
    dims: Mapping[Expr, int]
    """The dim that `axis` means, for the applications that have one."""
    named: Mapping[str, int]
    """Sizes of kernels and numbers of groups by name."""


@dataclass(frozen=True, slots=True)
class _NamedDims:
    """Where dims with a name lie among the dims that no operator tells apart."""

    slots: Mapping[str, int]
    """How many of those dims come before each, by name, in the order in which they lie."""

    def layout(self, names: Sequence[str], num_others: int) -> list[str]:
        """The names of all dims but the last ones, in order; `…` for those without.

        Misfit where a dim with a name would have to be one of the last ones: the proof is about another dim.
        """
        row: list[str] = []
        for name, slot in self.slots.items():
            if name in names:
                if slot > num_others:
                    raise Misfit(f"its dim {name!r} is one that the rule counts from the end, and may be any but those")
                row += ["…"] * (slot - row.count("…")) + [name]
        return row + ["…"] * (num_others - row.count("…"))


class Sizing:
    """How the sizes of a rule hang together."""

    def __init__(self, frame: Frame) -> None:
        """From the frame of a proof, in which all tensors are defined."""
        self.rule, self._frame = frame.rule, frame
        self.right = tuple(walk(*frame.rule.right))
        self._classes = tuple(dict.fromkeys(dim.find() for dim in self._frame.dims.every))

    @property
    def ranks(self) -> Ranks:
        return self._frame.ranks

    def solve(
        self, shapes: Mapping[Expr, Shape], params: Mapping[str, Any], axes: Mapping[tuple[Expr, str], int]
    ) -> Sizes:
        """What follows of all sizes; Misfit where they cannot be.

        `shapes` are those of the left side, `params` the values of named parameters, and `axes` where dims with a
        name were seen: (expression, name) and the position.
        """
        return _Solution(self, params, self._places(axes)).run(shapes)

    def _places(self, axes: Mapping[tuple[Expr, str], int]) -> _NamedDims:
        names = sorted({name for _, name in axes})
        for order in permutations(names):
            slots: dict[str, int] = {}
            if all(self._put(expr, name, place, order, slots) for (expr, name), place in axes.items()):
                ordered = [0, *(slots[name] for name in order)]
                if ordered == sorted(ordered):
                    return _NamedDims({name: slots[name] for name in order})
        raise Misfit("its dims lie elsewhere in one tensor than in another")

    def _put(self, expr: Expr, name: str, place: int, order: Sequence[str], slots: dict[str, int]) -> bool:
        here = self.ranks[expr].names
        before = sum(other in here for other in order[: order.index(name)])
        return slots.setdefault(name, place - before) == place - before

    def dims_of(self, expr: Expr) -> tuple[Dim, ...]:
        return self._frame.tensors[expr].dims

    def relations(self) -> tuple[Dim, ...]:
        """One dim of every size there is."""
        return self._classes

    @property
    def named(self) -> Mapping[str, Dim]:
        return self._frame.named

    @property
    def bounds(self) -> Sequence[tuple[Dim, Dim]]:
        """Pairs of which the first is at most the second."""
        return self._frame.dims.not_larger

    @property
    def equations(self) -> Sequence[tuple[Dim, Dim]]:
        return self._frame.dims.equations


class _Solution:
    """Sizes as far as they are known."""

    def __init__(self, sizing: Sizing, params: Mapping[str, Any], places: _NamedDims) -> None:
        self.sizing, self.params, self.places = sizing, params, places
        self.sizes: dict[Dim, Shape] = {}
        self.changed = False
        for name, dim in sizing.named.items():
            _, _, word = name.partition(" ")
            if not word:  # devices along a mesh axis
                self._set(dim, (1,), name)
            elif (value := params.get(word)) is not None:
                self._set(dim, (value,), name)

    def run(self, shapes: Mapping[Expr, Shape]) -> Sizes:
        for expr, shape in shapes.items():
            self._measure(expr, shape)
        self.changed = True
        while self.changed:
            self.changed = False
            for dim in self.sizing.relations():
                self._relate(dim)
            for one, other in self.sizing.equations:
                self._both(one.find(), other.find())
        for small, large in self.sizing.bounds:
            low, high = self._get(small), self._get(large)
            if low is not None and high is not None and low > high:
                raise Misfit(f"a kernel of size {2 * low + 1} does not fit into one of size {2 * high + 1}")
        right = ((expr, self._shape(expr)) for expr in self.sizing.right)
        found = {expr: shape for expr, shape in right if shape is not None}
        named = {
            name.split()[1]: size
            for name, dim in self.sizing.named.items()
            if " " in name and (size := self._get(dim)) is not None
        }
        return Sizes(found, dict(self._dims(found)), named)

    def _dims(self, shapes: Mapping[Expr, Shape]) -> Iterator[tuple[Expr, int]]:
        for expr in self.sizing.right:
            if not isinstance(expr, Apply) or (axis := expr.param("axis")) == "":
                continue
            on = observed_on(expr)
            if on in shapes and str(axis) in self.sizing.ranks[on].names:
                yield expr, self._row(on, len(shapes[on])).index(str(axis))
            elif on in shapes and isinstance(axis, int):
                yield expr, position_of(axis, len(shapes[on]))

    def _measure(self, expr: Expr, shape: Shape) -> None:
        rank = self.sizing.ranks[expr]
        if rank.exact is not None and len(shape) != rank.exact:
            raise Misfit(f"{expr} has {len(shape)} dims and the rule is for {rank.exact}")
        if len(shape) < len(rank.labels) - (rank.exact is None):
            raise Misfit(f"{expr} has {len(shape)} dims and the rule needs {len(rank.labels) - 1}")
        if unknown := sorted(rank.names - self.places.slots.keys()):
            raise Misfit(f"which dim {unknown[0]!r} is stands on the right side only: say it")
        row = self._row(expr, len(shape))
        for label, dim in zip(rank.labels, self.sizing.dims_of(expr), strict=True):
            self._set(dim, tuple(n for n, at in zip(shape, row, strict=True) if at == label), str(expr))

    def _row(self, expr: Expr, length: int) -> list[str]:
        """The label of every dim of a tensor."""
        rank = self.sizing.ranks[expr]
        if rank.exact is not None:
            return list(rank.labels)
        tail = [str(i - rank.least) for i in range(rank.least)]
        names = [name for name in self.places.slots if name in rank.names]
        return self.places.layout(names, length - len(tail) - len(names)) + tail

    def _shape(self, expr: Expr) -> Shape | None:
        dims, rank = self.sizing.dims_of(expr), self.sizing.ranks[expr]
        sizes = [self.sizes.get(dim.find()) for dim in dims]
        if any(size is None for size in sizes) or not rank.names <= self.places.slots.keys():
            return None
        known = {label: list(size or ()) for label, size in zip(rank.labels, sizes, strict=True)}
        return tuple(known[label].pop(0) for label in self._row(expr, sum(map(len, known.values()))))

    def _set(self, dim: Dim, size: Shape, where: str) -> None:
        known = self.sizes.setdefault(dim.find(), size)
        if known != size:
            raise Misfit(f"{where} has size {_words(size)} where {_words(known)} is needed")
        self.changed = True

    def _get(self, dim: Dim) -> int | None:
        size = self.sizes.get(dim.find())
        return size[0] if size is not None and len(size) == 1 else None

    def _learn(self, dim: Dim, size: int) -> None:
        if self._get(dim) != size:
            self._set(dim, (size,), dim.find().words)

    def _both(self, one: Dim, other: Dim) -> None:
        for a, b in ((one, other), (other, one)):
            if (size := self.sizes.get(a.find())) is not None and self.sizes.get(b.find()) != size:
                self._set(b, size, b.find().words)

    def _relate(self, dim: Dim) -> None:
        """What one size says of the sizes it is made of, and they of it."""
        if dim.known is not None:
            self._learn(dim, dim.known)
        if dim.half is not None:
            self._relate_half(dim, dim.half)
        if dim.sum is not None:
            self._relate_sum(dim, *dim.sum)
        if dim.product is not None:
            self._relate_product(dim, *dim.product)
        if dim.window is not None and (size := self._windows(dim)) is not None:
            self._learn(dim, size)

    def _relate_half(self, whole: Dim, half: Dim) -> None:
        size, small = self._get(whole), self._get(half)
        if size is not None and size % 2 == 0:
            raise Misfit(f"a kernel has even size {size} and the rule is for odd ones")
        if size is not None:
            self._learn(half, size // 2)
        elif small is not None:
            self._learn(whole, 2 * small + 1)

    def _relate_sum(self, whole: Dim, first: Dim, second: Dim) -> None:
        size, one, other = self._get(whole), self._get(first), self._get(second)
        if one is not None and other is not None:
            self._learn(whole, one + other)
        for known, rest in ((one, second), (other, first)):
            if size is not None and known is not None:
                if known >= size:
                    raise Misfit(f"a part of size {known} leaves nothing of {size}")
                self._learn(rest, size - known)

    def _relate_product(self, whole: Dim, slow: Dim, fast: Dim) -> None:
        size, one, other = self._get(whole), self._get(slow), self._get(fast)
        if one is not None and other is not None:
            self._learn(whole, one * other)
        for known, rest in ((one, fast), (other, slow)):
            if size is not None and known is not None:
                if known == 0 or size % known:
                    raise Misfit(f"size {size} is not divided by {known}")
                self._learn(rest, size // known)

    def _windows(self, dim: Dim) -> int | None:
        """How many windows fit into a dim."""
        assert dim.window is not None
        whole, kernel, stride, padding = dim.window
        size, reach = self._get(whole), 1 if kernel is None else self._get(kernel)
        numbers = {name: self.params.get(name) for name in (*stride.symbols, *padding.symbols)}
        if size is None or reach is None or any(type(value) is not int for value in numbers.values()):
            return None
        known = {name: int(value) for name, value in numbers.items() if value is not None}
        return (size + 2 * padding.value(known) - reach) // stride.value(known) + 1


def _words(size: Shape) -> str:
    return "×".join(map(str, size)) or "no dims"


@lru_cache(maxsize=4096)
def sizing_of(rule: Rule) -> Sizing | str:
    """How the sizes of a rule hang together; or why that is not known.

    A rule that does not say how many groups its convolutions have is about all of them only if it was proven so. Most
    rules are proven with the sizes of their left side settled first, and there the proof need not be made again.
    """
    single = with_groups(rule, 1)
    form = single if single != rule and _needs_one_group(rule) else rule
    try:
        frame = Frame(form)
        frame.build()
    except (IllFormed, NotCovered) as error:
        proven = prove(form).frame
        return str(error) if proven is None else Sizing(proven)
    return Sizing(frame)


def _needs_one_group(rule: Rule) -> bool:
    verdict = prove(rule)
    return not verdict.proven or "groups = 1" in verdict.conditions


def named_axes(sizing: Sizing, roots: Sequence[Expr]) -> Iterator[tuple[Expr, str]]:
    """The expressions of which a dim is meant by name, a word or a number where the rank is open, and the name."""
    for expr in walk(*roots):
        if isinstance(expr, Apply) and (axis := expr.param("axis")) != "":
            on = observed_on(expr)
            if str(axis) in sizing.ranks[on].names:
                yield on, str(axis)
