"""All tables on some units: choices of kinds of operators, storages of parameters, reshards between them.

They are made once for all problems on these units, whatever graph or objective they are about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray

from conjoin.ir import Segment
from conjoin.machine import Machine, Mesh
from conjoin.ops import TensorType
from conjoin.search.exact.choices import Choices, OperatorSeconds, Task, forward_seconds, group_axes, make_choices
from conjoin.search.exact.dominance import Change, looked_up, undominated
from conjoin.search.exact.kinds import Kind, Source
from conjoin.search.exact.layout_codes import WHOLE, Codes, S, all_digits, join
from conjoin.search.exact.recompute import Recompute, find_recompute
from conjoin.search.exact.reshard_seconds import Array, Excess, ReshardSeconds, excess, held_share
from conjoin.search.exact.shared_parameters import Rows, best_sources, shared_excess, sources_as_used
from conjoin.search.exact.storage import Carried, Storages, goes_in_bundle, latency_share, make_storages
from conjoin.search.exact.tables import Tables
from conjoin.search.exact.units import Units
from conjoin.sim import OPTIMIZER_COPIES, Prices, Skeleton

_FEW = 64
"""Choices up to which all are considered, also near a given solution."""
LEAST_PRICE = 1e-21
"""Of a byte: counts for nothing, but only where there is one are parameters gathered twice and blocks run again."""
OVERLAPS = (0.6, 0.0)
"""Parts of the parameters' communication that are taken to be hidden; the timeline then tells what really is."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What is counted of what the tables only know in part."""

    overlap: float = 0.0
    """Which part of the parameters' communication is hidden behind computing."""
    seconds_per_byte: float = 0.0
    """What a byte of memory is worth."""
    copies: int = 4
    """Tensors stored for a parameter: itself, its gradient, what the optimizer remembers."""
    update_seconds: float = 0.0
    """Of the optimizer, for a stored byte."""
    device: str = "cuda"
    """The kind of devices, which decides what autograd keeps."""
    is_stage: bool = False
    """Whether it is a stage of a model that is looked at: what it makes may stay as it is."""

    blocks: tuple[Segment, ...] | None = None
    """What may be run again, where the graph itself does not tell its blocks."""
    host_seconds_per_byte: float = inf
    """Of bringing what the optimizer remembers from the host and back; infinite where it does not lie there."""

    @property
    def has_states_on_host(self) -> bool:
        """Whether what the optimizer remembers is worth more on a device than it takes to bring it there."""
        return self.seconds_per_byte > self.host_seconds_per_byte

    def storing_seconds(self, is_trained: bool) -> float:
        """What is stored for a byte of a parameter is worth: with its gradient, and what the optimizer remembers on the
        device or on the host, whichever is less."""
        price = self.seconds_per_byte
        return 2 * price + (self.copies - 2) * min(price, self.host_seconds_per_byte) if is_trained else price

    def recompute(self, skeleton: Skeleton) -> Recompute | None:
        """What is held of a step for its backward pass, and may be run again, where memory is worth anything."""
        return find_recompute(skeleton, self.device, self.blocks) if self.seconds_per_byte else None


def host_seconds_per_byte(machine: Machine, prices: Prices) -> float:
    """Of bringing a byte from the host while another goes back; infinite where the host's memory is the device's."""
    many = 1 << 26
    return prices.host_link().seconds(many).value / many if machine.device == "cuda" else inf


def objective_on(
    machine: Machine, prices: Prices, optimizer: str, overlap: float, seconds_per_byte: float
) -> Objective:
    """What is counted on the devices of a machine."""
    many = TensorType((1 << 26,), torch.float32)
    update = prices.update([many], 0).value / many.bytes
    return Objective(overlap, seconds_per_byte, 2 + OPTIMIZER_COPIES[optimizer], update, machine.device)


Made = tuple[tuple[int, int], ...]
"""Outputs of an operator that are to be made in some layout, each with its number."""


@dataclass
class Space:
    """All tables on some units; the same for every objective but for what it weighs."""

    units: Units
    mesh: Mesh
    reshards: ReshardSeconds
    operators: OperatorSeconds
    tables: Tables = field(default_factory=Tables)
    _choices: dict[tuple[Task, bool], Choices] = field(default_factory=dict)
    _pruned: dict[tuple[Kind, Objective, bool, Made], Choices] = field(default_factory=dict)
    _near: dict[tuple[Kind, Objective, tuple[int, ...]], Choices] = field(default_factory=dict)
    _storages: dict[tuple[TensorType, bool, Objective, int | None], Storages] = field(default_factory=dict)
    _readings: dict[tuple[TensorType, bool, bool, Objective, int | None], Array] = field(default_factory=dict)
    _stored: dict[tuple[TensorType, bool, bool, Objective, bool], Array] = field(default_factory=dict)
    _excess: dict[tuple[int, int, bool, bool, bool], Excess] = field(default_factory=dict)

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(unit.degree for unit in self.units)

    def choices(self, task: Task, every_rule: bool = False) -> Choices:
        """Every legal choice of a task, but for rules that cannot pay unless every rule is wanted."""
        key = task, every_rule
        if key not in self._choices:
            groups = group_axes(self.units, self.mesh)
            self._choices[key] = make_choices(task, self.units, groups, self.operators, every_rule=every_rule)
        return self._choices[key]

    def between(self, type: TensorType, with_gradient: bool, again: bool = False) -> Array:
        """Seconds of the reshards of an activation, perhaps once more for the backward pass."""
        found = self.reshards.table(len(type.shape), type.bytes, with_gradient)
        return found + self.reshards.table(len(type.shape), type.bytes, False) if again else found

    def excess(self, type: TensorType, with_gradient: bool, is_read: bool, again: bool = False) -> Excess:
        """How much more it can cost to read, or to have made, an activation in one layout than in another."""
        key = len(type.shape), type.bytes, with_gradient, is_read, again
        if key not in self._excess:
            table = self.between(type, with_gradient, again)
            self._excess[key] = Excess(table if is_read else table.T)
        return self._excess[key]

    def reading(
        self, type: TensorType, trained: bool, back: bool, objective: Objective, only: int | None = None
    ) -> Array:
        """[storage, layout of use]: seconds in which a parameter comes to a reader, and its gradient back."""
        key = type, trained, back, objective, only
        if key not in self._readings:
            storages = self.storages(type, trained, objective, only)
            self._readings[key] = self._find_reading(type, storages, back, objective)
        return self._readings[key]

    def _find_reading(self, type: TensorType, storages: Storages, back: bool, objective: Objective) -> Array:
        rank, rows = len(type.shape), storages.codes
        both, once = (self.reshards.table(rank, type.bytes, b, nested=False)[rows] for b in (back, False))
        light = self.reshards.table(rank, type.bytes, back, nested=False, share=latency_share(type))[rows]
        bundled = goes_in_bundle(rank, len(self.units))[rows]
        held = type.bytes * held_share(rank, self.degrees)[None]
        return Carried(both, light, once, bundled, held, storages.regathered[:, None]).seconds(
            objective.overlap, objective.seconds_per_byte
        )

    def storages(self, type: TensorType, trained: bool, objective: Objective, only: int | None = None) -> Storages:
        """Every way to store a parameter, or those in one layout."""
        key = type, trained, objective, only
        if key not in self._storages:
            update = objective.update_seconds if trained else 0.0
            self._storages[key] = make_storages(type, self.units, objective.storing_seconds(trained), update, only)
        return self._storages[key]

    def _making(self, task: Task, made: Made) -> Choices:
        """The choices of a task that make outputs in given layouts, those among them which seldom pay."""
        found = self.choices(task, every_rule=True)
        return found.only(np.logical_and.reduce([found.outputs[i] == code for i, code in made]))

    def pruned(self, kind: Kind, objective: Objective, with_dominated: bool = False, made: Made = ()) -> Choices:
        """The choices of an operator that are not dominated; their seconds count what depends on them alone."""
        key = kind, objective, with_dominated, made
        if key not in self._pruned:
            found = self._making(kind.task, made) if made else self.choices(kind.task)
            seconds = found.seconds + self.alone(kind, found, objective)
            kept = np.arange(len(found)) if with_dominated else self._undominated(kind, found, objective)
            part = found.only(kept)
            self._pruned[key] = Choices(part.rules, part.picks, seconds[kept], part.operands, part.outputs)
        return self._pruned[key]

    def near(self, kind: Kind, objective: Objective, rules: tuple[int, ...]) -> Choices:
        """Those of them that follow the given rule on some unit at least."""
        key = kind, objective, rules
        if key not in self._near:
            found = self.pruned(kind, objective)
            self._near[key] = found.only((found.picks == np.array(rules)).any(axis=1)) if len(found) > _FEW else found
        return self._near[key]

    def _undominated(self, kind: Kind, found: Choices, objective: Objective) -> NDArray[np.int64]:
        """The choices that are not dominated in some mode of the block, whatever the modes of those that read."""
        if len(kind.held) < 2:
            seconds = found.seconds + self.alone(kind, found, objective)
            return undominated(seconds, self._tensors(kind, found, objective))
        kept = [
            undominated(found.seconds + self.alone(kind, found, objective, mode),
                        self._tensors(kind, found, objective, kind.held[mode].again, read_again))
            for mode in range(len(kind.held))
            for read_again in (False, True)
        ]  # fmt: skip
        return np.unique(np.concatenate(kept))

    def alone(self, kind: Kind, choices: Choices, objective: Objective, mode: int = 0) -> Array:
        """Bringing out results, what is held for the backward pass in a mode of the block, and running again."""
        seconds = np.zeros(len(choices))
        for i in kind.results:
            seconds += self.between(kind.task.types[i], False)[choices.outputs[i], 0]
        for i in kind.left:
            codes, rank = choices.outputs[i], len(kind.task.types[i].shape)
            digits = all_digits(rank, len(self.units))[codes]
            seconds += self.between(kind.task.types[i], True)[codes, join(np.where(digits >= S, digits, WHOLE), rank)]
        if not objective.seconds_per_byte or not kind.held:
            return seconds
        held, price = kind.held[mode], objective.seconds_per_byte
        for i in held.operands:
            seconds += price * self._bytes(kind.task.call.tensors[i], choices.operands[i])
        for i in held.outputs:
            seconds += price * self._bytes(kind.task.types[i], choices.outputs[i])
        if held.extra:
            type, codes = kind.task.types[0], choices.outputs[0]
            seconds += price * held.extra * held_share(len(type.shape), self.degrees)[codes]
        return seconds + forward_seconds(kind.task, choices, self.units, self.operators) if held.again else seconds

    def by_mode(self, kind: Kind, choices: Choices, objective: Objective) -> Array:
        """[choice, mode]: the seconds of choices that were pruned, for every mode of the block."""
        each = [self.alone(kind, choices, objective, mode) for mode in range(len(kind.held))]
        return choices.seconds[:, None] + np.stack([other - each[0] for other in each], axis=1)

    def _bytes(self, type: TensorType, codes: Codes) -> Array:
        found: Array = held_share(len(type.shape), self.degrees)[codes] * type.bytes
        return found

    def _tensors(
        self, kind: Kind, choices: Choices, objective: Objective, again: bool = False, read_again: bool = False
    ) -> list[Change]:
        found: list[Change] = []
        for i, (type, source) in enumerate(zip(kind.task.call.tensors, kind.sources, strict=True)):
            back = i in kind.task.needs
            if source is Source.MADE:
                found.append((choices.operands[i], self.excess(type, back, True, again)))
            elif source is not Source.GIVEN:
                more = self._stored_excess(type, source is Source.TRAINED, back, objective, kind.shared[i])
                found.append((choices.operands[i], looked_up(more)))
        for i, type in enumerate(kind.task.types):
            found.append((choices.outputs[i], self.excess(type, kind.passed[i], False, read_again)))
        return found

    def _stored_excess(self, type: TensorType, trained: bool, back: bool, objective: Objective, shared: bool) -> Array:
        key = type, trained, back, objective, shared
        if key not in self._stored:
            table = self.reading(type, trained, back, objective)
            found = excess(table)
            if shared:
                found = shared_excess(found, table, self.sources(type, trained, objective))
            self._stored[key] = found
        return self._stored[key]

    def sources(
        self, type: TensorType, trained: bool, objective: Objective, only: int | None = None
    ) -> tuple[Rows, Rows]:
        """For every layout in which a parameter is used the storage that suits it best, and the one most like it."""
        storages = self.storages(type, trained, objective, only)
        best = best_sources(storages, self.reading(type, trained, trained, objective, only))
        return best, sources_as_used(storages, len(type.shape), len(self.units))
