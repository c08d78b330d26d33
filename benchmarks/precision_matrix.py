"""Every precision that a CPU has, on every kind of model, by every named strategy: gradients against one device.

    python -m benchmarks.precision_matrix [--models gpt-125m,...] [--precisions ...] [--seconds 600] [--output FILE]

Tiny models of the zoo, four ranks that are threads of one process. In a cell a plan's gradients are put together from
all ranks and compared with those in float64; so are those that plain torch has on one device under the same policy
(autocast, or the model cast), or, in fp8-mixed, for which torch has none, those of the plan of one device. A plan may
be off by twice what one device is, and by one rounding of the dtype, for what is summed up in another order. Where one
device itself is off by half or more there is nothing to follow, and the cell says so.

The file is read first: cells that it has are not done again. Cells come in an order in which any beginning of it has
all models, precisions and strategies about equally often.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from conjoin.api import capture
from conjoin.errors import ConjoinError
from conjoin.ir import Graph, Pipeline, Plan
from conjoin.machine import parse_machine
from conjoin.search import make_pipeline, make_plan
from tests.runtime.thread_modules import module_on, run_ranks
from zoo import Workload, build

MODELS = ("gpt-125m", "llama-8b", "bert-base", "vit-b-16", "resnet-50", "moe-8x7b")
PRECISIONS = ("float32", "tf32", "bf16", "bf16-mixed", "bf16-mixed,reduce=bf16", "fp16-mixed", "fp8-mixed")
STRATEGIES = (
    "data-parallel", "zero1", "zero2", "fsdp", "hsdp:shard=2,replicate=2", "megatron:tp=4", "megatron:tp=2,dp=2,sp",
    "megatron:tp=2,dp=2,sp,fsdp", "context:cp=2,dp=2", "context:cp=4,ring", "expert:ep=2,dp=2", "fsdp+expert:ep=4",
    "expert:ep=2+megatron:tp=2", "fsdp+recompute=full", "megatron:tp=2,dp=2+recompute=selective+micro=2",
    "pipeline:pp=2,dp=2,micro=2", "pipeline:pp=4,micro=4,schedule=1f1b",
)  # fmt: skip
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
BATCH, NOISE = 8, 0.5
SCALE = 256.0
"""A loss is scaled, as by a `GradScaler`, so that float16 holds its gradients."""

Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Cell:
    """How far gradients are off from those in float64: as a part of their norm, over all parameters."""

    plan: float
    one_device: float
    bound: float

    @property
    def verdict(self) -> str:
        """`follows` within its bound, `off` beyond; `noise` where one device itself does not follow float64."""
        if self.one_device >= NOISE:
            return "noise"
        return "follows" if self.plan <= self.bound else "off"


def narrow_of(precision: str) -> torch.dtype:
    """What a precision rounds to."""
    return NARROW.get(precision.split(",")[0].removesuffix("-mixed"), torch.float32)


@cache
def workload(name: str) -> Workload:
    """A tiny model of the zoo in training, without dropout."""
    made = build(f"{name}:tiny", batch_size=BATCH, seed=1)
    for module in made.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # of attention in one call
            setattr(module, "dropout", 0.0)  # noqa: B010
    made.model.train()
    return made


@cache
def graph_of(name: str, precision: str) -> Graph:
    """The model captured in a precision."""
    made = workload(name)
    return capture(made.model, made.batch, made.loss, check=False, precision=precision)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """A batch with its floats in a dtype."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


@cache
def gradients_of(name: str, precision: str, micro: int = 1) -> Gradients:
    """By plain torch on one device, in micro-batches one after the other; "float64" is exact."""
    made, narrow = workload(name), narrow_of(precision)
    is_mixed = "-mixed" in precision
    dtype = torch.float64 if precision == "float64" else torch.float32 if is_mixed else narrow
    region: AbstractContextManager[Any] = torch.autocast("cpu", narrow) if is_mixed else nullcontext()
    model = copy.deepcopy(made.model).to(dtype)
    count, loss_of = len(inspect.signature(model.forward).parameters), made.loss or _itself
    for number in range(micro):
        batch = tree_map_only(Tensor, partial(_part, number, micro), cast(made.batch, dtype))
        with region:
            loss = loss_of(model(*batch[:count]), *batch[count:]) / micro
        torch.autograd.backward(loss * SCALE)
    return {key: p.grad.double() / SCALE for key, p in model.named_parameters() if p.grad is not None}


def _itself(loss: Tensor) -> Tensor:
    return loss


def _part(number: int, count: int, whole: Tensor) -> Tensor:
    return whole.chunk(count)[number]


def gradients_by(plan: Plan | Pipeline, name: str, dtype: torch.dtype) -> Gradients:
    """By a plan on threads, put together of all ranks' pieces."""
    made = workload(name)
    model, batch = copy.deepcopy(made.model).to(dtype), cast(made.batch, dtype)

    def program(ranks: Any) -> dict[str, tuple[Any, Tensor]]:
        module = module_on(plan, model, ranks)
        store = module.store
        (module(*batch) * SCALE).backward()
        found = {key: p.grad for key, p in module.named_parameters() if p.grad is not None}
        places = {key: torch.arange(p.numel()).view(p.shape) for key, p in model.named_parameters()}
        return {key: (store.cut(key, places[key]), g.as_subclass(Tensor)) for key, g in found.items()}

    whole: Gradients = {}
    for pieces in run_ranks(plan.mesh, program):
        for key, (places, piece) in pieces.items():
            into = whole.setdefault(key, torch.zeros(model.get_parameter(key).shape, dtype=torch.float64))
            into.view(-1)[places] = piece.double() / SCALE
    return whole


@cache
def alone(name: str, precision: str, micro: int) -> Gradients:
    """On one device, under the policy of a precision."""
    if precision.startswith("fp8"):
        plan = make_plan(graph_of(name, precision), parse_machine("local:1"), "single")
        return gradients_by(plan, name, torch.float32)
    return gradients_of(name, precision, micro)


def compared(name: str, precision: str, strategy: str) -> Cell:
    """The cell of a model, a precision and a strategy; a ConjoinError where they do not fit."""
    make = make_pipeline if strategy.startswith("pipeline") else make_plan
    plan = make(graph_of(name, precision), parse_machine("local:4"), strategy)
    takes_statistics = any(isinstance(module, nn.BatchNorm2d) for module in workload(name).model.modules())
    micro = plan.num_micro_batches if isinstance(plan, Pipeline) and takes_statistics else 1
    exact, plain = gradients_of(name, "float64", micro), alone(name, precision, micro)
    found = gradients_by(plan, name, torch.bfloat16 if precision == "bf16" else torch.float32)
    return judged(exact, plain, found, narrow_of(precision))


def judged(exact: Gradients, plain: Gradients, found: Gradients, narrow: torch.dtype) -> Cell:
    """Gradients of one device and of a plan beside the exact ones."""
    assert found.keys() == exact.keys(), found.keys() ^ exact.keys()
    total, usual, off = _norm(exact), _norm(exact, plain), _norm(exact, found)
    bound = 2 * usual + torch.finfo(narrow).eps * total
    return Cell(off / total, usual / total, bound / total)


def _norm(gradients: Gradients, less: Gradients | None = None) -> float:
    taken = gradients if less is None else {key: gradients[key] - less[key] for key in gradients}
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in taken.values()))


def cells(models: tuple[str, ...] = MODELS, precisions: tuple[str, ...] = PRECISIONS) -> list[tuple[str, str, str]]:
    """All cells, in a mixed order that is always the same."""
    found = list(product(models, precisions, STRATEGIES))
    Random(0).shuffle(found)
    return found


def told(asked: list[tuple[str, str, str]], known: dict[str, Any], seconds: float) -> Iterator[tuple[str, Any]]:
    """What becomes of every cell that is not known yet, until the time is over."""
    end = time.monotonic() + seconds
    for name, precision, strategy in asked:
        key = f"{name} {precision} {strategy}"
        if key in known or time.monotonic() > end:
            continue
        try:
            cell = compared(name, precision, strategy)
        except ConjoinError as error:
            yield key, {"verdict": "refused", "why": str(error).replace(f"{Path.cwd()}/", "")[:200]}
            continue
        yield key, {**{what: float(f"{value:.3g}") for what, value in asdict(cell).items()}, "verdict": cell.verdict}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precisions", default=";".join(PRECISIONS), help="separated by ;")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    path: Path | None = asked.output
    known: dict[str, Any] = {} if path is None or not path.exists() else json.loads(path.read_text("utf-8"))["cells"]
    wanted = cells(tuple(asked.models.split(",")), tuple(asked.precisions.split(";")))
    where = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    about = {"command": " ".join(["python -m benchmarks.precision_matrix", *sys.argv[1:]]), **where}
    for key, cell in told(wanted, known, asked.seconds):
        known[key] = cell
        print(f"{key:<70} {json.dumps(cell)[:110]}", flush=True)
        if path is not None:
            content = {**about, "date": date.today().isoformat(), "cells": dict(sorted(known.items()))}
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(dict(Counter(cell["verdict"] for cell in known.values())))


if __name__ == "__main__":
    main()
