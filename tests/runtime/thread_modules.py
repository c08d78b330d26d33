"""Modules of a plan or a pipeline on ranks that are threads of this process."""

from __future__ import annotations

import torch
from torch import nn

from conjoin.ir import Pipeline, Plan
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import World
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.storage import Store

__all__ = ["module_on", "run_ranks"]


def module_on(plan: Plan | Pipeline, model: nn.Module, ranks: World) -> ParallelModule:
    """A rank's module with its pieces of a model."""
    store = Store(plan, ranks.rank, torch.device("cpu"))
    store.fill(model)
    return ParallelModule(plan, store, ranks)
