"""A stage on one rank: its program run for one micro-batch after the other, forward and backward, whenever asked.

What arrives from other stages is cut off from their autograd graphs; a backward pass starts from the gradients of what
leaves, and gives those of what arrived. Gradients of parameters are added up; those that all ranks of the stage hold
are summed over them once, after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conjoin.ir import LeafKind, Stage
from conjoin.runtime.pipelines.split_backward import SplitBackward
from conjoin.runtime.program.accumulation import sum_put_off
from conjoin.runtime.program.gradient_sums import add_gradients, add_to, take_gradients
from conjoin.runtime.program.rank_program import LocalProgram
from conjoin.runtime.program.step_values import Gradients, StepValues


@dataclass(slots=True)
class _Pass:
    """A micro-batch between its forward and its backward pass."""

    arrived: dict[str, Tensor]
    """Inputs from other stages that a gradient is asked of."""
    outputs: list[Tensor]


@dataclass
class StageRun:
    """The passes of one step through a stage."""

    stage: Stage
    program: LocalProgram
    lent: Mapping[str, Tensor] = field(default_factory=dict)
    """The pieces of parameters that are borrowed, as they are in this step."""

    def __post_init__(self) -> None:
        program = self.program
        held = dict(zip(program.kept, self._pieces(), strict=True))
        trained = {leaf: x for leaf, x in held.items() if x is not None and leaf.trainable and x.requires_grad}
        self.parameters = {leaf: x.detach().requires_grad_() for leaf, x in trained.items()}
        """Aliases of this step alone, in whose `grad` the gradients of its micro-batches are added up."""
        self._state = [self.parameters.get(leaf, x) for leaf, x in held.items()]
        self._inputs = program.plan.graph.leaves_of(LeafKind.INPUT)
        self.gradients: Gradients = []
        """Of the parameters, when the step has come to its end."""
        self._passes: dict[int, _Pass] = {}
        self._values: StepValues | None = None
        program.forget()  # what is left of a step that failed

    def _pieces(self) -> list[Tensor | None]:
        """What is kept between steps, and what is borrowed."""
        found = self.program.pieces()
        for place, leaf in enumerate(self.program.kept):
            if leaf.name in self.lent and leaf.kind is LeafKind.PARAMETER:
                found[place] = self.lent[leaf.name].requires_grad_(leaf.trainable)
        return found

    def _kept(self) -> list[Tensor | None]:
        """What is kept between steps, with the aliases in the place of parameters: the same in all passes, but for
        buffers that they change."""
        if self.program.plan.graph.updates:
            self._state = [
                self.parameters.get(leaf, x) for leaf, x in zip(self.program.kept, self._pieces(), strict=True)
            ]
        return self._state

    def forward(self, micro_batch: int, inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """The outputs of a micro-batch on this rank, from its inputs by their names."""
        arrived: dict[str, Tensor] = {}
        given: list[Tensor] = []
        for leaf in self._inputs:
            x = inputs[leaf.name]
            if leaf.trainable and torch.is_grad_enabled():
                x = arrived[leaf.name] = x.detach().requires_grad_()
            given.append(x)
        state = self._kept()
        if self._values is None:
            self._values = self.program.make_once(state)
        outputs = self.program.run(given, [*state, *self._values.read()])
        if torch.is_grad_enabled():
            self._passes[micro_batch] = _Pass(arrived, outputs)
        return outputs

    def backward(self, micro_batch: int, incoming: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The gradients of what arrived, from those of what left by their places among the outputs."""
        made = self._passes.pop(micro_batch)
        parameters, arrived = list(self.parameters.values()), list(made.arrived.values())
        values = self._made_once()
        ends = self._ends(made, incoming)
        if ends and (parameters or values or arrived):
            outputs, gradients = zip(*ends, strict=True)
            add_gradients(outputs, gradients, parameters, [*values, *arrived])
            self._add_made_once()
        return self._all_there(made, dict(zip(made.arrived, take_gradients(arrived), strict=True)))

    def _made_once(self) -> list[Tensor]:
        """What is made of parameters, and given gradients as they are."""
        return [] if self._values is None else self._values.trained

    def _add_made_once(self) -> None:
        if self._values is not None:
            self._values.add(take_gradients(self._values.trained))

    def input_gradient(self, micro_batch: int, incoming: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The gradients of what arrived alone; those of parameters are made later, unless the backward pass makes
        something again."""
        if self.program.makes_again:
            return self.backward(micro_batch, incoming)
        made = self._passes.pop(micro_batch)
        ends = self._ends(made, incoming)
        if not ends:
            return self._all_there(made, dict.fromkeys(made.arrived))
        outputs, gradients = zip(*ends, strict=True)
        split = self._put_off[micro_batch] = SplitBackward(outputs, gradients, list(made.arrived.values()))
        return self._all_there(made, dict(zip(made.arrived, split.input_gradients(), strict=True)))

    def weight_gradient(self, micro_batch: int) -> None:
        """The gradients of parameters of a micro-batch whose input gradients are made."""
        split = self._put_off.pop(micro_batch, None)
        if split is not None:
            split.add_weight_gradients(list(self.parameters.values()), self._made_once())
            self._add_made_once()

    _put_off: dict[int, SplitBackward] = field(default_factory=dict)
    """By micro-batch, the passes whose weight gradients are still to be made."""

    @staticmethod
    def _ends(made: _Pass, incoming: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What a backward pass starts from, each with its gradient."""
        ends = [(made.outputs[place], gradient) for place, gradient in incoming.items()]
        return [(output, gradient.to(output.dtype)) for output, gradient in ends if output.requires_grad]

    @staticmethod
    def _all_there(made: _Pass, found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Who gets no gradient gets zeros: the other end waits for them."""
        return {name: torch.zeros_like(made.arrived[name]) if x is None else x for name, x in found.items()}

    def abandon(self) -> None:
        """Let go of all that the step has made here."""
        self._passes.clear()
        self._put_off.clear()
        take_gradients(self.parameters.values())
        self._values = None

    def sum_up(self) -> None:
        """Sum over the ranks of the stage what was put off, and take back what came to what is made of parameters."""
        if self._values is not None:
            parameters = list(self.parameters.values())
            add_to(parameters, self._values.take_back(parameters))
            self._values = None
        sum_put_off(self.program.bundles, self.parameters)
        self.gradients = take_gradients(self.parameters.values())
        self.program.forget()
