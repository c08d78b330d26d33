"""Calls at small sizes: dims that must fit together are scaled alike, all others to sizes of their own.

What fits together is read off the index notation of every call: dims with one index have one size, joined or cut dims
keep their ratios, a dim that is regrouped is scaled as what it is made of, and one that windows slide over is large
enough for a few of them; kernels stay as they are. Attributes that are sizes (of a view, a split, a constant) follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import cycle
from math import gcd, prod
from typing import Any

from conjoin.ir import Node, Value
from conjoin.ops import AGGREGATE, AGGREGATE_ONCE, EXPERT_LAYERS, Args, Factors, NotationError, Spread, Window, space_of

Key = tuple[Value | Node, int | str]
"""A dim of a value, or an index of a call."""
Shape = tuple[int, ...]
DimExpr = Factors | Window | Spread

_CUTS = ("split_with_sizes", "split.Tensor", "split.sizes", "chunk", "unsafe_split.Tensor", "unsafe_chunk")
_RANGES = ("narrow", "slice.Tensor")
_KEEPING_RATIOS = frozenset({"cat", *_CUTS, *_RANGES})
"""Along their dim sizes are sums of sizes."""
_VIEWS = ("reshape", "view", "_unsafe_view", "unflatten.int")
_NORMS = ("layer_norm", "native_layer_norm", "rms_norm")
"""That say the shape of the dims they go along."""
_FILLED = ("full", "ones", "zeros")
_FILLED_LIKE = ("new_full", "new_ones", "new_zeros")


class TooTight(Exception):
    """Sizes that cannot be scaled so."""


class Scaling:
    """By how much every size of some calls is scaled."""

    def __init__(self, nodes: Iterable[Node], alike: Iterable[tuple[Value, Value]]) -> None:
        """Of all calls, where values that are `alike` have one shape."""
        self._parent: dict[Key, Key] = {}
        self._sizes: dict[Key, set[int]] = {}
        self._products: list[tuple[Key, tuple[Key, ...]]] = []
        self._windows: list[tuple[Key, Key, Window, int]] = []
        """What windows slide over, how many there are, how they slide, and how large they are."""
        self._kept: set[Key] = set()
        self._scales: dict[Key, Fraction] = {}
        self._shapes: dict[Value, Shape] = {}
        self._indices: dict[Node, tuple[tuple[str, int], ...]] = {}
        for node in nodes:
            self._relate(node)
        for one, other in alike:
            for dim in range(len(one.type.shape)):
                self._join(self._dim(one, dim), self._dim(other, dim))

    def _find(self, key: Key) -> Key:
        while (above := self._parent.get(key, key)) != key:
            key = above
        return key

    def _add(self, key: Key, size: int) -> Key:
        root = self._find(key)
        self._sizes.setdefault(root, set()).add(size)
        return root

    def _dim(self, value: Value, dim: int) -> Key:
        return self._add((value, dim), value.type.shape[dim])

    def _join(self, one: Key, other: Key) -> None:
        a, b = self._find(one), self._find(other)
        if a != b:
            self._parent[a] = b
            self._sizes[b] |= self._sizes.pop(a)

    def _relate(self, node: Node) -> None:
        values = (*node.inputs, *node.outputs())
        keys = [[self._dim(value, dim) for dim in range(len(value.type.shape))] for value in values]
        try:
            space = None if node.spec is None else space_of(node.spec, node.call)
        except NotationError:
            space = None
        self._indices[node] = ()
        if space is None:
            self._kept.update(key for row in keys for key in row)
            return
        self._indices[node] = tuple(space.sizes.items())
        indices = {name: self._add((node, name), size) for name, size in space.sizes.items()}
        accesses = (*space.notation.operands, *space.notation.outputs)
        for row, access in zip(keys, accesses, strict=True):
            for key, dim in zip(row, access.dims, strict=True):
                self._say(key, dim, indices)
        if node.op in EXPERT_LAYERS:  # whose number is an attribute
            self._kept.add(keys[1][0])
        if node.call["groups"] not in (None, 1):  # of channels: their number is an attribute
            grouped = [product for product in self._products if product[0] in (key for row in keys for key in row)]
            self._kept.update(key for whole, parts in grouped for key in (whole, *parts))
        whole = [indices[name] for name in indices if name in space.notation.whole]
        if node.op in _KEEPING_RATIOS:
            for other in whole[1:]:
                self._join(whole[0], other)
        elif node.op in ("constant_pad_nd", "pad"):
            self._kept.update(whole)

    def _say(self, key: Key, dim: DimExpr, indices: Mapping[str, Key]) -> None:
        """What a dim is made of."""
        if isinstance(dim, Window):
            (kernel,) = self._sizes[self._find(indices[dim.kernel])]
            self._windows.append((key, indices[dim.out], dim, kernel))
            self._kept.add(indices[dim.kernel])
        elif isinstance(dim, Spread):
            self._kept.update((key, indices[dim.out], indices[dim.kernel]))
        elif len(dim.names) == 1:
            self._join(key, indices[dim.names[0]])
        elif dim.names:
            self._products.append((key, tuple(indices[name] for name in dim.names)))

    def settle(self, sizes: Sequence[int]) -> None:
        """Scale what is free to these sizes, one after another; what does not fit stays as it is, as all does to none.
        """
        if not sizes:
            self._scales = dict.fromkeys(self._sizes, Fraction(1))
            return
        kept = {self._find(key) for key in self._kept} | {key for key, found in self._sizes.items() if min(found) <= 1}
        tight = {self._find(key) for whole, parts in self._products for key in (whole, *parts)}
        tight |= {self._find(key) for whole, count, *_ in self._windows for key in (whole, count)}
        for some in (kept, kept | tight, set(self._sizes)):
            try:
                self._scales = self._scaled(some, cycle(sizes))
                return
            except TooTight:
                continue

    def _scaled(self, kept: set[Key], sizes: Iterator[int]) -> dict[Key, Fraction]:
        products = [(self._find(whole), [self._find(part) for part in parts]) for whole, parts in self._products]
        windows = [(self._find(whole), self._find(count), how, size) for whole, count, how, size in self._windows]
        made = {whole for whole, _ in products} | {count for whole, count, _, _ in windows if whole != count}
        reach: dict[Key, int] = {}
        for whole, _, how, kernel in windows:
            reach[whole] = max(reach.get(whole, 0), how.stride * how.dilation * kernel)
        found = dict.fromkeys(kept, Fraction(1))
        for key, own in self._sizes.items():
            if key not in kept and key not in made:
                found[key] = Fraction(next(sizes) + reach.get(key, 0), gcd(*own))
        for _ in range(len(products) + len(windows)):
            for key, scale in (*self._of_products(products, found), *self._of_windows(windows, found)):
                if found.setdefault(key, scale) != scale:
                    raise TooTight
        if any(key not in found or gcd(*own) * found[key] % 1 for key, own in self._sizes.items()):
            raise TooTight
        return found

    def _of_products(self, products: Iterable[Any], found: Mapping[Key, Fraction]) -> Iterator[tuple[Key, Fraction]]:
        for whole, parts in products:
            if all(part in found for part in parts):
                yield whole, prod((found[part] for part in parts), start=Fraction(1))

    def _of_windows(self, windows: Iterable[Any], found: Mapping[Key, Fraction]) -> Iterator[tuple[Key, Fraction]]:
        for whole, count, how, kernel in windows:
            before, after = self._sizes[whole], self._sizes[count]
            if whole in found:
                if len(before) > 1 or len(after) > 1:
                    raise TooTight
                yield count, Fraction(how.size_of_out(int(max(before) * found[whole]), kernel), max(after))

    def size(self, value: Value, dim: int, old: int) -> int:
        """What a length along a dim of a value becomes."""
        scaled = old * self._scales[self._find((value, dim))]
        if scaled.denominator != 1:
            raise TooTight
        return int(scaled)

    def shape(self, value: Value) -> Shape:
        """The shape that a value has now."""
        if value not in self._shapes:
            self._shapes[value] = tuple(self.size(value, dim, size) for dim, size in enumerate(value.type.shape))
        return self._shapes[value]

    def work(self, node: Node) -> int:
        """How many numbers a call multiplies or moves, about."""
        whole = prod(int(size * self._scales[self._find((node, name))]) for name, size in self._indices[node])
        return max(whole, *(prod(self.shape(value)) for value in (*node.inputs, *node.outputs())))

    def call(self, node: Node) -> tuple[str, Args]:
        """The operator and the arguments of a call at these sizes."""
        made, args, op = self.shape(Value(node)), node.args, node.op
        if op in _VIEWS:
            return "reshape", (args[0], made)
        if op in _CUTS:
            dim = node.call.dim()
            return "split_with_sizes", (args[0], tuple(self.shape(value)[dim] for value in node.outputs()), dim)
        if op in _RANGES:
            return "narrow", self._range(node)
        if op == "expand":
            return op, (args[0], made, *args[2:])
        if op in _FILLED:
            return op, (made, *args[1:])
        if op in _FILLED_LIKE:
            return op, (args[0], made, *args[2:])
        if op in _NORMS:
            return op, (args[0], made[-len(args[1]) :], *args[2:])
        if op in (AGGREGATE, AGGREGATE_ONCE):
            return op, (*args[:4], made[0], *args[5:])
        if op.startswith("eye"):
            return op, (*made[: 1 + (op == "eye.m")], *args[1 + (op == "eye.m") :])
        return op, args

    def _range(self, node: Node) -> Args:
        x, dim = node.inputs[0], node.call.dim()
        size, start = x.type.shape[dim], node.call["start"] or 0
        if node.call["step"] not in (None, 1):
            raise TooTight
        start = min(max(0, start + size) if start < 0 else start, size)
        return x, dim, self.size(x, dim, start), self.shape(Value(node))[dim]
