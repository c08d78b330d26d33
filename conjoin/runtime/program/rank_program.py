"""A plan as it runs on one rank: its generated program, over pieces that programs of other shapes may share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from conjoin.comm import ROWS, Chunking, halo_of, makes_again, recomputed, ring_members, ring_of, routing_of
from conjoin.errors import UsageError
from conjoin.ir import (
    HostReader,
    Leaf,
    LeafKind,
    Node,
    Plan,
    Region,
    RegionMove,
    Value,
    calling_graph,
    host_inputs,
    host_readers,
    offloaded_tensors,
    operators_of,
    origin,
    place,
    plan_fingerprint,
    regathered_parameters,
    region_of,
    region_shape,
)
from conjoin.ops import ON_DEVICE, AlongEdges, Layout, find_function
from conjoin.runtime.movement.bundles import Bundle, Dropping, make_bundles
from conjoin.runtime.movement.carriers import carry_move, carry_reshard, prepare_move
from conjoin.runtime.movement.chunked_products import Product, carry_chunked
from conjoin.runtime.movement.edge_blocks import EdgeBlocks
from conjoin.runtime.movement.halo import HaloCarrier, along_edges
from conjoin.runtime.movement.host_blocks import RowCall
from conjoin.runtime.movement.host_copies import Engines
from conjoin.runtime.movement.ring_attention import carry_ring
from conjoin.runtime.movement.routing import carry_routing
from conjoin.runtime.program.accumulation import Accumulator, Computing, MicroBatches, refuse_input_gradients
from conjoin.runtime.program.call_forms import Calling, InputPart
from conjoin.runtime.program.emission import emit_program
from conjoin.runtime.program.failed_calls import add_call
from conjoin.runtime.program.functions import Function
from conjoin.runtime.program.norms import Group
from conjoin.runtime.program.part_runs import InMicroBatches
from conjoin.runtime.program.passes import Passes
from conjoin.runtime.program.programs import Compiled, Emitted, Program, compile_text
from conjoin.runtime.program.randomness import Stream, Streams
from conjoin.runtime.program.recompute import Again, Fold, fold_segments
from conjoin.runtime.program.split_outputs import SplitOutputs
from conjoin.runtime.program.step_values import StepValues
from conjoin.runtime.program.tensor_cores import TensorCores
from conjoin.runtime.program.tensors_on_host import Offloading
from conjoin.runtime.ranks.agreement import Agreement
from conjoin.runtime.ranks.communicator import Communicator, uncompiled
from conjoin.runtime.state.blocks import Sections
from conjoin.runtime.state.slots import read_slot
from conjoin.runtime.state.storage import Store
from conjoin.runtime.torch_private import leave_uncompiled


class _RankCarriers:
    """What the emitter asks for, for one rank of a plan."""

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        exact: Stream | None,
        device: torch.device,
        arriving: Mapping[str, tuple[int, ...]] | None,
    ) -> None:
        self.arriving = arriving or {}
        self.mesh, self.rank = communicator.mesh, communicator.rank
        self._communicator, self.chunks = communicator, plan.chunks
        self._halos = HaloCarrier(communicator)
        self.regathered = regathered_parameters(plan)
        self.dropping = Dropping() if self.regathered else None
        self.bundles = make_bundles(plan, communicator, self.dropping)
        self.streams = Streams(communicator, exact, is_stage=arriving is not None)
        operators, tensors = operators_of(plan.graph), offloaded_tensors(plan)
        self.offloading = Offloading(device) if tensors else None
        self.offloaded: dict[Value, Function] = {}
        """What tells of each tensor that is to lie on the host."""
        if self.offloading is not None:
            tell = uncompiled(self.offloading.note)
            self.offloaded = {tuple(operators[place].outputs())[i]: tell for place, i in tensors}
        readers = host_readers(plan.graph, host_inputs(plan))
        engines = Engines(device) if readers else None
        self._along: dict[Node, AlongEdges] = {
            node: EdgeBlocks(engines) for node, reader in readers.items() if engines and reader.is_by_edges
        }
        """What goes along edges that lie on the host."""
        self.streamed = {node: self._by_blocks(node, reader, engines) for node, reader in readers.items() if engines}
        """What runs each operator that reads inputs from the host."""
        self._by_entry = {entry: bundle for bundle in self.bundles for entry in bundle.entries}

    def reshard(self, value: Value, target: Layout) -> Function:
        return carry_reshard(value.type.shape, value.type.layout, target, self._communicator)

    def move(self, move: RegionMove) -> Function:
        return carry_move(move, self._communicator)

    def prepare(self, move: RegionMove) -> None:
        prepare_move(move, self._communicator)

    def among_ranks(self, node: Node) -> Function | None:
        placed = place(node, self.mesh)
        ring, routing = ring_of(node, placed, self.mesh), routing_of(node, placed, self.mesh, self.rank)
        if ring is not None:
            return carry_ring(ring, ring_members(node, placed, self.mesh, self.rank), self._communicator)
        if routing is not None:
            return carry_routing(routing, self._communicator)
        halo = halo_of(node, placed, self.mesh, self.rank)
        return None if halo is None else self._halos.carry(node.op, halo, self._along.get(node, ON_DEVICE))

    def _by_blocks(self, node: Node, reader: HostReader, engines: Engines) -> Function:
        if reader.is_by_edges:
            return along_edges(node.op, self._along[node])
        return uncompiled(RowCall(find_function(node.op), reader, engines).__call__)

    def bundle(self, root: Value, layout: Layout) -> Bundle | None:
        return self._by_entry.get((root, layout))

    def draw(self, function: Function, axes: tuple[str, ...]) -> Function:
        return self.streams.draw(function, axes)

    def chunked(self, node: Node, chunking: Chunking, layouts: tuple[Layout | None, Layout | None]) -> Function:
        (own, target), read, made = layouts, node.inputs[ROWS[node.op]], Value(node)
        before = None if own is None else self.reshard(origin(read), read.type.layout)
        after = None if target is None else self.reshard(made, target)
        product = Product(node.op, find_function(node.op))
        return carry_chunked(product, chunking, (before, after), self._communicator, node.pinned)

    def draws_whole(self) -> bool:
        return self.streams.exact


def _compile(carriers: _RankCarriers, program: fx.Graph, name: str) -> tuple[Compiled, str]:
    """A rank's program and its text; each segment that is run again in the backward pass is a function before it."""
    texts: list[str] = []

    def compile_segment(fold: Fold) -> Function:
        if fold.number < 0:
            function, text = compile_text(fold.program, f"{name} part {-fold.number}")
            texts.append(f"# part {-fold.number}, which runs in {fold.count} micro-batches\n{text}")
            part = InMicroBatches(partial(function, None), carriers.streams, fold.count, fold.cut, fold.joined)
            return uncompiled(part.__call__)
        function, text = compile_text(fold.program, f"{name} segment {fold.number}")
        texts.append(f"# segment {fold.number}, which the backward pass runs again\n{text}")
        return uncompiled(Again(partial(function, None), carriers.streams, carriers.offloading).__call__)

    compiled, text = compile_text(fold_segments(program, compile_segment), name)
    return compiled, "\n".join((*texts, text))


class LocalProgram:
    """The generated program of a plan, or of a stage, over this rank's pieces."""

    code: str
    """The generated forward as Python text."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        communicator: Communicator,
        exact: Stream | None = None,
        arriving: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """For a stage `arriving` says how its inputs lie in memory on one device that come from others."""
        is_stage = arriving is not None
        self.plan, self.store, self.communicator = plan, store, communicator
        self.carriers = _RankCarriers(plan, communicator, exact, store.device, arriving)
        self.kept = tuple(leaf for leaf in plan.graph.leaves if leaf.kind is not LeafKind.INPUT)
        """What is there between steps: parameters, buffers and constants."""
        self._frozen = [leaf for leaf in plan.graph.leaves_of(LeafKind.PARAMETER) if not leaf.trainable]
        self.fingerprint = plan_fingerprint(plan)
        name = f"{plan.graph.name} {self.fingerprint[:12]} @{communicator.rank}"
        once = plan.accumulation is None and not is_stage
        emitted = emit_program(plan.graph, self.kept, self.carriers, recomputed(plan), once=once, apart=is_stage)
        self._program = Program(emitted, name, partial(_compile, self.carriers))
        self._making = None if emitted.once is None else Program(Emitted(emitted.once, None), f"{name} once a step")
        self._casts = emitted.casts
        self.code = self._program.code
        self._slots = {leaf: store.slot(leaf) for leaf in self.kept}
        self._kept_slots = tuple(self._slots.values())  # compiled code would look at every field of every leaf again
        held = [region_of(x.type.shape, x.type.layout, plan.mesh, communicator.rank) for x in self.kept]
        self._sections = Sections(self.kept, [region_shape(region) for region in held])
        buffers = {leaf.name: leaf for leaf in plan.graph.leaves_of(LeafKind.BUFFER)}
        self._targets = tuple(store.slots_of_buffer(buffers[name]) for name, _ in plan.graph.updates)
        self.makes_again = makes_again(plan)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        return self.carriers.bundles

    @property
    def streams(self) -> Streams:
        return self.carriers.streams

    def forget(self) -> None:
        """Of a step in micro-batches that is over, or has failed, let go of what they had in common."""
        for bundle in self.bundles:
            bundle.forget_put_off()

    def drop(self) -> None:
        """Of a step that ranks have left together, let go of what is under way, too."""
        for bundle in self.bundles:
            bundle.drop()

    def held(self, leaf: Leaf) -> Tensor | None:
        """What is kept between steps of a leaf on this rank, or of the packed weight that it is a section of."""
        return self.store.read(self._slots[leaf], self.store.device)

    def pieces(self) -> list[Tensor | None]:
        """This rank's pieces of all that is kept between steps, leaf by leaf."""
        return self._sections.cut([self.store.read(slot, self.store.device) for slot in self._kept_slots])

    @leave_uncompiled
    def state(self) -> list[Tensor | None]:
        """This rank's pieces of all that is kept between steps."""
        for leaf in self._frozen if torch.is_grad_enabled() else ():
            held = self.held(leaf)
            if held is not None and held.requires_grad:
                raise UsageError(
                    f"{leaf.names[0]} is to be trained, and was frozen when the plan was made. A plan has no gradients "
                    f"for what is frozen, so that it would stay as it is. Make a plan of the model with "
                    f"requires_grad=True there, load it, and go on from a checkpoint of this one."
                )
        return self.pieces()

    def make_once(self, state: list[Tensor | None]) -> StepValues:
        """What is made of parameters alone, from this rank's pieces; it stands after them in the state of a run."""
        if self._making is None:
            return StepValues()
        made = self._making(self, state, self.store.device)
        count = len(made) - len(self._casts)
        return StepValues(made[:count], dict(zip(self._casts, made[count:], strict=True)))

    @leave_uncompiled
    def results(self, inputs: list[Tensor], state: list[Tensor | None]) -> tuple[Any, ...]:
        """The outputs on this rank from its pieces of everything, then the new values of buffers."""
        try:
            with self._keeping([*state, *inputs]):
                made: tuple[Any, ...] = self._program(self, state, self.store.device, *inputs)
        except Exception as error:
            add_call(error)
            raise
        return made

    @leave_uncompiled
    def run(self, inputs: list[Tensor], state: list[Tensor | None]) -> list[Any]:
        """The outputs on this rank; buffers have their new values."""
        made, count = self.results(inputs, state), len(self.plan.graph.outputs)
        self.write_back(made[count:])
        return list(made[:count])

    def _keeping(self, given: Sequence[Tensor | None]) -> AbstractContextManager[None]:
        """Of what autograd keeps, drop gathered parameters where the plan says so: backward gathers them again; and
        have on the host what the plan says."""
        dropping, offloading = self.carriers.dropping, self.carriers.offloading
        if not torch.is_grad_enabled() or (dropping is None and offloading is None):
            return nullcontext()
        return self._hooked(given)

    @contextmanager
    def _hooked(self, given: Sequence[Tensor | None]) -> Iterator[None]:
        dropping, offloading = self.carriers.dropping, self.carriers.offloading
        with ExitStack() as stack:
            if offloading is not None:
                stack.enter_context(offloading.running(given))
                stack.enter_context(dropping.hooks(offloading) if dropping is not None else offloading.hooks())
            elif dropping is not None:
                stack.enter_context(dropping.hooks())
            yield

    def written(self) -> tuple[Tensor, ...]:
        """The buffers that a step changes, as they are now."""
        held = (read_slot(slots[0]) for slots in self._targets)
        return tuple(buffer for buffer in held if buffer is not None)

    def write_back(self, values: tuple[Tensor, ...]) -> None:
        """Give buffers their new values, unless written over: as new tensors, as gradients may need the old ones."""
        for slots, value in zip(self._targets, values, strict=True):
            if value is read_slot(slots[0]):
                continue
            made = value.detach()
            for module, name in slots:
                module._buffers[name] = made


class Form(Enum):
    """How the inputs of a step came to a rank."""

    WHOLE = "whole"
    PARTS = "parts"
    OTHER = "of another shape"


class RankProgram:
    """What runs the steps of one plan on one rank."""

    def __init__(
        self, plan: Plan, store: Store, communicator: Communicator, passes: Passes, exact: Stream | None = None
    ) -> None:
        self.plan, self.store, self.communicator, self._passes = plan, store, communicator, passes
        self.local = LocalProgram(plan, store, communicator, exact)
        self.code, self.fingerprint = self.local.code, self.local.fingerprint
        self.agreement = Agreement(plan, store, communicator)
        accumulation, self._accumulator, called = plan.accumulation, None, plan.graph
        if accumulation is not None:
            called = calling_graph(plan.graph, accumulation)
            micro = MicroBatches(plan, accumulation, communicator.rank, in_order=exact is not None)
            self._accumulator = Accumulator(plan, micro, self.local.bundles, self.local.streams, self.local.forget)
        self.calling, self._on_host = Calling(called), host_inputs(plan)
        self.taken = called.leaves_of(LeafKind.INPUT)
        self._tensor_cores = TensorCores() if plan.graph.rounding.tf32 else None
        self._regions = tuple(self._region(leaf, leaf.type.shape) for leaf in plan.graph.leaves_of(LeafKind.INPUT))
        self._shapes = tuple(self._shapes_of(leaf) for leaf in self.taken)
        self._begin, self._end = uncompiled(self._start), uncompiled(passes.end)
        self._split_outputs = SplitOutputs(plan.graph, communicator)
        self._marked_results = uncompiled(self._mark)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All that the program reads."""
        return self.plan.graph.leaves

    def groups(self) -> list[Group]:
        """Every parameter with its layout, and the ranks that hold it."""
        return [(self.communicator, list(self.store.parameters()))]

    def input_parts(self) -> list[InputPart]:
        """Every input in the order of the call, with the part of it that is enough on this rank."""
        if self._accumulator is not None:
            return self._accumulator.micro.parts()
        taken = zip(self.taken, self._regions, strict=True)
        return [
            InputPart(leaf.name, leaf.type.shape, region, leaf.type.dtype, leaf.name in self._on_host)
            for leaf, region in taken
        ]

    def members(self, name: str) -> Communicator:
        """Who holds a parameter or buffer."""
        return self.communicator

    def speaker(self, name: str) -> None:
        """Nobody has to tell others of a parameter: all have part in it."""

    @property
    def draws_alike(self) -> bool:
        """Whether some ranks have to draw the same random numbers."""
        return self.local.streams.must_agree

    def _region(self, leaf: Leaf, shape: tuple[int, ...]) -> Region:
        return region_of(shape, leaf.type.layout, self.plan.mesh, self.communicator.rank)

    def _shapes_of(self, leaf: Leaf) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """An input of a step as a whole, and this rank's part of it."""
        accumulation, shape = self.plan.accumulation, leaf.type.shape
        if accumulation is not None and leaf.name in accumulation.cut:
            shape = (accumulation.steps * shape[0], *shape[1:])
        return shape, region_shape(self._region(leaf, shape))

    def form_of(self, given: list[Tensor]) -> Form:
        """How inputs came: as a whole, in parts, or in shapes that this program does not take."""
        form = Form.WHOLE
        for x, leaf, (whole, part) in zip(given, self.taken, self._shapes, strict=True):
            if x.dtype != leaf.type.dtype or tuple(x.shape) not in (whole, part):
                return Form.OTHER
            form = form if tuple(x.shape) == whole else Form.PARTS
        return form

    @leave_uncompiled
    def step(self, given: list[Tensor]) -> Any:
        """One forward pass: what came whole or as this rank's part; the loss is that of the whole."""
        device = self.store.device
        self._check_device(given, device)
        if self._accumulator is None:
            batches = [self._local(given)]
        else:
            refuse_input_gradients(self.plan.model.name, self.taken, given)
            batches = self._accumulator.micro.of(given)
        self._begin(device)
        state = self.local.state()
        if self._tensor_cores is None:
            outputs = self._compute(batches, state, device)
        else:
            with self._tensor_cores.forward():
                outputs = self._tensor_cores.before_backward(self._compute(batches, state, device))
        self._end(dict(zip(self.taken, given, strict=True)), outputs, self.plan.graph.loss)
        came_whole = all(tuple(x.shape) == whole for x, (whole, _) in zip(given, self._shapes, strict=True))
        give = self._marked_results if self._split_outputs and came_whole else self.calling.results
        return give(outputs)

    def _mark(self, outputs: list[Any]) -> Any:
        """Results with what is split marked: the compiler is not to see that they are longer than what they hold."""
        return self.calling.results(self._split_outputs.mark(outputs))

    def _start(self, device: torch.device) -> None:
        self._passes.begin(self.agreement)
        self.local.streams.begin(device)

    @leave_uncompiled
    def _compute(self, batches: list[list[Tensor]], state: list[Tensor | None], device: torch.device) -> list[Any]:
        if self._accumulator is None:
            return self.local.run(batches[0], state)
        return self._accumulate(batches, state, device, self._accumulator)

    def _check_device(self, given: list[Tensor], device: torch.device) -> None:
        for x, leaf in zip(given, self.taken, strict=True):
            if leaf.name in self._on_host:
                self._check_on_host(x, leaf)
                continue
            if x.device.type != device.type or device.index not in (None, x.device.index):
                raise UsageError(
                    f"{self.plan.model.name} was called with {leaf.name} on {x.device}. Its weights are on {device}. "
                    f"Move the batch there, as by {leaf.name}.to({str(device)!r}), or load the plan with "
                    f"device={str(x.device)!r}."
                )

    def _check_on_host(self, x: Tensor, leaf: Leaf) -> None:
        if x.device.type != "cpu":
            raise UsageError(
                f"{self.plan.model.name} was called with {leaf.name} on {x.device}. Its plan has it on the host during "
                f"the step: {x.nbytes:,} bytes, for which there is no room on the device. Give it as it is on the "
                f"host, or have the module place the batch, as by step.placed(batch)."
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                f"{self.plan.model.name} was called with {leaf.name} of shape {tuple(x.shape)}, of which a gradient is "
                f"wanted. Its plan has it on the host during the step, where it gets none, so what made it would never "
                f"learn. Give {leaf.name}.detach(), or take a plan that has it on the device."
            )

    def _accumulate(
        self, batches: list[list[Tensor]], state: list[Tensor | None], device: torch.device, accumulator: Accumulator
    ) -> list[Any]:
        """A step in micro-batches, which is over when its loss is there but for handing out the gradients."""
        place = self.plan.graph.loss or 0

        def compute(own: list[Tensor | None], inputs: list[Tensor]) -> Tensor:
            found: Tensor = self.local.results(inputs, own)[place]
            return found

        kept = dict(zip(self.local.kept, state, strict=True))
        loss = accumulator.loss(batches, kept, Computing(self.local.make_once, compute), device.type)
        return [loss if isinstance(value, Value) else value for value in self.plan.graph.outputs]

    def _local(self, inputs: list[Tensor]) -> list[Tensor]:
        leaves = self.plan.graph.leaves_of(LeafKind.INPUT)
        return [self._part(x, leaf, region) for x, leaf, region in zip(inputs, leaves, self._regions, strict=True)]

    def _part(self, x: Tensor, leaf: Leaf, region: Region) -> Tensor:
        """This rank's part of an input that came whole, or as it came when it is the part already."""
        shape = tuple(x.shape)
        if x.dtype == leaf.type.dtype and shape == leaf.type.shape:
            if x.requires_grad and torch.is_grad_enabled():  # of which all ranks have the whole
                return carry_reshard(shape, (), leaf.type.layout, self.communicator)(x)
            return x[tuple(slice(*span) for span in region)] if region_shape(region) != shape else x
        if x.dtype == leaf.type.dtype and shape == region_shape(region):
            return x
        raise self.calling.refusal(
            f"{leaf.name} is {leaf.type} as a whole and {region_shape(region)} on rank {self.communicator.rank}, where "
            f"{x.dtype} of shape {shape} came"
        )
