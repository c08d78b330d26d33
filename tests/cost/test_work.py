"""Work of a call and of its backward, by family; the figures are counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conjoin.cost import FAMILIES, work_of
from conjoin.ops import (
    BATCH_MOMENTS,
    LINEAR_RELU,
    MEAN_AND_VARIANCE,
    NORMALIZE_CHANNELS,
    Call,
    TensorType,
    all_ops,
    find_operator,
    random_call,
)


def f32(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


def i64(*shape: int) -> TensorType:
    return TensorType(shape, torch.int64)


X, W, B = f32(8, 4), f32(16, 4), f32(16)
CONV = Call("conv2d", (f32(2, 3, 8, 8), f32(6, 3, 3, 3), None, (1, 1), (1, 1), (1, 1), 1))

FAMILY = {
    "contraction": [
        Call("linear", (X, W, B)),
        Call("mm", (X, f32(4, 5))),
        Call("einsum", ("ij,jk", (X, f32(4, 5)), None)),
    ],
    "convolution": [CONV],
    "attention": [
        Call("scaled_dot_product_attention", (*[f32(2, 4, 8, 16)] * 3, None, 0.0, True, None, False)),
    ],
    "elementwise": [Call("relu", (X,)), Call("add.Tensor", (X, X, 1)), Call("mul.Tensor", (X, f32(4)))],
    "reduction": [
        Call("sum", (X, None)),
        Call("_softmax", (X, 1, False)),
        Call("layer_norm", (X, (4,), None, None, 1e-5, True)),
    ],
    "lookup": [Call("embedding", (W, i64(5), -1, False, False))],
    "movement": [Call("clone", (X, None)), Call("cat", ((X, X), 0))],
    "view": [Call("t", (X,)), Call("slice.Tensor", (X, 0, 0, 4, 1))],
    "opaque": [Call("nonzero", (X,))],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILY)
def test_the_family_of_a_call(family: str) -> None:
    assert family in FAMILIES
    for call in FAMILY[family]:
        assert work_of(call, ()).family == family, call.op


def test_every_declared_operator_has_a_family_and_finite_work() -> None:
    from random import Random

    for spec in all_ops():
        call = random_call(spec, Random(0))
        work = work_of(call, tuple(range(len(call.tensors))))
        assert work.family in FAMILIES, spec.name
        assert min(*work.forward, *work.backward) >= 0, spec.name


def test_forward_and_backward_of_a_linear_layer() -> None:
    call = Call("linear", (X, W, B))
    whole = work_of(call, (0, 1, 2))
    product = 2 * 8 * 4 * 16
    gradient, x, w, b = 4 * 8 * 16, 4 * 8 * 4, 4 * 16 * 4, 4 * 16
    assert whole.forward == (product, x + w + b + gradient)
    assert work_of(call, (1,)).backward == (product, gradient + x + w)
    assert work_of(call, (0,)).backward == (product, gradient + x + w)
    assert work_of(call, (2,)).backward == (8 * 16, gradient + b)
    assert whole.backward == (2 * product + 8 * 16, 3 * gradient + 2 * (x + w) + b)
    assert work_of(call, ()).backward == (0, 0)


def test_a_fused_layer_does_what_its_parts_do_but_for_passing_on_the_product() -> None:
    fused = Call(LINEAR_RELU, (X, W, B))
    y = TensorType((8, 16), torch.float32)
    for needs in ((0, 1, 2), (1, 2), ()):
        whole, layer = work_of(fused, needs), work_of(Call("linear", (X, W, B)), needs)
        function = work_of(Call("relu", (y,)), (0,) if needs else ())
        assert (whole.family, whole.dtype, whole.forward) == (layer.family, layer.dtype, layer.forward)
        assert whole.backward == tuple(a + b for a, b in zip(layer.backward, function.backward, strict=True))


def test_gradients_that_are_passed_on_cost_nothing() -> None:
    assert work_of(Call("add.Tensor", (X, X, 1)), (0, 1)).backward == (0, 0)
    assert work_of(Call("cat", ((X, X), 0)), (0, 1)).backward == (0, 0)
    assert work_of(Call("sum", (X, None)), (0,)).backward == (0, 0)
    assert work_of(Call("t", (X,)), (0,)).backward == (0, 0)


def test_gradients_that_are_summed_put_back_or_padded() -> None:
    assert work_of(Call("add.Tensor", (X, f32(4), 1)), (1,)).backward == (32, 4 * 32 + 4 * 4)
    assert work_of(Call("embedding", (W, i64(5), -1, False, False)), (0,)).backward == (0, 4 * 5 * 4 + W.bytes)
    assert work_of(Call("slice.Tensor", (X, 0, 0, 4, 1)), (0,)).backward == (0, 4 * 16 + X.bytes)


def test_what_is_not_linear_takes_twice_the_flops_and_reads_all_again() -> None:
    work = work_of(Call("relu", (X,)), (0,))
    assert work.backward == (2 * work.forward.flops, work.forward.bytes + X.bytes)


class _Passes(TorchDispatchMode):
    """Counts the large tensors that kernels read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, found) if isinstance(x, torch.Tensor) and x.numel() > 1]
        if found.data_ptr() not in {x.data_ptr() for x in tensors[:-1]}:  # else it is a view
            self.count += len(tensors)
        return found


PASSES = [spec.name for spec in all_ops() if spec.backward_passes and "::" not in spec.name]
SEVERAL = {spec.name: spec.num_kernels for spec in all_ops() if spec.num_kernels != (1, 1)}


@pytest.mark.parametrize("name", [*PASSES, "relu", "exp", "tanh"])
def test_autograd_takes_as_many_passes_for_a_gradient_as_are_counted(name: str) -> None:
    x, exponent = torch.rand(8, 8) + 0.1, (2,) if name.startswith("pow") else ()
    made = getattr(torch, name.partition(".")[0])(x.requires_grad_(), *exponent)
    gradient = torch.ones(8, 8)
    with _Passes() as passes:
        made.backward(gradient)
    work = work_of(Call(name, (f32(8, 8), *exponent)), (0,))
    assert work.backward.bytes == passes.count * f32(8, 8).bytes


def test_batch_norm_by_moments_reads_and_writes_as_its_kernels_do() -> None:
    """Moments: x; and back x, giving its gradient. Normalizing: x, y; and back y's, x for sums, y's again, x's."""
    x, rows, column = f32(8, 4, 16, 16), TensorType((2, 4), torch.float64), f32(4)
    moments = work_of(Call(BATCH_MOMENTS, (x,)), (0,))
    assert (moments.family, moments.forward.bytes) == ("reduction", x.bytes + rows.bytes)
    assert moments.backward.bytes == 2 * x.bytes + rows.bytes
    normalized = work_of(Call(NORMALIZE_CHANNELS, (x, rows, column, column, 1e-5)), (0, 1, 2, 3))
    assert normalized.family == "elementwise"
    assert normalized.forward.bytes == 2 * x.bytes + rows.bytes + 2 * column.bytes
    assert normalized.backward.bytes == 4 * x.bytes


class _Kernels(TorchDispatchMode):
    """Counts the calls that compute anything."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") not in _COMPUTE_NOTHING:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


_COMPUTE_NOTHING = ("promote_types", "view", "unbind", "select", "detach", "empty", "ones_like", "t")


@pytest.mark.parametrize("name", SEVERAL)
def test_an_operator_of_several_kernels_is_known_as_one(name: str) -> None:
    """On a CPU some of the kernels are others, by two at most."""
    x, known = torch.rand(4, 8, 5, 5).requires_grad_(), torch.rand(2, 8, dtype=torch.float64).requires_grad_()
    column = torch.rand(8).requires_grad_()
    operands = {NORMALIZE_CHANNELS: (x, known, column, column), MEAN_AND_VARIANCE: (known,)}.get(name, (x,))
    attributes = (1e-5,) if name == NORMALIZE_CHANNELS else ()
    with _Kernels() as forward:
        made = find_operator(name)(*operands, *attributes)
    gradient = torch.ones_like(made)
    with _Kernels() as backward:
        torch.autograd.grad(made, operands, gradient)
    assert (len(forward.names), len(backward.names)) == pytest.approx(SEVERAL[name], abs=2), backward.names


def test_views_move_nothing() -> None:
    assert work_of(Call("t", (X,)), ()).forward == (0, 0)
