"""Fingerprints of values: 64 bits of a value's shape and content on fixed inputs (TASO, equation 2.1).

`of_values` is the paper's hash₁. A graph with several outputs is told by the set of its outputs' fingerprints, whatever
their order; `of_outputs` is that set's hash₂. Inputs are drawn once for a vocabulary, from a fixed seed.

A value has a fingerprint at each of two choices of sizes, and `joined` is one for both: what is equal at one choice
only, as a convolution with and without padding by a kernel of one element, is not equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from conjoin.rules.generator.arithmetic import PRIME, Array, Residues, constant
from conjoin.rules.generator.shapes import Type
from conjoin.rules.generator.vocabulary import Choice, Sizes, Vocabulary

Hashes = npt.NDArray[np.uint64]
_SEED = 20190827
_LONGEST = 1 << 14
"""Elements a value may have."""
_WEIGHTS: Hashes = np.random.default_rng(_SEED).integers(1, 2**64, _LONGEST, np.uint64) | np.uint64(1)


def of_values(values: Array, of: Type) -> Hashes:
    """A fingerprint for each of many values of one type; how a dim was concatenated does not count."""
    flat = values.reshape(len(values), -1).astype(np.uint64)
    total = (flat * _WEIGHTS[: flat.shape[1]]).sum(1, dtype=np.uint64)
    return mix(total ^ np.uint64(_salt(of)))


def _salt(of: Type) -> int:
    """Tells types apart, the same in every process."""
    return int.from_bytes(sha256(repr((of.shape, of.spread, of.role)).encode()).digest()[:8], "little")


def mix(values: Hashes) -> Hashes:
    """Spread what differs in a few bits over all of them."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def joined(hashes: Iterable[Hashes]) -> Hashes:
    """One fingerprint for those at several choices of sizes."""
    total: Hashes = np.zeros(1, np.uint64)
    for each in hashes:
        total = mix(total * np.uint64(3) + each)
    return total


def of_outputs(hashes: Iterable[int]) -> int:
    """A fingerprint of a graph from those of its outputs, in any order."""
    return sum(int(each) for each in hashes) % 2**64


def draw_inputs(vocabulary: Vocabulary, sizes: Sizes) -> list[tuple[Type, Array]]:
    """Types and residues of the inputs and then of the constants, at some sizes."""
    random = np.random.default_rng(_SEED)
    field, found = Residues(), list[tuple[Type, Array]]()
    for typed in vocabulary.inputs:
        of = typed.type(sizes)
        below = 2 * sizes["v"] if typed.role == "index" else PRIME
        found.append((of, random.integers(0, below, (1, *of.stored), np.int64)))
    for known in vocabulary.constants:
        of = known.type(sizes)
        params = Choice(known.expr.op, known.expr.params).numbers(sizes)
        found.append((of, constant(field, known.expr, params, of.shape, np.int64)))
    return found
