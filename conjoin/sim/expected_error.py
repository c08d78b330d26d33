"""How far predictions are expected to be off, from where their seconds come and how far those were off before."""

from __future__ import annotations

from collections.abc import Sequence

from conjoin.cost import Source

WITHIN = {Source.MEASURED: 0.13, Source.INTERPOLATED: 0.16, Source.ESTIMATED: 0.35}
"""By which part a step may be off. Measured operator by operator: nine of ten of 19 steps of models on an H200 were
within 13 % (median 6.2). The others are rougher. Interpolated: public models that no profile knows were off by 15.9 %
in the median. Estimated from data sheets: of 62 published steps on V100, A100 and H100, with one figure fitted to each
kind, 59 are within 30 %; what nobody published may be further off."""
ALIKE = 0.10
"""Plans for one machine are off alike: on emulated clusters the order of pairs that are further apart was right."""


def expected_error(sources: Sequence[tuple[Source, float]]) -> float:
    """The part by which a step may be off whose seconds come from these sources.

    >>> expected_error([(Source.MEASURED, 3.0), (Source.ESTIMATED, 1.0)])
    0.185
    """
    total = sum(seconds for _, seconds in sources)
    return sum(WITHIN[source] * seconds for source, seconds in sources) / total if total else 0.0
