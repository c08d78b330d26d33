"""The concrete type of an application: sizes with their split trees, and whether each device has a value of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from conjoin.rules.operators import BY_NAME
from conjoin.rules.patterns import Parameter

Tree = int | tuple["Tree", "Tree"]
"""A size, or the two parts of a concatenation: TASO's split tree (section 2.3.1)."""
Dims = tuple[Tree, ...]
Params = Mapping[str, Parameter]


def size_of(tree: Tree) -> int:
    return tree if isinstance(tree, int) else size_of(tree[0]) + size_of(tree[1])


def leaves(tree: Tree) -> tuple[int, ...]:
    """The sizes of the parts of nested concatenations, in order."""
    return (tree,) if isinstance(tree, int) else (*leaves(tree[0]), *leaves(tree[1]))


@dataclass(frozen=True, slots=True)
class Type:
    """The concrete type of a value."""

    dims: tuple[Tree, ...]
    spread: int = 0
    """On how many devices it has values of their own; 0: the same everywhere."""
    role: str = ""
    """`kernel`: convolved with; `index`: whole numbers looked up in a table. Roles keep senseless graphs away."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size_of(dim) for dim in self.dims)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape with the devices in front."""
        return (self.spread, *self.shape) if self.spread else self.shape


Types = tuple[Type, ...]
"""The types of a value at each choice of sizes."""


def _merged(one: Tree, other: Tree) -> Tree | None:
    """What a dim is that is both: the parts that either knows of."""
    if size_of(one) != size_of(other):
        return None
    if isinstance(one, int):
        return other
    return one if isinstance(other, int) or leaves(one) == leaves(other) else None


def _all_merged(one: Sequence[Tree], other: Sequence[Tree]) -> tuple[Tree, ...] | None:
    if len(one) != len(other):
        return None
    found = tuple(_merged(a, b) for a, b in zip(one, other, strict=True))
    return None if None in found else found  # type: ignore[return-value]


def result_type(op: str, params: Params, types: Sequence[Type]) -> Type | None:
    """The type of an application, or None where operands do not fit together."""
    first = types[0]
    if any(other.spread != first.spread for other in types):
        return None
    roles = tuple(each.role for each in types)
    if not _allows(op, roles) or _SPREADS.get(op, bool(first.spread)) != bool(first.spread):
        return None
    dims = _DIMS[BY_NAME[op].kind](op, params, *(each.dims for each in types))
    if dims is None or 0 in dims:
        return None
    spread = first.spread
    if op in _SPREADS:
        spread = 0 if spread else int(params["devices"])
    return Type(dims, spread, "" if op in _MIXED else first.role)


_SPREADS = {"partition": False, "replicate": False, "combine": True, "reduce": True}
"""Whether the operand of a parallel operator differs between devices."""
_ON_INDICES = ("concat", "split", "partition", "combine", "replicate")
_MIXED: Mapping[str, tuple[str, ...]] = {
    "conv": ("", "kernel"), "embedding": ("", "index"), "embedding_bag": ("", "index"), "avg_pool": ("",),
    "max_pool": ("",),
}  # fmt: skip


def _allows(op: str, roles: tuple[str, ...]) -> bool:
    if op in _MIXED:
        return roles == _MIXED[op]
    if op in ("scale", "bias", "gain"):
        return roles[0] != "index"
    if op == "enlarge":
        return roles == ("kernel",)
    return len(set(roles)) == 1 and (roles[0] != "index" or op in _ON_INDICES)


def _same(op: str, params: Params, x: Dims, y: Dims | None = None) -> Dims | None:
    if "axis" not in params:
        return x if y is None else _all_merged(x, y)
    axis = int(params["axis"])
    if not -len(x) <= axis < len(x):
        return None
    axis %= len(x)
    found = _along(op, params, x[axis], None if y is None or len(y) != len(x) else y[axis])
    rest = x if y is None else _all_merged((*x[:axis], *x[axis + 1 :]), (*y[:axis], *y[axis + 1 :]))
    if found is None or rest is None:
        return None
    return (*rest[:axis], found, *(rest[axis + 1 :] if y is None else rest[axis:]))


def _along(op: str, params: Params, dim: Tree, other: Tree | None) -> Tree | None:
    """The dim that an operator with an axis makes."""
    if op == "concat":
        return None if other is None else (dim, other)
    if op == "split":
        return None if isinstance(dim, int) else dim[int(params["part"])]
    if op in ("partition", "combine"):
        devices = int(params["devices"])
        if op == "partition" and devices == 2 and isinstance(dim, tuple) and dim[0] == dim[1]:
            return dim[0]  # a part for each of two devices
        if not isinstance(dim, int) or (op == "partition" and dim % devices):
            return None
        return dim // devices if op == "partition" else dim * devices
    return dim


def _matrix(op: str, params: Params, x: Dims, y: Dims | None = None) -> Dims | None:
    if len(x) < 2:
        return None
    if y is None:
        return (*x[:-2], x[-1], x[-2])
    if len(x) != len(y) or _merged(x[-1], y[-2]) is None:
        return None
    batch = _all_merged(x[:-2], y[:-2])
    return None if batch is None else (*batch, x[-2], y[-1])


def _cube(op: str, params: Params, x: Dims) -> Dims | None:
    return None if len(x) < 3 else (*x[:-3], x[-2], x[-3], x[-1])


def _flat(op: str, params: Params, x: Dims) -> Dims | None:
    """Rows after rows: a concatenation of rows is one of what they are flattened to."""
    return None if len(x) < 2 else (*x[:-2], _times(x[-2], size_of(x[-1])))


def _times(tree: Tree, factor: int) -> Tree:
    return tree * factor if isinstance(tree, int) else (_times(tree[0], factor), _times(tree[1], factor))


def _unflat(op: str, params: Params, x: Dims) -> Dims | None:
    parts = int(params["parts"])
    if not x or not isinstance(x[-1], int) or x[-1] % parts:
        return None
    return (*x[:-1], parts, x[-1] // parts)


def _linear(op: str, params: Params, x: Dims, weight: Dims) -> Dims | None:
    fits = len(x) >= 1 and len(weight) == 2 and _merged(x[-1], weight[1]) is not None
    return (*x[:-1], weight[0]) if fits else None


def _bias(op: str, params: Params, x: Dims, vector: Dims) -> Dims | None:
    """Along rows: two vectors are added and multiplied as any two tensors are."""
    last = _merged(x[-1], vector[0]) if len(vector) == 1 and len(x) > 1 else None
    return None if last is None else (*x[:-1], last)


def _scale(op: str, params: Params, x: Dims, factor: Dims) -> Dims | None:
    return None if factor or not x else x


def _image(op: str, params: Params, x: Dims, weight: Dims | None = None) -> Dims | None:
    if len(x) != 4:
        return None
    if op == "enlarge":
        target, rows, columns = int(params["kernel"]), size_of(x[2]), size_of(x[3])
        return (*x[:2], target, target) if rows == columns < target else None
    if weight is None:
        kernel = int(params["kernel"])
        return (*x[:2], _windows(params, x[2], kernel), _windows(params, x[3], kernel))
    if len(weight) != 4 or not all(isinstance(dim, int) and dim % 2 for dim in weight[2:]):
        return None
    groups, rest = divmod(size_of(x[1]), size_of(weight[1]))
    if rest or size_of(weight[0]) % groups or (groups == 1 and _merged(x[1], weight[1]) is None):
        return None
    spatial = (_windows(params, x[2], size_of(weight[2])), _windows(params, x[3], size_of(weight[3])))
    return (x[0], weight[0], *spatial)


def _windows(params: Params, whole: Tree, kernel: int) -> int:
    """How many windows there are along a dim; 0 where there are less than two: one window knows no stride."""
    stride, size = int(params["stride"]), size_of(whole)
    found = -(-size // stride) if params["pad"] == "same" else (size - kernel) // stride + 1
    return found if found > 1 else 0


def _reduction(op: str, params: Params, x: Dims) -> Dims | None:
    axis = int(params["axis"])
    return None if not -len(x) <= axis < 0 or len(x) < 2 else (*x[: axis % len(x)], *x[axis % len(x) + 1 :])


def _embedding(op: str, params: Params, table: Dims, indices: Dims) -> Dims | None:
    return (*indices, table[1]) if len(table) == 2 and indices else None


def _bag(op: str, params: Params, table: Dims, indices: Dims) -> Dims | None:
    return (*indices[:-1], table[1]) if len(table) == 2 and indices else None


_DIMS: Mapping[str, Callable[..., Dims | None]] = {
    "same": _same, "matrix": _matrix, "linear": _linear, "bias": _bias, "scale": _scale, "image": _image,
    "cube": _cube, "flat": _flat, "unflat": _unflat, "reduce": _reduction, "embedding": _embedding, "bag": _bag,
}  # fmt: skip
