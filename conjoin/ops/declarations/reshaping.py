"""The notation of a reshape, found from the two shapes alone.

Both shapes are cut into the smallest runs of dims that hold the same elements; within a run the dims of both sides are
composed of common factors, slowest first. Where there are none, the leading dims may still share a factor.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd, prod

from conjoin.ops.notation import NotationError
from conjoin.ops.spec import Indexed


def _boundaries(shape: tuple[int, ...]) -> list[int]:
    """Suffix products: where each dim of a shape begins in the flat order."""
    return [prod(shape[i:]) for i in range(len(shape) + 1)]


def _group(left: tuple[int, ...], right: tuple[int, ...]) -> list[tuple[int, int]]:
    """Dims of both sides in the smallest runs that hold the same elements: ends of each run on the left and right."""
    ends, i, j = [], 0, 0
    while i < len(left) or j < len(right):
        i, j = min(i + 1, len(left)), min(j + 1, len(right))
        while prod(left[:i]) != prod(right[:j]):
            if prod(left[:i]) < prod(right[:j]):
                i += 1
            else:
                j += 1
        while i < len(left) and left[i] == 1:
            i += 1
        while j < len(right) and right[j] == 1:
            j += 1
        ends.append((i, j))
    return ends


def _refine(left: tuple[int, ...], right: tuple[int, ...]) -> list[int]:
    """Index sizes, slowest first, out of which the dims of both sides can be composed; else a shared leading factor."""
    marks = sorted({*_boundaries(left), *_boundaries(right)}, reverse=True)
    if all(big % small == 0 for big, small in pairwise(marks)):
        return [big // small for big, small in pairwise(marks)]
    shared = gcd(next(n for n in left if n != 1), next(n for n in right if n != 1))
    return [shared]


def _compose(shape: tuple[int, ...], factors: list[int], names: list[str], rest: str) -> list[str]:
    """Write every dim as a product of the factors; a dim they do not reach is `rest`, which stays whole."""
    dims: list[str] = []
    place = 0
    for size in shape:
        taken: list[str] = []
        have = 1
        while have < size and place < len(factors) and size % (have * factors[place]) == 0:
            have *= factors[place]
            taken.append(names[place])
            place += 1
        if have != size:
            taken.append(f"{rest}{len(dims)}!")
        dims.append(f"({' '.join(taken)})" if len(taken) != 1 else taken[0])
    return dims


def reshape_notation(left: tuple[int, ...], right: tuple[int, ...]) -> Indexed:
    """The notation of a reshape, found from the two shapes alone.

    >>> reshape_notation((2, 3, 8), (2, 3, 4, 2)).text
    'a0 a1 (a2 a3) -> a0 a1 a2 a3'
    """
    if prod(left) != prod(right):
        raise NotationError(f"{prod(left)} elements of shape {left} do not fill the shape {right}")
    if prod(left) in (0, 1):
        return trivial_notation(left, right)
    dims: tuple[list[str], list[str]] = ([], [])
    sizes: list[tuple[str, int]] = []
    i = j = 0
    for end_i, end_j in _group(left, right):
        run = left[i:end_i], right[j:end_j]
        factors = [f for f in _refine(*run) if f != 1] if prod(run[0]) != 1 else []
        names = [f"a{len(sizes) + k}" for k in range(len(factors))]
        sizes += zip(names, factors, strict=True)
        for side, shape, prefix in ((dims[0], run[0], f"u{i}_"), (dims[1], run[1], f"w{j}_")):
            side += _compose(shape, factors, names, prefix)
        i, j = end_i, end_j
    text = f"{' '.join(dims[0])} -> {' '.join(dims[1])}"
    return Indexed(text, (*sizes, *_rest_sizes(dims[0], left, dict(sizes)), *_rest_sizes(dims[1], right, dict(sizes))))


def _rest_sizes(dims: list[str], shape: tuple[int, ...], sizes: dict[str, int]) -> list[tuple[str, int]]:
    found = []
    for text, size in zip(dims, shape, strict=True):
        words = text.strip("()").split()
        known = prod(sizes.get(word, 1) for word in words)
        found += [(word.rstrip("!"), size // known) for word in words if word.endswith("!")]
    return found


def trivial_notation(left: tuple[int, ...], right: tuple[int, ...]) -> Indexed:
    """Shapes of at most one element: nothing to split."""
    sides = [[(f"{side}{k}", n) for k, n in enumerate(shape)] for side, shape in (("u", left), ("w", right))]
    spell = [" ".join(f"{name}!" for name, _ in side) for side in sides]
    return Indexed(f"{spell[0]} -> {spell[1]}", tuple(sides[1]))


def resolve_shape(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """Replace the one -1 of a shape by what is left."""
    known = prod(n for n in shape if n != -1)
    return tuple(elements // known if n == -1 and known else max(n, 0) for n in shape)
