"""Vocabularies of today's models beside those of the papers: dims in another order, heads, gains, depthwise kernels."""

from __future__ import annotations

from conjoin.rules.generator.vocabulary import Typed, Vocabulary, along, choose, parts_along, plain

_SIZES = {"b": 2, "m": 4, "n": 5, "k": 6, "h": 3, "d": 2, "l": 7, "c": 2, "y": 3, "x": 4, "r": 3, "s": 2}
_OTHER = {"b": 3, "m": 5, "n": 6, "k": 8, "h": 2, "d": 4, "l": 7, "c": 3, "y": 7, "x": 6, "r": 5, "s": 3}


_TURNS = plain("transpose swap")
TURNED = Vocabulary(
    "turned",
    (
        Typed("x", "b m d"), Typed("y", "b m d"), Typed("z", "b d n"), Typed("u", "b m+m d"), Typed("c", "d"),
        Typed("s", ""),
    ),
    (
        *_TURNS, *plain("add relu scale bias gain matmul"), *along("softmax sum mean", -3, -2, -1),
        *along("concat", -3, -2, -1), *parts_along(-3, -2),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
"""Dims in another order: any order of three dims is made of two exchanges."""
HEADS = Vocabulary(
    "heads",
    (
        Typed("x", "m k"), Typed("y", "m k"), Typed("u", "m h d"), Typed("v", "m h d"), Typed("w", "l k"),
        Typed("c", "k"), Typed("s", ""),
    ),
    (
        choose("unflatten", parts="h"), *plain("flatten swap add relu scale bias gain linear"),
        *along("softmax", -1), *along("concat", -2, -1), *parts_along(-2, -1),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
"""The last dim as heads and what each of them has, and back."""
ATTENTION = Vocabulary(
    "attention",
    (
        Typed("q", "b h m d"), Typed("k", "b h n d"), Typed("v", "b h n d"), Typed("u", "b h+h m d"), Typed("w", "l k"),
        Typed("s", ""),
    ),
    (*_TURNS, *plain("matmul scale flatten linear"), *along("softmax", -1), *along("concat", -3), *parts_along(-3)),
    _SIZES,
    _OTHER,
)  # fmt: skip
"""Scores, their softmax, and what is weighted by it."""
GAINS = Vocabulary(
    "gains",
    (
        Typed("x", "m k"), Typed("y", "m k"), Typed("w", "l k"), Typed("g", "k"), Typed("c", "k"), Typed("s", ""),
    ),
    (
        *plain("gain bias linear mul add scale square rsqrt"), *along("sum mean", -2, -1), *along("concat", -1),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
"""What norms are made of, and the layers after them."""
LAYERS = Vocabulary(
    "layers",
    (Typed("x", "m k"), Typed("y", "m k"), Typed("w", "l k"), Typed("c", "k"), Typed("d", "l")),
    (*plain("linear bias add relu"), choose("bias", act="relu"), *along("concat", -2, -1)),
    _SIZES,
    _OTHER,
)  # fmt: skip
"""A layer with the function that follows it in one kernel."""
DEPTHWISE = Vocabulary(
    "depthwise",
    (
        Typed("x", "b c y x"), Typed("u", "b c+c y x"), Typed("a", "c 1 r r", role="kernel"),
        Typed("b", "c 1 r r", role="kernel"), Typed("d", "c+c 1 r r", role="kernel"), Typed("s", ""),
    ),
    (
        choose("conv"), choose("conv", stride="s"), choose("avg_pool", kernel="r"), *plain("add relu scale"),
        *along("concat", 0, 1), *parts_along(0, 1),
    ),
    _SIZES,
    _OTHER,
)  # fmt: skip
"""A kernel for each channel."""
OF_MODELS = (TURNED, HEADS, ATTENTION, GAINS, LAYERS, DEPTHWISE)
