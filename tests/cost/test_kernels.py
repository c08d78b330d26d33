"""Calls that a GPU runs as several kernels; the steps of public models that showed them were measured on an H200."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from conjoin.cost import CostModel, fuses_attention
from conjoin.cost.kernels import kernels_of
from conjoin.machine import parse_machine
from conjoin.ops import Call, TensorType, bind_args

H200, H100, A100, B200 = (
    parse_machine(name).device_type(0) for name in ("dgx-h200", "dgx-h100", "dgx-a100", "dgx-b200")
)


@cache
def shipped() -> CostModel:
    """What is known before anything is measured; it sorts its profile once."""
    return CostModel()


def attention(dtype: torch.dtype, kv_heads: int = 16, width: int = 64, batch: int = 4, **more: Any) -> Call:
    q, kv = TensorType((4, 16, 256, width), dtype), TensorType((batch, kv_heads, 256, width), dtype)
    more = {"enable_gqa": kv_heads != 16, **more}
    return Call("scaled_dot_product_attention", bind_args("scaled_dot_product_attention", (q, kv, kv), more))


BIAS = TensorType((1, 16, 256, 256), torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "needs", "fused"),
    [
        (attention(torch.float32), (0, 1, 2), True),
        (attention(torch.bfloat16, kv_heads=4), (0, 1, 2), True),
        (attention(torch.float32, kv_heads=4), (0, 1, 2), False),
        (attention(torch.bfloat16, attn_mask=BIAS), (0, 1, 2), True),
        (attention(torch.bfloat16, attn_mask=BIAS), (0, 1, 2, 3), True),
        (replace(attention(torch.bfloat16, attn_mask=BIAS), turned=True), (0, 1, 2), False),
        (attention(torch.bfloat16, kv_heads=4, attn_mask=BIAS), (0, 1, 2), True),
        (attention(torch.bfloat16, kv_heads=4, attn_mask=BIAS), (0, 1, 2, 3), False),
        (attention(torch.float32, width=66), (0, 1, 2), False),
        (attention(torch.bfloat16, width=66), (0, 1, 2), True),
        (attention(torch.float64), (0, 1, 2), False),
        (attention(torch.bfloat16, kv_heads=1, enable_gqa=False), (0, 1, 2), False),
        (attention(torch.bfloat16, batch=1), (0, 1, 2), False),
    ],
    ids=[
        "plain", "groups in half", "groups", "mask", "trained mask", "rows of the mask apart", "mask over groups",
        "trained mask over groups", "odd rows", "odd rows in half", "double",
        "one head for all", "one sample for all",
    ],
)
def test_attention_without_a_kernel_is_spelled_out(call: Call, needs: tuple[int, ...], fused: bool) -> None:
    shapes = tuple(tensor.shape for tensor in call.tensors)
    assert fuses_attention(call, shapes, needs, "cuda") == fused and fuses_attention(call, shapes, needs, "cpu")
    assert bool(kernels_of(call, needs)) != fused
    if not fused:
        ops = [part.op for part, _ in kernels_of(call, needs)]
        assert ops.count("matmul") == 2 and "softmax.int" in ops


def test_what_is_spelled_out_costs_the_host_many_calls() -> None:
    call = attention(torch.bfloat16, attn_mask=BIAS)
    fused, spelled = (shipped().operator(each, (0, 1, 2), H200) for each in (call, replace(call, turned=True)))
    assert spelled.host_forward > 5 * fused.host_forward and spelled.forward.value > 3 * fused.forward.value


def convolution(*sizes: int, groups: int = 1, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> Call:
    batch, inner, outer, pixels, kernel = sizes
    x, w = (
        TensorType((batch, inner, pixels, pixels), dtype),
        TensorType((outer, inner // groups, kernel, kernel), dtype),
    )
    args = (x, w, TensorType((outer,), dtype) if bias else None, (1, 1), (kernel // 2,) * 2, (1, 1), groups)
    return Call("conv2d", args)


def test_a_bias_is_added_in_a_pass_of_its_own() -> None:
    """SqueezeNet's 26 biases take a sixth of its step."""
    sizes = (256, 64, 256, 55, 1)
    with_bias, bare = (
        shipped().operator(convolution(*sizes, bias=bias), (0, 1, 2) if bias else (0, 1), H200)
        for bias in (True, False)
    )
    output = 2 * 256 * 256 * 55 * 55
    assert with_bias.forward.value - bare.forward.value > 2 * output / H200.memory_bandwidth
    assert with_bias.backward.value - bare.backward.value > output / H200.memory_bandwidth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 3, 64, 224, 7), (64, 64, 64, 56, 3), (64, 1024, 256, 14, 1), (1, 64, 64, 7, 3)])
def test_no_other_gpu_outruns_the_measured_one_by_more_than_its_rates(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Convolutions of another architecture are reckoned with round figures, which small and odd ones never reach.

    Half of it is left for what curves miss of single calls: without a bound it was a sixth.
    """
    call, model = convolution(*sizes, bias=False, dtype=dtype), shipped()
    seconds = {gpu.name: model.operator(call, (0, 1), gpu).forward.value for gpu in (H200, H100, A100, B200)}
    assert seconds[H100.name] >= 0.45 * seconds[H200.name] and seconds[A100.name] >= 0.45 * seconds[H200.name]
    assert seconds[B200.name] >= 0.45 * seconds[H200.name] * H200.flops_of("bfloat16") / B200.flops_of("bfloat16")


@pytest.mark.parametrize("gpu", [H200, H100, A100], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("told", ["mine", None])
def test_a_gpu_under_another_name_has_the_same_prices(gpu: Any, told: str | None) -> None:
    names = {H200.name: "NVIDIA H200", H100.name: "NVIDIA H100 80GB HBM3", A100.name: "NVIDIA A100-SXM4-80GB"}
    other, model = replace(gpu, name=told or names[gpu.name]), shipped()
    for call in (convolution(64, 64, 64, 56, 3), attention(torch.bfloat16)):
        assert model.operator(call, (0, 1, 2), other) == model.operator(call, (0, 1, 2), gpu)


@pytest.mark.parametrize(("device", "slower"), [(H200, 1.67), (H100, 1.67), (A100, 1.0)])
def test_blocks_of_keys_take_the_kernel_that_gives_logarithms(device: Any, slower: float) -> None:
    """Two calls of attention, by FlashAttention-2 where torch would take cuDNN's on Hopper."""
    q, kv = (TensorType((1, 8, rows, 128), torch.bfloat16) for rows in (4096, 16384))
    before, own = (TensorType((1, 8, rows, 128), torch.bfloat16) for rows in (12288, 4096))
    whole = Call("conjoin::attention_from_row", (q, kv, kv, 12288, None, False))
    parts = [
        Call("scaled_dot_product_attention", (q, x, x, None, 0.0, causal, None, False))
        for x, causal in ((before, False), (own, True))
    ]
    found, one, other = (shipped().operator(call, (0, 1, 2), device) for call in (whole, *parts))
    assert found.forward.value == pytest.approx(slower * (one.forward.value + other.forward.value))
    assert found.backward.value == pytest.approx(slower * (one.backward.value + other.backward.value))
