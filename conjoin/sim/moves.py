"""Changes of one operator: other legal layouts for what it reads and makes, its parameters stored to match."""

from __future__ import annotations

from random import Random

from conjoin.ir import Choice, LayoutError, LeafKind, choose, place, rules_for
from conjoin.ops import At, Copies, Layout, ShardingRule, Split, make_layout
from conjoin.sim.program import Change, Program


def random_change(program: Program, rng: Random) -> Change | None:
    """A random legal choice for a random operator; None where what was drawn is not legal."""
    operator = rng.randrange(len(program.skeleton.operators))
    call = program.skeleton.operators[operator].call
    rules = rules_for(call, len(program.choices[operator].outputs))
    drawn = {axis: rng.choice(rules) for axis in program.drafts.mesh.names}
    return make_change(program, operator, drawn)


def make_change(program: Program, operator: int, rules: dict[str, ShardingRule]) -> Change | None:
    """The change by which an operator follows a rule on every axis; None where it cannot."""
    choice = choose(rules)
    try:
        place(program.drafts.node(program.numbers[operator], choice)[0], program.drafts.mesh)
    except LayoutError:
        return None
    return Change(operator, choice, _stored(program, operator, choice))


def _stored(program: Program, operator: int, choice: Choice) -> dict[int, Layout]:
    """Parameters are stored as they are used, once where they are used as copies; the batch lies as it is read."""
    roots = program.skeleton.roots
    found: dict[int, Layout] = {}
    for root, layout in zip(program.skeleton.operators[operator].reads, choice.operands, strict=True):
        leaf = roots[root].leaf
        if leaf is not None and leaf.is_trained:
            left_out = (Copies,) if leaf.type.shape else (Copies, At)  # a single number is kept by all
            found[root] = make_layout((axis, p) for axis, p in layout if not isinstance(p, left_out))
        elif leaf is not None and leaf.kind is LeafKind.INPUT:
            found[root] = _given(program, root, operator, choice)
    return found


def _given(program: Program, root: int, operator: int, choice: Choice) -> Layout:
    """How a tensor of the batch is given: split as all who read it want it, else the same everywhere."""
    wanted = set()
    for position, operand in program.skeleton.readers[root]:
        layout = (choice if position == operator else program.choices[position]).operands[operand]
        wanted.add(make_layout((axis, p) for axis, p in layout if isinstance(p, Split)))
    return wanted.pop() if len(wanted) == 1 else ()
