"""A graph network on a whole graph over many devices: `torchrun --nproc-per-node 2 examples/train_gnn.py`."""

import os

import torch
from torch import Tensor, nn

import conjoin
from conjoin.gnn import UNLABELLED, pad_parts


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

cuts = [vertices * part // ranks for part in range(ranks + 1)]  # or those of a partition
padding = pad_parts(cuts)
batch = padding.spread(x), padding.renumber(torch.stack((source, target))), padding.spread(labels, UNLABELLED)
model = Network(classes, classes)
strategy = "vertex-parallel" if ranks > 1 else "single"
plan = conjoin.plan(model, batch, f"local:{ranks}", loss=nn.functional.cross_entropy, strategy=strategy)
step = conjoin.load(plan, model)
batch = tuple(tensor.to(step.store.device) for tensor in batch)
optimizer = torch.optim.Adam(step.parameters(), lr=0.02)

for epoch in range(30):
    optimizer.zero_grad()
    loss = step(*batch)
    loss.backward()
    optimizer.step()
    if step.communicator.rank == 0 and epoch % 10 == 9:
        print(f"epoch {epoch + 1}   loss {loss.item():.4f}")

conjoin.save_checkpoint("checkpoint", step, optimizer)
