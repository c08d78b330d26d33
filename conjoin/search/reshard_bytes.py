"""What a reshard on a group of axes moves: bytes that each device sends, forward and backward.

With n devices and a tensor of V bytes, ring algorithms send (Thakur et al., 2005; AutoDDL section 3):

    all-gather, reduce-scatter   (n-1)/n V          all-reduce   2 (n-1)/n V          all-to-all   (n-1)/n V/n

The backward of a reshard is the reshard of the duals (docs/architecture.md), so one table serves both ways.
"""

from __future__ import annotations

from conjoin.ops import Greatest, Invariant, Partial, Placement, Split, dual


def moved_bytes(source: Placement, target: Placement, size: float, degree: int) -> float:
    """Bytes that a device sends to bring a tensor of `size` bytes from one placement to another.

    >>> moved_bytes(Partial(), Invariant(), 100.0, 2), moved_bytes(Split(0), Split(1), 100.0, 2)
    (100.0, 25.0)
    """
    if source == target:
        return 0.0
    part = (degree - 1) / degree * size
    match source, target:
        case Split(), Split():
            return part / degree
        case (Split(), _) | (Partial(), Split()):
            return part
        case (Partial() | Greatest()), _:
            return 2 * part
        case _:
            return 0.0


def step_bytes(source: Placement, target: Placement, size: float, degree: int, with_gradient: bool) -> float:
    """Bytes sent for a reshard in one training step: forward, and backward where a gradient flows.

    >>> from conjoin.ops import Copies
    >>> step_bytes(Invariant(), Copies(), 100.0, 2, with_gradient=True)
    100.0
    """
    forward = moved_bytes(source, target, size, degree)
    return forward + moved_bytes(dual(target), dual(source), size, degree) if with_gradient else forward


def sum_bytes(placement: Placement, size: float, degree: int) -> float:
    """Bytes that are sent sooner or later because a value is left as partial sums."""
    return moved_bytes(placement, Invariant(), size, degree) if isinstance(placement, Partial | Greatest) else 0.0
