"""What a rank did in a step: computing and communicating told apart, on one process and on Gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import conjoin
from conjoin.comm import StepKind
from conjoin.cost import CostModel
from conjoin.ir import Plan
from conjoin.machine import DeviceType, Link, Machine, NodeKind
from conjoin.report import simulated_events
from conjoin.runtime import Recorded, launch, record
from conjoin.runtime.recording import collective_name
from conjoin.sim import predict


def small() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)), (torch.randn(8, 32), torch.randn(8, 8))


def check(found: list[Recorded]) -> None:
    assert found[0].start == 0 and all(a.start <= b.start for a, b in pairwise(found))
    assert all(entry.duration >= 0 and entry.stream in ("compute", "links") for entry in found)
    assert not any(entry.name.startswith(("aten::", "autograd::engine", "c10d::")) for entry in found)


def test_one_process_only_computes() -> None:
    model, (x, target) = small()
    ran = []

    def step() -> None:
        ran.append(nn.functional.mse_loss(model(x), target))
        ran[-1].backward()  # type: ignore[no-untyped-call]

    found = record(step)
    check(found)
    assert len(ran) == 1, "the step runs once"
    assert {entry.stream for entry in found} == {"compute"}
    names = [entry.name for entry in found]
    assert names.count("linear") == 2 and names.index("linear") < names.index("tanh") < names.index("mse_loss")
    assert any("Backward" in name for name in names), "the backward pass is there"


def _record_rank(rank: int, plan: Plan) -> list[Recorded]:
    model, batch = small()
    step = conjoin.load(plan, model)
    step(*batch).backward()
    return record(lambda: step(*batch).backward())


def _predicted(plan: Plan) -> list[str]:
    """The names of the collectives in a predicted trace."""
    device = DeviceType("core", "cpu", 2**30, 1e10, (("float32", 1e10),))
    node = NodeKind("node", 1, (device, device), (Link(("0", "1"), 1e9, 1e-5, "wire"),))
    found = predict(plan, Machine("two", 1, 2, "cpu", nodes=(node,)), CostModel(profiles=()))
    return [event.name for event in simulated_events(found.simulation) if event.stream.startswith("links")]


@pytest.mark.parametrize(
    ("strategy", "collectives"),
    [("data-parallel", {"all-reduce"}), ("fsdp", {"all-gather", "all-reduce", "reduce-scatter"})],
)
def test_collectives_are_on_a_stream_of_their_own_and_named_as_predicted(strategy: str, collectives: set[str]) -> None:
    """Gloo scatters sums by an all-to-all: it is called what it stands for."""
    model, batch = small()
    plan = conjoin.plan(model, batch, "local:2", loss=nn.functional.mse_loss, strategy=strategy)
    for found in launch(2, _record_rank, plan):
        check(found)
        sent = [entry.name for entry in found if entry.stream == "links"]
        assert set(sent) == collectives and sorted(sent) == sorted(_predicted(plan))
        assert any(entry.name == "linear" and entry.stream == "compute" for entry in found)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("all-reduce", ["gloo:all_reduce", "nccl:all_reduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernel)",
                        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"]),
        ("all-gather", ["gloo:all_gather", "nccl:_all_gather_base", "nccl:all_gather_into_tensor_coalesced",
                        "ncclDevKernel_AllGather_RING_LL"]),
        ("reduce-scatter", ["nccl:_reduce_scatter_base", "nccl:reduce_scatter_tensor_coalesced",
                            "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"]),
        ("all-to-all", ["gloo:all_to_all", "nccl:all_to_all", "nccl:all_to_allv"]),
        ("broadcast", ["gloo:broadcast", "nccl:broadcast", "ncclDevKernel_Broadcast_RING_LL"]),
        ("barrier", ["gloo:barrier", "nccl:all_reduce_barrier"]),
        ("send", ["gloo:send", "nccl:send 0->1"]),
        ("recv", ["gloo:recv", "gloo:recvAnySource", "nccl:recv 0<-1"]),
        ("send and recv", ["ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"]),
        ("collective", ["ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "nccl:coalesced"]),
    ],
)  # fmt: skip
def test_backends_words_become_ours(word: str, names: list[str]) -> None:
    assert {name: collective_name(name) for name in names} == dict.fromkeys(names, word)


@pytest.mark.parametrize("name", ["aten::scatter", "c10d::allreduce_", "gather", "linear", "ncclGroupEnd"])
def test_what_is_no_collective(name: str) -> None:
    assert collective_name(name) is None


def test_every_kind_of_a_plan_has_its_word() -> None:
    kinds = [kind.value for kind in StepKind if not kind.is_local]
    assert [collective_name(f"gloo:{kind.replace('-', '_')}") for kind in kinds] == kinds


# What the profiler gives, made by hand.


@dataclass
class Span:
    start: float
    end: float


@dataclass
class Found:
    """An event of the profiler."""

    name: str
    time_range: Span
    device: str = "CPU"
    thread: int = 1
    is_async: bool = False
    cpu_parent: Found | None = None

    @property
    def device_type(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.device)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str, float]]]:
    """What is made of some events."""

    def make(*events: Found) -> list[tuple[str, str, float]]:
        monkeypatch.setattr("conjoin.runtime.recording.profile", lambda **_: nullcontext(Profiler(events)))
        return [(entry.stream, entry.name, entry.duration) for entry in record(lambda: None)]

    return make


@dataclass
class Profiler:
    found: tuple[Found, ...]

    def events(self) -> tuple[Found, ...]:
        return self.found


def test_a_collective_on_a_gpu_is_there_once(recorded: Callable[..., list[tuple[str, str, float]]]) -> None:
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    product = Found("gemm", Span(0, 4), "CUDA")
    span, inside = Found("nccl:all_reduce", Span(5, 9), "CUDA"), Found(kernel, Span(5.5, 9), "CUDA")
    on_cpu = Found("nccl:all_reduce", Span(1, 2), is_async=True)
    assert recorded(on_cpu, product, span, inside) == [("compute", "gemm", 4), ("links", "all-reduce", 4)]
    assert recorded(on_cpu, product, inside) == [("compute", "gemm", 4), ("links", "all-reduce", 3.5)]


def test_messages_are_called_what_they_stand_for(recorded: Callable[..., list[tuple[str, str, float]]]) -> None:
    """Each from its start to the end of the wait for it, which may be inside of something else."""
    outside = Found("autograd::engine::evaluate_function: _CarriedBackward", Span(0, 20))
    started = [Found("conjoin: reduce-scatter 6", Span(1, 2)), Found("conjoin: all-to-all 7", Span(3, 4))]
    waited = [Found(started[1].name, Span(5, 9), cpu_parent=outside), Found(started[0].name, Span(10, 11))]
    message = Found("gloo:send", Span(3.5, 9), is_async=True)
    assert recorded(*started, *waited, message) == [("links", "reduce-scatter", 10), ("links", "all-to-all", 6)]
    assert recorded(message) == [("links", "send", 5.5)], "somebody else's"


def test_nothing_done_is_nothing_recorded() -> None:
    assert record(lambda: None) == []
