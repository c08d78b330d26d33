"""One rank's part of a pipeline as an `nn.Module`: calling it runs the whole schedule of a step.

To its user it is a module like any other: the loss comes out, `backward` hands out the gradients that the schedule has
made, any optimizer takes them. Parameters are those of this rank's stages, under the user's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.comm import Held
from conjoin.errors import UsageError
from conjoin.ir import (
    Leaf,
    LeafKind,
    Node,
    Pipeline,
    Region,
    Value,
    calling_graph,
    is_random,
    region_of,
    region_shape,
    sequential,
)
from conjoin.ops import Layout, drawing, find_function, map_tensors, spread_args
from conjoin.runtime.accumulating import NARROW, Accumulated, Gradients, MicroBatches, Scaling
from conjoin.runtime.calling import Calling
from conjoin.runtime.communicator import World
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.randomness import Place, Stream
from conjoin.runtime.schedule_runs import Links, ScheduleRun
from conjoin.runtime.stage_runs import StageRun
from conjoin.runtime.stage_transfers import Crossing
from conjoin.runtime.storage import Store
from conjoin.schedules import Kind


class StageStores:
    """What a rank keeps between steps: the pieces of its stages, in one tree of modules."""

    def __init__(self, pipeline: Pipeline, rank: int, device: torch.device) -> None:
        self.root = nn.Module()
        self.device = device
        self.pipeline = pipeline
        self.by_stage = {
            i: Store(stage.plan, stage.ranks.index(rank), device, self.root)
            for i, stage in enumerate(pipeline.stages)
            if rank in stage.ranks
        }
        self._stage_of = _homes(pipeline)

    def fill(self, model: nn.Module) -> None:
        """Take this rank's pieces out of a model that is there as a whole."""
        for i, store in self.by_stage.items():
            store.check(model)
            store.place(model, store.cut, partial(self._is_held, i))
            store.keep_constants(model)

    def _is_held(self, stage: int, name: str) -> bool:
        """Whether a parameter or buffer lies with a stage; what no stage reads lies with the first."""
        return stage in self._stage_of.get(name, (0,))

    def store_of(self, name: str) -> Store | None:
        """The store of this rank that holds a parameter or buffer; None where others do."""
        return next((store for i, store in self.by_stage.items() if self._is_held(i, name)), None)

    def parameters(self) -> Iterator[tuple[nn.Parameter, Layout, Store]]:
        """Every parameter of this rank once, with the layout in which it is stored, and its store."""
        for name, parameter in self.root.named_parameters():
            store = self.store_of(name)
            assert store is not None
            yield parameter, store.layout(name), store


def _homes(pipeline: Pipeline) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter (one) and each buffer (all that read it), by every name."""
    found: dict[str, tuple[int, ...]] = {}
    for i, stage in enumerate(pipeline.stages):
        for leaf in stage.plan.graph.leaves:
            if leaf.kind in (LeafKind.PARAMETER, LeafKind.BUFFER) and leaf.name not in stage.borrowed:
                for name in (leaf.name, *leaf.aliases):
                    found[name] = (*found.get(name, ()), i)
    return found


class PipelineModule(nn.Module):
    """A pipeline on this rank. Parameters and buffers have the user's names and this rank's shapes."""

    def __init__(self, pipeline: Pipeline, stores: StageStores, world: World, exact_seed: int | None = None) -> None:
        super().__init__()
        self.training = pipeline.graph.training
        world.prepare(world.mesh.names)
        links = Links.of(pipeline, world)
        stages = {
            i: ParallelModule(
                pipeline.stages[i].plan,
                store,
                world.among(pipeline.stages[i].plan.mesh, pipeline.stages[i].ranks),
                exact_seed,
                is_stage=True,
            )
            for i, store in stores.by_stage.items()
        }
        called = pipeline.graph
        if pipeline.accumulation is not None:
            called = calling_graph(pipeline.graph, pipeline.accumulation)
        self.__dict__.update(
            plan=pipeline,
            communicator=world,
            stores=stores,
            _links=links,
            _stages=stages,
            _calling=Calling(called),
            _taken=called.leaves_of(LeafKind.INPUT),
            _loans=_Loans(pipeline, world),
            _draws=_Draws(pipeline, exact_seed),
            _scaling=Scaling(any(t.dtype in NARROW for n in pipeline.graph.nodes for t in n.types)),
        )
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = stores.root.__dict__[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the schedule: forward and backward where gradients are wanted; the loss is that of the batch."""
        given = dict(zip([leaf.name for leaf in self._taken], self._calling.arrange(args, kwargs), strict=True))
        inputs = {i: _cut(self.plan, module, given, i, self._draws.is_exact) for i, module in self._stages.items()}
        parameters = [p for p, *_ in self.stores.parameters() if p.requires_grad]
        run = _StepRun(self, inputs, self._draws.begin(), parameters)
        trained = any(leaf.trainable for leaf in self.plan.graph.leaves)
        if not torch.is_grad_enabled() or not trained or not self.plan.graph.training:
            loss = run.forward_only()
        else:
            ends = parameters or [torch.zeros((), device=self.stores.device, requires_grad=True)]
            loss = Accumulated.apply(run, self._scaling, *ends)  # type: ignore[no-untyped-call]
        return self._calling.results([loss if isinstance(value, Value) else value for value in self.plan.graph.outputs])

    plan: Pipeline
    communicator: World
    stores: StageStores
    _links: Links
    _stages: Mapping[int, ParallelModule]
    _calling: Calling
    _taken: tuple[Leaf, ...]
    _loans: _Loans
    _draws: _Draws
    _scaling: Scaling


def _cut(
    pipeline: Pipeline, module: ParallelModule, given: Mapping[str, Tensor], stage: int, in_order: bool
) -> list[dict[str, Tensor]]:
    """A stage's pieces of what it takes of the batch, for every micro-batch."""
    arriving = {arrival.input for arrival in pipeline.stages[stage].arrivals}
    plan, rank, accumulation = module.plan, module.communicator.rank, pipeline.accumulation
    leaves = [leaf for leaf in plan.graph.leaves_of(LeafKind.INPUT) if leaf.name not in arriving]
    if accumulation is None:
        return [{leaf.name: _part(module, leaf, given[leaf.name]) for leaf in leaves}]
    micro = MicroBatches(plan, accumulation, rank, True, leaves)
    sources = dict(accumulation.whole)
    mine = {sources.get(leaf.name, leaf.name): given[sources.get(leaf.name, leaf.name)] for leaf in leaves}
    return [
        dict(zip([leaf.name for leaf in leaves], parts, strict=True)) for parts in micro.of_named(mine)
    ]


def _part(module: ParallelModule, leaf: Leaf, x: Tensor) -> Tensor:
    region: Region = region_of(leaf.type.shape, leaf.type.layout, module.plan.mesh, module.communicator.rank)
    if x.dtype == leaf.type.dtype and tuple(x.shape) == leaf.type.shape:
        return x[tuple(slice(*span) for span in region)]
    if x.dtype == leaf.type.dtype and tuple(x.shape) == region_shape(region):
        return x
    raise UsageError(
        f"The pipeline of {module.plan.model.name} was called with {leaf.name} as {x.dtype} of shape {tuple(x.shape)}. "
        f"It was made for {leaf.type.laid_out(())}. Call it with such a batch, or make the plan again with this one."
    )


class _StepRun:
    """One step on this rank, which may be run again: with another scale, or for a second backward pass."""

    def __init__(
        self,
        module: PipelineModule,
        inputs: Mapping[int, list[dict[str, Tensor]]],
        begin: Callable[[ParallelModule, int, int], None],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._module, self._parameters, self._begin = module, parameters, begin
        count = module.plan.num_micro_batches
        self._inputs = [{stage: parts[m] for stage, parts in inputs.items()} for m in range(count)]

    def again(self, action: Callable[[], Any]) -> Any:
        return action()

    def forward_only(self) -> Tensor:
        with torch.no_grad():
            return self._run(1.0, forward_only=True)[0]

    def forward_and_backward(self, scale: float) -> tuple[Tensor, Gradients]:
        with torch.enable_grad():
            total, stages = self._run(scale, forward_only=False)
        for _, run in sorted(stages.items()):
            run.sum_up()
        module = self._module
        found: dict[int, Tensor | None] = {}
        for i, run in stages.items():
            for leaf, gradient in zip(run.parameters, run.gradients, strict=True):
                if leaf.name not in run.stage.borrowed:
                    found[id(module._stages[i].read(leaf))] = gradient
        for parameter, gradient in module._loans.give_back(stages, module._stages):
            own = found.get(id(parameter))
            found[id(parameter)] = gradient if own is None else own + gradient
        return total, [found.get(id(parameter)) for parameter in self._parameters]

    def _run(self, scale: float, *, forward_only: bool) -> tuple[Tensor, dict[int, StageRun]]:
        module = self._module
        lent = module._loans.take(module._stages)
        stages = {i: StageRun(module.plan.stages[i], m, lent.get(i, {})) for i, m in module._stages.items()}
        run = ScheduleRun(module._links, stages, self._inputs)
        rows = module.plan.schedule.rows[module._links.owner]
        if forward_only:
            rows = tuple(row for row in rows if row.kind is Kind.FORWARD)
        run.run(rows, lambda stage, m: self._begin(module._stages[stage], stage, m), scale)
        return self._share(run.loss), stages

    def _share(self, loss: Tensor | None) -> Tensor:
        """The loss, which one stage has, on all ranks."""
        module, world = self._module, self._module.communicator
        stage = module.plan.stages[module.plan.loss_stage]
        graph = stage.plan.graph
        type = graph.outputs[graph.loss or 0].type  # type: ignore[union-attr] # the loss is a tensor
        mine = loss if loss is not None and world.rank == stage.ranks[0] else None
        told = torch.zeros(type.shape, dtype=torch.float64, device=module.stores.device) if mine is None else mine.double()
        sent = world.bytes_sent
        told = told.clone().view(-1)
        world.all_reduce(told, world.mesh.names).wait()
        world.bytes_sent = sent
        return told.view(type.shape).to(type.dtype)


class _Loans:
    """Parameters that a stage borrows: they come from the stage they belong to, and their gradients go back there."""

    def __init__(self, pipeline: Pipeline, world: World) -> None:
        self._ways: list[tuple[str, int, int, Crossing, Crossing, Any]] = []
        for target, stage in enumerate(pipeline.stages):
            for name in stage.borrowed:
                source = pipeline.owner_of(name)
                lender = pipeline.stages[source]
                have, want = lender.parameter(name).type, stage.parameter(name).type
                ends = Held(have.layout, lender.plan.mesh, lender.ranks), Held(want.layout, stage.plan.mesh, stage.ranks)
                there = Crossing(have.shape, have.dtype, ends, world.rank)
                back = Crossing(have.shape, have.dtype, ends[::-1], world.rank)
                if there.is_sender or there.is_receiver:
                    ranks = tuple(sorted({*lender.ranks, *stage.ranks}))
                    channel = world.channel(f"loan {name} {source}>{target}", ranks)
                    self._ways.append((name, source, target, there, back, channel))

    def take(self, stages: Mapping[int, ParallelModule]) -> dict[int, dict[str, Tensor]]:
        """By stage, the pieces that it borrows for a step."""
        coming, sent = [], []
        for name, source, target, there, _, channel in self._ways:
            if target in stages:
                coming.append((target, name, there.expect(channel, stages[target].store.device)))
            if source in stages:
                piece = stages[source].read(stages[source].leaf(name))
                assert piece is not None
                sent.append(channel.start(there.messages_of(piece), ()))
        found: dict[int, dict[str, Tensor]] = {}
        for target, name, expected in coming:
            found.setdefault(target, {})[name] = expected.wait()
        for parcel in sent:
            parcel.wait()
        return found

    def give_back(
        self, runs: Mapping[int, StageRun], stages: Mapping[int, ParallelModule]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters of this rank that others borrowed, each with the gradient that comes back."""
        coming, sent = [], []
        for name, source, target, _, back, channel in self._ways:
            if source in stages and stages[source].leaf(name).trainable:
                coming.append((source, name, back.expect(channel, stages[source].store.device)))
            if target in stages and stages[target].leaf(name).trainable:
                leaf = stages[target].leaf(name)
                run = runs[target]
                gradient = dict(zip(run.parameters, run.gradients, strict=True))[leaf]
                piece = torch.zeros_like(run.parameters[leaf]) if gradient is None else gradient
                sent.append(channel.start(back.messages_of(piece), ()))
        for source, name, expected in coming:
            parameter = stages[source].read(stages[source].leaf(name))
            assert parameter is not None
            yield parameter, expected.wait()
        for parcel in sent:
            parcel.wait()


class _Draws:
    """The random numbers of a step: for each stage and micro-batch from one number that all ranks draw alike.

    For comparisons, what one device draws that runs one micro-batch after the other.
    """

    def __init__(self, pipeline: Pipeline, exact_seed: int | None) -> None:
        self.is_exact = exact_seed is not None
        self._count = pipeline.num_micro_batches
        self._nodes = [_random_nodes(stage.plan.graph) for stage in pipeline.stages]
        self._stream = Stream()
        if exact_seed is not None:
            self._stream.restart(exact_seed)

    def begin(self) -> Callable[[ParallelModule, int, int], None]:
        """What has a stage draw for a micro-batch of the step that begins."""
        if self.is_exact:
            places = self._places()

            def go_on(module: ParallelModule, stage: int, micro_batch: int) -> None:
                module.streams.go_to(places[micro_batch, stage])

            return go_on
        if not any(self._nodes):
            return lambda module, stage, micro_batch: None
        with drawing:
            base = int(torch.randint(2**52, (), dtype=torch.int64))
        return lambda module, stage, micro_batch: module.streams.restart(f"{base}:{stage}:{micro_batch}")

    def _places(self) -> dict[tuple[int, int], Place]:
        """Where one device's generator stands before each stage of each micro-batch."""
        found: dict[tuple[int, int], Place] = {}
        for micro_batch in range(self._count):
            for stage, nodes in enumerate(self._nodes):
                found[micro_batch, stage] = self._stream.place
                for node in nodes:
                    args = map_tensors(node.op, node.args, lambda v: torch.zeros(v.type.shape, dtype=v.type.dtype))
                    positional, keywords = spread_args(node.op, args, torch.device("cpu"))
                    with torch.no_grad():
                        self._stream.run(find_function(node.op), tuple(positional), keywords)
        return found


def _random_nodes(graph: Any) -> list[Node]:
    return [node for node in sequential(graph).nodes if is_random(node.op, node.args)]
