"""One rank's part of a plan as an `nn.Module`: local pieces of parameters and buffers under a generated forward.

The plan is for one shape and one mode. Batches of another shape, and the other mode, are run by programs of their own
over the same pieces, where plans for them can be made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import UsageError
from conjoin.ir import LeafKind, Pipeline, Plan, flatten_tree, offloaded_states, unflatten_tree
from conjoin.machine import Cut, Mesh
from conjoin.ops import Layout, Split
from conjoin.runtime.pipelines.pipeline_program import PipelineProgram
from conjoin.runtime.program.call_forms import InputPart
from conjoin.runtime.program.gradient_pieces import mark_gradients
from conjoin.runtime.program.norms import clip_grad_norm
from conjoin.runtime.program.other_plans import OtherPlans
from conjoin.runtime.program.other_programs import AnyProgram, OtherPrograms
from conjoin.runtime.program.passes import Passes
from conjoin.runtime.program.randomness import Stream
from conjoin.runtime.program.rank_program import RankProgram
from conjoin.runtime.ranks.communicator import Communicator, World, uncompiled
from conjoin.runtime.state.offloaded_state import offload_states
from conjoin.runtime.state.pieces import Piece, UnmatchedKeys, load_pieces, mark_pieces
from conjoin.runtime.state.storage import Store
from conjoin.runtime.torch_private import leave_uncompiled

_HELD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""What a module has in common with the root of its store."""
_MADE = ("plan", "communicator", "store", "code", "compare_every", "_program", "_others", "_exact_seed", "_choose")
"""What a module makes of its plan."""


class ParallelModule(nn.Module):
    """A plan on this rank. Parameters and buffers have the user's names and this rank's shapes."""

    plan: Plan | Pipeline
    code: str
    """The generated forward of this rank as Python text."""

    def __init__(
        self,
        plan: Plan | Pipeline,
        store: Store,
        communicator: World,
        exact_seed: int | None = None,
        others: OtherPlans | None = None,
    ) -> None:
        super().__init__()
        self.training = plan.graph.training
        # past `__setattr__`: a submodule of the user's may have any of these names
        self.__dict__.update(communicator=communicator, store=store, _exact_seed=exact_seed)
        for name in _HELD:
            self.__dict__[name] = store.root.__dict__[name]
        torch.serialization.add_safe_globals([Piece])  # what state_dict has, for torch.load
        self._make_programs(plan, others)
        for members, pieces in self._program.groups():
            mark_gradients(pieces, members, communicator if members is not communicator else None)
        plans = [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.stages]
        states = {leaf.names[0] for part in plans for leaf in part.graph.leaves if leaf.name in offloaded_states(part)}
        offload_states(p for name, p in store.root.named_parameters() if name in states)

    def _make_programs(self, plan: Plan | Pipeline, others: OtherPlans | None) -> None:
        """All that follows from a plan over what is stored."""
        store, communicator = self.store, self.communicator
        passes, exact = Passes(communicator), None if self._exact_seed is None else Stream(self._exact_seed)

        def make(plan: Plan | Pipeline) -> AnyProgram:
            kind = RankProgram if isinstance(plan, Plan) else PipelineProgram
            return kind(plan, store, communicator, passes, exact)  # type: ignore[arg-type] # each its own

        program = make(plan)
        programs = None if others is None else OtherPrograms(program, others, make)
        self.__dict__.update(
            plan=plan,
            code=program.code,
            compare_every=program.agreement.every if programs is None else programs.compare_every,
            _program=program,
            _others=programs,
            _choose=None if programs is None else uncompiled(programs.choose),
        )

    def cut_anew(self, cuts: tuple[Cut, ...]) -> None:
        """Have dims of some sizes cut elsewhere from now on: all ranks call it, between two steps.

        What is stored stays as it is; batches come in the new parts, or whole.
        """
        mesh = Mesh(self.plan.mesh.axes, cuts)
        stored = (leaf for leaf in self.plan.graph.leaves if leaf.kind is not LeafKind.INPUT)
        split = [leaf.name for leaf in stored if any(isinstance(placement, Split) for _, placement in leaf.type.layout)]
        if not isinstance(self.plan, Plan) or split:
            what = f"{split[0]}, which is stored in pieces" if split else "stages, each with ranks of its own"
            raise UsageError(
                f"The {self.plan} was to have dims cut elsewhere. It has {what}, and only what comes with every batch "
                f"is cut anew. Plan with vertex-parallel, which stores parameters whole."
            )
        self.communicator.mesh = mesh
        others = None if self._others is None else self._others.plans
        plan = replace(self.plan, mesh=mesh)
        if others is not None:
            others.go_over(plan)
        self._make_programs(plan, others)

    @leave_uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass: the batch whole or this rank's part of it; the loss is that of the whole."""
        if self._choose is None:
            program, given = self._program, self._program.calling.arrange(args, kwargs)
        else:
            program, given = self._choose(self.training, args, kwargs)
        return program.step(given)

    def input_parts(self) -> list[InputPart]:
        """Every input in the order of the call, with the part of it that is enough on this rank."""
        return self._program.input_parts()

    def placed(self, batch: Any) -> Any:
        """A batch, as a tuple of arguments or one object, on this rank's device, but for what stays on the host."""
        leaves, spec = flatten_tree(batch)
        apart = unflatten_tree(leaves, spec, matrix=lambda parts: parts)
        given = self._program.calling.arrange(tuple(apart) if isinstance(apart, tuple | list) else (apart,), {})
        stay = {id(x) for x, part in zip(given, self.input_parts(), strict=True) if part.on_host}
        moves = (isinstance(x, Tensor) and id(x) not in stay for x in leaves)
        placed = [x.to(self.store.device) if is_moved else x for x, is_moved in zip(leaves, moves, strict=True)]
        return unflatten_tree(placed, spec)

    def note_whole(self, tensors: Iterable[Tensor]) -> None:
        """These inputs come as a whole, also where others come as this rank's part."""
        if self._others is not None:
            self._others.note_whole(tensors)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; the norm before it."""
        groups = self._program.groups()
        return clip_grad_norm(groups, max_norm, float(norm_type), self.communicator, error_if_nonfinite)

    def no_sync(self) -> AbstractContextManager[None]:
        """For loops of `DistributedDataParallel`: gradients add up as there, and are summed over ranks all the same.

        What it would save, a plan in micro-batches saves (`fsdp+micro=4`).
        """
        return nullcontext()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What `DistributedDataParallel` asks for first."""
        raise UsageError(
            f"The plan of {self.plan.model.name} was to be wrapped by DistributedDataParallel. Ranks hold different "
            f"pieces of its parameters, which that would overwrite with those of rank 0, and gradients are summed up "
            f"already. Use the module that conjoin.load gave as it is."
        )

    @property
    def draws_alike(self) -> bool:
        """Whether some ranks have to draw the same random numbers: their generators must then be in the same state."""
        return self._program.draws_alike

    def members(self, name: str) -> Communicator | None:
        """Who holds a parameter or buffer; None where this rank has no part in it."""
        return self._program.members(name)

    def speaker(self, name: str) -> int | None:
        """In a pipeline the rank that tells all others of a parameter or buffer; None where all have part in it."""
        return self._program.speaker(name)

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
        others = None if self._others is None else self._others.plans
        made = ParallelModule(self.plan, store, self.communicator, self._exact_seed, others)
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
        if fn(torch.empty(0, device=self.store.device)).is_meta and self.store.device.type != "meta":
            raise UsageError(
                f"The plan of {self.plan.model.name} was asked to go to the meta device. It would lose its weights, of "
                f"which rank {self.communicator.rank} may hold the only pieces. Delete the module to free its memory."
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.store.device = fn(torch.empty(0, device=self.store.device)).device
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> ParallelModule:
        """Refused: there are no layers to be initialised here."""
        raise UsageError(
            f"The plan of {self.plan.model.name} was asked to apply {getattr(fn, '__name__', fn)} to its layers. It "
            f"has pieces of their parameters, which it would not know by their classes, and random numbers drawn on "
            f"pieces are not those of the whole. Apply it to the model before conjoin.load, or pass init= for a "
            f"model on the meta device."
        )

    def train(self, mode: bool = True) -> ParallelModule:
        """Training or evaluation: in another mode than the plan's its steps are planned when they are first called."""
        if mode != self.plan.graph.training and self._others is None:
            wanted, have = ("training", "eval") if mode else ("eval", "training")
            raise UsageError(
                f"A plan made in {have} mode was asked to switch to {wanted} mode. Dropout and batch norm are part of "
                f"the graph, and there is nothing to make another one of. Load the plan by conjoin.load, with the "
                f"model, or make a plan of the model in {wanted} mode."
            )
        if mode == self.plan.graph.training and self._others is not None:
            self._others.tell_of_modes()
        return super().train(mode)

    compare_every: Callable[[int | None], None]
    """Have ranks compare inputs, loss and gradients where they should agree: in the first step of all that follow and
    in every so manieth after it; in the first only (None), as `load` does; or never (0)."""
    communicator: World
    store: Store
    _program: AnyProgram
    """Of the plan itself."""
    _others: OtherPrograms | None
    _exact_seed: int | None
    _choose: Callable[[bool, tuple[Any, ...], dict[str, Any]], tuple[AnyProgram, list[Tensor]]] | None
