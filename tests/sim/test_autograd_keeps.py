"""What operators keep on a GPU, against what was measured on an H200 (torch 2.11, cuDNN 9.19, 2026-11-15)."""

from __future__ import annotations

from operator import le
from random import Random

import pytest
import torch
from torch import Tensor

from conjoin.cost import fuses_attention, read_key
from conjoin.frontends import capture
from conjoin.ir import calls_as_they_lie
from conjoin.ops import (
    AGGREGATE,
    EDGE_SOFTMAX,
    GRAPH_ATTENTION,
    Call,
    KernelBytes,
    OpSpec,
    TensorType,
    all_ops,
    bind_args,
    execute,
    map_tensors,
    output_types,
    random_call,
    run_whole,
)
from conjoin.sim.autograd_keeps import Kept, kept_of
from conjoin.sim.gpu_kernels import kernel_bytes
from conjoin.sim.losses import SHRINKING

HALF, SINGLE = torch.bfloat16, torch.float32


def kept(key: str, kind: str = "cuda") -> Kept:
    found = read_key(key)
    assert found is not None
    call, needs = found
    return kept_of(call, (), needs, kind)


def kernel(call: Call) -> KernelBytes:
    found = kernel_bytes(call, tuple(tensor.shape for tensor in call.tensors))
    assert found is not None
    return found


CELL = "f32[16,256] [f32[16,512], f32[16,512]] f32[2048,256] f32[2048,512] f32[2048] f32[2048]"
GRU_CELL = "bf16[64,1024] bf16[64,1024] bf16[3072,1024] bf16[3072,1024] bf16[3072] bf16[3072]"
ATTENTION = "scaled_dot_product_attention {0}[{1}] {0}[{2}] {0}[{2}] none 0.0 false none false | grads 0,1,2"
MEASURED = {
    f"lstm_cell {CELL} | grads 0,1,2,3,4,5,6": 393216,
    f"gru_cell {GRU_CELL} | grads 0,1,2,3,4,5": 1441792,
    "dropout f32[8,197,1024] 0.1 true | grads 0": 1613824,
    "dropout bf16[8,197,1024] 0.1 true | grads 0": 1613824,
    "dropout f32[8,197,1024] 0.0 true | grads 0": 0,
    ATTENTION.format("f32", "64,1,1024", "64,40,1024"): 10758144,
    ATTENTION.format("bf16", "64,1,1024", "64,40,1024"): 21243904,
    ATTENTION.format("bf16", "8,16,197,64", "8,16,197,64"): 101888,
}
SHORT, LONG, ODD, WIDE = "3072,3,49,32", "64,12,500,64", "16,12,203,64", "16,12,203,128"
UNDER_MASKS = [
    ("bf16", SHORT, "bf16[1,3,49,49]", "0,1,2,3", 2834944, 299749376),
    ("bf16", SHORT, "bf16[3072,3,49,49]", "0,1,2,3", 53395456, 298831872),
    ("bf16", LONG, "bf16[1,12,500,500]", "0,1,2,3", 7621120, 643428864),
    ("bf16", LONG, "bf16[1,12,500,500]", "0,1,2", 1537024, 247296512),
    ("bf16", WIDE, "bf16[16,12,203,203]", "0,1,2,3", 16949248, 72491520),
    ("bf16", "16,12,200,64", "b1[16,1,200,200]", "0,1,2", 1434624, 24730112),
    ("f32", SHORT, "f32[1,3,49,49]", "0,1,2", 2392576, 326356992),
    ("f32", SHORT, "f32[3072,3,49,49]", "0,1,2,3", 103514112, 442769408),
    ("f32", LONG, "f32[1,12,500,500]", "0,1,2", 13668864, 397209600),
    ("f32", LONG, "f32[1,12,500,500]", "0,1,2,3", 13668864, 1183641600),
    ("f32", ODD, "b1[16,1,203,203]", "0,1,2", 2874368, 43700736),
    ("f32", WIDE, "b1[16,1,203,203]", "0,1,2", 2874368, 85201408),
    ("f32", "16,12,128,16", "f32[16,1,128,128]", "0,1,2", 98304, 11114496),
]
"""Of attention under masks: dtype, heads, mask, what gets a gradient; bytes kept besides output and operands, and at
the peak of the backward pass, on an H200 (2026-11-19)."""
TURNED = " | channels last"


@pytest.mark.parametrize("key", MEASURED)
def test_as_much_is_kept_as_was_measured(key: str) -> None:
    assert kept(key).extra == pytest.approx(MEASURED[key], rel=0.01, abs=1024)


@pytest.mark.parametrize(("dtype", "heads", "mask", "needs", "extra", "peak"), UNDER_MASKS)
def test_attention_under_masks_takes_what_was_measured(
    dtype: str, heads: str, mask: str, needs: str, extra: int, peak: int
) -> None:
    """The allocator rounds up, a megabyte at most; a tenth is left for what short rows take in backward."""
    x = f"{dtype}[{heads}]"
    found = kept(f"scaled_dot_product_attention {x} {x} {x} {mask} 0.0 false none false | grads {needs}")
    assert 0 <= extra - found.extra < 1 << 20
    assert found.passing_back + sum(size for size, _ in found.gradients) == pytest.approx(peak, rel=0.1)
    as_given = (mask.startswith("bf16") and "3" not in needs) or mask.endswith("128]")
    assert (3 in found.operands) == as_given


def test_a_mask_is_taken_as_it_lies() -> None:
    """The bias of T5 has its heads last in memory, that of Swin its columns: kernels of attention take the second."""
    biases = torch.nn.Parameter(torch.randn(9, 9, 4))

    class Biased(torch.nn.Module):
        def __init__(self, in_rows: bool) -> None:
            super().__init__()
            self.table, self.in_rows = biases, in_rows

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = self.table.permute(2, 0, 1).unsqueeze(0)
            bias = bias.contiguous() if self.in_rows else bias
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, bias)

    x = torch.randn(2, 4, 9, 8)
    for in_rows in (True, False):
        graph = capture(Biased(in_rows), x)
        assert [c.turned for c in calls_as_they_lie(graph).values() if c.op == "scaled_dot_product_attention"] == [
            not in_rows
        ]


@pytest.mark.parametrize("key", [key for key in MEASURED if "cell" in key or " 0.1 true" in key])
def test_without_gradients_nothing_is_kept_and_as_much_passes_by(key: str) -> None:
    found = kept(key.partition(" | ")[0])
    assert found.extra == 0
    assert found.passing == pytest.approx(MEASURED[key], rel=0.01, abs=1024)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_batch_norm_by_moments_keeps_its_input_and_a_few_numbers_for_each_channel(kind: str) -> None:
    """Both operators keep the same input, of which there is one; only gradients of their own come beside it."""
    moments = kept("conjoin::batch_moments f32[8,4,32,32] | grads 0", kind)
    assert (moments.operands, moments.outputs, moments.extra, moments.made) == ((0,), (0,), 0, (2 * 4 * 8,))
    assert moments.gradients == ((4 * 8 * 4 * 32 * 32, -1),)
    columns = "f64[2,4] f32[4] f32[4] 1e-05"
    normalized = kept(f"conjoin::normalize_channels f32[8,4,32,32] {columns} | grads 0,1,2,3", kind)
    assert (normalized.operands, normalized.outputs, normalized.extra) == ((0,), (), 3 * 4 * 4)
    assert [size for size, _ in normalized.gradients] == [4 * 8 * 4 * 32 * 32, 2 * 4 * 8, 16, 16]
    assert max(moments.passing_back, normalized.passing_back) < 1024


def test_a_mask_takes_a_byte_on_a_gpu_alone() -> None:
    key = "dropout f32[8,197,1024] 0.1 true | grads 0"
    assert (kept(key).extra, kept(key, "cpu").extra) == (8 * 197 * 1024, 4 * 8 * 197 * 1024)


def layers(op: str, gates: int, dtype: torch.dtype, sizes: tuple[int, ...], both: bool, dropout: float = 0.0) -> Call:
    """A recurrent network: layers, hidden units, width of the input, samples, steps."""
    num_layers, hidden, width, batch, steps = sizes
    ways = 2 if both else 1
    params = []
    for layer in range(num_layers):
        read = width if layer == 0 else ways * hidden
        shapes = ((gates * hidden, read), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
        params += [TensorType(shape, dtype) for shape in shapes * ways]
    state = TensorType((num_layers * ways, batch, hidden), dtype)
    states = (state, state) if op == "lstm.input" else state
    x = TensorType((steps, batch, width), dtype)
    return Call(op, (x, states, tuple(params), True, num_layers, dropout, True, both, False))


SMALL, MIDDLE, LARGE = (2, 256, 256, 16, 10), (2, 1024, 512, 64, 40), (1, 2048, 2048, 64, 40)
RESERVES = [
    (layers("lstm.input", 4, SINGLE, LARGE, False), 134283264 + 104857856, 274203648),
    (layers("lstm.input", 4, HALF, LARGE, True), 134283264 + 104857856, 314573568),
    (layers("lstm.input", 4, SINGLE, MIDDLE, False), 58785792 + 115343616, 138413056),
    (layers("lstm.input", 4, SINGLE, SMALL, False, 0.5), 4210688 + 1807616, 22446592),
    (layers("gru.input", 3, SINGLE, LARGE, False), 100712448 + 125829376, 237503488),
    (layers("rnn_tanh.input", 1, HALF, LARGE, False), 16785408 + 10486016, 89392128),
]
"""Calls, bytes of their packed weights with cuDNN's reserve, bytes of its workspace."""


@pytest.mark.parametrize(("call", "reserved", "workspace"), RESERVES)
def test_recurrent_layers_reserve_what_cudnn_reserves(call: Call, reserved: int, workspace: int) -> None:
    found = kernel(call)
    assert found.kept == pytest.approx(reserved, abs=1024)
    assert found.workspace == pytest.approx(workspace, rel=0.08)


def test_a_recurrent_layer_holds_its_workspace_in_both_passes() -> None:
    call, kept_bytes, _ = RESERVES[0]
    found = kept_of(call, (), (0,), "cuda")
    assert found.extra == pytest.approx(kept_bytes, abs=1024)
    assert found.passing == found.passing_back == kernel(call).workspace


@pytest.mark.parametrize(
    ("query", "dtype", "masked", "fused"),
    [
        ((8, 16, 197, 64), SINGLE, False, True), ((8, 16, 197, 64), HALF, True, True),
        ((8, 4, 100, 30), SINGLE, False, False), ((8, 4, 100, 30), HALF, False, True),
        ((8, 4, 100, 30), HALF, True, False), ((8, 197, 64), SINGLE, False, False),
        ((8, 16, 197, 64), torch.float64, False, False),
    ],
)  # fmt: skip
def test_attention_is_fused_where_a_kernel_takes_it(
    query: tuple[int, ...], dtype: torch.dtype, masked: bool, fused: bool
) -> None:
    mask = TensorType((query[-2], query[-2]), dtype) if masked else None
    parts = (TensorType(query, dtype),) * 3
    call = Call("scaled_dot_product_attention", (*parts, mask, 0.0, False, None, False))
    assert fuses_attention(call, tuple(tensor.shape for tensor in call.tensors), (0, 1, 2), "cuda") == fused


def test_a_norm_by_roots_keeps_its_rows_and_one_number_for_each() -> None:
    """On a GPU it is one kernel; a model of 4 layers, 4,096 wide, was predicted to need a fifth more than it took."""
    x, weight = TensorType((64, 128, 1024), HALF), TensorType((1024,), HALF)
    call = Call("rms_norm", (x, (1024,), weight, None))
    found = kept_of(call, (x,), (0, 1), "cuda")
    assert found.operands == (0, 1) and found.extra == 4 * 64 * 128


def test_the_backward_of_a_loss_needs_its_logits_once_more() -> None:
    """Between the logarithm and the softmax there is a gradient as large as the logits."""
    key = "cross_entropy_loss f32[64,1000] i64[64] none 1 -100 0.0 | grads 0"
    found = kept(key)
    assert found.passing_back == 4 * 64 * 1000
    assert kept("linear f32[64,32] f32[16,32] f32[16] | grads 0,1,2").passing_back == 0


def _some(type: TensorType) -> Tensor:
    """Random numbers between zero and one; zeros where only whole ones go."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(type.shape, generator=generator).to(type.dtype)


UNFOLDING = {"conv_transpose3d.input", "im2col", "col2im"}
"""Kernels of the CPU that lay out windows in what becomes the output: not followed."""


def own_bytes(call: Call, device: str) -> list[int]:
    """The bytes behind every output of a call that lies in none of its operands."""
    parts = [_some(tensor).to(device) for tensor in call.tensors]
    read = {part.untyped_storage()._cdata for part in parts}
    storages = [x.untyped_storage() for x in run_whole(call, parts) if isinstance(x, Tensor)]
    return [storage.nbytes() for storage in storages if storage._cdata not in read]


def _told(spec: OpSpec, call: Call) -> list[int]:
    try:
        return own_bytes(call, "meta")
    except NotImplementedError:  # torch has no kernel for it there
        return [type.bytes for type in output_types(spec, call)]


def makes_more(spec: OpSpec) -> bool:
    """Whether an operator makes larger blocks on a CPU than its types take and than meta says, in any of some calls."""
    return any(_is_more(spec, random_call(spec, Random(seed))) for seed in range(8))


def _is_more(spec: OpSpec, call: Call) -> bool:
    made, types = own_bytes(call, "cpu"), [type.bytes for type in output_types(spec, call)]
    if len(made) == len(types) and all(map(le, made, types)):  # meta, which is slow, is not asked
        return False
    return any(mine > told for mine, told in zip(made, _told(spec, call), strict=True))


def test_no_other_operator_keeps_more_than_it_gives() -> None:
    assert {spec.name for spec in all_ops() if makes_more(spec)} - UNFOLDING == SHRINKING


@pytest.mark.parametrize("op", sorted(SHRINKING))
@pytest.mark.parametrize("reduction", [0, 1])
def test_a_loss_takes_as_much_as_all_its_terms(op: str, reduction: int) -> None:
    x, y = TensorType((6, 5), SINGLE), TensorType((6, 5), SINGLE)
    more = {"binary_cross_entropy": (None, reduction), "smooth_l1_loss": (reduction, 1.0)}
    call = Call(op, (x, y, *more.get(op, (reduction,))))
    assert list(kept_of(call, (), (0,), "cpu").made) == own_bytes(call, "cpu") == [4 * 6 * 5]


def test_attention_that_is_spelled_out_keeps_truth_values_of_what_it_dropped() -> None:
    """What was alive of such a call at the peak of a step of T5 on an H200 (2026-11-17), whose bias has its heads last
    in memory: scores twice in float32; query, key and value in float32; and a truth value for each score.
    """
    x, bias = "bf16[16,12,256,64]", "bf16[16,12,256,256]"
    found = kept(f"scaled_dot_product_attention {x} {x} {x} {bias} 0.1 false 1.0 false{TURNED} | grads 0,1,2,3")
    assert found.extra == 2 * 50_331_648 + 4 * 12_582_912


ROWS, SIDES, ENDS = (TensorType(shape, SINGLE) for shape in ((40, 4, 8), (40, 4), (200, 4)))
INDEX = TensorType((200,), torch.int64)
ON_EDGES = {
    "sum": (AGGREGATE, (ROWS, INDEX, INDEX, ENDS, 40, "sum"), (0,)),
    "sum with trained weights": (AGGREGATE, (ROWS, INDEX, INDEX, ENDS, 40, "sum"), (0, 3)),
    "mean": (AGGREGATE, (ROWS, INDEX, INDEX, None, 40, "mean"), (0,)),
    "max": (AGGREGATE, (ROWS, INDEX, INDEX, None, 40, "max"), (0,)),
    "attention": (GRAPH_ATTENTION, (ROWS, SIDES, SIDES, INDEX, INDEX, 40, 0.2), (0, 1, 2)),
    "softmax": (EDGE_SOFTMAX, (ENDS, INDEX, 40), (0,)),
}


@pytest.mark.parametrize("case", ON_EDGES)
def test_operators_over_edges_keep_and_give_back_what_they_do_with_values(case: str) -> None:
    """What is told without values, against what autograd keeps and gives back on a graph."""
    op, args, needs = ON_EDGES[case]
    call = Call(op, bind_args(op, args, {}))
    told = kept_of(call, (), needs, "cpu")
    parts = [torch.rand(t.shape) if t.dtype.is_floating_point else torch.randint(40, t.shape) for t in call.tensors]
    for i in needs:
        parts[i].requires_grad_()
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    feed = iter(parts)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = execute(call.op, *map_tensors(call.op, call.args, lambda _: next(feed)))
    given = torch.autograd.grad(made, [parts[i] for i in needs], torch.ones_like(made))
    assert told.gradients == tuple((gradient.untyped_storage().nbytes(), -1) for gradient in given)
    held = [call.tensors[i].bytes for i in told.operands] + [made.untyped_storage().nbytes() for _ in told.outputs]
    assert sum(held) + told.extra == pytest.approx(sum(saved.values()), rel=0.02)
