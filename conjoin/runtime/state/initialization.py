"""A model on the meta device, filled one module at a time: no rank ever holds more than its pieces and one module.

Modules are visited as `model.apply` visits them. A module's own tensors are made whole on the CPU, initialised, cut to
this rank's pieces and freed; one that several modules write to stays whole from the first of them to the last. All
ranks draw the same random numbers, so their pieces belong to one model, for every plan and number of ranks: the one
that `torch.manual_seed(seed); model.apply(init)` makes of a model on the CPU.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from conjoin.ops import drawing
from conjoin.runtime.state.blocks import shape_of
from conjoin.runtime.state.init_visits import Initialise, Slot, Visit, describe, find_visits, own_reset, refuse
from conjoin.runtime.state.storage import Store
from conjoin.runtime.torch_private import MetaWatch

_one_at_a_time = threading.Lock()
"""Ranks that are threads of one process share the model in which tensors stand in for others."""


def check_init(model: nn.Module, init: Initialise | None = None) -> None:
    """Refuse a model, at once, when nobody would give values to tensors that it has on the meta device."""
    if not any(tensor.is_meta for _, tensor in _named_tensors(model)):
        return
    with _one_at_a_time, drawing, torch.random.fork_rng(devices=[]):
        find_visits(model, init, frozenset())


def initialise(
    store: Store,
    model: nn.Module,
    *,
    seed: int = 0,
    init: Initialise | None = None,
    given: frozenset[str] = frozenset(),
) -> None:
    """Fill a store with this rank's pieces of a model on the meta device.

    Every module is initialised by `init(module)`, or by the model's own `_init_weights(module)` where none is passed;
    where that writes nothing, by the module's own `reset_parameters()`. What is `given`, by one of its names, is left
    without values for weights to be read next. The caller's generator is not touched.
    """
    with _one_at_a_time, drawing, torch.random.fork_rng(devices=[]), torch.no_grad():
        store.check(model)
        left = frozenset(id(tensor) for name, tensor in _named_tensors(model) if name in given)
        visits = find_visits(model, init, left)
        torch.default_generator.manual_seed(seed)
        bench = _Bench(store, model, left)
        bench.run(visits)
        store.place(model, bench.piece)
        store.keep_constants(model)


class _Bench:
    """Where whole tensors are while their modules are initialised."""

    def __init__(self, store: Store, model: nn.Module, left_empty: frozenset[int]) -> None:
        self.strayed: list[str] = []
        self.untouched: list[str] = []
        self._store, self._model, self._left_empty = store, model, left_empty
        self._whole: dict[int, Tensor] = {}
        self._pieces: dict[int, Tensor] = {}
        self._names: dict[int, str] = {}
        for name, tensor in _named_tensors(model):
            self._names.setdefault(id(tensor), name)

    def describe(self, visit: Visit) -> str:
        return describe(self._model, visit.module, [name for _, name, tensor in visit.slots if tensor.is_meta])

    def run(self, visits: list[Visit]) -> None:
        """Initialise modules one after the other, and cut what no later one shares."""
        left = Counter(id(tensor) for visit in visits for _, _, tensor in visit.slots)
        for visit in visits:
            try:
                for held, name, tensor in visit.slots:
                    held[name] = self._stand_in(tensor)
                self._give_values(visit)
            finally:
                for held, name, tensor in visit.slots:
                    held[name] = tensor
            left.subtract(id(tensor) for _, _, tensor in visit.slots)
            for tensor in {id(tensor): tensor for _, _, tensor in visit.slots if tensor.is_meta}.values():
                if left[id(tensor)]:
                    continue
                if id(tensor) not in self._left_empty and _is_unwritten(self._whole[id(tensor)]):
                    self.untouched.append(self.describe(visit))
                self._cut(tensor)
        refuse(self.strayed, "other tensors than its own were used or made")
        refuse(self.untouched, "values are left out")

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """What a module holds during its turn: a whole tensor to be written, or a copy of one that has values."""
        if not tensor.is_meta:
            made = tensor.detach().clone()
            return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        if id(tensor) not in self._whole:
            self._whole[id(tensor)] = _unwritten(tensor)
        return self._whole[id(tensor)]

    def _give_values(self, visit: Visit) -> None:
        reset = own_reset(visit.module)
        with MetaWatch() as watch:
            is_done = visit.init is not None and _writes(visit.init, visit.module, visit.slots)
            if reset is not None and not is_done:
                reset(visit.module)
        if watch.touched:
            self.strayed.append(self.describe(visit))
        for held, name, tensor in visit.slots:
            made = held[name]
            if made is None or made.is_meta or (made.shape, made.dtype) != (tensor.shape, tensor.dtype):
                self.strayed.append(self.describe(visit))
            elif tensor.is_meta:
                self._whole[id(tensor)] = made

    def _cut(self, tensor: Tensor) -> None:
        self._pieces[id(tensor)] = self._store.cut(self._names[id(tensor)], self._whole.pop(id(tensor)))

    def piece(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the model."""
        if not tensor.is_meta:
            return self._store.cut(name, tensor)
        if id(tensor) not in self._left_empty:
            return self._pieces[id(tensor)]
        shape = shape_of(self._store.blocks(name, tuple(tensor.shape)))
        return torch.empty(shape, dtype=tensor.dtype, device=self._store.device)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _writes(init: Initialise, module: nn.Module, slots: list[Slot]) -> bool:
    """Call the user's function, and say whether it wrote anything into the module's tensors."""
    before = [None if _is_marked(tensor).all() else tensor.clone() for tensor in _held(slots)]
    init(module)
    after = _held(slots)
    return len(after) < len(before) or not all(map(_is_as_before, after, before))


def _held(slots: list[Slot]) -> list[Tensor]:
    found = (held[name] for held, name, _ in slots)
    return [tensor for tensor in found if tensor is not None]


def _is_as_before(now: Tensor, copied: Tensor | None) -> bool:
    """Whether a tensor has the values that were copied, or is still without values where there was nothing to copy."""
    if copied is None:
        return bool(_is_marked(now).all())
    return (now.shape, now.dtype) == (copied.shape, copied.dtype) and torch.equal(_words(now), _words(copied))


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integers of the size of an element, or of half of it: NaN is equal to itself in them."""


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(_WORDS[tensor.itemsize])


def _mark_of(dtype: torch.dtype) -> int:
    return 0xFF if dtype.is_floating_point or dtype.is_complex else 0x5A


def _unwritten(tensor: Tensor) -> Tensor:
    """A tensor like that on the CPU, without values: every byte of it is marked.

    As a float the mark is a NaN that no computation makes, as an integer a number that nothing begins with.
    """
    made = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if made.dtype != torch.bool:  # every byte is a value of it
        made.untyped_storage().fill_(_mark_of(made.dtype))  # type: ignore[attr-defined]
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _is_marked(tensor: Tensor) -> Tensor:
    """Which elements were not given values; of booleans that is not known."""
    if tensor.dtype == torch.bool:
        return torch.zeros(tensor.numel(), dtype=torch.bool)
    words = _words(tensor)
    mark = int.from_bytes(bytes([_mark_of(tensor.dtype)]) * words.itemsize, "little", signed=True)
    return words == mark


def _is_unwritten(tensor: Tensor) -> bool:
    """Whether an element of a tensor of floats, or a whole tensor of integers, was not given values."""
    marked = _is_marked(tensor)
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return bool(marked.any() if is_float else tensor.numel() and marked.all())
