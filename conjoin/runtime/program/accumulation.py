"""A step in micro-batches: each runs forward and backward before the next begins, so that only one is alive at a time.

The gradients are there when the forward pass ends; the caller's backward pass hands them out, scaled by the gradient
that comes to the loss. Gradients of parameters that all ranks hold are summed over the ranks once, at the end.
Where a backward pass comes twice, or scales as it was not expected to, the micro-batches are run again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import splits_evenly
from conjoin.errors import UsageError
from conjoin.ir import Accumulation, Graph, Leaf, LeafKind, Plan, Value, region_of, region_shape
from conjoin.ops import first_order, split_axes
from conjoin.runtime.movement.bundles import Bundle
from conjoin.runtime.program.call_forms import InputPart
from conjoin.runtime.program.gradient_sums import add_gradients, add_to, take_gradients
from conjoin.runtime.program.randomness import Streams
from conjoin.runtime.program.step_values import Gradients, StepValues

NARROW = frozenset({torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})
"""Dtypes in which gradients are scaled because they would vanish."""


class MicroBatches:
    """This rank's parts of the micro-batches of a batch."""

    def __init__(
        self,
        plan: Plan,
        accumulation: Accumulation | None,
        rank: int,
        in_order: bool,
        leaves: Sequence[Leaf] | None = None,
    ) -> None:
        accumulation = accumulation or Accumulation(1, (), ())
        self._plan, self._steps, self._rank = plan, accumulation.steps, rank
        self._leaves = plan.graph.leaves_of(LeafKind.INPUT) if leaves is None else leaves
        self._cut, self._source = set(accumulation.cut), dict(accumulation.whole)
        self.names = [leaf.name for leaf in self._leaves if leaf.name not in self._source]
        self._inside = not in_order and self._alike()
        """Whether every rank cuts its own part of the batch; else a micro-batch is cut into parts for the ranks."""

    def _alike(self) -> bool:
        """Whether all inputs lie on the ranks alike: then it makes no difference which samples run together."""
        cut = [leaf for leaf in self._leaves if leaf.name in self._cut]
        axes = {split_axes(leaf.type.layout, 0) for leaf in cut}
        return len(axes) == 1 and all(splits_evenly(x.type.shape, x.type.layout, self._plan.mesh) for x in cut)

    def of(self, given: Sequence[Tensor]) -> list[list[Tensor]]:
        """The inputs of every micro-batch on this rank, from the batch as a whole or this rank's part of it."""
        return self.of_named(dict(zip(self.names, given, strict=True)))

    def of_named(self, by_name: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The same from inputs by their names."""
        inputs = [(leaf, by_name[self._source.get(leaf.name, leaf.name)]) for leaf in self._leaves]
        return [[self._part(leaf, x, step) for leaf, x in inputs] for step in range(self._steps)]

    def parts(self) -> list[InputPart]:
        """Every input in the order of the call: this rank's part of the batch where it suffices, else the whole."""
        found = []
        for name in self.names:
            uses = [leaf for leaf in self._leaves if self._source.get(leaf.name, leaf.name) == name]
            shape = self._whole_shape(uses[0])
            regions = {region_of(shape, leaf.type.layout, self._plan.mesh, self._rank) for leaf in uses}
            region = regions.pop() if self._inside and len(regions) == 1 else tuple((0, size) for size in shape)
            found.append(InputPart(name, shape, region, uses[0].type.dtype))
        return found

    def _whole_shape(self, leaf: Leaf) -> tuple[int, ...]:
        steps = self._steps if leaf.name in self._cut else 1
        return (leaf.type.shape[0] * steps, *leaf.type.shape[1:]) if steps > 1 else leaf.type.shape

    def _part(self, leaf: Leaf, x: Tensor, step: int) -> Tensor:
        steps = self._steps if leaf.name in self._cut else 1
        size = leaf.type.shape[0] if steps > 1 else 0
        whole = self._whole_shape(leaf)
        mesh, layout, shape = self._plan.mesh, leaf.type.layout, tuple(x.shape)
        region = region_of(whole, layout, mesh, self._rank)
        own = region_of(leaf.type.shape, layout, mesh, self._rank)
        if x.dtype == leaf.type.dtype and (steps == 1 or self._inside) and shape in (whole, region_shape(region)):
            part = x[tuple(slice(*span) for span in region)] if shape == whole else x
            count = region_shape(own)[0] if steps > 1 else 0
            return part[step * count : (step + 1) * count] if steps > 1 else part
        if x.dtype == leaf.type.dtype and shape == whole:
            return x[step * size : (step + 1) * size][tuple(slice(*span) for span in own)]
        parts = f" or {region_shape(region)}, its part on rank {self._rank}," if self._inside else ""
        if leaf.name in self._source and region_shape(region) == whole:
            parts = ", as a whole on every rank, since the loss counts something over all of it,"
        name = self._source.get(leaf.name, leaf.name)
        raise UsageError(
            f"The captured {self._plan.model.name} was called with other inputs: {name} is {leaf.type.dtype} of "
            f"shape {whole}{parts} and {x.dtype} of shape {shape} came. A plan holds the shapes it was made with, here "
            f"{self._steps} micro-batches. Call it with such a batch, or make the plan again with this one."
        )


def refuse_input_gradients(model: str, leaves: Sequence[Leaf], given: Sequence[Tensor]) -> None:
    """Refuse inputs that a gradient is wanted of: what made them would get none, and never learn."""
    for leaf, x in zip(leaves, given, strict=True):
        if x.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                f"{model} was called with {leaf.name} of shape {tuple(x.shape)}, of which a gradient is wanted. A step "
                f"in micro-batches gives gradients to its parameters only, so what made this input would never learn. "
                f"Give {leaf.name}.detach(), make what made it part of the model, or take a plan without micro-batches."
            )


def names_read(graph: Graph) -> frozenset[str]:
    """The names of leaves that something is computed with: others have no gradient, and their hooks are not called."""
    read = (leaf for leaf in graph.leaves if graph.users.get(Value(leaf)))
    return frozenset(name for leaf in read for name in (leaf.name, *leaf.aliases))


State = list[Tensor | None]
"""What is kept between steps, leaf by leaf; then what was made of it for a step."""


@dataclass(frozen=True, slots=True)
class Computing:
    """What a rank does in a step in micro-batches."""

    make_once: Callable[[State], StepValues]
    """What is made of parameters alone."""
    loss: Callable[[State, list[Tensor]], Tensor]
    """Of a micro-batch, from the state and what was made of it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one micro-batch after the other does: the loss of the batch, and the gradients of the parameters."""

    computing: Computing
    batches: Sequence[list[Tensor]]
    """The inputs of every micro-batch."""
    state: State
    parameters: Mapping[Leaf, Tensor]
    bundles: Sequence[Bundle]
    again: Callable[[Callable[[], Any]], Any]
    """Calls something as the run was called at first: with the same draws, under the same autocast."""
    forget: Callable[[], None]
    """Lets go of what micro-batches have in common."""

    def forward_only(self) -> Tensor:
        self.forget()  # what is left of a step that failed
        state = [*self.state, *self.computing.make_once(self.state).read()]
        total = functools.reduce(operator.add, (self.computing.loss(state, inputs) for inputs in self.batches))
        self.forget()
        return total

    def forward_and_backward(self, scale: float) -> tuple[Tensor, Gradients]:
        """The loss, and the gradients of the scaled loss: what is scaled only after it was rounded is lost."""
        self.forget()  # what is left of a step that failed
        total: Tensor | None = None
        own, made = list(self.parameters.values()), self.computing.make_once(self.state)
        take_gradients(own)  # what is left of a step that failed
        for inputs in self.batches:
            loss = self.computing.loss([*self.state, *made.read()], inputs)
            total = loss.detach() if total is None else total + loss.detach()
            add_gradients((loss,), (torch.full_like(loss, scale),), own, made.trained)
            made.add(take_gradients(made.trained))
            del loss
        assert total is not None
        add_to(own, made.take_back(own))
        sum_put_off(self.bundles, self.parameters)
        self.forget()
        return total, take_gradients(own)


def sum_put_off(bundles: Sequence[Bundle], parameters: Mapping[Leaf, Tensor]) -> None:
    """Sum over the ranks what bundles have put off, and add it to the gradients of parameters; others are frozen."""
    started = [(bundle, bundle.sum_up()) for bundle in bundles if bundle.defers]
    for bundle, found in started:
        if found is not None:
            found[0].wait()
            for leaf, gradient in zip(bundle.leaves, found[1], strict=True):
                if leaf in parameters:
                    own = parameters[leaf]
                    own.grad = gradient if own.grad is None else own.grad + gradient


class Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, scaling: Scaling, at_once: bool, *parameters: Tensor) -> Tensor:
        """The loss; gradients are made with it, or where they are hardly ever wanted only when somebody does."""
        ctx.run, ctx.scaling, ctx.scale, ctx.gradients = run, scaling, scaling.expected, None
        if at_once:
            with torch.enable_grad():
                total, ctx.gradients = run.forward_and_backward(ctx.scale)
        else:
            total = run.forward_only()
        ctx.save_for_backward(total)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        _ = ctx.saved_tensors  # torch's own error where the graph was not retained
        gradients, ctx.gradients = ctx.gradients, None
        scale = ctx.scaling.of(incoming[0])
        if gradients is None or scale != ctx.scale:
            gradients = None  # gone before the others are made
            with torch.enable_grad():
                _, gradients = ctx.run.again(partial(ctx.run.forward_and_backward, scale))
        if ctx.scaling.is_exact or (incoming[0].device.type == "cpu" and incoming[0] == 1):
            return None, None, None, *gradients
        made: Gradients = []
        while gradients:  # one after the other, so that not all are there twice
            gradient = gradients.pop(0)
            made.append(None if gradient is None else gradient * incoming[0])
        return None, None, None, *made


class Scaling:
    """By what the loss of a step is scaled, which is known only when its gradients are there.

    Where half precision is used it makes a difference whether gradients are scaled before they are rounded. The steps
    of a training are scaled alike for long: a step expects the scale of the one before, and where it is another one,
    its gradients are made again. In wider dtypes gradients are made unscaled, and scaled when they are handed out.
    """

    def __init__(self, is_exact: bool) -> None:
        self.is_exact = is_exact
        self.expected = 1.0

    def of(self, incoming: Tensor) -> float:
        """The scale that the gradients of a step are to be made with."""
        if not self.is_exact:
            return 1.0
        scale = float(incoming)
        if isfinite(scale) and scale:
            self.expected = scale
        return scale


class Accumulator:
    """The steps of a module in micro-batches."""

    def __init__(
        self,
        plan: Plan,
        micro: MicroBatches,
        bundles: Sequence[Bundle],
        streams: Streams,
        forget: Callable[[], None],
    ) -> None:
        self.micro, self._bundles, self._streams, self._forget = micro, bundles, streams, forget
        self._read = names_read(plan.graph)
        types = [leaf.type for leaf in plan.graph.leaves] + [t for node in plan.graph.nodes for t in node.types]
        self._is_narrow = any(type.dtype in NARROW for type in types)
        self._scalings = {is_exact: Scaling(is_exact) for is_exact in (False, True)}
        for bundle in bundles:
            bundle.defer()

    def loss(
        self,
        batches: Sequence[list[Tensor]],
        state: Mapping[Leaf, Tensor | None],
        computing: Computing,
        kind: str,
    ) -> Tensor:
        """The loss of a step on a kind of device; its backward pass gives the parameters their gradients."""
        trained = ((leaf, x) for leaf, x in state.items() if x is not None and x.requires_grad)
        parameters = {leaf: x for leaf, x in trained if leaf.name in self._read}
        # micro-batches have gradients of aliases: hooks of the parameters are for those of the step
        own = {leaf: x.detach().requires_grad_() for leaf, x in parameters.items()}
        again, kept = self._as_now(tuple(parameters.values()), kind), [*{**state, **own}.values()]
        run = Run(computing, batches, kept, own, self._bundles, again, self._forget)
        if not torch.is_grad_enabled() or not parameters:
            return run.forward_only()
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in NARROW
        scaling = self._scalings[self._is_narrow or casts]
        return Accumulated.apply(run, scaling, True, *parameters.values())  # type: ignore[no-any-return, no-untyped-call]

    def _as_now(self, parameters: Sequence[Tensor], kind: str) -> Callable[[Callable[[], Any]], Any]:
        """Calls something later as if it were called now."""
        drawn, versions = self._streams.states(), [x._version for x in parameters]
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def call(action: Callable[[], Any]) -> Any:
            if versions != [x._version for x in parameters]:
                raise RuntimeError(
                    "A parameter was changed between a forward pass in micro-batches and a backward pass that runs it "
                    "again. The gradient would be that of another model. Call backward before the optimizer's step."
                )
            with torch.autocast(kind, dtype, enabled):
                return self._streams.rerun(drawn, action)

        return call
