"""Which devices are simulated as one: along even splits over equal devices, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from conjoin.comm import halo_of
from conjoin.cost import CostModel
from conjoin.ir import Plan, unlike_axes
from conjoin.machine import Machine, Mesh
from conjoin.sim import (
    Classes,
    MachinePrices,
    Prices,
    new_drafts,
    predict,
    simulate,
    take_apart,
    task_numbers,
    to_ticks,
)
from conjoin.sim.operator_work import Works


def mixed_machine() -> Machine:
    """Two nodes of eight; the devices of the second are half as fast."""
    machine = Machine.preset("dgx-h100", 2)
    (kind,) = machine.nodes
    fast = kind.devices[0]
    slow = replace(fast, name="slow", peak_flops=tuple((dtype, rate / 2) for dtype, rate in fast.peak_flops))
    nodes = replace(kind, count=1), replace(kind, name="slow", count=1, devices=(slow,) * 8)
    return replace(machine, nodes=nodes)


def test_no_axis_kept_is_one_class() -> None:
    classes = Classes.keeping(Mesh.of_nodes(2, 4), [])
    assert (classes.shape, classes.ranks, classes.group(("n0", "d0"))) == ((), (0,), ())


def test_classes_stand_in_the_order_of_the_mesh() -> None:
    mesh = Mesh.of_nodes(2, 6)
    classes = Classes.keeping(mesh, ["d1", "n0"])
    assert classes == Classes.keeping(mesh, ["n0", "d1"])
    assert (classes.axes, classes.shape, classes.ranks) == (("n0", "d1"), (2, 3), (0, 1, 2, 6, 7, 8))
    groups = [classes.group(axes) for axes in (("d0",), ("d0", "d1"), ("n0", "d1"))]
    assert groups == [(), (1,), (0, 1)]


@pytest.mark.parametrize(("batch_size", "kept"), [(8, 1), (16, 1), (11, 4), (9, 4)])
def test_only_uneven_pieces_tell_devices_apart(
    batch_size: int, kept: int, tiny_plan: Callable[..., Plan], prices: Prices
) -> None:
    found = simulate(tiny_plan("mlp", "local:4", "data-parallel", batch_size), prices)
    assert len(found.classes.ranks) == kept
    assert found.num_tasks % 4 == 0, "counted on all devices, folded or not"


def test_devices_of_two_types_are_told_apart(tiny_plan: Callable[..., Plan]) -> None:
    machine, costs = mixed_machine(), CostModel(profiles=())
    assert MachinePrices(machine, costs).unlike_axes() == ("n0",)
    assert MachinePrices(Machine.preset("dgx-h100", 2), costs).unlike_axes() == ()
    plan = tiny_plan("mlp", "dgx-h100:2", "data-parallel", 16)
    mixed, equal = predict(plan, machine, costs), predict(plan, Machine.preset("dgx-h100", 2), costs)
    assert mixed.simulation.classes.axes == ("n0",) and equal.simulation.classes.axes == ()
    assert mixed.seconds >= equal.seconds
    assert predict(plan, machine, costs, unfold=True).seconds == mixed.seconds


@pytest.mark.parametrize(
    ("name", "machine", "strategy", "batch_size"),
    [
        ("gpt-125m", "local:6", "data-parallel", 11),
        ("gpt-125m", "local:6", "megatron:tp=3,dp=2,sp", 11),
        ("resnet-50", "local:6", "spatial:h=3,dp=2", 4),
        ("mlp", "dgx-h100:2", "fsdp", 37),
    ],
)
def test_ranks_are_priced_together_as_one_by_one(
    name: str, machine: str, strategy: str, batch_size: int, tiny_plan: Callable[..., Plan], prices: Prices
) -> None:
    plan = tiny_plan(name, machine, strategy, batch_size)
    if machine == "dgx-h100:2":  # of which one is half as fast
        prices = MachinePrices(mixed_machine(), CostModel(profiles=()))
    skeleton, layouts = take_apart(plan)
    drafts = new_drafts(skeleton, layouts, plan.mesh, prices, unfold=True)
    works, unlike = Works(plan.mesh, prices, drafts.classes), 0
    for op, choice, number in zip(skeleton.operators, layouts.choices, task_numbers(skeleton, drafts), strict=True):
        node, placed = drafts.node(number, choice)
        if not unlike_axes(node, placed, plan.mesh) or halo_of(node, placed, plan.mesh) is not None:
            continue
        work, classes = drafts.work(number, choice), drafts.classes
        for part in ("forward", "backward"):
            alone = [
                to_ticks(sum(getattr(cost, part).value for cost in works._costs(op.call, placed, op.needs, rank)))
                for rank in classes.ranks
            ]
            assert np.broadcast_to(getattr(work, part), classes.shape).reshape(-1).tolist() == alone
            unlike += len(set(alone)) > 1
    assert unlike, "some pieces are longer than others"
