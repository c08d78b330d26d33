"""A pipeline as it runs on one rank: its stages' programs, and the schedule that a call runs from end to end.

The loss comes out on all ranks; the caller's backward pass hands out the gradients that the schedule has made. Random
draws are those of streams that start anew for every stage and micro-batch, from one number that all ranks draw alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from conjoin.errors import RankError, UsageError
from conjoin.ir import Leaf, LeafKind, Pipeline, Value, calling_graph, pipeline_fingerprint
from conjoin.runtime.pipelines.loans import Loans
from conjoin.runtime.pipelines.pipeline_draws import PipelineDraws, orders_on_arrival
from conjoin.runtime.pipelines.schedule_runs import Links
from conjoin.runtime.pipelines.step_ends import StepEnd
from conjoin.runtime.pipelines.step_runs import StepRun
from conjoin.runtime.program.accumulation import (
    NARROW,
    Accumulated,
    MicroBatches,
    Scaling,
    names_read,
    refuse_input_gradients,
)
from conjoin.runtime.program.call_forms import Calling, InputPart
from conjoin.runtime.program.norms import Group
from conjoin.runtime.program.passes import Passes
from conjoin.runtime.program.randomness import Stream
from conjoin.runtime.program.rank_program import Form, LocalProgram
from conjoin.runtime.program.tensor_cores import TensorCores
from conjoin.runtime.ranks.agreement import Agreement
from conjoin.runtime.ranks.communicator import Communicator, World, uncompiled
from conjoin.runtime.state.storage import Store


class PipelineProgram:
    """What runs the steps of a pipeline on one rank."""

    def __init__(
        self, pipeline: Pipeline, store: Store, world: World, passes: Passes, exact: Stream | None = None
    ) -> None:
        self.plan, self.store, self.communicator, self._passes = pipeline, store, world, passes
        world.prepare(world.mesh.names)
        world.prepare_channels()
        self.links = Links.of(pipeline, world)
        orders = orders_on_arrival(pipeline) if exact is not None else [{} for _ in pipeline.stages]
        self.stages = {
            i: LocalProgram(stage.plan, store, world.among(stage.plan.mesh, stage.ranks), exact, orders[i])
            for i, stage in enumerate(pipeline.stages)
            if world.rank in stage.ranks
        }
        for program in self.stages.values():
            for bundle in program.bundles:
                bundle.defer()
        self.code = "\n".join(f"# stage {i}\n{program.code}" for i, program in self.stages.items())
        named = [(program.communicator, _held(pipeline, i)) for i, program in self.stages.items()]
        self.agreement = Agreement(pipeline, store, world, named)
        called = pipeline.graph
        if pipeline.accumulation is not None:
            called = calling_graph(called, pipeline.accumulation)
        self.calling = Calling(called)
        self.taken = called.leaves_of(LeafKind.INPUT)
        self._inputs, self._read = self.input_parts(), names_read(pipeline.graph)
        self.fingerprint = pipeline_fingerprint(pipeline)
        self.loans = Loans(pipeline, world)
        self.end = StepEnd(pipeline, world, self.stages, store.device)
        self._draws = PipelineDraws(pipeline, exact)
        self._is_narrow = any(type.dtype in NARROW for node in called.nodes for type in node.types)
        self._scalings = {is_exact: Scaling(is_exact) for is_exact in (False, True)}
        self._tensor_cores = TensorCores() if pipeline.graph.rounding.tf32 else None
        self._begin, self._end = uncompiled(self._start), uncompiled(passes.end)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All that the programs of this rank's stages read."""
        return tuple(leaf for program in self.stages.values() for leaf in program.plan.graph.leaves)

    def form_of(self, given: list[Tensor]) -> Form:
        """How inputs came: as a whole, or in shapes that this program does not take."""
        parts = zip(given, self.taken, self._inputs, strict=True)
        same = all(x.dtype == leaf.type.dtype and tuple(x.shape) == part.shape for x, leaf, part in parts)
        return Form.WHOLE if same else Form.OTHER

    def groups(self) -> list[Group]:
        """By stage of this rank, every parameter with its layout, and the ranks that hold it."""
        named = [(self._stage_of(name), name, p) for name, p in self.store.root.named_parameters()]
        return [
            (program.communicator, [(p, self.store.layout(name)) for stage, name, p in named if stage == i])
            for i, program in self.stages.items()
        ]

    def written(self) -> dict[int, tuple[Tensor, ...]]:
        """By stage of this rank, the buffers that a step changes, as they are now."""
        return {i: program.written() for i, program in self.stages.items()}

    def write_back(self, values: Mapping[int, tuple[Tensor, ...]]) -> None:
        """Give these buffers other values."""
        for i, program in self.stages.items():
            program.write_back(values[i])

    def input_parts(self) -> list[InputPart]:
        """Every input in the order of the call; ranks of a pipeline take whole batches."""
        accumulation = self.plan.accumulation
        found = []
        for leaf in self.taken:
            shape = leaf.type.shape
            if accumulation is not None and leaf.name in accumulation.cut:
                shape = (accumulation.steps * shape[0], *shape[1:])
            found.append(InputPart(leaf.name, shape, tuple((0, size) for size in shape), leaf.type.dtype))
        return found

    def members(self, name: str) -> Communicator | None:
        """Who holds a parameter or buffer; None where this rank has no part in it."""
        stage = self._stage_of(name)
        return self.stages[stage].communicator if stage in self.stages else None

    def speaker(self, name: str) -> int:
        """The rank that tells all others of a parameter or buffer."""
        return self.plan.stages[self._stage_of(name)].ranks[0]

    def _stage_of(self, name: str) -> int:
        """The first stage that holds a parameter or buffer; what nobody reads lies with the first of all."""
        return next((i for i in range(len(self.plan.stages)) if name in _held(self.plan, i)), 0)

    @property
    def draws_alike(self) -> bool:
        """Whether some ranks have to draw the same random numbers: all take the number they start from."""
        return self._draws.any

    def _start(self) -> None:
        self._passes.begin(self.agreement)

    def step(self, given: list[Tensor]) -> Any:
        """A step by the schedule: forward and backward where gradients are wanted; the loss is that of the batch."""
        if self.end.is_under_way:
            raise RankError(
                f"A step of the pipeline of {self.plan.model.name} was begun after one that failed in its middle. What "
                f"stages had sent each other is still under way, and would be taken for this step's. Start again from "
                f"the last checkpoint."
            )
        self._check_given(given)
        refuse_input_gradients(self.plan.model.name, self.taken, given)
        self._begin()
        named = dict(zip([leaf.name for leaf in self.taken], given, strict=True))
        inputs = {i: self._cut(i, program, named) for i, program in self.stages.items()}
        read = (parameter for name, parameter in self.store.root.named_parameters() if name in self._read)
        parameters = [parameter for parameter in read if parameter.requires_grad]
        before = self._draws.place
        run = StepRun(self, inputs, self._draws.begin(self.stages), parameters)
        try:
            loss = self._loss(run, parameters)
        except Exception:  # nothing of the step is left
            self.write_back(run.written)
            self._draws.go_to(before)
            raise
        outputs = [loss if isinstance(value, Value) else value for value in self.plan.graph.outputs]
        self._end(dict(zip(self.taken, given, strict=True)), outputs, self.plan.graph.loss)
        return self.calling.results(outputs)

    def _loss(self, run: StepRun, parameters: Sequence[Tensor]) -> Tensor:
        graph = self.plan.graph
        if not torch.is_grad_enabled() or not any(leaf.trainable for leaf in graph.leaves):
            return run.forward_only()
        # a rank that has nothing to learn takes part in the backward pass all the same
        ends = parameters or [torch.zeros((), device=self.store.device, requires_grad=True)]
        scaling = self._scalings[self._is_narrow or run.casts in NARROW]
        with nullcontext() if self._tensor_cores is None else self._tensor_cores.forward():
            return Accumulated.apply(run, scaling, graph.training, *ends)  # type: ignore[no-any-return, no-untyped-call]

    def _cut(self, stage: int, program: LocalProgram, given: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """A stage's pieces of what it takes of the batch, for every micro-batch."""
        arriving = {arrival.input for arrival in self.plan.stages[stage].arrivals}
        leaves = [leaf for leaf in program.plan.graph.leaves_of(LeafKind.INPUT) if leaf.name not in arriving]
        for leaf in leaves:
            self._check_device(leaf, given)
        micro = MicroBatches(program.plan, self.plan.accumulation, program.communicator.rank, True, leaves)
        return [dict(zip([leaf.name for leaf in leaves], parts, strict=True)) for parts in micro.of_named(given)]

    def _check_given(self, given: list[Tensor]) -> None:
        """Refuse a batch of another shape, whichever stage would take it."""
        for x, leaf, part in zip(given, self.taken, self._inputs, strict=True):
            if x.dtype != leaf.type.dtype or tuple(x.shape) != part.shape:
                raise self.calling.refusal(
                    f"{leaf.name} is {leaf.type.dtype} of shape {part.shape}, and {x.dtype} of shape "
                    f"{tuple(x.shape)} came; all ranks of a pipeline take whole batches, here of "
                    f"{self.plan.num_micro_batches} micro-batches"
                )

    def _check_device(self, leaf: Leaf, given: Mapping[str, Tensor]) -> None:
        x, device = given.get(leaf.name), self.store.device
        if x is not None and (x.device.type != device.type or device.index not in (None, x.device.index)):
            raise UsageError(
                f"{self.plan.model.name} was called with {leaf.name} on {x.device}. Its weights are on {device}. "
                f"Move the batch there, as by {leaf.name}.to({str(device)!r}), or load the plan with "
                f"device={str(x.device)!r}."
            )


def _held(pipeline: Pipeline, stage: int) -> frozenset[str]:
    """The parameters and buffers that a stage reads and does not borrow, under all their names."""
    found = pipeline.stages[stage]
    kinds = (LeafKind.PARAMETER, LeafKind.BUFFER)
    leaves = (leaf for leaf in found.plan.graph.leaves if leaf.kind in kinds and leaf.name not in found.borrowed)
    return frozenset(name for leaf in leaves for name in leaf.names)
