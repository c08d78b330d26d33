"""What a forward pass may change that is no tensor of the model: its numbers, words and containers, and generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any

from torch import nn

PLAIN = bool | int | float | str | None
_MOST_ITEMS = 256
"""Of a container that are looked at; of a longer one its length, too."""


def python_state(model: nn.Module) -> Mapping[str, Any]:
    """Numbers and words that a model holds, by path, also in its containers, and where its generators stand.

    >>> model = nn.Linear(2, 2)
    >>> model.seen = [1, 2]
    >>> python_state(model)["seen"]
    (2, (1, 2))
    """
    found: dict[str, Any] = {}
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                found[f"{path}.{name}" if path else name] = _shown(value)
    return found


def generator_states() -> Mapping[str, Any]:
    """Where the generators stand that everybody shares and a graph knows nothing of."""
    numpy = sys.modules.get("numpy")
    found: dict[str, Any] = {"random (Python's generator)": random.getstate()}
    return found | ({"numpy.random (NumPy's generator)": _flat(numpy.random.get_state(legacy=False))} if numpy else {})


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """What is there after and was not the same before."""
    return tuple(name for name, value in after.items() if name not in before or before[name] != value)


def _shown(value: Any) -> Any:
    """What can be compared with the same later on; nothing of a tensor, a module or an object."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, dict):
        return len(value), tuple((_word(k), _word(v)) for k, v in islice(value.items(), _MOST_ITEMS))
    if isinstance(value, list | tuple):
        return len(value), tuple(map(_word, value[:_MOST_ITEMS]))
    if isinstance(value, set | frozenset):
        return len(value)
    if isinstance(value, random.Random):
        return value.getstate()
    bits = getattr(value, "bit_generator", None)  # of NumPy's generators
    return None if bits is None else _flat(bits.state)


def _flat(state: Any) -> Any:
    """Where one of NumPy's generators stands, its hundreds of numbers as bytes: they are compared, not read."""
    if isinstance(state, Mapping):
        return tuple((name, _flat(part)) for name, part in state.items())
    return state if isinstance(state, PLAIN) else state.tobytes()


def _word(item: Any) -> Any:
    return item if isinstance(item, PLAIN) else None
