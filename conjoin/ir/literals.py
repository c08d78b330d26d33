"""Attributes of operators as text and as JSON: numbers, words, strings, dtypes, memory formats, and lists of them."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import torch

from conjoin.ops import dtype_name, parse_dtype

_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve_format": torch.preserve_format,
}
_FORMAT_NAMES = {value: name for name, value in _MEMORY_FORMATS.items()}
_WORDS: dict[str, Any] = {
    "none": None, "true": True, "false": False, "inf": math.inf, "nan": math.nan, "-inf": -math.inf,
}  # fmt: skip
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?")
_PART = rf"({_FLOAT.pattern.removeprefix('-?')}|inf|nan)"
_COMPLEX = re.compile(rf"-?({_PART}[-+])?{_PART}j")
_INT64 = 2**63


def literal_text(value: Any) -> str:
    """A literal as it stands in the text form.

    >>> literal_text((1, 2.0, None, torch.float32, "same"))
    '[1, 2.0, none, f32, "same"]'
    """
    match value:
        case None | bool():
            return str(value).lower()
        case str():
            return json.dumps(value)
        case int() | float():
            return repr(value)
        case complex():
            return repr(value).strip("()")
        case torch.dtype():
            return dtype_name(value)
        case torch.memory_format():
            return _FORMAT_NAMES[value]
        case tuple():
            return f"[{', '.join(literal_text(item) for item in value)}]"
    raise TypeError(f"{value!r} cannot be an attribute")


def is_literal(value: Any) -> bool:
    """Whether `literal_text` can write it."""
    if isinstance(value, tuple):
        return all(is_literal(item) for item in value)
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.memory_format)


def parse_word(word: str) -> Any:
    """Read one unquoted word: a number, a dtype, a memory format, or a constant.

    >>> parse_word("-3"), parse_word("1e-05"), parse_word("bf16"), parse_word("true")
    (-3, 1e-05, torch.bfloat16, True)
    """
    if word in _WORDS:
        return _WORDS[word]
    if word in _MEMORY_FORMATS:
        return _MEMORY_FORMATS[word]
    digits = word.removeprefix("-")
    if digits.isascii() and digits.isdigit():
        number = int(word) if len(digits) <= 19 else _INT64
        if not -_INT64 <= number < _INT64:
            raise ValueError(f"{word[:24]} does not fit 64 bits")
        return number
    if _FLOAT.fullmatch(word):
        return float(word)
    if _COMPLEX.fullmatch(word):
        return complex(word)
    return parse_dtype(word)


def literal_to_json(value: Any) -> Any:
    """A literal as JSON; what JSON has no word for goes into an object naming its kind."""
    match value:
        case torch.dtype() | torch.memory_format() | complex():
            return {"word": literal_text(value)}
        case float() if not math.isfinite(value):
            return {"word": repr(value)}
        case tuple():
            return [literal_to_json(item) for item in value]
        case _:
            return value


def literal_from_json(value: Any) -> Any:
    """Read what `literal_to_json` wrote."""
    match value:
        case {"word": str(word), **rest} if not rest:
            return parse_word(word)
        case list():
            return tuple(literal_from_json(item) for item in value)
        case bool() | None | str() | float():
            return value
        case int() if -_INT64 <= value < _INT64:
            return value
    raise ValueError(f"{str(value)[:60]} is not a literal")
