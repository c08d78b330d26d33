"""The nesting of a model's inputs and outputs: tuples, lists, dicts and registered classes around tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MAX_DEPTH = 32
_PLAIN = ("tuple", "list", "dict")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree: `kind` is `leaf`, `tuple`, `list`, `dict` or the registered name of a class; `keys` name the children."""

    kind: str
    keys: tuple[str | int, ...] = ()
    children: tuple[Structure, ...] = ()

    @property
    def num_leaves(self) -> int:
        return 1 if self.kind == "leaf" else sum(child.num_leaves for child in self.children)

    def paths(self, prefix: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
        """The way from the root to every leaf, in order."""
        if self.kind == "leaf":
            yield prefix
        keys: tuple[str | int, ...] = self.keys or tuple(range(len(self.children)))
        for key, child in zip(keys, self.children, strict=True):
            yield from child.paths((*prefix, key))


LEAF = Structure("leaf")


def structure_to_json(structure: Structure) -> Any:
    """A structure as nested JSON: `null` is a leaf.

    >>> structure_to_json(Structure("dict", ("loss",), (LEAF,)))
    {'kind': 'dict', 'keys': ['loss'], 'children': [None]}
    """
    if structure.kind == "leaf":
        return None
    children = [structure_to_json(child) for child in structure.children]
    return {"kind": structure.kind, "keys": list(structure.keys), "children": children}


def structure_from_json(data: Any, depth: int = 0) -> Structure:
    """Read what `structure_to_json` wrote."""
    if data is None:
        return LEAF
    match data:
        case {"kind": str(kind), "keys": list(keys), "children": list(children), **rest} if not rest:
            right_keys = all(isinstance(key, str) or (isinstance(key, int) and key in _INT64) for key in keys)
            right_keys = right_keys and len(keys) in (0, len(children))
            if depth < _MAX_DEPTH and right_keys and (kind in _PLAIN or "." in kind):
                return Structure(kind, tuple(keys), tuple(structure_from_json(child, depth + 1) for child in children))
    raise ValueError(f"{str(data)[:60]} is not a structure")
