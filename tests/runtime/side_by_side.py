"""Calls in several shapes and both modes: by the plain model on one device, and by a plan on ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.api import _capture_again, _decide_alike
from conjoin.ir import Graph, Pipeline, Plan, flatten_tree
from conjoin.runtime import ParallelModule, Planner, run_ranks
from conjoin.runtime.program.other_plans import OtherPlans
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.state.storage import Store

SEED = 3
_graphs: dict[Any, Graph] = {}


def _captured_once(
    plan: Plan | Pipeline, model: nn.Module, batch: Any, loss: Any, known: Sequence[Graph]
) -> Graph:
    """A graph depends on shapes and mode, not on plans: the same one serves the plans of all strategies."""
    leaves, spec = flatten_tree(batch)
    key = plan.model.fingerprint, model.training, str(spec), *((tuple(x.shape), x.dtype) for x in leaves), loss
    if key not in _graphs:
        _graphs[key] = _capture_again(plan, model, batch, loss, known)
    return _graphs[key]


PLANNER = Planner(_captured_once, _decide_alike)
CLOSE = 1e-9


@dataclass(frozen=True)
class Call:
    """A step of training, or an evaluation without gradients."""

    training: bool
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """A model with its loss, and a plan of it."""

    model: nn.Module
    loss: Callable[..., Any] | None
    plan: Plan | Pipeline


def plainly(case: Case, call: Call, model: nn.Module) -> Tensor:
    """What the model itself gives: the loss."""
    given = (*call.args, *(call.kwargs or {}).values())
    if case.loss is None:
        return model(*call.args, **(call.kwargs or {})).loss
    return case.loss(model(given[0]), *given[1:])


def by_plain_model(case: Case, calls: Sequence[Call]) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses, gradients of the steps of training, and the state in the end."""
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, gradients = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        for call in calls:
            model.train(call.training)
            with torch.set_grad_enabled(call.training):
                loss = plainly(case, call, model)
            losses.append(loss.item())
            if call.training:
                optimizer.zero_grad()
                loss.backward()
                gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
                optimizer.step()
    return losses, gradients, {name: x.detach() for name, x in model.state_dict().items()}


def module_of(case: Case, others: OtherPlans | None, ranks: Communicator) -> ParallelModule:
    store = Store(case.plan, ranks.rank, torch.device("cpu"))
    store.fill(case.model)
    return ParallelModule(case.plan, store, ranks, SEED, others)


def others_of(case: Case) -> OtherPlans:
    return OtherPlans(case.plan, case.model, PLANNER, case.loss)


def check(case: Case, calls: Sequence[Call], close: float = CLOSE) -> None:
    """Assert that every rank has the losses, gradients and weights of the plain model."""
    losses, gradients, state = by_plain_model(case, calls)
    others = others_of(case)

    def program(ranks: Communicator) -> None:
        step = module_of(case, others, ranks)
        optimizer = torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9)
        expected = iter(gradients)
        for call, wanted in zip(calls, losses, strict=True):
            step.train(call.training)
            with torch.set_grad_enabled(call.training):
                found = step(*call.args, **(call.kwargs or {}))
            loss = found if isinstance(found, Tensor) else found.loss
            assert abs(loss.item() - wanted) <= close * max(1.0, abs(wanted)), (call, loss.item(), wanted)
            if call.training:
                optimizer.zero_grad()
                loss.backward()
                _compare(step, {n: p.grad for n, p in step.named_parameters()}, next(expected), close)
                optimizer.step()
        held = {**dict(step.named_parameters()), **dict(step.named_buffers())}
        _compare(step, {name: x.detach() for name, x in held.items() if name in state}, state, close)

    run_ranks(case.plan.mesh, program)


def _compare(step: ParallelModule, mine: dict[str, Any], whole: dict[str, Tensor], close: float) -> None:
    for name in mine.keys() & whole.keys():  # a tied one has one name
        tensor = whole[name]
        part = step.store.cut(name, tensor)
        own = mine[name].detach().as_subclass(Tensor).double()
        assert torch.allclose(own, part.double(), rtol=close, atol=close), name
