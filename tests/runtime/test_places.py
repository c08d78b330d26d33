"""Nodes that run at one place of an axis only, the others having nothing: any graph computes what one device does.

As in `test_random_layouts`, but on each axis a node is at one random place half of the time, and so is what is stored.
Then models with branches beside each other, on threads and on processes with Gloo: losses, gradients, bytes, clipping,
checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from conjoin.comm import Traffic
from conjoin.errors import PlanError
from conjoin.frontends import capture
from conjoin.ir import (
    REGATHER,
    Choice,
    Mark,
    MemoryAction,
    Plan,
    check_plan,
    find_faults,
    find_layout_faults,
    is_parallel,
    parallelize,
    parse_graph,
    place,
    read_at_places,
    recompute_actions,
    sequential,
)
from conjoin.ops import At, make_layout
from conjoin.runtime import to_module
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.pieces import Piece, full_state_dict
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from tests.ir.wording import assert_three_sentences
from tests.runtime.branch_plans import Towers, branched, towers_batch, with_towers
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import MESH, captured, module_on
from tests.runtime.random_graphs import MESHES, Sample, chain, differences, on_one_device, on_ranks, random_plan
from zoo.catalog import build

BLOCKS, CHAINS = range(4), 8


def check_runs(plan: Plan, sample: Sample) -> None:
    found = differences(plan, on_ranks(plan, sample), on_one_device(sample))
    assert not found, "\n".join([*found[:5], str(plan.mesh), str(plan.graph)])


def is_confined(plan: Plan) -> bool:
    return any(isinstance(p, At) for node in plan.graph.nodes for type in node.types for _, p in type.layout)


@pytest.mark.parametrize("block", BLOCKS)
def test_random_graphs_at_random_places_compute_what_one_device_does(block: int) -> None:
    confined = 0
    for seed in range(block * CHAINS, (block + 1) * CHAINS):
        rng = Random(seed)
        sample = chain(rng)
        plan = random_plan(sample.graph, rng.choice(MESHES), rng, places=0.5)
        assert find_faults(plan.graph) == () and find_layout_faults(plan.graph, plan.mesh) == ()
        assert sequential(plan.graph) == sample.graph
        assert parse_graph(str(plan.graph)) == plan.graph
        check_runs(plan, sample)
        confined += is_confined(plan)
    assert confined > CHAINS // 2


class Mixed(nn.Module):
    """Convolutions of several sizes and a pool beside each other, as in Inception."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*parts)
            for parts in (
                [_conv(channels, 3, 1)],
                [_conv(channels, 2, 1), _conv(2, 3, 3)],
                [_conv(channels, 2, 1), _conv(2, 3, (1, 3)), _conv(3, 3, (3, 1))],
                [nn.AvgPool2d(3, 1, 1), _conv(channels, 2, 1)],
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _conv(channels: int, made: int, window: int | tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, made, window, padding="same", bias=False), nn.BatchNorm2d(made), nn.ReLU())


class Inception(nn.Sequential):
    """The first layers, two mixed ones with a pool between them, and the last."""

    def __init__(self) -> None:
        layers = _conv(3, 4, 3), Mixed(4), nn.MaxPool2d(3, 2), Mixed(11), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        super().__init__(*layers, nn.Dropout(), nn.Linear(11, 5))


def workload(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    if name != "inception":
        return build(name)
    torch.manual_seed(0)
    return Inception(), (torch.randn(4, 3, 9, 9), torch.randint(5, (4,))), nn.functional.cross_entropy


MODELS = [
    ("inception", 4, "data-parallel", ("d1",)),
    ("dlrm:tiny", 4, "data-parallel", ("d0",)),
    ("dlrm:tiny", 4, "table-parallel", ("d0", "d1")),
    ("candle-uno:tiny", 4, "megatron:tp=2,dp=2", ("d0",)),
]


@pytest.mark.parametrize(("name", "num_devices", "strategy", "axes"), MODELS, ids=lambda v: str(v))
def test_models_with_branches_beside_each_other_train_as_on_one_device(
    name: str, num_devices: int, strategy: str, axes: tuple[str, ...]
) -> None:
    model, batch, loss = workload(name)
    graph = capture(model, batch, loss)
    plan = branched(graph, num_devices, strategy, axes)
    verdict = verify_in_process(Case(plan, graph, model, batch), 2)
    assert verdict.worst < 1e-9, [str(difference) for difference in verdict.differences[:5]]


def towers() -> tuple[Plan, Sample]:
    torch.manual_seed(0)
    sample = captured(Towers(), towers_batch())
    return with_towers(sample.graph, 4), sample


def train(communicator: Communicator, plan: Plan, sample: Sample) -> tuple[list[float], dict[str, Tensor]]:
    """Two clipped steps: losses and norms, and the whole state after them."""
    module = module_on(plan, sample, communicator, exact_seed=3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        loss = module(*sample.inputs)
        loss.backward()
        clip = partial(torch.nn.utils.clip_grad_norm_, module.parameters()) if step else module.clip_grad_norm_
        norm = clip(0.5, inf if step else 2.0)  # torch's own finds out from the gradients where the others lie
        optimizer.step()
        losses += [loss.item(), norm.item()]
    return losses, full_state_dict(module, everywhere=True)


def train_alone(sample: Sample) -> tuple[list[float], dict[str, Tensor]]:
    """The same on one device, by torch alone."""
    module = to_module(sample.graph, copy.deepcopy(sample.model))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    torch.manual_seed(3)
    for step in range(2):
        optimizer.zero_grad()
        loss = module(*sample.inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5, inf if step else 2.0)
        optimizer.step()
        losses += [loss.item(), norm.item()]
    return losses, module.state_dict()


def test_towers_train_alike_on_processes_and_threads_and_in_other_plans(tmp_path: Path) -> None:
    plan, sample = towers()
    assert is_confined(plan) and any(len(place(n, plan.mesh).at) for n in plan.graph.nodes if "linear" in n.op)
    losses, state = train_alone(sample)
    for found in (
        run_ranks(plan.mesh, lambda ranks: train(ranks, plan, sample)),
        run_processes(plan.mesh, lambda ranks: train(ranks, plan, sample), tmp_path),
    ):
        for mine, whole in found:
            assert mine == pytest.approx(losses, rel=1e-9)
            assert whole.keys() == state.keys()
            for name, tensor in whole.items():
                torch.testing.assert_close(tensor, state[name], rtol=1e-9, atol=1e-12)


def test_the_bytes_of_branches_are_foretold_for_every_rank() -> None:
    plan, sample = towers()

    def one_step(communicator: Communicator) -> int:
        module = module_on(plan, sample, communicator)
        torch.manual_seed(0)
        module(*sample.inputs).backward()
        return communicator.bytes_sent

    traffic = Traffic(plan)
    nodes = [node for node in plan.graph.nodes if not is_parallel(node)]
    transfers = traffic.at_start(nodes)
    for node in nodes:
        placed = place(node, plan.mesh)
        transfers += [*traffic.before_node(node, placed), *traffic.after_node(node, placed)]
    for value in (*plan.graph.outputs, *(value for _, value in plan.graph.updates)):
        transfers += traffic.before(value)  # type: ignore[arg-type]
    told = [sum(c.sent[rank] for t in transfers for c in t.collectives) for rank in range(plan.mesh.size)]
    assert run_ranks(plan.mesh, one_step) == told
    assert len({*told}) > 1, "places send unlike amounts"


def test_what_another_place_keeps_is_no_burden_here() -> None:
    plan, sample = towers()

    def held(communicator: Communicator) -> tuple[list[str], list[str]]:
        module = module_on(plan, sample, communicator)
        state = module.state_dict()
        empty = [name for name, p in module.named_parameters() if not p.numel()]
        assert all(isinstance(state[name], Piece) for name in empty)
        return empty, [name for name, value in state.items() if isinstance(value, Piece)]

    found = run_ranks(plan.mesh, held)
    mine = {name.split(".")[0] for name in found[0][0]}, {name.split(".")[0] for name in found[-1][0]}
    assert mine == ({"right"}, {"left"})
    assert all(pieces == found[0][1] for _, pieces in found), "all ranks call the same tensors pieces"


def test_a_checkpoint_of_branches_is_read_by_another_plan(tmp_path: Path) -> None:
    plan, sample = towers()
    other = with_towers(sample.graph, 2)

    def save(communicator: Communicator) -> dict[str, Tensor]:
        module = module_on(plan, sample, communicator)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(3.0)
        dcp.save(module.state_dict(), checkpoint_id=tmp_path / "saved")
        return full_state_dict(module, everywhere=True)

    def load(communicator: Communicator) -> dict[str, Tensor]:
        module = module_on(other, sample, communicator)
        state = module.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        module.load_state_dict(state)
        return full_state_dict(module, everywhere=True)

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    wanted = run_processes(plan.mesh, save, tmp_path / "one")[0]
    for whole in run_processes(other.mesh, load, tmp_path / "two"):
        assert all(torch.equal(whole[name], tensor) for name, tensor in wanted.items())


def test_what_others_pass_by_is_not_run_again() -> None:
    """Ranks elsewhere would wait for collectives that only some run again: such a plan is refused."""
    plan, _ = towers()
    both = replace(plan, memory=recompute_actions(plan.graph, ((0, 1),)))
    with pytest.raises(PlanError, match="made at one place of an axis only"):
        check_plan(both)


def test_what_goes_to_a_place_leaves_before_any_branch_runs() -> None:
    """Else the second tower would wait for those who have the first one to run; backward it is the other way round."""
    plan, sample = towers()
    for code in run_ranks(plan.mesh, lambda ranks: module_on(plan, sample, ranks).code):
        calls = [line.strip().split(" ")[0] for line in code.splitlines() if "moved" in line or "linear" in line]
        first = next(i for i, name in enumerate(calls) if name.startswith("linear"))
        assert sum(name.startswith("moved") for name in calls[:first]) == 2
        assert any(name.startswith("moved") for name in calls[first:]), "towers are scattered at the end"


def test_places_agree_on_dtypes_under_autocast() -> None:
    """A rank that has nothing of a tensor does not know what autocast made of it elsewhere."""
    torch.manual_seed(0)
    model, batch = Towers(), towers_batch()
    plan = with_towers(capture(model, batch), 4)
    sample = Sample(plan.graph, model, batch)

    def program(communicator: Communicator) -> tuple[float, bool]:
        module = module_on(plan, sample, communicator)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(*batch)
        loss.backward()
        return loss.item(), all(p.grad is not None for p in module.parameters())

    losses, given = zip(*run_ranks(plan.mesh, program), strict=True)
    assert all(given) and len({*losses}) == 1
    assert 0.3 < losses[0] < 3.0


def test_what_has_no_gradient_at_one_place_has_none_at_another() -> None:
    """A prediction and its target are broadcast together at one place and compared at another: one has a gradient."""

    def compared(prediction: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(*torch.broadcast_tensors(prediction, target))

    sample = captured(nn.Linear(4, 1), (torch.randn(8, 4), torch.randn(1, 3)), compared)
    both = next(node for node in sample.graph.nodes if node.op == "broadcast_tensors")
    loss = next(node for node in sample.graph.nodes if node.op == "mse_loss")
    there, here = (make_layout([("x", At(place))]) for place in (1, 0))
    choices = {both: Choice((there, there), (there, there)), loss: Choice((here, here), (here,))}
    mark = Mark("by hand", "")
    plan = check_plan(Plan(parallelize(sample.graph, {}, choices, {}), MESH, mark, mark, "by hand"))
    check_runs(plan, sample)


class Tied(nn.Module):
    """Of two towers beside each other the weight of one is read by all once more, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        apart = self.left(x).sigmoid() - self.right(x).tanh()
        return nn.functional.linear(apart, self.left.weight.t()).square().mean()


def test_a_weight_that_is_read_at_a_place_and_by_all_is_not_gathered_again() -> None:
    """Whoever reads nothing of it would not come, and the others wait. Found by random models, twice in 21 thousand."""
    torch.manual_seed(0)
    model, batch = Tied(), (torch.randn(8, 6),)
    graph = capture(model, batch)
    plan = with_towers(graph, 2, "fsdp")
    assert read_at_places(plan.graph) == {"left.weight"}
    assert verify_in_process(Case(plan, graph, model, batch), 2).passed
    with pytest.raises(PlanError, match=r"left\.weight is to be gathered again, and at some places") as told:
        check_plan(replace(plan, memory=(MemoryAction(REGATHER, "left.weight"),)))
    assert_three_sentences(told.value)
