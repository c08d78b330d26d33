"""A graph network on a whole graph over many devices: `torchrun --nproc-per-node 2 examples/train_gnn.py`."""

import copy
import os

import torch
from torch import Tensor, nn

import conjoin
from conjoin.gnn import Graded, OnlineParts, WholeGraph, equal_edges, find_roles


class Sage(nn.Module):
    """A layer of every vertex and of the mean of its neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = x[edge_index[0]]
        at = edge_index[1].unsqueeze(1).expand_as(rows)
        return self.own(x) + self.others(torch.zeros_like(x).scatter_reduce(0, at, rows, "mean", include_self=False))


class Network(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = Sage(features, 32), Sage(32, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, edge_index)), edge_index)


torch.manual_seed(0)
vertices, classes, ranks = 400, 4, int(os.environ.get("WORLD_SIZE", 1))
labels = torch.arange(vertices) * classes // vertices  # communities of neighbouring vertices
source = torch.randint(vertices, (4000,))
near = (source + torch.randint(-20, 21, (4000,))).clamp(0, vertices - 1)
target = torch.where(torch.rand(4000) < 0.8, near, torch.randint(vertices, (4000,)))
x = nn.functional.one_hot(labels, classes) + 2 * torch.randn(vertices, classes)  # says little of its label

model, loss = Network(classes, classes), Graded(nn.functional.cross_entropy)
batch = x, torch.stack((source, target)), labels
strategy = "vertex-parallel" if ranks > 1 else "single"
graph = conjoin.capture(model, batch, loss)
whole = WholeGraph.of(find_roles(graph), batch)  # edges in the order of their targets
without = tuple(torch.empty_like(tensor, device="meta") for tensor in batch)  # a plan needs shapes
plan = conjoin.plan(copy.deepcopy(model).to("meta"), without, f"local:{ranks}", loss=loss, strategy=strategy)
step = conjoin.load(plan, model, loss=loss)
parts = OnlineParts(whole, equal_edges(whole.adjacency, ranks), step)  # this rank's vertices and edges
optimizer = torch.optim.Adam(step.parameters(), lr=0.02)

for epoch in range(30):
    optimizer.zero_grad()
    with parts.timed() as clock:
        made = step(*parts.batch)
        clock.turn()
        made["loss"].backward()
    optimizer.step()
    told = parts.learn(epochs_left=29 - epoch)  # and cut anew where that pays
    if step.communicator.rank == 0 and (epoch % 10 == 9 or told.moved):
        right = made["correct"].item() / made["counted"].item()
        print(f"epoch {epoch + 1}   loss {made['loss'].item():.4f}   accuracy {right:.2f}   {told.moved or ''}")

conjoin.save_checkpoint("checkpoint", step, optimizer)
