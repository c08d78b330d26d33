"""Small vocabularies beside those of the papers: matrices in batches, parts of images, more operators over devices.

Rules about these are small, and `generalizing.py` makes them general: a few inputs and operators are enough.
"""

from __future__ import annotations

from conjoin.rules.generator.vocabulary import Choice, Typed, Vocabulary, along, choose, parts_along, plain

_BATCH, _ROWS, _COLUMNS = -3, -2, -1
_SIZES = {"b": 2, "m": 3, "k": 2, "n": 2, "l": 4, "c": 2, "h": 3, "w": 4, "r": 3, "o": 2, "devices": 2}
_OTHER = {"b": 3, "m": 2, "k": 3, "n": 4, "l": 2, "c": 3, "h": 5, "w": 3, "r": 5, "o": 4, "devices": 3}
_EVEN = {"b": 2, "m": 2, "k": 4, "n": 6, "v": 4, "c": 2, "h": 3, "w": 5, "r": 3, "o": 2, "devices": 2}
_OTHER_EVEN = {"b": 3, "m": 6, "k": 3, "n": 9, "v": 6, "c": 3, "h": 5, "w": 4, "r": 5, "o": 6, "devices": 3}


def _over_devices(*axes: int) -> tuple[Choice, ...]:
    return (*along("partition combine", *axes), *plain("replicate reduce"))


BATCHES = Vocabulary(
    "batches",
    (
        Typed("x", "b m k"), Typed("z", "b k n"), Typed("u", "b+b m k"), Typed("v", "b+b k n"), Typed("w", "l k"),
        Typed("c", "k"),
    ),
    (
        *plain("matmul transpose linear bias"), *along("softmax", _COLUMNS), *along("concat", _BATCH),
        *parts_along(_BATCH), *along("sum mean", _BATCH, _ROWS, _COLUMNS),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
PARTS_OF_LINEAR = Vocabulary(
    "parts of linear",
    (
        Typed("x", "m k"), Typed("u", "m+m k"), Typed("y", "m k+k"), Typed("w", "l k"), Typed("v", "l+l k"),
        Typed("z", "l k+k"), Typed("c", "k"), Typed("d", "k+k"),
    ),
    (
        *plain("linear bias relu add sub div neg"), *along("concat softmax sum mean", _ROWS, _COLUMNS),
        *parts_along(_ROWS, _COLUMNS),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
PARTS_OF_IMAGES = Vocabulary(
    "parts of images",
    (
        Typed("u", "n+n c h w"), Typed("v", "n c+c h w"), Typed("x", "n c h w"), Typed("a", "o c r r", role="kernel"),
        Typed("b", "o+o c r r", role="kernel"), Typed("d", "o c+c r r", role="kernel"),
    ),
    (
        choose("conv"), choose("avg_pool", kernel="r"), choose("max_pool", kernel="r"), *plain("relu"),
        *along("concat", 0, 1), *parts_along(0, 1),
    ),
    _SIZES,
    _OTHER,
    grouped_sizes={**_OTHER, "c": 2, "o": 4},
)  # fmt: skip
SUMS_OF_IMAGES = Vocabulary(
    "sums of images",
    (
        Typed("x", "n c h w"), Typed("y", "n c h w"), Typed("s", ""), Typed("a", "o 1 r r", role="kernel"),
        Typed("b", "o 1 r r", role="kernel"),
    ),
    (choose("conv"), choose("avg_pool", kernel="r"), *plain("add sub neg scale")),
    {**_SIZES, "o": 4},
    {**_OTHER, "o": 6},
)  # fmt: skip
"""Without concatenations, by way of which rules of one group say what is then missing for several."""
PARALLEL_BATCHES = Vocabulary(
    "parallel batches",
    (
        Typed("x", "b m k"), Typed("z", "b k n"), Typed("w", "n k"), Typed("c", "k"), Typed("X", "b m k", spread=True),
        Typed("Z", "b k n", spread=True), Typed("W", "n k", spread=True), Typed("C", "k", spread=True),
    ),
    (
        *plain("matmul transpose linear bias"), *along("softmax", _COLUMNS), *along("sum mean", _COLUMNS, _BATCH),
        *along("concat", _BATCH, _COLUMNS), *_over_devices(_BATCH),
    ),
    _EVEN,
    _OTHER_EVEN,
)  # fmt: skip
PARALLEL_MODELS = Vocabulary(
    "parallel models",
    (
        Typed("x", "m k"), Typed("y", "m k"), Typed("w", "n k"), Typed("c", "k"), Typed("u", "m k+k"),
        Typed("X", "m k", spread=True), Typed("Y", "m k", spread=True), Typed("W", "n k", spread=True),
        Typed("C", "k", spread=True), Typed("U", "m k+k", spread=True),
    ),
    (
        *plain("sub div neg bias linear mul"), *along("sum mean", _ROWS, _COLUMNS), *parts_along(_COLUMNS),
        *_over_devices(_ROWS, _COLUMNS),
    ),
    _EVEN,
    _OTHER_EVEN,
)  # fmt: skip
PARALLEL_PRODUCTS = Vocabulary(
    "parallel products",
    (
        Typed("x", "m k"), Typed("z", "k n"), Typed("X", "m k", spread=True), Typed("Z", "k n", spread=True),
    ),
    (*plain("matmul"), *_over_devices(_ROWS, _COLUMNS)),
    _EVEN,
    _OTHER_EVEN,
)  # fmt: skip
PARALLEL_VECTORS = Vocabulary(
    "parallel vectors",
    (
        Typed("x", "m k"), Typed("c", "k"), Typed("X", "m k", spread=True), Typed("C", "k", spread=True),
    ),
    (*plain("bias"), *_over_devices(_COLUMNS)),
    _EVEN,
    _OTHER_EVEN,
)  # fmt: skip
PARALLEL_GROUPS = Vocabulary(
    "parallel groups",
    (
        Typed("x", "m c h w"), Typed("k", "o c r r", role="kernel"), Typed("g", "o 1 r r", role="kernel"),
        Typed("X", "m c h w", spread=True), Typed("K", "o c r r", spread=True, role="kernel"),
        Typed("G", "o 1 r r", spread=True, role="kernel"),
    ),
    (choose("conv"), choose("avg_pool", kernel="r"), *_over_devices(0, 1)),
    _EVEN,
    _OTHER_EVEN,
)  # fmt: skip
PAIRS = Vocabulary(
    "pairs",
    (Typed("x", "m k"), Typed("y", "m k"), Typed("X", "m k", spread=True)),
    (
        *plain("add"), *along("concat", _ROWS, _COLUMNS),
        *(choose("partition", axis=axis, mesh=2) for axis in (_ROWS, _COLUMNS)),
        *(choose("combine", axis=axis, mesh=2) for axis in (_ROWS, _COLUMNS)),
        choose("replicate", mesh=2), choose("reduce", mesh=2),
    ),
    _EVEN,
    {**_OTHER_EVEN, "k": 6, "devices": 2},
)  # fmt: skip
"""Two devices: what belongs to one is a part of a concatenation (Unity, figure 11b)."""
MORE = (
    BATCHES, PARTS_OF_LINEAR, PARTS_OF_IMAGES, SUMS_OF_IMAGES, PARALLEL_BATCHES, PARALLEL_MODELS, PARALLEL_GROUPS,
    PARALLEL_PRODUCTS, PARALLEL_VECTORS, PAIRS,
)  # fmt: skip
