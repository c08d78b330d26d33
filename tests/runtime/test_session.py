"""A session owns device, process groups and watch: modules share them, closing ends them, nothing is left behind."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conjoin.errors import RankError, UsageError
from conjoin.frontends import capture
from conjoin.machine import Machine
from conjoin.runtime import Session, launch, load
from conjoin.runtime.ranks.session import check_apart, device_of_rank, open_session
from conjoin.search import make_pipeline
from tests.ir.wording import assert_three_sentences
from tests.runtime.models import mlp, plan_of


def held() -> tuple[int, int, int]:
    """Threads, files and process groups of this process."""
    threads = [thread for thread in threading.enumerate() if thread.name != "conjoin-launcher"]
    return len(threads), len(os.listdir("/proc/self/fd")), len(dist.distributed_c10d._world.pg_map)


def _load_many(rank: int, plan: Any, model: Any, batch: Any) -> list[tuple[int, int, int]]:
    found = []
    for i in range(12):
        step = load(plan, copy.deepcopy(model))
        if i in (1, 11):
            step(batch).backward()
            gc.collect()
            found.append(held())
    return found


def test_loading_many_times_leaves_nothing_behind() -> None:
    """Megatron on 2 x 2 has groups of both axes beside that of all ranks.

    There are ten loads between. The system may close a connection a moment later, but not one for each of them.
    """
    model, batch = mlp()
    for first, last in launch(4, _load_many, plan_of(model, batch, 4, "megatron:tp=2"), model, batch):
        (threads, files, groups), (later_threads, later_files, later_groups) = first, last
        assert (threads, groups) == (later_threads, later_groups) and abs(files - later_files) < 5, (first, last)


def _open_many(rank: int, plan: Any, model: Any, batch: Any) -> list[Any]:
    found: list[Any] = []
    for _ in range(4):
        with Session() as session:
            steps = [load(plan, copy.deepcopy(model), session=session) for _ in range(2)]
            losses = [step(batch).item() for step in steps]
            assert losses[0] == losses[1] and open_session() is session
        gc.collect()
        found.append(held())
    assert open_session() is None
    try:
        steps[0](batch)
    except UsageError as error:
        found.append(str(error))
    return found


def test_a_closed_session_leaves_nothing_behind() -> None:
    model, batch = mlp()
    for first, *rest, refused in launch(4, _open_many, plan_of(model, batch, 4, "megatron:tp=2"), model, batch):
        assert rest == [first] * 3
        assert "after their session was closed" in refused
        assert_three_sentences(refused)


def _step_after_the_end(rank: int, plan: Any, model: Any, batch: Any) -> str:
    with Session() as session:
        step = load(plan, model, session=session)
        step(*batch).backward()
    try:
        step(*batch)
    except UsageError as error:
        return str(error)
    return ""


def test_stages_send_each_other_nothing_after_their_session_was_closed() -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(4, 4), torch.randn(4, 4))
    graph = capture(model, batch, nn.functional.mse_loss)
    plan = make_pipeline(graph, Machine("here", 1, 2, "cpu"), "pipeline:pp=2,micro=2")
    for refused in launch(2, _step_after_the_end, plan, model, batch):
        assert "after their session was closed" in refused
        assert_three_sentences(refused)


def test_one_rank_alone_needs_no_group() -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 1, "single")
    before, opened = threading.active_count(), open_session()
    with Session() as session:
        assert (session.rank, session.num_ranks, session.world) == (0, 1, None)
        load(plan, model)(batch).backward()
        assert open_session() is session and threading.active_count() == before
    assert open_session() is opened and not dist.is_initialized()


def test_a_session_that_joined_its_ranks_parts_from_them() -> None:
    """And not before all have joined: it would close connections that the others are still making."""

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def program(rank: int) -> tuple[bool, int, bool, float, float]:
        dist.destroy_process_group()
        os.environ |= told
        join, joined_at = dist.init_process_group, [0.0]

        def join_late(*args: Any, **options: Any) -> None:
            join(*args, **options)
            time.sleep(0.3 * (rank == 1))
            joined_at[0] = time.monotonic()

        dist.init_process_group = join_late
        with Session("cpu") as session:
            joined, size, began = dist.is_initialized(), session.num_ranks, time.monotonic()
        return joined, size, dist.is_initialized(), joined_at[0], began

    (*found, _, began), (*other, joined, _) = launch(2, program)
    assert found == other == [True, 2, False] and joined <= began


@pytest.mark.parametrize("given", [0, -1.0, float("nan")])
def test_no_patience_is_refused(given: float) -> None:
    with pytest.raises(UsageError, match="A patience of") as told:
        Session(patience_seconds=given)
    assert_three_sentences(told.value)


def test_the_environment_says_how_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONJOIN_PATIENCE", "7.5")
    with Session() as session:
        assert session.patience_seconds == 7.5
    monkeypatch.setenv("CONJOIN_PATIENCE", "long")
    with pytest.raises(UsageError, match="CONJOIN_PATIENCE is set to 'long'") as told:
        Session()
    assert_three_sentences(told.value)


@pytest.mark.parametrize(
    ("wanted", "rank", "local", "gpus", "expected"),
    [
        (None, 0, None, 0, "cpu"),
        (None, 5, "1", 4, "cuda:1"),
        ("cuda", 5, "1", 4, "cuda:1"),
        ("cuda", 5, None, 4, "cuda:1"),
        ("cuda", 3, "3", 1, "cuda:0"),
        ("cuda:2", 5, "1", 4, "cuda:2"),
        ("cpu", 5, "1", 4, "cpu"),
    ],
)
def test_every_rank_has_its_own_gpu(
    wanted: str | None, rank: int, local: str | None, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert device_of_rank(None if wanted is None else torch.device(wanted)) == torch.device(expected)
    assert all(f"cuda:{index}" == expected for index in chosen)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="on cuda was asked for") as told:
        device_of_rank(torch.device("cuda"))
    assert_three_sentences(told.value)


@pytest.mark.parametrize(("device", "why"), [("gpu", "torch knows no such word"), ("cuda:7", "has 0 CUDA devices")])
def test_a_device_that_cannot_be_is_refused_by_load(device: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model, batch = mlp()
    with pytest.raises(UsageError, match=why) as told:
        load(plan_of(model, batch, 1, "single"), model, device=device)
    assert_three_sentences(told.value)


def test_ranks_that_share_a_gpu_are_refused() -> None:
    check_apart({0: "a 1", 1: "a 2", 2: "b 1"})
    with pytest.raises(RankError, match="Ranks 1, 3 were given one GPU, of b") as told:
        check_apart({0: "a 1", 1: "b 2", 2: "a 2", 3: "b 2"})
    assert_three_sentences(told.value)
