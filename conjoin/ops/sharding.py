"""How an operator may be split on one mesh axis: the legal placements of its operands and outputs, derived.

One index is picked; tensors with it are split there, the others are copies, and an index that no output has makes the
output a partial sum, or the greatest of a part. Where nothing is picked everything is I, or everything B; and a partial
sum passes wherever the output is linear in it (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from conjoin.ops.notation import Access, DimExpr, Factors
from conjoin.ops.placement import Copies, Greatest, Invariant, Partial, Placement, Split
from conjoin.ops.spec import Call, OpSpec, Space, output_types, space_of
from conjoin.ops.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """Placements on one axis that are legal together; `index` is what is split, None where nothing is."""

    index: str | None
    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.outputs))}"


def find_index(access: Access, index: str, space: Space) -> int | None:
    """The dim of a tensor that splits when `index` does, None when there is none; ValueError when its pieces would
    not be contiguous."""
    for place, dim in enumerate(access.dims):
        match dim:
            case Factors(names) if index in names:
                leading = next((name for name in names if space.sizes[name] != 1), index)
                if leading != index:
                    raise ValueError(f"{index} varies faster than {leading} in dim {place}")
                return place
            case Factors():
                continue
            case _ if dim.out == index:
                return place
    return None


def unit_of(dim: DimExpr, index: str, space: Space) -> int:
    """How many positions of a dim one step of its leading index spans."""
    if not isinstance(dim, Factors):
        return 1
    return prod(space.sizes[name] for name in dim.names[dim.names.index(index) + 1 :])


def parse_terms(spec: OpSpec, call: Call) -> tuple[tuple[int, ...], ...]:
    """The operands, by position, multiplied in each term; a list adds its tensors up, or multiplies them (`*`)."""
    declared = spec.terms if isinstance(spec.terms, str) else spec.terms(call)
    terms: list[tuple[int, ...]] = []
    for text in declared.split("+") if declared else ():
        factors: list[int] = []
        known = len(terms)
        for word in text.split():
            places = [i for i, name in enumerate(call.operand_names) if name == word.strip("*")]
            if len(places) > 1 and "*" not in word:
                terms.extend((place,) for place in places)
            else:
                factors.extend(places)
        if factors:
            terms.append(tuple(factors))
        elif len(terms) == known and any(call[word.strip("*")] is not None for word in text.split()):
            return ()  # a number is added: summed over the devices it would count once for each
    return tuple(terms)


def _split_rule(spec: OpSpec, call: Call, space: Space, index: str) -> ShardingRule | None:
    try:
        places = [find_index(access, index, space) for access in space.notation.operands]
        outputs = [find_index(access, index, space) for access in space.notation.outputs]
    except ValueError:
        return None
    operands: list[Placement] = [Copies() if dim is None else Split(dim) for dim in places]
    if index in space.notation.greatest:
        return ShardingRule(index, tuple(operands), (Greatest(),) * len(outputs))
    if any(dim is None for dim in outputs):
        made = output_types(spec, call)
        if not all(_adds_up(output.dtype) for output in made):
            return None
        for term in parse_terms(spec, call):
            if all(places[i] is None and not _looked_up(i, index, space) for i in term):
                addends = _addends(call, term, made)
                if not addends:
                    return None
                operands[addends[0]] = Partial()
    return ShardingRule(index, tuple(operands), tuple(Partial() if dim is None else Split(dim) for dim in outputs))


def _looked_up(operand: int, index: str, space: Space) -> bool:
    """Whether the operand is read at addresses that have the index: a product with a one-hot tensor that has it.

    An operand that is written at addresses keeps the addressed index in the output.
    """
    read = space.notation.operands[operand].indices() & space.notation.summed()
    return any(access.addresses in read and index in access.indices() for access in space.notation.operands)


def _adds_up(dtype: torch.dtype) -> bool:
    """Whether values can be held as partial sums: truth values cannot, nor what rounds to three bits or fewer."""
    rounds = dtype.is_floating_point or dtype.is_complex
    return dtype != torch.bool and not (rounds and dtype.itemsize < 2)


def _addends(call: Call, term: tuple[int, ...], outputs: tuple[TensorType, ...]) -> tuple[int, ...]:
    """The factors of a term that can be held as partial sums, of which the output then is one too.

    A cast to whole numbers is not linear, nor is one to coarser floats: parts that cancel would leave their roundings.
    """
    if not all(_adds_up(output.dtype) for output in outputs):
        return ()
    coarsest = max(map(_coarseness, (output.dtype for output in outputs)))
    dtypes = [(i, call.tensors[i].dtype) for i in term]
    return tuple(i for i, dtype in dtypes if _adds_up(dtype) and coarsest <= _coarseness(dtype))


def _coarseness(dtype: torch.dtype) -> float:
    """How far apart the numbers of a dtype are about one; whole numbers are exact, and further apart than any float."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 1.0


def _partial_rules(spec: OpSpec, call: Call, num_outputs: int) -> list[ShardingRule]:
    made = output_types(spec, call)
    choices = sorted(set(product(*(_addends(call, term, made) for term in parse_terms(spec, call)))))
    return [
        ShardingRule(
            None,
            tuple(Partial() if i in choice else Copies() for i in range(len(call.tensors))),
            (Partial(),) * num_outputs,
        )
        for choice in choices
        if choice
    ]


def splittable(space: Space) -> tuple[str, ...]:
    """The indices that an axis may split: not whole, and of more than one element."""
    return tuple(i for i in space.notation.indices() if i not in space.notation.whole and space.sizes[i] > 1)


def sharding_rules(spec: OpSpec, call: Call) -> tuple[ShardingRule, ...]:
    """Every legal way to place this call on one axis: I, B, one index split, partial sums let through."""
    space = space_of(spec, call)
    num_outputs = len(space.notation.outputs)
    splits = (_split_rule(spec, call, space, index) for index in splittable(space))
    return (
        *replicated_rules(len(call.tensors), num_outputs),
        *(rule for rule in splits if rule is not None),
        *(rule for index in spec.owned for rule in _owning_rules(spec, call, space, index)),
        *_partial_rules(spec, call, num_outputs),
    )


def _owning_rules(spec: OpSpec, call: Call, space: Space, index: str) -> list[ShardingRule]:
    """The rules of a split index with the operands that are owned then split, too, and with those that are dealt."""
    rule = _split_rule(spec, call, space, index) if index in splittable(space) else None
    owned, dealt = spec.owned[index], spec.dealt.get(index, ())
    found = []
    for split in (owned, (*owned, *dealt)) if dealt else (owned,):
        sizes = [t.shape[0] for name, t in zip(call.operand_names, call.tensors, strict=True) if name in split]
        if rule is not None and min(sizes) > 1:
            placed = zip(call.operand_names, rule.operands, strict=True)
            operands = tuple(Split(0) if name in split else placement for name, placement in placed)
            found.append(ShardingRule(index, operands, rule.outputs))
    return found


def replicated_rules(num_operands: int, num_outputs: int) -> tuple[ShardingRule, ...]:
    """What every operator allows, an opaque one nothing else: the same everywhere, as one value (I) or copies (B)."""
    same: tuple[Placement, ...] = (Invariant(), Copies())
    return tuple(ShardingRule(None, (p,) * num_operands, (p,) * num_outputs) for p in same)
