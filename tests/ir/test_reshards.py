"""Parallelization operators on layouts: every chain leads to its target, and what does not fit is told."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from conjoin.ir import Elementary, LayoutError, Value, elementary, is_parallel, origin, reshard_chain
from conjoin.ops import (
    ASSIGN,
    COMBINE,
    PARTITION,
    REDUCE,
    REPLICATE,
    UNIFY,
    Copies,
    Layout,
    Partial,
    Split,
    make_layout,
    placement_on,
    split_axes,
)
from tests.ir.meshes import all_layouts, megatron


def walk(source: Layout, target: Layout) -> list[str]:
    layout = source
    steps = reshard_chain(source, target)
    for step in steps:
        layout = step.apply(layout)
    assert layout == target
    return [step.op.removeprefix("conjoin::") for step in steps]


def test_every_chain_leads_to_its_target() -> None:
    for axes, count in (("x", None), ("xy", None), ("xyz", 6000)):
        layouts = all_layouts(axes, 2)
        pairs = [(one, other) for one in layouts for other in layouts]
        for source, target in pairs if count is None else Random(0).sample(pairs, count):
            steps = walk(source, target)
            assert (steps == []) == (source == target)
            touched = {axis for step in reshard_chain(source, target) for axis in step.attributes[-1]}
            alike = [axis for axis in axes if placement_on(source, axis) == placement_on(target, axis)]
            moved = [a for a in alike if a in touched and not isinstance(placement_on(source, a), Split)]
            assert moved == [], "what stays I, B or P is left alone"


def test_what_is_cut_inside_is_combined_before_what_is_outside() -> None:
    source = make_layout([("x", Split(0)), ("y", Split(0))])
    swapped = make_layout([("y", Split(0)), ("x", Split(0))])
    assert reshard_chain(source, swapped) == (
        Elementary(COMBINE, (0, ("x", "y"))),
        Elementary(PARTITION, (0, ("y", "x"))),
    )
    assert reshard_chain(source, source[:1]) == (Elementary(COMBINE, (0, ("y",))),)
    assert reshard_chain(source[:1], source) == (Elementary(PARTITION, (0, ("y",))),)


def test_a_chain_reads_as_it_is_meant() -> None:
    source = make_layout([("x", Partial()), ("y", Copies()), ("z", Split(1))])
    target = make_layout([("x", Split(0)), ("y", Partial()), ("z", Copies())])
    assert walk(source, target) == ["reduce", "unify", "combine", "partition", "replicate", "assign"]


def test_a_partition_cuts_inside_what_is_cut_already() -> None:
    after = Elementary(PARTITION, (0, ("x", "y"))).apply((("z", Split(0)),))
    assert split_axes(after, 0) == ("z", "x", "y")


REFUSALS: list[tuple[str, tuple[Any, ...], str]] = [
    (PARTITION, (0, ("s",)), "conjoin::partition takes I to S(0) on axis s, where the tensor is S(1)"),
    (PARTITION, (0, ("b",)), "conjoin::partition takes I to S(0) on axis b, where the tensor is B"),
    (COMBINE, (0, ("s",)), "conjoin::combine takes S(0) to I on axis s, where the tensor is S(1)"),
    (COMBINE, (1, ("i",)), "conjoin::combine takes S(1) to I on axis i, where the tensor is I"),
    (REPLICATE, (("i", "p"),), "conjoin::replicate takes I to B on axis p, where the tensor is P"),
    (UNIFY, (("s",),), "conjoin::unify takes B to I on axis s, where the tensor is S(1)"),
    (REDUCE, (("b",),), "conjoin::reduce takes P to I on axis b, where the tensor is B"),
    (ASSIGN, (("s",),), "conjoin::assign takes I to P on axis s, where the tensor is S(1)"),
    (REDUCE, ((),), "conjoin::reduce needs the names of axes, not ()"),
    (REDUCE, ("p",), "conjoin::reduce needs the names of axes, not 'p'"),
    (REDUCE, ((1,),), "conjoin::reduce needs the names of axes, not (1,)"),
    (REDUCE, (None,), "conjoin::reduce needs the names of axes, not None"),
    (PARTITION, (0, ("i", "i")), "conjoin::partition names an axis twice: i, i"),
    (COMBINE, (1, ("s", "s")), "conjoin::combine names an axis twice: s, s"),
    (PARTITION, (-1, ("i",)), "a dim is a number from 0, not -1"),
    (PARTITION, (True, ("i",)), "a dim is a number from 0, not True"),
    (COMBINE, ("0", ("s",)), "a dim is a number from 0, not '0'"),
]


@pytest.mark.parametrize(("op", "attributes", "why"), REFUSALS)
def test_what_does_not_fit_is_told(op: str, attributes: tuple[Any, ...], why: str) -> None:
    layout = make_layout([("s", Split(1)), ("b", Copies()), ("p", Partial())])
    with pytest.raises(LayoutError) as told:
        Elementary(op, attributes).apply(layout)
    assert str(told.value) == why


def test_the_origin_of_a_value_is_what_was_resharded() -> None:
    graph = megatron()
    resharded = [node for node in graph.nodes if is_parallel(node)]
    assert resharded and all(elementary(node).op == node.op for node in resharded)
    for node in resharded:
        found = origin(Value(node))
        assert found.type.shape == node.types[0].shape
        assert found.owner in graph.leaves or not is_parallel(found.owner)  # type: ignore[arg-type]
