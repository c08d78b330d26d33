"""What an operator is, declared once: index notation, torch reference, algebraic facts; the rest is derived."""

from conjoin.ops.aten import (
    PLACEMENT_PARAMETERS,
    Kind,
    Parameter,
    Signature,
    find_operator,
    operator_name,
    signature,
)
from conjoin.ops.catalog import all_ops, find_spec, spec_for
from conjoin.ops.check import CheckFailed, check_expansion, check_rule, execute, run_whole, types_on_meta
from conjoin.ops.composites import EMBEDDING_BAG, RAGGED_EMBEDDING_BAG
from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import Emit, LocalForm, Pieces, Span, operand_spans, output_spans, run_local
from conjoin.ops.measures import bytes_read, bytes_written, flops
from conjoin.ops.notation import NotationError
from conjoin.ops.placement import Copies, Invariant, Partial, Placement, Split, dual, parse_placement
from conjoin.ops.sampling import random_call, random_cuts, random_tensors
from conjoin.ops.sharding import ShardingRule, replicated_rules, sharding_rules, splittable
from conjoin.ops.spec import (
    Args,
    Call,
    Indexed,
    OpSpec,
    Space,
    bind_args,
    map_tensors,
    output_types,
    space_of,
    walk_tensors,
)
from conjoin.ops.tensor_type import Layout, TensorType, dtype_name, parse_dtype

__all__ = [
    "EMBEDDING_BAG", "PLACEMENT_PARAMETERS", "RAGGED_EMBEDDING_BAG", "Args", "Call", "CheckFailed", "Copies", "Dtype",
    "Emit", "Indexed", "Invariant", "Kind", "Layout", "LocalForm", "NotationError", "OpSpec", "Parameter", "Partial",
    "Pieces", "Placement", "ShardingRule", "Signature", "Space", "Span", "Split", "TensorType", "all_ops",
    "bind_args", "bytes_read", "bytes_written", "check_expansion", "check_rule", "dtype_name", "dual", "execute",
    "find_operator", "find_spec", "flops", "map_tensors", "operand_spans", "operator_name", "output_spans",
    "output_types", "parse_dtype", "parse_placement", "random_call", "random_cuts", "random_tensors",
    "replicated_rules", "run_local", "run_whole", "sharding_rules", "signature", "space_of", "spec_for", "splittable",
    "types_on_meta", "walk_tensors",
]  # fmt: skip
