"""`load`: from a plan and the user's model to this rank's module, under torchrun or any other launcher."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from conjoin.errors import PlanError, UsageError
from conjoin.ir import Plan, check_plan, load_plan, plan_fingerprint
from conjoin.runtime.communicator import Communicator, ProcessGroups, group_device
from conjoin.runtime.initialization import initialise
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.rendezvous import KeyStore, agree, check_world, draw_alike, share_values
from conjoin.runtime.storage import Store, check_model
from conjoin.runtime.threads import alone
from conjoin.runtime.torch_private import default_store
from conjoin.runtime.watching import Watch

Initialise = Callable[[nn.Module], None]


def load(
    plan: Plan | str | Path,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    init: Initialise | None = None,
    seed: int = 0,
    exact_seed: int | None = None,
) -> ParallelModule:
    """This rank's part of a plan, as a module that trains like the model does on one device.

    Every rank calls it with the same plan and model. The process group is set up from the launcher's environment unless
    it is there already; nothing is sent before plan, model and number of ranks are known to agree. A model on the meta
    device is never built as a whole: `init` (or each module's `reset_parameters`) fills one module at a time, from
    `seed`. `exact_seed` makes every rank draw the random numbers one device so seeded would draw, for comparisons.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"A {type(model).__name__} was given instead of the model. A plan is run over the model it was made for. "
            f"Pass the nn.Module."
        )
    plan = check_plan(plan) if isinstance(plan, Plan) else load_plan(plan)
    check_model(plan, model)
    wanted = None if device is None else torch.device(device)
    communicator, keys = connect(plan, wanted)
    store = Store(plan, communicator.rank, wanted or _default_device())
    if any(x.is_meta for x in model.parameters()):
        initialise(store, model, seed=seed, init=init)
    else:
        if keys is not None:
            share_values(keys, model, communicator.rank, communicator.mesh.size, store.device)
        store.fill(model)
    module = ParallelModule(plan, store, communicator, exact_seed)
    if keys is not None and module.draws_alike:
        draw_alike(keys, communicator.rank, communicator.mesh.size)
    return module


def connect(plan: Plan, device: torch.device | None = None) -> tuple[Communicator, KeyStore | None]:
    """This rank's communicator and the store to compare notes in; other plans or numbers of ranks are refused."""
    if plan.mesh.size == 1 and not dist.is_initialized() and not dist.is_torchelastic_launched():
        return alone(plan.mesh), None
    if not dist.is_initialized():
        _join(plan, device)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    check_world(num_ranks, plan.mesh.size, plan.model.name)
    loads = default_store("conjoin").add(f"loads/{rank}", 1)
    store = default_store(f"conjoin/{loads}")
    agree(store, "plan", plan_fingerprint(plan), rank, num_ranks)
    watch = Watch(store, rank, num_ranks)
    Finalize(None, watch.leave, exitpriority=0)  # unlike atexit it also runs in a process of multiprocessing
    return ProcessGroups(plan.mesh, watch.explain), store


def _join(plan: Plan, device: torch.device | None) -> None:
    on_cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    backend = "nccl" if on_cuda else "gloo"
    try:
        dist.init_process_group(backend)
    except ValueError as error:
        raise PlanError(
            f"The plan of {plan.model.name} needs {plan.mesh.size} ranks, and this process was not started as one of "
            f"them ({error}). Ranks find each other through their launcher. Start the program with torchrun "
            f"--nproc-per-node {plan.mesh.size}, or call torch.distributed.init_process_group first."
        ) from None


def _default_device() -> torch.device:
    if dist.is_initialized() or not torch.cuda.is_available():
        return group_device()
    return torch.device("cuda", torch.cuda.current_device())
