"""A model on the meta device, filled one module at a time: no rank ever holds more than its pieces and one module.

Modules are visited as `model.apply` visits them. A module's own tensors are made whole on the CPU, initialised, cut to
this rank's pieces and freed; one that several modules share stays whole from the first of them to the last. All ranks
draw the same random numbers, so their pieces belong to one model, for every plan and number of ranks: the one that
`torch.manual_seed(seed); model.apply(init)` makes of a model on the CPU.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import nan

import torch
from torch import Tensor, nn

from conjoin.errors import UsageError
from conjoin.ir import region_shape
from conjoin.ops import drawing
from conjoin.runtime.pieces import count, listed
from conjoin.runtime.storage import Store, is_persistent
from conjoin.runtime.torch_private import MetaWatch

Initialise = Callable[[nn.Module], object]
_one_at_a_time = threading.Lock()
"""Ranks that are threads of one process share the model in which tensors stand in for others."""


def initialise(
    store: Store, model: nn.Module, *, seed: int = 0, init: Initialise | None = None, empty: bool = False
) -> None:
    """Fill a store with this rank's pieces of a model on the meta device.

    Every module is initialised by `init(module)`; where that writes nothing, or is not given, by the module's own
    `reset_parameters()`. With `empty`, what a checkpoint holds is left as NaN or 0 for a checkpoint to be loaded next,
    and only buffers that no checkpoint holds are initialised. The caller's generator is not touched.
    """
    with _one_at_a_time, drawing, torch.random.fork_rng(devices=[]), torch.no_grad():
        store.check(model)
        torch.default_generator.manual_seed(seed)
        bench = _Bench(store, model, empty)
        bench.run([module for module in _visits(model) if bench.needs(module)], init)
        store.place(model, bench.piece)
        store.keep_constants(model)


def _visits(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order of `nn.Module.apply`: children first, one that stands in two places twice."""
    for child in module.children():
        yield from _visits(child)
    yield module


def _own_reset(module: nn.Module) -> Initialise | None:
    reset = getattr(type(module), "reset_parameters", None)
    return reset if callable(reset) else None


def _refuse(faults: Iterable[str], what: str) -> None:
    found = list(dict.fromkeys(faults))
    if found:
        raise UsageError(
            f"A model on the meta device was to be initialised module by module, and for {count(len(found), 'module')} "
            f"{what}. When the turn comes to a module only its own parameters and buffers are there, without values. "
            f"Pass init=, a function that gives the own tensors of a module their values, or fill it empty and load a "
            f"checkpoint:\n{listed(found)}"
        )


class _Bench:
    """Where whole tensors are while their modules are initialised."""

    def __init__(self, store: Store, model: nn.Module, empty: bool) -> None:
        self.strayed: list[str] = []
        self.untouched: list[str] = []
        self._store, self._model = store, model
        self._module_names = {module: name for name, module in model.named_modules()}
        self._whole: dict[int, Tensor] = {}
        self._pieces: dict[int, Tensor] = {}
        self._names: dict[int, str] = {}
        saved: set[int] = set()
        for name, tensor in _named_tensors(model):
            self._names.setdefault(id(tensor), name)
            if isinstance(tensor, nn.Parameter) or is_persistent(model, name):
                saved.add(id(tensor))
        self._left_empty = saved if empty else set()

    def needs(self, module: nn.Module) -> bool:
        """Whether a module has tensors of its own that must be given values."""
        return any(tensor.is_meta and id(tensor) not in self._left_empty for _, _, tensor in _own(module))

    def describe(self, module: nn.Module) -> str:
        names = ", ".join(name for _, name, tensor in _own(module) if tensor.is_meta)
        return f"{self._module_names[module] or 'the model itself'} ({type(module).__name__}) with {names}"

    def run(self, visits: list[nn.Module], init: Initialise | None) -> None:
        """Initialise modules one after the other, and cut what no later one shares."""
        if init is None:
            unknown = [self.describe(module) for module in visits if _own_reset(module) is None]
            _refuse(unknown, "it is not known how")
        left = Counter(id(tensor) for module in visits for _, _, tensor in _own(module))
        for module in visits:
            slots = _own(module)
            try:
                for held, name, tensor in slots:
                    held[name] = self._stand_in(tensor)
                self._give_values(module, slots, init)
            finally:
                for held, name, tensor in slots:
                    held[name] = tensor
            left.subtract(id(tensor) for _, _, tensor in slots)
            for tensor in {id(tensor): tensor for _, _, tensor in slots if tensor.is_meta}.values():
                if not left[id(tensor)]:
                    self._cut(tensor)
        _refuse(self.strayed, "other tensors than its own were used or made")
        _refuse(self.untouched, "values are left out")

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """What a module holds during its turn: a whole tensor to be written, or a copy of one that has values."""
        if not tensor.is_meta:
            made = tensor.detach().clone()
            return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        if id(tensor) not in self._whole:
            self._whole[id(tensor)] = _unwritten(tensor)
        return self._whole[id(tensor)]

    def _give_values(self, module: nn.Module, slots: list[_Slot], init: Initialise | None) -> None:
        reset = _own_reset(module)
        with MetaWatch() as watch:
            is_done = init is not None and _writes(init, module, slots)
            if reset is not None and not is_done:
                reset(module)
        if watch.touched:
            self.strayed.append(self.describe(module))
        for held, name, tensor in slots:
            made = held[name]
            if made is None or made.is_meta or (made.shape, made.dtype) != (tensor.shape, tensor.dtype):
                self.strayed.append(self.describe(module))
            elif tensor.is_meta:
                self._whole[id(tensor)] = made
                if id(tensor) not in self._left_empty and _is_unwritten(made):
                    self.untouched.append(self.describe(module))

    def _cut(self, tensor: Tensor) -> None:
        self._pieces[id(tensor)] = self._store.cut(self._names[id(tensor)], self._whole.pop(id(tensor)))

    def piece(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the model."""
        if not tensor.is_meta:
            return self._store.cut(name, tensor)
        if id(tensor) not in self._left_empty:
            return self._pieces[id(tensor)]
        value = nan if tensor.is_floating_point() or tensor.is_complex() else 0
        shape = region_shape(self._store.region(name, tuple(tensor.shape)))
        return torch.full(shape, value, dtype=tensor.dtype, device=self._store.device)


_Slot = tuple[dict[str, Tensor | None], str, Tensor]
"""Where a module holds a tensor: its dictionary, the name there, and the tensor."""


def _own(module: nn.Module) -> list[_Slot]:
    held: list[dict[str, Tensor | None]] = [module._parameters, module._buffers]  # type: ignore[list-item]
    return [(tensors, name, tensor) for tensors in held for name, tensor in tensors.items() if tensor is not None]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _writes(init: Initialise, module: nn.Module, slots: list[_Slot]) -> bool:
    """Call the user's function, and say whether it wrote anything into the module's tensors."""
    before = [None if _is_marked(tensor).all() else tensor.clone() for tensor in _held(slots)]
    init(module)
    after = _held(slots)
    return len(after) < len(before) or not all(map(_is_as_before, after, before))


def _held(slots: list[_Slot]) -> list[Tensor]:
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
