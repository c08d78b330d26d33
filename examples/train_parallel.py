"""A plain training loop on many devices: `torchrun --nproc-per-node 4 examples/train_parallel.py`."""

import os

import torch
from torch import Tensor, nn

import conjoin


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


torch.manual_seed(0)
model = Classifier()
batch = (torch.randn(32, 64), torch.randint(0, 10, (32,)))
machine = f"local:{os.environ.get('WORLD_SIZE', 1)}"  # or a preset, a machine file, conjoin.Machine.detect()
plan = conjoin.plan(model, batch, machine, loss=nn.functional.cross_entropy, strategy="fsdp")
step = conjoin.load(plan, model)  # this rank's part, as an nn.Module
batch = [x.to(step.store.device) for x in batch]
optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)

for i in range(5):
    loss = step(*batch)
    loss.backward()
    norm = step.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step.communicator.rank == 0:
        print(f"step {i}   loss {loss.item():.6f}   gradient norm {norm.item():.6f}")
conjoin.save_checkpoint("checkpoint", step, optimizer, extra={"step": 5})
