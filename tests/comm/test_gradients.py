"""Gradients go where autograd sends them, also where some of what an operator reads needs none."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.comm import GradientFlow
from conjoin.frontends import capture
from conjoin.ir import Graph, Node
from conjoin.ops import OpSpec, all_ops, random_call, run_whole


def needs(graph: Graph, op: str) -> list[tuple[int, ...]]:
    """The operands that get a gradient, for every call of an operator."""
    gradients = GradientFlow(graph)
    return [tuple(i for i in range(len(n.inputs)) if gradients.reach_operand(n, i)) for n in calls(graph, op)]


def calls(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


def compared(prediction: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(*torch.broadcast_tensors(prediction, target))


def test_a_target_that_is_broadcast_with_its_prediction_gets_no_gradient() -> None:
    graph = capture(nn.Linear(4, 1).train(), (torch.randn(8, 4), torch.randn(1, 3)), compared)
    assert needs(graph, "broadcast_tensors") == [(0,)]
    assert needs(graph, "mse_loss") == [(0,)]


class TwoSides(nn.Module):
    """Two parameters broadcast together, of which one comes to the loss only after it was rounded off."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.broadcast_tensors(self.left, self.right)
        return (x * right + left.detach()).sum()


def test_of_views_made_together_each_passes_its_own_gradient_on() -> None:
    model, batch = TwoSides().train(), torch.randn(3, 4)
    graph = capture(model, (batch,))
    (node,) = calls(graph, "broadcast_tensors")
    gradients = GradientFlow(graph)
    model(batch).backward()
    assert model.left.grad is None and model.right.grad is not None
    assert [gradients.reach(value) for value in node.inputs] == [False, True]
    assert [gradients.passing_operands(node, output) for output in (0, 1)] == [(0,), (1,)]


def test_a_view_kept_is_what_it_views_kept() -> None:
    """The backward of the loss reads the prediction and the target, both through views made together."""
    graph = capture(nn.Linear(4, 1).train(), (torch.randn(8, 4), torch.randn(1, 3)), compared)
    (node,) = calls(graph, "broadcast_tensors")
    assert GradientFlow(graph).kept_operands(node) == (0, 1)


VIEWS = [spec for spec in all_ops() if spec.view]


@pytest.mark.parametrize("spec", VIEWS, ids=lambda spec: spec.name)
def test_every_output_of_views_of_several_tensors_is_made_of_one(spec: OpSpec) -> None:
    """What `GradientFlow` takes for granted of declared views, asked of torch: output i is a view of operand i."""
    for seed in range(4):
        call = random_call(spec, Random(seed))
        passing = [i for i, name in enumerate(call.operand_names) if name not in spec.constants]
        for asked in passing if len(passing) > 1 else ():
            parts = [torch.zeros(t.shape, dtype=t.dtype, requires_grad=i == asked) for i, t in enumerate(call.tensors)]
            outputs = run_whole(call, parts)
            assert [x.requires_grad for x in outputs] == [i == asked for i in range(len(parts))]
