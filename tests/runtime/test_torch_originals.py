"""Named strategies beside what people write by hand with torch's own wrappers: same loss and gradients, no more bytes.

All originals and plans run on the same four Gloo processes: DistributedDataParallel; FSDP2 on a mesh of two dims, which
is hybrid sharding; `parallelize_module` with sequence parallelism, alone and under FSDP2; and activation checkpointing
of every block.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Plan
from conjoin.machine import Machine, parse_machine
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.state.blocks import cut_out
from conjoin.search import make_plan
from conjoin.sim import predict
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample

NODES = Machine("two nodes", 2, 2, "cpu")
WIDTH, HEADS, WORDS, LENGTH, SAMPLES = 16, 4, 32, 8, 8
LOSS_BYTES = 24
"""What ranks sum up for the loss: it, and how many targets count, in double precision."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class PackedAttention(nn.Module):
    """The same with query, key and value in one weight."""

    def __init__(self, apart: Attention) -> None:
        super().__init__()
        layers = apart.query, apart.key, apart.value
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), apart.out
        self.qkv.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]))
        self.qkv.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (-1, WIDTH // HEADS)) for part in self.qkv(x).split(WIDTH, dim=-1)]
        mixed = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.feed_forward_norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Tower(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrong(scores: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


@cache
def sample() -> Sample:
    torch.manual_seed(3)
    model = Tower().double().train()
    batch = tuple(torch.randint(WORDS, (SAMPLES, LENGTH)) for _ in range(2))
    return Sample(capture(model, batch, wrong), model, batch)


@cache
def packed_sample() -> Sample:
    """The same model and batch, its attention in packed weights."""
    model, batch = copy.deepcopy(sample().model), sample().inputs
    for block in model.blocks:  # type: ignore[union-attr]
        block.attention = PackedAttention(block.attention)  # type: ignore[union-attr, arg-type]
    return Sample(capture(model, batch, wrong), model, batch)


class Step(NamedTuple):
    """What a rank has after forward and backward."""

    loss: float
    gradients: dict[str, tuple[Any, Tensor]]
    """Each with the blocks of the whole that it is."""
    bytes: float


class Counting(TorchDispatchMode):
    """Payload that this rank sends in collectives, in the units of a communicator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.bytes += _sent(func.__name__.partition(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> float:
    match name:
        case "allgather_base":
            return args[1].nbytes * (_size(args[2]) - 1)
        case "reduce_scatter_base":
            return args[0].nbytes * (_size(args[2]) - 1)
        case "allreduce":
            return 2 * args[0][0].nbytes * (1 - 1 / _size(args[1]))
        case "all_gather_into_tensor":
            return args[0].nbytes * (args[1] - 1)
        case "reduce_scatter_tensor":
            return args[0].nbytes * (1 - 1 / args[2])
        case "all_reduce":
            return 2 * args[0].nbytes * (1 - 1 / dist.distributed_c10d._resolve_process_group(args[2]).size())
        case "wait_tensor" | "wrap_tensor_autograd":
            return 0.0
    raise AssertionError(name)


def _size(group: Any) -> int:
    return dist.ProcessGroup.unbox(group).size()


def by_plan(communicator: Communicator, plan: Plan, found: Sample) -> Step:
    module = module_on(plan, found, communicator)
    loss = module(*found.inputs)
    loss.backward()
    shapes = {name: tuple(p.shape) for name, p in found.model.named_parameters()}
    pieces = {name: p.grad.as_subclass(Tensor) for name, p in module.named_parameters() if p.grad is not None}
    blocks = {name: module.store.blocks(name, shapes[name]) for name in pieces}
    return Step(loss.item(), {name: (blocks[name], pieces[name]) for name in pieces}, communicator.bytes_sent)


def by_torch(wrap: Callable[[nn.Module], nn.Module], part: int, parts: int) -> Step:
    """A step of the original on this rank's part of the batch."""
    warnings.simplefilter("ignore")
    model = wrap(copy.deepcopy(sample().model))
    tokens, wanted = (x.chunk(parts)[part] for x in sample().inputs)
    with Counting() as sent:
        loss = wrong(model(tokens), wanted)
        loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    whole = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        whole[name.removeprefix("module.")] = ((tuple((0, n) for n in full.shape),), full)
    return Step(mean.item() / dist.get_world_size(), whole, sent.bytes)


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)  # type: ignore[return-value]


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As in torch's tutorial: norms and residuals split along the sequence; embedding, last norm and head are whole."""
    taken = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "attention_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel(),
        "attention": taken, "feed_forward": taken,
        "attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.up": ColwiseParallel(), "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan)  # type: ignore[arg-type]
    outer: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, outer)


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def checkpointed(model: nn.Module) -> nn.Module:
    """Every block run again in the backward pass, under data parallelism."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = Recomputed(copy.copy(block)).forward  # type: ignore[method-assign, assignment]
    return DistributedDataParallel(model)


ORIGINALS = {
    "ddp": "ddp", "ddp+recompute=full": "checkpointed", "hsdp": "hsdp", "megatron:tp=4,sp,vocab": "tp",
    "fsdp+megatron:tp=2,sp,vocab": "fsdp+tp",
}  # fmt: skip
SPLIT = tuple(strategy for strategy in ORIGINALS if "tp=" in strategy)
"""What splits layers."""
PLANS = (
    *ORIGINALS,
    "ddp+recompute=selective",
    "hsdp+recompute=full",
    "hsdp+megatron:tp=2,sp+recompute=selective+micro=2",
)


def originals(rank: int) -> dict[str, Step]:
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = init_device_mesh("cpu", (4,))
    return {
        "ddp": by_torch(DistributedDataParallel, rank, 4),
        "checkpointed": by_torch(checkpointed, rank, 4),
        "hsdp": by_torch(lambda model: fully_sharded(model, flat), rank, 4),
        "tp": by_torch(lambda model: tensor_parallel(model, whole), 0, 1),
        "fsdp+tp": by_torch(
            lambda model: fully_sharded(tensor_parallel(model, flat["inner"]), flat["outer"]), rank // 2, 2
        ),
    }


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Step]]:
    """What every rank has after a step of each plan and each original."""
    plans = {strategy: make_plan(sample().graph, NODES, strategy) for strategy in PLANS}
    packed = {strategy: make_plan(packed_sample().graph, NODES, strategy) for strategy in SPLIT}

    def program(communicator: Communicator) -> dict[str, Step]:
        mine = {}
        for strategy, plan in plans.items():
            communicator.bytes_sent = 0
            mine[strategy] = by_plan(communicator, plan, sample())
        for strategy, plan in packed.items():
            communicator.bytes_sent = 0
            mine[f"packed {strategy}"] = by_plan(communicator, plan, packed_sample())
        return {**mine, **{f"torch {name}": step for name, step in originals(communicator.rank).items()}}

    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_processes(NODES.mesh, program, folder)


@cache
def plain() -> tuple[float, dict[str, Tensor]]:
    model, (tokens, wanted) = copy.deepcopy(sample().model), sample().inputs
    loss = wrong(model(tokens), wanted)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [*PLANS, *(f"torch {name}" for name in ORIGINALS.values())])
def test_loss_and_gradients_are_those_of_the_plain_model(name: str, steps: list[dict[str, Step]]) -> None:
    loss, gradients = plain()
    for rank in steps:
        assert rank[name].loss == pytest.approx(loss, rel=1e-12)
        assert rank[name].gradients.keys() == gradients.keys()
        for parameter, (blocks, piece) in rank[name].gradients.items():
            part = cut_out(gradients[parameter], blocks)
            torch.testing.assert_close(piece, part, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("strategy", "original"), ORIGINALS.items())
def test_no_more_bytes_are_sent_than_by_the_original(
    strategy: str, original: str, steps: list[dict[str, Step]]
) -> None:
    for rank in steps:
        assert 0 < rank[strategy].bytes <= rank[f"torch {original}"].bytes + LOSS_BYTES


@pytest.mark.parametrize("strategy", SPLIT)
def test_packed_weights_send_no_more_than_the_original_of_separate_ones(
    strategy: str, steps: list[dict[str, Step]]
) -> None:
    loss, gradients = plain()
    told = explain(make_plan(packed_sample().graph, NODES, strategy))
    assert [rank[f"packed {strategy}"].bytes for rank in steps] == [told.bytes_of(rank) for rank in range(4)]
    for rank in steps:
        step = rank[f"packed {strategy}"]
        assert step.loss == pytest.approx(loss, rel=1e-12)
        assert step.bytes <= rank[f"torch {ORIGINALS[strategy]}"].bytes + LOSS_BYTES
        for block in range(2):
            path = f"blocks.{block}.attention."
            whole = torch.cat([gradients[f"{path}{name}.weight"] for name in ("query", "key", "value")])
            blocks, piece = step.gradients[f"{path}qkv.weight"]
            torch.testing.assert_close(piece, cut_out(whole, blocks), rtol=1e-9, atol=1e-12)
            assert piece.numel() * 4 == whole.numel()


@pytest.mark.parametrize("strategy", PLANS)
def test_bytes_are_as_told(strategy: str, steps: list[dict[str, Step]]) -> None:
    told = explain(make_plan(sample().graph, NODES, strategy))
    assert [step[strategy].bytes for step in steps] == [told.bytes_of(rank) for rank in range(4)]


def test_what_is_run_again_is_not_kept() -> None:
    machine, modes = parse_machine("dgx-h100:1x4"), ("none", "every-2", "selective", "full")
    with torch.device("meta"):
        model, batch = Tower(6), (torch.zeros(4096, LENGTH).long(), torch.zeros(4096, LENGTH).long())
    graph = capture(model, batch, wrong)
    plans = [make_plan(graph, machine, f"ddp+recompute={mode}") for mode in modes]
    kept = [predict(plan, machine, CostModel()).memory.activations for plan in plans]
    assert kept == sorted(kept, reverse=True) and kept[3] < 0.7 * kept[0], dict(zip(modes, kept, strict=True))
