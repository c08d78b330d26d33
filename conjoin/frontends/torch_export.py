"""Run torch.export on a model and its loss: one flat program, or an error that names the user's line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import CaptureError
from conjoin.frontends.asked_segments import follow_segments
from conjoin.frontends.cumulative_averages import counted_batches
from conjoin.frontends.custom_functions import watch_custom_functions
from conjoin.frontends.dealt_batch import Arguments, Batch, check_batch, deal_out, input_names
from conjoin.frontends.diagnosis import explain, refuse_sparse
from conjoin.frontends.drawn_orders import drawn_orders, keep_orders
from conjoin.frontends.functional import Updates, functionalize, put_in_real_parts
from conjoin.frontends.known_values import KnownValues, known_within
from conjoin.frontends.neighbour_matrices import matrices_of_edges, matrix_of
from conjoin.frontends.outside_values import OutsideValues
from conjoin.frontends.problems import MODEL_PREFIX, Problem, find_user_line
from conjoin.frontends.self_loops import loops_of_fixed_shape
from conjoin.frontends.switched_regions import has_cuda_autocast, make_explicit
from conjoin.frontends.torch_autocast import autocast_as_on_cuda, keep_cuda_autocast
from conjoin.frontends.torch_private import (
    ExportedProgram,
    FollowedCalls,
    alignments_sized,
    batched_in_place,
    composites_prepared_once,
    duals_refused,
    fake_copy,
    is_fake,
    keep_draws,
    keep_markers,
    memory_of,
    quiet,
    tensors_of,
    unread_left_out,
    user_lines,
)
from conjoin.frontends.written_views import (
    doubtful_writes,
    hidden_views,
    overlapping_writes,
    writes_over_operands,
)
from conjoin.ir import (
    Source,
    Structure,
    changed_names,
    describe_tree,
    generator_states,
    python_state,
    spec_of,
    unflatten_tree,
)


@dataclass(frozen=True, slots=True)
class Exported:
    """What capture has in hand after torch.export."""

    program: ExportedProgram
    updates: Updates
    """New values of buffers, where the program does not return them itself."""
    reassigned: tuple[str, ...]
    """Buffers that forward replaced by other tensors, whose new values are the last outputs of the program.

    Export itself follows that in the outermost module only."""
    changed: tuple[str, ...]
    """Attributes of the model, no state, that forward gives another value."""
    problems: tuple[Problem, ...]
    inputs: tuple[Any, ...]
    """Flattened inputs: tensors, or plain values fixed at capture."""
    input_names: tuple[str, ...]
    input_structure: Structure
    outputs: tuple[Any, ...]
    """For every flattened output: `TENSOR`, or the plain value returned."""
    output_structure: Structure
    memory: Mapping[int, str]
    """Parameters and buffers by their memory."""
    dropped: tuple[str, ...]
    """What a graph cannot keep of outputs and attributes, in words."""


class _TensorMark:
    def __repr__(self) -> str:
        return "TENSOR"


TENSOR = _TensorMark()


AutocastRegions = tuple[tuple[str, torch.dtype], ...]
"""Regions of autocast: a kind of device, and what is cast to there."""


class _Step(nn.Module):
    """Model and loss as one module over flat tensors, so that export sees neither containers nor plain values."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None,
        rebuild: Callable[..., Arguments],
        record: Callable[[Any, tuple[str, ...], tuple[str, ...]], list[Tensor]],
        autocast: AutocastRegions,
        known: KnownValues | None,
    ) -> None:
        super().__init__()
        self.training = model.training  # its own flag only: parts of a model may be in another mode on purpose
        self.model = model

        if isinstance(loss, nn.Module):
            self.loss = loss
        self.loss_given = None if isinstance(loss, nn.Module) else loss
        self._call_loss = (lambda *a, **k: loss(*a, **k)) if loss is not None else None
        self._rebuild = rebuild
        self._record = record
        self._autocast = autocast
        self.known = known or KnownValues()
        self.followed: AbstractContextManager[object] = nullcontext()
        """What is watched of calls of model and loss, but not of what export itself asks of their tensors."""
        self.outside: AbstractContextManager[object] = nullcontext()

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        given = self._rebuild(tensors)
        before, held = dict(self.model.named_buffers(remove_duplicate=False)), _held(self.model)
        with ExitStack() as regions:
            if any(is_fake(tensor) for tensor in tensors):
                regions.enter_context(self.followed)
                regions.enter_context(self.known)
                regions.enter_context(self.outside)
            for device, dtype in self._autocast:
                regions.enter_context(torch.autocast(device, dtype=dtype))
            output = self.model(*given.args, **given.kwargs)
            if self._call_loss is not None:
                output = self._call_loss(output, *given.loss_args, **(given.loss_kwargs or {}))
        after = dict(self.model.named_buffers(remove_duplicate=False))
        reassigned = tuple(name for name, tensor in before.items() if after.get(name, tensor) is not tensor)
        changed = changed_names(held, _held(self.model))
        return [*self._record(output, reassigned, changed), *(after[name] for name in reassigned)]

    def called(self, tensors: tuple[Tensor, ...]) -> str:
        """How model and loss are called, in words."""
        given = self._rebuild(tensors)
        found = f"{type(self.model).__name__}({', '.join(_values(given.args, given.kwargs))})"
        if self._call_loss is None:
            return found
        return f"{found} and loss({', '.join(['output', *_values(given.loss_args, given.loss_kwargs or {})])})"


def _values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    named = [("", arg) for arg in args] + [(f"{key}=", arg) for key, arg in kwargs.items()]
    return [
        f"{name}{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, Tensor) else f"{name}{x!r:.40}"
        for name, x in named
    ]


class StepCall:
    """How model and loss are called with a batch laid flat, and what they gave back, call after call."""

    def __init__(self, model: nn.Module, batch: Batch, loss: Callable[..., Any] | None) -> None:
        self.dealt, self._loss, self._batch = deal_out(model, batch, loss), loss, batch
        dealt = self.dealt
        try:
            self.leaves, self.structure = describe_tree(
                [dealt.args, dealt.kwargs, dealt.loss_args, dealt.loss_kwargs or {}]
            )
        except TypeError as error:
            raise CaptureError(
                f"The batch is nested in a way that a graph cannot name: {error}. Inputs keep their names in the "
                f"graph. Use strings or integers as keys."
            ) from error
        self._spec = spec_of(self.structure)
        self.seen: list[tuple[tuple[Any, ...], Structure, tuple[str, ...], tuple[str, ...]]] = []
        """Of every call: flat outputs, how they nest, buffers that were replaced and attributes that changed."""

    def step(self, model: nn.Module, autocast: AutocastRegions, known: KnownValues | None = None) -> _Step:
        """Model and loss as one module over the tensors of the batch."""
        return _Step(model, self._loss, self._rebuild, self._record, autocast, known)

    def _rebuild(self, given: tuple[Tensor, ...]) -> Arguments:
        feed = iter(given)
        args, kwargs, loss_args, loss_kwargs = unflatten_tree(
            [next(feed) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self._spec, matrix_of
        )
        if self.dealt.whole_to_loss:
            loss_args = (kwargs or (args[0] if isinstance(self._batch, Tensor) else args),)
        return Arguments(tuple(args), kwargs, tuple(loss_args), loss_kwargs)

    def _record(self, output: Any, reassigned: tuple[str, ...], changed: tuple[str, ...]) -> list[Tensor]:
        found, nesting = describe_tree(output)
        marked = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in found)
        self.seen.append((marked, nesting, reassigned, changed))
        return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _held(model: nn.Module) -> dict[str, Any]:
    """What a model holds beside its state, by path, and where the generators stand that are not torch's."""
    return {**python_state(model, which=id), **generator_states()}


def _ambient_autocast() -> AutocastRegions:
    """The autocast regions that capture is called in: entered again, their casts become part of the graph."""
    devices = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    return tuple((device, torch.get_autocast_dtype(device)) for device in devices)


@unread_left_out()
@alignments_sized()
def export(
    model: nn.Module, batch: Batch, loss: Callable[..., Any] | None, autocast: AutocastRegions | None = None
) -> Exported:
    """Export model and loss on this batch to a functional program over parameters, buffers and flat inputs.

    They are called in the regions of `autocast`, or in those that the caller is in.
    """
    call = StepCall(model, batch, loss)
    leaves, structure = call.leaves, call.structure
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    check_batch(leaves, tensors)
    _check_state(model)
    tensors = _apart(tensors, model)
    memory = _state_by_memory(model)
    names = input_names(model, call.dealt, structure)
    named = [name for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)]

    every = (*model.parameters(), *model.buffers(), *tensors)
    elsewhere = any(device == "cuda" for device, _ in autocast or ()) and not any(x.is_cuda for x in every)
    without_values = elsewhere or any(map(is_fake, every))
    if without_values:
        model, tensors = fake_copy(model, tensors)
        memory |= _state_by_memory(model)
    regions = _ambient_autocast() if autocast is None else autocast
    step, for_cuda = call.step(model, regions), any(device == "cuda" for device, _ in regions)
    traced = None if without_values and for_cuda else _trace(step, tuple(tensors))
    for_cuda = without_values and (traced is None or has_cuda_autocast(traced.program))
    with autocast_as_on_cuda() if for_cuda else nullcontext():
        traced = _trace(step, tuple(tensors)) if traced is None or for_cuda else traced
        program, updates, problems, idle = _settle(traced, named)
    outputs, output_structure, reassigned, changed = call.seen[-1]
    kept, dropped = _plain(outputs, output_structure)
    if loss is None and TENSOR not in outputs:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in outputs})) or "nothing"
        raise CaptureError(
            f"{type(model).__name__} returned {kinds}, and no tensor. A graph finds tensors in tuples, lists, dicts "
            f"and classes that torch takes apart. Return one of these, or register a dataclass of yours with "
            f"torch.utils._pytree.register_dataclass."
        )
    drawn = generator_states().keys() & set(changed)
    left = [f"attribute {name}: forward changes it, the graph does not" for name in changed if name not in drawn]
    left += [f"{name}: forward draws from it, the graph keeps what it drew; draw with torch" for name in sorted(drawn)]
    left += [f"check at {line}: forward raises there for some values, the graph does not" for line in step.known.checks]
    return Exported(
        program, updates, reassigned, changed, problems, tuple(leaves), names, structure, kept, output_structure,
        memory, (*dropped, *idle, *left, *traced.frozen),
    )  # fmt: skip


def _apart(tensors: list[Tensor], model: nn.Module) -> list[Tensor]:
    """The tensors of a batch as objects of their own, in memory of their own.

    Export takes one object for one value, and tells memory apart by its address. What is one at capture, as `ids` in
    `dict(input_ids=ids, labels=ids)`, is not for every batch; nor is an input that happens to be the model's state.
    """
    taken, made = {memory_of(tensor) for tensor in tensors_of(model)}, []
    for tensor in tensors:
        own = tensor.detach().clone() if memory_of(tensor) in taken else tensor.detach()
        taken.add(memory_of(tensor))
        made.append(own.requires_grad_(tensor.requires_grad))
    return made


def _state_by_memory(model: nn.Module) -> dict[int, str]:
    return {memory_of(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _check_state(model: nn.Module) -> None:
    """A sparse matrix of neighbours among the model's own tensors is told as what it is."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise refuse_sparse(f"The model's tensor {name}, of shape {tuple(tensor.shape)},")


def is_plain(leaf: Any) -> bool:
    """Whether a graph can keep an output: a tensor, or a plain value."""
    return leaf is TENSOR or isinstance(leaf, bool | int | float | str | None)


def _plain(outputs: tuple[Any, ...], structure: Structure) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Keep numbers, strings and None among the outputs; other objects become None and are reported."""
    kept, dropped = [], []
    for path, leaf in zip(structure.paths(), outputs, strict=True):
        if is_plain(leaf):
            kept.append(leaf)
        else:
            kept.append(None)
            dropped.append(
                f"output {'.'.join(map(str, path)) or 'itself'} ({type(leaf).__name__}): "
                "neither tensor nor plain value; the graph returns None there"
            )
    return tuple(kept), tuple(dropped)


@dataclass(frozen=True, slots=True)
class _Traced:
    """What torch.export gave for a step on some tensors, and what was met on the way."""

    step: _Step
    tensors: tuple[Tensor, ...]
    program: ExportedProgram
    problems: tuple[Problem, ...]
    frozen: tuple[str, ...]
    """What is read as it is now, though somebody may change it."""


def _trace(step: _Step, tensors: tuple[Tensor, ...]) -> _Traced:
    """Export with gradients on and autocast off, whatever region the caller is in: the graph says what it needs."""
    hooked: dict[Problem, None] = {}
    frozen: dict[Problem, None] = {}
    own = set(map(id, step.parameters()))  # which have stand-ins while they are traced

    def note_hook(frame: FrameType | None) -> None:
        place = find_user_line(frame, _Step.forward.__code__)
        hooked[Problem("a hook on a gradient", Source(*place) if place else None, _HOOK_ADVICE)] = None

    def note_beside(tensor: Tensor, is_frozen: bool, frame: FrameType | None) -> None:
        if id(tensor) in own:
            return
        place = find_user_line(frame, _Step.forward.__code__)
        what = f"a parameter{_name_beside(step.model, tensor)} of shape {list(tensor.shape)}"
        (frozen if is_frozen else hooked)[
            Problem(f"{what} that model.parameters() does not have", Source(*place) if place else None, _BESIDE_ADVICE)
        ] = None

    def line(frame: FrameType | None) -> str:
        place = find_user_line(frame, _Step.forward.__code__)
        again = f", segment {segments.current}" if segments.current else ""
        return f'File "{place[0]}", line {place[1]}{again}' if place else ""

    with ExitStack() as watches:
        for traced_otherwise in (loops_of_fixed_shape(step), counted_batches(step), matrices_of_edges()):
            watches.enter_context(traced_otherwise)
        for watch in (
            _explained(step, tensors), keep_cuda_autocast(), keep_markers(), batched_in_place(), duals_refused(),
            user_lines(line),
        ):
            watches.enter_context(watch)
        functions = watches.enter_context(watch_custom_functions())
        segments = watches.enter_context(follow_segments(any(p.requires_grad for p in step.parameters())))
        step.outside = outside = OutsideValues(step.model, step.loss_given, _Step.forward.__code__)
        step.followed = FollowedCalls(note_hook, note_beside, outside.call)
        program = torch.export.export(step, tensors, strict=False)
    told = tuple(dict.fromkeys(f"{p.what}: the graph keeps it as it was at capture" for p in frozen))
    problems = (*_backward_hooks(step), *hooked, *functions.problems())
    return _Traced(step, tensors, program, problems, (*told, *outside.told))


def _settle(
    traced: _Traced, input_names: list[str]
) -> tuple[ExportedProgram, Updates, tuple[Problem, ...], tuple[str, ...]]:
    """The program without regions and without writes: with new values of buffers, problems, and what has no effect."""
    program = traced.program
    with _explained(traced.step, traced.tensors):
        problems, idle = make_explicit(program, input_names)
        problems = (
            *problems,
            *overlapping_writes(program),
            *writes_over_operands(program),
            *doubtful_writes(program),
        )
        updates = functionalize(program)
        if updates is None:
            orders = drawn_orders(program.graph)
            with keep_draws(), composites_prepared_once():
                consist_of = {**hidden_views(program), **known_within(program.graph)}
                program, updates = program.run_decompositions(consist_of), ()
            put_in_real_parts(program.graph)
            keep_orders(program.graph, orders)
    return program, updates, (*traced.problems, *problems), idle


@contextmanager
def _explained(step: _Step, tensors: tuple[Tensor, ...]) -> Iterator[None]:
    """A user's forward may raise anything; it is told with its line, never swallowed."""
    try:
        with quiet(), neutral():
            yield
    except Exception as error:
        raise explain(error, step, tensors, step.called(tensors)) from error


def _name_beside(model: nn.Module, tensor: Tensor) -> str:
    """What holds a tensor that is no part of a model: ` ws[0] ` of a list, a dict or a module in one; else nothing."""
    for path, part in model.named_modules():
        for name, held in vars(part).items():
            for key, value in _items(held):
                within = dict(value.named_parameters()) if isinstance(value, nn.Module) else {"": value}
                for last, found in within.items():
                    if found is tensor:
                        return f" {path}{'.' if path else ''}{name}[{key!r}]{'.' if last else ''}{last}"
    return ""


def _items(held: Any) -> list[tuple[Any, Any]]:
    if isinstance(held, dict):
        return list(held.items())
    return list(enumerate(held)) if isinstance(held, list | tuple) else []


_HOOK_ADVICE = "a graph would forget it: remove it, or do what it does in forward"
_BESIDE_ADVICE = (
    "a graph would keep it as it is now: hold it in nn.ParameterList, nn.ParameterDict or nn.ModuleList, so that it is "
    "trained, or read it with .detach()"
)


def _backward_hooks(step: _Step) -> list[Problem]:
    hooked = [name for name, part in step.named_modules() if part._backward_hooks or part._backward_pre_hooks]
    return [Problem(f"the backward hook of {name.removeprefix(MODEL_PREFIX)}", None, _HOOK_ADVICE) for name in hooked]


@contextmanager
def neutral() -> Iterator[None]:
    off = partial(torch.autocast, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), off("cpu"), off("cuda"):
        yield
