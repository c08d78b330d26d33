"""What strategies put in a place by themselves is tried before it is used: each kind comes to the same, and what does
not is refused. The faults are made here, by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, Value, expansion
from conjoin.machine import parse_machine
from conjoin.rules.graphs import rehearsal
from conjoin.search import drafts, fused_layers, heads_apart, make_plan, rehearsed, rings, unflattened_tokens
from tests.ir.wording import assert_three_sentences
from tests.zoo import graphs


@cache
def torchs_attention() -> Graph:
    """Queries, keys and values of one product, and heads behind samples in one dim."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(16, 8), nn.Linear(16, 3)

        def forward(self, x: Any) -> Any:
            return self.out(self.attention(x, x, x, need_weights=False)[0])

    torch.manual_seed(0)
    batch = torch.randn(6, 8, 16), torch.randint(0, 3, (48,))
    return capture(Own().train(), batch, lambda y, t: functional.cross_entropy(y.flatten(0, 1), t))


def swap_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fused_layers._Unfuser._piece_args
    monkeypatch.setattr(fused_layers._Unfuser, "_piece_args", lambda *args: own(*args)[::-1])


def confuse_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and samples, of which there are as many, change places."""

    def parted(first: Any, order: Any, shape: Any, own: Any = heads_apart._parted) -> Any:
        found = own(first, order, shape)
        return found and (found[0], (found[1][1], found[1][0], *found[1][2:]))

    monkeypatch.setattr(heads_apart, "_parted", parted)


def lose_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(node: Any, target: Any, tokens: Any, work: Any, own: Any = unflattened_tokens._as_tokens) -> Any:
        found = own(node, target, tokens, work)
        return work.emit(node, "sub.Tensor", found, found)

    monkeypatch.setattr(unflattened_tokens, "_as_tokens", lost)


def look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seeing(rings.Rewriting):
        def emit(self, node: Any, op: str, *given: Any) -> Any:
            return super().emit(node, op, *given[:3], False, *given[4:])

    monkeypatch.setattr(rings, "Rewriting", Seeing)


def negate(op: str) -> Callable[[pytest.MonkeyPatch], None]:
    def negated(monkeypatch: pytest.MonkeyPatch) -> None:
        def expand(node: Any, work: Any, parts: bool, own: Any = expansion._expand) -> None:
            own(node, work, parts)
            if node.op == op:
                work.values[Value(node)] = work.emit(node, "neg", work.values[Value(node)])

        monkeypatch.setattr(expansion, "_expand", expand)

    return negated


BATCH_NORM = "_native_batch_norm_legit_functional"
KINDS: dict[str, tuple[Callable[[], Graph], str, Callable[[pytest.MonkeyPatch], None]]] = {
    "linear": (lambda: graphs.captured("gpt-125m", 8), "megatron:tp=4", swap_pieces),
    "reshape": (torchs_attention, "megatron:tp=2", confuse_heads),
    "token_entropy": (lambda: graphs.captured("gpt-125m", 8), "context:cp=4", lose_targets),
    "scaled_dot_product_attention": (lambda: graphs.captured("llama-7b", 8), "context:cp=4,ring", look_ahead),
    "cross_entropy_loss": (lambda: graphs.captured("gpt-125m", 8), "data-parallel", negate("cross_entropy_loss")),
    BATCH_NORM: (lambda: graphs.captured("resnet-50", 8), "data-parallel", negate(BATCH_NORM)),
}
"""By what is put there or replaced: a graph, a strategy that does it, and how it may go wrong."""


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was tried before is tried again, and what was found is not kept."""
    kept = (drafts.open_up, rehearsed._expansion_fault)
    for cached in kept:
        cached.cache_clear()
    monkeypatch.setattr(rehearsal, "_rehearsed", rehearsal._rehearsed.__wrapped__)
    yield
    for cached in kept:
        cached.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_put_there_is_run_and_comes_to_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[set[str], str, bool]] = []

    def noted(rewrite: Any, *how: Any, own: Any = rehearsal._rehearsed) -> tuple[str, bool]:
        fault, was_seen = own(rewrite, *how)
        tried.append(({node.op.removeprefix("conjoin::") for node in (*rewrite.old, *rewrite.new)}, fault, was_seen))
        return fault, was_seen

    monkeypatch.setattr(rehearsal, "_rehearsed", noted)
    graph, strategy, _ = KINDS[kind]
    make_plan(graph(), parse_machine("local:4"), strategy)
    assert any(kind in ops for ops, _, _ in tried)
    assert all(was_seen and not fault for _, fault, was_seen in tried)


def test_what_cannot_be_made_small_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise ValueError("sizes that a declaration does not expect")

    graph, strategy, _ = KINDS[BATCH_NORM]
    monkeypatch.setattr(rehearsed, "expansion_of", refused)
    monkeypatch.setattr(rehearsal._Rehearsal, "run", refused)
    assert make_plan(graph(), parse_machine("local:4"), strategy).substitutions


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_to_something_else_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, strategy, go_wrong = KINDS[kind]
    go_wrong(monkeypatch)
    with pytest.raises(StrategyError, match=r"Tried out on small numbers, its (result|gradient) is") as told:
        make_plan(graph(), parse_machine("local:4"), strategy)
    assert_three_sentences(told.value)
