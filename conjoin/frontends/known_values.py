"""Numbers that forward reads from tensors made of constants alone: known while tracing, the same for every batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from conjoin.frontends.problems import HIDDEN
from conjoin.frontends.torch_private import (
    constant_of,
    decomposition_of,
    device_of,
    disable_current_modes,
    is_mutable,
)
from conjoin.frontends.value_checks import answer_of_check

_LARGEST = 2**20
"""Elements of a tensor whose values are kept beside it."""
_DEVICE = torch.ops.prim.device.default
_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
_EQUAL = torch.ops.aten.equal.default
"""By which torch branches on numbers that it has in a tensor, as `torch.cov` on how many samples there are."""
_BRANCHING = (torch.ops.aten.cov.default, torch.ops.aten.corrcoef.default)
_BY_SHAPE = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
_TORCHS_CHECK = (torch.__file__, "_check_tensor_all_with")
_INDEX, _SELECT = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default
_SHAPED = (_INDEX, _SELECT, torch.ops.aten.repeat_interleave.self_Tensor)
"""What takes masks, or how often something is repeated, and has a shape by them."""
_UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the values of small tensors beside the stand-ins export traces with, where only constants are in them.

    torch.nn.Transformer asks of a mask whether it is causal, losses ask of a constant whether it is negative: such a
    branch is the same for every batch, while one that depends on an input is refused. Where somebody asks whether
    values are valid, to raise if not, they are taken so. Where a shape depends on such values, as that of what a mask
    selects, it is as fixed as they are: what follows from constants alone becomes a constant, and a mask the indices
    where it holds.
    """

    supports_higher_order_operators = True

    def __init__(self, largest: int = _LARGEST, run: Callable[[Any, Any, Any], Any] | None = None) -> None:
        """A function may run the calls, in place of a second mode beneath this one, which takes as long again."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._largest, self._run = largest, run or _run
        self._known: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self.checks: dict[str, None] = {}
        """Lines of the user's at which values were asked for that would have raised."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # asked of stand-ins several times a call
            return device_of(args[0]) or func(*args)
        values = [self.value(tensor) for tensor in _tensors((*args, *kwargs.values()))]
        known = isinstance(func, OpOverload) and (all(v is not None for v in values) or _name(func) in _BY_SHAPE)
        if func in (*_NUMBERS, _EQUAL) and known:
            with disable_current_modes():
                return func(*values)
        if func in _NUMBERS and (answer := self._answer(sys._getframe(1))) is not None:
            return answer
        if known and func is not _INDEX and torch.Tag.dynamic_output_shape in func.tags:
            return tree_map_only(Tensor, self._constant, self._computed(func, args, kwargs))
        if func in _SHAPED:
            (func, args), kwargs = self._at_indices(func, args, kwargs), {}
        result = self._run(func, args, kwargs)
        if known and _is_constant(func, result, self._largest):
            self._note(func, args, kwargs, result)
        else:
            self._forget(func, values)
        return result

    def _with_indices(self, args: Any) -> Any:
        """What is read at masks that are known, read at indices."""
        made: list[Tensor | None] = []
        for index in args[1]:
            mask = self.value(index) if index is not None and index.dtype in (torch.bool, torch.uint8) else None
            with disable_current_modes():
                places = () if mask is None else mask.nonzero(as_tuple=True)
            made += [index] if mask is None else map(self._constant, places)
        return args[0], made

    def _at_indices(self, func: OpOverload, args: Any, kwargs: Any) -> tuple[OpOverload, Any]:
        """The same call with indices in place of known masks and numbers of repeats."""
        if func is _INDEX:
            return func, self._with_indices(args)
        source, told = args[0], self.value(args[1])
        if told is None:
            return func, args
        if func is _SELECT:
            with disable_current_modes():
                told = told | torch.zeros(1, dtype=told.dtype, device="cpu").expand(source.shape)
            return _INDEX, self._with_indices((source.expand(told.shape), [self._constant(told)]))
        dim = next((given for given in (*args[2:3], kwargs.get("dim")) if given is not None), None)
        source, dim = (source.reshape(-1), 0) if dim is None else (source, dim)
        with disable_current_modes():
            rows = torch.arange(source.shape[dim]).repeat_interleave(told)
        return torch.ops.aten.index_select.default, (source, dim, self._constant(rows))

    def _constant(self, value: Tensor) -> Tensor:
        made: Tensor = self._run(torch.ops.aten.lift_fresh_copy.default, (value,), {})
        self._known[made] = value
        return made

    def _computed(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """What a call gives for the values of its stand-ins, on the host."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "cpu"}
        with disable_current_modes(), torch.no_grad():
            args, kwargs = tree_map_only(Tensor, self._value_or_shape, (args, kwargs))
            return func(*args, **kwargs)

    def _answer(self, frame: FrameType | None) -> bool | None:
        """What is said to a check of values, which then does not raise."""
        if _is_asked_by_torchs_check(frame):
            return True
        found = answer_of_check(frame)
        if found is None:
            return None
        answer, line = found
        self.checks |= {line: None} if line else {}
        return answer

    def note(self, stand_in: Tensor, value: Tensor) -> None:
        """Say what the values of a stand-in are."""
        self._known[stand_in] = value

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Around calls of which no values are kept, as what attention makes of a mask in every layer."""
        largest, self._largest = self._largest, 0
        try:
            yield
        finally:
            self._largest = largest

    def value(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, where they are known: of what a program has written in it, too."""
        known = self._known.get(tensor) if self._known else None
        if known is None and (known := constant_of(tensor, self._largest)) is not None:
            self._known[tensor] = known  # a copy: what writes to a constant is done to both
        return known

    def _note(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        """Do for the values what was done for their stand-ins."""
        done = self._computed(func, args, kwargs)
        for stand_in, value in zip(tree_leaves(result), tree_leaves(done), strict=True):
            if isinstance(stand_in, Tensor):
                self._known[stand_in] = value

    def _value_or_shape(self, tensor: Tensor) -> Tensor:
        value = self.value(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype) if value is None else value

    def _forget(self, func: Any, values: list[Tensor | None]) -> None:
        """What something unknown is written into is no longer known, nor are its views."""
        if any(value is not None for value in values) and (not isinstance(func, OpOverload) or is_mutable(func)):
            lost = {value.untyped_storage().data_ptr() for value in values if value is not None}
            for stand_in, value in list(self._known.items()):
                if value.untyped_storage().data_ptr() in lost:
                    del self._known[stand_in]


def known_within(graph: fx.Graph) -> dict[OpOverload, Callable[..., Any]]:
    """What composite operators consist of that branch on numbers which they have in a tensor, for when they are traced
    again."""

    def known(consists_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with KnownValues():
            return consists_of(*args, **kwargs)

    if not any(node.target in _BRANCHING for node in graph.nodes):
        return {}
    return {op: partial(known, made) for op in _BRANCHING if (made := decomposition_of(op)) is not None}


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _is_constant(func: OpOverload, result: Any, largest: int) -> bool:
    """Whether what a call gives follows from what it is given, and is small."""
    drawn = torch.Tag.nondeterministic_seeded in func.tags or _name(func) in _UNSET
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return not drawn and bool(made) and all(tensor.numel() <= largest for tensor in made)


def _tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operator, which nests them in lists alone."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def _name(func: OpOverload) -> str:
    return str(func.overloadpacket.__name__)


def _is_asked_by_torchs_check(frame: FrameType | None) -> bool:
    while frame is not None and (file := frame.f_code.co_filename).startswith(HIDDEN):
        if (file, frame.f_code.co_name) == _TORCHS_CHECK:
            return True
        frame = frame.f_back
    return False
