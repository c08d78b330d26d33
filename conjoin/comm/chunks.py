"""A product and the collectives around it in chunks: those of one chunk go while the next one is computed.

A layer split by rows sums up what it makes, one split by columns gathers what it reads, and sums up the gradient of it
(Shoeybi et al., 2019, section 3; Korthikanti et al., 2022, section 4). Its rows, those of the batch and the sequence,
depend on nothing but themselves: in K chunks of them all but the first or the last collective goes beside a product
(Wang et al., 2023, "Overlap communication with dependent computation via decomposition"). What is gathered for one
chunk are the same rows of every piece, so that along the dim that is split a chunk takes some rows of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from conjoin.comm.pieces import splits_evenly
from conjoin.comm.route import backward_route, reshard
from conjoin.comm.steps import Route, StepKind
from conjoin.ir import Node, Placed, region_of, region_shape, unlike_axes
from conjoin.machine import Mesh
from conjoin.ops import Layout, TensorType, split_axes

ROWS = {"linear": 0, "mm": 0, "matmul": 0, "addmm": 1}
"""Products, each with the tensor among its operands whose rows are those of the result."""


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """What ranks do with every chunk of what a product reads, or makes."""

    axes: tuple[str, ...]
    """In the order of the mesh."""
    size: int
    """How many ranks take part."""
    dim: int | None
    """Along which pieces are gathered one way, and scattered sums the other; None where sums are taken of the whole:
    of what is made forward, and of the gradient of what is read backward."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a product goes in chunks."""

    count: int
    dim: int
    """The dim of rows that is cut."""
    operand: ChunkMove | None
    output: ChunkMove | None

    @property
    def pieces(self) -> int:
        """Of how many pieces each chunk has rows, where the dim that is cut is one that is gathered or scattered."""
        return next((move.size for move in (self.operand, self.output) if move and move.dim == self.dim), 1)

    @property
    def gathers(self) -> bool:
        """Whether what is read is gathered forward."""
        return self.operand is not None and self.operand.dim is not None

    @property
    def gathers_back(self) -> bool:
        """Whether the gradient of what is made is gathered backward."""
        return self.output is not None and self.output.dim is not None


def chunking_of(
    node: Node, placed: Placed, mesh: Mesh, chunks: int, own: Layout | None, target: Layout | None
) -> Chunking | None:
    """How a product goes in about so many chunks; None where it cannot, or no collective is next to it.

    What it reads comes from its `own` layout (None where it is there already), what it makes goes into a `target`.
    Where only one of the two can go in chunks, it is what is made.
    """
    if chunks < 2 or not is_product(node) or placed.at or unlike_axes(node, placed, mesh):
        return None
    read = node.inputs[ROWS[node.op]].type
    operand = None if own is None else _operand_move(read, own, mesh)
    output = None if target is None else _output_move(node.types[0], target, mesh)
    both = _chunked(read, mesh, chunks, operand, output) if operand or output else None
    return both or (_chunked(read, mesh, chunks, None, output) if operand and output else None)


def is_product(node: Node) -> bool:
    """Whether a node multiplies rows by one matrix, which may be added to."""
    if node.op not in ROWS:
        return False
    shapes = [value.type.shape for value in node.inputs]
    if node.op == "addmm":
        return len(shapes[0]) == 1 and node.call["beta"] == 1 and node.call["alpha"] == 1
    return len(shapes[0]) > 1 and len(shapes[1]) == 2


def _chunked(
    read: TensorType, mesh: Mesh, chunks: int, operand: ChunkMove | None, output: ChunkMove | None
) -> Chunking | None:
    """Cut along the first dim of rows that has enough of them, one that nothing is gathered along if there is one."""
    shape = region_shape(region_of(read.shape, read.layout, mesh, 0))[:-1]
    moved = [move for move in (operand, output) if move is not None]
    sizes = {dim: size for dim, size in enumerate(shape) if all(move.dim != dim for move in moved)}
    if len(moved) == 1 and moved[0].dim is not None and moved[0].dim < len(shape):
        sizes[moved[0].dim] = shape[moved[0].dim] // moved[0].size
    if not sizes:
        return None
    dim = next((dim for dim, size in sizes.items() if size >= chunks), max(sizes, key=lambda dim: sizes[dim]))
    return Chunking(min(chunks, sizes[dim]), dim, operand, output) if sizes[dim] > 1 else None


def _operand_move(read: TensorType, own: Layout, mesh: Mesh) -> ChunkMove | None:
    """How rows come to a product, where their gradient is summed up on its way back."""
    there = reshard(read.shape, own, read.layout, mesh)
    return _move(read.shape, there, backward_route(there, mesh), mesh)


def _output_move(made: TensorType, target: Layout, mesh: Mesh) -> ChunkMove | None:
    """How rows that were made are summed up."""
    there = reshard(made.shape, made.layout, target, mesh)
    return _move(made.shape, backward_route(there, mesh), there, mesh)


def _move(shape: tuple[int, ...], gathering: Route, summing: Route, mesh: Mesh) -> ChunkMove | None:
    """One way pieces are gathered, or nothing moves; the other way sums are taken of the same."""
    kinds = tuple(_collectives(route) for route in (gathering, summing))
    if kinds not in (((), (StepKind.ALL_REDUCE,)), ((StepKind.ALL_GATHER,), (StepKind.REDUCE_SCATTER,))):
        return None
    axes = next(mesh.in_order(step.axes) for step in summing.steps if not step.kind.is_local)
    size = prod(mesh.sizes[axis] for axis in axes)
    if kinds[0] == ():
        return ChunkMove(axes, size, None)
    dims = [d for d in range(len(shape)) if split_axes(gathering.source, d) != split_axes(gathering.target, d)]
    if len(dims) != 1 or not all(splits_evenly(shape, layout, mesh) for layout in (gathering.source, gathering.target)):
        return None
    before, after = (split_axes(layout, dims[0]) for layout in (gathering.source, gathering.target))
    return ChunkMove(axes, size, dims[0]) if before == (*after, *axes) else None  # pieces stand as ranks do


def _collectives(route: Route) -> tuple[StepKind, ...] | None:
    """What a route sends; None where it does more than that."""
    if any(step.kind.is_local and step.kind is not StepKind.RELABEL for step in route.steps):
        return None
    return tuple(step.kind for step in route.steps if not step.kind.is_local)
