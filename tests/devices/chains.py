"""Operators over devices one after another, along two axes of the machine: which orders are the same?

The generator has one axis. Here every chain of a few operators along two axes is run on one tensor, and chains that
give the same value are candidates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from conjoin.rules.patterns import Apply, Expr, Input, Rule
from conjoin.rules.trials.evaluation import Setting, Value, evaluate
from conjoin.rules.trials.references import Misfit

_MESHES = {"m": 2, "n": 3}
_SHAPE = (12, 18)
"""Divides along both axes, in any order."""
_AXES = (-2, -1)


def generate_chains(length: int = 2) -> tuple[Rule, ...]:
    """Candidates of at most so many operators on each side."""
    found: list[Rule] = []
    for spread in ((), ("m",), ("n",), ("m", "n")):
        known: dict[tuple[object, ...], Expr] = {}
        for chain, value in _chains(spread, length):
            key = (value.axes, tuple(value.data.shape), tuple(value.data.flatten().tolist()))
            smallest = known.setdefault(key, chain)
            if smallest is not chain:
                found.append(Rule("", (chain,), (smallest,)))
    return tuple(found)


def _chains(spread: tuple[str, ...], length: int) -> Iterator[tuple[Expr, Value]]:
    """All chains on a tensor that is spread over some axes, short ones first."""
    generator = torch.Generator().manual_seed(0)
    shape = (*(_MESHES[axis] for axis in spread), *_SHAPE)
    start: Expr = Input("x")
    value = Value(torch.randint(-1000, 1000, shape, generator=generator).double(), spread)
    level = [(start, value)]
    yield start, value
    for _ in range(length):
        level = [(longer, made) for chain, _ in level for longer in _longer(chain) for made in _run(longer, value)]
        yield from level


def _longer(chain: Expr) -> Iterator[Expr]:
    for mesh in _MESHES:
        along = () if mesh == "m" else (("mesh", mesh),)
        for op in ("partition", "combine"):
            yield from (Apply(op, (("axis", axis), *along), (chain,)) for axis in _AXES)
        yield from (Apply(op, along, (chain,)) for op in ("replicate", "reduce"))


def _run(chain: Expr, value: Value) -> Iterator[Value]:
    try:
        yield evaluate((chain,), {"x": value}, Setting(meshes=_MESHES))[0]
    except Misfit:
        return
