"""Packed weights: a parameter that holds several weights one after the other, each of which is a leaf of its own.

Query, key and value in one tensor, or gate and up: split by rows, the whole would be cut across them, so that no device
had its own heads of all three. As leaves of their own, its *sections*, each is split by itself. To the user there is
one tensor, under its own name; a device holds its piece of the first section, then that of the next. So all sections of
a tensor have one layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from conjoin.ir.graph import Graph
from conjoin.ir.legality import layout_fault
from conjoin.ir.nodes import Leaf, LeafKind, Section, make_leaf
from conjoin.machine import Mesh
from conjoin.ops import Layout, Split, TensorType


def section_of(leaf: Leaf, dim: int, start: int, size: int) -> Leaf:
    """A part of a parameter, or of a section of one, as a leaf of its own.

    >>> import torch
    >>> packed = make_leaf(LeafKind.PARAMETER, "qkv", TensorType((12, 4), torch.float32), trainable=True)
    >>> print(section_of(packed, 0, 4, 4), section_of(section_of(packed, 0, 4, 8), 0, 4, 4))
    param:qkv[4:8] param:qkv[8:12]
    """
    of, before, whole = leaf.names[0], 0, leaf.type.shape[dim]
    if leaf.section is not None:
        assert leaf.section.dim == dim, "sections are cut along one dim"
        before, whole = leaf.section.start, leaf.section.whole
    shape = (*leaf.type.shape[:dim], size, *leaf.type.shape[dim + 1 :])
    first = before + start
    return make_leaf(
        leaf.kind, f"{of}[{':, ' * dim}{first}:{first + size}]", TensorType(shape, leaf.type.dtype, leaf.type.layout),
        trainable=leaf.trainable, aliases=leaf.aliases, section=Section(of, dim, first, whole),
    )  # fmt: skip


def whole_type(leaf: Leaf) -> TensorType:
    """The type of the tensor that a leaf is, or is a section of."""
    if leaf.section is None:
        return leaf.type
    dim, shape = leaf.section.dim, leaf.type.shape
    return TensorType((*shape[:dim], leaf.section.whole, *shape[dim + 1 :]), leaf.type.dtype, leaf.type.layout)


def by_tensor(leaves: Iterable[Leaf]) -> dict[tuple[LeafKind, str], tuple[Leaf, ...]]:
    """The leaves that each of the user's tensors is: itself, or its sections in order."""
    found: dict[tuple[LeafKind, str], list[Leaf]] = {}
    for leaf in leaves:
        found.setdefault((leaf.kind, leaf.names[0]), []).append(leaf)
    return {key: tuple(sorted(some, key=_start)) for key, some in found.items()}


def _start(leaf: Leaf) -> int:
    return 0 if leaf.section is None else leaf.section.start


def stored_alike(layouts: Mapping[Leaf, Layout], mesh: Mesh) -> Mapping[Leaf, Layout]:
    """Layouts of leaves in which all sections of a tensor have one: that of a section which is in the most pieces, of
    those of which each has some. The same object where they have already."""
    packed = [some for some in by_tensor(layouts).values() if len({layouts[leaf] for leaf in some}) > 1]
    chosen: dict[Leaf, Layout] = {}
    for some in packed:
        known = dict.fromkeys(layouts[leaf] for leaf in some)
        fitting = [way for way in known if not any(layout_fault(leaf.type.laid_out(way), mesh) for leaf in some)]
        best: Layout = max(fitting, key=lambda layout: _num_pieces(layout, mesh), default=())
        chosen.update(dict.fromkeys(some, best))
    return {**layouts, **chosen} if chosen else layouts


def _num_pieces(layout: Layout, mesh: Mesh) -> int:
    count = 1
    for axis, placement in layout:
        count *= mesh.sizes[axis] if isinstance(placement, Split) else 1
    return count


def section_faults(graph: Graph) -> Iterator[tuple[str, str]]:
    """Sections that are not those of one tensor, without gaps and stored alike, and why."""
    for (kind, name), some in by_tensor(leaf for leaf in graph.leaves if leaf.kind is not LeafKind.INPUT).items():
        if any(leaf.section is not None for leaf in some):
            fault = _fault(kind, some)
            if fault:
                yield f"{kind.value}:{name}", fault


def _fault(kind: LeafKind, some: tuple[Leaf, ...]) -> str:
    found = [leaf.section for leaf in some if leaf.section is not None]
    if kind is not LeafKind.PARAMETER or len(found) != len(some):
        return "only a parameter is stored in sections, and then nothing else is of its name"
    dim, whole = found[0].dim, found[0].whole
    if any(section.dim >= len(leaf.type.shape) for leaf, section in zip(some, found, strict=True)):
        return "a section is cut along a dim that it has not"
    if len({(x.type.dtype, whole_type(x), x.trainable, x.aliases, x.section and x.section.dim) for x in some}) > 1:
        return "its sections differ in more than where they begin and how long they are, or are stored differently"
    spans = [(section.start, section.start + leaf.type.shape[dim]) for leaf, section in zip(some, found, strict=True)]
    if spans[0][0] or spans[-1][1] != whole or any(one[1] != other[0] for one, other in pairwise(spans)):
        return f"its sections {', '.join(f'{start}:{stop}' for start, stop in spans)} do not make up 0:{whole}"
    return ""
