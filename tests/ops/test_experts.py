"""Layers of experts against a loop over rows, and against the same with experts in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conjoin.ops import EXPERT_LINEAR, EXPERT_NETWORK, Call, TensorType, bytes_read, find_operator, find_spec, flops
from conjoin.ops.experts import ACTIVATIONS

T, C, E, K, N = 5, 2, 4, 3, 6


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def row_by_row(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    each = len(expert) // len(x)
    return torch.stack([x[i // each] @ weight[int(e)] for i, e in enumerate(expert)])


def same(got: Tensor, want: Tensor, *reads: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(want)
    for ours, theirs in zip(torch.autograd.grad(got, reads, seed), torch.autograd.grad(want, reads, seed), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("expert", [[0, 3, 1, 1, 2, 0, 3, 3, 1, 0], [2] * 10], ids=["all", "one"])
@pytest.mark.parametrize("each", [1, C])
def test_every_row_meets_the_matrix_of_its_expert(expert: list[int], each: int) -> None:
    torch.manual_seed(0)
    x, weight, ids = drawn(T * C // each, K), drawn(E, K, N), torch.tensor(expert)
    same(find_operator(EXPERT_LINEAR)(x, weight, ids, E), row_by_row(x, weight, ids), x, weight)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    same(find_operator(EXPERT_LINEAR)(x, turned, ids, E), row_by_row(x, weight, ids), x, weight)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_network_is_its_layers(gated: bool, activation: str) -> None:
    torch.manual_seed(0)
    x, inward, outward, ids = drawn(T, K), drawn(E, K, 8), drawn(E, 4 if gated else 8, N), torch.randint(E, (T * C,))
    h = row_by_row(x, inward, ids)
    h = ACTIVATIONS[activation](h[:, :4]) * h[:, 4:] if gated else ACTIVATIONS[activation](h)
    got = find_operator(EXPERT_NETWORK)(x, inward, outward, ids, E, activation)
    same(got, row_by_row(h, outward, ids), x, inward, outward)


def test_rows_of_experts_elsewhere_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    product = torch.mm

    def counted(one: Tensor, other: Tensor, *, out: Tensor) -> Tensor:
        rows.append(one.shape[0])
        return product(one, other, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    ids = torch.tensor([0, 3, 1, 1, 2, 0, 3, 3, 1, 0])
    made = find_operator(EXPERT_LINEAR)(drawn(10, K), drawn(2, K, N), ids - 2, E)
    assert rows == [1, 3]
    assert (made[ids < 2] == 0).all() and (made[ids >= 2] != 0).all()


def test_rows_may_be_none_at_all() -> None:
    x, weight = drawn(T, K), drawn(2, K, N)
    made = find_operator(EXPERT_NETWORK)(x, weight, drawn(2, N, K), torch.full((T,), 3), E, "silu")
    made.sum().backward()
    assert made.shape == (T, K) and not made.any() and weight.grad is not None and not weight.grad.any()


def test_dtypes_are_those_given_under_autocast() -> None:
    x, weight = drawn(T, K).float(), drawn(E, K, N).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert find_operator(EXPERT_LINEAR)(x, weight, torch.zeros(T, dtype=torch.long), E).dtype == torch.float32


def test_without_values_there_are_shapes() -> None:
    x, weight = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((T, K), (2, K, N)))
    made = find_operator(EXPERT_LINEAR)(x, weight, torch.empty(T * C, dtype=torch.long, device="meta"), E)
    made.sum().backward()
    assert made.shape == (T * C, N) and x.grad is not None and x.grad.shape == x.shape


def test_work_is_that_of_one_expert_a_row_and_of_a_part_that_part() -> None:
    spec = find_spec(EXPERT_LINEAR)
    assert spec is not None
    x, ids = TensorType((64, 8), torch.float32), TensorType((128,), torch.int64)
    for here in (4, 1):
        call = Call(EXPERT_LINEAR, (x, TensorType((here, 8, 16), torch.float32), ids, 4))
        assert flops(spec, call) == 2 * 128 * 8 * 16 * here / 4
        assert bytes_read(spec, call) == x.bytes + here * 8 * 16 * 4 + ids.bytes
