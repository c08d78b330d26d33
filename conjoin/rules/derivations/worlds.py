"""One concrete instance of a goal, in which every expression over its inputs has a value.

A rule holds under conditions on sizes. Whether they hold at a place of a derivation is seen by running both sides
there: what does not run, or gives another value, is no step. Parameters that are words (a dim counted from the
beginning or by name, groups left open) are told apart by what they are in this instance, and written as the goal
writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from conjoin.rules.parameters import parameters
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule
from conjoin.rules.trials.evaluation import Setting, Value, evaluate
from conjoin.rules.trials.instances import Instance, NoInstance, Sampler
from conjoin.rules.trials.references import Misfit

Key = tuple[object, ...]
"""An operator with its parameters as they are in an instance: the same for all ways to write them."""
_DRAWS = 20
"""Of instances, from which the one is taken that tells most sizes apart."""
_LARGEST = 3
_MOST_ELEMENTS = 3000
"""Of the inputs of an instance; larger ones only take longer."""
_DIM = 4
"""What a dim more is worth, in sizes that are alike."""
_TOLERANCE = 1e-7
_FUNCTIONS = ("tanh", "sigmoid", "gelu")
"""What named activations stand for, one each."""


@dataclass(frozen=True, slots=True)
class CountedDim:
    """A dim that is counted."""

    from_end: int
    rank: int

    def is_at(self, axis: Parameter) -> bool:
        return isinstance(axis, int) and axis % self.rank == self.from_end % self.rank


@dataclass(frozen=True, slots=True)
class Known:
    """An expression and its value."""

    expr: Expr
    value: Value

    @property
    def is_constant(self) -> bool:
        return isinstance(self.expr, Apply) and not self.expr.args


@dataclass(slots=True)
class World:
    """An instance of a goal on which its sides agree."""

    instance: Instance
    setting: Setting
    places: Mapping[tuple[Parameter, int], int]
    """Which dim an axis is, by how it is written and the rank of the tensor."""
    words: dict[tuple[str, object], Parameter] = field(default_factory=dict)
    """How the goal writes a parameter that is so much."""
    firsts: dict[int, dict[int, None]] = field(default_factory=dict)
    """How long the first parts of a dim of some size are, as concatenations and splits told."""

    def input(self, name: str) -> Value:
        return self.instance.inputs[name]

    def values(self, expr: Apply, args: Sequence[Known]) -> Iterator[Value]:
        """What an application may be, one for every place where a split may be; none where it does not run."""
        rank = len(args[0].value.shape) if args else 0
        inputs = {str(i): arg.value for i, arg in enumerate(args)}
        operands = tuple(arg.expr if arg.is_constant else Input(str(i)) for i, arg in enumerate(args))
        applied = Apply(expr.op, expr.params, operands)
        place = self.places.get((expr.param("axis"), rank))
        places = {} if place is None else {applied: place}
        for first in self._firsts(expr, args, place) if expr.op == "split" else (0,):
            setting = replace(self.setting, places=places, firsts={applied: first})
            try:
                (value,) = evaluate((applied,), inputs, setting)
            except Misfit:
                continue
            if expr.op == "concat":
                self._joined(expr, args, value)
            yield value

    def _joined(self, expr: Apply, args: Sequence[Known], value: Value) -> None:
        place = self.place(expr, args)
        self.firsts.setdefault(value.shape[place], {})[args[0].value.shape[place]] = None

    def _firsts(self, expr: Apply, args: Sequence[Known], place: int | None) -> Sequence[int]:
        if expr in self.setting.firsts:
            return (self.setting.firsts[expr],)
        axis = expr.param("axis") if place is None else place
        if not isinstance(axis, int) or not -len(args[0].value.shape) <= axis < len(args[0].value.shape):
            return ()
        return tuple(self.firsts.get(args[0].value.shape[axis], ()))

    def place(self, expr: Apply, args: Sequence[Known]) -> int:
        """Which dim, counted from the end, the axis of an application is."""
        rank, axis = len(args[0].value.shape), expr.param("axis")
        found = self.places.get((axis, rank), axis)
        return int(found) % rank - rank

    def key(self, expr: Apply, args: Sequence[Known], value: Value) -> Key:
        """The operator and its parameters as they are here."""
        found: list[object] = [expr.op]
        for name, word in parameters(expr):
            found.append(self.meaning(name, word, expr, args))
        if expr.op == "split":
            found.append(value.shape[self.place(expr, args)])
        return tuple(found)

    def meaning(self, name: str, word: Parameter, expr: Apply, args: Sequence[Known]) -> object:
        """What a parameter is: words with the same meaning are the same parameter."""
        if name == "groups":
            return _groups(args)
        if name == "pad" and word == "valid":
            return 0
        if name == "axis" and isinstance(word, int):
            return CountedDim(self.place(expr, args), len(args[0].value.shape))
        return word

    def written(self, name: str, meaning: object, args: Sequence[Known]) -> Sequence[Parameter]:
        """A parameter of an application as the goal writes it; a dim of a tensor with more or less dims may be two."""
        if name == "groups":
            return (self.words.get((name, _groups(args)), "?"),)
        if name != "axis" or isinstance(meaning, str):
            assert isinstance(meaning, int | str)
            return (meaning,)
        rank = len(args[0].value.shape)
        if isinstance(meaning, CountedDim):
            both = (meaning.from_end, meaning.from_end + meaning.rank - rank)
            places = [place for place in dict.fromkeys(both) if -rank <= place < 0]
        else:
            assert isinstance(meaning, int)
            places = [meaning % rank - rank] if -rank <= meaning < rank else []
        return [self.words.get((name, CountedDim(place, rank)), place) for place in places]

    def learn(self, expr: Apply, args: Sequence[Known], value: Value) -> None:
        """Take note of how the goal writes parameters, and where it splits."""
        for name, word in parameters(expr):
            meaning = self.meaning(name, word, expr, args)
            if isinstance(meaning, CountedDim) or name == "groups":
                self.words.setdefault((name, meaning), word)
        if expr.op == "split":
            size = args[0].value.shape[self.place(expr, args)]
            self.firsts.setdefault(size, {})[self.setting.firsts[expr]] = None


def _groups(args: Sequence[Known]) -> int:
    """Into how many groups channels are divided; 0 where they are not."""
    x, weight = (arg.value.shape for arg in args)
    divides = len(x) == len(weight) == 4 and x[1] % weight[1] == 0
    return x[1] // weight[1] if divides else 0


def agree(one: Value, other: Value) -> bool:
    """Whether two values are the same, wherever both are numbers."""
    if one.axes != other.axes or one.data.shape != other.data.shape:
        return False
    a, b = one.data, other.data
    if a.equal(b):
        return True
    near = (a - b).abs() <= _TOLERANCE * (1 + a.abs() + b.abs())
    return bool(near.all()) or bool((near | ~a.isfinite() | ~b.isfinite()).all())


def find_world(goal: Rule, when: Sequence[str] = ()) -> World | None:
    """An instance of a goal in which few sizes are alike; None where its sides differ, or never run."""
    try:
        sampler = Sampler(goal, when)
    except NoInstance:
        return None
    random = Random(0)
    drawn = (sampler.draw(random, _LARGEST) for _ in range(_DRAWS))
    instances = [one for one in drawn if one is not None]
    for instance in sorted(instances, key=_likeness):
        try:
            world = _world(instance)
            if world is not None:
                return world if _agrees(world, goal) else None
        except Misfit:
            continue
    return None


def _likeness(instance: Instance) -> tuple[bool, int]:
    """How many sizes are 1 or the same as another one, and how few dims there are: a rule is one for any number.

    Before that whether it is too large, or on a single device, where all layouts are the same.
    """
    sizes = [size for value in instance.inputs.values() for size in value.shape]
    numbers = list(instance.setting.numbers.values())
    alike = len(sizes) - len(set(sizes)) + 3 * sizes.count(1) + 2 * numbers.count(1)
    is_useless = instance.num_elements > _MOST_ELEMENTS or 1 in instance.setting.meshes.values()
    return is_useless, alike - _DIM * len(sizes)


def _world(instance: Instance) -> World | None:
    setting = instance.setting
    functions = dict(zip(setting.functions, _FUNCTIONS, strict=False))
    if len(functions) < len(setting.functions):
        return None
    places: dict[tuple[Parameter, int], int] = {}
    for expr, place in setting.places.items():
        places[expr.param("axis"), len(instance.shapes[expr.args[0]])] = place
    return World(instance, replace(setting, functions=functions), places)


def _agrees(world: World, goal: Rule) -> bool:
    """Whether both sides have the same values."""
    values = evaluate(goal.outputs, world.instance.inputs, world.setting)
    return all(map(agree, values[: len(goal.left)], values[len(goal.left) :]))
