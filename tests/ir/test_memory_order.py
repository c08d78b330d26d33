"""How results lie in memory: for every operator as the call itself leaves them, whatever order its operands have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Graph, Value, calls_as_they_lie, memory_order, parse_graph, strides_in
from conjoin.ops import Call, OpSpec, TensorType, all_ops, drawing, random_call, random_tensors, run_whole

OVERLOADS = [(spec, name) for spec in all_ops() for name in spec.names]
NUM_SEEDS = 3
UNLIKE = {"max_pool3d", "max_pool3d_with_indices", "pixel_shuffle"}
"""Where many elements are not asked for data: few have no room for their windows or blocks."""


def turned(tensor: Tensor, rng: Random) -> Tensor:
    """The same values with their dims in another order in memory."""
    order = list(range(tensor.dim()))
    rng.shuffle(order)
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])


def unlike(spec: OpSpec, op: str) -> Iterator[str]:
    for seed in range(NUM_SEEDS):
        rng = Random(seed)
        call = random_call(spec, rng, op)
        tensors = [turned(tensor, rng) for tensor in random_tensors(spec, call, seed)]
        try:
            made = run_whole(call, tensors)
        except RuntimeError:  # views and some kernels do not take any order
            continue
        found = memory_order._made(call, tuple(tensor.stride() for tensor in tensors))
        for tensor, strides in zip(made, found, strict=bool(found)):
            large = [dim for dim, size in enumerate(tensor.shape) if size > 1]
            if tensor.numel() and [strides[dim] for dim in large] != [tensor.stride(dim) for dim in large]:
                yield f"seed {seed}: {tensor.stride()} is told as {strides}"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_results_lie_as_kernels_leave_them(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_order, "_FEW", -1 if many else 1 << 16)
    memory_order._made.cache_clear()
    found = {op: told for spec, op in OVERLOADS if (told := list(unlike(spec, op)))}
    memory_order._made.cache_clear()
    assert found.keys() <= (UNLIKE if many else set()), found


ATTENTION = """
graph "a" train
input:x f32[10,3,8,1]
takes [input:x] in {"kind":"list","keys":[],"children":[null]}
%0: f32[10,8,3,1] = transpose.int(input:x, dim0=1, dim1=2)
%1: f32[10,8,3,1] = scaled_dot_product_attention(%0, %0, %0)
returns [%1] in null
"""


def test_attention_keeps_the_order_of_its_query() -> None:
    """A kernel of its own computes it, which no call without data tells of; dropout behind it draws in this order."""
    graph: Graph = parse_graph(ATTENTION)
    query = torch.ones(10, 3, 8, 1).transpose(1, 2)
    plain = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert strides_in(graph)[Value(graph.nodes[-1])][:3] == plain.stride()[:3]


LEARNED = """
graph "a" train
param:mask f32[8,8] trainable
input:x f32[10,8,3,4]
takes [input:x] in {"kind":"list","keys":[],"children":[null]}
%0: f32[10,3,8,4] = transpose.int(input:x, dim0=1, dim1=2)
%1: f32[8,8] = mT(param:mask)
%2: f32[10,3,8,4] = scaled_dot_product_attention(%0, %0, %0, %1)
returns [%2] in null
"""


@pytest.mark.parametrize("learned", [True, False])
def test_a_mask_that_is_learned_has_no_kernel_that_keeps_an_order(learned: bool) -> None:
    text = LEARNED if learned else LEARNED.replace(" trainable", "").replace("param:", "buffer:")
    graph = parse_graph(text)
    query = torch.ones(10, 8, 3, 4).transpose(1, 2)
    mask = torch.zeros(8, 8, requires_grad=learned).mT
    plain = torch.nn.functional.scaled_dot_product_attention(query, query, query, mask)
    assert strides_in(graph)[Value(graph.nodes[-1])] == plain.stride()


def test_another_thread_may_draw_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads share one generator: while it is set aside here, nobody else draws from it."""
    taken: list[bool] = []

    def watched(call: Call, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        other = threading.Thread(target=lambda: taken.append(drawing.acquire(blocking=False)))
        other.start()
        other.join()
        return run_whole(call, tensors)

    monkeypatch.setattr(memory_order, "run_whole", watched)
    x = TensorType((217, 3), torch.float32)
    before = torch.get_rng_state()
    assert memory_order._made(Call("dropout", (x, 0.5, True)), ((3, 1),)) == ((3, 1),)
    assert taken == [False] and torch.equal(torch.get_rng_state(), before)


class Permuted(nn.Module):
    """Convolutions that read images in either order, as ConvNeXt's do: its norms work on channels that lie last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.last = nn.LayerNorm(8), nn.Conv2d(8, 4, 1)
        self.again = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = x + nn.functional.gelu(self.deep(x))
        made: Tensor = self.again(self.last(x).contiguous())
        return made


def test_convolutions_say_that_they_read_images_whose_channels_lie_last() -> None:
    model, x = Permuted(), torch.randn(2, 3, 16, 16)
    seen: list[bool] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(
                lambda _, args: seen.append(
                    args[0].is_contiguous(memory_format=torch.channels_last) and not args[0].is_contiguous()
                )
            )
    model(x)
    found = [call.turned for call in calls_as_they_lie(capture(Permuted(), x)).values() if "conv" in call.op]
    assert found == seen == [False, True, True, False]


class Windows(nn.Module):
    """Tokens of images, windows of them as Swin has, heads of attention, a softmax across, sums of both orders."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.score = nn.Conv2d(3, 8, 2, 2), nn.Softmax(-1)
        self.norm, self.inner = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = self.norm(patches)
        windows = tokens.reshape(2, 2, 4, 2, 4, 8).permute(0, 1, 3, 2, 4, 5).reshape(8, 16, 8)
        heads = self.inner(windows).reshape(8, 16, 2, 4).transpose(1, 2)
        seen = self.score((heads @ heads.transpose(-2, -1)).transpose(-2, -1))
        merged = (seen @ heads).transpose(1, 2).reshape(2, 64, 8)
        made: Tensor = merged + patches
        return made


def test_calls_say_that_they_read_numbers_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are copies where torch makes them by one; norms and softmaxes say what the plain model's are given."""
    model, x = Windows(), torch.randn(2, 3, 16, 16)
    seen: list[bool] = []
    for module in (model.norm, model.inner, model.score):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride(-1) != 1))
    copied: list[bool] = []
    reshape = Tensor.reshape

    def watched(x: Tensor, *shape: int) -> Tensor:
        made = reshape(x, *shape)
        copied.append(made.data_ptr() != x.data_ptr())
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "reshape", watched)
        model(x)
    found = [(node.op, call.turned) for node, call in calls_as_they_lie(capture(Windows(), x)).items()]
    shapes = [turned for op, turned in found if op == "reshape"][-len(copied) :]
    assert shapes == copied == [False, True, False, True]
    assert [turned for op, turned in found if "norm" in op or "softmax" in op] == seen == [True, False, True]
    assert [turned for op, turned in found if op.startswith("add")] == [True]
    assert not any(turned for op, turned in found if "matmul" in op or "transpose" in op or "permute" in op)
