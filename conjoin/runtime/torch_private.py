"""The one place here that touches torch's private parts, and names that differ between its releases."""

from __future__ import annotations

import hashlib
import importlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable, profiler
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conjoin.runtime.ranks.rendezvous import KeyStore

F = TypeVar("F", bound=Callable[..., Any])


def default_store(prefix: str, *, for_thread: bool = False) -> KeyStore:
    """The store through which the ranks of the default process group found each other, under a prefix of our own.

    One for a thread of its own does not wait while another thread waits for an answer.
    """
    found: Any = distributed_c10d._get_default_store()
    store: KeyStore = distributed_c10d.PrefixStore(prefix, found.clone() if for_thread else found)
    return store


_naming = threading.Lock()
_num_named: Counter[tuple[str, tuple[int, ...]]] = Counter()


def group_of_members(ranks: tuple[int, ...], name: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A process group that only its members make, those of one name and ranks in the same order.

    torch names such a group after how many groups a process has, and ranks that are members of different ones would
    wait for each other for ever. Here it is named after what its members have in common.
    """
    with _naming:
        number = _num_named[name, ranks]
        _num_named[name, ranks] += 1
        digest = hashlib.sha256(f"{name} {ranks} {number}".encode()).hexdigest()
        own = distributed_c10d._hash_ranks_to_str
        distributed_c10d._hash_ranks_to_str = lambda ranks: digest
        try:
            made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        finally:
            distributed_c10d._hash_ranks_to_str = own
    return made


def close_connections(group: dist.ProcessGroup) -> None:
    """Have all that is under way in a group of Gloo fail, here and where others wait for this rank.

    Gloo closes all connections of a group when somebody has waited for a message for longer than he would. This one
    nobody sends.
    """
    for member in range(group.size()):
        if member == group.rank():
            continue
        try:
            awaited = dist.irecv(torch.empty(1), group=group, tag=_NEVER_SENT, group_src=member)
            assert awaited is not None, "this rank is a member of the group"
            awaited.wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # closed


_NEVER_SENT = 0x5AC


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Have something done when the backward pass that is running has ended; not where it fails."""
    Variable._execution_engine.queue_callback(act)


def import_compiler() -> None:
    """Import what torch itself imports when it is first needed, also where nothing is compiled; it takes a while.

    The second is what it captures models with, and almost every program of ranks captures one.
    """
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.export._trace")


def leave_operators_registered() -> None:
    """Have this process end without taking torch's operators from it one by one, and all that it forks: to each of
    them it means to write into most of the memory that they share.
    """
    finalizers: Any = weakref.finalize
    for finalizer, about in list(finalizers._registry.items()):
        if about.func is torch.library._del_library:
            finalizer.atexit = False


def spare_view_replay() -> None:
    """Have compiled functions give out views by their strides, and not make them again by what they were made by.

    Of functions that come from its cache torch 2.13 has forgotten with which sizes that was: steps with collectives,
    which are compiled in many functions, ended with shapes of arbitrary numbers, or the process did.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    if hasattr(config, "view_replay_for_aliased_outputs"):
        config.view_replay_for_aliased_outputs = False


def leave_uncompiled(function: F) -> F:
    """Have `torch.compile` call a Python function as it stands; it may go on with what that calls."""
    frames: Any = torch._C._dynamo.eval_frame
    this_one, what_it_calls = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    marked: Any = function
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(this_one, what_it_calls))
    marked._torchdynamo_disable = True
    return function


@leave_uncompiled
def compiler_follows() -> bool:
    """Whether `torch.compile` would take up a function that is called now, as it does with what compiled ones call."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch 2.13 gave the collectives on one flat tensor new names, and warns of the old ones."""


def copy_each(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy every tensor into one of its shape, cast to its dtype: one call, on a GPU mostly one kernel."""
    with torch.no_grad():
        torch._foreach_copy_(list(into), list(tensors))


def is_in_backward() -> bool:
    """Whether autograd is at work in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(action: Callable[[], None]) -> None:
    """Do something when the backward pass that is at work has come to its end; not at all when it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def is_profiling() -> bool:
    """Whether a profiler is at work in this process; yes where a release of torch does not tell."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device, or pretends to be elsewhere."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


DispatchMode = TorchDispatchMode
"""Sees every call of an operator below autograd."""


def written_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a call of an operator writes to."""
    marked = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    named = {**dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}
    return [leaf for name in marked for leaf in tree_leaves(named.get(name))]


def makes_dtype(op: Any) -> bool:
    """Whether an operator can be told the dtype of what it makes."""
    return any(argument.name == "dtype" for argument in op._schema.arguments)


class MetaWatch(TorchDispatchMode):
    """Notices what is done with tensors on the meta device, which have no values to read or write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched: set[int] = set()
        """The memory that was named, as `memory_of` tells it."""
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.touched |= _meta_memory(tree_leaves((args, kwargs)))
        written = written_arguments(func, args, kwargs or {})
        self.written |= _meta_memory(written)
        if len(written) == 1 and written[0] is args[0] and args[0].is_meta and func._schema.name.endswith("_"):
            return args[0]  # there is nothing to write, which takes torch milliseconds to find out
        return func(*args, **(kwargs or {}))


def _meta_memory(items: list[Any]) -> set[int]:
    return {memory_of(item) for item in items if isinstance(item, Tensor) and item.is_meta}


def memory_of(tensor: Tensor) -> int:
    """A number that views of one tensor have in common, for as long as it is there."""
    return int(tensor.untyped_storage()._cdata)


as_plain_tensors: Any = torch._C.DisableTorchFunctionSubclass
"""Within it, subclasses of Tensor are taken as plain ones."""
foreach_norm: Any = torch._foreach_norm
check_and_unscale: Any = torch._amp_foreach_non_finite_check_and_unscale_
"""What `clip_grad_norm_` and `GradScaler` ask of all gradients at once."""
no_torch_function: Any = torch._C._disabled_torch_function_impl
"""For a subclass of Tensor whose results are not of that class by themselves."""


def wrapper_of(subclass: Any, shape: tuple[int, ...], like: Tensor) -> Any:
    """An object of a subclass of Tensor that has a shape but no memory; its `__torch_dispatch__` says what it does."""
    return Tensor._make_wrapper_subclass(subclass, shape, dtype=like.dtype, device=like.device)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user has hooks around an optimizer's steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether something is called with a parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
