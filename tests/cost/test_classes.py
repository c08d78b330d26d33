"""Calls that nobody measured, priced by classes of their shapes, against what they took inside a model on an H200."""

from __future__ import annotations

import torch

from conjoin.cost import CostModel
from conjoin.cost.classes import classes_of
from conjoin.cost.work import work_of
from conjoin.machine import parse_machine
from conjoin.ops import Call, TensorType, bind_args


def upsampled(dtype: torch.dtype, pixels: int, size: int) -> Call:
    images = TensorType((8, 150, pixels, pixels), dtype)
    return Call("upsample_bilinear2d.vec", bind_args("upsample_bilinear2d.vec", (images, [size, size], False), {}))


def loss(*pixels: int) -> Call:
    scores, targets = TensorType((8, 150, *pixels), torch.bfloat16), TensorType((8, *pixels), torch.int64)
    return Call("cross_entropy_loss", bind_args("cross_entropy_loss", (scores, targets), {}))


def test_of_smooth_upsampling_back_it_matters_how_many_add_up_in_one_place() -> None:
    """As measured, bilinear on 4.8 million pixels of float32: 0.05 ms from a quarter of them, 0.98 ms from a 256th."""
    device, costs = parse_machine("dgx-h200").device_type(0), CostModel()
    twice, often = (costs.operator(upsampled(torch.float32, n, 256), (0,), device).backward.value for n in (128, 16))
    assert often > 3 * twice


def test_classes_of_pixels_are_no_rows() -> None:
    """In the same step the losses' softmax took 1.57 ms forward and 0.96 back, beside the choice of the targets'."""
    device, costs = parse_machine("dgx-h200").device_type(0), CostModel()
    told = costs.operator(loss(512, 512), (0,), device)
    assert 1.57e-3 < told.forward.value < 2.5e-3 and 0.96e-3 < told.backward.value < 2e-3
    for call, is_across in ((loss(512, 512), True), (loss(), False)):
        names = classes_of(call, work_of(call, (0,)), "bfloat16", backward=False, by_flops=False)
        assert ("across" in names[-1]) == is_across


def test_a_product_with_a_matrix_is_priced_as_the_layer_that_it_is() -> None:
    """Measured on an H200, forward and back, in no profile: layers of a model that keeps its weights turned."""
    device, costs = parse_machine("dgx-h200").device_type(0), CostModel()
    for inner, outer, milliseconds in ((1024, 4096, 1.039), (4096, 1024, 1.043), (1024, 1152, 0.364)):
        x, w = TensorType((4, 512, inner), torch.float32), TensorType((inner, outer), torch.float32)
        told = costs.operator(Call("matmul", (x, w)), (0, 1), device)
        assert abs(1e3 * (told.forward.value + told.backward.value) / milliseconds - 1) < 0.15


def test_convolutions_of_films_are_like_one_another() -> None:
    """Measured on an H200, forward and back, in no profile: those of a network that takes space and time apart."""
    device, costs = parse_machine("dgx-h200").device_type(0), CostModel()
    measured = {
        ((8, 3, 16, 112, 112), (45, 3, 1, 7, 7), (1, 2, 2)): 0.953,
        ((8, 64, 16, 56, 56), (144, 64, 1, 3, 3), (1, 1, 1)): 2.449,
        ((8, 144, 16, 56, 56), (64, 144, 3, 1, 1), (1, 1, 1)): 1.953,
        ((8, 128, 8, 28, 28), (288, 128, 1, 3, 3), (1, 1, 1)): 0.774,
    }
    told = 0.0
    for x, w, stride in measured:
        pad, given = [n // 2 for n in w[2:]], [TensorType(shape, torch.float32) for shape in (x, w)]
        call = Call("conv3d", bind_args("conv3d", (*given, None, list(stride), pad), {}))
        cost = costs.operator(call, (1,) if x[1] == 3 else (0, 1), device)
        told += 1e3 * (cost.forward.value + cost.backward.value)
    assert abs(told / sum(measured.values()) - 1) < 0.3
