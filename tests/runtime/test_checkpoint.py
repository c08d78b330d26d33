"""Checkpoints between processes: any plan reads what any other wrote, plain torch too."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from conjoin.errors import CheckpointError
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.process_groups import ProcessGroups
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.checkpoint import save_checkpoint
from conjoin.runtime.state.checkpoint_loading import load_checkpoint
from conjoin.runtime.state.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from tests.ir.wording import assert_three_sentences
from tests.runtime.checkpoint_cases import (
    STEPS,
    adam,
    assert_goes_on,
    in_processes,
    make_model,
    part_of,
    plan_for,
    train,
)


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


def test_a_rank_that_is_interrupted_ends_the_save_of_all(tmp_path: Path) -> None:
    plan = plan_for("fsdp", 2)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def program() -> str:
        step = part_of(plan, ProcessGroups(plan.mesh), seed=5)
        save_checkpoint(tmp_path / "kept", step, extra={"step": 1})
        with pytest.MonkeyPatch.context() as patched:
            if dist.get_rank() == 1:
                patched.setattr(torch, "save", interrupted)
            with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
                save_checkpoint(tmp_path / "kept", step, extra={"step": 2})
        assert load_checkpoint(tmp_path / "kept", step) == {"step": 1}
        save_checkpoint(tmp_path / "kept", step, extra={"step": 3})
        assert load_checkpoint(tmp_path / "kept", step) == {"step": 3}
        return repr(caught.value)

    other, ended = in_processes(2, tmp_path / "ranks", program)
    assert ended == "KeyboardInterrupt()" and "Rank 1 was told to end meanwhile (KeyboardInterrupt)" in other
