"""Products in chunks: what a device computes for one, and in which order it is computed and sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conjoin.comm import ROWS, Chunking
from conjoin.ops import Call, TensorType, map_tensors
from conjoin.sim.engine import Fragment, Instruction
from conjoin.sim.instructions import waits_for


def chunk_call(call: Call, chunking: Chunking) -> Call:
    """The product of one chunk, the largest, of a product as a device makes it."""
    numbers = iter(range(len(call.args)))

    def of_chunk(type: TensorType) -> TensorType:
        if next(numbers) != ROWS[call.op]:
            return type
        size = -(-type.shape[chunking.dim] // chunking.count)
        return replace(type, shape=(*type.shape[: chunking.dim], size, *type.shape[chunking.dim + 1 :]))

    return Call(call.op, map_tensors(call.op, call.args, of_chunk))


def beside_each_other(
    coming: Sequence[Instruction],
    computed: Sequence[Instruction],
    going: Sequence[Instruction],
) -> Fragment:
    """Chunks that are computed, each when it has come, while the next one comes and the one before goes."""
    found: list[Instruction] = [*coming[:1], *waits_for(coming[:1])]
    for i, product in enumerate(computed):
        found += [*coming[i + 1 : i + 2], product, *going[i : i + 1], *waits_for(coming[i + 1 : i + 2])]
    return tuple(found)
