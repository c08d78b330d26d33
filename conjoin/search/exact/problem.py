"""A training step as variables and tables: which choice of every operator, which storage of every parameter.

Variables are the operators, the parameters, and a *hub* for every tensor that several operators read: it stands for the
layout to which the tensor is brought once for all of them. Where memory counts, every block has one more: what of it is
run again (`recompute.py`). Tables are the seconds of operators, of storing (update and memory) and of reshards; see
`elimination.py` for what is done with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from conjoin.ir import Choice, LeafKind, Segment, choose
from conjoin.ops import Copies, Layout, Partial, Split, TensorType, make_layout, placement_on
from conjoin.search.exact.choices import Choices
from conjoin.search.exact.elimination import Solution, solve
from conjoin.search.exact.kinds import Kind, is_given, is_shared, is_stored, kept_split, kinds_of
from conjoin.search.exact.layout_codes import Codes, all_digits, code_on, layout_of
from conjoin.search.exact.reshard_seconds import Array
from conjoin.search.exact.shared_parameters import MANY, Shared, share
from conjoin.search.exact.space import Objective, Space
from conjoin.search.exact.storage import Storages, pieces_of
from conjoin.search.exact.tables import Factor
from conjoin.search.exact.units import Units
from conjoin.sim import Layouts, Skeleton


class Impossible(Exception):
    """On these units nothing keeps to the fixed layouts."""


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
        self.recompute = objective.recompute(skeleton)
        self.fixed = fixed or {}
        self._made: dict[tuple[int, int], Choice] = {}
        self._codes = self._code_fixed()
        self.num_operators = len(skeleton.operators)
        held = self.recompute.held if self.recompute is not None else None
        kinds = kinds_of(skeleton, held, is_stage=objective.is_stage)
        self._kinds, self._is_near = kinds, near is not None
        self.kinds: list[Hashable] = [(kind, with_dominated) for kind in kinds]
        self.choices = [space.pruned(kind, objective, with_dominated) for kind in kinds]
        if near is not None:
            given = [self._rules_of(position, near.choices[position]) for position in range(self.num_operators)]
            self.kinds = list(zip(kinds, given, strict=True))
            self.choices = [space.near(kind, objective, r) for kind, r in zip(kinds, given, strict=True)]
        self._keep_to_fixed(kinds, with_dominated)
        self.stored = [
            i for i, root in enumerate(skeleton.roots) if root.leaf is not None and is_stored(root.leaf.kind)
        ]
        self.hubs = [i for i, root in enumerate(skeleton.roots) if root.maker >= 0 and len(skeleton.readers[i]) > 1]
        self.arrivals = [i for i in range(len(skeleton.roots)) if objective.is_stage and self._arrives(i)]
        """What comes from another stage, to which its gradient goes back."""
        roots = (*self.stored, *self.hubs, *self.arrivals)
        self.variable = {root: self.num_operators + n for n, root in enumerate(roots)}
        self.shared = {root: self._bring(root, with_dominated) for root in self.stored if is_shared(skeleton, root)}
        self.sizes = [len(found) for found in self.choices]
        first = self.num_operators + len(self.variable)
        blocks = () if self.recompute is None else self.recompute.blocks
        self.modes = {number: first + number for number in range(len(blocks))}
        """By block, the variable that says what of it is run again."""
        self.factors: list[Factor] = []
        for position in range(self.num_operators):
            self._operate(position)
        for root in self.stored:
            self._store(root)
        for root in (*self.hubs, *self.arrivals):
            self._share(root)
        for root in range(len(skeleton.roots)):
            if root not in self.variable and skeleton.roots[root].maker >= 0 and skeleton.readers[root]:
                self._connect(root)
            elif root not in self.variable and root in self._codes:
                self._give(root)
        if self.recompute is not None:
            self.sizes += [len(modes) for modes in self.recompute.modes]

    def _mode(self, position: int) -> int | None:
        """The variable of what is run again of the block that an operator is in."""
        found = None if self.recompute is None else self.recompute.block_of.get(position)
        return None if found is None else self.modes[found]

    def _operate(self, position: int) -> None:
        kind, mode, choices = self._kinds[position], self._mode(position), self.choices[position]
        name = "unary", self.kinds[position], self.objective
        if mode is None:
            self._put((position,), name, choices.seconds)
        else:
            known = self.space.tables.find(name)
            values = known.values if known else self.space.by_mode(kind, choices, self.objective)
            self._put((position, mode), name, values)

    def _pass(self, variables: tuple[int, int], at: int, name: Hashable, type: TensorType, back: bool,
              codes: tuple[Codes, Codes]) -> None:  # fmt: skip
        """A tensor comes from one variable to another, in each of two layouts; again with the operator at a place."""
        known, mode = self.space.tables.find(name), self._mode(at)
        again = [held.again for held in self._kinds[at].held] if mode is not None else [False]
        if known is not None:
            values = known.values
        else:
            each = [self.space.between(type, back, one)[codes[0][:, None], codes[1][None]] for one in again]
            values = np.stack(each, axis=2) if any(again) else each[0]
        self._put((*variables, mode) if mode is not None and any(again) else variables, name, values)

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
        given = {root for root in self._codes if is_given(self.skeleton.roots[root].leaf)}
        for position, operator in enumerate(self.skeleton.operators):
            made = tuple((i, self._codes[root]) for i, root in enumerate(operator.makes) if root in self._codes)
            reads = not given.isdisjoint(operator.reads)
            if made or reads:
                kept = with_dominated or reads
                self.kinds[position] = kinds[position], kept, made
                self.choices[position] = self.space.pruned(kinds[position], self.objective, kept, made)
            if not len(self.choices[position]):
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
        used = np.unique(np.concatenate([self.choices[position].operands[operand] for position, operand in readers]))
        type, trained, objective, only = parameter
        back = any(operand in self.skeleton.operators[position].needs for position, operand in readers)
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
        for position, operand in self.skeleton.readers[root]:
            back = operand in self.skeleton.operators[position].needs
            name = "reading", *parameter, ways, back, self.kinds[position], operand
            table = self.space.reading(type, trained, back, objective, only)
            codes = self.choices[position].operands[operand]
            self._put((variable, position), name, table[:, codes] if shared is None else shared.read(table, codes))

    def _give(self, root: int) -> None:
        """What is given in a fixed layout is brought to whoever reads it."""
        type, code = self.skeleton.roots[root].type, self._codes[root]
        for position, operand in self.skeleton.readers[root]:
            name = "given", type, code, self.kinds[position], operand, self.objective
            codes = self.choices[position].operands[operand]
            self._put((position,), name, self.space.between(type, False)[code, codes])

    def _share(self, root: int) -> None:
        """The hub of a tensor: brought there once, and from there to everyone who reads it."""
        readers, type, variable = self.skeleton.readers[root], self.skeleton.roots[root].type, self.variable[root]
        is_made = self.skeleton.roots[root].maker >= 0
        codes = self._lying(root) if is_made else self._arriving(root)
        self.sizes.append(len(codes))
        back = any(i in self.skeleton.operators[p].needs for p, i in readers)
        name = type, codes.tobytes()
        if is_made:
            maker, output = self._maker(root)
            key: Hashable = "to hub", *name, back, self.kinds[maker], output, self.objective
            self._pass((maker, variable), maker, key, type, back, (self.choices[maker].outputs[output], codes))
        for position, operand in readers:
            needs = operand in self.skeleton.operators[position].needs
            key = "from hub", *name, needs, self.kinds[position], operand, self.objective
            read = self.choices[position].operands[operand]
            self._pass((variable, position), position, key, type, needs, (codes, read))

    def _arrives(self, root: int) -> bool:
        leaf, readers = self.skeleton.roots[root].leaf, self.skeleton.readers[root]
        return is_given(leaf) and any(i in self.skeleton.operators[p].needs for p, i in readers)

    def _arriving(self, root: int) -> Codes:
        """The layouts in which a tensor may come from another stage."""
        type, units = self.skeleton.roots[root].type, self.space.units
        digits = all_digits(len(type.shape), len(units))
        return np.flatnonzero(pieces_of(type, digits, np.array(self.space.degrees))[0])

    def _lying(self, root: int) -> Codes:
        """The layouts of a hub: all in which someone could make or read the tensor.

        Those of dominated choices are among them: what dominates a choice costs no more as long as the tensor comes to
        all others as before. Near given layouts nothing is exact, and few are enough.
        """
        maker, output = self._maker(root)
        read = (self._every(position).operands[operand] for position, operand in self.skeleton.readers[root])
        return np.unique(np.concatenate([self._every(maker).outputs[output], *read]))

    def _every(self, position: int) -> Choices:
        """The choices of an operator with those that are dominated, unless they are narrowed anyway."""
        return self.choices[position] if self._is_near else self.space.choices(self._kinds[position].task)

    def _connect(self, root: int) -> None:
        (position, operand), type = self.skeleton.readers[root][0], self.skeleton.roots[root].type
        maker, output = self._maker(root)
        back = operand in self.skeleton.operators[position].needs
        name = "edge", type, back, self.kinds[maker], output, self.kinds[position], operand, self.objective
        codes = self.choices[maker].outputs[output], self.choices[position].operands[operand]
        self._pass((maker, position), position, name, type, back, codes)

    def _maker(self, root: int) -> tuple[int, int]:
        maker = self.skeleton.roots[root].maker
        return maker, self.skeleton.operators[maker].makes.index(root)

    def layouts(self, solution: Solution) -> tuple[Layouts, frozenset[str]]:
        """The layouts of a solution, and the parameters that are gathered again for the backward pass."""
        choices = [self.choice(position, solution.values[position]) for position in range(self.num_operators)]
        stored = {root: self.stored_as(root, solution.values[self.variable[root]]) for root in self.stored}
        given = {**self.fixed, **self.arriving(solution.values)}
        return lay_out(self.skeleton, self.space.units, choices, stored, given, self.objective.is_stage)

    def arriving(self, values: Sequence[int]) -> dict[int, Layout]:
        """The layouts of what comes from another stage, for values of the variables."""
        found = {}
        for root in self.arrivals:
            code, rank = self._arriving(root)[values[self.variable[root]]], len(self.skeleton.roots[root].type.shape)
            found[root] = layout_of(int(code), rank, self.space.units, [])
        return found

    def segments(self, solution: Solution) -> tuple[Segment, ...]:
        """What a solution runs again in the backward pass."""
        if self.recompute is None:
            return ()
        chosen = zip(self.recompute.modes, self.modes.values(), strict=True)
        return tuple(segment for modes, variable in chosen for segment in modes[solution.values[variable]])

    def stored_as(self, root: int, value: int) -> StoredAs:
        """What a value of a parameter's variable stands for."""
        storages = self.storages(root)
        return int(storages.codes[value]), bool(storages.regathered[value])

    def _rules_of(self, position: int, choice: Choice) -> tuple[int, ...]:
        """The rule that a choice follows on each unit: that of its first axis."""
        rules = self.choices[position].rules
        found = []
        for unit in self.space.units:
            axis = unit.axes[0]
            operands = tuple(placement_on(layout, axis) for layout in choice.operands)
            outputs = tuple(placement_on(layout, axis) for layout in choice.outputs)
            same = (i for i, rule in enumerate(rules) if rule.operands == operands and rule.outputs == outputs)
            found.append(next(same, 0))
        return tuple(found)

    def choice(self, position: int, value: int) -> Choice:
        """What a value of an operator's variable stands for; made once for all that have the same choices."""
        found = self.choices[position]
        key = id(found), value
        if self.fixed:
            return self._make_choice(position, value)
        if key not in self._made:
            self._made[key] = self._make_choice(position, value)
        return self._made[key]

    def _make_choice(self, position: int, value: int) -> Choice:
        found = self.choices[position]
        picks = zip(self.space.units, found.picks[value], strict=True)
        rules = {axis: found.rules[int(pick)] for unit, pick in picks for axis in unit.axes}
        fixed = [self.fixed[root] for root in self.skeleton.operators[position].makes if root in self.fixed]
        order = [axis for layout in fixed for axis, _ in layout]  # in which they split one dim
        return choose({axis: rules[axis] for axis in (*dict.fromkeys(order), *rules)})


StoredAs = tuple[int, bool]
"""The number of the layout in which a parameter is stored, and whether it is gathered again."""


def lay_out(
    skeleton: Skeleton,
    units: Units,
    choices: Sequence[Choice],
    stored: Mapping[int, StoredAs],
    fixed: Mapping[int, Layout],
    is_stage: bool,
) -> tuple[Layouts, frozenset[str]]:
    """Layouts for everything, from what is chosen for operators and parameters; and what is gathered again."""
    leaves: dict[int, Layout] = {}
    regathered: set[str] = set()
    made: dict[Hashable, Layout] = {}
    for number, root in enumerate(skeleton.roots):
        if root.leaf is None:
            continue
        wanted = [choices[position].operands[operand] for position, operand in skeleton.readers[number]]
        if number not in stored:
            leaves[number] = fixed.get(number, given_layout(wanted) if root.leaf.kind is LeafKind.INPUT else ())
            continue
        code, again = stored[number]
        first = tuple(axis for layout in wanted[:1] for axis, placement in layout if isinstance(placement, Split))
        key = code, len(root.type.shape), first
        if key not in made:
            made[key] = layout_of(code, len(root.type.shape), units, list(first))
        leaves[number] = fixed.get(number, made[key])
        regathered |= {root.leaf.name} if again else set()
    return Layouts(leaves, tuple(choices), result_layouts(skeleton, choices, is_stage)), frozenset(regathered)


def given_layout(wanted: Sequence[Layout]) -> Layout:
    """The layout of an input: as it is read where all read it alike, but for copies; else the same everywhere."""
    kept = {make_layout((a, p) for a, p in layout if not isinstance(p, Copies | Partial)) for layout in wanted}
    return kept.pop() if len(kept) == 1 else ()


def result_layouts(skeleton: Skeleton, choices: Sequence[Choice], is_stage: bool = False) -> tuple[Layout, ...]:
    """The loss and new values of buffers come out whole, other outputs as they are made, but for copies and sums."""
    found: list[Layout] = []
    for root, kept in zip(skeleton.results, kept_split(skeleton, is_stage), strict=True):
        maker = skeleton.roots[root].maker
        made = choices[maker].outputs[skeleton.operators[maker].makes.index(root)] if kept else ()
        found.append(make_layout((a, p) for a, p in made if not isinstance(p, Copies | Partial)))
    return tuple(found)
