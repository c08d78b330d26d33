"""The very next command: how a plan that was just saved is run on its machine, by torchrun and under Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from conjoin.cli.trained_weights import trained_weights

if TYPE_CHECKING:
    from conjoin.ir import Pipeline, Plan

_PORT = 29500
_FIRST_HOST = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"


@dataclass(frozen=True, slots=True)
class Asked:
    """What was named on the command line that running a plan needs again."""

    model: str
    batch: int | None
    sizes: Mapping[str, int]
    imports: Sequence[str]

    def words(self) -> list[str]:
        """The model with its options."""
        found = [self.model]
        found += [] if self.batch is None else ["--batch", str(self.batch)]
        for name, size in self.sizes.items():
            found += ["--length", str(size)] if name == "length" else ["--size", f"{name}={size}"]
        for module in self.imports:
            found += ["--import", module]
        return found


def next_commands(plan: Plan | Pipeline, output: Path | None, asked: Asked) -> dict[str, str]:
    """Commands that train by a saved plan, by where they are typed; none where it cannot be trained by them."""
    if output is None or not trained_weights(plan) or asked.model.endswith(".json"):
        return {}
    run = shlex.join(["-m", "conjoin", "run", str(output), *asked.words()])
    nodes = prod(axis.size for axis in plan.mesh.axes if axis.between_nodes)
    per_node = plan.mesh.size // nodes
    if plan.mesh.size == 1:
        return {"here": f"python {run}"}
    if nodes == 1:
        return {"here": f"torchrun --nproc-per-node {per_node} {run}"}
    shape = f"--nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d"
    slurm = f"srun --nodes {nodes} --ntasks-per-node 1"
    return {
        "every node": f"torchrun {shape} --rdzv-endpoint FIRST_NODE:{_PORT} {run}",
        "under Slurm": f"{slurm} torchrun {shape} --rdzv-id $SLURM_JOB_ID --rdzv-endpoint {_FIRST_HOST}:{_PORT} {run}",
    }


def next_lines(commands: Mapping[str, str]) -> list[str]:
    """The same for people: one line each."""
    titles = [where if where != "here" else "next" for where in commands]
    return [f"{title:<13}{command}" for title, command in zip(titles, commands.values(), strict=True)]
