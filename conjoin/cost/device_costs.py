"""What is known of one device, ready to be asked: measured keys, measured calls by kind, the roofline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import log2
from typing import Any

from conjoin.cost.classes import classes_of
from conjoin.cost.curves import Curves
from conjoin.cost.interpolation import Point, interpolate
from conjoin.cost.kernels import CAST_FLOPS, FLASH_BESIDE_CUDNN, HALVES, Casts, casts_of, kernels_of, largest_of
from conjoin.cost.keys import read_key, write_key
from conjoin.cost.measurement import Measurement
from conjoin.cost.medians import Fit, HostTime, any_of
from conjoin.cost.nearest_gpu import Basis
from conjoin.cost.roofline import DEFAULT_HOST, Roofline
from conjoin.cost.seconds import NO_SECONDS, Seconds, Source
from conjoin.cost.turned import bare, copies, copy_of_turned, is_of_turned, seconds_to_read
from conjoin.cost.work import (
    ELEMENTWISE,
    FUSED,
    CallWork,
    Work,
    is_in_eight_bits,
    is_product,
    kernel_counts,
    parts_of,
    work_of,
)
from conjoin.machine import DeviceType, architecture_of, preset_name
from conjoin.ops import ATTENTION_FROM_ROW, Access, Call, Kind, call_cache, space_of, spec_for

_IN_PYTHON = 2
"""Launches of a gradient that the host could make in the time in which it calls one that is written in Python."""
_LAUNCH = 5
"""Calls that the host could make in the time in which it launches a collective: 3.6 of the smallest kernels for an
all-reduce, 7 for an all-gather or reduce-scatter, through torch.distributed to a backend that does nothing."""
_CACHED = 2**27
"""Bytes of which a good part may still lie in a GPU's caches, which hold up to 60 MB."""
_GRADIENT = 0.25
"""How far apart, in doublings, calls of one size are for each operand that gets a gradient in one of them only."""


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Seconds of a call and of its backward on the device, and what the host needs to launch them."""

    forward: Seconds
    backward: Seconds
    host_forward: float
    host_backward: float


@dataclass(frozen=True, slots=True)
class _Kin:
    """One measured call among others of its kind."""

    forward: Point
    backward: Point | None


def _and(one: OperatorCost, other: OperatorCost) -> OperatorCost:
    """One after the other."""
    return OperatorCost(
        one.forward + other.forward,
        one.backward + other.backward,
        one.host_forward + other.host_forward,
        one.host_backward + other.host_backward,
    )


class DeviceCosts:
    """Costs of calls on one device."""

    def __init__(
        self, device: DeviceType, measurements: Mapping[str, Measurement], basis: Basis, *, tf32: bool = False
    ) -> None:
        self.device, self._basis, fit = device, basis, basis.fit
        self._tf32 = tf32 and "tfloat32" in dict(device.peak_flops)
        """Whether products of float32 run on tensor cores, of which nothing was measured."""
        self.measured = measurements
        efficiency = dict(fit.efficiency) if fit else None
        self.roofline = Roofline.of(device, efficiency, fit.overhead_seconds if fit else None)
        self._bare = Roofline.of(device)
        self.curves = Curves(dict(fit.curves) if fit and not device.efficiency else {})
        self._host = _HostTimes(fit if device.kind == "cuda" else None, DEFAULT_HOST[device.kind], device.host_factor)
        self._keys_by_op: dict[str, list[str]] = defaultdict(list)
        for key in measurements:
            self._keys_by_op[key.partition(" ")[0]].append(key)
        self._keys_by_kind: dict[str, dict[Any, list[str]]] = {}
        self._kin_by_kind: dict[Any, list[_Kin]] = {}
        self.known: dict[tuple[Call, tuple[int, ...]], OperatorCost] = {}

    def find(self, call: Call, needs: tuple[int, ...]) -> OperatorCost:
        """The cost of a call: measured, else between measured ones, else estimated."""
        measured = None if self._is_rounded(call) else self.measured.get(write_key(call, needs))
        if measured is not None:
            cost = _as_measured(measured, needs, self._host.find(call, needs, measured))
        elif is_of_turned(call):
            cost = self._of_turned(call, needs)
        else:
            alone = call.op in FUSED and not self._kin(call)
            in_blocks = call.op == ATTENTION_FROM_ROW
            kernels = kernels_of(call, needs) if self.device.kind == "cuda" or in_blocks else ()
            if kernels:
                cost = reduce(_and, (self.find(*part) for part in kernels))
                if len(kernels) == 1:  # called as it is
                    cost = OperatorCost(cost.forward, cost.backward, *self._host.find(call, needs))
                cost = self._by_flash(cost) if in_blocks and call.tensors[0].dtype in HALVES else cost
            else:
                cost = self._add_up(call, needs) if alone else self._reckon(call, needs)
        self.known[call, needs] = cost
        return cost

    def _of_turned(self, call: Call, needs: tuple[int, ...]) -> OperatorCost:
        """What a call takes on numbers that lie apart."""
        cost, (copy, read) = self.find(bare(call), needs), copy_of_turned(call)
        spec, copied = spec_for(call), self.find(copy, ())
        if spec is not None and spec.view:  # a copy in place of a view, of rows that are in one piece
            return replace(cost, forward=copied.forward, host_forward=cost.host_forward + copied.host_forward)
        taken = Seconds(max(seconds_to_read(read, self.device), copied.forward.value), Source.ESTIMATED)
        ahead, back = copies(call)
        if not ahead:
            return replace(cost, forward=max(cost.forward, taken, key=lambda seconds: seconds.value))
        backward = cost.backward + taken if needs and back else cost.backward
        return replace(cost, forward=cost.forward + taken, backward=backward)

    def _by_flash(self, cost: OperatorCost) -> OperatorCost:
        """What blocks of attention take by the kernel that they run."""
        slower = FLASH_BESIDE_CUDNN.get(architecture_of(preset_name(self.device)), 1.0)
        return replace(cost, forward=cost.forward * slower, backward=cost.backward * slower)

    def _add_up(self, call: Call, needs: tuple[int, ...]) -> OperatorCost:
        """A product and a function of it by what is known of each; on a GPU the function is part of its kernel."""
        product, function = (self.find(*part) for part in parts_of(call, needs))
        fused = self.device.kind == "cuda"
        return OperatorCost(
            product.forward if fused else product.forward + function.forward,
            product.backward + function.backward,
            product.host_forward if fused else product.host_forward + function.host_forward,
            product.host_backward + function.host_backward + (_IN_PYTHON * self._host.usual[1] if needs else 0.0),
        )

    @property
    def launch(self) -> float:
        """What the host takes to launch a collective; on CPUs that is part of what it takes in all."""
        return _LAUNCH * self._host.least if self.device.kind == "cuda" else 0.0

    def keys_of(self, word: str) -> list[str]:
        """The measured keys that begin with a word."""
        return self._keys_by_op.get(word, [])

    def _reckon(self, call: Call, needs: tuple[int, ...]) -> OperatorCost:
        forward, backward = self._estimates(call, needs)
        kin = self._kin(call)
        sizes = _sizes(call, needs) if kin else ()
        return OperatorCost(
            _between([k.forward for k in kin], sizes, forward),
            _between([k.backward for k in kin if k.backward], sizes, backward) if needs else NO_SECONDS,
            *self._host.find(call, needs),
        )

    def _estimates(self, call: Call, needs: tuple[int, ...]) -> tuple[float, float]:
        work = work_of(call, needs)
        ahead, back = self._estimate(call, work, backward=False), self._estimate(call, work, backward=True)
        if is_in_eight_bits(call):
            forward, backward = map(self._casting, casts_of(call, needs))
            return ahead + forward, back + backward
        return ahead, back

    def _casting(self, casts: Casts) -> float:
        """What a product in eight bits takes before it."""
        if not casts.num_elements:
            return 0.0
        scales = sum(self.find(part, ()).forward.value for tensor in casts.scaled for part in largest_of(tensor))
        return scales + casts.num_elements * CAST_FLOPS / self.device.flops_of("float32") + self.roofline.overhead

    def _estimate(self, call: Call, work: CallWork, *, backward: bool) -> float:
        """By the roofline, and by what is known of calls of its classes; else by how many kernels it is."""
        known = self._basis.carries_over(call.op, work.family)
        roofline, part = self.roofline if known else self._bare, work.backward if backward else work.forward
        dtype = "tfloat32" if self._is_rounded(call) else roofline.computed_in(work.dtype)
        what = part, work.family, dtype
        seconds = roofline.seconds(*what, backward=backward)
        if not part:
            return seconds
        by_flops = roofline.is_by_flops(*what)
        classes = classes_of(call, work, dtype, backward=backward, by_flops=by_flops)
        seconds /= self._basis.kept_up(dtype) if by_flops else 1.0
        if known and self.curves.know(classes):
            found = seconds * self.curves.factor(classes, log2(roofline.ideal(*what)))
            return max(found, self._least(*what))
        seconds += (kernel_counts(call)[backward] - 1) * roofline.overhead
        return seconds if known else max(seconds, self._as_measured_elsewhere(call, work, part, backward=backward))

    def _as_measured_elsewhere(self, call: Call, work: CallWork, part: Work, *, backward: bool) -> float:
        """What the GPU whose shares do not carry over takes, less by no more than this one's rates are higher."""
        basis = self._basis
        assert basis.fit is not None and basis.of is not None, "shares of another device"
        there = Roofline.of(basis.of, dict(basis.fit.efficiency), basis.fit.overhead_seconds)
        what = part, work.family, there.computed_in(work.dtype)
        ideal, by_flops = there.ideal(*what), there.is_by_flops(*what)
        classes = classes_of(call, work, what[2], backward=backward, by_flops=by_flops)
        seconds = there.seconds(*what, backward=backward) * self.curves.factor(classes, log2(ideal))
        return seconds * min(1.0, self._bare.ideal(part, work.family, self._bare.computed_in(work.dtype)) / ideal)

    def _least(self, work: Work, family: str, dtype: str) -> float:
        """What no kernel goes below: its flops at the peak, and its bytes, where caches do not hold them."""
        cached = self.device.kind == "cpu" or work.bytes < _CACHED
        return self.roofline.ideal(Work(work.flops, 0.0) if cached else work, family, dtype)

    def _is_rounded(self, call: Call) -> bool:
        """Whether a call is a product of float32 that tensor cores round to TF32."""
        return self._tf32 and is_product(call, "float32")

    def _kin(self, call: Call) -> list[_Kin]:
        """The measured calls of a call's kind; others are not estimated."""
        if call.op not in self._keys_by_op or self._is_rounded(call):
            return []
        kind = _kind(call)
        if kind not in self._kin_by_kind:
            self._kin_by_kind[kind] = [self._read(key) for key in self._sorted(call.op).get(kind, ())]
        return self._kin_by_kind[kind]

    def _sorted(self, op: str) -> dict[Any, list[str]]:
        """The measured keys of an operator by kind."""
        if op not in self._keys_by_kind:
            kinds: dict[Any, list[str]] = defaultdict(list)
            for key in self._keys_by_op[op]:
                kinds[_kind_of(key)].append(key)
            self._keys_by_kind[op] = kinds
        return self._keys_by_kind[op]

    def _read(self, key: str) -> _Kin:
        found, known = read_key(key), self.measured[key]
        assert found is not None, "it has a kind"
        forward, backward = self._estimates(*found)
        sizes = _sizes(*found)
        back = Point(sizes, backward, known.backward) if found[1] else None
        return _Kin(Point(sizes, forward, known.forward), back)


class _HostTimes:
    """What the host takes to make calls and their backwards: by operator, else as one was measured, else by family."""

    def __init__(self, fit: Fit | None, usual: tuple[float, float], factor: float) -> None:
        self._factor = factor
        self._known: dict[str, list[HostTime]] = defaultdict(list)
        for time in fit.host if fit else ():
            self._known[time.name].append(time)
        ahead, back = (fit.host_forward, fit.host_backward) if fit else usual
        self.usual = factor * ahead, factor * back
        """Of any call, in the median of those measured."""
        small = self._known.get(any_of(ELEMENTWISE), ())
        self.least = factor * min((time.forward for time in small), default=usual[0])
        """Of a call of one small kernel."""

    def find(
        self, call: Call, needs: tuple[int, ...], measured: Measurement | None = None
    ) -> tuple[float, float]:
        """Seconds of a call and of its backward."""
        times = self._known.get(call.op)
        if times is None and measured is not None:
            return self._factor * measured.host_forward, self._factor * measured.host_backward
        ahead, back = kernel_counts(call)
        times = times or self._known.get(any_of(work_of(call, needs).family) if self._known else "")
        if times is None:
            return ahead * self.usual[0], back * self.usual[1] if needs else 0.0
        found = min(times, key=lambda time: abs(time.num_gradients - len(needs)))
        return self._factor * found.forward, self._factor * found.backward if needs else 0.0


def _as_measured(found: Measurement, needs: tuple[int, ...], host: tuple[float, float]) -> OperatorCost:
    forward = Seconds(found.forward, Source.MEASURED)
    backward = Seconds(found.backward, Source.MEASURED) if needs else NO_SECONDS
    return OperatorCost(forward, backward, *host)


def _between(points: list[Point], sizes: tuple[float, ...], estimate: float) -> Seconds:
    if estimate == 0:
        return Seconds(0.0, Source.ESTIMATED)
    value = interpolate(points, sizes, estimate) if points else None
    return Seconds(estimate, Source.ESTIMATED) if value is None else Seconds(value, Source.INTERPOLATED)


def _sizes(call: Call, needs: tuple[int, ...]) -> tuple[float, ...]:
    """Where a call lies among those of its kind: log2 of its sizes, and which operands get gradients."""
    gradients = (_GRADIENT * (i in needs) for i in range(len(call.tensors)))
    return (*(log2(max(size, 1)) for size in _axes(call).values()), *gradients)


def _kind(call: Call) -> tuple[Any, ...]:
    """What calls must have in common to be compared: operator, dtypes, roles of indices, attributes but for sizes."""
    spec = spec_for(call)
    told = {*spec.follows, *_TOLD_BY_INDICES} if spec else set()
    attributes = tuple(
        _sketch(value)
        for parameter, value in zip(call.signature.parameters, call.args, strict=True)
        if parameter.kind is Kind.ATTRIBUTE and parameter.name not in told
    )
    lies = call.operand_names, call.turned
    return call.op, *lies, tuple(tensor.dtype for tensor in call.tensors), tuple(_axes(call)), attributes


@call_cache(None)
def _kind_of(key: str) -> tuple[Any, ...] | None:
    """The kind of a measured call; None where its key cannot be read."""
    found = read_key(key)
    return None if found is None else _kind(found[0])


_TOLD_BY_INDICES = ("dim", "keepdim", "normalized_shape", "cudnn_enable")


@call_cache(None)
def _axes(call: Call) -> dict[Any, int]:
    """The sizes of a call by the role of its indices: those that stand in the same tensors in the same way are one.

    So rows are rows, whether a batch has them as (32, 128) or as 4096.

    >>> import torch
    >>> from conjoin.ops import TensorType
    >>> x, w = TensorType((32, 128, 64), torch.float32), TensorType((256, 64), torch.float32)
    >>> list(_axes(Call("linear", (x, w, None))).values())
    [4096, 64, 256]
    """
    spec = spec_for(call)
    if spec is None:
        return {(i, k): size for i, tensor in enumerate(call.tensors) for k, size in enumerate(tensor.shape)}
    space = space_of(spec, call)
    accesses = (*space.notation.operands, *space.notation.outputs)
    found: dict[Any, int] = {}
    for index, size in space.sizes.items():
        role = index in space.notation.whole, *(_place(access, index) for access in accesses)
        found[role] = found.get(role, 1) * size
    return found


def _place(access: Access, index: str) -> tuple[str, bool] | None:
    """How an index stands in a tensor, and whether that is the last dim: the one that lies closest in memory."""
    for i, dim in enumerate(access.dims):
        if index in Access((dim,)).indices():
            return type(dim).__name__, i == len(access.dims) - 1
    return None


def _sketch(value: Any) -> Any:
    """An attribute as far as it matters for speed: of a probability or a scale, whether it is 0."""
    return ("float", value == 0) if isinstance(value, float) else value
