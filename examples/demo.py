"""What conjoin does so far, in a minute and without a GPU: look into a model, capture it, train the captured one.

Run with `make demo`, or `python examples/demo.py`.
"""

from __future__ import annotations

import copy
import sys
import time

import torch
from torch import Tensor, nn

import conjoin
import zoo
from conjoin.cli import main as command

STEPS = 8


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def train(step: nn.Module, batch: tuple[Tensor, ...], loss: object) -> list[float]:
    """Train with AdamW and clipped gradients; the same seed draws the same dropout."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        value = step(*batch) if loss is None else loss(step(*batch[:-2]), *batch[-2:])  # type: ignore[operator]
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(step.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
    return losses


def show_capture() -> None:
    heading("1. A 7-billion-parameter model, captured without its memory")
    command(["inspect", "llama-7b", "--batch", "1"])


def show_training() -> bool:
    heading("2. A BERT with dropout, trained as it is and as captured")
    model, batch, loss = zoo.build("bert-large:tiny")
    assert isinstance(batch, tuple)
    model.train()
    plain = copy.deepcopy(model)
    start = time.perf_counter()
    graph = conjoin.capture(model, batch, loss)
    captured = conjoin.to_module(graph, model)
    seconds, mark = time.perf_counter() - start, conjoin.fingerprint(graph)[:16]
    print(f"captured {len(graph.nodes)} operators in {seconds:.1f} s, fingerprint {mark}")
    ours, theirs = train(captured, batch, None), train(plain, batch, loss)
    print("step   captured      plain")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        print(f"{i:>4}   {a:.6f}   {b:.6f}   {'identical' if a == b else f'differs by {abs(a - b):.2e}'}")
    same = all(torch.equal(p, q) for p, q in zip(captured.parameters(), plain.parameters(), strict=True))
    print(f"after {STEPS} steps all weights are {'bit-identical' if same else 'NOT identical'}")
    return same and ours == theirs


def main() -> int:
    torch.set_num_threads(1)
    show_capture()
    ok = show_training()
    print("\nmatches" if ok else "\nDOES NOT MATCH")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
