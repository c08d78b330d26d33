"""Small vocabularies beside those of the papers: matrices in batches, parts of images.

Rules about these are small, and `generalization.py` makes them general: a few inputs and operators are enough.
"""

from __future__ import annotations

from conjoin.rules.generator.vocabulary import Typed, Vocabulary, along, choose, parts_along, plain

_BATCH, _ROWS, _COLUMNS = -3, -2, -1
_SIZES = {"b": 2, "m": 3, "k": 2, "n": 2, "l": 4, "c": 2, "h": 3, "w": 4, "r": 3, "o": 2}
_OTHER = {"b": 3, "m": 2, "k": 3, "n": 4, "l": 2, "c": 3, "h": 5, "w": 3, "r": 5, "o": 4}
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
MORE = (BATCHES, PARTS_OF_LINEAR, PARTS_OF_IMAGES, SUMS_OF_IMAGES)
