"""Keys and values that go around a ring, and keys that are split: torch's own attention on one device is the judge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
from conjoin.comm import Ring
from conjoin.cost import ATTENTION, CostModel
from conjoin.errors import StrategyError
from conjoin.ir import Plan, cut
from conjoin.machine import Axis, Mesh, parse_machine
from conjoin.ops import RING_ATTENTION
from conjoin.report import explain
from conjoin.runtime.movement.ring_attention import carry_ring
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.search import make_plan
from conjoin.sim import predict
from tests.ir.wording import assert_three_sentences
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample

BATCH, HEADS = 2, 2


def heads(count: int, length: int, features: int) -> Tensor:
    return torch.randn(BATCH, count, length, features, dtype=torch.float64)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("repeats", "features", "scale"), [(1, 4, None), (2, 3, 0.3)])
@pytest.mark.parametrize(("ways", "length"), [(2, 8), (3, 12), (4, 16), (3, 7), (4, 12), (4, 3)])
def test_pieces_that_go_around_see_all_that_they_may(
    ways: int, length: int, repeats: int, features: int, scale: float | None, is_causal: bool
) -> None:
    """Values and gradients; even pieces whose halves are swapped, uneven ones, none, groups of heads, other values."""
    torch.manual_seed(ways + length)
    tensors = [heads(HEADS * repeats, length, 4), heads(HEADS, length, 4), heads(HEADS, length, features)]
    gradient, grouped = heads(HEADS * repeats, length, features), repeats > 1
    run = partial(functional.scaled_dot_product_attention, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    want = with_gradients(run, tensors, gradient)
    spans = [cut((0, length), ways, i) for i in range(ways)]
    ring = Ring(("x",), tuple(stop - start for start, stop in spans), is_causal)
    assert ring.swaps == (is_causal and length % (2 * ways) == 0)

    def program(ranks: Communicator) -> list[Tensor]:
        function = carry_ring(ring, range(ways), ranks)
        mine = [x[:, :, slice(*spans[ranks.rank])] for x in (*tensors, gradient)]
        return with_gradients(lambda *qkv: function(*qkv, is_causal, scale, grouped), mine[:3], mine[3])

    found = run_ranks(Mesh((Axis("x", ways),)), program)
    whole = [torch.cat(parts, 2) for parts in zip(*found, strict=True)]
    torch.testing.assert_close(whole, want, rtol=1e-9, atol=1e-12)


def with_gradients(run: Callable[..., Tensor], tensors: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def test_everyone_has_as_much_to_do_under_a_causal_mask() -> None:
    ring = Ring(("x",), (4,) * 5, True)
    for step in range(1, 5):
        blocks = [ring.block(position, step) for position in range(5)]
        seen = [len(range(4)[b.queries]) * len(range(4)[b.keys]) for b in blocks if b is not None]
        assert seen == [8] * 5
    plain = Ring(("x",), (4, 4, 3), True)
    assert [plain.block(position, 1) is None for position in range(3)] == [True, False, False]


class Tower(nn.Module):
    """Attention of a sequence to itself, and a loss of every position."""

    def __init__(self, is_causal: bool = True, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.is_causal, self.dropout = is_causal, dropout
        self.query, self.both, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query = self.query(x).unflatten(-1, (4, -1)).transpose(1, 2)
        key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.both(x).chunk(2, -1))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, mask, self.dropout, self.is_causal and mask is None, enable_gqa=True
        )
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def tower(is_causal: bool) -> Sample:
    torch.manual_seed(1)
    return captured(Tower(is_causal), (torch.randn(2, 8, 16), torch.randn(2, 8, 16)), functional.mse_loss)


def one_step(plan: Plan, sample: Sample, communicator: Communicator) -> tuple[float, dict[str, Tensor], int]:
    module = module_on(plan, sample, communicator)
    communicator.bytes_sent = 0
    loss = module(*sample.inputs)
    loss.backward()
    gradients = {name: p.grad.as_subclass(Tensor) for name, p in module.named_parameters() if p.grad is not None}
    return loss.item(), gradients, communicator.bytes_sent


@pytest.mark.parametrize("is_causal", [False, True])
def test_on_processes_it_trains_like_the_plain_model_with_the_bytes_told(is_causal: bool, tmp_path: Path) -> None:
    sample, strategy = tower(is_causal), "context:cp=4,ring"
    plan = by_strategy(sample, strategy)
    model = copy.deepcopy(sample.model)
    loss = functional.mse_loss(model(sample.inputs[0]), sample.inputs[1])
    loss.backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    steps = run_processes(plan.mesh, partial(one_step, plan, sample), tmp_path)
    for rank, (found, gradients, sent) in enumerate(steps):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(gradients, want, rtol=1e-9, atol=1e-12)
        assert sent == explain(plan).bytes_of(rank)
    kinds = {total.kind: (total.forward.total, total.backward.total) for total in explain(plan).totals}
    piece = (
        8 * (2 * 2 * 4) * 2 * 2
    )  # float64 of two samples, two heads of four features, keys and values, two positions
    assert kinds["ring"] == (4 * 3 * piece, 4 * (3 + 4) * piece) and ("all-to-all" in kinds) == is_causal


def test_uneven_pieces_beside_data_parallelism_send_what_is_told() -> None:
    torch.manual_seed(2)
    sample = captured(Tower(), (torch.randn(2, 7, 16), torch.randn(2, 7, 16)), functional.mse_loss)
    plan = by_strategy(sample, "context:cp=3,dp=2,ring", 6)
    steps = run_ranks(plan.mesh, partial(one_step, plan, sample))
    assert [sent for _, _, sent in steps] == [explain(plan).bytes_of(rank) for rank in range(6)]
    loss = functional.mse_loss(sample.model(sample.inputs[0]), sample.inputs[1])
    assert [found for found, _, _ in steps] == pytest.approx([loss.item()] * 6, rel=1e-12)


def test_a_long_sequence_takes_three_quarters_of_the_time_of_gathered_keys_and_less_memory() -> None:
    """A causal step on eight devices is bound by the last of them unless pieces are swapped; what is sent is hidden.
    The last one has 7.5 pieces of keys to look at, one of a ring 4, but in smaller kernels."""
    machine, length, width = parse_machine("dgx-h100"), 65536, 512
    with torch.device("meta"):
        model = Tower(width=width).bfloat16()
        batch = tuple(torch.empty(1, length, width, dtype=torch.bfloat16) for _ in range(2))
    graph = conjoin.capture(model, batch, functional.mse_loss)
    plans = [make_plan(graph, machine, f"context:cp=8{flag}") for flag in (",ring", "")]
    ring, gathered = (predict(plan, machine, CostModel()) for plan in plans)
    assert ring.seconds < 0.75 * gathered.seconds and ring.memory.peak < gathered.memory.peak


class Latents(nn.Module):
    """A few learned queries look at a long sequence (Perceiver; Jaegle et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.both, self.out = nn.Parameter(torch.randn(1, 4, 3, 4)), nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.both(x).chunk(2, -1))
        query = self.latents.expand(x.shape[0], -1, -1, -1)
        mixed = functional.scaled_dot_product_attention(query, key, value, mask[:, None, None], enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)


def test_keys_that_are_split_are_not_gathered_for_queries_that_are_not() -> None:
    torch.manual_seed(0)
    model, batch = Latents(), (torch.randn(2, 7, 8), torch.rand(2, 7) < 0.7, torch.randint(5, (2,)))
    plan = conjoin.plan(model, batch, "local:3", loss=functional.cross_entropy, strategy="context:cp=3")
    assert {total.kind for total in explain(plan).totals if total.forward.total} == {"all-reduce"}
    assert "expand-scaled_dot_product_attention" in {substitution.name for substitution in plan.substitutions}
    assert conjoin.verify_plan(plan, model, batch, loss=functional.cross_entropy, num_steps=2).passed


def test_what_does_not_go_around_is_told() -> None:
    x = torch.randn(2, 8, 16)
    graph = conjoin.capture(Tower(dropout=0.5), (x, x), functional.mse_loss, check=False)
    with pytest.raises(StrategyError, match=r"drops 0.5") as error:
        make_plan(graph, parse_machine("local:2"), "context:cp=2,ring")
    assert_three_sentences(error.value)


LENGTH = 7
MASKS: dict[str, Callable[[], Tensor]] = {
    "padding": lambda: (torch.arange(LENGTH) < torch.tensor([[4], [7]]))[:, None, None],
    "window": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-2),
    "nothing seen": lambda: torch.arange(LENGTH)[:, None].expand(-1, LENGTH) % 3 > 0,
    "distance": lambda: (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() * -torch.rand(4, 1, 1).double(),
    "added": lambda: torch.randn(2, 1, LENGTH, LENGTH, dtype=torch.float64),
    "of keys": lambda: torch.randn(4, 1, LENGTH, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("ways", [2, 3])
def test_a_mask_stays_while_keys_go_around(kind: str, ways: int) -> None:
    """Values and gradients, also of what is added to scores, as torch's own attention on one device has them."""
    torch.manual_seed(ways)
    mask = MASKS[kind]()
    tensors = [heads(4, LENGTH, 4), heads(2, LENGTH, 4), heads(2, LENGTH, 3)]
    gradient, is_added = heads(4, LENGTH, 3), mask.is_floating_point()
    attention = partial(functional.scaled_dot_product_attention, enable_gqa=True)
    run = attention if is_added else partial(attention, attn_mask=mask)
    want = with_gradients(run, [*tensors, mask] if is_added else tensors, gradient)
    spans = [cut((0, LENGTH), ways, i) for i in range(ways)]
    ring = Ring(("x",), tuple(stop - start for start, stop in spans), False)

    def program(ranks: Communicator) -> list[Tensor]:
        function = carry_ring(ring, range(ways), ranks)
        rows = slice(*spans[ranks.rank])
        q, k, v, out = (x[:, :, rows] for x in (*tensors, gradient))
        mine = mask if mask.shape[-2] == 1 else mask[..., rows, :]
        if is_added:
            return with_gradients(lambda a, b, c, d: function(a, b, c, False, None, True, d), [q, k, v, mine], out)
        return with_gradients(lambda a, b, c: function(a, b, c, False, None, True, mine), [q, k, v], out)

    found = [list(parts) for parts in zip(*run_ranks(Mesh((Axis("x", ways),)), program), strict=True)]
    whole = [torch.cat(parts, 2) for parts in found[:4]]
    if is_added:
        whole.append(sum(found[4][1:], found[4][0]) if mask.shape[-2] == 1 else torch.cat(found[4], -2))
    torch.testing.assert_close(whole, want, rtol=1e-9, atol=1e-12)


class Masked(nn.Module):
    """Attention with what is padded hidden, and a learned number for every distance added, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.bias = Tower(), nn.Embedding(2 * LENGTH, 4)

    def forward(self, x: Tensor, padded: Tensor, target: Tensor) -> Tensor:
        places = torch.arange(LENGTH)
        added = self.bias(places - places[:, None] + LENGTH).permute(2, 0, 1)[None]
        mask = added.masked_fill(padded[:, None, None], -torch.inf)
        return functional.mse_loss(self.tower(x, mask), target)


@pytest.mark.parametrize(("strategy", "num_devices"), [("context:cp=2,dp=2,ring", 4), ("context:cp=3,ring", 3)])
def test_a_model_with_learned_distances_and_padding_trains_as_on_one_device(strategy: str, num_devices: int) -> None:
    torch.manual_seed(3)
    padded = torch.arange(LENGTH) >= torch.tensor([[5], [7]])
    model, batch = Masked(), (torch.randn(2, LENGTH, 16), padded, torch.randn(2, LENGTH, 16))
    plan = conjoin.plan(model, batch, f"local:{num_devices}", strategy=strategy)
    ops = {node.op for node in plan.graph.nodes}
    assert RING_ATTENTION in ops and ATTENTION not in ops
    assert "ring" in {total.kind for total in explain(plan).totals}
    assert conjoin.verify_plan(plan, model, batch, num_steps=2).passed
    machine = parse_machine(f"dgx-h100:1x{num_devices}")
    told = conjoin.plan(model, batch, machine, strategy=strategy)
    assert predict(told, machine, CostModel()).seconds > 0
