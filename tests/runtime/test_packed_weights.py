"""Packed weights under tensor parallelism: a rank has its own rows of query, key and value, and all else is the user's.

The judge is the plain model in double precision: losses, every gradient, and the weights after steps of AdamW.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from conjoin.errors import PlanError
from conjoin.frontends import capture
from conjoin.ir import Graph, Pipeline, Plan, plan_from_json, plan_to_json
from conjoin.machine import parse_machine
from conjoin.runtime import ParallelModule, full_state_dict, load_checkpoint, save_checkpoint, save_weights
from conjoin.runtime.program.other_plans import check_stored_alike
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.state.initialization import initialise
from conjoin.runtime.state.pieces import Piece
from conjoin.runtime.state.storage import Store
from conjoin.runtime.state.weights import Weights, check_weights, read_weights
from conjoin.search import make_pipeline, make_plan
from tests.runtime import side_by_side
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.packed_models import PACKED, WIDTH, GatedMlp, loss_of, make_batch, make_model
from tests.runtime.thread_modules import module_on, run_ranks

STEPS, CLOSE = 3, 1e-9


@cache
def graph_of(name: str) -> Graph:
    return capture(make_model(name), make_batch(), loss_of)


@cache
def plan_for(name: str, strategy: str, num_ranks: int) -> Plan | Pipeline:
    make = make_pipeline if strategy.startswith("pipeline") else make_plan
    return make(graph_of(name), parse_machine(f"local:{num_ranks}"), strategy)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def train(step: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> list[tuple[float, dict[str, Tensor]]]:
    """Steps on batches from the first on: losses and gradients."""
    found = []
    for tokens, targets in map(make_batch, range(first, first + STEPS)):
        loss = step(tokens, targets) if isinstance(step, ParallelModule) else loss_of(step(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        gradients = {name: p.grad.detach().clone() for name, p in step.named_parameters() if p.grad is not None}
        found.append((loss.item(), gradients))
        optimizer.step()
    return found


@cache
def plainly(name: str) -> tuple[list[tuple[float, dict[str, Tensor]]], dict[str, Tensor]]:
    """The same by the plain model, twice as many steps, and its state after the first half."""
    model = make_model(name)
    optimizer = adam(model)
    first = train(model, optimizer)
    state = {key: x.clone() for key, x in model.state_dict().items()}
    return first + train(model, optimizer, STEPS), state


def is_packed(name: str) -> bool:
    return any(part in name for part in PACKED) and "narrow" not in name


CASES = [
    ("nanogpt", "megatron:tp=4", 4, 4), ("nanogpt", "megatron:tp=2,sp,fsdp+recompute=full", 4, 4),
    ("nanogpt", "pipeline:pp=2,tp=2,micro=2", 4, 2), ("gpt2", "megatron:tp=2,sp", 2, 2),
    ("gpt2", "fsdp+megatron:tp=2+micro=2", 4, 4), ("encoder", "megatron:tp=4", 4, 4),
    ("encoder", "megatron:tp=2+micro=2", 2, 2), ("decoder", "megatron:tp=2", 2, 2), ("timm", "megatron:tp=2", 2, 2),
    ("phi3", "megatron:tp=2,sp", 2, 2), ("phi3", "megatron:tp=2,zero1", 4, 4), ("lora", "megatron:tp=2,sp", 2, 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "strategy", "num_ranks", "parts"), CASES)
def test_training_is_the_plain_models_on_a_part_of_the_weights(
    name: str, strategy: str, num_ranks: int, parts: int
) -> None:
    model, plan, (wanted, state) = make_model(name), plan_for(name, strategy, num_ranks), plainly(name)
    shapes = {key: p.shape for key, p in model.named_parameters()}

    def program(ranks: Any) -> None:
        step = module_on(plan, model, ranks)
        for (loss, gradients), (right, whole) in zip(train(step, adam(step)), wanted, strict=False):
            assert loss == pytest.approx(right, rel=CLOSE)
            for key, gradient in gradients.items():
                part = step.store.cut(key, whole[key])
                torch.testing.assert_close(gradient.as_subclass(Tensor), part, rtol=CLOSE, atol=CLOSE)
        for key, parameter in step.named_parameters():
            assert parameter.dim() == len(shapes[key]), "groups of weight decay go by it"
            if is_packed(key) and (".0." in key or isinstance(plan, Plan)):  # a stage may end inside of a later block
                assert parameter.numel() * parts == shapes[key].numel(), (key, parameter.shape)
        for key, x in full_state_dict(step, everywhere=True).items():
            torch.testing.assert_close(x, state[key], rtol=CLOSE, atol=CLOSE)

    run_ranks(plan.mesh, program)


def test_a_plan_file_says_the_same() -> None:
    plan = plan_for("phi3", "megatron:tp=2,sp", 2)
    assert isinstance(plan, Plan)
    assert plan_from_json(plan_to_json(plan)).graph == plan.graph


def test_the_state_is_the_users_and_comes_in_again() -> None:
    model, plan = make_model("gpt2"), plan_for("gpt2", "megatron:tp=2,sp", 2)
    other = {key: 2 * x + 1 for key, x in model.state_dict().items()}

    def program(ranks: Any) -> list[Any]:
        step = module_on(plan, model, ranks)
        state = step.state_dict()
        assert {key: x.shape for key, x in state.items()} == {key: x.shape for key, x in other.items()}
        step.load_state_dict(other)
        mine = copy.deepcopy(step.state_dict())
        for key, x in full_state_dict(step, everywhere=True).items():
            torch.testing.assert_close(x, other[key])
        step.load_state_dict({key: torch.zeros_like(x) for key, x in other.items()})
        step.load_state_dict(mine)
        for key, x in full_state_dict(step, everywhere=True).items():
            torch.testing.assert_close(x, other[key])
        packed = state["model.transformer.h.0.attn.c_attn.weight"]
        assert isinstance(packed, Piece)
        return [packed.regions, step.clip_grad_norm_(0.1) if train(step, adam(step)) else None]

    (first, norm), (second, same) = run_ranks(plan.mesh, program)
    rows = (0, 16)
    assert first == ((rows, (0, 8)), (rows, (16, 24)), (rows, (32, 40)))
    assert second == ((rows, (8, 16)), (rows, (24, 32)), (rows, (40, 48)))
    model.load_state_dict(other)
    train(model, adam(model))
    right = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(torch.stack([norm, same]), right.expand(2), rtol=CLOSE, atol=CLOSE)


def test_checkpoints_go_on_elsewhere(tmp_path: Path) -> None:
    """Saved by two processes that hold heads: read by torch as a plain model's, and by four threads that hold other
    rows."""
    name, (wanted, state) = "gpt2", plainly("gpt2")
    plan, other = plan_for(name, "megatron:tp=2,sp", 2), plan_for(name, "fsdp+megatron:tp=2+micro=2", 4)
    (tmp_path / "two").mkdir()

    def begin(ranks: Communicator) -> None:
        step = module_on(plan, make_model(name), ranks)
        optimizer = adam(step)
        train(step, optimizer)
        save_checkpoint(tmp_path / "ours", step, optimizer)
        torch_save(step.state_dict(), checkpoint_id=tmp_path / "torchs")

    def resume(ranks: Communicator) -> list[float]:
        model = make_model(name)
        model.load_state_dict({key: torch.zeros_like(x) for key, x in model.state_dict().items()})
        step = module_on(other, model, ranks)
        optimizer = adam(step)
        load_checkpoint(tmp_path / "ours", step, optimizer)
        return [loss for loss, _ in train(step, optimizer, STEPS)]

    run_processes(plan.mesh, begin, tmp_path / "two")
    for losses in run_ranks(other.mesh, resume):
        assert losses == pytest.approx([loss for loss, _ in wanted[STEPS:]], rel=CLOSE)
    read = {key: torch.zeros_like(x) for key, x in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(read, checkpoint_id=tmp_path / "torchs", no_dist=True)
    for key, x in read.items():
        torch.testing.assert_close(x, state[key], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(("name", "strategy"), [("encoder", "megatron:tp=2"), ("phi3", "pipeline:pp=2,tp=2,micro=2")])
def test_other_lengths_and_evaluation_use_the_same_pieces(name: str, strategy: str) -> None:
    plan = plan_for(name, strategy, 4 if "pipeline" in strategy else 2)
    case = side_by_side.Case(make_model(name), loss_of, plan)
    short = tuple(x[:, :4].contiguous() for x in make_batch(7))
    calls = [side_by_side.Call(True, make_batch(5)), side_by_side.Call(False, make_batch(6)),
             side_by_side.Call(True, short), side_by_side.Call(False, short)]  # fmt: skip
    side_by_side.check(case, calls)


def test_files_of_weights_are_read_by_pieces_and_written_whole(tmp_path: Path) -> None:
    model, plan = make_model("gpt2"), plan_for("gpt2", "megatron:tp=2,sp", 2)
    found = {key: x.contiguous().clone() for key, x in model.state_dict().items() if "lm_head" not in key}
    safetensors.torch.save_file(found, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = make_model("gpt2")
    checked = check_weights(Weights(tmp_path / "model.safetensors"), empty)

    def program(ranks: Any) -> None:
        store = Store(plan, ranks.rank, torch.device("cpu"))
        initialise(store, empty, given=checked.names)
        read_weights(checked, store)
        for key, parameter in store.root.named_parameters():
            assert torch.equal(parameter, store.cut(key, model.get_parameter(key))), key
        save_weights(tmp_path / "again.safetensors", ParallelModule(plan, store, ranks))

    run_ranks(plan.mesh, program)
    written = safetensors.torch.load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(written[key], x) for key, x in found.items())


def test_a_plan_that_stores_them_otherwise_does_not_share_them() -> None:
    graph = capture(GatedMlp(), (torch.randn(4, WIDTH),), torch.mean)
    sections, whole = (make_plan(graph, parse_machine("local:2"), each) for each in ("megatron:tp=2", "data-parallel"))
    told = r"gate_up_proj.weight as f32\[64,16\], which is .* in gate_up_proj.weight\[0:32\]"
    with pytest.raises(PlanError, match=told):
        check_stored_alike(sections, whole)
