"""What the generator builds graphs from: typed inputs, constants, and operators with chosen parameters.

Sizes have names, so that a candidate found at some sizes is tried again at others. A parameter may be such a name too:
`conv[stride=s]` is found with one stride and tried again with another, and the rule is one about every stride.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from conjoin.rules.generator.shapes import Tree, Type
from conjoin.rules.operators import BY_NAME
from conjoin.rules.patterns import Apply, Parameter

Sizes = Mapping[str, int]
_ARITHMETIC = 3
"""To be raised when `arithmetic.py` or `shapes.py` gives anything else: states saved before are then not continued."""


@dataclass(frozen=True, slots=True)
class Typed:
    """An input: its dims as names of sizes, `m k`, or `m k+k` where it was made by a concatenation."""

    name: str
    dims: str
    spread: bool = False
    role: str = ""

    def type(self, sizes: Sizes) -> Type:
        return Type(tuple(_size(word, sizes) for word in self.dims.split()), self._devices(sizes), self.role)

    def _devices(self, sizes: Sizes) -> int:
        return sizes["devices"] if self.spread else 0

    def is_like(self, other: Typed) -> bool:
        """Whether one may take the other's place everywhere."""
        return (self.dims, self.spread, self.role) == (other.dims, other.spread, other.role)


@dataclass(frozen=True, slots=True)
class Constant:
    """An operator without operands, of a given shape."""

    expr: Apply
    dims: str
    uses: tuple[str, ...]
    """Operators that may take it: a sum with an identity matrix is of no use."""
    role: str = ""

    def type(self, sizes: Sizes) -> Type:
        return Type(tuple(_size(word, sizes) for word in self.dims.split()), role=self.role)


def _size(word: str, sizes: Sizes) -> Tree:
    if "+" in word:
        first, rest = word.split("+", 1)
        return _size(first, sizes), _size(rest, sizes)
    return int(word) if word.isdecimal() else sizes[word]


@dataclass(frozen=True, slots=True)
class Choice:
    """An operator with its parameters."""

    op: str
    params: tuple[tuple[str, Parameter], ...] = ()
    on_inputs: bool = False
    """Applied to inputs only, as TASO restricts `enlarge`."""

    @property
    def num_args(self) -> int:
        return BY_NAME[self.op].num_args

    def numbers(self, sizes: Sizes) -> Mapping[str, Parameter]:
        """All parameters with named sizes replaced by numbers and defaults filled in."""
        found = {**dict(BY_NAME[self.op].params), "devices": sizes.get("devices", 0)}
        found.update({name: sizes.get(v, v) if isinstance(v, str) else v for name, v in self.params})
        return found


def choose(op: str, **params: Parameter) -> Choice:
    return Choice(op, tuple(params.items()))


def plain(names: str) -> tuple[Choice, ...]:
    """Operators without parameters."""
    return tuple(map(choose, names.split()))


def along(names: str, *axes: int) -> tuple[Choice, ...]:
    """Operators along each of some dims."""
    return tuple(choose(name, axis=axis) for name in names.split() for axis in axes)


def parts_along(*axes: int) -> tuple[Choice, ...]:
    """Both parts of splits along each of some dims."""
    return tuple(choose("split", axis=axis, part=part) for axis in axes for part in (0, 1))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything that graphs are built from."""

    name: str
    inputs: tuple[Typed, ...]
    choices: tuple[Choice, ...]
    sizes: Sizes
    other_sizes: Sizes
    """For the second test."""
    constants: tuple[Constant, ...] = field(default=())
    most_elements: int = 512
    """Larger values are not made."""
    more_sizes: Sizes = field(default_factory=dict)
    """At which values are told apart besides; empty: those of the second test."""
    grouped_sizes: Sizes = field(default_factory=dict)
    """Sizes at which convolutions have several groups: what does not hold there is for one group."""

    @property
    def both_sizes(self) -> tuple[Sizes, Sizes]:
        """At which values are computed."""
        return self.sizes, self.more_sizes or self.other_sizes

    @property
    def digest(self) -> str:
        """Tells vocabularies apart in saved states."""
        sizes = [sorted(each.items()) for each in self.both_sizes]
        facts = (_ARITHMETIC, self.inputs, self.choices, sizes, self.constants, self.most_elements)
        return sha256(repr(facts).encode()).hexdigest()[:16]


# Vocabularies of the papers and of today's models.

_MATRIX_AXES = (-2, -1)
_IMAGE_AXES = (0, 1, 2, 3)


def _parts(axes: tuple[int, ...]) -> tuple[Choice, ...]:
    joined = tuple(choose("concat", axis=axis) for axis in axes)
    return (*joined, *(choose("split", axis=axis, part=part) for axis in axes for part in (0, 1)))


def _windows(op: str, **params: Parameter) -> tuple[Choice, ...]:
    return tuple(choose(op, **params, stride=s, pad=p) for s in (1, "s") for p in ("same", "valid"))


_SIZES = {"m": 2, "k": 3, "n": 1, "c": 2, "i": 2, "h": 5, "w": 6, "r": 3, "q": 1, "s": 2, "v": 5, "b": 2, "l": 4}
_OTHER = {"m": 4, "k": 3, "n": 2, "c": 3, "i": 3, "h": 11, "w": 12, "r": 5, "q": 3, "s": 3, "v": 4, "b": 3, "l": 2}
_ONES = Constant(Apply("ones", (), ()), "m k", ("mul", "scale", "concat", "transpose"))
_IDENTITIES = tuple(
    Constant(Apply("identity", (), ()), dims, ("matmul", "transpose", "scale", "concat")) for dims in ("m m", "k k")
)

ELEMENTWISE = Vocabulary(
    "elementwise",
    (
        *(Typed(name, "m k") for name in "xyzw"), Typed("s", ""), Typed("t", ""),
        Typed("u", "m k+k"), Typed("v", "m k+k"),
    ),
    (*plain("add mul scale relu"), choose("concat", axis=-2), *_parts((-1,))),
    _SIZES,
    _OTHER,
    (_ONES,),
)  # fmt: skip
MATRICES = Vocabulary(
    "matrices",
    (
        Typed("x", "m k"), Typed("y", "m k"), Typed("z", "k m"), Typed("w", "k m"), Typed("s", ""),
        Typed("u", "k m+m"), Typed("v", "m+m k"),
    ),
    (*plain("add mul scale transpose matmul relu"), *_parts(_MATRIX_AXES)),
    _SIZES,
    _OTHER,
    (_ONES, *_IDENTITIES),
)  # fmt: skip
_KERNEL = (("kernel", "r"),)
IMAGES = Vocabulary(
    "images",
    (
        Typed("x", "n c h w"), Typed("y", "n c h w"), Typed("s", ""),
        Typed("a", "c i r r", role="kernel"), Typed("b", "c i r r", role="kernel"),
        Typed("p", "c i q q", role="kernel"),
    ),
    (
        *plain("add mul scale relu"),
        *(c for act in ("none", "relu") for c in _windows("conv", act=act)),
        Choice("enlarge", _KERNEL, on_inputs=True),
        *_windows("avg_pool", kernel="r"), *_windows("max_pool", kernel="r"),
        *_parts(_IMAGE_AXES),
    ),
    _SIZES,
    _OTHER,
    (
        Constant(Apply("identity_kernel", _KERNEL, ()), "c i r r", ("conv", "concat", "scale"), "kernel"),
        Constant(Apply("pool_kernel", _KERNEL, ()), "c 1 r r", ("conv", "concat", "scale"), "kernel"),
    ),
    more_sizes={**_OTHER, "n": 1, "h": 9, "w": 10, "s": 2},
    grouped_sizes={**_OTHER, "c": 4, "i": 2},
)  # fmt: skip
TASO = (ELEMENTWISE, MATRICES, IMAGES)
"""Table 2.1. Matrices and images never meet, so that each may have the sizes that suit it."""

MULTILINEAR = Vocabulary(
    "multilinear",
    (Typed("x", "m k"), Typed("y", "m k"), Typed("z", "k m"), Typed("s", "")),
    (*plain("add mul scale transpose matmul"), *_parts(_MATRIX_AXES)),
    _SIZES,
    _OTHER,
    most_elements=48,
)
MODELS = Vocabulary(
    "models",
    (
        Typed("x", "m k"), Typed("y", "m k"), Typed("w", "l k"), Typed("v", "l k"), Typed("c", "k"), Typed("d", "k"),
        Typed("e", "l"), Typed("s", ""), Typed("t", "v k"), Typed("u", "v k"), Typed("i", "m b", role="index"),
    ),
    (
        *plain("add sub mul div neg relu gelu silu square rsqrt exp"),
        *plain("scale bias linear transpose matmul embedding embedding_bag"),
        *(choose(op, axis=axis) for op in ("sum", "mean", "softmax") for axis in _MATRIX_AXES),
        *_parts(_MATRIX_AXES),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
VOCABULARIES = (*TASO, MULTILINEAR, MODELS)
