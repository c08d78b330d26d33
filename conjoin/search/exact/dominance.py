"""Choices that cannot be better than another one, whatever their neighbours choose.

Choice c of an operator is dominated by c' where c' takes no longer, even if its neighbours are those that suit c best:

    seconds(c') + sum over tensors of  max over layouts x of its other end (R[x, c'] - R[x, c])  <=  seconds(c)

Any solution with c then becomes one with c' that is no worse (in protein design: Goldstein's dead-end elimination).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from conjoin.search.exact.layout_codes import Codes

Array = NDArray[np.float64]
Change = tuple[Codes, Callable[[Codes, Codes], Array]]
"""The layouts of a tensor by choice, and by how much more it can cost to have it in some than in others, as a table."""
_FEW = 48
_ROUNDING = 1e-12


def undominated(seconds: Array, tensors: Sequence[Change]) -> NDArray[np.int64]:
    """The choices that no other one dominates, in order; of choices that dominate each other the first is kept.

    >>> more = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> undominated(np.array([5.0, 3.0]), [(np.array([0, 1]), looked_up(more))])
    array([1])
    """
    kept = np.arange(len(seconds))
    cheap = np.argsort(seconds, kind="stable")[:_FEW]
    for by in (np.sort(cheap), None):
        others = kept if by is None else by
        kept = kept[~_dominated(kept, others, seconds, tensors)]
    return kept


def looked_up(more: Array) -> Callable[[Codes, Codes], Array]:
    """What is known for all layouts."""
    return lambda some, others: more[some[:, None], others[None, :]]


def _dominated(
    some: NDArray[np.int64], others: NDArray[np.int64], seconds: Array, tensors: Sequence[Change]
) -> NDArray[np.bool_]:
    imitated = np.broadcast_to(seconds[others], (len(some), len(others))).copy()
    for codes, more in tensors:
        imitated += more(codes[some], codes[others])
    own = seconds[some][:, None]
    slack = _ROUNDING * np.abs(own)
    better = imitated < own - slack
    equal = (imitated <= own + slack) & (others[None, :] < some[:, None])
    found: NDArray[np.bool_] = np.logical_or.reduce(better | equal, axis=1)
    return found
