"""What `conjoin.ops` declares of the operators that rules are made of.

A declaration writes its notation for a call. Rules leave sizes and most parameters open: the call that is asked about
has any sizes, and for each open parameter a number that is found again in the notation (`y*11+r*1-13` for `stride=11`).
Terms say that an operator is linear; by which numbers, and whether it averages, is found by running it on ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any

import torch

from conjoin.ops import (
    Access,
    Factors,
    Kind,
    Notation,
    NotationError,
    OpSpec,
    Spread,
    TensorType,
    Window,
    bind_args,
    find_spec,
    notation_of,
    parse_terms,
    run_whole,
    signature,
)
from conjoin.ops import Call as OpCall
from conjoin.rules.definitions.calls import Call
from conjoin.rules.definitions.dims import NotCovered

MARKS: Mapping[str, int] = {"stride": 11, "pad": 13, "groups": 17, "kernel": 29, "parts": 37, "vertices": 41}
"""Numbers that stand for parameters of rules in calls that are only asked about: primes that no notation has itself."""
_OF_EACH_DIM = ("stride", "pad", "kernel")
"""Parameters that rules have one of for both dims of an image."""
_SMALL: Mapping[str, int] = {"stride": 1, "pad": 0, "groups": 1, "parts": 3, "vertices": 1}
"""Parameters of calls that are run, on tensors as large as one window."""
_LARGEST_DENOMINATOR = 1000
"""Of weights, which are found as floats; -1 and 1 are what there is."""
_SIZE = 2
"""Of all dims in calls that are only asked about; not 1, which would be broadcast."""


class NotSaid(NotCovered):
    """What a declaration does not say, and nobody else does."""


@dataclass(frozen=True, slots=True)
class Declared:
    """An operator of `conjoin.ops`, and how a rule's operator calls it."""

    name: str
    takes: tuple[tuple[str, str], ...] = ()
    """Attributes that are parameters of the rule's operator; `place` is the dim that its parameter `axis` means."""
    fixed: tuple[tuple[str, Any], ...] = ()
    """Attributes that are always the same."""
    flattened: str = ""
    """An index that stands for all leading dims together."""


@dataclass(frozen=True, slots=True)
class Part:
    """A term: a product of operands, how often it counts, and whether it is averaged over what it is summed over."""

    operands: tuple[int, ...]
    summed: tuple[str, ...]
    weight: Fraction
    averages: bool


@dataclass(frozen=True, slots=True)
class Said:
    """What a declaration says of a call."""

    notation: Notation
    sizes: Mapping[str, int]
    """Of indices, where they are given and do not follow from windows; a mark among them is a parameter."""
    parts: tuple[Part, ...]
    """What is added up; nothing where it is not linear."""

    def whole(self, access: Access) -> tuple[str, ...]:
        """The indices of a tensor along which the notation leaves open what is done."""
        dims = (dim.names for dim in access.dims if isinstance(dim, Factors))
        kernels = {window.kernel for window in self.windows}
        return tuple(name for names in dims for name in names if name in self.notation.whole and name not in kernels)

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows through which operands are read."""
        dims = (dim for access in self.notation.operands for dim in access.dims)
        return tuple(dim for dim in dims if isinstance(dim, Window))

    def __str__(self) -> str:
        """The same for declarations that differ in the names of indices only."""
        names = {name: f"i{i}" for i, name in enumerate(self.notation.indices())}
        sides = [", ".join(_spell(a, names) for a in s) for s in (self.notation.operands, self.notation.outputs)]
        marks = [sorted(names[name] for name in marked) for marked in (self.notation.whole, self.notation.averaged)]
        sizes = sorted((names.get(name, ""), size) for name, size in self.sizes.items())
        terms = [(part.operands, str(part.weight), part.averages) for part in self.parts]
        return f"{' -> '.join(sides)}, whole {marks[0]}, averaged {marks[1]}, sizes {sizes}, terms {terms}"


def _spell(access: Access, names: Mapping[str, str]) -> str:
    def spelled(dim: object) -> str:
        if isinstance(dim, Window):
            return f"{names[dim.out]}*{dim.stride}+{names[dim.kernel]}*{dim.dilation}-{dim.padding}"
        assert isinstance(dim, Factors)
        return f"({' '.join(names[name] for name in dim.names)})"

    return " ".join(map(spelled, access.dims)) + (f"@{names[access.addresses]}" if access.addresses else "")


def ask(declared: Declared, call: Call) -> Said:
    """What is declared of a call; NotSaid where nobody declared it, or not for operands of these ranks."""
    numbers = dict(MARKS)
    if call.param("groups") == 1:  # then there is no index of groups at all
        numbers["groups"] = 1
    if call.param("place") != "":
        numbers["place"] = int(call.param("place"))
    return _ask(declared, tuple(len(arg.dims) for arg in call.args), tuple(numbers.items()))


@cache
def _ask(declared: Declared, ranks: tuple[int, ...], numbers: tuple[tuple[str, int], ...]) -> Said:
    spec = find_spec(declared.name)
    if spec is None:
        raise NotSaid(f"nobody declared {declared.name}")
    asked = _call(declared, ranks, dict(numbers), _SIZE)
    try:
        notation, sizes = notation_of(spec, asked)
    except NotationError as error:
        raise NotSaid(f"{declared.name} on operands of ranks {ranks} is not declared: {error}") from None
    if any(isinstance(dim, Spread) for access in notation.operands for dim in access.dims):
        raise NotSaid(f"{declared.name} reads through windows that are inverted")
    sizes = _without_windows(notation, sizes)
    said = Said(_without(notation, frozenset(name for name, size in sizes.items() if size == 1)), sizes, ())
    if not any(said.whole(access) for access in notation.operands):
        runs = _runs(declared, spec, ranks, dict(numbers))
        said = replace(said, parts=tuple(_part(runs, term) for term in parse_terms(spec, asked)))
    return _unflattened(said, declared.flattened, ranks) if declared.flattened else said


def _call(declared: Declared, ranks: Sequence[int], numbers: Mapping[str, int], size: int) -> OpCall:
    """A call of the operator on operands of these ranks."""
    shapes = [(size,) * (2 if declared.flattened else rank) for rank in ranks]
    if ("sizes", "parts") in declared.takes:
        shapes[0] = (*shapes[0][:-1], size * numbers["parts"])
    tensors = iter([TensorType(shape, torch.float64) for shape in shapes])
    given: dict[str, Any] = dict(declared.fixed)
    given |= {name: _attribute(p, numbers[p]) for name, p in declared.takes}
    for parameter in signature(declared.name).parameters:
        if parameter.kind is Kind.TENSORS:
            given[parameter.name] = tuple(tensors)
        elif parameter.kind is Kind.TENSOR and (tensor := next(tensors, None)) is not None:
            given[parameter.name] = tensor
    return OpCall(declared.name, bind_args(declared.name, (), given))


def _attribute(parameter: str, value: int) -> int | tuple[int, int]:
    """A parameter as torch takes it: one for each dim of an image, or so many parts of whatever size."""
    if parameter == "parts":
        return value, -1
    return (value, value) if parameter in _OF_EACH_DIM else value


@dataclass(frozen=True, slots=True)
class _Run:
    """A call small enough to be run."""

    call: OpCall
    notation: Notation
    terms: tuple[tuple[int, ...], ...]
    size: int
    """Of every dim, and of the window."""

    def count(self, term: tuple[int, ...]) -> int:
        """How many products of a term are added up: of all rows that an address could mean it is one."""
        addressed = {access.addresses for access in self.notation.operands}
        return prod(self.size for name in _summed(self.notation, term) if name not in addressed)

    def value(self, term: tuple[int, ...]) -> Fraction:
        """The result where the operands of other terms are 0 and all others 1."""
        others = {i for other in self.terms for i in other} - set(term)
        tensors = []
        for i, (tensor, access) in enumerate(zip(self.call.tensors, self.notation.operands, strict=True)):
            dtype = torch.int64 if access.addresses else torch.float64
            zero = i in others or access.addresses
            tensors.append(torch.full(tensor.shape, 0 if zero else 1, dtype=dtype))
        try:
            values = set(run_whole(self.call, tensors)[0].flatten().tolist())
        except (RuntimeError, IndexError) as error:
            raise NotSaid(f"{self.call.op} does not run as it is declared: {str(error).splitlines()[0]}") from None
        if len(values) != 1:
            raise NotSaid(
                f"{self.call.op} treats elements differently by their position, which its notation does not say"
            )
        return Fraction(values.pop()).limit_denominator(_LARGEST_DENOMINATOR)


def _runs(declared: Declared, spec: OpSpec, ranks: Sequence[int], numbers: Mapping[str, int]) -> tuple[_Run, _Run]:
    """Two calls that differ in the sizes of all dims only."""

    def run(size: int) -> _Run:
        call = _call(declared, ranks, {**numbers, **_SMALL, "kernel": size}, size)
        return _Run(call, notation_of(spec, call)[0], parse_terms(spec, call), size)

    return run(2), run(3)


def _part(runs: tuple[_Run, _Run], term: tuple[int, ...]) -> Part:
    """A term with its weight: a sum grows with how much is added up, an average does not."""
    (one, few), (other, many) = ((run.value(term), run.count(term)) for run in runs)
    notation = runs[0].notation
    averages = few != many and one == other
    if (one * many != other * few and not averages) or (notation.averaged and not averages):
        raise NotSaid(f"{runs[0].call.op} neither sums nor averages as its notation says")
    return Part(term, _summed(notation, term), one if averages else one / few, averages)


def _summed(notation: Notation, term: tuple[int, ...]) -> tuple[str, ...]:
    """The indices a term is summed over: those that its operands and their addresses have and the output has not."""
    own = [access for i, access in enumerate(notation.operands) if i in term or access.addresses]
    present = set().union(*(access.indices() for access in own))
    return tuple(name for name in notation.indices() if name in present & notation.summed())


def _without_windows(notation: Notation, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """The given sizes but for how many windows there are, which follows from the windows."""
    windows = Said(notation, {}, ()).windows
    for window in windows:
        count = window.size_of_out(_SIZE, sizes.get(window.kernel, _SIZE))
        if sizes.get(window.out, count) != count:
            raise NotSaid(f"{sizes[window.out]} windows where {count} fit")
    return {name: size for name, size in sizes.items() if name not in {window.out for window in windows}}


def _without(notation: Notation, ones: frozenset[str]) -> Notation:
    """Without indices that can only be 0."""

    def changed(access: Access) -> Access:
        dims = (
            Factors(tuple(name for name in dim.names if name not in ones)) if isinstance(dim, Factors) else dim
            for dim in access.dims
        )
        return replace(access, dims=tuple(dims))

    return replace(
        notation, operands=tuple(map(changed, notation.operands)), outputs=tuple(map(changed, notation.outputs))
    )


def _unflattened(said: Said, index: str, ranks: Sequence[int]) -> Said:
    """One index replaced by as many as there are dims that it stands for."""
    notation, (dim,) = said.notation, [Factors((index,))]
    (more,) = {r - len(a.dims) for r, a in zip(ranks, notation.operands, strict=True) if dim in a.dims}
    instead = tuple(Factors((f"{index}{i}",)) for i in range(more + 1))

    def changed(access: Access) -> Access:
        place = access.dims.index(dim) if dim in access.dims else 0
        spread = (*access.dims[:place], *instead, *access.dims[place + 1 :]) if dim in access.dims else access.dims
        return replace(access, dims=spread)

    operands, outputs = (tuple(map(changed, side)) for side in (notation.operands, notation.outputs))
    return replace(said, notation=replace(notation, operands=operands, outputs=outputs))
