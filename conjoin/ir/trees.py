"""Between nested containers and their description as plain data; the one place here that touches torch's pytrees.

A sparse matrix is a container too, of the tensors that it is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from conjoin.errors import CaptureError
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
    named = _fields(spec) if _is_dataclass(spec.type) else named
    keys = named if isinstance(named, list) and len(named) == len(children) else ()
    if not all(isinstance(key, str | int) for key in keys):
        raise TypeError(f"keys of a {_type_name(spec)} must be strings or integers")
    return Structure(_type_name(spec), tuple(keys), children)


def _is_dataclass(kind: Any) -> bool:
    """Whether torch's `register_dataclass` says how a class is taken apart."""
    known = pytree.SUPPORTED_NODES.get(kind)
    return known is not None and is_dataclass(kind) and known.flatten_fn.__module__ == pytree.__name__


def _fields(spec: pytree.TreeSpec) -> list[str]:
    """The fields of a dataclass that hold something; the others are None."""
    named, absent = spec.context
    lost = set(absent) - set(_absent(spec.type, named))
    if lost:
        raise CaptureError(
            f"{_type_name(spec)} was given with {', '.join(sorted(lost))} set to None. A graph names the fields that "
            f"hold something, and puts their defaults into the others, here another than None. Make None the default."
        )
    return list(named)


def _absent(kind: Any, named: Sequence[Any]) -> list[str]:
    """The fields of a dataclass that are None where only these are given."""
    return [
        field.name
        for field in fields(kind)
        if field.init and field.name not in named and field.default in (MISSING, None)
        and field.default_factory is MISSING
    ]  # fmt: skip


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor) and bool(a == b))


def _check_dropped(tree: Any) -> None:
    """Fields that a registered dataclass is taken apart without come back as their defaults, whatever they were."""
    for part in pytree.tree_leaves(tree, is_leaf=lambda part: _is_dataclass(type(part))):
        if not _is_dataclass(type(part)):
            continue
        children, (named, absent) = pytree.SUPPORTED_NODES[type(part)].flatten_fn(part)
        _check_dropped(children)
        for field in fields(part):
            kept = getattr(part, field.name)
            if field.init and field.name not in (*named, *absent) and not _is_same(kept, field.default):
                raise CaptureError(
                    f"A {type(part).__name__} was given with {field.name}={kept!r:.60}, which is left out where torch "
                    f"takes it apart (drop_field_names). A graph would put the default {field.default!r:.60} there. "
                    f"Register the class with this field, or give it that default."
                )


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return list(spec.children()) if hasattr(spec, "children") else list(spec.children_specs)


def describe_tree(tree: Any) -> tuple[list[Any], Structure]:
    """Flatten nested containers: the leaves, and the nesting as plain data."""
    _check_dropped(tree)
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
    if _is_dataclass(found):
        return pytree.TreeSpec(found, [list(structure.keys), _absent(found, structure.keys)], children)
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
