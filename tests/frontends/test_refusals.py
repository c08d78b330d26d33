"""What torch cannot follow is refused by its own name, at its line, without torch's words; dataclasses are taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import register_dataclass

import conjoin
from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.ir import load_plan
from conjoin.runtime import to_module
from tests.ir.wording import assert_three_sentences

X = torch.ones(8, 4)
WRITTEN = torch.zeros(4)


class Called(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(4, 4), forward

    def forward(self, *args: Any) -> Any:
        return self.given(self, *args)


def refusal(forward: Callable[..., Any], *batch: Any) -> str:
    with pytest.raises(CaptureError) as told:
        capture(Called(forward), batch or X)
    assert_three_sentences(str(told.value).split("\n  at ")[0])
    return str(told.value)


def packed(m: Called, x: Tensor) -> Tensor:
    rows = pack_padded_sequence(x.view(2, 4, 4), torch.tensor([4, 3]), batch_first=True)
    return pad_packed_sequence(rows, batch_first=True)[0]


def packed_by_lengths(m: Called, x: Tensor) -> Tensor:
    lengths = x.view(2, 4, 4)[:, :, 0].sum(1).long().clamp(min=1)
    return pack_padded_sequence(x.view(2, 4, 4), lengths, batch_first=True, enforce_sorted=False).data


def dual(m: Called, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m.layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def in_a_thread(m: Called, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(m.layer, x).result()


FORWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "packed": (packed, "packs sequences of different lengths"),
    "packed by lengths": (packed_by_lengths, "packs sequences of different lengths"),
    "packed list": (lambda m, x: pack_sequence([x[:5], x[5:]]).data, "packs sequences of different lengths"),
    "nested": (lambda m, x: torch.nested.nested_tensor([x[:3], x[3:]]).to_padded_tensor(0.0), "makes a nested tensor"),
    "jagged": (lambda m, x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8])).values(), "nested"),
    "jvp": (lambda m, x: torch.func.jvp(m.layer, (x,), (x,))[1], "takes gradients inside its forward pass"),
    "jacfwd": (lambda m, x: torch.func.jacfwd(m.layer)(x[0]), "takes gradients inside its forward pass"),
    "linearize": (lambda m, x: torch.func.linearize(m.layer, x)[1](x), "takes gradients inside its forward pass"),
    "dual numbers": (dual, "takes gradients inside its forward pass"),
    "NumPy": (lambda m, x: torch.from_numpy(m.layer(x).detach().numpy()), "hands a tensor to NumPy"),
    "a generator": (lambda m, x: x + torch.rand(4, generator=torch.Generator()), "torch.Generator of its own"),
    "a thread": (in_a_thread, "made where torch.export does not follow calls"),
    "a constant is written": (lambda m, x: m.layer(x) * WRITTEN.add_(1), "neither a parameter nor a buffer"),
    "no tensor": (lambda m, x: None, "returned NoneType, and no tensor"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(("forward", "why"), FORWARDS.values(), ids=FORWARDS)
def test_what_torch_cannot_follow_is_named(forward: Callable[..., Any], why: str) -> None:
    told = refusal(forward)
    assert why in told and "torch.export stopped there" not in told and "FakeTensor" not in told


def test_a_line_of_a_forward_that_fails_is_told_in_words_of_the_user() -> None:
    assert "'NoneType' and 'Tensor'" in refusal(lambda m, x: None + m.layer(x))


def test_a_packed_batch_is_refused() -> None:
    assert "The batch packs" in refusal(lambda m, rows: m.layer(rows.data), pack_sequence([X[:5], X[5:]]))


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None
    scale: float = 2.0


@dataclasses.dataclass
class Known(Pair):
    pass


@dataclasses.dataclass
class Dropping:
    first: Tensor
    scale: float = 2.0


@dataclasses.dataclass
class Full:
    first: Tensor
    second: Tensor | None = dataclasses.field(default_factory=lambda: torch.ones(4))


register_dataclass(Known)
register_dataclass(Dropping, field_names=["first"], drop_field_names=["scale"])
register_dataclass(Full)


@pytest.mark.parametrize("second", [None, X[0]], ids=["absent", "there"])
def test_a_registered_dataclass_is_batch_and_output(second: Tensor | None, tmp_path: Path) -> None:
    def forward(m: Called, given: Known) -> Known:
        scaled = m.layer(given.first) * given.scale
        return Known(scaled if given.second is None else scaled + given.second, second=None, scale=given.scale)

    model, batch = Called(forward), (Known(torch.randn(8, 4), second, 3.0),)
    made, right = to_module(capture(model, batch), model)(*batch), model(*batch)
    assert isinstance(made, Known) and torch.equal(made.first, right.first)
    assert (made.second, made.scale) == (None, 3.0)
    batch = (Known(torch.randn(8, 4), second),)
    plan = conjoin.plan(model, batch, "local:2", loss=squared, strategy="data-parallel")
    plan.save(tmp_path / "plan.json")
    assert conjoin.verify_plan(load_plan(tmp_path / "plan.json"), model, batch, loss=squared).passed


def squared(made: Known) -> Tensor:
    return made.first.square().mean()


def test_dataclasses_of_which_something_would_be_lost_are_refused() -> None:
    assert "register_dataclass(Pair)" in refusal(lambda m, pair: m.layer(pair.first), Pair(X))
    assert "returned Pair, and no tensor" in refusal(lambda m, x: Pair(m.layer(x)))
    assert "scale=5.0" in refusal(lambda m, given: m.layer(given.first) * given.scale, Dropping(X, 5.0))
    assert "scale=5.0" in refusal(lambda m, x: Dropping(m.layer(x), 5.0))
    assert "second set to None" in refusal(lambda m, given: m.layer(given.first), Full(X, None))
    capture(Called(lambda m, given: m.layer(given.first) * given.scale), (Dropping(X),))


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to its own": lambda x: x.to(x.device, x.dtype),
    "cpu": lambda x: x.cpu(),
    "type": lambda x: x.type(torch.FloatTensor).type_as(x),
    "as_tensor": torch.as_tensor,
    "to_dense": lambda x: x.to_dense(),
    "resolve": lambda x: x.resolve_conj().resolve_neg(),
    "real": torch.real,
    "contiguous": lambda x: x.contiguous(),
    "requires_grad": lambda x: x.requires_grad_(),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_conversion_without_effect_is_none(convert: Callable[[Tensor], Tensor]) -> None:
    graph = capture(Called(lambda m, x: m.layer(convert(x))), X.clone())
    assert [node.op for node in graph.nodes] == ["linear"]


def test_numpy_in_a_batch_is_refused() -> None:
    assert "torch.from_numpy" in refusal(lambda m, x, y: m.layer(x), X, numpy.ones(3))
