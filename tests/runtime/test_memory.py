"""What a rank computes does not depend on how numbers lie in memory: programs whose every call is given others so.

Each call of a program, reshards, bundles and rings among them, is given operands that lie apart, turned or within
others, with poison between them, and so are the gradients that come back to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.comm import Routing
from conjoin.ir import Plan
from conjoin.machine import Axis, Mesh
from conjoin.ops import aggregation, routed_experts, torch_private
from conjoin.runtime.movement.bundles import Dropping
from conjoin.runtime.movement.routing import carry_routing
from conjoin.runtime.program import emitter
from conjoin.runtime.program.tensors_on_host import GivenAgain, Offloading
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from tests.memory_orders import Lay, apart, laid, turned, within
from tests.runtime.hand_plans import by_strategy, captured
from tests.runtime.random_graphs import Sample, differences, on_one_device, on_ranks
from tests.runtime.test_accumulation import plan_for
from tests.runtime.test_bundles import deep, regathering
from tests.runtime.test_halo import sample_of as on_graph
from tests.runtime.test_pipelines import CASES, compare, pipeline_of
from tests.runtime.test_random_layouts import draw
from tests.runtime.test_ring_attention import tower, with_gradients
from tests.runtime.test_strides import images

WAYS: tuple[tuple[Lay, ...], ...] = (turned,), (turned, within, apart)
IN_ORDER = ("dropout", "rand", "getitem", "update_batch_norm", "hold", "launch")
"""What draws in the order of memory, hands on what it is given, writes to it, or has it under way."""


@contextmanager
def lying(lays: tuple[Lay, ...]) -> Iterator[None]:
    """Programs that are made meanwhile give their calls what lies in these ways, in turn."""
    call = emitter.Emitter.call

    def call_laid(self: Any, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            turn = cycle(lays)
            named = {name: laid(x, turn) for name, x in named.items()}
            return laid(function(*laid(args, turn), **named), turn)

        inner = getattr(function, "function", function)  # of one that is pinned
        name = getattr(inner, "__name__", str(inner))
        return call(self, function if any(word in name for word in IN_ORDER) else run, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emitter.Emitter, "call", call_laid)
        patch.setattr(aggregation, "_FEW", 0)
        yield


@cache
def layers() -> Sample:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return captured(model, (torch.randn(8, 6), torch.randn(8, 3)), nn.functional.mse_loss)


def planned(sample: Sample, strategy: str) -> tuple[Sample, Plan]:
    return sample, by_strategy(sample, strategy, 2)


PLANS: dict[str, Callable[[], tuple[Sample, Plan]]] = {
    **{f"random {seed}": partial(draw, seed) for seed in (4, 16)},
    "keys gathered": lambda: planned(tower(True), "context:cp=2"),
    "ring": lambda: planned(tower(True), "context:cp=2,ring"),
    "bundles": lambda: planned(deep(), "fsdp"),
    "bundles again": lambda: (deep(), regathering(planned(deep(), "fsdp")[1])),
    "halos of images": lambda: planned(images(), "spatial"),
    "halos of a graph": lambda: planned(on_graph("graphsage")[0], "vertex-parallel:parts=2"),
    "micro-batches": lambda: (layers(), plan_for(layers(), "fsdp", 2)),
}


def faults(name: str, lays: tuple[Lay, ...]) -> list[str]:
    torch.manual_seed(1)
    sample, plan = PLANS[name]()
    with lying(lays):
        found = on_ranks(plan, sample)
    return differences(plan, found, on_one_device(sample))


@pytest.mark.parametrize("name", PLANS)
def test_programs_compute_the_same(name: str) -> None:
    for lays in WAYS:
        assert faults(name, lays) == [], lays


def test_features_that_lie_apart_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_rows_in_one_piece", lambda x: x)
    assert faults("keys gathered", WAYS[0])


def test_stages_compute_the_same() -> None:
    kind, make, loss = CASES["tied"]
    torch.manual_seed(3)
    model = kind().double().train()
    pipeline = pipeline_of(model, make(), loss, "pipeline:pp=2,micro=2,schedule=zero-bubble", 2)
    with lying(WAYS[-1]):
        compare(pipeline, model, loss, [make()])


@pytest.mark.parametrize("lay", [turned, apart])
def test_rows_find_their_experts(lay: Lay) -> None:
    """Of rows and weights that lie in some way."""
    torch.manual_seed(1)
    numbers = partial(torch.randn, dtype=torch.float64)
    rows, weights = numbers(8, 4), (numbers(4, 4, 6), numbers(4, 3, 4))
    expert, given = torch.randint(4, (16,)), numbers(16, 4)
    wanted = with_gradients(lambda *xs: routed_experts(*xs, expert, 4, "silu"), [rows, *weights], given)

    def program(ranks: Communicator) -> list[Tensor]:
        function = carry_routing(Routing(("x",), ((0, 2), (2, 4))), ranks)
        x, *mine, own, back = (part.chunk(2)[ranks.rank] for part in (rows, *weights, expert, given))
        turn = cycle((lay,))

        def run(*xs: Tensor) -> Any:
            return laid(function(*laid(xs, turn), lay(own), 4, "silu"), turn)

        return with_gradients(run, [x, *mine], back)

    found = run_ranks(Mesh((Axis("x", 2),)), program)
    torch.testing.assert_close([torch.cat(parts) for parts in zip(*found, strict=True)], wanted, rtol=1e-9, atol=1e-12)


VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (torch.conj, torch.real, torch.imag, torch.view_as_real, torch.t)


def test_what_is_gathered_again_is_seen_as_before() -> None:
    """Also as a conjugate, or as pairs of real numbers, of which sizes and strides say nothing."""
    whole = torch.randn(3, 2, dtype=torch.complex128)
    ticket = SimpleNamespace(made=(weakref.ref(whole),), num_asked=0)
    bundle: Any = SimpleNamespace(ticket=ticket, bring_again=lambda _: (whole.clone(),))
    dropping = Dropping()
    dropping.note(bundle)
    for view in (*VIEWS, lambda x: x.conj().imag):
        assert torch.equal(dropping.unpack(dropping.pack(view(whole))), view(whole))
    assert ticket.num_asked == 1, "the transposed one is dropped"


def test_what_lies_on_the_host_is_given_again_as_before() -> None:
    offloading, x = Offloading(torch.device("cpu")), torch.randn(3, 2, dtype=torch.complex128)
    with offloading.running(()):
        offloading.note(x)
        for view in (*VIEWS, lambda x: x.conj().imag):
            kept = offloading.keep(view(x))
            again = kept.tensor() if isinstance(kept, GivenAgain) else kept
            assert torch.equal(again, view(x)) and torch.equal(offloading.unpack(offloading.pack(view(x))), view(x))
