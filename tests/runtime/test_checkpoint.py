"""Checkpoints: any plan reads what any other wrote, plain torch too; damage is refused; a kill loses nothing."""

from __future__ import annotations

import copy
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from conjoin.errors import CheckpointError, UsageError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import parse_machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.process_groups import ProcessGroups
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.checkpoint import INDEX, save_checkpoint
from conjoin.runtime.state.checkpoint_index import decode, encode
from conjoin.runtime.state.checkpoint_loading import load_checkpoint
from conjoin.runtime.state.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from conjoin.runtime.state.pieces import Piece, full_state_dict
from conjoin.runtime.state.storage import Store
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.waiting import HUNG_SECONDS

STEPS = 2
"""Before the checkpoint, and again after it."""
TOLERANCE = 1e-9


class Net(nn.Module):
    """Tied weights, statistics, buffers saved and not saved, a frozen parameter, sizes that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.rand(6), requires_grad=False)
        self.register_buffer("kept", torch.rand(6))
        self.register_buffer("derived", torch.full((6,), 2.0), persistent=False)

    def forward(self, i: Tensor) -> Tensor:
        x = self.norm(self.up(self.embed(i) * self.kept)).relu()
        y: Tensor = self.head(self.down(x) * self.derived + self.frozen)
        return y


BATCH = (torch.arange(8) % 11, torch.arange(8) * 3 % 11)


_generator = threading.Lock()


def make_model(seed: int) -> Net:
    with _generator:  # which ranks that are threads share
        torch.manual_seed(seed)
        return Net().double().train()


@cache
def graph() -> Graph:
    return capture(make_model(0), BATCH, cross_entropy)


@cache
def plan_for(strategy: str, num_ranks: int) -> Plan:
    return make_plan(graph(), parse_machine(f"local:{num_ranks}"), strategy)


def part_of(plan: Plan, communicator: Communicator, seed: int) -> ParallelModule:
    """A rank's module of a model that begins with the random values of a seed."""
    store = Store(plan, communicator.rank, torch.device("cpu"))
    store.fill(make_model(seed))
    return ParallelModule(plan, store, communicator)


def adam(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, betas=(0.8, 0.95), amsgrad=True)


def train(step: Callable[..., Tensor], optimizer: Optimizer, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = step(BATCH) if isinstance(step, ParallelModule) else cross_entropy(step(BATCH[0]), BATCH[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def uninterrupted() -> list[float]:
    """The losses of training a plain model without a break."""
    model = make_model(0)
    return train(model, adam(model.parameters()), 2 * STEPS)


def assert_goes_on(losses: list[float]) -> None:
    assert losses == pytest.approx(uninterrupted()[STEPS:], rel=TOLERANCE, abs=TOLERANCE)


# ------------------------------------------------------------------------------------------------------ real processes


def _run_rank(rank: int, num_ranks: int, folder: Path, program: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_ranks}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=HUNG_SECONDS),
    )
    (folder / f"{rank}.json").write_text(json.dumps(program()))
    dist.destroy_process_group()


def in_processes(num_ranks: int, folder: Path, program: Callable[[], Any]) -> list[Any]:
    """What a program returns on each of some processes that are joined by Gloo."""
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("fork")
    arguments = [(rank, num_ranks, folder, program) for rank in range(num_ranks)]
    ranks = [context.Process(target=_run_rank, args=each, daemon=True) for each in arguments]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + HUNG_SECONDS
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in ranks] == [0] * num_ranks
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after a few steps: by data parallelism on 4 ranks, by FSDP on 3, and by torch's own calls on 3."""
    folder = tmp_path_factory.mktemp("saved")

    def begin(strategy: str, num_ranks: int, path: Path) -> tuple[ParallelModule, Optimizer]:
        plan = plan_for(strategy, num_ranks)
        step = part_of(plan, ProcessGroups(plan.mesh), seed=0)
        optimizer = adam(step.parameters())
        train(step, optimizer)
        save_checkpoint(path, step, optimizer, extra={"step": STEPS, "name": "ü"})
        return step, optimizer

    def data_parallel() -> None:
        begin("data-parallel", 4, folder / "dp4")

    def fsdp() -> None:
        step, optimizer = begin("fsdp", 3, folder / "fsdp3")
        state = {"model": step.state_dict(), "optim": optimizer_state_dict(step, optimizer)}
        dcp.save(state, checkpoint_id=folder / "torch3")
        dcp.async_save(state, checkpoint_id=folder / "async3").result()

    plan_for("data-parallel", 4), plan_for("fsdp", 3)  # made once, before the fork
    in_processes(4, folder / "ranks4", data_parallel)
    in_processes(3, folder / "ranks3", fsdp)
    return folder


@pytest.mark.parametrize(("name", "strategy", "num_ranks"), [("dp4", "fsdp", 2), ("fsdp3", "megatron", 4)])
def test_other_processes_go_on(saved: Path, tmp_path: Path, name: str, strategy: str, num_ranks: int) -> None:
    plan = plan_for(strategy, num_ranks)

    def program() -> Any:
        step = part_of(plan, ProcessGroups(plan.mesh), seed=5)
        optimizer = adam(step.parameters())
        extra = load_checkpoint(saved / name, step, optimizer)
        return extra, train(step, optimizer)

    for extra, losses in in_processes(num_ranks, tmp_path, program):
        assert extra == {"step": STEPS, "name": "ü"}
        assert_goes_on(losses)


def test_ranks_that_mean_different_checkpoints_are_told(saved: Path, tmp_path: Path) -> None:
    plan = plan_for("fsdp", 2)

    def program() -> Any:
        step, own = part_of(plan, ProcessGroups(plan.mesh), seed=5), dist.get_rank()
        told = []
        for call in (
            lambda: save_checkpoint(tmp_path / f"by-{own}", step),
            lambda: load_checkpoint(saved / ("dp4", "fsdp3")[own], step),
        ):
            with pytest.raises(CheckpointError) as caught:
                call()
            assert_three_sentences(caught.value)
            told.append(str(caught.value))
        return told

    first, second = in_processes(2, tmp_path / "ranks", program)
    assert first[0] == second[0] and "by-1 by rank 1" in first[0] and "Rank 1 has another one" in first[1]
    assert not list(tmp_path.glob("*by-*"))


@pytest.mark.parametrize("name", ["dp4", "fsdp3"])
@pytest.mark.parametrize(("strategy", "num_ranks"), [("data-parallel", 1), ("fsdp", 4), ("fsdp", 3), ("megatron", 2)])
def test_every_plan_goes_on(saved: Path, name: str, strategy: str, num_ranks: int) -> None:
    plan = plan_for(strategy, num_ranks)

    def program(communicator: Communicator) -> list[float]:
        step = part_of(plan, communicator, seed=5)
        optimizer = adam(step.parameters())
        load_checkpoint(saved / name, step, optimizer)
        return train(step, optimizer)

    for losses in run_ranks(plan.mesh, program):
        assert_goes_on(losses)


def plain_load(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loads in a single process
        dcp.load(state, checkpoint_id=path)


@pytest.mark.parametrize("name", ["dp4", "fsdp3"])
def test_plain_torch_reads_the_model_and_the_optimizer_state(saved: Path, name: str) -> None:
    model = make_model(5)
    optimizer = adam(model.parameters())
    whole = get_optimizer_state_dict(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": {"state": whole["state"]}}
    plain_load(state, saved / name)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, {**whole, "state": state["optimizer"]["state"]})
    assert_goes_on(train(model, optimizer))


@pytest.mark.parametrize("name", ["torch3", "async3"])
def test_plain_torch_goes_on_from_torch_calls(saved: Path, name: str) -> None:
    model = make_model(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0, amsgrad=True)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    plain_load(state, saved / name)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert_goes_on(train(model, optimizer))


def test_torch_calls_go_on_from_plain_torch(tmp_path: Path) -> None:
    model = make_model(0)
    optimizer = adam(model.parameters())
    train(model, optimizer)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "plain")
    plan = plan_for("fsdp", 3)

    def program() -> list[float]:
        step = part_of(plan, ProcessGroups(plan.mesh), seed=5)
        fresh = adam(step.parameters())
        state = {"model": step.state_dict(), "optim": optimizer_state_dict(step, fresh)}
        dcp.load(state, checkpoint_id=tmp_path / "plain")
        assert not fresh.state
        step.load_state_dict(state["model"])
        load_optimizer_state_dict(step, fresh, state["optim"])
        return train(step, fresh)

    for losses in in_processes(3, tmp_path / "ranks", program):
        assert_goes_on(losses)


def test_one_rank_that_fails_fails_all(saved: Path, tmp_path: Path) -> None:
    plan = plan_for("fsdp", 2)
    shutil.copytree(saved / "dp4", tmp_path / "checkpoint")
    newest = max((tmp_path / "checkpoint").glob("*.distcp"))
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # only the rank that reads this file can see it

    def program() -> list[str]:
        step = part_of(plan, ProcessGroups(plan.mesh), seed=5)
        before = copy.deepcopy(dict(step.named_parameters()))
        messages = []
        for attempt in (
            lambda: load_checkpoint(tmp_path / "checkpoint", step),
            lambda: save_checkpoint(tmp_path / "new", step, extra={"rank": dist.get_rank() or {1, 2}}),
        ):
            try:
                attempt()
            except CheckpointError as error:
                messages.append(str(error))
        assert all(torch.equal(before[name], parameter) for name, parameter in step.named_parameters())
        return messages

    first, second = in_processes(2, tmp_path / "ranks", program)
    assert first == second and len(first) == 2
    assert "has other content" in first[0] and "extra facts" in first[1]
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------ state_dict on thread ranks


def on_threads(strategy: str, num_ranks: int, program: Callable[[ParallelModule], Any], seed: int = 0) -> list[Any]:
    plan = plan_for(strategy, num_ranks)
    return run_ranks(plan.mesh, lambda communicator: program(part_of(plan, communicator, seed)))


def alone(seed: int = 0) -> ParallelModule:
    """The module on one rank that needs no others."""
    return on_threads("data-parallel", 1, lambda step: step, seed)[0]


def joined(values: list[Any]) -> Any:
    """A whole tensor out of the pieces of all ranks, or what they all have."""
    if not any(isinstance(value, Piece) for value in values):
        return values[0]
    whole = torch.full(next(v.shape for v in values if isinstance(v, Piece)), torch.nan, dtype=torch.float64)
    for value in values:
        region = value.region if isinstance(value, Piece) else tuple((0, size) for size in value.shape)
        whole[tuple(slice(*span) for span in region)] = value.local if isinstance(value, Piece) else value
    assert not whole.isnan().any()
    return whole


PLANS = [("data-parallel", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("megatron", 4)]


@pytest.mark.parametrize(("strategy", "num_ranks"), PLANS)
def test_the_state_has_the_names_and_values_of_the_model(strategy: str, num_ranks: int) -> None:
    model = make_model(0)
    states = on_threads(strategy, num_ranks, lambda step: (step.state_dict(), full_state_dict(step, everywhere=True)))
    wanted = model.state_dict()
    for own, whole in states:
        assert list(own) == list(wanted) and list(whole) != [] and whole.keys() == wanted.keys()
        assert all(torch.equal(whole[name], wanted[name]) for name in wanted)
    assert all(torch.equal(joined([own[name] for own, _ in states]), wanted[name]) for name in wanted)
    assert any(isinstance(value, Piece) for value in states[0][0].values()) == (strategy != "data-parallel")


def test_the_whole_state_is_on_rank_0_alone_unless_asked() -> None:
    found = on_threads("fsdp", 2, full_state_dict)
    assert len(found[0]) == len(make_model(0).state_dict()) and found[1] == {}
    assert found[0]["embed.weight"] is found[0]["head.weight"]


@pytest.mark.parametrize(("strategy", "num_ranks"), PLANS)
def test_whole_tensors_and_own_pieces_are_loaded(strategy: str, num_ranks: int) -> None:
    wanted = make_model(5).state_dict()

    def program(step: ParallelModule) -> dict[str, Tensor]:
        parameters = list(step.parameters())
        assert step.load_state_dict(wanted) == ([], [])
        kept = {name: Piece(v.local.clone(), v.shape, v.region) if isinstance(v, Piece) else v.clone()
                for name, v in step.state_dict().items()}  # fmt: skip
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        step.load_state_dict(kept)
        assert all(a is b for a, b in zip(parameters, step.parameters(), strict=True))
        return full_state_dict(step, everywhere=True)

    for found in on_threads(strategy, num_ranks, program):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_prefix_destination_and_keep_vars() -> None:
    def program(step: ParallelModule) -> None:
        into: dict[str, Any] = {"other": 1}
        state = step.state_dict(destination=into, prefix="inner.", keep_vars=True)
        assert state is into and into["other"] == 1
        piece = into["inner.up.weight"]
        assert isinstance(piece, Piece) and piece.local is dict(step.named_parameters())["up.weight"]
        assert not step.state_dict()["up.weight"].local.requires_grad
        outer = nn.ModuleDict({"step": step})
        assert set(outer.state_dict()) == {f"step.{name}" for name in step.state_dict()}

    on_threads("fsdp", 2, program)


def test_names_that_a_wrapper_has_changed_are_told() -> None:
    def program(step: ParallelModule) -> None:
        for wrapper in ("_orig_mod.", "module."):  # of torch.compile, of DistributedDataParallel
            with pytest.raises(CheckpointError, match=f"under names without '{wrapper}', which a wrapper has put"):
                step.load_state_dict({wrapper + name: x for name, x in make_model(5).state_dict().items()})

    on_threads("single", 1, program)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    def program(step: ParallelModule) -> str:
        state: dict[str, Any] = make_model(5).state_dict()
        state["up.weight"] = state["up.weight"][:3]
        state["new"] = torch.zeros(3)
        del state["down.bias"]
        own = step.state_dict()["down.weight"]
        shifted = tuple((start + 1, stop + 1) for start, stop in own.region)
        state["down.weight"] = Piece(own.local, own.shape, shifted)
        state["norm.bias"] = 3
        before = full_state_dict(step, everywhere=True)
        with pytest.raises(CheckpointError) as caught:
            step.load_state_dict(state)
        assert_three_sentences(caught.value)
        with pytest.raises(CheckpointError):
            step.load_state_dict(state, strict=False)
        after = full_state_dict(step, everywhere=True)
        assert all(torch.equal(after[name], before[name]) for name in before)
        return str(caught.value)

    for message in on_threads("fsdp", 2, program):
        assert "in 5 tensors" in message
        for part in ("up.weight has shape (3, 6) instead of (10, 6)", "new is unexpected", "down.bias is missing",
                     "down.weight is Piece(", "norm.bias is a int, not a tensor"):  # fmt: skip
            assert part in message


def test_many_faults_are_cut_short_and_strict_may_be_left() -> None:
    step = alone()
    with pytest.raises(CheckpointError, match="and 5 more"):
        step.load_state_dict({})
    missing, unexpected = step.load_state_dict({"new": torch.zeros(1), "frozen": torch.ones(6)}, strict=False)
    assert unexpected == ["new"] and "up.weight" in missing and "frozen" not in missing
    assert (dict(step.named_parameters())["frozen"] == 1).all()
    with pytest.raises(UsageError) as caught:
        step.load_state_dict({}, assign=True)
    assert_three_sentences(caught.value)


def test_a_buffer_left_by_inference_is_loaded() -> None:
    step = alone()
    with torch.inference_mode():
        step(BATCH)
    step.load_state_dict(make_model(5).state_dict())
    assert torch.equal(step.state_dict()["norm.running_mean"], torch.zeros(10).double())
    train(step, adam(step.parameters()))


def test_a_piece_is_copied_and_not_computed_with() -> None:
    piece = Piece(torch.ones(2, 3), (4, 3), ((2, 4), (0, 3)))
    for made in (copy.deepcopy(piece), pickle.loads(pickle.dumps(piece)), piece.to(torch.float64), piece.clone()):
        assert isinstance(made, Piece) and (made.region, made.shape) == (piece.region, (4, 3)) and made.local.sum() == 6
        assert made.local.data_ptr() != piece.local.data_ptr()
    piece.copy_(Piece(torch.zeros(2, 3), (4, 3), ((2, 4), (0, 3))))
    assert piece.local.sum() == 0 and piece.detach().local.data_ptr() == piece.local.data_ptr()
    for wrong in (lambda: piece + 1, lambda: piece.sum(), lambda: piece[0], lambda: piece.new_empty(3),
                  lambda: piece.copy_(Piece(torch.zeros(2, 3), (4, 3), ((0, 2), (0, 3))))):  # fmt: skip
        with pytest.raises(UsageError, match="on a piece of a tensor") as caught:
            wrong()
        assert_three_sentences(caught.value)


def test_empty_pieces_and_empty_tensors_speak_the_protocol() -> None:
    nothing = Piece(torch.empty(0, 3), (4, 3), ((2, 2), (0, 3)))
    assert nothing.__create_write_items__("x", nothing) == nothing.__create_chunk_list__() == []
    empty = Piece(torch.empty(0, 1), (0, 3), ((0, 0), (1, 2)))
    (item,) = empty.__create_write_items__("x", empty)
    assert item.tensor_data.size == torch.Size((0, 3)) and empty.__get_tensor_shard__(item.index).shape == (0, 3)
    some = Piece(torch.ones(2, 3), (4, 3), ((2, 4), (0, 3)))
    (item,) = some.__create_write_items__("x", some)
    assert some.__get_tensor_shard__(item.index).shape == (2, 3) and some.size() == (4, 3)
    with pytest.raises(ValueError, match="begins at"):
        some.__get_tensor_shard__(dcp.metadata.MetadataIndex("x", (0, 0)))


# ---------------------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), foreach=False),
    "adamw": adam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_moves_between_plans(kind: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[kind]
    model = make_model(0)
    wanted = train(model, make(model.parameters()), 2 * STEPS)[STEPS:]

    def begin(step: ParallelModule) -> Any:
        optimizer = make(step.parameters())
        train(step, optimizer)
        return full_state_dict(step, everywhere=True), optimizer_state_dict(step, optimizer)

    states = on_threads("fsdp", 3, begin)
    optims = [optim for _, optim in states]
    state = {
        name: {key: joined([optim["state"][name][key] for optim in optims]) for key in entries}
        for name, entries in optims[0]["state"].items()
    }
    whole = {"state": state, "param_groups": optims[0]["param_groups"]}

    def resume(step: ParallelModule) -> list[float]:
        step.load_state_dict(states[0][0])
        optimizer = make(step.parameters())
        load_optimizer_state_dict(step, optimizer, copy.deepcopy(whole))
        return train(step, optimizer)

    for losses in on_threads("megatron", 2, resume, seed=5):
        assert losses == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)
    step = alone()
    step.load_state_dict(states[0][0])
    optimizer = make(step.parameters())
    load_optimizer_state_dict(step, optimizer, copy.deepcopy(whole))
    save_checkpoint(tmp_path / kind, step, optimizer)
    step, optimizer = alone(5), None
    optimizer = make(step.parameters())
    load_checkpoint(tmp_path / kind, step, optimizer)
    assert train(step, optimizer) == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_optimizer_shows_what_it_will_keep(kind: str) -> None:
    def program(step: ParallelModule) -> None:
        optimizer = OPTIMIZERS[kind](step.parameters())
        begins_empty = not optimizer.state
        before = copy.deepcopy([optimizer.state_dict(), list(step.parameters())])
        fresh = optimizer_state_dict(step, optimizer)
        assert str([optimizer.state_dict(), list(step.parameters())]) == str(before)
        assert all(parameter.grad is None for parameter in step.parameters())
        train(step, optimizer, 1)
        stepped = optimizer_state_dict(step, optimizer)
        assert fresh["param_groups"] == stepped["param_groups"]
        if begins_empty:
            assert shapes(fresh["state"]) == shapes(stepped["state"])

    on_threads("fsdp", 2, program)


def shapes(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    def form(value: Any) -> Any:
        return (type(value), tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)

    return {name: {key: form(value) for key, value in entries.items()} for name, entries in state.items()}


def test_state_that_is_not_elementwise_is_refused() -> None:
    def program(step: ParallelModule) -> None:
        optimizer = adam(step.parameters())
        train(step, optimizer, 1)
        for parameter in step.parameters():
            if parameter.requires_grad:
                optimizer.state[parameter]["rows"] = torch.zeros(2, 2, 2)
        with pytest.raises(CheckpointError, match="element by element") as caught:
            optimizer_state_dict(step, optimizer)
        assert_three_sentences(caught.value)

    on_threads("fsdp", 2, program)


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    def program(step: ParallelModule) -> str:
        optimizer = adam(step.parameters())
        train(step, optimizer, 1)
        state = optimizer_state_dict(step, optimizer)
        state["param_groups"][0]["params"] = ["stranger", *state["param_groups"][0]["params"][1:]]
        state["state"]["stranger"] = {}
        state["state"]["up.weight"] = {"exp_avg": torch.zeros(3, 3)}
        before = str(optimizer.state_dict())
        with pytest.raises(CheckpointError) as caught:
            load_optimizer_state_dict(step, optimizer, state)
        assert_three_sentences(caught.value)
        with pytest.raises(CheckpointError, match="does not have 'state'"):
            load_optimizer_state_dict(step, optimizer, {})
        assert str(optimizer.state_dict()) == before
        return str(caught.value)

    for message in on_threads("fsdp", 2, program):
        for part in ("group 0 has stranger", "group 0 does not have frozen", "state of stranger", "(3, 3)"):
            assert part in message


def test_an_optimizer_of_another_module_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not have, the first of") as caught:
        optimizer_state_dict(alone(), adam(make_model(0).parameters()))
    assert_three_sentences(caught.value)


def test_groups_and_settings_come_back(tmp_path: Path) -> None:
    step = alone()
    names = dict(step.named_parameters())
    weights = [p for n, p in names.items() if n.endswith("weight")]
    rest = [p for n, p in names.items() if not n.endswith("weight")]

    def make(rate: float) -> Optimizer:
        return torch.optim.AdamW([{"params": weights, "lr": torch.tensor(rate)}, {"params": rest}], lr=rate)

    optimizer = make(0.25)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(step, optimizer, 1)
    save_checkpoint(tmp_path / "checkpoint", step, optimizer)
    fresh = make(9.0)
    load_checkpoint(tmp_path / "checkpoint", step, fresh)
    assert str(fresh.state_dict()) == str(optimizer.state_dict())
    assert fresh.param_groups[0]["betas"] == (0.9, 0.999) and fresh.param_groups[1]["initial_lr"] == 0.25


def test_an_optimizer_that_has_not_stepped_stays_so(tmp_path: Path) -> None:
    step = alone()
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    save_checkpoint(tmp_path / "checkpoint", step, optimizer)
    train(step, optimizer, 1)
    load_checkpoint(tmp_path / "checkpoint", step, optimizer)
    assert not optimizer.state
    with pytest.raises(CheckpointError, match="it has the state of SGD, the optimizer is AdamW"):
        load_checkpoint(tmp_path / "checkpoint", step, adam(step.parameters()))


@pytest.mark.parametrize("value", [None, True, 3, 0.1, "x", (0.9, [1, {"a": 2}]), torch.tensor(0.3), torch.ones(1, 1)])
def test_settings_survive_json(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value))))
    assert type(again) is type(value) and (torch.equal(again, value) if isinstance(value, Tensor) else again == value)


# -------------------------------------------------------------------------------------------------------------- damage


SETTINGS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([torch.tensor(0.5), torch.tensor([3], dtype=torch.uint16), torch.tensor(True), {1: 2}, 1j])
    | st.sampled_from([torch.tensor(torch.nan), torch.tensor(1.5).to(torch.float8_e4m3fn), torch.tensor(1j)]),
    lambda some: st.lists(some, max_size=2) | st.tuples(some) | st.dictionaries(st.text(max_size=3), some, max_size=2),
    max_leaves=4,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")  # torch, of complex state of a real weight
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    setting=SETTINGS,
    key=st.text(max_size=4) | st.integers(),
    value=SETTINGS.filter(lambda value: "'" not in repr(value)),  # torch's load_state_dict makes generators of text
    extra=SETTINGS,
)
def test_what_is_saved_can_be_loaded(tmp_path_factory: Any, setting: Any, key: Any, value: Any, extra: Any) -> None:
    """Whatever settings and state an optimizer has: a checkpoint of it is refused when it is saved, or comes back."""
    step = alone()
    parameter = next(step.parameters())
    optimizer = torch.optim.SGD([{"params": [parameter], "odd": setting}], lr=0.1, momentum=0.9)
    optimizer.state[parameter][key] = value
    path = tmp_path_factory.mktemp("odd") / "checkpoint"
    try:
        save_checkpoint(path, step, optimizer, extra={"odd": extra})
    except CheckpointError as error:
        assert_three_sentences(error)
        assert not path.exists() and not list(path.parent.iterdir())
        return
    loaded = torch.optim.SGD([{"params": [parameter], "odd": 0}], lr=0.2, momentum=0.9)
    found = load_checkpoint(path, step, loaded)
    assert repr(found["odd"]) == repr(json.loads(json.dumps(extra)))
    assert repr(loaded.param_groups[0]["odd"]) == repr(setting)
    judge = torch.optim.SGD([{"params": [parameter], "odd": 0}], lr=0.2, momentum=0.9)
    judge.load_state_dict(optimizer.state_dict())  # which gives state the dtype of its parameter
    assert repr(loaded.state[parameter][key]) == repr(judge.state[parameter][key])


def test_keys_that_are_the_same_as_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the same as text") as told:
        save_checkpoint(tmp_path / "checkpoint", alone(), extra={"names": {1: "a", "1": "b"}})
    assert_three_sentences(told.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by one process."""
    path = tmp_path_factory.mktemp("one") / "checkpoint"
    step = alone()
    optimizer = adam(step.parameters())
    train(step, optimizer)
    save_checkpoint(path, step, optimizer, extra={"step": STEPS})
    return path


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))


def refused(path: Path, step: ParallelModule | None = None, optimizer: Optimizer | None = None) -> str:
    """The message with which a checkpoint is refused; nothing may have changed."""
    step = step or alone(5)
    optimizer = optimizer or adam(step.parameters())
    before = copy.deepcopy(full_state_dict(step)), str(optimizer.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, step, optimizer)
    assert_three_sentences(caught.value)
    after = full_state_dict(step)
    assert all(torch.equal(after[name], tensor) for name, tensor in before[0].items())
    assert str(optimizer.state_dict()) == before[1]
    return str(caught.value)


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "nothing")


def test_damaged_data_is_refused(copied: Path) -> None:
    (data,) = copied.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:-100])
    assert "bytes instead of" in refused(copied)
    data.write_bytes(content[:-100] + b"\xff" * 100)
    assert "has other content than was saved" in refused(copied)
    data.unlink()
    assert "is missing" in refused(copied)


def test_a_missing_index_is_refused(copied: Path) -> None:
    (copied / INDEX).unlink()
    assert f"has no {INDEX}" in refused(copied)


def test_torch_metadata_is_not_read(copied: Path) -> None:
    (copied / ".metadata").write_bytes(b"not a pickle")
    step = alone(5)
    assert load_checkpoint(copied, step) == {"step": STEPS}


class Other(Net):
    """The same with other sizes, another dtype and other names."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(10, 6, bias=False)
        self.extra = nn.Parameter(torch.zeros(2))
        self.register_buffer("kept", torch.rand(1, 6))


def test_another_model_is_refused(copied: Path) -> None:
    torch.manual_seed(0)
    model = Other().double().train()
    model.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
    plan = make_plan(capture(model, BATCH, cross_entropy), parse_machine("local:1"), "data-parallel")

    def build(communicator: Communicator) -> ParallelModule:
        store = Store(plan, communicator.rank, torch.device("cpu"))
        store.fill(model)
        return ParallelModule(plan, store, communicator)

    (step,) = run_ranks(plan.mesh, build)
    message = refused(copied, step, torch.optim.SGD(step.parameters(), lr=1.0))
    for part in ("it does not have extra", "it has down.bias, which the module has not",
                 "kept is torch.float64 (6,) there, torch.float64 (1, 6) in the module",
                 "frozen is torch.float64 (6,) there, torch.float32 (6,) in the module",
                 "it has the state of AdamW, the optimizer is SGD"):  # fmt: skip
        assert part in message


def test_a_checkpoint_without_an_optimizer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", alone())
    assert "saved without an optimizer" in refused(tmp_path / "checkpoint")
    step = alone(5)
    assert load_checkpoint(tmp_path / "checkpoint", step) == {}
    assert torch.equal(full_state_dict(step)["up.weight"], make_model(0).up.weight)


def test_what_is_not_a_checkpoint_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    step = alone()
    mine = tmp_path / "mine"
    shutil.copytree(checkpoint, mine)
    (mine / "notes.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for path in (mine, tmp_path / "file", tmp_path / "no" / "folder"):
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(path, step)
        assert_three_sentences(caught.value)
    assert (mine / "notes.txt").read_text() == (tmp_path / "file").read_text() == "precious"


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    step = alone()
    odd = adam(step.parameters())
    odd.param_groups[0]["lr"] = lambda: 1.0
    for arguments in ({"extra": {"a": {1, 2}}}, {"optimizer": odd}):
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path / "checkpoint", step, **arguments)
        assert_three_sentences(caught.value)
    (other, _) = on_threads("fsdp", 2, lambda step: step)
    with pytest.raises(CheckpointError, match="2 ranks was to be saved by 1 process"):
        save_checkpoint(tmp_path / "checkpoint", other)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_previous_checkpoint(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        save_checkpoint(copied, alone(5))
    assert_three_sentences(caught.value)
    assert [entry.name for entry in copied.parent.iterdir()] == [copied.name]
    assert load_checkpoint(copied, alone(5)) == {"step": STEPS}


# --------------------------------------------------------------------------------------------------- fuzz of the index


def signed(data: dict[str, Any]) -> str:
    body = {key: value for key, value in data.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()})


JUNK: list[Any] = [None, -1, 0, 2**70, 1.5, "", "model", "../x.distcp", [], {}, [[]], {"tuple": 3}, True, float("nan")]


def mutated(data: Any, random_state: random.Random) -> Any:
    """The data with one entry replaced, removed or doubled, somewhere."""
    if not isinstance(data, dict | list) or not data or random_state.random() < 0.15:
        return random_state.choice(JUNK)
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    key = random_state.choice(keys)
    made = data.copy()
    if random_state.random() < 0.15:
        del made[key]
    else:
        made[key] = mutated(data[key], random_state)
    return made


def test_no_index_makes_anything_but_a_checkpoint_error(copied: Path) -> None:
    index = copied / INDEX
    text = index.read_text()
    data = json.loads(text)
    random_state = random.Random(0)
    step = alone(5)
    optimizer = adam(step.parameters())
    refusals = 0
    for turn in range(150):
        changed = mutated(data, random_state)
        index.write_text(signed(changed) if isinstance(changed, dict) and turn % 5 else json.dumps(changed))
        try:
            load_checkpoint(copied, step, optimizer)
        except CheckpointError as error:
            refusals += 1
            assert_three_sentences(error)
    assert refusals > 100
    index.write_text(text)
    load_checkpoint(copied, step, optimizer)


def test_no_changed_byte_goes_unnoticed(copied: Path) -> None:
    index = copied / INDEX
    content = index.read_bytes()
    random_state = random.Random(1)
    step = alone(5)
    for _ in range(100):
        place = random_state.randrange(len(content) - 1)  # the last is the end of the line
        byte = (content[place] + random_state.randrange(1, 256)) % 256
        index.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
        with pytest.raises(CheckpointError):
            load_checkpoint(copied, step)
    for end in (0, 1, len(content) // 2, len(content) - 2):
        index.write_bytes(content[:end])
        assert INDEX in refused(copied)


# ------------------------------------------------------------------------------------------------------------- kill -9


def kill_self(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_save(path: Path, function: tuple[Any, str], call: int) -> None:
    """Save another state over a checkpoint in a process that is killed when it calls a function for the n-th time."""

    def program() -> None:
        torch.set_num_threads(1)
        owner, name = function
        real, calls = getattr(owner, name), 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return (kill_self if calls == call else real)(*args, **kwargs)

        setattr(owner, name, counted)
        step = alone(5)
        save_checkpoint(path, step, adam(step.parameters()), extra={"step": 99})

    process = multiprocessing.get_context("fork").Process(target=program, daemon=True)
    process.start()
    process.join(HUNG_SECONDS)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("function", "call", "survivor"),
    [((torch, "save"), 3, STEPS), ((os, "fsync"), 1, STEPS), ((hashlib, "file_digest"), 1, STEPS),
     ((os, "rename"), 1, STEPS), ((os, "rename"), 2, STEPS), ((shutil, "rmtree"), 2, 99)],
    ids=["in the data", "before sync", "before index", "before renaming", "between renames", "before removing"],
)  # fmt: skip
def test_a_killed_save_leaves_a_checkpoint(copied: Path, function: tuple[Any, str], call: int, survivor: int) -> None:
    killed_save(copied, function, call)
    step = alone(7)
    assert load_checkpoint(copied, step) == {"step": survivor}
    wanted = make_model(5).state_dict() if survivor == 99 else None
    if wanted is not None:
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in full_state_dict(step).items())
    save_checkpoint(copied, step, extra={"step": 100})  # the next save cleans up
    assert load_checkpoint(copied, step) == {"step": 100}
    assert [entry.name for entry in copied.parent.iterdir()] == [copied.name]


def test_saves_killed_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    random_state = random.Random(0)

    def program() -> None:
        torch.set_num_threads(1)
        step = alone()
        for value in range(10_000):
            step.load_state_dict({name: torch.full_like(t, value) for name, t in full_state_dict(step).items()})
            save_checkpoint(path, step, extra={"value": value})

    for _ in range(4):
        process = multiprocessing.get_context("fork").Process(target=program, daemon=True)
        process.start()
        time.sleep(0.5 + random_state.random() / 2)
        os.kill(process.pid, signal.SIGKILL)
        process.join(HUNG_SECONDS)
        if list(tmp_path.glob("*checkpoint*")) == []:
            continue  # a slow machine: not one save was done
        step = alone()
        value = load_checkpoint(path, step)["value"]
        assert all((tensor == value).all() for tensor in full_state_dict(step).values())
