"""Models wholly in half precision: they are captured, and train exactly as before, batch norm's buffers included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from conjoin.frontends import capture
from conjoin.ops import Call, TensorType, find_spec, output_types
from conjoin.runtime import to_module


def half_batch(batch: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in batch)


class Branches(nn.Module):
    """As blocks of Inception are: a convolution, one by rows and one by columns, and an average, side by side."""

    def __init__(self) -> None:
        super().__init__()
        sides = [nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, (1, 3), padding=(0, 1)), nn.Conv2d(3, 4, (3, 1), padding=(1, 0))]
        self.branches = nn.ModuleList(nn.Sequential(side, nn.BatchNorm2d(4), nn.ReLU()) for side in sides)
        self.average = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.head = nn.Sequential(nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([branch(x) for branch in (*self.branches, self.average)], 1))


WORKLOADS: dict[str, Callable[[], zoo.Workload]] = {
    "resnet-50": lambda: zoo.build("resnet-50:tiny"),
    "branches": lambda: zoo.Workload(
        Branches(), (torch.randn(4, 3, 4, 4), torch.randint(5, (4,))), nn.functional.cross_entropy
    ),
}


@pytest.mark.parametrize(("name", "dtype"), [("resnet-50", torch.bfloat16), ("branches", torch.float16)])
def test_batch_norm_in_half_precision(unequal: Callable[..., list[str]], name: str, dtype: torch.dtype) -> None:
    found = WORKLOADS[name]()
    batch = half_batch(found.batch, dtype)
    model = found.model.to(dtype).train()
    graph = capture(model, batch, found.loss)
    plain, module = copy.deepcopy(model), to_module(graph, model)
    for _ in range(2):
        torch.manual_seed(3)
        mine = module(*batch)
        torch.manual_seed(3)
        theirs = found.loss(plain(*batch[:-1]), batch[-1])
        assert torch.equal(mine, theirs)
        mine.backward()
        theirs.backward()
        assert unequal(module, plain) == []


@pytest.mark.parametrize("affine", [False, True])
def test_one_layer_without_a_loss(compare: Callable[..., Any], affine: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=affine)).to(torch.bfloat16)
    x = torch.randn(2, 3, 6, 6, dtype=torch.bfloat16)
    compare(model.train(), x, steps=2)


def test_the_new_statistics_are_stored_like_the_old_ones() -> None:
    model = nn.BatchNorm1d(4).to(torch.bfloat16).train()
    graph = capture(model, (torch.randn(8, 4, dtype=torch.bfloat16),))
    updated = {name: value.type.dtype for name, value in graph.updates}
    assert updated["running_mean"] == updated["running_var"] == torch.bfloat16


@pytest.mark.parametrize("statistics", [torch.float32, torch.bfloat16])
def test_statistics_of_a_narrower_input_keep_their_own_dtype(statistics: torch.dtype) -> None:
    """As torch's own kernels have it, asked on the CPU; on meta torch says float32 for both."""
    op = "_native_batch_norm_legit_functional"
    x, column = torch.randn(4, 3, dtype=torch.bfloat16), torch.ones(3, dtype=statistics)
    made = torch.ops.aten._native_batch_norm_legit_functional(x, column, column, column, column, True, 0.1, 1e-5)
    kind = TensorType((3,), statistics)
    spec = find_spec(op)
    assert spec is not None
    call = Call(op, (TensorType((4, 3), torch.bfloat16), *(kind,) * 4, True, 0.1, 1e-5))
    assert [type.dtype for type in output_types(spec, call)[3:]] == [tensor.dtype for tensor in made[3:]]


class Filled(nn.Module):
    """Writes one number in full precision where a mask holds, which torch takes for half precision."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[x[:, 0] > 0] = torch.tensor(2.0)
        return y


def test_a_number_of_another_dtype_is_written_under_a_mask() -> None:
    model, x = Filled(), torch.linspace(-1, 1, 12, dtype=torch.float16).view(4, 3).requires_grad_()
    assert torch.equal(to_module(capture(model, x), model)(x), model(x))
