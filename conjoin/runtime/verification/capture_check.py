"""Does a captured graph compute what the model does? The model itself is run, without any graph, and is the judge.

Both train for some steps from the same values, on the same batches, none of which is the one that was captured, with
the same random numbers. In double precision they may differ by `TOLERANCE`. A model that computes in a precision of its
own choice is compared in that: where the two are not the same to the last bit, they may differ by `FACTOR` times what
two runs of the model a rounding apart differ by (`precision.py`), and `FLOOR` units in the last place; but never in the
first half of the digits, as a model does that reads the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import CaptureError
from conjoin.ir import Graph, flatten_tree, plain_call
from conjoin.ops import flops
from conjoin.runtime.program.captured import to_module
from conjoin.runtime.torch_private import has_no_values
from conjoin.runtime.verification.differences import Difference, differences_between
from conjoin.runtime.verification.first_difference import find_first_difference
from conjoin.runtime.verification.fresh_batches import Freshness
from conjoin.runtime.verification.plain_model import PlainModel, PlainRun
from conjoin.runtime.verification.precision import Doubled, Rounded
from conjoin.runtime.verification.steps import train

FACTOR, FLOOR = 64.0, 64.0
"""A sum in another order rounds more than once; a wrong graph is wrong in the first digits."""
NUM_ROUNDINGS = 2
MAX_FLOPS, MAX_ELEMENTS = 2e9, 2**25
"""Of a forward pass, and of all tensors of one: what capture looks at again by itself, in a second or so."""


@dataclass(frozen=True, slots=True)
class AgainstModel:
    """The comparison of a captured graph with the model it was captured from."""

    losses: tuple[float, ...]
    """Of the model."""
    differences: tuple[Difference, ...]
    """The largest first; of every tensor the largest over all steps."""
    precision: str
    freshness: Freshness
    changed: tuple[str, ...] = ()
    """What the model keeps beside its tensors and forward changes: the graph has it as it was at capture."""

    @property
    def passed(self) -> bool:
        return all(difference.is_rounding for difference in self.differences)

    @property
    def told(self) -> tuple[str, ...]:
        """The comparison in words, line by line."""
        how = f"{len(self.losses)} step(s) in {self.precision}, {self.freshness.value}"
        state = f"forward changes {', '.join(self.changed)}, which a graph keeps as it was at capture"
        if self.passed:
            lines = [f"the captured graph trains like the model itself: {how}"]
            return (*lines, *([f"{state}; in these steps that made no difference"] if self.changed else []))
        shown = [d for d in self.differences if not d.is_rounding][:4]
        off = (f"  {d.what} is off by {d.relative:.1e}, where rounding allows {d.allowed:.0e}" for d in shown)
        lines = [f"the captured graph does NOT train like the model itself: {how}", *off]
        return (*lines, *([state] if self.changed else []))

    @property
    def worst(self) -> Difference | None:
        """The difference that is farthest from what is allowed."""
        return max(self.differences, key=lambda d: d.relative / d.allowed, default=None)


def against_model_in_double(
    graph: Graph, plain: PlainModel, model: nn.Module, batch: Any, num_steps: int
) -> AgainstModel | None:
    """A graph against the model, both in double precision already; None where the model does not run so."""
    try:
        ran = plain.train(batch, num_steps, graph, Doubled())  # type: ignore[no-untyped-call]
    except Exception:  # whatever a user's model says of dtypes it does not expect
        return None
    return _compared(graph, replace(plain, model=model), ran, "double precision")


def against_model(graph: Graph, plain: PlainModel, batch: Any, num_steps: int) -> AgainstModel:
    """A graph against the model in the model's own precision, on its own device."""
    ran = plain.train(batch, num_steps, graph)
    found = _compared(graph, plain, ran, "the model's own precision")
    if not any(difference.relative for difference in found.differences):
        return found
    noise: dict[str, float] = {}
    for seed in range(NUM_ROUNDINGS):
        apart = plain.changed().train_on(ran.reference.batches, graph, Rounded(seed))
        for difference in differences_between(apart, ran.reference):
            noise[difference.what] = max(noise.get(difference.what, 0.0), difference.relative)
    unit = _coarsest_unit(graph)
    bounded = tuple(
        replace(difference, allowed=min(FACTOR * noise.get(difference.what, 0.0) + FLOOR * unit, sqrt(unit)))
        for difference in found.differences
    )
    return replace(found, differences=bounded)


def _compared(graph: Graph, values: PlainModel, ran: PlainRun, precision: str) -> AgainstModel:
    """The graph trained from these values on the batches that the model took."""
    own = values.changed()
    try:
        mine = train(to_module(graph, own.model), ran.reference.batches, graph, own.device)
        differences = differences_between(mine, ran.reference)
    except Exception as error:  # the model takes these batches, so the graph must
        differences = (Difference(f"the step, which stops with {type(error).__name__}: {error}", 0, inf),)
    return AgainstModel(ran.reference.losses, differences, precision, ran.freshness, ran.changed)


def _coarsest_unit(graph: Graph) -> float:
    """The unit in the last place of the coarsest dtype that anything has."""
    types = (*(t for node in graph.nodes for t in node.types), *(leaf.type for leaf in graph.leaves))
    real = {t.dtype for t in types if t.dtype.is_floating_point or t.dtype.is_complex}
    return max((torch.finfo(dtype).eps for dtype in real), default=0.0)


def check_capture(graph: Graph, plain: PlainModel, batch: Any) -> str:
    """Compare a graph with the model once, and say so; CaptureError where they differ. `plain` is as before capture."""
    reason = _too_much(graph)
    if reason:
        return f"not checked against the model: {reason}"
    try:
        found = against_model(graph, plain, batch, 1)
    except Exception as error:  # what cannot be run plainly cannot be compared
        return f"not checked against the model: run by itself it stops with {type(error).__name__}: {error}"
    if found.passed:
        named = f"{sum(d.what.startswith('gradient') for d in found.differences)} gradient(s)"
        return f"checked against the model: loss, {named} and state agree on {found.freshness.value}"
    worst = found.worst
    assert worst is not None
    hint = find_first_difference(graph, plain, batch, found.freshness)
    raise CaptureError(
        f"The graph captured of {graph.name} does not compute what the model does: on {found.freshness.value}, "
        f"{worst.what} is off by {worst.relative:.1e} where rounding allows {worst.allowed:.0e}. {hint} "
        f"Take what changes from call to call out of forward (Python's numbers and generators, values read from "
        f"outside), write without views there, or capture with check=False to go on all the same."
    )


def copied_for_check(plain: PlainModel, batch: Any) -> PlainModel | str:
    """A copy of a model as it is before capture, to compare with; or in words why there is none."""
    tensors = [*plain.model.parameters(), *plain.model.buffers()]
    tensors += [x for x in flatten_tree(batch)[0] if isinstance(x, Tensor)]
    if any(map(has_no_values, tensors)):
        return "not checked against the model: it has no values"
    elements = sum(x.numel() for x in tensors)
    if elements > MAX_ELEMENTS:
        return f"not checked against the model: it has {elements:.1e} elements, and up to {MAX_ELEMENTS:.0e} are copied"
    try:
        return plain.changed()
    except Exception as error:  # a user's model may hold what cannot be copied
        return f"not checked against the model: it cannot be copied: {type(error).__name__}: {error}"


def _too_much(graph: Graph) -> str:
    elements = sum(t.num_elements for node in graph.nodes for t in node.types)
    if elements > MAX_ELEMENTS:
        return f"a step has {elements:.1e} elements, and up to {MAX_ELEMENTS:.0e} are run again"
    work = sum(flops(node.spec, plain_call(node)) for node in graph.nodes if node.spec is not None)
    return f"a step takes {work:.0e} operations, and up to {MAX_FLOPS:.0e} are run again" if work > MAX_FLOPS else ""
