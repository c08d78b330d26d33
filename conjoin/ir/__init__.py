"""The graph: immutable, hash-consed, with layouts, text form, JSON, fingerprint and verifier; and the plan."""

from conjoin.ir.builder import GraphBuilder, is_random
from conjoin.ir.computation import computation_digest
from conjoin.ir.custom_operators import check_registered, custom_operators, declared_in, import_operators
from conjoin.ir.expanding import can_expand, drop_unused, expand, has_parts
from conjoin.ir.files import read_json, write_file
from conjoin.ir.fixed import fixed_nodes, kept_between_steps
from conjoin.ir.graph import Graph, Result, Scalar
from conjoin.ir.graph_file import fingerprint, load_graph, save_graph
from conjoin.ir.library_stamps import LIBRARY, STAMPED, library_digest, own_proof
from conjoin.ir.limits import MAX_CONSTANT_BYTES
from conjoin.ir.literals import is_literal
from conjoin.ir.memory_order import (
    ORDERED_BY_KERNELS,
    add_strides,
    drawn_strides,
    looks_at_order,
    orders_looked_at,
    strides_in,
)
from conjoin.ir.micro_batches import Accumulation, calling_graph, cut_in_micro_batches
from conjoin.ir.nodes import Leaf, LeafKind, Node, Source, Value, in_one_line, make_leaf, make_node
from conjoin.ir.parallel_verifier import find_layout_faults, node_fault
from conjoin.ir.parallelize import Choice, choose, parallelize, sequential
from conjoin.ir.parser import parse_graph
from conjoin.ir.piece_statistics import batch_norms, norm_by_pieces, pieces_of
from conjoin.ir.placing import Placed, layout_fault, place, plain_call, rules_for
from conjoin.ir.plain_model import plain_model
from conjoin.ir.plan import (
    BUNDLE_BYTES,
    RECOMPUTE,
    REGATHER,
    Mark,
    MemoryAction,
    Plan,
    Substitution,
    check_plan,
    load_plan,
    model_mark,
    plan_fingerprint,
    plan_from_json,
    plan_to_json,
    plan_to_text,
    recompute_actions,
    recomputed_segments,
    regathered_parameters,
)
from conjoin.ir.printer import arguments_text, node_text, value_text
from conjoin.ir.regions import (
    Range,
    Region,
    cut,
    cut_along,
    holds,
    nothing,
    num_elements,
    overlap,
    region_of,
    region_shape,
)
from conjoin.ir.reshards import (
    Elementary,
    LayoutError,
    elementary,
    is_parallel,
    origin,
    reshard_chain,
    stored_leaf,
)
from conjoin.ir.rewriting import Rewriting
from conjoin.ir.rounding import EXACT, Rounding
from conjoin.ir.segments import Segment, asked_segments, operators_of, parse_segments, segment_text
from conjoin.ir.spans import (
    RegionMove,
    exchange_axes,
    made_region,
    operand_move,
    output_move,
    unlike_axes,
    wanted_region,
)
from conjoin.ir.structure import LEAF, Structure
from conjoin.ir.trees import describe_tree, flatten_tree, spec_of, unflatten_tree
from conjoin.ir.types import parse_layout, parse_type
from conjoin.ir.verifier import Fault, find_faults, verify
from conjoin.ir.widening import wide_dtype, widen, widen_plan

__all__ = [
    "BUNDLE_BYTES",
    "EXACT",
    "LEAF",
    "LIBRARY",
    "MAX_CONSTANT_BYTES",
    "ORDERED_BY_KERNELS",
    "RECOMPUTE",
    "REGATHER",
    "STAMPED",
    "Accumulation",
    "Choice",
    "Elementary",
    "Fault",
    "Graph",
    "GraphBuilder",
    "LayoutError",
    "Leaf",
    "LeafKind",
    "Mark",
    "MemoryAction",
    "Node",
    "Placed",
    "Plan",
    "Range",
    "Region",
    "RegionMove",
    "Result",
    "Rewriting",
    "Rounding",
    "Scalar",
    "Segment",
    "Source",
    "Structure",
    "Substitution",
    "Value",
    "add_strides",
    "arguments_text",
    "asked_segments",
    "batch_norms",
    "calling_graph",
    "can_expand",
    "check_plan",
    "check_registered",
    "choose",
    "computation_digest",
    "custom_operators",
    "cut",
    "cut_along",
    "cut_in_micro_batches",
    "declared_in",
    "describe_tree",
    "drawn_strides",
    "drop_unused",
    "elementary",
    "exchange_axes",
    "expand",
    "find_faults",
    "find_layout_faults",
    "fingerprint",
    "fixed_nodes",
    "flatten_tree",
    "has_parts",
    "holds",
    "import_operators",
    "in_one_line",
    "is_literal",
    "is_parallel",
    "is_random",
    "kept_between_steps",
    "layout_fault",
    "library_digest",
    "load_graph",
    "load_plan",
    "looks_at_order",
    "made_region",
    "make_leaf",
    "make_node",
    "model_mark",
    "node_fault",
    "node_text",
    "norm_by_pieces",
    "nothing",
    "num_elements",
    "operand_move",
    "operators_of",
    "orders_looked_at",
    "origin",
    "output_move",
    "overlap",
    "own_proof",
    "parallelize",
    "parse_graph",
    "parse_layout",
    "parse_segments",
    "parse_type",
    "pieces_of",
    "place",
    "plain_call",
    "plain_model",
    "plan_fingerprint",
    "plan_from_json",
    "plan_to_json",
    "plan_to_text",
    "read_json",
    "recompute_actions",
    "recomputed_segments",
    "regathered_parameters",
    "region_of",
    "region_shape",
    "reshard_chain",
    "rules_for",
    "save_graph",
    "segment_text",
    "sequential",
    "spec_of",
    "stored_leaf",
    "strides_in",
    "unflatten_tree",
    "unlike_axes",
    "value_text",
    "verify",
    "wanted_region",
    "wide_dtype",
    "widen",
    "widen_plan",
    "write_file",
]  # fmt: skip
