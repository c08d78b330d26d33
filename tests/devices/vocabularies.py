"""Vocabularies of operators over devices (Unity, section 4): what rules about them are generated from."""

from __future__ import annotations

from conjoin.rules.generator.vocabulary import Choice, Typed, Vocabulary, along, choose, parts_along, plain

_BATCH, _ROWS, _COLUMNS = -3, -2, -1
_SIZES = {"m": 2, "k": 4, "n": 6, "v": 4, "b": 2, "c": 2, "h": 3, "w": 5, "r": 3, "o": 2, "devices": 2}
_OTHER = {"m": 6, "k": 3, "n": 9, "v": 6, "b": 3, "c": 3, "h": 5, "w": 4, "r": 5, "o": 6, "devices": 3}
_HEADS = {"b": 2, "m": 4, "k": 12, "h": 4, "g": 2, "d": 3, "devices": 2}
_OTHER_HEADS = {"b": 3, "m": 6, "k": 12, "h": 6, "g": 2, "d": 2, "devices": 3}


def _over_devices(*axes: int) -> tuple[Choice, ...]:
    return (*along("partition combine", *axes), *plain("replicate reduce"))


PARALLEL = Vocabulary(
    "parallel",
    (
        Typed("x", "m k"), Typed("y", "m k"), Typed("z", "k n"), Typed("w", "n k"), Typed("c", "k"), Typed("s", ""),
        Typed("X", "m k", spread=True), Typed("Y", "m k", spread=True), Typed("Z", "k n", spread=True),
        Typed("W", "n k", spread=True), Typed("C", "k", spread=True), Typed("S", "", spread=True),
    ),
    (
        *plain("add mul relu gelu scale bias matmul linear transpose"),
        *along("softmax", _ROWS, _COLUMNS),
        *along("concat", _ROWS, _COLUMNS), *parts_along(_ROWS, _COLUMNS), *_over_devices(_ROWS, _COLUMNS),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
PARALLEL_IMAGES = Vocabulary(
    "parallel images",
    (
        Typed("x", "m c h w"), Typed("k", "o c r r", role="kernel"), Typed("X", "m c h w", spread=True),
        Typed("K", "o c r r", spread=True, role="kernel"),
    ),
    (
        *plain("add relu"), choose("conv", stride=1, pad="same", act="none"),
        choose("avg_pool", kernel="r"), choose("max_pool", kernel="r"),
        *along("concat", 0, 1), *_over_devices(0, 1),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
PARALLEL_TABLES = Vocabulary(
    "parallel tables",
    (
        Typed("t", "v k"), Typed("T", "v k", spread=True), Typed("i", "m b", role="index"),
        Typed("I", "m b", spread=True, role="index"), Typed("z", "k n"), Typed("Z", "k n", spread=True),
    ),
    (
        *plain("embedding embedding_bag add matmul"), *along("sum", _ROWS),
        *along("concat", _COLUMNS), *_over_devices(_ROWS, _COLUMNS),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
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
    _SIZES,
    _OTHER,
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
    _SIZES,
    _OTHER,
)  # fmt: skip
PARALLEL_PRODUCTS = Vocabulary(
    "parallel products",
    (
        Typed("x", "m k"), Typed("z", "k n"), Typed("X", "m k", spread=True), Typed("Z", "k n", spread=True),
    ),
    (*plain("matmul"), *_over_devices(_ROWS, _COLUMNS)),
    _SIZES,
    _OTHER,
)  # fmt: skip
PARALLEL_VECTORS = Vocabulary(
    "parallel vectors",
    (
        Typed("x", "m k"), Typed("c", "k"), Typed("X", "m k", spread=True), Typed("C", "k", spread=True),
    ),
    (*plain("bias"), *_over_devices(_COLUMNS)),
    _SIZES,
    _OTHER,
)  # fmt: skip
PARALLEL_GROUPS = Vocabulary(
    "parallel groups",
    (
        Typed("x", "m c h w"), Typed("k", "o c r r", role="kernel"), Typed("g", "o 1 r r", role="kernel"),
        Typed("X", "m c h w", spread=True), Typed("K", "o c r r", spread=True, role="kernel"),
        Typed("G", "o 1 r r", spread=True, role="kernel"),
    ),
    (choose("conv"), choose("avg_pool", kernel="r"), *_over_devices(0, 1)),
    _SIZES,
    _OTHER,
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
    _SIZES,
    {**_OTHER, "k": 6, "devices": 2},
)  # fmt: skip
"""Two devices: what belongs to one is a part of a concatenation (Unity, figure 11b)."""
PARALLEL_HEADS = Vocabulary(
    "parallel heads",
    (
        Typed("x", "m k"), Typed("u", "b h d"), Typed("X", "m k", spread=True), Typed("U", "b h d", spread=True),
        Typed("c", "d"), Typed("C", "d", spread=True),
    ),
    (
        choose("unflatten", parts="h"), choose("unflatten", parts="g"), *plain("flatten swap transpose relu gain"),
        *along("softmax", -1), *_over_devices(_BATCH, _ROWS, _COLUMNS),
    ),
    _HEADS,
    _OTHER_HEADS,
)  # fmt: skip
"""Heads on each device."""
VOCABULARIES = (
    PARALLEL, PARALLEL_IMAGES, PARALLEL_TABLES, PARALLEL_BATCHES, PARALLEL_MODELS, PARALLEL_GROUPS, PARALLEL_PRODUCTS,
    PARALLEL_VECTORS, PAIRS, PARALLEL_HEADS,
)  # fmt: skip
