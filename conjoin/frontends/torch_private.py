"""The one place that touches torch's private parts for capture: fake tensors, schemas, region markers."""

from __future__ import annotations

import importlib
import io
import logging
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache, partial
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_get_bdim, maybe_get_level
from torch._export import utils as export_utils
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer
from torch.fx.node import _side_effectful_functions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from conjoin.frontends.torch_autocast import RECURRENT_CALLS, recurrent_as_cast
from conjoin.ir import copied_model

__all__ = [
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "PINNED",
    "SET_GRAD",
    "ExportedProgram",
    "FollowedCalls",
    "InputKind",
    "OutputKind",
    "aliases_input",
    "alignments_sized",
    "batched_in_place",
    "composites_prepared_once",
    "constant_of",
    "decomposition_of",
    "device_of",
    "disable_current_modes",
    "duals_refused",
    "fake_copy",
    "has_alias_info",
    "is_fake",
    "is_mutable",
    "keep_draws",
    "keep_markers",
    "memory_of",
    "pretend_exporting",
    "quiet",
    "replaced_apply",
    "replaced_checkpoints",
    "set_storages",
    "settle_autograd",
    "storages_of",
    "storages_of_node",
    "tensors_of",
    "unread_left_out",
    "user_lines",
    "writes_only_self",
]  # fmt: skip

PINNED = "conjoin_pinned"


@cache
def _drawing_operators() -> frozenset[OpOverload]:
    """Every operator of torch that draws random numbers."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    found = (getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in
             (name.partition(".") for name in names))  # fmt: skip
    return frozenset(op for op in found if torch.Tag.nondeterministic_seeded in op.tags)


@contextmanager
def keep_draws() -> Iterator[None]:
    """Let torch drop no random draw whose result nobody reads: what is drawn after it would change."""
    added = _drawing_operators() - _side_effectful_functions
    _side_effectful_functions.update(added)
    try:
        yield
    finally:
        _side_effectful_functions.difference_update(added)


@contextmanager
def composites_prepared_once() -> Iterator[None]:
    """Have torch find and prepare the composite operators that it keeps whole once, not again in every program.

    There are hundreds of them, and preparing them takes longer than all the rest where a model is small.
    """
    find, prepare = (getattr(*each, None) for each in _PREPARING)
    if find is None or prepare is None:  # releases that do it in another way
        yield
        return
    for each, instead in zip(_PREPARING, (cache(find), partial(_prepared, prepare)), strict=True):
        setattr(*each, instead)
    try:
        yield
    finally:
        for each, before in zip(_PREPARING, (find, prepare), strict=True):
            setattr(*each, before)


_PREPARING = (
    (export_utils, "_materialize_cpp_cia_ops"),  # torch calls it for each of its two dozen namespaces
    (exported_program, "_override_composite_implicit_decomp"),
)


class _Prepared(NamedTuple):
    """What torch gives a composite operator for as long as it is kept whole: kernels, and a rule for fake tensors."""

    kernels: dict[Any, Any]
    rule: Any

    def give(self, op: OpOverload) -> None:
        op.py_kernels.update(self.kernels)
        op._dispatch_cache.clear()
        fake_impls.op_implementations_dict.setdefault(op, self.rule)

    @staticmethod
    def take_back(op: OpOverload, kernels: dict[Any, Any]) -> None:
        op.py_kernels.clear()
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()
        fake_impls.op_implementations_dict.pop(op, None)


_kept_whole: dict[OpOverload, _Prepared] = {}


@contextmanager
def _prepared(prepare: Callable[[Any], Any], composites: dict[OpOverload, Any]) -> Iterator[None]:
    """As `prepare` does, from what it did before with operators that are kept whole."""
    whole = {op for op, how in composites.items() if how is export_utils._special_op_to_preserve_cia}
    known = whole & _kept_whole.keys()
    before = {op: dict(op.py_kernels) for op in whole}
    with prepare({op: how for op, how in composites.items() if op not in known}):
        for op in whole - known:
            new = {key: kernel for key, kernel in op.py_kernels.items() if before[op].get(key) is not kernel}
            _kept_whole[op] = _Prepared(new, fake_impls.op_implementations_dict[op])
        try:
            for op in known:
                _kept_whole[op].give(op)
            yield
        finally:
            for op in known:
                _Prepared.take_back(op, before[op])


@contextmanager
def unread_left_out() -> Iterator[None]:
    """Have export leave out what nobody reads of its programs: their Python, shapes beside those of values, and a walk
    through all values for numbers that depend on data where no call has made any.
    """
    tracing = importlib.import_module("torch.export._trace")  # it imports torch's compiler, as the first export does
    name = "_replace_unbacked_bindings"
    bind = getattr(tracing, name, None)
    unread = (
        (proxy_tensor, "_extract_tensor_metadata", lambda *given: None),
        (exported_program, "_create_graph_module_for_export", _make_graph_module),
        (tracing, name, lambda module: bind(module) if bind and _depends_on_data(module) else None),
    )
    found = [(room, name, getattr(room, name), instead) for room, name, instead in unread if hasattr(room, name)]
    for room, name, _, instead in found:
        setattr(room, name, instead)
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        for room, name, before, _ in found:
            setattr(room, name, before)


def _depends_on_data(module: fx.GraphModule) -> bool:
    return any("unbacked_bindings" in node.meta for node in module.graph.nodes)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's warnings, logs and dumps about export off the user's screen: what matters is told in our report.

    What the user's own forward writes to stderr is shown afterwards, unless export failed.
    """
    said = io.StringIO()
    rooms = ("export", "_export", "_dynamo", "_subclasses", "fx")
    loggers = [logging.getLogger(f"torch.{room}") for room in rooms]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stderr(said):
        warnings.simplefilter("ignore")
        _set_levels(loggers, [logging.CRITICAL] * len(loggers))
        try:
            yield
        finally:
            _set_levels(loggers, levels)
    sys.stderr.write(said.getvalue())


def _set_levels(loggers: list[logging.Logger], levels: list[int]) -> None:
    """Set the levels of loggers; with each `setLevel` all loggers of the process forget what they know of levels."""
    for logger, level in zip(loggers, levels, strict=True):
        logger.level = level
    loggers[-1].setLevel(levels[-1])


SET_GRAD = torch._C._set_grad_enabled
ENTER_AUTOCAST, EXIT_AUTOCAST = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


@contextmanager
def keep_markers() -> Iterator[None]:
    """Have export leave `no_grad` and autocast regions in place, between markers.

    By default it moves each into a graph of its own, and loses a `no_grad` that stands inside an autocast region.
    """
    passes = (replace_set_grad_with_hop_pass, replace_autocast_with_hop_pass)
    names = [module.__name__.rpartition(".")[2] for module in passes]
    kept = [getattr(module, name) for module, name in zip(passes, names, strict=True)]
    for module, name in zip(passes, names, strict=True):
        setattr(module, name, lambda graph_module, signature: (graph_module, signature))
    try:
        yield
    finally:
        for module, name, function in zip(passes, names, kept, strict=True):
            setattr(module, name, function)


@contextmanager
def user_lines(find: Callable[[FrameType | None], str]) -> Iterator[None]:
    """Have export note for every call the line that `find` sees in the frames of the call.

    By default it notes lines of functions called `forward` only, and takes a third of its time for that.
    """
    create = _ModuleStackTracer.create_node
    switch = "do_not_emit_stack_traces"  # not in torch before 2.12, which then notes its own lines first
    before = vars(fx_config).get(switch)

    def create_node(self: _ModuleStackTracer, *args: Any, **kwargs: Any) -> fx.Node:
        node = create(self, *args, **kwargs)
        if node.op == "call_function":
            node.meta["stack_trace"] = find(sys._getframe(1))
        return node

    _ModuleStackTracer.create_node = create_node  # type: ignore[method-assign]
    if before is not None:
        setattr(fx_config, switch, True)
    try:
        yield
    finally:
        _ModuleStackTracer.create_node = create  # type: ignore[method-assign]
        if before is not None:
            setattr(fx_config, switch, before)


@contextmanager
def replaced_apply(call: Callable[..., Any]) -> Iterator[None]:
    """Have every `apply` of an autograd function run `call(original, function, *args)`.

    Also one that was taken from its class before, as in `scale = Scale.apply`: the method's own code is exchanged.
    """
    method: FunctionType = torch.autograd.Function.__dict__["apply"].__func__
    before = method.__code__
    original = FunctionType(before, method.__globals__, method.__name__, method.__defaults__, method.__closure__)

    def made(__class__: type) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return __class__._conjoin_call(cls, *args, **kwargs)  # type: ignore[attr-defined]

        return apply

    kept = torch.autograd.Function.__dict__.get("_conjoin_call")
    torch.autograd.Function._conjoin_call = staticmethod(partial(call, original))  # type: ignore[attr-defined]
    method.__code__ = made(torch.autograd.Function).__code__  # over the same cell: its class
    try:
        yield
    finally:
        method.__code__ = before
        if kept is None:
            del torch.autograd.Function._conjoin_call  # type: ignore[attr-defined]
        else:
            torch.autograd.Function._conjoin_call = kept  # type: ignore[attr-defined]


@contextmanager
def replaced_checkpoints(run: Callable[..., Any], begin: Callable[..., Iterator[None]]) -> Iterator[None]:
    """Have `torch.utils.checkpoint` call `run` for the reentrant kind, and step through `begin` for the other."""
    name = "_checkpoint_without_reentrant_generator"
    before = getattr(torch.utils.checkpoint, name)
    setattr(torch.utils.checkpoint, name, begin)
    CheckpointFunction.apply = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        setattr(torch.utils.checkpoint, name, before)
        del CheckpointFunction.apply


@contextmanager
def batched_in_place() -> Iterator[None]:
    """Have `torch.vmap` take and give the dims that it goes over where they lie, and move them by calls of their own.

    What is moved in the taking or giving itself is lost to export.
    """
    room: Any = importlib.import_module("torch._functorch.vmap")
    take, give = room._add_batch_dim, room._remove_batch_dim

    def taken(tensor: Tensor, dim: int, level: int) -> Any:
        return take(tensor.movedim(dim, 0) if dim else tensor, 0, level)

    def given(tensor: Tensor, level: int, size: int, dim: int) -> Any:
        if not is_batchedtensor(tensor) or maybe_get_level(tensor) != level:
            return give(tensor, level, size, dim)
        found = maybe_get_bdim(tensor)
        made = give(tensor, level, size, found)
        return made.movedim(found, dim) if found != dim % made.dim() else made

    room._add_batch_dim, room._remove_batch_dim = taken, given
    try:
        yield
    finally:
        room._add_batch_dim, room._remove_batch_dim = take, give


@contextmanager
def alignments_sized() -> Iterator[None]:
    """Have stand-ins of a CTC loss made for any lengths: those of alignments, whose size depends on the longest target,
    are not seen outside of it."""
    op, rules = torch.ops.aten._ctc_loss.Tensor, fake_impls.op_implementations_dict
    before = rules.get(op)

    def rule(mode: FakeTensorMode, func: Any, scores: Tensor, targets: Tensor, *_: Any, **__: Any) -> Any:
        steps, samples = scores.shape[0], scores.shape[1] if scores.dim() == 3 else 1
        with mode:
            return scores.new_empty(samples), scores.new_empty(samples, steps, 2 * targets.shape[-1] + 1)

    rules[op] = rule
    try:
        yield
    finally:
        if before is None:
            del rules[op]
        else:
            rules[op] = before


def settle_autograd() -> None:
    """Let autograd choose its threads, once, before anything is traced.

    Tracing makes a torch that is built for CUDA believe in a device even where there is none. Autograd would then start
    a thread for it at its first backward pass, and processes forked later could not differentiate.
    """
    if not torch.cuda.is_available():
        with torch.inference_mode(False), torch.enable_grad():
            torch.zeros((), requires_grad=True, device="cpu").clone().backward()  # type: ignore[no-untyped-call]


@contextmanager
def pretend_exporting() -> Iterator[None]:
    """Have `torch.compiler.is_exporting()` hold, which published models ask before they look at tensor values."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = [getattr(torch.compiler, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(torch.compiler, flag, value)


def is_mutable(op: OpOverload) -> bool:
    """Whether an operator writes to any of its arguments."""
    return bool(op._schema.is_mutable)


def writes_only_self(op: OpOverload) -> bool:
    """Whether an in-place operator writes to its first argument alone, and returns it."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    return written[:1] == [True] and not any(written[1:]) and len(op._schema.returns) == 1


def aliases_input(op: OpOverload) -> bool:
    """Whether the result may share memory with the first argument."""
    return bool(op._schema.arguments) and op._schema.arguments[0].alias_info is not None


@cache
def has_alias_info(op: OpOverload) -> bool:
    """Whether the schema names any argument that is written to or shared."""
    return any(argument.alias_info is not None for argument in op._schema.arguments)


def storages_of(traced: Any) -> frozenset[int]:
    """The memory that traced tensors lie in; two of the same memory are views of one another."""
    if isinstance(traced, Tensor):
        if is_batchedtensor(traced):  # of `torch.vmap`
            return storages_of(get_unwrapped(traced))
        return frozenset({traced.untyped_storage()._cdata})
    return frozenset[int]().union(*map(storages_of, traced)) if isinstance(traced, tuple | list) else frozenset()


_STORAGES = "conjoin_storages"


def storages_of_node(node: fx.Node) -> frozenset[int]:
    """The memory that the results of a call lie in."""
    known: frozenset[int] | None = node.meta.get(_STORAGES)
    return storages_of(node.meta.get("val")) if known is None else known


def set_storages(node: fx.Node, storages: frozenset[int]) -> None:
    """Say where the results of a call lie, where that is not where its traced ones do."""
    node.meta[_STORAGES] = storages


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """The calls that a composite operator consists of; None where it is none."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return partial(op._op_dk, key) if torch._C._dispatch_has_kernel_for_dispatch_key(str(op._name), key) else None


_LESS = frozenset((Tensor.lt, Tensor.__lt__, torch.lt))
_GRADIENTS = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_FUNCTIONS = torch._C._VariableFunctions
_PACKING = frozenset((_FUNCTIONS._pack_padded_sequence, _FUNCTIONS._pad_packed_sequence))
_FOLLOWED = _LESS | _GRADIENTS | _PACKING | RECURRENT_CALLS.keys() | {_DATA, Tensor.register_hook, torch.rand}


_READ = frozenset((
    _DATA, Tensor.detach, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__,
    Tensor.__complex__, Tensor.__index__,
))  # fmt: skip
"""What gives the values of a tensor without its gradient."""
_TAKEN = _READ | {Tensor.__setitem__}


class InnerGradient(Exception):
    """A gradient is taken inside of a forward pass: export does not follow it."""


class PackedRows(Exception):
    """Sequences are packed, of which the shape is that of a batch and no other."""


@contextmanager
def duals_refused() -> Iterator[None]:
    """Have what differentiates forward (`torch.func.jvp`, `jacfwd`, `linearize`) stop: export loses its tangents."""
    room: Any = importlib.import_module("torch.autograd.forward_ad")
    make = room.make_dual

    def refuse(*_: Any, **__: Any) -> None:
        raise InnerGradient("jvp")

    room.make_dual = refuse
    try:
        yield
    finally:
        room.make_dual = make


class FollowedCalls(TorchFunctionMode):
    """Helps export over calls it cannot follow.

    `torch.rand(()) < p` for p <= 0 or p >= 1 holds never or always: published models skip layers at random that way,
    and with a rate of 0 by default. `x.data` is taken as `x.detach()`, which differs only in what autograd checks.
    A hook on a gradient is left out, and told to `note_hook`; what takes gradients itself is an `InnerGradient`.
    Recurrent layers in a region of autocast are traced as they are cast on a CPU.
    torch 2.11 gives the states of an LSTM a dim too many. What has values and wants a gradient is none of the stand-ins
    for the model's parameters: `note_beside` is told, and whether it is read without a gradient. All other functions
    are called by `call`, if somebody wants to.
    """

    def __init__(
        self,
        note_hook: Callable[[FrameType | None], None],
        note_beside: Callable[[Tensor, bool, FrameType | None], None],
        call: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: func(*args, **kwargs),
    ) -> None:
        super().__init__()
        self._call = call
        self._draws: list[Tensor] = []
        self._has_onednn = bool(torch.backends.mkldnn.enabled)  # a trace switches it off
        self._note_hook = note_hook
        self._note_beside = note_beside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, frame = kwargs or {}, sys._getframe(1)
        made = self._follow(func, args, given, frame) if func in _FOLLOWED else self._call(func, args, given)
        self._look_for_beside(func, (*args, *given.values()), made, frame)
        return made

    def _follow(self, func: Any, args: Any, kwargs: Mapping[str, Any], frame: FrameType) -> Any:
        if func in _GRADIENTS:
            raise InnerGradient(func.__name__)
        if func in _PACKING:
            raise PackedRows
        if func in _LESS and any(args[0] is draw for draw in self._draws):
            rate = args[1]
            if isinstance(rate, int | float) and not 0 < rate < 1:
                return rate >= 1
        if func == _DATA:
            return args[0].detach()
        if func is Tensor.register_hook:
            self._note_hook(frame)
            return RemovableHandle(OrderedDict())
        if func in RECURRENT_CALLS and not kwargs:
            with torch._C.DisableTorchFunction():  # where export watches calls, no kernel of an operator can be chosen
                result = recurrent_as_cast(func, args, self._has_onednn)
        else:
            result = func(*args, **kwargs)
        if func is torch.rand and result.dim() == 0:
            self._draws.append(result)
        if func is torch.lstm and result[1].dim() > args[1][0].dim():
            return result[0], *(new.reshape(old.shape) for new, old in zip(result[1:], args[1], strict=True))
        return result

    def _look_for_beside(self, func: Any, args: Sequence[Any], made: Any, frame: FrameType) -> None:
        """Tell of parameters that a tensor or a number is made of, but not of a question for a shape or a dtype."""
        for beside in _with_values_and_gradients(args):
            is_frozen = func in _READ or not torch.is_grad_enabled()
            results = made if isinstance(made, tuple | list) else (made,)
            if func in _TAKEN or any(isinstance(x, Tensor) for x in results):
                self._note_beside(beside, is_frozen, frame)


def _with_values_and_gradients(args: Sequence[Any]) -> Iterator[Tensor]:
    """Tensors among arguments that somebody made to be trained, and that are no stand-ins."""
    for arg in args:
        if isinstance(arg, tuple | list):
            yield from _with_values_and_gradients(arg)
        elif type(arg) in (Tensor, nn.Parameter) and arg.requires_grad:
            yield arg


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def constant_of(tensor: Tensor, largest: int) -> Tensor | None:
    """A copy of the values that torch itself knows of a stand-in, or of those that a tensor has which is none, such as
    `torch.tensor(2.0)`; None of one that is trained, lies on another device, or is too large."""
    is_real = type(tensor) is Tensor and not tensor.is_meta  # and no other kind of stand-in
    constant = tensor.constant if isinstance(tensor, FakeTensor) else tensor if is_real else None
    if constant is None or constant.requires_grad or constant.device.type != "cpu" or constant.numel() > largest:
        return None
    with disable_current_modes():
        return constant.clone()


def device_of(stand_in: Any) -> torch.device | None:
    """What a stand-in answers when it is asked for its device, which while a kernel runs on it is another; None of
    what is no stand-in."""
    if type(stand_in) is not FakeTensor:
        return None
    return torch.device("meta") if stand_in.fake_mode.in_kernel_invocation else stand_in.fake_device


def memory_of(tensor: Tensor) -> int:
    """What tells the memory of a tensor, or of a stand-in for one, from that of others."""
    return int(tensor.untyped_storage()._cdata)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    yield from (*module.parameters(), *module.buffers())
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))


def fake_copy(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[nn.Module, list[Tensor]]:
    """A model and inputs without values as if on the CPU, without memory: what forward creates there fits them."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        with mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake

    for tensor in tensors_of(model):
        if is_fake(tensor):
            memo[id(tensor)] = stand_in(tensor)
    return copied_model(model, memo), [stand_in(x) for x in inputs]
