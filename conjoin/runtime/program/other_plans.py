"""Plans for other shapes and the other mode of a model, made after the plan it was loaded with, and kept.

The model is kept without its values, to be captured again. How it is captured and what plan is made of it is not known
here: both are given. Beside a plan file the plans made after it are kept as files too.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.environment import installed_version
from conjoin.errors import ConjoinError, PlanError, UsageError
from conjoin.ir import (
    Graph,
    Leaf,
    LeafKind,
    Pipeline,
    Plan,
    Structure,
    by_tensor,
    captured_graph,
    copied_model,
    describe_tree,
    fingerprint_of,
    flatten_tree,
    load_plan,
    unflatten_tree,
    whole_type,
)
from conjoin.ops import dtype_name

_log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()
"""Ranks that are threads of one process capture one model."""
_NARROW = (torch.bfloat16, torch.float16)

AnyPlan = Plan | Pipeline
Dealt = list[Any]
"""A call: what the model takes by position and by name, then what the loss does."""


@dataclass(frozen=True, slots=True)
class Planner:
    """How another plan is made."""

    capture: Callable[[AnyPlan, nn.Module, Any, Any, Sequence[Graph]], Graph]
    """In the precision of a plan, from a model, a batch and a loss; graphs of it for other shapes are there already."""
    decide: Callable[[AnyPlan, Graph], tuple[AnyPlan, str]]
    """A plan for a graph after another plan, and what there is to say of it."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a program is for: a mode, and a call with tensors of some types."""

    training: bool
    call: str
    structure: Structure

    @staticmethod
    def of(training: bool, dealt: Dealt) -> Key:
        return Key(training, call_text(dealt), describe_tree(dealt)[1])

    def __str__(self) -> str:
        return f"{'training' if self.training else 'evaluation'} on {self.call}"


@dataclass(frozen=True, slots=True)
class Made:
    """A plan, what there is to say of it, and where it is to be kept."""

    plan: AnyPlan
    remark: str = ""
    path: Path | None = None


class OtherPlans:
    """The plans of one model for calls of other shapes or in the other mode."""

    def __init__(
        self, plan: AnyPlan, model: nn.Module, planner: Planner, loss: Any = None, path: str | Path | None = None
    ) -> None:
        self.plan, self._planner, self._loss = plan, planner, loss
        self._folder = None if path is None else Path(f"{path}.shapes")
        self._made: dict[Key, Made] = {}
        try:
            self.model, self._why = bare_copy(model), ""
        except Exception as error:  # a user's model may hold anything that cannot be copied
            self.model, self._why = nn.Module(), f"{type(error).__name__}: {str(error)[:200]}"
        self._modes = {module: module.training for module in self.model.modules()}

    @property
    def names(self) -> list[str]:
        """What the model takes by position."""
        try:
            found = signature(self.model.forward).parameters.values()
        except (TypeError, ValueError):
            return []
        return [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]

    def find(self, key: Key, dealt: Dealt) -> Made:
        """The plan for a call, which was made before, lies beside the plan's file, or is made now."""
        with _one_at_a_time:
            if key not in self._made:
                path = self._file(key)
                self._made[key] = self._read(path) or self._make(key, dealt, path)
            return self._made[key]

    def go_over(self, plan: AnyPlan) -> None:
        """Make plans after another one from now on."""
        self.plan, self._folder = plan, None
        self._made.clear()

    def forget(self, key: Key) -> None:
        """Let go of a plan that was not used for long."""
        self._made.pop(key, None)

    def _make(self, key: Key, dealt: Dealt, path: Path | None) -> Made:
        if self._why:
            raise UsageError(
                f"{self._asked(key)} was asked for. The model would have to be captured again for that, and "
                f"it could not be copied without its values: {self._why}. Make a plan for this shape and mode."
            )
        loss, training = self._loss_for(key, dealt), key.training
        same_mode = training == self.plan.graph.training == self._modes[self.model]
        for module, mode in (self._modes if same_mode else self._modes_in(training)).items():
            module.training = mode
        batch = _batch(dealt, self.names)
        graph = self._planner.capture(self.plan, self.model, batch, loss, self._graphs(training, same_mode))
        self._check_graph(graph, key)
        plan, remark = self._planner.decide(self.plan, graph)
        check_stored_alike(self.plan, plan)
        return Made(plan, remark, path)

    def _modes_in(self, training: bool) -> dict[nn.Module, bool]:
        """What the model's own `train` and `eval` make of the modes of its parts; what else they do is for a model that
        has its weights, as to merge some of them, and is done to a copy."""
        parts = list(self._modes)
        try:
            copied = bare_copy(self.model)
            _ = copied.train() if training else copied.eval()
            return dict(zip(parts, (part.training for part in copied.modules()), strict=True))
        except Exception as error:  # a user's function, of a model without values
            _log.debug("parts of %s are all in one mode: %s", type(self.model).__name__, error)
            return dict.fromkeys(parts, training)

    @cached_property
    def kept_modes(self) -> tuple[str, ...]:
        """Parts that the plan has in another mode than the model's `train` or `eval` would put them in."""
        if self._modes[self.model] != self.plan.graph.training:
            return ()
        would, names = self._modes_in(self.plan.graph.training), dict(self.model.named_modules())
        return tuple(name for name, part in names.items() if self._modes[part] != would[part])

    def _graphs(self, training: bool, same_mode: bool) -> list[Graph]:
        """What the model was captured as for other shapes; those in a mode first, and one of the other mode.

        In the plan's own mode parts of the model may have been in the other one on purpose.
        """
        is_own = same_mode or training != self.plan.graph.training
        plans = (*([self.plan] if is_own else ()), *(made.plan for made in self._made.values()))
        found = [captured_graph(plan) if isinstance(plan, Plan) else plan.model.graph for plan in plans]
        graphs = [graph for graph in found if graph is not None]
        others = [graph for graph in graphs if graph.training != training]
        return [*(graph for graph in graphs if graph.training == training), *others[:1]]

    def _loss_for(self, key: Key, dealt: Dealt) -> Any:
        """The loss; none where the call has nothing for it that the plan's has: then the model alone is asked."""
        children = self.plan.graph.input_structure.children
        takes_more = len(children) == 4 and any(part.num_leaves for part in children[2:])
        given = bool(dealt[2] or dealt[3])
        if given and self._loss is None:
            raise self._without_loss(key)
        return self._loss if given or not takes_more else None

    def _check_graph(self, graph: Graph, key: Key) -> None:
        if self._loss is None and self.plan.graph.loss is not None and graph.loss is None and key.training:
            raise self._without_loss(key)
        lost = {t.dtype for t in _types(self.plan.graph)} - {t.dtype for t in _types(graph)}
        if lost.intersection(_NARROW):
            raise UsageError(
                f"{self._asked(key)} was asked for. The plan was made in an autocast of the caller, which "
                f"it does not name, and the model would be captured without. Make the plan with precision=, as "
                f"'bf16-mixed'."
            )

    def _without_loss(self, key: Key) -> UsageError:
        return UsageError(
            f"{self._asked(key)} was asked for. The plan is of the model with a loss, and a plan for "
            f"another shape or mode has to be made of both. Pass the loss, as in conjoin.load(plan, model, loss=loss)."
        )

    def _asked(self, key: Key) -> str:
        return f"A step of {self.plan.model.name} in {key}"

    def _file(self, key: Key) -> Path | None:
        if self._folder is None:
            return None
        content = repr((key, fingerprint_of(self.plan), installed_version()))
        return self._folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"

    def _read(self, path: Path | None) -> Made | None:
        """The plan in a file, if it is there and fits."""
        if path is None or not path.exists():
            return None
        try:
            plan = load_plan(path)
            check_stored_alike(self.plan, plan)
        except ConjoinError as error:
            _log.warning("the plan in %s is not used: %s", path, error)
            return None
        return Made(plan)


def keep(made: Made) -> None:
    """Write a plan where it is to be kept; where that cannot be, it is made again another time."""
    if made.path is None:
        return
    try:
        made.path.parent.mkdir(exist_ok=True)
        made.plan.save(made.path)
    except (OSError, ConjoinError) as error:
        _log.info("%s is not kept: %s", made.path, error)


def bare_copy(model: nn.Module) -> nn.Module:
    """The model without the values of its parameters and buffers, which are never copied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    return copied_model(model, memo)


def check_stored_alike(plan: AnyPlan, other: AnyPlan) -> None:
    """Refuse a plan that stores a parameter or buffer in other pieces: all programs share them."""
    for mine, its in _pairs(plan, other):
        _check_pieces(mine, its)
    if other.mesh != plan.mesh:
        raise PlanError(
            f"Another plan of {plan.model.name} was to share its weights. It is for the mesh {other.mesh}, and they "
            f"lie on {plan.mesh}. Make it after this plan."
        )


def _pairs(plan: AnyPlan, other: AnyPlan) -> Iterator[tuple[Plan, Plan]]:
    """A plan and the other, stage by stage."""
    if isinstance(plan, Plan) and isinstance(other, Plan):
        yield plan, other
        return
    mine, its = (() if isinstance(each, Plan) else each.stages for each in (plan, other))
    if [stage.ranks for stage in mine] != [stage.ranks for stage in its]:
        raise PlanError(
            f"Another plan of {plan.model.name} was to share its weights. They lie on {len(mine) or 'no'} stages, and "
            f"it has {len(its) or 'none'}, or other ranks in them. Make it after this plan."
        )
    for stage, same in zip(mine, its, strict=True):
        yield stage.plan, replace(same.plan, graph=_without(same.plan.graph, same.borrowed))


def _without(graph: Graph, names: tuple[str, ...]) -> Graph:
    return replace(graph, leaves=tuple(leaf for leaf in graph.leaves if leaf.name not in names))


def _check_pieces(plan: Plan, other: Plan) -> None:
    kinds = (LeafKind.PARAMETER, LeafKind.BUFFER)
    mine, its = (by_tensor(leaf for leaf in each.graph.leaves if leaf.kind in kinds) for each in (plan, other))
    for key, leaves in its.items():
        wanted, whole = _as_stored(leaves), str(whole_type(leaves[0]).laid_out(()))
        have = _as_stored(mine[key]) if key in mine else whole
        if wanted != have:
            raise PlanError(
                f"Another plan of {plan.model.name} was to share its weights. It stores {key[1]} as {wanted}, which is "
                f"{have} here. Make it after this plan, or load it as a module of its own."
            )


def _as_stored(leaves: tuple[Leaf, ...]) -> str:
    """How a tensor is stored, in words: in which sections makes a difference only where these are split."""
    type = whole_type(leaves[0])
    is_packed = len(leaves) > 1 and type.layout
    return f"{type} in {', '.join(leaf.name for leaf in leaves)}" if is_packed else str(type)


def _types(graph: Graph) -> Iterator[Any]:
    return (type for node in graph.nodes for type in node.types)


def call_text(dealt: Dealt) -> str:
    """A call in words: its tensors by type, and whatever else it was given.

    >>> call_text([(torch.zeros(2, 3), 1), {"y": torch.zeros(2)}, (), {}])
    'f32[2,3], 1, y=f32[2]'
    """
    leaves, structure = describe_tree(dealt)
    told = []
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        name = ".".join(str(step) for step in path[1:] if isinstance(step, str))
        is_tensor = isinstance(leaf, Tensor)
        what = f"{dtype_name(leaf.dtype)}[{','.join(map(str, leaf.shape))}]" if is_tensor else repr(leaf)
        told.append(f"{name}={what}" if name else what)
    return ", ".join(told)


def _batch(dealt: Dealt, names: list[str]) -> Any:
    """A call as a batch of inputs by position, or by name."""
    args, named, for_loss, loss_named = dealt
    if not named and not loss_named:
        return _without_values((*args, *for_loss))
    if len(args) > len(names) or for_loss:
        raise UsageError(
            f"A step was called with {len(args) + len(for_loss)} inputs by position and {len(named) + len(loss_named)} "
            f"by name. Which is which is not known: forward takes {', '.join(names)}. Pass all of them by name."
        )
    return _without_values({**dict(zip(names, args, strict=False)), **named, **loss_named})


def _without_values(batch: Any) -> Any:
    leaves, spec = flatten_tree(batch)
    return unflatten_tree([torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in leaves], spec)
