"""One rank's part of a plan as an `nn.Module`: local pieces of parameters and buffers under a generated forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from conjoin.comm import recomputed, ring_members, ring_of, routing_of
from conjoin.errors import UsageError
from conjoin.ir import (
    Leaf,
    LeafKind,
    Node,
    Plan,
    Region,
    RegionMove,
    Value,
    calling_graph,
    place,
    plan_fingerprint,
    regathered_parameters,
    region_of,
    region_shape,
)
from conjoin.ops import Layout
from conjoin.runtime.accumulating import Accumulator, MicroBatches
from conjoin.runtime.agreement import Agreement
from conjoin.runtime.bundles import Bundle, Dropping, make_bundles
from conjoin.runtime.calling import Calling
from conjoin.runtime.carriers import carry_move, carry_reshard, prepare_move
from conjoin.runtime.communicator import Communicator, uncompiled
from conjoin.runtime.emission import emit_program
from conjoin.runtime.functions import Function
from conjoin.runtime.gradient_pieces import mark_gradients
from conjoin.runtime.norms import clip_grad_norm
from conjoin.runtime.passes import Passes
from conjoin.runtime.pieces import UnmatchedKeys, load_pieces, mark_pieces
from conjoin.runtime.programs import Compiled, Program, compile_text
from conjoin.runtime.randomness import Streams
from conjoin.runtime.recomputing import Again, fold_segments
from conjoin.runtime.ring_attention import carry_ring
from conjoin.runtime.routing import carry_routing
from conjoin.runtime.slots import Slot, read_slot
from conjoin.runtime.storage import Store
from conjoin.runtime.tensor_cores import TensorCores


class _RankCarriers:
    """What the emitter asks for, for one rank of a plan."""

    def __init__(self, plan: Plan, communicator: Communicator, exact_seed: int | None) -> None:
        self.mesh, self.rank = communicator.mesh, communicator.rank
        self.exact_seed = exact_seed
        self._communicator = communicator
        self.dropping = Dropping() if regathered_parameters(plan) else None
        self.bundles = make_bundles(plan, communicator, self.dropping)
        self.streams = Streams(communicator, exact_seed)
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
        return None if routing is None else carry_routing(routing, self._communicator)

    def bundle(self, root: Value, layout: Layout) -> Bundle | None:
        return self._by_entry.get((root, layout))

    def draw(self, function: Function, axes: tuple[str, ...]) -> Function:
        return self.streams.draw(function, axes)

    def draws_whole(self) -> bool:
        return self.streams.exact


def _compile(carriers: _RankCarriers, program: fx.Graph, name: str) -> tuple[Compiled, str]:
    """A rank's program and its text; each segment that is run again in the backward pass is a function before it."""
    texts: list[str] = []

    def compile_segment(number: int, part: fx.Graph) -> Function:
        function, text = compile_text(part, f"{name} segment {number}")
        texts.append(f"# segment {number}, which the backward pass runs again\n{text}")
        return uncompiled(Again(partial(function, None), carriers.streams).__call__)

    compiled, text = compile_text(fold_segments(program, compile_segment), name)
    return compiled, "\n".join((*texts, text))


def _begin(passes: Passes, streams: Streams, device: torch.device) -> None:
    passes.begin()
    streams.begin(device)


_HELD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""What a module has in common with the root of its store."""
_MADE = (
    "plan", "communicator", "store", "code", "_program", "_carriers", "_begin", "_end", "_taken", "_calling",
    "_regions", "_slots", "compare_every", "_targets", "_accumulator", "_kept", "_tensor_cores",
)  # fmt: skip
"""What a module makes of its plan."""


class ParallelModule(nn.Module):
    """A plan on this rank. Parameters and buffers have the user's names and this rank's shapes."""

    plan: Plan
    code: str
    """The generated forward of this rank as Python text."""
    _tensor_cores: TensorCores | None

    def __init__(self, plan: Plan, store: Store, communicator: Communicator, exact_seed: int | None = None) -> None:
        super().__init__()
        self.training = plan.graph.training
        carriers = _RankCarriers(plan, communicator, exact_seed)
        kept = tuple(leaf for leaf in plan.graph.leaves if leaf.kind is not LeafKind.INPUT)
        name = f"{plan.graph.name} {plan_fingerprint(plan)[:12]} @{communicator.rank}"
        once = plan.accumulation is None
        emitted = emit_program(plan.graph, kept, carriers, recomputed(plan), once=once)
        program = Program(emitted, name, partial(_compile, carriers))
        agreement = Agreement(plan, store, communicator)
        passes = Passes(communicator, agreement)
        inputs = plan.graph.leaves_of(LeafKind.INPUT)
        accumulation, accumulator, called = plan.accumulation, None, plan.graph
        if accumulation is not None:
            called = calling_graph(plan.graph, accumulation)
            micro = MicroBatches(plan, accumulation, communicator.rank, in_order=exact_seed is not None)
            accumulator = Accumulator(plan, micro, carriers.bundles, carriers.streams)
        # past `__setattr__`: a submodule of the user's may have any of these names
        self.__dict__.update(
            plan=plan,
            communicator=communicator,
            store=store,
            code=program.code,
            _program=program,
            _carriers=carriers,
            _begin=uncompiled(partial(_begin, passes, carriers.streams)),
            _end=uncompiled(passes.end),
            _calling=Calling(called),
            compare_every=agreement.every,
            _taken=called.leaves_of(LeafKind.INPUT),
            _accumulator=accumulator,
            _kept=kept,
            _tensor_cores=TensorCores() if plan.graph.rounding.tf32 else None,
            _regions=tuple(region_of(x.type.shape, x.type.layout, plan.mesh, communicator.rank) for x in inputs),
            _slots=tuple(store.slot(leaf) for leaf in kept),
            _targets=tuple(store.slots_of_buffer(name) for name, _ in plan.graph.updates),
        )
        for name in _HELD:
            self.__dict__[name] = store.root.__dict__[name]
        mark_gradients(self.pieces(), communicator)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass: the batch as captured, whole or this rank's part of it; the loss is that of the whole."""
        given, device = self._calling.arrange(args, kwargs), self.store.device
        self._check_device(given, device)
        batches = [self._local(given)] if self._accumulator is None else self._accumulator.micro.of(given)
        self._begin(device)
        state = [self.store.read(slot, device) for slot in self._slots]
        if self._tensor_cores is None:
            outputs = self._compute(batches, state, device)
        else:
            with self._tensor_cores.forward():
                outputs = self._tensor_cores.before_backward(self._compute(batches, state, device))
        self._end(dict(zip(self._taken, given, strict=True)), outputs, self.plan.graph.loss)
        return self._calling.results(outputs)

    def _compute(self, batches: list[list[Tensor]], state: list[Tensor | None], device: torch.device) -> list[Any]:
        if self._accumulator is None:
            return self._run(batches[0], state, device)
        return self._accumulate(batches, state, device, self._accumulator)

    def _check_device(self, given: list[Tensor], device: torch.device) -> None:
        for x, leaf in zip(given, self._taken, strict=True):
            if x.device.type != device.type or device.index not in (None, x.device.index):
                raise UsageError(
                    f"{self.plan.model.name} was called with {leaf.name} on {x.device}. Its weights are on {device}. "
                    f"Move the batch there, as by {leaf.name}.to({str(device)!r}), or load the plan with "
                    f"device={str(x.device)!r}."
                )

    def _run(self, inputs: list[Tensor], state: list[Tensor | None], device: torch.device) -> list[Any]:
        with self._dropping():
            results = self._program(self, state, device, *inputs)
        count = len(self.plan.graph.outputs)
        self._write_back(results[count:])
        return list(results[:count])

    def _accumulate(
        self, batches: list[list[Tensor]], state: list[Tensor | None], device: torch.device, accumulator: Accumulator
    ) -> list[Any]:
        """A step in micro-batches, which is over when its loss is there but for handing out the gradients."""
        place = self.plan.graph.loss or 0

        def compute(own: list[Tensor | None], inputs: list[Tensor]) -> Tensor:
            with self._dropping():
                found: Tensor = self._program(self, own, device, *inputs)[place]
            return found

        loss = accumulator.loss(batches, dict(zip(self._kept, state, strict=True)), compute, device.type)
        return [loss if isinstance(value, Value) else value for value in self.plan.graph.outputs]

    def _local(self, inputs: list[Tensor]) -> list[Tensor]:
        leaves = self.plan.graph.leaves_of(LeafKind.INPUT)
        return [self._part(x, leaf, region) for x, leaf, region in zip(inputs, leaves, self._regions, strict=True)]

    def _part(self, x: Tensor, leaf: Leaf, region: Region) -> Tensor:
        """This rank's part of an input that came whole, or as it came when it is the part already."""
        shape = tuple(x.shape)
        if x.dtype == leaf.type.dtype and shape == leaf.type.shape:
            return x[tuple(slice(*span) for span in region)] if region_shape(region) != shape else x
        if x.dtype == leaf.type.dtype and shape == region_shape(region):
            return x
        raise self._calling.refusal(
            f"{leaf.name} is {leaf.type} as a whole and {region_shape(region)} on rank {self.communicator.rank}, where "
            f"{x.dtype} of shape {shape} came"
        )

    def _dropping(self) -> AbstractContextManager[Any]:
        """Drop gathered parameters after the forward pass where the plan says so; backward gathers them again."""
        dropping = self._carriers.dropping
        if dropping is None or not torch.is_grad_enabled():
            return nullcontext()
        return dropping.hooks()

    def _write_back(self, values: tuple[Tensor, ...]) -> None:
        """Give buffers their new values, unless written over: as new tensors, as gradients may need the old ones."""
        for slots, value in zip(self._targets, values, strict=True):
            if value is read_slot(slots[0]):
                continue
            made = value.detach()
            for module, name in slots:
                module._buffers[name] = made

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; the norm before it."""
        return clip_grad_norm(self.pieces(), max_norm, float(norm_type), self.communicator, error_if_nonfinite)

    @property
    def draws_alike(self) -> bool:
        """Whether some ranks have to draw the same random numbers: their generators must then be in the same state."""
        return self._carriers.streams.must_agree

    def pieces(self) -> Iterator[tuple[nn.Parameter, Layout]]:
        """Every parameter once, with the layout in which it is stored."""
        return self.store.parameters()

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """This rank's parameters and persistent buffers under the user's names: whole tensors, and a `Piece` of each
        split one, which torch.distributed.checkpoint saves and loads."""
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return mark_pieces(self.store, state, prefix)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> UnmatchedKeys:
        """Copy whole tensors or this rank's pieces into the parameters and buffers: all or nothing."""
        if assign:
            raise UsageError(
                "load_state_dict was asked to assign tensors instead of copying them. Optimizers hold the parameters "
                "that are there. Leave assign out."
            )
        return load_pieces(self.store, state_dict, strict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """The same plan on this rank with pieces of its own, as for an average of the weights; nothing is sent."""
        store = self.store.copied(memo)
        made = ParallelModule(self.plan, store, self.communicator, self._carriers.exact_seed)
        memo[id(self)] = made
        own = {key: value for key, value in self.__dict__.items() if key not in (*_HELD, *_MADE)}
        made.__dict__.update(copy.deepcopy(own, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"The plan of {self.plan.model.name} on rank {self.communicator.rank} was asked to be pickled. It is "
            f"connected to the other ranks, which no file can hold. Save with conjoin.save_checkpoint or state_dict(), "
            f"and load the plan in the other process."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        state = (LeafKind.PARAMETER, LeafKind.BUFFER)
        for dtype in {leaf.type.dtype for leaf in self.plan.graph.leaves if leaf.kind in state}:
            wanted = fn(torch.empty(0, dtype=dtype)).dtype
            if wanted != dtype:
                raise UsageError(
                    f"The plan of {self.plan.model.name} was asked to change from {dtype} to {wanted}. A plan holds "
                    f"the dtypes it was made with. Change the model and make the plan again."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.store.device = fn(torch.empty(0, device=self.store.device)).device
        return self

    def train(self, mode: bool = True) -> ParallelModule:
        """Only the captured mode: dropout and batch norm were fixed when the graph was made."""
        if mode != self.plan.graph.training:
            wanted, have = ("training", "eval") if mode else ("eval", "training")
            raise UsageError(
                f"A plan made in {have} mode was asked to switch to {wanted} mode. Dropout and batch norm are part of "
                f"the graph. Make a plan of the model in {wanted} mode for that."
            )
        return self

    compare_every: Callable[[int | None], None]
    """Have ranks compare inputs, loss and gradients where they should agree: in the first step of all that follow and
    in every so manieth after it; in the first only (None), as `load` does; or never (0)."""
    _program: Program
    _carriers: _RankCarriers
    _begin: Callable[[torch.device], None]
    _end: Callable[[Mapping[Leaf, Tensor], list[Any], int | None], None]
    _taken: tuple[Leaf, ...]
    _calling: Calling
    _regions: tuple[Region, ...]
    _slots: tuple[Slot | str, ...]
    _targets: tuple[tuple[Slot, ...], ...]
    _accumulator: Accumulator | None
    _kept: tuple[Leaf, ...]
    communicator: Communicator
    store: Store
