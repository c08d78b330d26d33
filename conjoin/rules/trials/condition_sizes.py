"""Conditions of a rule on the sizes of its tensors, as relations of a puzzle."""

from __future__ import annotations

from typing import assert_never

from conjoin.rules.conditions import Condition, DimSize, Made, Named, Number, Others, Size
from conjoin.rules.patterns import Input, walk
from conjoin.rules.trials.operator_sizes import Shaping
from conjoin.rules.trials.puzzles import Contradiction


def post(shaping: Shaping, condition: Condition) -> None:
    """Let a condition hold; Contradiction where it cannot."""
    puzzle = shaping.puzzle
    if isinstance(condition.one, Others):
        _post_others(shaping, condition.one, condition.other)
        return
    one = _unknown(shaping, condition.one)
    other = None if condition.other is None else _unknown(shaping, condition.other)
    match condition.relation, other:
        case "=", int():
            puzzle.same(one, other)
        case "<=", int():
            shaping.not_larger(one, other)
        case "is a multiple of", int():
            puzzle.state("product", one, (other, puzzle.new()))
        case "is odd", None:
            shaping.odd(one)
        case "is split", None:
            puzzle.state("sum", one, (puzzle.new(), puzzle.new()))
        case _:
            raise AssertionError(f"no relation {condition.relation}")


def _post_others(shaping: Shaping, one: Others, other: Size | None) -> None:
    if not isinstance(other, Others):
        raise Contradiction("several dims are compared with one")
    both = [_sizes(shaping, side) for side in (one, other)]
    if len(both[0]) != len(both[1]):
        raise Contradiction("as many dims are needed")
    for a, b in zip(*both, strict=True):
        shaping.puzzle.same(a, b)


def _sizes(shaping: Shaping, others: Others) -> list[int]:
    _add(shaping, others)
    places = shaping.ranks.others_of(others.tensor, others.before, others.but)
    return [shaping.sizes[others.tensor][place] for place in places]


def _add(shaping: Shaping, size: DimSize | Others) -> None:
    """A tensor that the left side does not have."""
    for expr in walk(size.tensor):
        shaping.add(expr)


def _unknown(shaping: Shaping, size: Size) -> int:
    match size:
        case Number(value):
            return shaping.puzzle.number(value)
        case Named(name):
            return shaping.named_number(name)
        case DimSize(tensor, dim):
            _add(shaping, size)
            return shaping.sizes[tensor][shaping.ranks.place(tensor, dim)]
        case Others():
            raise Contradiction("several dims where there should be one")
        case Made():
            return _made(shaping, size)
    assert_never(size)


def _made(shaping: Shaping, size: Made) -> int:
    puzzle, parts = shaping.puzzle, [_unknown(shaping, part) for part in size.parts]
    match size.kind:
        case "+":
            return puzzle.relate("sum", parts)
        case "*":
            return puzzle.relate("product", parts, least=0)
        case "/" | "groups":
            found = puzzle.new()
            puzzle.state("product", parts[0], (parts[1], found))
            return found
        case "half":
            found = puzzle.new(0)
            puzzle.state("odd", parts[0], (found,))
            return found
        case "windows":
            return puzzle.relate("windows", parts)
        case _:
            is_input = isinstance(size.parts[0], DimSize) and isinstance(size.parts[0].tensor, Input)
            return shaping.part(parts[0], is_input)[size.kind == "second"]
