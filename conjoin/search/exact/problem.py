"""A training step as variables and tables: which choice of every operator, which storage of every parameter.

Variables are the operators, the parameters, and a *hub* for every tensor that several operators read: it stands for the
layout to which the tensor is brought once for all of them. Tables are the seconds of operators, of storing (update and
memory) and of reshards; see `elimination.py` for what is done with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from conjoin.ir import Choice, Leaf, LeafKind, Value, choose
from conjoin.machine import Mesh
from conjoin.ops import Copies, Layout, Partial, Split, TensorType, make_layout, placement_on
from conjoin.search.exact.choices import Choices, OperatorSeconds, Task, group_axes, make_choices
from conjoin.search.exact.dominance import Change, undominated
from conjoin.search.exact.elimination import Solution, solve
from conjoin.search.exact.layout_codes import code_on, layout_of
from conjoin.search.exact.reshard_seconds import Array, ReshardSeconds, excess, held_share
from conjoin.search.exact.sharing import MANY, Rows, Shared, best_sources, share, shared_excess, sources_as_used
from conjoin.search.exact.storage import Carried, Storages, goes_in_bundle, latency_share, make_storages
from conjoin.search.exact.tables import Factor, Tables
from conjoin.search.exact.units import Units
from conjoin.sim import Layouts, Operator, Skeleton

_FEW = 64
"""Choices up to which all are considered, also near a given solution."""


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


Made = tuple[tuple[int, int], ...]
"""Outputs of an operator that are to be made in some layout, each with its number."""


class Impossible(Exception):
    """On these units nothing keeps to the fixed layouts."""


class _Source(Enum):
    """Where an operand comes from: another operator, a parameter, or what is the same on every device."""

    MADE = "made"
    TRAINED = "trained"
    FROZEN = "frozen"
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Kind:
    """What operators must share to have the same choices and tables."""

    task: Task
    sources: tuple[_Source, ...]
    results: tuple[int, ...]
    """Outputs that have to come out whole."""
    passed: tuple[bool, ...]
    """Through which outputs a gradient comes."""
    shared: tuple[bool, ...]
    """Which operands are parameters that others read too."""
    _hash: int = field(init=False, compare=False, repr=False)
    """Worked out once: kinds are asked for all the time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.task, self.sources, self.results, self.passed, self.shared)))

    def __hash__(self) -> int:
        return self._hash


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
    _excess: dict[tuple[int, int, bool, bool], Array] = field(default_factory=dict)

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

    def between(self, type: TensorType, with_gradient: bool) -> Array:
        """Seconds of the reshards of an activation."""
        return self.reshards.table(len(type.shape), type.bytes, with_gradient)

    def excess(self, type: TensorType, with_gradient: bool, is_read: bool) -> Array:
        """How much more it can cost to read, or to have made, an activation in one layout than in another."""
        key = len(type.shape), type.bytes, with_gradient, is_read
        if key not in self._excess:
            table = self.between(type, with_gradient)
            self._excess[key] = excess(table if is_read else table.T)
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
        bundled = goes_in_bundle(rank, len(self.units))[rows] & storages.even[:, None]
        held = type.bytes * held_share(rank, self.degrees)[None]
        return Carried(both, light, once, bundled, held, storages.regathered[:, None]).seconds(
            objective.overlap, objective.seconds_per_byte
        )

    def storages(self, type: TensorType, trained: bool, objective: Objective, only: int | None = None) -> Storages:
        """Every way to store a parameter, or those in one layout."""
        key = type, trained, objective, only
        if key not in self._storages:
            copies, update = (objective.copies, objective.update_seconds) if trained else (1, 0.0)
            self._storages[key] = make_storages(type, self.units, copies, update, objective.seconds_per_byte, only)
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
            if with_dominated:
                kept = np.arange(len(found))
            else:
                kept = undominated(seconds, self._tensors(kind, found, objective))
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

    def alone(self, kind: Kind, choices: Choices, objective: Objective) -> Array:
        """Bringing out results, and the memory of what is made and kept for the backward pass."""
        seconds = np.zeros(len(choices))
        for i in kind.results:
            seconds += self.between(kind.task.types[i], False)[choices.outputs[i], 0]
        if objective.seconds_per_byte and kind.task.needs:
            for i, type in enumerate(kind.task.types):
                held = held_share(len(type.shape), self.degrees)[choices.outputs[i]] * type.bytes
                seconds += objective.seconds_per_byte * held
        return seconds

    def _tensors(self, kind: Kind, choices: Choices, objective: Objective) -> list[Change]:
        found: list[Change] = []
        for i, (type, source) in enumerate(zip(kind.task.call.tensors, kind.sources, strict=True)):
            back = i in kind.task.needs
            if source is _Source.MADE:
                found.append((choices.operands[i], self.excess(type, back, True)))
            elif source is not _Source.GIVEN:
                more = self._stored_excess(type, source is _Source.TRAINED, back, objective, kind.shared[i])
                found.append((choices.operands[i], more))
        for i, type in enumerate(kind.task.types):
            found.append((choices.outputs[i], self.excess(type, kind.passed[i], False)))
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


class Problem:
    """The variables and tables of a training step on units, for one objective."""

    def __init__(
        self,
        skeleton: Skeleton,
        space: Space,
        objective: Objective,
        near: Layouts | None = None,
        *,
        with_dominated: bool = False,
        fixed: Mapping[int, Layout] | None = None,
    ) -> None:
        """`near` narrows choices to those like given layouts; `fixed` gives tensors a layout, by their numbers."""
        self.skeleton, self.space, self.objective = skeleton, space, objective
        self.fixed = fixed or {}
        self._codes = self._code_fixed()
        self.num_operators = len(skeleton.operators)
        kinds = kinds_of(skeleton)
        self.kinds: list[Hashable] = [(kind, with_dominated) for kind in kinds]
        self.choices = [space.pruned(kind, objective, with_dominated) for kind in kinds]
        if near is not None:
            given = [self._rules_of(place, near.choices[place]) for place in range(self.num_operators)]
            self.kinds = list(zip(kinds, given, strict=True))
            self.choices = [space.near(kind, objective, r) for kind, r in zip(kinds, given, strict=True)]
        self._keep_to_fixed(kinds, with_dominated)
        self.stored = [
            i for i, root in enumerate(skeleton.roots) if root.leaf is not None and is_stored(root.leaf.kind)
        ]
        self.hubs = [i for i, root in enumerate(skeleton.roots) if root.maker >= 0 and len(skeleton.readers[i]) > 1]
        self.variable = {root: self.num_operators + n for n, root in enumerate([*self.stored, *self.hubs])}
        self.shared = {root: self._bring(root, with_dominated) for root in self.stored if is_shared(skeleton, root)}
        self.sizes = [len(found) for found in self.choices]
        self.factors: list[Factor] = []
        for place in range(self.num_operators):
            self._put((place,), ("unary", self.kinds[place], objective), self.choices[place].seconds)
        for root in self.stored:
            self._store(root)
        for root in self.hubs:
            self._share(root)
        for root in range(len(skeleton.roots)):
            if root not in self.variable and skeleton.roots[root].maker >= 0 and skeleton.readers[root]:
                self._connect(root)
            elif root not in self.variable and root in self._codes:
                self._give(root)

    def _code_fixed(self) -> dict[int, int]:
        """The numbers of the fixed layouts; Impossible where these units cannot tell them."""
        found = {}
        for root, layout in self.fixed.items():
            code = code_on(layout, len(self.skeleton.roots[root].type.shape), self.space.units)
            if code is None:
                raise Impossible
            found[root] = code
        return found

    def _keep_to_fixed(self, kinds: Sequence[Kind], with_dominated: bool) -> None:
        """Leave operators the choices that make their outputs in the fixed layouts; Impossible where there is none.

        Where an input is fixed, choices are told apart by how they read it, which dominance does not know.
        """
        given = {root for root in self._codes if _is_given(self.skeleton.roots[root].leaf)}
        for place, operator in enumerate(self.skeleton.operators):
            made = tuple((i, self._codes[root]) for i, root in enumerate(operator.makes) if root in self._codes)
            reads = not given.isdisjoint(operator.reads)
            if made or reads:
                self.kinds[place] = kinds[place], with_dominated or reads, made
                self.choices[place] = self.space.pruned(kinds[place], self.objective, with_dominated or reads, made)
            if not len(self.choices[place]):
                raise Impossible

    def solve(self) -> Solution:
        """The least sum."""
        return solve(self.sizes, self.factors, self.space.tables)

    def _put(self, variables: tuple[int, ...], name: Hashable, values: Array) -> None:
        self.factors.append(Factor(variables, self.space.tables.named(name, values)))

    def storages(self, root: int) -> Storages:
        """The ways to store a parameter, and to bring it to a layout where several read it."""
        shared = self.shared.get(root)
        return shared.storages if shared is not None else self.space.storages(*self._parameter(root))

    def _parameter(self, root: int) -> tuple[TensorType, bool, Objective, int | None]:
        leaf = self.skeleton.roots[root].leaf
        assert leaf is not None
        return self.skeleton.roots[root].type, leaf.trainable, self.objective, self._codes.get(root)

    def _bring(self, root: int, with_dominated: bool) -> Shared:
        """The ways to bring a parameter to a layout in which it is used: once for all who use it so."""
        readers, parameter = self.skeleton.readers[root], self._parameter(root)
        used = np.unique(np.concatenate([self.choices[place].operands[operand] for place, operand in readers]))
        type, trained, objective, only = parameter
        back = any(operand in self.skeleton.operators[place].needs for place, operand in readers)
        few = with_dominated or len(readers) <= MANY
        sources = self.space.sources(*parameter)[: 2 if few else 1]
        reading = self.space.reading(type, trained, back, objective, only)
        return share(self.space.storages(*parameter), reading, used, sources, plain=few)

    def _store(self, root: int) -> None:
        storages, variable, shared = self.storages(root), self.variable[root], self.shared.get(root)
        type, trained, objective, only = parameter = self._parameter(root)
        ways = None if shared is None else (shared.rows.tobytes(), shared.brought.tobytes())
        self.sizes.append(len(storages.seconds))
        self._put((variable,), ("storing", *parameter, ways, storages.seconds.tobytes()), storages.seconds)
        for place, operand in self.skeleton.readers[root]:
            back = operand in self.skeleton.operators[place].needs
            name = "reading", *parameter, ways, back, self.kinds[place], operand
            table = self.space.reading(type, trained, back, objective, only)
            codes = self.choices[place].operands[operand]
            self._put((variable, place), name, table[:, codes] if shared is None else shared.read(table, codes))

    def _give(self, root: int) -> None:
        """What is given in a fixed layout is brought to whoever reads it."""
        type, code = self.skeleton.roots[root].type, self._codes[root]
        for place, operand in self.skeleton.readers[root]:
            name = "given", type, code, self.kinds[place], operand, self.objective
            self._put((place,), name, self.space.between(type, False)[code, self.choices[place].operands[operand]])

    def _share(self, root: int) -> None:
        """The hub of a tensor: brought there once, and from there to everyone who reads it."""
        readers, type, variable = self.skeleton.readers[root], self.skeleton.roots[root].type, self.variable[root]
        maker, output = self._maker(root)
        made = self.choices[maker].outputs[output]
        codes = np.unique(np.concatenate([made, *(self.choices[p].operands[i] for p, i in readers)]))
        self.sizes.append(len(codes))
        back = any(i in self.skeleton.operators[p].needs for p, i in readers)
        name = type, codes.tobytes()
        self._put((maker, variable), ("to hub", *name, back, self.kinds[maker], output, self.objective),
                  self.space.between(type, back)[made[:, None], codes[None]])  # fmt: skip
        for place, operand in readers:
            needs = operand in self.skeleton.operators[place].needs
            values = self.space.between(type, needs)[codes[:, None], self.choices[place].operands[operand][None]]
            self._put((variable, place), ("from hub", *name, needs, self.kinds[place], operand, self.objective), values)

    def _connect(self, root: int) -> None:
        (place, operand), type = self.skeleton.readers[root][0], self.skeleton.roots[root].type
        maker, output = self._maker(root)
        back = operand in self.skeleton.operators[place].needs
        name = "edge", type, back, self.kinds[maker], output, self.kinds[place], operand, self.objective
        table = self.space.tables.find(name)
        rows, columns = self.choices[maker].outputs[output], self.choices[place].operands[operand]
        values = table.values if table else self.space.between(type, back)[rows[:, None], columns[None]]
        self._put((maker, place), name, values)

    def _maker(self, root: int) -> tuple[int, int]:
        maker = self.skeleton.roots[root].maker
        return maker, self.skeleton.operators[maker].makes.index(root)

    def layouts(self, solution: Solution) -> tuple[Layouts, frozenset[str]]:
        """The layouts of a solution, and the parameters that are gathered again for the backward pass."""
        skeleton, units = self.skeleton, self.space.units
        choices = [self._choice(place, solution.values[place]) for place in range(self.num_operators)]
        leaves: dict[int, Layout] = {}
        regathered: set[str] = set()
        for number, root in enumerate(skeleton.roots):
            if root.leaf is None:
                continue
            wanted = [choices[place].operands[operand] for place, operand in skeleton.readers[number]]
            if number not in self.variable:
                given = given_layout(wanted) if root.leaf.kind is LeafKind.INPUT else ()
                leaves[number] = self.fixed.get(number, given)
                continue
            storages, value = self.storages(number), solution.values[self.variable[number]]
            first = [axis for layout in wanted[:1] for axis, place in layout if isinstance(place, Split)]
            stored = layout_of(int(storages.codes[value]), len(root.type.shape), units, first)
            leaves[number] = self.fixed.get(number, stored)
            if storages.regathered[value]:
                regathered.add(root.leaf.name)
        return Layouts(leaves, tuple(choices), result_layouts(skeleton, choices)), frozenset(regathered)

    def _rules_of(self, place: int, choice: Choice) -> tuple[int, ...]:
        """The rule that a choice follows on each unit: that of its first axis."""
        rules = self.choices[place].rules
        found = []
        for unit in self.space.units:
            axis = unit.axes[0]
            operands = tuple(placement_on(layout, axis) for layout in choice.operands)
            outputs = tuple(placement_on(layout, axis) for layout in choice.outputs)
            same = (i for i, rule in enumerate(rules) if rule.operands == operands and rule.outputs == outputs)
            found.append(next(same, 0))
        return tuple(found)

    def _choice(self, place: int, value: int) -> Choice:
        found = self.choices[place]
        picks = zip(self.space.units, found.picks[value], strict=True)
        rules = {axis: found.rules[int(pick)] for unit, pick in picks for axis in unit.axes}
        fixed = [self.fixed[root] for root in self.skeleton.operators[place].makes if root in self.fixed]
        order = [axis for layout in fixed for axis, _ in layout]  # in which they split one dim
        return choose({axis: rules[axis] for axis in (*dict.fromkeys(order), *rules)})


def _kind_of(skeleton: Skeleton, operator: Operator, of_weights: bool, whole: Set[int]) -> Kind:
    roots = [skeleton.roots[root] for root in operator.reads]
    sources = tuple(_source_of(root.leaf) for root in roots)
    types = tuple(type.laid_out(()) for type in operator.node.types)
    task = Task(operator.call, types, operator.needs, tuple(root.leaf is not None for root in roots), of_weights)
    results = tuple(i for i, root in enumerate(operator.makes) if root in whole)
    passed = tuple(
        any(operand in skeleton.operators[place].needs for place, operand in skeleton.readers[root])
        for root in operator.makes
    )
    return Kind(task, sources, results, passed, tuple(is_shared(skeleton, root) for root in operator.reads))


def kinds_of(skeleton: Skeleton) -> list[Kind]:
    """The kind of every operator."""
    fed = {i for i, root in enumerate(skeleton.roots) if root.leaf is not None and root.leaf.kind is LeafKind.INPUT}
    whole = {root for root, kept in zip(skeleton.results, _kept_split(skeleton), strict=True) if not kept}
    once: dict[Kind, Kind] = {}  # what is the same object need not be compared
    kinds = []
    for operator in skeleton.operators:
        of_inputs = not fed.isdisjoint(operator.reads)
        fed.update(operator.makes if of_inputs else ())
        kind = _kind_of(skeleton, operator, not of_inputs, whole)
        kinds.append(once.setdefault(kind, kind))
    return kinds


def _source_of(leaf: Leaf | None) -> _Source:
    if leaf is None:
        return _Source.MADE
    if not is_stored(leaf.kind):
        return _Source.GIVEN
    return _Source.TRAINED if leaf.trainable else _Source.FROZEN


def _is_given(leaf: Leaf | None) -> bool:
    return leaf is not None and not is_stored(leaf.kind)


def is_stored(kind: LeafKind) -> bool:
    """Whether it is kept from step to step in a layout that is searched."""
    return kind is LeafKind.PARAMETER


def is_shared(skeleton: Skeleton, root: int) -> bool:
    """Whether it is a parameter that several operators read, or one more than once."""
    leaf = skeleton.roots[root].leaf
    return leaf is not None and is_stored(leaf.kind) and len(skeleton.readers[root]) > 1


def given_layout(wanted: Sequence[Layout]) -> Layout:
    """The layout of an input: as it is read where all read it alike, but for copies; else the same everywhere."""
    kept = {make_layout((a, p) for a, p in layout if not isinstance(p, Copies | Partial)) for layout in wanted}
    return kept.pop() if len(kept) == 1 else ()


def result_layouts(skeleton: Skeleton, choices: Sequence[Choice]) -> tuple[Layout, ...]:
    """The loss and new values of buffers come out whole, other outputs as they are made, but for copies and sums."""
    found: list[Layout] = []
    for root, kept in zip(skeleton.results, _kept_split(skeleton), strict=True):
        maker = skeleton.roots[root].maker
        made = choices[maker].outputs[skeleton.operators[maker].makes.index(root)] if kept else ()
        found.append(make_layout((a, p) for a, p in made if not isinstance(p, Copies | Partial)))
    return tuple(found)


def _kept_split(skeleton: Skeleton) -> list[bool]:
    """Which results may stay split: outputs of a model with a loss, but for the loss itself."""
    graph = skeleton.graph
    outputs = [i for i, value in enumerate(graph.outputs) if isinstance(value, Value)]
    of_outputs = [graph.loss is not None and i != graph.loss for i in outputs]
    makers = [skeleton.roots[root].maker for root in skeleton.results]
    return [
        kept and maker >= 0 for kept, maker in zip([*of_outputs, *(False for _ in graph.updates)], makers, strict=True)
    ]
