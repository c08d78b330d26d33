"""What a call does with constants, found out at capture: masks that hide nothing or the future, pieces of no size,
rows read by their numbers in order.

Libraries leave a mask away where it says nothing, or where it is causal, after looking at its values. A trace has no
values to look at, so the mask is written out, attention takes it, and with it slower kernels. Here a mask that is made
of constants alone is computed, once, and taken for what it is. What depends on an input is left as it is: the next
batch may be another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from conjoin.ir import Leaf, LeafKind, Node, Value, is_random
from conjoin.ops import execute, map_tensors, signature

MAX_ELEMENTS = 2**28
"""Of a constant that is computed at capture."""

_LIKE = frozenset({"ones_like", "zeros_like", "full_like"})
"""What these read of a tensor is its type."""
_ATTENTION = "scaled_dot_product_attention"
LITERAL = "lifted_tensor"
_NAMES = (LITERAL, "_tensor_constant")
"""How names begin that torch gives to tensors written in a program."""
_MIN_GROUPS = 8
"""Fewer heads of keys than a node has devices stay repeated for their queries: then they can be split as far."""


def known_value(value: Value, known: Callable[[Leaf], Tensor | None] | None = None) -> Tensor | None:
    """The value of a tensor that is made of constants alone; None of any other, and of one that is too large.

    What nobody reads any more is freed on the way. Other leaves than constants may be known, too.
    """
    order = _makers(value)
    readers = Counter(owner for maker in order for owner in _owners(maker))
    made: dict[Leaf | Node, tuple[Tensor | None, ...]] = {}
    for owner in order:
        if isinstance(owner, Leaf):
            made[owner] = ((known or _constant)(owner),)
            continue
        made[owner] = _computed(owner, [made[read.owner][read.index] for read in _read(owner)])
        for read in _owners(owner):
            readers[read] -= 1
            if not readers[read]:
                del made[read]
    return made[value.owner][value.index]


def _makers(value: Value) -> list[Leaf | Node]:
    """What a value is made of, each after what it is made of itself."""
    order: dict[Leaf | Node, None] = {}
    waiting = [value.owner]
    while waiting:
        owner = waiting[-1]
        missing = [read for read in _owners(owner) if read not in order]
        if missing:
            waiting += missing
        else:
            order.setdefault(waiting.pop())
    return list(order)


def _owners(owner: Leaf | Node) -> tuple[Leaf | Node, ...]:
    return () if isinstance(owner, Leaf) else tuple(dict.fromkeys(value.owner for value in _read(owner)))


def _read(node: Node) -> tuple[Value, ...]:
    """The tensors whose values a call reads."""
    return () if node.op in _LIKE else node.inputs


def _constant(leaf: Leaf) -> Tensor | None:
    if not _is_written(leaf) or leaf.data is None:
        return None
    if not leaf.data:
        return torch.empty(leaf.type.shape, dtype=leaf.type.dtype, device="cpu")
    return torch.frombuffer(bytearray(leaf.data), dtype=leaf.type.dtype).reshape(leaf.type.shape)


def _computed(node: Node, operands: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    nothing = (None,) * len(node.types)
    too_large = any(type.num_elements > MAX_ELEMENTS for type in node.types) and node.op != "expand"
    if any(x is None for x in operands) or too_large or is_random(node.op, node.args):
        return nothing
    likes = (torch.empty((), dtype=v.type.dtype, device="cpu").expand(v.type.shape) for v in node.inputs)
    feed = iter(operands) if operands else likes
    with torch.no_grad():
        result = execute(
            node.op, *map_tensors(node.op, node.args, lambda _: next(feed)), device="cpu" if not operands else None
        )
    return tuple(result) if isinstance(result, tuple) else (result,)


def _is_written(leaf: Leaf) -> bool:
    """Whether a leaf stands in the program itself: an attribute of the model may be another one when it is loaded."""
    return leaf.kind is LeafKind.CONSTANT and leaf.name.rpartition(".")[2].startswith(_NAMES)


def without_idle_mask(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An attention whose mask hides nothing, or just what comes later, without that mask.

    Keys and values that were repeated for every query of a group, as masked kernels need them, are then taken as they
    were before.
    """
    query, key, value, mask, _, is_causal, scale, *_ = args
    if not isinstance(mask, Value) or is_causal or not is_fixed(mask):
        return args
    seen = _seen_under_value(mask, query.type.shape[-2], key.type.shape[-2])
    if seen is None or (seen == "past" and scale is not None and not scale > 0):  # kernels scale what is hidden, too
        return args
    names = [parameter.name for parameter in signature(_ATTENTION).parameters]
    changed: dict[str, Any] = {**dict(zip(names, args, strict=True)), "attn_mask": None, "is_causal": seen == "past"}
    keys, values = _before_repeating(key), _before_repeating(value)
    is_repeated = keys is not None and values is not None and not changed["enable_gqa"]
    if is_repeated and _heads(key) == _heads(query) and _heads(keys) >= _MIN_GROUPS:
        changed.update(key=keys, value=values, enable_gqa=True)
    return tuple(changed.values())


def _heads(value: Value | None) -> int:
    return 0 if value is None or len(value.type.shape) < 3 else value.type.shape[-3]


@lru_cache(maxsize=4)
def _seen_under_value(mask: Value, num_queries: int, num_keys: int) -> str | None:
    """The same for the layers of a model that share a mask."""
    known = known_value(mask)
    return None if known is None else seen_under(known, num_queries, num_keys)


def is_fixed(value: Value) -> bool:
    """Whether nothing but constants goes into a tensor: told before anything is computed."""
    waiting, seen = [value], set[Value]()
    while waiting:
        found = waiting.pop()
        owner = found.owner
        if isinstance(owner, Leaf):
            if not _is_written(owner):
                return False
        elif owner.spec is None:
            return False
        elif found not in seen:
            waiting += _read(owner)
        seen.add(found)
    return True


def seen_under(mask: Tensor, num_queries: int, num_keys: int) -> str | None:
    """What queries see under a mask: "all" keys, or those of the "past" and their own; None where it is neither."""
    for dim, stride in enumerate(mask.stride()):
        mask = mask.narrow(dim, 0, 1) if stride == 0 else mask  # the same all along
    open_ = mask if mask.dtype == torch.bool else mask == 0
    if bool(open_.all()):
        return "all"
    if mask.dtype != torch.bool and not bool((open_ | (mask <= torch.finfo(mask.dtype).min)).all()):
        return None
    past = torch.ones(num_queries, num_keys, dtype=torch.bool, device="cpu").tril()
    same = mask.shape[-2:] == past.shape and bool((open_ == past).all())
    return "past" if same else None


def _before_repeating(value: Value) -> Value | None:
    """The heads of which each was repeated in its place: unsqueezed, expanded, and laid flat."""
    flat = value.owner
    if not (isinstance(flat, Node) and flat.op == "reshape" and isinstance(flat.args[0], Value)):
        return None
    spread = flat.args[0].owner
    if not (isinstance(spread, Node) and spread.op == "expand" and isinstance(spread.args[0], Value)):
        return None
    single = spread.args[0].owner
    if not (isinstance(single, Node) and single.op == "unsqueeze" and isinstance(single.args[0], Value)):
        return None
    heads: Value = single.args[0]
    shape, rank = heads.type.shape, len(heads.type.shape)
    at = single.args[1] % (rank + 1)
    repeats = spread.types[0].shape[at]
    repeated = (*shape[: rank - 3], shape[rank - 3] * repeats, *shape[rank - 2 :]) if rank >= 3 else ()
    fits = at == rank - 2 and spread.types[0].shape == (*shape[:at], repeats, *shape[at:])
    return heads if fits and flat.types[0].shape == repeated else None


def without_empty(args: tuple[Any, ...], trains: Callable[[Value], bool]) -> tuple[Any, ...]:
    """The pieces of a concatenation without those of no size, which get no gradient; at least one is left."""
    pieces = args[0]
    kept = tuple(piece for piece in pieces if piece.type.num_elements or trains(piece))
    alike = len({piece.type.dtype for piece in pieces}) == 1
    return kept if kept and alike else pieces


def reads_in_order(shape: tuple[int, ...], indices: tuple[Any, ...]) -> bool:
    """Whether a tensor of some shape, read at indices that are known, is read as it lies: element after element.

    Masks of libraries read those of the batch so, with the number of every sample and of every position.
    """
    if not indices or any(index is None or not is_fixed(index) for index in indices):
        return False
    last, rank = -1, max(len(index.type.shape) for index in indices)
    for size, index in zip(shape, indices, strict=False):
        counts = index.type.num_elements == size and index.type.dtype == torch.int64
        known = known_value(index) if counts else None
        if known is None or not torch.equal(known.flatten(), torch.arange(size, device="cpu")):
            return False
        dims = [dim + rank - known.dim() for dim, size in enumerate(known.shape) if size > 1]
        if dims and dims[0] <= last:
            return False
        last = dims[0] if dims else last
    return True
