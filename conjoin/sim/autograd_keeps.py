"""What autograd keeps of an operator for its backward pass, asked of torch itself on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import Ring, halo_call, halo_of, ring_of, routed_call, routing_of
from conjoin.cost import ATTENTION, MASK, fuses_attention
from conjoin.ir import Node, Placed, region_of, region_shape, wanted_region
from conjoin.machine import Mesh
from conjoin.ops import (
    Call,
    KernelBytes,
    Shapes,
    TensorType,
    call_cache,
    execute,
    map_tensors,
    run_local,
    space_of,
    spec_for,
)
from conjoin.sim.gpu_kernels import attention_bytes, kernel_bytes, numbers_not_kept
from conjoin.sim.losses import storage_bytes
from conjoin.sim.skeleton import Task
from conjoin.sim.torch_private import NewStorages, storage_of


@dataclass(frozen=True, slots=True)
class Kept:
    """What a device has to remember of an operator, and which of its outputs need memory of their own."""

    operands: tuple[int, ...]
    """Operands whose memory is kept."""
    outputs: tuple[int, ...]
    """Outputs whose memory is kept."""
    extra: int
    """Bytes of what is neither: masks, statistics, padded parts."""
    views: tuple[int, ...]
    """For every output the operand whose memory it shares; -1 where it has its own."""
    made: tuple[int, ...]
    """Bytes of every output."""
    passing: int
    """Bytes of what is made on the way and gone in the end."""
    gradients: tuple[tuple[int, int], ...]
    """For every operand that needs a gradient its bytes, and the output whose gradient it shares; -1 for none."""
    passing_back: int = 0
    """Bytes that the backward pass needs for a moment, besides the gradients it gives."""


def nothing_kept(num_outputs: int, num_needs: int) -> Kept:
    """What a device remembers of an operator that runs elsewhere."""
    return Kept((), (), 0, (-1,) * num_outputs, (0,) * num_outputs, 0, ((0, -1),) * num_needs)


def kept_by(task: Task, node: Node, placed: Placed, mesh: Mesh, rank: int, kind: str) -> Kept:
    """What a rank keeps of a task, whose node this is in its layouts, on a device of a kind."""
    call, needs = task.call, task.needs
    spec = spec_for(call)
    if spec is None or not placed.splits:
        return kept_of(call, node.types, needs, kind)
    if routing_of(node, placed, mesh, rank) is not None:
        made = tuple(TensorType(region_shape(region_of(t.shape, t.layout, mesh, rank)), t.dtype) for t in node.types)
        return kept_of(routed_call(node, mesh, rank), made, needs, kind)
    if halo_of(node, placed, mesh, rank) is not None:
        made = tuple(TensorType(region_shape(region_of(t.shape, t.layout, mesh, rank)), t.dtype) for t in node.types)
        return kept_of(halo_call(node, placed, mesh, rank), made, needs, kind)
    ring = ring_of(node, placed, mesh)
    if ring is not None:
        local = tuple(region_shape(region_of(v.type.shape, v.type.layout, mesh, rank)) for v in node.inputs)
        found = _with_messages(_kept_by_attention(local, call, needs, kind), local, call, ring)
        return found if call["attn_mask"] is None else _with_scores(found, local)
    pieces = placed.pieces(space_of(spec, call).sizes, mesh, rank)
    shapes = tuple(region_shape(wanted_region(node, i, placed, mesh, rank)) for i in range(len(call.tensors)))
    return _kept(call, shapes, tuple(pieces.items()), node.types, needs, kind)


def kept_of(call: Call, types: tuple[TensorType, ...], needs: tuple[int, ...], kind: str) -> Kept:
    """What a device of a kind keeps of a whole call that makes tensors of some types."""
    return _kept(call, tuple(t.shape for t in call.tensors), (), types, needs, kind)


Ranges = tuple[tuple[str, tuple[int, int]], ...]


@call_cache(1 << 14)
def _kept(
    call: Call, shapes: Shapes, pieces: Ranges, types: tuple[TensorType, ...], needs: tuple[int, ...], kind: str
) -> Kept:
    if call.op == ATTENTION and fuses_attention(call, shapes, needs, kind):
        found = _kept_by_attention(shapes, call, needs, kind)
        starts_later = call["is_causal"] and dict(pieces).get("l", (0, 0))[0] > 0
        return _with_blocks(found, shapes, call) if starts_later else found
    kernel = kernel_bytes(call, shapes) if kind == "cuda" else None
    try:
        found = _ask(call, shapes, pieces, needs)
    except NotImplementedError:  # an operator without a form on meta: all it reads and makes is kept
        sizes = tuple(type.bytes for type in types)
        everything = tuple(range(len(shapes))), tuple(range(len(sizes)))
        found = Kept(*everything, 0, (-1,) * len(sizes), sizes, 0, _own_gradients(shapes, call, needs))
        kernel = kernel_bytes(call, shapes)
    if call.op == ATTENTION and kind == "cuda":
        found = replace(found, extra=max(found.extra - numbers_not_kept(call, shapes), 0))
    return found if kernel is None else _by_kernel(found, kernel, needs, len(shapes))


def _by_kernel(found: Kept, kernel: KernelBytes, needs: tuple[int, ...], num_operands: int) -> Kept:
    """What meta found, but for the bytes that a GPU's kernel takes on the way."""
    if not needs:
        return replace(found, passing=kernel.kept + kernel.workspace)
    read = tuple(range(num_operands)) if kernel.keeps_operands else found.operands
    return replace(found, operands=read, extra=kernel.kept, passing=kernel.workspace, passing_back=kernel.workspace)


def _kept_by_attention(shapes: Shapes, call: Call, needs: tuple[int, ...], kind: str) -> Kept:
    """Fused attention keeps what it reads and makes, and what its kernel wants: meta would run the unfused form."""
    query, value = shapes[0], shapes[2]
    dtype = call.tensors[0].dtype
    output = TensorType((*query[:-1], value[-1]), dtype).bytes
    if not needs:
        return Kept((), (), 0, (-1,), (output,), 0, ())
    kernel, read = attention_bytes(call, shapes, needs, kind), tuple(range(len(shapes)))
    operands = read if kernel.keeps_mask else tuple(i for i in read if call.operand_names[i] != MASK)
    gradients = _own_gradients(shapes, call, needs)
    return Kept(operands, (0,), kernel.kept, (-1,), (output,), 0, gradients, kernel.workspace)


def _with_blocks(found: Kept, shapes: Shapes, call: Call) -> Kept:
    """Blocks of keys are put together in the dtype of sums, and their gradients joined."""
    (*rows, _), key, value = shapes[:3]
    dtype = call.tensors[0].dtype
    mixed = TensorType((*rows, value[-1]), torch.promote_types(dtype, torch.float32)).bytes
    joined = TensorType(key, dtype).bytes + TensorType(value, dtype).bytes
    return replace(found, passing=found.passing + 2 * mixed, passing_back=found.passing_back + mixed + joined)


def _with_messages(found: Kept, shapes: Shapes, call: Call, ring: Ring) -> Kept:
    """Of a ring: what goes, what comes and what came before; and what is put together, in the dtype of sums.

    Where halves are swapped, what each device computes with are copies, and so is the gradient that comes.
    """
    dtype = call.tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32).itemsize // dtype.itemsize
    query, key, value = (TensorType(shape, dtype).bytes for shape in shapes[:3])
    out, pair = TensorType((*shapes[0][:-1], shapes[2][-1]), dtype).bytes, key + value
    widened, rounds = out * wide if wide > 1 else 0, 2 if ring.size == 2 else 3
    there = rounds * pair + 2 * out * wide + out + (query + pair if ring.swaps else 0)
    sent = pair + pair * wide
    back = rounds * sent + query * wide + pair * wide + query + pair + widened + (out if ring.swaps else 0)
    return replace(found, passing=found.passing + there, passing_back=back)


def _with_scores(found: Kept, shapes: Shapes) -> Kept:
    """Under a mask a ring writes out the scores of a step, and in the backward pass their gradients too."""
    query, key = shapes[:2]
    scores = TensorType((*query[:-1], key[-2]), torch.float32).bytes
    return replace(found, passing=found.passing + scores, passing_back=found.passing_back + 2 * scores)


def _own_gradients(shapes: Shapes, call: Call, needs: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Every gradient in memory of its own."""
    return tuple((TensorType(shapes[i], call.tensors[i].dtype).bytes, -1) for i in needs)


def _ask(call: Call, shapes: Shapes, pieces: Ranges, needs: tuple[int, ...]) -> Kept:
    parts = []
    for i, (shape, type) in enumerate(zip(shapes, call.tensors, strict=True)):
        part = torch.empty(shape, dtype=type.dtype, device="meta")
        parts.append(part.requires_grad_() if i in needs and type.dtype.is_floating_point else part)
    saved: list[Tensor] = []
    made: list[tuple[Tensor, int]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def emit(op: str, *args: Any) -> Any:
        result = execute(op, *args)
        tensors = (x for x in (result if isinstance(result, tuple | list) else (result,)) if isinstance(x, Tensor))
        made.extend((x, storage_bytes(op, args, x)) for x in tensors)
        return result

    spec = spec_for(call)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
        if spec is not None and pieces:
            outputs = run_local(spec, call, dict(pieces), parts, emit)
        else:
            feed = iter(parts)
            whole = emit(call.op, *map_tensors(call.op, call.args, lambda _: next(feed)))
            outputs = tuple(whole) if isinstance(whole, tuple) else (whole,)
    gradients, passing_back = _gradients(outputs, [parts[i] for i in needs]) if needs else ((), 0)
    found = _sorted_out(parts, outputs, saved if needs else [], made, gradients)
    return replace(found, passing_back=passing_back)


def _gradients(outputs: Sequence[Any], needing: list[Tensor]) -> tuple[tuple[tuple[int, int], ...], int]:
    """The gradients of operands: how large, and whether one is the gradient of an output under another name.

    Beside them the bytes that were there for a moment while they were computed.
    """
    own = tuple((x.numel() * x.itemsize, -1) for x in needing)
    numbers = [i for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.requires_grad]
    given = [torch.empty_like(outputs[i]) for i in numbers]
    try:
        with NewStorages(*given) as storages:
            found = torch.autograd.grad([outputs[i] for i in numbers], needing, given, allow_unused=True)
    except (NotImplementedError, RuntimeError):  # no such form on meta
        return own, 0
    shared = {storage_of(x): i for i, x in zip(numbers, given, strict=True)}
    given_back = tuple((0, -1) if x is None else (_bytes(x), shared.get(storage_of(x), -1)) for x in found)
    new = {storage_of(x): _bytes(x) for x in found if x is not None and storage_of(x) not in shared}
    return given_back, max(storages.peak - sum(new.values()), 0)


def _sorted_out(
    parts: list[Tensor],
    outputs: Sequence[Any],
    saved: list[Tensor],
    made: list[tuple[Tensor, int]],
    gradients: tuple[tuple[int, int], ...],
) -> Kept:
    tensors = [x if isinstance(x, Tensor) else torch.empty(0, device="meta") for x in outputs]
    operands = {storage_of(part): i for i, part in enumerate(parts)}
    own = {storage_of(x): i for i, x in enumerate(tensors) if storage_of(x) not in operands}
    kept = {storage_of(x): x for x in saved}
    sizes = {storage_of(x): num_bytes for x, num_bytes in reversed(made)}  # who makes it says how large it is
    passing = sizes.keys() - {*operands, *own, *kept}
    return Kept(
        tuple(sorted(operands[key] for key in kept if key in operands)),
        tuple(sorted(own[key] for key in kept if key in own)),
        sum(_bytes(x) for key, x in kept.items() if key not in operands and key not in own),
        tuple(operands.get(storage_of(x), -1) for x in tensors),
        tuple(sizes.get(storage_of(x), _bytes(x)) for x in tensors),
        sum(sizes[key] for key in passing),
        gradients,
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
