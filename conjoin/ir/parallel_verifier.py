"""Is a parallel graph legal on a mesh? Every fault is found and told with its place and the reason."""

from __future__ import annotations

from collections.abc import Iterator

from conjoin.ir.graph import Graph
from conjoin.ir.legality import layout_fault, place
from conjoin.ir.nodes import Leaf, LeafKind, Node, Value
from conjoin.ir.reshards import LayoutError, elementary, is_parallel
from conjoin.ir.verifier import Fault, node_place
from conjoin.machine import Mesh
from conjoin.ops import At, Copies, Greatest, Partial


def find_layout_faults(graph: Graph, mesh: Mesh) -> tuple[Fault, ...]:
    """Everything that keeps a well-formed graph from running on the mesh in the layouts it states."""
    return (*_leaf_faults(graph, mesh), *_node_faults(graph, mesh), *_result_faults(graph))


def _leaf_faults(graph: Graph, mesh: Mesh) -> Iterator[Fault]:
    for leaf in graph.leaves:
        what = layout_fault(leaf.type, mesh) or _storage_fault(leaf)
        if what:
            yield Fault(str(leaf), what)


def _storage_fault(leaf: Leaf) -> str | None:
    """What a device may keep between steps: the value or a piece of it, and gradients that are whole."""
    for axis, placement in leaf.type.layout:
        if isinstance(placement, Partial | Greatest):
            return f"is {placement} on axis {axis}: nobody keeps partial results between steps"
        if isinstance(placement, At) and not leaf.type.shape:
            return f"is kept at one place of axis {axis}: a single number is kept by all (store it as I)"
        if isinstance(placement, Copies) and leaf.kind is not LeafKind.INPUT:
            return (
                f"is stored as B on axis {axis}: its gradient would be a contribution on each device; store it as I "
                f"and replicate it for use"
            )
    return None


def _node_faults(graph: Graph, mesh: Mesh) -> Iterator[Fault]:
    for i, node in enumerate(graph.nodes):
        what = node_fault(node, mesh)
        if what:
            yield Fault(node_place(graph, i), what)


def node_fault(node: Node, mesh: Mesh) -> str | None:
    """Why a node cannot lie on the mesh as its types state; None when it can."""
    for type in node.types:
        what = layout_fault(type, mesh)
        if what:
            return what
    try:
        if not is_parallel(node):
            place(node, mesh)
            return None
        after = elementary(node).apply(node.inputs[0].type.layout)
    except LayoutError as error:
        return str(error)
    expected = node.inputs[0].type.laid_out(after)
    return None if node.types == (expected,) else f"gives {expected}, the graph states {node.types[0]}"


def _result_faults(graph: Graph) -> Iterator[Fault]:
    for i, output in enumerate(graph.outputs):
        if not isinstance(output, Value):
            continue
        absent = [axis for axis, placement in output.type.layout if isinstance(placement, At)]
        unfinished = [axis for axis, placement in output.type.layout if isinstance(placement, Partial | Greatest)]
        if i == graph.loss and output.type.layout:
            yield Fault("loss", f"is {output.type}: it must be the same one value on every device (reduce it)")
        elif unfinished:
            yield Fault(f"output {i}", f"is {output.type}: partial results cannot be given to the caller (reduce them)")
        elif absent:
            yield Fault(f"output {i}", f"is {output.type}: other places have nothing to give to the caller (share it)")
