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
