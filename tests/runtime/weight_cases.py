"""A small model with all that files of weights meet, its plans, and its weights as other libraries write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from conjoin.errors import ConjoinError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import parse_machine
from conjoin.runtime import full_state_dict, run_ranks, save_weights
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.state.initialization import initialise
from conjoin.runtime.state.storage import Store
from conjoin.runtime.state.weights import Weights, check_weights, read_weights
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences

CPU = torch.device("cpu")
PLANS = [("data-parallel", 1), ("fsdp", 3), ("fsdp", 4), ("megatron", 2)]


class Net(nn.Module):
    """Tied weights, statistics, buffers saved and not saved, sizes that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.rand(6))
        self.register_buffer("derived", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.derived.fill_(2.0)
        self.kept.fill_(3.0)

    def forward(self, i: Tensor) -> Tensor:
        x = self.norm(self.up(self.embed(i) * self.kept)).relu()
        y: Tensor = self.head(self.down(x) * self.derived)
        return y


BATCH = (torch.arange(8) % 11, torch.arange(8) * 3 % 11)


def on_meta(build: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return build().train()


@cache
def graph() -> Graph:
    return capture(on_meta(), BATCH, cross_entropy)


@cache
def plan_for(strategy: str, num_ranks: int) -> Plan:
    return make_plan(graph(), parse_machine(f"local:{num_ranks}"), strategy)


@cache
def source() -> dict[str, Tensor]:
    """Values to be loaded, under all names."""
    torch.manual_seed(7)
    return {name: torch.rand_like(x) if x.is_floating_point() else x + 5 for name, x in one_of_each(Net()).items()}


def one_of_each(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    del state["head.weight"]
    return state


def part_of(plan: Plan, communicator: Communicator, weights: Weights, model: nn.Module) -> ParallelModule:
    """A rank's module of a model on the meta device, with weights."""
    checked = check_weights(weights, model)
    store = Store(plan, communicator.rank, CPU)
    initialise(store, model, given=checked.names)
    read_weights(checked, store)
    return ParallelModule(plan, store, communicator)


def loaded(plan: Plan, path: Path, **arguments: Any) -> dict[str, Tensor]:
    """The whole state after every rank has read its pieces."""
    found = run_ranks(
        plan.mesh,
        lambda ranks: full_state_dict(part_of(plan, ranks, Weights(path, **arguments), on_meta()), everywhere=True),
    )
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in found[0])
    return found[0]


def assert_is_source(state: dict[str, Tensor]) -> None:
    assert state.keys() == Net().state_dict().keys()
    for name, tensor in source().items():
        assert torch.equal(state[name], tensor), name
    assert torch.equal(state["head.weight"], source()["embed.weight"])


def sharded(folder: Path, ending: str, save: Callable[[dict[str, Tensor], Path], None]) -> Path:
    """Two shards and their index, as Hugging Face's folders have them."""
    stem = "model" if ending == "safetensors" else "pytorch_model"
    shards: list[dict[str, Tensor]] = [{}, {}]
    for i, (name, tensor) in enumerate(source().items()):
        shards[i % 2][name] = tensor
    files = [f"{stem}-0000{i + 1}-of-00002.{ending}" for i in range(2)]
    for file, shard in zip(files, shards, strict=True):
        save(shard, folder / file)
    named = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return folder


def written(folder: Path, form: str) -> Path:
    """The values to be loaded in a form, by the libraries that define it."""
    match form:
        case "model.safetensors":
            safetensors.torch.save_file(source(), folder / form)
            return folder
        case "safetensors" | "bin":
            return sharded(folder, form, safetensors.torch.save_file if form == "safetensors" else torch.save)
        case "nested.pt":
            torch.save({"epoch": 3, "model": source(), "optimizer": {"lr": 0.1}}, folder / form)
        case "transposed.pt":
            torch.save(
                {name: x.mT.contiguous().mT if x.dim() == 2 else x for name, x in source().items()}, folder / form
            )
        case _:
            torch.save(source(), folder / form)
    return folder / form


def given(tmp_path: Path, **changes: Tensor | None) -> Path:
    """The values to be loaded with some changed, left out (None) or added."""
    state = {**source(), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    return path


def told(action: Callable[[], object]) -> str:
    with pytest.raises(ConjoinError) as caught:
        action()
    assert_three_sentences(caught.value)
    return str(caught.value)


def save_by(plan: Plan, source_path: Path, target: Path, **arguments: Any) -> None:
    """Load on the ranks of a plan, and save."""
    run_ranks(
        plan.mesh,
        lambda ranks: save_weights(target, part_of(plan, ranks, Weights(source_path), on_meta()), **arguments),
    )


def read_by_library(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(safetensors.torch.load_file(file))
    return found


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def other_source() -> dict[str, Tensor]:
    return {name: x + 1 for name, x in source().items()}
