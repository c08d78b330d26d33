"""Does a plan train like one device? Loss, every gradient and the updated weights, step by step, in double precision.

The captured graph is run on one device and the plan on all its ranks, from the same values, the same batches and the
same random numbers: on devices of one kind, as each kind draws its own. Each rank compares the pieces it holds; a
tensor's difference is taken relative to its largest element, or to a thousandth of the largest gradient of all where
the tensor itself is nothing but rounding. Where the user's own model is at hand it is run as well, without any graph,
and the captured one is compared with it (`capture_check.py`). No batch is the one that was captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import PlanError, UsageError
from conjoin.ir import (
    Graph,
    LeafKind,
    Pipeline,
    Plan,
    flatten_tree,
    is_random,
    micro_batched_parts,
    model_mark,
    norm_by_pieces,
    pieces_of,
    sequential,
    unflatten_tree,
    wide_dtype,
    widen,
    widen_pipeline,
    widen_plan,
)
from conjoin.machine import Mesh
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.program.captured import to_module
from conjoin.runtime.ranks.communicator import World
from conjoin.runtime.ranks.process_groups import group_device
from conjoin.runtime.ranks.threads import alone, run_ranks
from conjoin.runtime.state.blocks import cut_out
from conjoin.runtime.state.storage import Store
from conjoin.runtime.verification.capture_check import AgainstModel, against_model, against_model_in_double
from conjoin.runtime.verification.differences import (
    Difference,
    differences_of_state,
    differences_of_step,
    worst_of_each,
)
from conjoin.runtime.verification.fresh_batches import Freshness, fresh_batches
from conjoin.runtime.verification.one_by_one import OneByOne
from conjoin.runtime.verification.plain_model import PlainModel, changed_copy
from conjoin.runtime.verification.steps import (
    SEED,
    NoNumber,
    Reference,
    make_optimizer,
    moved,
    spread,
    state_of,
    step,
    train,
    update,
)

Compared = tuple[tuple[float, ...], list[Difference]]
"""The losses of a rank, and how far everything it holds is from one device."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a plan with one device."""

    num_ranks: int
    losses: tuple[float, ...]
    """On one device: of the model itself where that was run."""
    plan_losses: tuple[float, ...]
    differences: tuple[Difference, ...]
    """Of the plan and the captured graph, the largest first; of every tensor the largest over ranks and steps."""
    against_model: AgainstModel | None = None
    """The captured graph and the model itself; None where that was not run."""

    @property
    def worst(self) -> float:
        return max((difference.relative for difference in self.differences), default=0.0)

    @property
    def passed(self) -> bool:
        trains = all(difference.is_rounding for difference in self.differences)
        return trains and (self.against_model is None or self.against_model.passed)

    @property
    def told(self) -> tuple[str, ...]:
        """What there is to say of the model itself, line by line."""
        return self.against_model.told if self.against_model else ("the model itself was not run",)


def check_made_for(plan: Plan | Pipeline, graph: Graph) -> None:
    """Refuse a plan that was made for another model than the one captured."""
    mark = model_mark(graph).fingerprint
    if plan.model.fingerprint != mark:
        raise PlanError(
            f"The plan was made for {plan.model.name} with fingerprint {plan.model.fingerprint[:12]}, and the model "
            f"given has {mark[:12]}. The model, its batch or its loss was changed since, if only by capture, where "
            f"forward moves on something that is no tensor, as a generator. Take that out of forward, or make the plan "
            f"again."
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, the captured graph it was made from, the model with its values, and a batch."""

    plan: Plan | Pipeline
    graph: Graph
    model: nn.Module
    batch: Any
    plain: PlainModel | None = None
    """The model with its loss, to be run without any graph."""

    def widened(self) -> Case:
        """The same in double precision, on the CPU."""
        leaves, spec = flatten_tree(self.batch)
        return Case(
            widen_plan(self.plan) if isinstance(self.plan, Plan) else widen_pipeline(self.plan),
            widen(self.graph),
            _wide_model(self.model, self.graph),
            unflatten_tree([_wide(x) if isinstance(x, Tensor) else x for x in leaves], spec),
            self.plain.changed(_wide) if self.plain else None,
        )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", wide_dtype(tensor.dtype))


def _wide_model(model: nn.Module, graph: Graph) -> nn.Module:
    """A copy in double precision; unlike `model.double()` it knows complex numbers."""
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        raise UsageError(
            f"A {type(model).__name__} on the meta device was given to be compared with one device. It has no values "
            f"to start from. Build the model on the CPU, or give it values first."
        )
    return _changed(model, graph, _wide)


def _changed(model: nn.Module, graph: Graph, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with every tensor changed, those too that the graph has as constants."""
    copied = changed_copy(model, change)
    for leaf in graph.leaves_of(LeafKind.CONSTANT):
        if leaf.data is None:  # its values are those of an attribute
            path, _, name = leaf.name.rpartition(".")
            owner = copied.get_submodule(path)
            setattr(owner, name, change(getattr(owner, name)))
    return copied


def train_alone(case: Case, num_steps: int, device: torch.device | None = None) -> Reference:
    """Train the captured graph on one device, that of this process's group; the caller's generator is not touched."""
    device = device or group_device()
    for freshness in Freshness:
        batches = fresh_batches(case.batch, num_steps, freshness)
        try:
            return train(_alone(case, device), batches, case.graph, device)
        except (NoNumber, RuntimeError, IndexError, UsageError):
            if freshness is Freshness.GIVEN:
                raise
    raise AssertionError("the last batch is returned or raises")


def _takes_parts(plan: Plan | Pipeline) -> bool:
    """Whether one device, to be compared with, takes the same micro-batches: the model itself takes the whole batch."""
    return isinstance(plan, Pipeline) or _draws_for_each_micro_batch(plan)


def _draws_for_each_micro_batch(plan: Plan) -> bool:
    draws = any(is_random(node.op, node.args) for node in plan.graph.nodes)
    return draws and (plan.accumulation is not None or bool(micro_batched_parts(plan.graph)))


def _alone(case: Case, device: torch.device) -> nn.Module:
    """The captured graph on one device; where a plan draws for each micro-batch, one that takes the same ones, and
    where it takes statistics of pieces of the batch, one that does."""
    plan = case.plan
    if isinstance(plan, Pipeline):
        return OneByOne(plan, _changed(case.model, case.graph, lambda x: x.to(device)))
    if not _draws_for_each_micro_batch(plan):
        graph = norm_by_pieces(case.graph, pieces_of(plan.graph))
        return to_module(graph, _changed(case.model, graph, lambda x: x.to(device)))
    single = replace(plan, graph=sequential(plan.graph), mesh=Mesh(()), memory=())
    store = Store(single, 0, device)
    store.fill(case.model)
    return ParallelModule(single, store, alone(single.mesh), exact_seed=SEED)


def compare_rank(case: Case, reference: Reference, communicator: World) -> Compared:
    """Train this rank's part of the plan and compare everything it holds with one device."""
    plan, device, rank = case.plan, communicator.device, communicator.rank
    store = Store(plan, rank, device)
    store.fill(case.model)
    module = ParallelModule(plan, store, communicator, exact_seed=SEED)
    optimizer, is_streamed = make_optimizer(module.parameters()), any(p.on_host for p in module.input_parts())
    losses: list[float] = []
    found: list[Difference] = []

    def cut(name: str, whole: Tensor) -> Tensor:
        return cut_out(whole, store.blocks(name, tuple(whole.shape)))

    for batch, loss, gradients in zip(reference.batches, reference.losses, reference.gradients, strict=True):
        given = moved(batch, device) if not is_streamed else module.placed(moved(batch, torch.device("cpu")))
        losses.append(step(lambda given: spread(module, given), optimizer, given, plan.graph.loss))
        held: dict[str, Any] = {n: p.grad for n, p in module.named_parameters(remove_duplicate=False)}
        # each rank compares by itself
        mine = {n: x.as_subclass(Tensor) if isinstance(x, Tensor) else x for n, x in held.items()}
        held = {name: gradient for name, gradient in gradients.items() if store.holds(name)}
        found += differences_of_step((losses[-1], mine), (loss, held), rank, cut)
        update(optimizer)
    state = {name: value for name, value in reference.state.items() if store.holds(name)}
    return tuple(losses), found + differences_of_state(state_of(module), state, rank, cut)


def verify_in_process(case: Case, num_steps: int = 5) -> Verdict:
    """Compare a plan with one device in double precision, all ranks in this process."""
    check_made_for(case.plan, case.graph)
    wide = case.widened()
    reference = train_alone(wide, num_steps, torch.device("cpu"))
    against = compare_with_model(case, wide, num_steps)
    results = run_ranks(case.plan.mesh, lambda ranks: compare_rank(wide, reference, ranks))
    found = verdict(reference.losses, results, against)
    return replace(found, losses=reference.losses) if _takes_parts(case.plan) else found


def compare_with_model(case: Case, wide: Case, num_steps: int) -> AgainstModel | None:
    """The captured graph against the model itself, in double precision or its own; None where it is not at hand."""
    if case.plain is None or wide.plain is None:
        return None
    found = against_model_in_double(wide.graph, wide.plain, wide.model, wide.batch, num_steps)
    return found if found is not None and found.passed else against_model(case.graph, case.plain, case.batch, num_steps)


def verdict(losses: tuple[float, ...], results: list[Compared], against: AgainstModel | None = None) -> Verdict:
    """The comparison of all ranks as one: of every tensor the worst."""
    ordered = worst_of_each([difference for _, found in results for difference in found])
    return Verdict(len(results), against.losses if against else losses, results[0][0], ordered, against)
