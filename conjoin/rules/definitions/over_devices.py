"""The parallelization operators: what each device along a mesh axis has of a tensor.

In `conjoin.ops` they are identities, since a value does not change with where it lies; rules are about where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

from conjoin.rules.definitions.calls import Call, Devices, Index, Tensor
from conjoin.rules.definitions.sums import Sum, equal_to


def partition(call: Call) -> Tensor:
    """Each device has a piece: which one is the slow digit of the dim."""
    (x,) = call.args
    place, axis = _place(call, x), str(call.param("mesh"))
    if x.dims[place].find().sum and call.named[axis].find().known == 2:
        return _partition_halves(call, x, place, axis)
    piece = call.dims.divide(x.dims[place], call.named[axis])

    def at(index: Index, devices: Devices) -> Sum:
        return x.at(_put(index, place, (devices[axis], *index[place])), _without(devices, axis))

    return Tensor(_put(x.dims, place, piece), at)


def _partition_halves(call: Call, x: Tensor, place: int, axis: str) -> Tensor:
    """A concatenation of two parts of one size over two devices: each gets one of them."""
    halves = x.dims[place].find().sum
    assert halves is not None
    call.dims.assume_equal(*halves)

    def at(index: Index, devices: Devices) -> Sum:
        (position,) = index[place]
        others = _without(devices, axis)
        second = x.at(_put(index, place, (position + call.dims.size(halves[0]),)), others)
        first = x.at(_put(index, place, (position,)), others)
        return first.under(equal_to(devices[axis], 0)) + second.under(equal_to(devices[axis], 1))

    return Tensor(_put(x.dims, place, halves[0]), at)


def combine(call: Call) -> Tensor:
    """All pieces, one after the other."""
    (x,) = call.args
    place, axis = _place(call, x), str(call.param("mesh"))
    whole = call.dims.times(call.named[axis], x.dims[place])

    def at(index: Index, devices: Devices) -> Sum:
        device, *rest = index[place]
        return x.at(_put(index, place, tuple(rest)), {**devices, axis: device})

    return Tensor(_put(x.dims, place, whole), at)


def replicate(call: Call) -> Tensor:
    """The same on every device."""
    (x,) = call.args
    axis = str(call.param("mesh"))
    return Tensor(x.dims, lambda index, devices: x.at(index, _without(devices, axis)))


def reduce(call: Call) -> Tensor:
    """Summed over the devices."""
    (x,) = call.args
    axis = str(call.param("mesh"))

    def at(index: Index, devices: Devices) -> Sum:
        return call.over(call.named[axis], lambda d: x.at(index, {**devices, axis: d[0]}))

    return Tensor(x.dims, at)


def _place(call: Call, tensor: Tensor) -> int:
    """The position of the dim that the parameter `axis` means; ranks are settled before."""
    return int(call.param("place")) % max(len(tensor.dims), 1)


def _put(items: Sequence, place: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:place], item, *items[place + 1 :])


def _without(devices: Devices, axis: str) -> Devices:
    return {name: device for name, device in devices.items() if name != axis}
