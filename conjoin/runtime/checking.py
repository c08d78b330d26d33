"""Does a plan train like one device? Loss, every gradient and the updated weights, step by step, in double precision.

The captured graph is run on one device and the plan on all its ranks, from the same values, the same batch and the same
random numbers. Each rank compares the pieces it holds; a tensor's difference is taken relative to its largest element,
or to a thousandth of the largest gradient of all where the tensor itself is nothing but rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import PlanError
from conjoin.ir import Graph, Plan, flatten_tree, model_mark, unflatten_tree, widen
from conjoin.runtime.captured import to_module
from conjoin.runtime.communicator import Communicator
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.storage import Store
from conjoin.runtime.threads import run_ranks

TOLERANCE = 1e-9
"""Relative, in double precision: a wrong layout is wrong in the first digits, rounding in the last."""
_SEED = 20_240_601
_SMALL = 1e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one tensor of one rank is from what one device has."""

    what: str
    rank: int
    relative: float


Compared = tuple[tuple[float, ...], list[Difference]]
"""The losses of a rank, and how far everything it holds is from one device."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a plan with one device."""

    num_ranks: int
    losses: tuple[float, ...]
    """On one device."""
    plan_losses: tuple[float, ...]
    differences: tuple[Difference, ...]
    """The largest first; of every tensor the largest over ranks and steps."""

    @property
    def worst(self) -> float:
        return max((difference.relative for difference in self.differences), default=0.0)

    @property
    def passed(self) -> bool:
        return self.worst <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Reference:
    """What one device computed: the loss and all gradients of every step, and the state after the last."""

    losses: tuple[float, ...]
    gradients: tuple[Mapping[str, Tensor], ...]
    state: Mapping[str, Tensor]


def check_made_for(plan: Plan, graph: Graph) -> None:
    """Refuse a plan that was made for another model than the one captured."""
    mark = model_mark(graph).fingerprint
    if plan.model.fingerprint != mark:
        raise PlanError(
            f"The plan was made for {plan.model.name} with fingerprint {plan.model.fingerprint[:12]}, and the model "
            f"given has {mark[:12]}. The model, its batch or its loss was changed since. Make the plan again."
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, the captured graph it was made from, the model with its values, and a batch."""

    plan: Plan
    graph: Graph
    model: nn.Module
    batch: Any

    def widened(self) -> Case:
        """The same in double precision."""
        leaves, spec = flatten_tree(self.batch)
        batch = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
        return Case(
            replace(self.plan, graph=widen(self.plan.graph)),
            widen(self.graph),
            copy.deepcopy(self.model).double(),
            unflatten_tree(batch, spec),
        )


def train_alone(case: Case, num_steps: int) -> Reference:
    """Train the captured graph on one device."""
    graph, module = case.graph, to_module(case.graph, copy.deepcopy(case.model))
    torch.manual_seed(_SEED)
    losses, gradients = [], []
    optimizer = _optimizer(module.parameters())
    for _ in range(num_steps):
        loss = _step(module, optimizer, case.batch, graph)
        losses.append(loss)
        gradients.append(_clones((n, p.grad) for n, p in module.named_parameters(remove_duplicate=False)))
        optimizer.step()
    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return Reference(tuple(losses), tuple(gradients), _clones(state.items()))


def compare_rank(case: Case, reference: Reference, communicator: Communicator) -> Compared:
    """Train this rank's part of the plan and compare everything it holds with one device."""
    plan, model, batch = case.plan, case.model, case.batch
    store = Store(plan, communicator.rank, torch.device("cpu"))
    store.fill(model)
    module = ParallelModule(plan, store, communicator, exact_seed=_SEED)
    optimizer = _optimizer(module.parameters())
    losses: list[float] = []
    found: list[Difference] = []
    cut = _Cutter(plan, store, communicator.rank)
    for loss, gradients in zip(reference.losses, reference.gradients, strict=True):
        losses.append(_step(module, optimizer, batch, plan.graph))
        found.append(Difference("loss", communicator.rank, abs(losses[-1] - loss) / max(abs(loss), _SMALL)))
        largest = max((g.abs().max().item() for g in gradients.values() if g.numel()), default=0.0)
        mine = {n: p.grad for n, p in module.named_parameters(remove_duplicate=False)}
        found += cut.differences("gradient of ", mine, gradients, _SMALL * largest)
        optimizer.step()
    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return tuple(losses), found + cut.differences("", state, reference.state, _SMALL)


@dataclass(frozen=True, slots=True)
class _Cutter:
    plan: Plan
    store: Store
    rank: int

    def differences(
        self, what: str, mine: Mapping[str, Tensor | None], whole: Mapping[str, Tensor], floor: float
    ) -> list[Difference]:
        """Every tensor of this rank against the same part of the whole one."""
        found = []
        for name, tensor in mine.items():
            theirs = whole.get(name)
            if tensor is None or theirs is None:
                same = tensor is None and theirs is None
                found += [] if same else [Difference(f"{what}{name} (missing on one side)", self.rank, float("inf"))]
                continue
            part = theirs[tuple(slice(*span) for span in self.store.region(name, tuple(theirs.shape)))]
            off = (tensor.detach() - part).abs().max().item() if part.numel() else 0.0
            scale = max(theirs.abs().max().item() if theirs.numel() else 0.0, floor, 1e-300)
            found.append(Difference(f"{what}{name}", self.rank, off / scale if off == off else float("inf")))
        return found


def verify_in_process(case: Case, num_steps: int = 5) -> Verdict:
    """Compare a plan with one device in double precision, all ranks in this process."""
    check_made_for(case.plan, case.graph)
    wide = case.widened()
    reference = train_alone(wide, num_steps)
    results = run_ranks(case.plan.mesh, lambda ranks: compare_rank(wide, reference, ranks))
    return verdict(reference.losses, results)


def verdict(losses: tuple[float, ...], results: list[Compared]) -> Verdict:
    """The comparison of all ranks as one: of every tensor the worst."""
    worst: dict[str, Difference] = {}
    for _, found in results:
        for difference in found:
            if difference.what not in worst or difference.relative > worst[difference.what].relative:
                worst[difference.what] = difference
    ordered = tuple(sorted(worst.values(), key=lambda difference: -difference.relative))
    return Verdict(len(results), losses, results[0][0], ordered)


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Linear in the gradients: Adam would make a step of a parameter whose gradient is nothing but rounding."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=1e-2, momentum=0.9)


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, graph: Graph) -> float:
    """One forward and backward pass; of a graph without a loss, everything it gives is summed up."""
    optimizer.zero_grad(set_to_none=True)
    outputs = module(*batch) if isinstance(batch, tuple | list) else module(batch)
    if graph.loss is not None:
        loss = flatten_tree(outputs)[0][graph.loss]
    else:
        tensors = [x for x in flatten_tree(outputs)[0] if isinstance(x, Tensor) and x.requires_grad]
        loss = torch.stack([x.double().square().mean() for x in tensors]).sum()
    loss.backward()
    return float(loss.detach())


def _clones(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named if tensor is not None}

