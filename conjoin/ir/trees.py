"""Between nested containers and their description as plain data; the one place here that touches torch's pytrees.

A sparse matrix is a container too, of the tensors that it is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from conjoin.ir.sparse_matrices import SparseMatrix, as_matrix, as_parts, is_matrix
from conjoin.ir.structure import LEAF, Structure

_BUILTIN = {tuple: "tuple", list: "list", dict: "dict"}
_NAMED_TUPLE: Any = pytree.namedtuple  # type: ignore[attr-defined]


def _type_name(spec: pytree.TreeSpec) -> str:
    if spec.type in _BUILTIN:
        return _BUILTIN[spec.type]
    if spec.type is _NAMED_TUPLE:
        return f"{spec.context.__module__}.{spec.context.__qualname__}"
    return f"{spec.type.__module__}.{spec.type.__qualname__}"


def _describe(spec: pytree.TreeSpec) -> Structure:
    if spec.is_leaf():
        return LEAF
    children = tuple(_describe(child) for child in _children(spec))
    named: Any = list(SparseMatrix._fields) if spec.context is SparseMatrix else spec.context
    keys = named if isinstance(named, list) and len(named) == len(children) else ()
    if not all(isinstance(key, str | int) for key in keys):
        raise TypeError(f"keys of a {_type_name(spec)} must be strings or integers")
    return Structure(_type_name(spec), tuple(keys), children)


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return list(spec.children()) if hasattr(spec, "children") else list(spec.children_specs)


def describe_tree(tree: Any) -> tuple[list[Any], Structure]:
    """Flatten nested containers: the leaves, and the nesting as plain data."""
    leaves, spec = flatten_tree(tree)
    return leaves, _describe(spec)


def _find_class(kind: str) -> type:
    """A class already imported: registered with torch's pytrees, or a named tuple. Nothing is ever imported for it."""
    for registered in pytree.SUPPORTED_NODES:
        if f"{registered.__module__}.{registered.__qualname__}" == kind:
            return registered
    parts = kind.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        for name in parts[cut:]:
            found = getattr(found, name, None)
        if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
            return found
    raise LookupError(kind)


def spec_of(structure: Structure) -> pytree.TreeSpec:
    """torch's description of a nesting; LookupError for a class this program has not imported."""
    if structure.kind == "leaf":
        return pytree.tree_structure(0)
    children = [spec_of(child) for child in structure.children]
    match structure.kind:
        case "tuple" | "list":
            return pytree.TreeSpec({"tuple": tuple, "list": list}[structure.kind], None, children)
        case "dict":
            return pytree.TreeSpec(dict, list(structure.keys), children)
    found = _find_class(structure.kind)
    if issubclass(found, tuple) and found not in pytree.SUPPORTED_NODES:
        return pytree.TreeSpec(_NAMED_TUPLE, found, children)
    return pytree.TreeSpec(found, list(structure.keys) or None, children)


def flatten_tree(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of nested containers and torch's own description of the nesting."""
    leaves, spec = pytree.tree_flatten(tree)
    if any(map(is_matrix, leaves)):
        return pytree.tree_flatten(pytree.tree_map(as_parts, tree))
    return leaves, spec


def unflatten_tree(
    leaves: Sequence[Any], spec: pytree.TreeSpec, matrix: Callable[[SparseMatrix], Any] = as_matrix
) -> Any:
    """Put leaves back into containers, and what sparse matrices are made of into what `matrix` makes of it."""
    made = pytree.tree_unflatten(leaves, spec)
    if not _has_matrices(spec):
        return made
    return pytree.tree_map(lambda part: matrix(part) if _is_parts(part) else part, made, is_leaf=_is_parts)


def _is_parts(part: Any) -> bool:
    return isinstance(part, SparseMatrix)


def _has_matrices(spec: pytree.TreeSpec) -> bool:
    return spec.context is SparseMatrix or any(map(_has_matrices, _children(spec)))
