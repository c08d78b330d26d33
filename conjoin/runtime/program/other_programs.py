"""The programs of a module: that of its plan, and those of other shapes and the other mode, over the same pieces.

Which one runs a call is decided on every rank by itself. When a rank goes over to another program than it ran last, the
ranks compare notes outside of all collectives, so that none waits in a collective that another never comes to. At
most `MAX_PROGRAMS` are held; the one that was not used for longest goes first, and would be made again.
"""

from __future__ import annotations

import gc
import json
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from conjoin.errors import ConjoinError, RankError
from conjoin.ir import Leaf, fingerprint_of, flatten_tree, region_of, region_shape, unflatten_tree
from conjoin.ops import split_axes
from conjoin.runtime.pipelines.pipeline_program import PipelineProgram
from conjoin.runtime.program.other_plans import AnyPlan, Dealt, Key, Made, OtherPlans, keep
from conjoin.runtime.program.rank_program import Form, RankProgram
from conjoin.runtime.ranks.agreement import digest
from conjoin.runtime.torch_private import is_in_backward

_log = logging.getLogger("conjoin")
MAX_PROGRAMS = 16
AnyProgram = RankProgram | PipelineProgram


class OtherPrograms:
    """Chooses the program for a call, and makes it where there is none."""

    def __init__(self, program: AnyProgram, plans: OtherPlans, make: Callable[[AnyPlan], AnyProgram]) -> None:
        self.plans = plans
        self._own, self._make, self._last = program, make, program
        taken = ", ".join(str(leaf.type.laid_out(())) for leaf in program.taken)
        self._own_key = Key(program.plan.graph.training, taken, program.plan.graph.input_structure)
        self._programs: OrderedDict[Key, AnyProgram] = OrderedDict()
        self._communicator, self._store = program.communicator, program.store
        self._every: int | None = 0
        self._draws_alike = program.draws_alike
        self._in_parts: bool | None = True if self._communicator.mesh.cuts else None
        """Whether batches came as parts so far; None as long as it is not known. Where dims are cut elsewhere than in
        even pieces they do, and the part of one rank may be all there is."""
        self._told_of_modes = False
        self._alike: str | None = None
        """The last batch that all ranks had alike while that was not known."""
        self._noted: list[weakref.ref[Tensor]] = []

    def tell_of_modes(self) -> None:
        """Say once, on rank 0, which parts stay in the mode that they were planned in, and would not in the model."""
        kept = self.plans.kept_modes
        if kept and not self._told_of_modes and self._communicator.rank == 0:
            mode, other = ("train", "evaluation") if self._own_key.training else ("eval", "training")
            more = f" and {len(kept) - 1} more" if kept[1:] else ""
            _log.warning(
                "%s%s of %s stays in %s mode, as it was planned. The model's own %s() would switch it, and %s() of the "
                "plan's module goes back to what was planned. Say it in the model's train(), or plan it otherwise.",
                kept[0], more, self._own.plan.model.name, other, mode, mode,
            )  # fmt: skip
        self._told_of_modes = True

    def compare_every(self, num_steps: int | None) -> None:
        """For all programs, those to come too."""
        self._every = num_steps
        for program in (self._own, *self._programs.values()):
            program.agreement.every(num_steps)

    def note_whole(self, tensors: Iterable[Tensor]) -> None:
        """These come as a whole to all ranks, also where others come in parts."""
        self._noted = [note for note in self._noted if note() is not None] + [weakref.ref(x) for x in tensors]

    def choose(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[AnyProgram, list[Tensor]]:
        """The program for a call, and its input tensors in order."""
        own = self._own
        given = own.calling.match(args, kwargs)
        noted = given is not None and any(x is note() for x in given for note in self._noted)
        form = Form.OTHER if given is None or noted else own.form_of(given)
        if given is not None and not noted and form is not Form.WHOLE and self._in_parts is None:
            self._in_parts = self._come_in_parts(form, given)
        if given is not None and training == own.plan.graph.training and self._is_own(form):
            self._go_over(own, self._own_key)
            return own, given
        dealt = own.calling.deal(args, kwargs, self.plans.names)
        is_part = given is not None and not noted and self._in_parts and form is not Form.WHOLE
        whole = self._whole(dealt) if is_part else dealt
        key = Key.of(training, whole)
        program = self._programs.get(key)
        if program is None:
            program = self._add(key, whole)
        else:
            self._go_over(program, key)
        self._programs.move_to_end(key)
        return program, program.calling.arrange((*dealt[0], *dealt[2]), {**dealt[1], **dealt[3]})

    def _come_in_parts(self, form: Form, given: list[Tensor]) -> bool | None:
        """Whether what is smaller than the plan's batch are parts: what all ranks have alike is a small batch, whole.

        None where it is neither, or all ranks had the same only once: they have where each makes up its part to warm
        up. All ranks ask, before every batch that is not as large as the plan's until it is known.
        """
        if self._communicator.mesh.size == 1:
            return False
        mine = json.dumps([form.name, [[str(x.dtype), list(x.shape), digest(x)] for x in given]])
        told = self._communicator.compare(mine)
        if len(set(told)) == 1:
            before, self._alike = self._alike, mine
            return False if before not in (None, mine) else None
        return True if all(json.loads(text)[0] == Form.PARTS.name for text in told) else None

    def _is_own(self, form: Form) -> bool:
        """Whether inputs are those of the plan; what is as large as a part is a small batch where others came whole."""
        if form is Form.OTHER or (form is Form.PARTS and not self._in_parts):
            return False
        self._in_parts = bool(self._in_parts)
        return True

    def _whole(self, dealt: Dealt) -> Dealt:
        """A call in parts as one of the whole batch: as large as all parts together."""
        leaves, spec = flatten_tree(dealt)
        taken = iter(self._own.taken)
        wide = [self._widened(x, next(taken)) if isinstance(x, Tensor) else x for x in leaves]
        return list(unflatten_tree(wide, spec))

    def _widened(self, x: Tensor, leaf: Leaf) -> Tensor:
        sizes, layout, mesh = self._communicator.mesh.sizes, leaf.type.layout, self._communicator.mesh
        if tuple(x.shape) == region_shape(region_of(leaf.type.shape, layout, mesh, self._communicator.rank)):
            return torch.empty(leaf.type.shape, dtype=x.dtype, device="meta")
        shape = [size * prod(sizes[a] for a in split_axes(layout, dim)) for dim, size in enumerate(x.shape)]
        return torch.empty(shape, dtype=x.dtype, device="meta")

    def _add(self, key: Key, dealt: Dealt) -> AnyProgram:
        """Plan a call, agree on the plan, and make its program; training may come to it after `inference_mode`."""
        with torch.inference_mode(False), _collected_afterwards():
            return self._add_normally(key, _out_of_inference(dealt))

    def _add_normally(self, key: Key, dealt: Dealt) -> AnyProgram:
        start = time.perf_counter()
        try:
            made = self.plans.find(key, dealt)
        except ConjoinError:
            if self._communicator.mesh.size > 1:
                self._agree(key, "refused")
            raise
        self._agree(key, fingerprint_of(made.plan))
        self._store.keep_constants(self.plans.model, made.plan)
        program = self._make(made.plan)
        self._draw_alike(program)
        program.agreement.every(self._every)
        self._programs[key], self._last = program, program
        self._evict()
        if self._communicator.rank == 0:
            _tell(made, key, time.perf_counter() - start)
            keep(made)
        return program

    def _evict(self) -> None:
        while len(self._programs) >= MAX_PROGRAMS:
            oldest, _ = self._programs.popitem(last=False)
            self.plans.forget(oldest)
        programs = (self._own, *self._programs.values())
        self._store.keep_only({leaf for program in programs for leaf in program.leaves})

    def _go_over(self, program: AnyProgram, key: Key) -> None:
        """Run a program that is there: if another one ran before, all ranks do."""
        if program is not self._last and not is_in_backward():
            self._agree(key, program.fingerprint)
            self._last = program

    def _agree(self, key: Key, fingerprint: str) -> None:
        """Raise RankError on every rank unless all go over to the same program."""
        if self._communicator.mesh.size == 1:
            return
        told = [json.loads(text) for text in self._communicator.compare(json.dumps([str(key), fingerprint]))]
        other = next((rank for rank, each in enumerate(told) if each != told[0]), None)
        if other is None:
            return
        if told[0][0] != told[other][0]:
            raise RankError(
                f"The ranks came to a step with different batches: rank 0 to {told[0][0]}, rank {other} to "
                f"{told[other][0]}. Every shape and mode has its own program, and ranks in different ones would wait "
                f"for each other for ever. Give all ranks batches of the same shape, in the same mode and order."
            )
        raise RankError(
            f"Rank 0 and rank {other} made different plans for {told[0][0]}. Their models, libraries or files beside "
            f"the plan differ, and they would wait for each other. Give all ranks the same, and start again."
        )

    def _draw_alike(self, program: AnyProgram) -> None:
        """Have all generators in the state of rank 0's before the first program for which that matters."""
        if self._draws_alike or not program.draws_alike:
            return
        states = self._communicator.compare(torch.get_rng_state().numpy().tobytes().hex())
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states[0]), dtype=torch.uint8))
        self._draws_alike = True


@contextmanager
def _collected_afterwards() -> Iterator[None]:
    """Have Python look for what nobody reaches later: of a plan and its program nearly all stays, and a tenth of the
    time would go into looking through it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _out_of_inference(dealt: Dealt) -> Dealt:
    """A call with tensors that autograd takes."""
    leaves, spec = flatten_tree(dealt)
    return list(unflatten_tree([x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in leaves], spec))


def _tell(made: Made, key: Key, seconds: float) -> None:
    told = f"planned {key} in {seconds:.1f} s"
    level = logging.WARNING if made.remark else logging.INFO
    _log.log(level, "%s: %s%s", made.plan.model.name, told, f": {made.remark}" if made.remark else "")
