"""Autocast as it is on CUDA, where there is no CUDA: torch keeps the lists of what it casts there, and is asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only


def autocast_knows(op: OpOverload, device: str) -> bool:
    """Whether an operator is on one of the lists of what autocast casts on a kind of device."""
    if device not in ("cpu", "cuda"):
        return False
    name, key = str(op._name), f"Autocast{device.upper()}"
    passes_by = torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key) and not passes_by(name, key)


@contextmanager
def keep_cuda_autocast() -> Iterator[None]:
    """Have `torch.autocast("cuda")` stay on in a torch without CUDA, which still has the lists of what it casts."""
    amp, missing, supports = torch.cuda.amp.common, "amp_definitely_not_available", "is_bf16_supported"
    before = getattr(amp, missing), getattr(torch.cuda, supports)
    try:
        setattr(amp, missing, lambda: False)
        setattr(torch.cuda, supports, lambda *_, **__: True)
        yield
    finally:
        setattr(amp, missing, before[0])
        setattr(torch.cuda, supports, before[1])


RECURRENT_CALLS: dict[Any, OpOverload] = {
    torch.lstm: torch.ops.aten.lstm.input,
    torch.gru: torch.ops.aten.gru.input,
    torch.lstm_cell: torch.ops.aten.lstm_cell.default,
    torch.gru_cell: torch.ops.aten.gru_cell.default,
}
"""Calls that export keeps whole, though on a CPU it is calls inside of them that autocast casts."""


def recurrent_as_cast(call: Any, args: tuple[Any, ...], has_onednn: bool) -> Any:
    """What a recurrent call gives under the autocast of this region on a CPU, by casts that a trace sees.

    A kernel that takes all in the region's dtype is called so: what this host has is asked, with one sample of one
    step, in which oneDNN is on where it was before the trace. Otherwise some of it is cast and some is not, and it is
    taken apart, step by step.
    """
    op, dtype = RECURRENT_CALLS[call], torch.get_autocast_dtype("cpu")
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    are_cast = all(tensor.device.type == "cpu" and tensor.dtype != torch.float64 for tensor in given)
    whole = call in (torch.lstm, torch.gru) and not isinstance(args[2], list | tuple)  # rows of several lengths
    if not torch.is_autocast_enabled("cpu") or autocast_knows(op, "cpu") or not are_cast or whole:
        return call(*args)
    x, states, *rest = args
    with disable_current_modes(), torch.backends.mkldnn.flags(enabled=has_onednn), torch.no_grad():
        x = torch.zeros([1] * (x.dim() - 1) + [x.shape[-1]], dtype=x.dtype, device="cpu")
        made = call(x, *tree_map_only(Tensor, _of_one_sample, (states,)), *tree_map_only(Tensor, _zeros, rest))
    if all(tensor.dtype == dtype for tensor in tree_leaves(made)):
        return call(*tree_map_only(Tensor, lambda tensor: tensor.to(dtype), args))
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def _of_one_sample(state: Tensor) -> Tensor:
    return torch.zeros((*state.shape[:-2], 1, state.shape[-1]), dtype=state.dtype, device="cpu")


_RECURRENT = ("aten::lstm", "aten::gru", "aten::gru_cell")
"""Of which what is on CUDA's lists is a kernel inside that this torch may be built without."""


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Have stand-ins on the CPU cast as tensors on CUDA are: regions for one count for the other, by CUDA's lists.

    What CUDA's autocast makes of a call is asked of torch itself, on stand-ins that are on CUDA but nothing else.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    swapped = {"cuda": "cpu", "cpu": "cuda"}
    create = torch.amp.autocast.__init__

    def create_swapped(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        create(self, device_type, *args, **kwargs)
        self.device = swapped.get(self.device, self.device)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def override(op: OpOverload, kernel: Callable[..., Any]) -> None:
        library.impl(op, kernel, "AutocastCPU", allow_override=True)  # type: ignore[no-untyped-call]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they take the place of others, which come back
        for name in names:
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            if has_kernel(name, "AutocastCUDA") or op._schema.name in _RECURRENT:
                override(op, partial(_as_on_cuda, op))
            elif has_kernel(name, "AutocastCPU"):
                override(op, torch.library.fallthrough_kernel)
    torch.amp.autocast.__init__ = create_swapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.autocast.__init__ = create  # type: ignore[method-assign]
        library._destroy()  # type: ignore[no-untyped-call]


def _as_on_cuda(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Stand-ins for what a call gives on CUDA under the autocast of this region."""

    dtype = torch.get_autocast_dtype("cpu")
    with disable_current_modes(), FakeTensorMode(), torch.no_grad():
        if op._schema.name in _RECURRENT:
            made = _all_in_half(op, args, kwargs, dtype)
        else:
            given = tree_map_only(Tensor, partial(_like, device="cuda"), (args, kwargs))
            with _autocast_set("cuda", True, dtype):
                made = _asked(op, *given)
    return tree_map_only(Tensor, partial(_like, device="cpu"), made)


def _asked(op: OpOverload, args: Any, kwargs: Any) -> Any:
    try:
        return op(*args, **kwargs)
    except RuntimeError:  # it may be made of calls that ask for a CUDA that is not built in
        with _OnCpu():  # type: ignore[no-untyped-call]
            return op(*args, **kwargs)


class _OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries calls on CUDA out on the CPU, with the dtypes that autocast has given their operands."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Tensor, partial(_like, device="cpu"), (args, kwargs or {}))
        with _autocast_set("cpu", False, torch.get_autocast_dtype("cpu")):
            return tree_map_only(Tensor, partial(_like, device="cuda"), func(*given[0], **given[1]))


def _all_in_half(op: OpOverload, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """What a recurrent layer gives on CUDA: its kernel takes all in half precision, or each of its steps does."""

    def narrow(tensor: Tensor) -> Tensor:
        is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
        return torch.empty(tensor.shape, dtype=dtype if is_cast else tensor.dtype, device="cpu")

    given = tree_map_only(Tensor, narrow, (args, kwargs))
    with _autocast_set("cpu", False, dtype):
        return op(*given[0], **given[1])


@contextmanager
def _autocast_set(device: str, enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def _like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
