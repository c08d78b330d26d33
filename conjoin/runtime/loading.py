"""`load`: from a plan and the user's model to this rank's module, under torchrun or any other launcher."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from conjoin.errors import PlanError, UsageError
from conjoin.ir import Pipeline, Plan, check_pipeline, check_plan, fingerprint_of, load_plan, plain_model
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.program.optimizer_watch import note_originals
from conjoin.runtime.program.other_plans import OtherPlans, Planner
from conjoin.runtime.ranks.communicator import World
from conjoin.runtime.ranks.joint_action import together
from conjoin.runtime.ranks.rendezvous import KeyStore, agree, check_world, draw_alike, share_values
from conjoin.runtime.ranks.session import Session, asked_device, device_of_rank, shared_session
from conjoin.runtime.state.initialization import check_init, initialise
from conjoin.runtime.state.storage import Store, check_model
from conjoin.runtime.state.weights import Weights, as_weights, check_weights, read_weights, tell
from conjoin.runtime.torch_private import has_gradient_hooks, spare_view_replay

Initialise = Callable[[nn.Module], None]


def load(  # noqa: PLR0913 – what may be chosen of a module
    plan: Plan | Pipeline | str | Path,
    model: nn.Module,
    *,
    session: Session | None = None,
    device: torch.device | str | None = None,
    init: Initialise | None = None,
    seed: int = 0,
    exact_seed: int | None = None,
    weights: Weights | str | PathLike[str] | None = None,
    loss: Any = None,
    planner: Planner | None = None,
) -> ParallelModule:
    """This rank's part of a plan, as a module that trains like the model does on one device.

    Every rank calls it with the same plan and model; nothing is sent before plan, model and number of ranks are known
    to agree. Modules share a session unless one is given, and lie on its device unless another is. A model on the meta
    device is never built as a whole: `init` (or the model's own `_init_weights`, or each module's `reset_parameters`)
    fills one module at a time, from `seed`. With `weights`, files of pretrained weights, every rank reads its pieces
    out of them. `exact_seed` makes every rank draw the random numbers one device so seeded would draw, for comparisons.
    In the first step ranks compare inputs, loss and gradients where they should agree. With a `planner` batches of
    other shapes, and the other mode, are planned when they first come; for a plan with a loss that needs the `loss`.
    """
    model, path = plain_model(model), None if isinstance(plan, Plan | Pipeline) else plan
    plan = _checked(plan)
    check_model(plan, model)
    _check_hooks(model)
    asked = None if weights is None else as_weights(weights)
    is_meta = any(x.is_meta for x in model.parameters())
    if asked is None:
        check_init(model, init)
    session = session or shared_session(device)
    communicator, keys = connect(plan, session)
    checked = None if asked is None else together(lambda: check_weights(asked, model))
    store = Store(plan, communicator.rank, session.device if device is None else device_of_rank(asked_device(device)))
    if is_meta:
        initialise(store, model, seed=seed, init=init, given=frozenset() if checked is None else checked.names)
    else:
        if keys is not None:
            share_values(keys, model, session.rank, session.num_ranks, store.device, session.patience_seconds)
        store.fill(model)
    if checked is not None:
        together(lambda: read_weights(checked, store))
        if communicator.rank == 0:
            tell(checked)
    others = None if planner is None else OtherPlans(plan, model, planner, loss, path)
    module = ParallelModule(plan, store, communicator, exact_seed, others)
    module.compare_every(None)
    note_originals(model)
    spare_view_replay()
    if keys is not None and module.draws_alike:
        draw_alike(keys, session.rank, session.num_ranks)
    return module


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks that would be left behind."""
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise UsageError(
                f"A plan was loaded with a model in which {name} has a hook on its gradient. Ranks train pieces of "
                f"their own, on which the hook would never run. Register it on the parameters of what conjoin.load "
                f"gave."
            )


def _checked(plan: Plan | Pipeline | str | Path) -> Plan | Pipeline:
    """A legal plan, from a file where it is named by one."""
    if isinstance(plan, Plan):
        return check_plan(plan)
    return check_pipeline(plan) if isinstance(plan, Pipeline) else load_plan(plan)


def connect(plan: Plan | Pipeline, session: Session | None = None) -> tuple[World, KeyStore | None]:
    """This rank's communicator and the store to compare notes in; other plans or numbers of ranks are refused."""
    session = session or shared_session()
    if session.world is None and plan.mesh.size > 1:
        raise PlanError(
            f"The plan of {plan.model.name} needs {plan.mesh.size} ranks, and this process was not started as one of "
            f"them. Ranks find each other through their launcher. Start the program with torchrun --nproc-per-node "
            f"{plan.mesh.size}, or call torch.distributed.init_process_group first."
        )
    check_world(session.num_ranks, plan.mesh.size, plan.model.name)
    keys = session.keys()
    if keys is not None:
        agree(keys, "plan", fingerprint_of(plan), session.rank, session.num_ranks, session.patience_seconds)
    return session.communicator(plan.mesh), keys
