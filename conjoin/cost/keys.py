"""The text that names a call in a store of measurements: the same in every process, readable, bounded in length.

    linear f32[64,1024] f32[4096,1024] f32[4096] | grads 0,1,2

The operator, its arguments in the order of the signature as graphs write them, that it reads images whose channels
lie last in memory where that is so, then the operands that get a gradient.
Two calls with one key run the same kernels on the same sizes.
"""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from math import isfinite
from typing import Any

import torch

from conjoin.ops import Call, Kind, TensorType, dtype_name, output_types, parse_dtype, signature, spec_for

MAX_KEY_LENGTH = 1_000
"""A longer key is cut to the operator and a digest: it names its call as well, but can no longer be read back."""
MAX_ELEMENTS = 2**63
"""Elements that no tensor of torch has."""
_GRADS, _CHANNELS_LAST = " | grads ", " | channels last"
_FORMATS = {
    "contiguous_format": torch.contiguous_format, "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d, "preserve_format": torch.preserve_format,
}  # fmt: skip
_FORMAT_NAMES = {value: name for name, value in _FORMATS.items()}
_WORDS: dict[str, Any] = {"none": None, "true": True, "false": False, **_FORMATS}


def write_key(call: Call, needs: tuple[int, ...]) -> str:
    """The key of a call whose operands at `needs` get a gradient.

    >>> x, w = TensorType((64, 1024), torch.float32), TensorType((4096, 1024), torch.float32)
    >>> write_key(Call("linear", (x, w, None)), (0, 1))
    'linear f32[64,1024] f32[4096,1024] | grads 0,1'
    """
    args = list(call.args)
    while args and args[-1] is None:
        args.pop()
    text = " ".join([call.op, *map(_written, args)]) + (_CHANNELS_LAST if call.turned else "")
    grads = _GRADS + ",".join(map(str, needs)) if needs else ""
    if len(text) + len(grads) <= MAX_KEY_LENGTH:
        return text + grads
    return f"{call.op[:100]} #{hashlib.sha256((text + grads).encode()).hexdigest()}"


def _written(value: Any) -> str:
    match value:
        case TensorType():
            assert not value.layout, "costs are asked for local tensors, which have no layout"
            return f"{_dtype_text(value.dtype)}[{','.join(map(str, value.shape))}]"
        case None | bool():
            return str(value).lower()
        case str():
            return json.dumps(value)
        case torch.dtype():
            return _dtype_text(value)
        case torch.memory_format():
            return _FORMAT_NAMES[value]
        case tuple() | list():
            return f"[{', '.join(map(_written, value))}]"
        case _:
            return repr(value)


def _dtype_text(dtype: torch.dtype) -> str:
    try:
        return dtype_name(dtype)
    except ValueError:
        return str(dtype)


_TOKEN = re.compile(
    r'\s*(?:(?P<type>\w+)\[(?P<shape>[0-9,]*)\]|(?P<open>\[)|(?P<close>\])|,|(?P<string>"(?:[^"\\]|\\.)*")'
    r'|(?P<word>[^\s\[\],"]+))'
)


def read_key(key: str) -> tuple[Call, tuple[int, ...]] | None:
    """The call and the gradients that a key names; None where it cannot be told: a digest, or damaged text.

    >>> read_key("linear f32[64,1024] f32[4096,1024] | grads 0,1")[0].tensors[1].shape
    (4096, 1024)
    """
    text, _, grads = key.partition(_GRADS)
    images, text = text.endswith(_CHANNELS_LAST), text.removesuffix(_CHANNELS_LAST)
    op, _, rest = text.partition(" ")
    try:
        args = _read_args(rest)
        known = len(signature(op).parameters)
        if len(args) > known:
            return None
        needs = tuple(map(int, grads.split(","))) if grads else ()
        call = Call(op, (*args, *[None] * (known - len(args))), images)
    except (ValueError, LookupError):
        return None
    return (call, needs) if _is_sound(call, needs) else None


def _is_sound(call: Call, needs: tuple[int, ...]) -> bool:
    """Whether operands and outputs are tensors that can be, attributes are none, and gradients are of operands."""
    for parameter, value in zip(call.signature.parameters, call.args, strict=True):
        match parameter.kind:
            case Kind.TENSOR:
                sound = value is None or isinstance(value, TensorType | int | float)
            case Kind.TENSORS:
                items = value if isinstance(value, tuple) else (value,)
                sound = all(item is None or isinstance(item, TensorType) for item in items)
                sound = sound and (value is None or isinstance(value, tuple))
            case Kind.ATTRIBUTE:
                sound = _is_literal(value)
        if not sound:
            return False
    tensors, spec = call.tensors, spec_for(call)
    known = set(needs) <= set(range(len(tensors))) and all(a < b for a, b in pairwise(needs))
    return known and all(map(_fits, (*tensors, *(output_types(spec, call) if spec is not None else ()))))


def _is_literal(value: Any) -> bool:
    """Whether an attribute is plain data, and its numbers are such as fit tensors."""
    if isinstance(value, tuple):
        return all(_is_literal(item) and not (isinstance(item, float) and not isfinite(item)) for item in value)
    return not isinstance(value, TensorType) and not (isinstance(value, int) and abs(value) >= MAX_ELEMENTS)


def _fits(tensor: TensorType) -> bool:
    """Whether there can be a tensor of this shape."""
    return all(type(size) is int and size >= 0 for size in tensor.shape) and tensor.num_elements < MAX_ELEMENTS


def _read_args(text: str) -> tuple[Any, ...]:
    stack: list[list[Any]] = [[]]
    place = 0
    while place < len(text.rstrip()):
        token = _TOKEN.match(text, place)
        if token is None:
            raise ValueError(f"no argument at {place}")
        place = token.end()
        if token["open"]:
            stack.append([])
        elif token["close"]:
            inner = stack.pop()
            stack[-1].append(tuple(inner))
        elif token["type"] or token["string"] or token["word"]:
            stack[-1].append(_read_one(token))
    if len(stack) != 1:
        raise ValueError("a list has no end")
    return tuple(stack[0])


def _read_one(token: re.Match[str]) -> Any:
    if token["type"]:
        shape = tuple(int(size) for size in token["shape"].split(",") if size)
        return TensorType(shape, parse_dtype(token["type"]))
    if token["string"]:
        return json.loads(token["string"])
    word = token["word"]
    if word in _WORDS:
        return _WORDS[word]
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            pass
    return parse_dtype(word)
