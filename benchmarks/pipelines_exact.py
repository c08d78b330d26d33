"""Pipelines on Gloo processes against one device: every schedule, eight kinds of models, on 2, 4, 6 and 8 ranks.

    python -m benchmarks.pipelines_exact        # writes results/pipelines_exact.json; rows of other runs stay in it

Plain PyTorch is the judge, in float64: the model in a loop over the same micro-batches, five steps of SGD with
momentum, so that weights tell how large gradients were. Compared are the loss and the norm of all gradients in every
step, and all weights and buffers in the end; the largest relative difference is told. Nothing is drawn: dropout is off
(`conjoin verify` compares draws). GPT-2, BERT, T5, Mixtral and ResNet are those of transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import conjoin
import zoo
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import DeviceType, Link, Machine, NodeKind
from conjoin.runtime import launch
from conjoin.search import make_pipeline

RESULT = Path(__file__).parent / "results" / "pipelines_exact.json"
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "found")
CUTS = {
    2: ("pp=2,micro=4", "pp=2,micro=2"),
    4: ("pp=2,tp=2,micro=4", "pp=4,micro=4", "pp=2,fsdp,micro=2"),
    6: ("pp=3,micro=6", "pp=2,zero1,micro=2"),
    8: ("pp=3,micro=6", "pp=2,dp=2,tp=2,sp,micro=4", "pp=4,fsdp,micro=4"),
}
"""By ranks; the models take them in turns. Three stages on eight ranks are unequal: 3, 3 and 2."""
STEPS, SAMPLES, WORDS, LENGTH = 5, 24, 48, 8
BOUND = 1e-9


@dataclass(frozen=True, slots=True)
class Task:
    """A model and its batches, of which the last tensor is for the loss."""

    model: nn.Module
    batches: list[tuple[Tensor, ...]]
    loss: Callable[..., Tensor]


class Logits(nn.Module):
    """A library's model, of which only this is wanted; a decoder is given what the encoder is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        config: Any = self.model.config
        twice = {"decoder_input_ids": x} if config.is_encoder_decoder else {}
        found: Tensor = self.model(x, **twice).logits
        return found


def over_classes(logits: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())


def batch_of(name: str) -> tuple[Tensor, ...]:
    if name == "resnet":
        return torch.randn(SAMPLES, 3, 32, 32, dtype=torch.float64), torch.randint(4, (SAMPLES,))
    return torch.randint(WORDS, (SAMPLES, LENGTH)), torch.randint(WORDS, (SAMPLES, LENGTH))


LAYERS = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
          "num_attention_heads": 2, "max_position_embeddings": LENGTH}  # fmt: skip
LIBRARY: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "gpt2": (transformers.GPT2LMHeadModel, {
        "vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "n_positions": LENGTH, "n_embd": 16, "n_layer": 4,
        "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "bert": (transformers.BertForMaskedLM, {
        **LAYERS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "t5": (transformers.T5ForConditionalGeneration, {
        "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0}),
    "mixtral": (transformers.MixtralForCausalLM, {
        **LAYERS, "num_key_value_heads": 2, "num_local_experts": 4, "experts_implementation": "batched_mm"}),
    "resnet": (transformers.ResNetForImageClassification, {
        "embedding_size": 8, "hidden_sizes": [8, 16, 16], "depths": [1, 2, 2], "layer_type": "basic", "num_labels": 4}),
}  # fmt: skip
"""Small ones, without dropout, and without what generation would reuse."""


def library(kind: str) -> nn.Module:
    cls, sizes = LIBRARY[kind]
    made = cls(cls.config_class(**sizes))  # type: ignore[attr-defined]
    made.config.use_cache = False  # type: ignore[union-attr]
    return made


def task_of(name: str) -> Task:
    """Made anew, the same in every process."""
    torch.manual_seed(5)
    if name not in ZOO:
        return Task(Logits(library(name)).double().train(), [batch_of(name) for _ in range(STEPS)], over_classes)
    made = [zoo.build(ZOO[name], batch_size=SAMPLES, seed=seed) for seed in range(STEPS)]
    assert made[0].loss is not None
    for module in made[0].model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    return Task(made[0].model.double().train(), [doubled(x.batch) for x in made], made[0].loss)


def doubled(batch: zoo.Batch) -> tuple[Tensor, ...]:
    assert isinstance(batch, tuple)
    return tuple(x.double() if x.is_floating_point() else x for x in batch)


ZOO = {
    "gpt": "gpt-125m:tiny", "u-transformer": "u-transformer:tiny", "experts": "moe-gpt-1.3b-8e:tiny"
}  # fmt: skip
MODELS = (*ZOO, *LIBRARY)


@dataclass(frozen=True, slots=True)
class Trained:
    """What five steps gave."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def train_plainly(name: str, parts: int) -> Trained:
    task = task_of(name)
    optimizer = optimizer_of(task.model)
    losses, norms = [], []
    for batch in task.batches:
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(x.chunk(parts) for x in batch), strict=True):
            loss = task.loss(task.model(*part[:-1]), part[-1]) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(task.model.parameters(), math.inf).item())
        optimizer.step()
    return Trained(losses, norms, {key: x.detach().clone() for key, x in task.model.state_dict().items()})


def train_by_plans(rank: int, plans: list[tuple[str, str]]) -> list[Trained | str]:
    """On one rank: what each plan gives, or why it cannot be run."""
    torch.set_num_threads(1)
    return [train_by_plan(path, name) for path, name in plans]


def train_by_plan(path: str, name: str) -> Trained | str:
    task = task_of(name)
    losses, norms = [], []
    try:
        step = conjoin.load(path, task.model, device="cpu", loss=task.loss)
        optimizer = optimizer_of(step)
        for batch in task.batches:
            optimizer.zero_grad()
            loss = step(*batch)
            loss.backward()
            losses.append(loss.item())
            norms.append(step.clip_grad_norm_(math.inf).item())
            optimizer.step()
        return Trained(losses, norms, conjoin.full_state_dict(step, everywhere=True))
    except conjoin.ConjoinError as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    ranks: int
    strategy: str
    stages: tuple[int, ...]
    """Ranks of each stage."""
    difference: float | None
    """The largest relative one of losses, norms and state, on any rank."""
    refused: str = ""


def difference(found: Trained, wanted: Trained) -> float:
    told = [abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    told += [abs(a - b) / abs(b) for a, b in zip(found.norms, wanted.norms, strict=True)]
    assert found.state.keys() == wanted.state.keys()
    for key, whole in wanted.state.items():
        if whole.is_floating_point():
            told.append(((found.state[key] - whole).norm() / whole.norm().clamp_min(1e-3)).item())
        else:
            told.append(0.0 if torch.equal(found.state[key], whole) else math.inf)
    return max(math.inf if math.isnan(x) else x for x in told)


def rows_on(ranks: int, models: list[str], schedules: list[str]) -> Iterator[Row]:
    """All pipelines on one number of ranks, in one set of processes."""
    graphs = {name: graph_of(name) for name in models}
    asked: list[tuple[str, str, tuple[int, ...], int]] = []
    with tempfile.TemporaryDirectory() as folder:
        plans: list[tuple[str, str]] = []
        for number, (name, schedule) in enumerate((m, s) for m in models for s in schedules):
            cut = CUTS[ranks][(number + number // len(schedules)) % len(CUTS[ranks])]
            strategy = f"pipeline:{cut},schedule={schedule}"
            try:
                plan = make_pipeline(graphs[name], machine_of(ranks), strategy)
            except conjoin.ConjoinError as error:
                yield Row(name, ranks, strategy, (), None, str(error))
                continue
            path = Path(folder) / f"{len(plans)}.json"
            plan.save(path)
            plans.append((str(path), name))
            asked.append((name, strategy, tuple(len(s.ranks) for s in plan.stages), plan.num_micro_batches))
        answers = launch(ranks, train_by_plans, plans)
    wanted: dict[tuple[str, int], Trained] = {}
    for (name, strategy, stages, micro), *found in zip(asked, *answers, strict=True):
        if (name, micro) not in wanted:
            wanted[name, micro] = train_plainly(name, micro)
        refused = next((x for x in found if isinstance(x, str)), "")
        apart = None if refused else max(difference(x, wanted[name, micro]) for x in found)
        yield Row(name, ranks, strategy, stages, apart, refused)


def machine_of(ranks: int) -> Machine:
    """With speeds, so that schedules can be found."""
    device = DeviceType("cpu", "cpu", 2**33, 1e10, (("float32", 4e10),))
    links = tuple(Link((str(place), "network"), 1e9, 1e-5) for place in range(ranks))
    return Machine("here", 1, ranks, "cpu", nodes=(NodeKind("node", 1, (device,) * ranks, links),))


def graph_of(name: str) -> Graph:
    task = task_of(name)
    return capture(task.model, task.batches[0], task.loss)


def stored_rows(path: Path, anew: set[tuple[str, int]]) -> list[Row]:
    """Those of a run before, of what was not asked for now."""
    found = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = [Row(**{**row, "stages": tuple(row["stages"])}) for row in found]
    return [row for row in rows if (row.model, row.ranks) not in anew]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, choices=CUTS, default=list(CUTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    rows = []
    for ranks in given.ranks:
        for row in rows_on(ranks, given.models, given.schedules):
            rows.append(row)
            told = f"{row.strategy:52} {row.stages!s:16} {row.refused or f'{row.difference:.1e}'}"
            print(f"{row.model:14} {ranks} ranks  {told}", flush=True)
    rows += stored_rows(given.output, {(row.model, row.ranks) for row in rows})
    apart = [row.difference for row in rows if row.difference is not None]
    wrong = sum(found > BOUND for found in apart)
    print(f"{len(apart)} pipelines ran, worst {max(apart, default=0.0):.1e}, {wrong} beyond {BOUND}; "
          f"{len(rows) - len(apart)} refused")  # fmt: skip
    given.output.write_text(json.dumps({
        "command": f"python -m benchmarks.pipelines_exact {' '.join(sys.argv[1:])}".strip(), "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__,
        "transformers": transformers.__version__, "python": platform.python_version(),
        "rows": [asdict(row) for row in rows],
    }, indent=1) + "\n", encoding="utf-8")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
