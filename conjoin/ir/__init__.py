"""The graph: immutable, hash-consed, with text form, JSON, fingerprint and verifier."""

from conjoin.ir.builder import GraphBuilder, is_random
from conjoin.ir.graph import Graph, Result, Scalar
from conjoin.ir.json_form import fingerprint, from_json, load_graph, save_graph, to_json
from conjoin.ir.limits import MAX_CONSTANT_BYTES
from conjoin.ir.literals import is_literal
from conjoin.ir.nodes import Leaf, LeafKind, Node, Source, Value, make_leaf, make_node
from conjoin.ir.parser import parse_graph
from conjoin.ir.structure import LEAF, Structure
from conjoin.ir.types import parse_type
from conjoin.ir.verifier import Fault, find_faults, verify

__all__ = [
    "LEAF", "MAX_CONSTANT_BYTES", "Fault", "Graph", "GraphBuilder", "Leaf", "LeafKind", "Node", "Result", "Scalar",
    "Source", "Structure", "Value", "find_faults", "fingerprint", "from_json", "is_literal", "is_random", "load_graph",
    "make_leaf", "make_node", "parse_graph", "parse_type", "save_graph", "to_json", "verify",
]  # fmt: skip
