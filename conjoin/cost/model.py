"""`CostModel`: seconds of operators, optimizer steps and copies on a device, each with its source.

A number is measured where the very same call was (TASO, section 2.6: each configuration once), interpolated where calls
of the same kind and near sizes were (`interpolation.py`), else estimated by the roofline (`roofline.py`) and by what
measured calls of like classes reach of it (`curves.py`). A GPU that nobody measured takes what is known of the nearest
one that somebody did: the shares of its own rates that calls reach, and the host's times. It relies on what FlexFlow's
simulator assumes (section 3.4, A1): that seconds depend on sizes, not on values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch

from conjoin.cost.device_costs import DeviceCosts, OperatorCost
from conjoin.cost.measurement import Measurement, Outcome
from conjoin.cost.medians import fit_efficiencies, join_fits
from conjoin.cost.nearest_gpu import Basis, borrow
from conjoin.cost.profile import Profile, merge_outcomes, shipped_profiles
from conjoin.cost.seconds import NO_SECONDS, Seconds
from conjoin.cost.store import MeasurementStore
from conjoin.cost.transfers import copy_seconds, update_seconds
from conjoin.machine import DeviceType, preset_name
from conjoin.ops import Call, TensorType

_FITTED = 20
"""Measurements from which a store's own efficiencies are worth more than a profile's, of what they are of."""


class CostModel:
    """Seconds on any device type, from stores (the later the firmer), then profiles, then the device's peaks.

    >>> device = DeviceType("one", "cpu", 2**34, 1e10, (("float32", 1e11),))
    >>> x = TensorType((1000, 1000), torch.float32)
    >>> CostModel(profiles=()).operator(Call("mm", (x, x)), (0, 1), device).forward.source
    <Source.ESTIMATED: 'estimated'>
    """

    def __init__(self, stores: Sequence[MeasurementStore] = (), profiles: Sequence[Profile] | None = None) -> None:
        self._stores = tuple(stores)
        self._profiles = shipped_profiles() if profiles is None else tuple(profiles)
        self._devices: dict[int, DeviceCosts] = {}
        """By the identity of the device type: comparing two takes longer than an answer."""
        self._asked: list[DeviceType] = []
        """Those types, kept alive: no other has the identity of one."""
        self._tf32 = False
        self._in_tf32: CostModel | None = None

    def in_tf32(self) -> CostModel:
        """The same where matrix products of float32 are rounded to TF32: estimated, as measurements are in float32.

        >>> device = DeviceType("one", "cuda", 2**34, 1e12, (("float32", 1e13), ("tfloat32", 8e13)))
        >>> x = TensorType((4096, 4096), torch.float32)
        >>> both = CostModel(profiles=()), CostModel(profiles=()).in_tf32()
        >>> plain, fast = (costs.operator(Call("mm", (x, x)), (), device).forward.value for costs in both)
        >>> round(plain / fast, 1)
        8.0
        """
        if self._in_tf32 is None:
            made = self._in_tf32 = CostModel(self._stores, self._profiles)
            made._tf32, made._in_tf32 = True, made
        return self._in_tf32

    def operator(self, call: Call, needs: tuple[int, ...], device: DeviceType) -> OperatorCost:
        """Seconds of a call on local tensors, without layouts, whose operands at `needs` get a gradient."""
        costs = self._devices.get(id(device)) or self._open(device)
        known = costs.known.get((call, needs))
        return known if known is not None else costs.find(call, needs)

    def launch(self, device: DeviceType) -> float:
        """Seconds of the host to launch a collective on devices of a type."""
        return (self._devices.get(id(device)) or self._open(device)).launch

    def update(self, parameters: Sequence[TensorType], optimizer: str, device: DeviceType) -> Seconds:
        """Seconds of one optimizer step over these local parameters; see `OPTIMIZERS` for the names."""
        costs = self._devices.get(id(device)) or self._open(device)
        return update_seconds(parameters, optimizer, costs)

    def copy(self, num_bytes: int, device: DeviceType) -> Seconds:
        """Seconds to copy so many bytes from pinned host memory to the device, or back; none where the two are one."""
        if device.kind == "cpu":
            return NO_SECONDS
        return copy_seconds(num_bytes, self._devices.get(id(device)) or self._open(device))

    def _open(self, device: DeviceType) -> DeviceCosts:
        """All that stores and profiles know of a device."""
        of_any_torch = [store.outcomes(device.name) for store in self._stores]
        of_this_torch = [store.outcomes(device.name, torch.__version__) for store in self._stores]
        own = _measured(*of_any_torch, *of_this_torch)
        if own or self._profiles is not shipped_profiles():
            costs = _known_of(device, self._profiles, own, tf32=self._tf32)
        else:
            costs = _shipped(device, self._tf32)
        self._asked.append(device)
        self._devices[id(device)] = costs
        return costs


@lru_cache(32)
def _shipped(device: DeviceType, tf32: bool) -> DeviceCosts:
    """What is known of a device where nobody has measured: every model of a process asks for the same calls again."""
    return _known_of(device, shipped_profiles(), {}, tf32=tf32)


def _known_of(
    device: DeviceType, profiles: Sequence[Profile], own: Mapping[str, Measurement], *, tf32: bool
) -> DeviceCosts:
    """All that profiles and a user's own measurements tell of a device."""
    names = {device.name, preset_name(device)}
    found = [profile for profile in profiles if profile.device in names]
    every = _measured(*(profile.outcomes for profile in found), own.values())
    basis = Basis(found[-1].fit) if found else borrow(device, {p.device: p.fit for p in profiles})
    if len(own) >= _FITTED and not device.efficiency:
        fit = fit_efficiencies(own.values(), device)
        basis = Basis(join_fits(basis.fit, fit) if basis.fit and device.kind == "cuda" else fit)
    return DeviceCosts(device, every, basis, tf32=tf32)


def _measured(*sources: Iterable[Outcome]) -> dict[str, Measurement]:
    return {key: found for key, found in merge_outcomes(*sources).items() if isinstance(found, Measurement)}
