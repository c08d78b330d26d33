"""What `run` and `verify` are asked for, as every rank is told it, and what ranks tell each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms

if TYPE_CHECKING:
    from torch import nn

    from conjoin.ir import Pipeline, Plan

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
_MODEL_HELP = "The model the plan was made for: zoo name, file.py:function or module:function."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Training steps.")]
BatchOption = Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")]


@dataclass(frozen=True, slots=True)
class Asked:
    """A plan and the model that it is for."""

    plan: str
    """Path of the plan file."""
    model: str
    batch_size: int | None
    imports: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    """Of the model, by name."""

    def read(self) -> Plan | Pipeline:
        """The plan; one that is not for the ranks torchrun started is refused before anything is built for it."""
        found = rooms.models.read_plan(self.plan, self.imports, self.model)
        if rooms.dist.is_torchelastic_launched():
            rooms.runtime.check_world(int(os.environ["WORLD_SIZE"]), found.mesh.size, found.model.name)
        return found

    def workload(self, plan: Plan | Pipeline, seed: int = 0) -> tuple[nn.Module, Any, Any]:
        """The same model, batch and loss on every rank, in the dtypes that the precision of the plan has for them."""
        rooms.torch.manual_seed(seed)
        model, batch, loss = rooms.models.load_workload(self.model, self.batch_size, dict(self.sizes))
        asked = rooms.frontends.Precision.parse(plan.precision) if plan.precision else None
        model, batch = (model, batch) if asked is None else asked.converted(model, batch)
        return model, batch, loss


def is_first_rank() -> bool:
    """Whether this process speaks for all."""
    return not rooms.dist.is_initialized() or rooms.dist.get_rank() == 0


def gathered(mine: Any) -> list[Any]:
    """What every rank has, on every rank; alone what this one has."""
    if not rooms.dist.is_initialized():
        return [mine]
    answers: list[Any] = [None] * rooms.dist.get_world_size()
    rooms.dist.all_gather_object(answers, mine)
    return answers
