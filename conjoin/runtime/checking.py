"""Does a plan train like one device? Loss, every gradient and the updated weights, step by step, in double precision.

The captured graph is run on one device and the plan on all its ranks, from the same values, the same batch and the same
random numbers: on devices of one kind, as each kind draws its own. Each rank compares the pieces it holds; a tensor's
difference is taken relative to its largest element, or to a thousandth of the largest gradient of all where the tensor
itself is nothing but rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import PlanError, UsageError
from conjoin.ir import (
    Graph,
    LeafKind,
    Plan,
    flatten_tree,
    is_random,
    model_mark,
    sequential,
    unflatten_tree,
    wide_dtype,
    widen,
    widen_plan,
)
from conjoin.machine import Mesh
from conjoin.runtime.captured import to_module
from conjoin.runtime.communicator import Communicator, group_device
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.storage import Store
from conjoin.runtime.threads import alone, run_ranks

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
        """The same in double precision, on the CPU."""
        leaves, spec = flatten_tree(self.batch)
        return Case(
            widen_plan(self.plan),
            widen(self.graph),
            _wide_model(self.model, self.graph),
            unflatten_tree([_wide(x) if isinstance(x, Tensor) else x for x in leaves], spec),
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
    """A copy with every tensor changed; unlike `model.to()` it keeps buffers tied and knows the graph's constants."""
    copied = copy.deepcopy(model)
    buffers: dict[int, tuple[Tensor, Tensor]] = {}
    for module in copied.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad, parameter.data = None, change(parameter.data)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffers.setdefault(id(buffer), (buffer, change(buffer)))[1]
    for leaf in graph.leaves_of(LeafKind.CONSTANT):
        if leaf.data is None:  # its values are those of an attribute
            path, _, name = leaf.name.rpartition(".")
            owner = copied.get_submodule(path)
            setattr(owner, name, change(getattr(owner, name)))
    return copied


def train_alone(case: Case, num_steps: int, device: torch.device | None = None) -> Reference:
    """Train the captured graph on one device, that of this process's group; the caller's generator is not touched."""
    device = device or group_device()
    graph, module = case.graph, _alone(case, device)
    batch, losses, gradients = _moved(case.batch, device), [], []
    optimizer = _optimizer(module.parameters())
    with _seeded(device):
        for _ in range(num_steps):
            losses.append(_step(module, optimizer, batch, graph))
            if not isfinite(losses[-1]):
                raise UsageError(
                    f"{graph.name} was to be compared with one device, and its loss there is {losses[-1]} in step "
                    f"{len(losses)}. What is not a number cannot be compared. Give it a batch and values with a finite "
                    f"loss, or compare fewer steps."
                )
            gradients.append(_clones((n, p.grad) for n, p in module.named_parameters(remove_duplicate=False)))
            _update(optimizer)
    return Reference(tuple(losses), tuple(gradients), _clones(_state(module).items()))


def _alone(case: Case, device: torch.device) -> nn.Module:
    """The captured graph on one device; where a plan draws for each micro-batch, one that takes the same ones."""
    plan = case.plan
    draws = any(is_random(node.op, node.args) for node in plan.graph.nodes)
    if plan.accumulation is None or not draws:
        return to_module(case.graph, _changed(case.model, case.graph, lambda x: x.to(device)))
    single = replace(plan, graph=sequential(plan.graph), mesh=Mesh(()), memory=())
    store = Store(single, 0, device)
    store.fill(case.model)
    return ParallelModule(single, store, alone(single.mesh), exact_seed=_SEED)


def _moved(batch: Any, device: torch.device) -> Any:
    leaves, spec = flatten_tree(batch)
    return unflatten_tree([x.to(device) if isinstance(x, Tensor) else x for x in leaves], spec)


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """The device's own generator started anew, and put back after."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        generator = torch.cuda.default_generators[device.index] if on_cuda else torch.default_generator
        generator.manual_seed(_SEED)
        yield


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def compare_rank(case: Case, reference: Reference, communicator: Communicator) -> Compared:
    """Train this rank's part of the plan and compare everything it holds with one device."""
    plan, device = case.plan, communicator.device
    batch = _moved(case.batch, device)
    store = Store(plan, communicator.rank, device)
    store.fill(case.model)
    module = ParallelModule(plan, store, communicator, exact_seed=_SEED)
    optimizer = _optimizer(module.parameters())
    losses: list[float] = []
    found: list[Difference] = []
    cut = _Cutter(plan, store, communicator.rank)
    for loss, gradients in zip(reference.losses, reference.gradients, strict=True):
        losses.append(_step(module, optimizer, batch, plan.graph))
        off = _relative(_number(losses[-1]), _number(loss), max(abs(loss), _SMALL))
        found.append(Difference("loss", communicator.rank, off))
        largest = max(map(_largest, gradients.values()), default=0.0)
        mine = {n: p.grad for n, p in module.named_parameters(remove_duplicate=False)}
        found += cut.differences("gradient of ", mine, gradients, _SMALL * largest)
        _update(optimizer)
    return tuple(losses), found + cut.differences("", _state(module), reference.state, _SMALL)


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
        for name in {**mine, **whole}:
            tensor, theirs = mine.get(name), whole.get(name)
            if tensor is None or theirs is None:
                same = tensor is None and theirs is None
                found += [] if same else [Difference(f"{what}{name} (missing on one side)", self.rank, inf)]
                continue
            part = theirs[tuple(slice(*span) for span in self.store.region(name, tuple(theirs.shape)))]
            found.append(Difference(f"{what}{name}", self.rank, _relative(tensor, part, max(floor, _largest(theirs)))))
        return found


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: Tensor) -> float:
    """The largest magnitude; infinities, as of an attention mask, do not count."""
    sizes = _exact(tensor).abs()
    return sizes[sizes.isfinite()].max().item() if sizes.isfinite().any() else 0.0


def _relative(tensor: Tensor, wanted: Tensor, scale: float) -> float:
    """The largest difference in units of the scale: none where both are the same infinity or both not a number."""
    mine, theirs = _exact(tensor), _exact(wanted)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    off = (mine - theirs)[~same].abs()
    if not off.isfinite().all():
        return inf
    return off.max().item() / max(scale, 1e-300) if off.numel() else 0.0


def verify_in_process(case: Case, num_steps: int = 5) -> Verdict:
    """Compare a plan with one device in double precision, all ranks in this process."""
    check_made_for(case.plan, case.graph)
    wide = case.widened()
    reference = train_alone(wide, num_steps, torch.device("cpu"))
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


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Linear in the gradients: Adam would make a step of a parameter whose gradient is nothing but rounding."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.optim.SGD(trained, lr=1e-2, momentum=0.9) if trained else None


def _update(optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.step()


def _step(module: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, graph: Graph) -> float:
    """One forward and backward pass; of a graph without a loss, everything it gives is summed up."""
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    outputs = module(*batch) if isinstance(batch, tuple | list) else module(batch)
    if graph.loss is not None:
        loss: Tensor = flatten_tree(outputs)[0][graph.loss]
    else:
        tensors = [x for x in flatten_tree(outputs)[0] if isinstance(x, Tensor) and x.numel()]
        squares = [_finite(x).square().mean() for x in tensors]
        loss = torch.stack(squares).sum() if squares else torch.zeros(())
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _finite(tensor: Tensor) -> Tensor:
    """In double precision; infinities, as of masked scores, count as nothing."""
    real = tensor.abs() if tensor.is_complex() else tensor
    return real.double().nan_to_num(nan=nan, posinf=0.0, neginf=0.0)


def _clones(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named if tensor is not None}
