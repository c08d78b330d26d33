"""What a forward pass may change that is no tensor of the model: its numbers, words and containers, and generators."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

PLAIN = bool | int | float | str | None
_MOST_ITEMS = 256
"""Of a container that are looked at; of a longer one its length, too."""
_DEPTH = 4
"""How far into containers and objects of a model is looked."""
_OWN = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""What torch keeps in every module, and of weights in recurrent ones."""
OPERATORS = (torch.library.CustomOpDef, OpOverload, OpOverloadPacket)  # type: ignore[attr-defined] # it is public
"""A model may hold them; they are the same for everybody, and what they keep of their own is no state of a model."""
_OPAQUE = (*OPERATORS, type, nn.Module, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
Which = Callable[[Tensor], Any]


def python_state(model: nn.Module, which: Which = lambda _: None) -> Mapping[str, Any]:
    """Numbers and words that a model holds, by path, also in its containers and objects, and where its generators
    stand; of a tensor that is no state what `which` says.

    >>> model = nn.Linear(2, 2)
    >>> model.seen = [1, 2]
    >>> python_state(model)["seen"]
    (2, (1, 2))
    """
    found, shown = {}, _Shown(which)
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if name not in _OWN:
                found[f"{path}.{name}" if path else name] = shown.of(value)
    return found


def generator_states() -> Mapping[str, Any]:
    """Where the generators stand that everybody shares and a graph knows nothing of."""
    numpy = sys.modules.get("numpy")
    found: dict[str, Any] = {"random (Python's generator)": random.getstate()}
    return found | ({"numpy.random (NumPy's generator)": _flat(numpy.random.get_state(legacy=False))} if numpy else {})


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """What is there after and was not the same before."""
    return tuple(name for name, value in after.items() if name not in before or before[name] != value)


class _Shown:
    """What can be compared with the same later on; of what many modules hold, as a configuration, once."""

    def __init__(self, which: Which) -> None:
        self._which = which
        self._known: dict[int, Any] = {}

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        if isinstance(value, PLAIN):
            return value if depth < _DEPTH else (type(value), value)
        if isinstance(value, Tensor):
            return self._which(value)
        if isinstance(value, _OPAQUE) or not depth:
            return None
        if id(value) not in self._known:
            self._known[id(value)] = None  # of what holds itself, too
            self._known[id(value)] = self._inside(value, depth - 1)
        return self._known[id(value)]

    def _inside(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return len(value), tuple((self.of(k, 1), self.of(v, depth)) for k, v in islice(value.items(), _MOST_ITEMS))
        if isinstance(value, list | tuple | deque):
            return len(value), tuple(self.of(item, depth) for item in islice(value, _MOST_ITEMS))
        if isinstance(value, set | frozenset):
            return len(value)
        if isinstance(value, random.Random):
            return value.getstate()
        bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)  # of NumPy's generators
        if bits is not None:
            return _flat(bits.state)
        held = getattr(value, "__dict__", None)
        return self._inside(held, depth) if isinstance(held, dict) else None


def _flat(state: Any) -> Any:
    """Where one of NumPy's generators stands, its hundreds of numbers as bytes: they are compared, read by nobody."""
    if isinstance(state, Mapping):
        return tuple((name, _flat(part)) for name, part in state.items())
    return state if isinstance(state, PLAIN) else state.tobytes()
