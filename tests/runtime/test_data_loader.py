"""The loader: the batches of a plain DataLoader, cut for every rank, whatever ranks, workers and breaks there are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from conjoin.errors import ConjoinError
from conjoin.frontends import capture
from conjoin.ir import Plan
from conjoin.machine import parse_machine
from conjoin.runtime import Loader, full_state_dict, load, load_checkpoint, run_ranks, save_checkpoint
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.state.storage import Store
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.runtime.checkpoint_cases import in_processes

BATCH, WORDS, LENGTH = 6, 11, 4
SIZE = 32
"""Five batches, and two samples are left."""
SEED = 5
TOLERANCE = 1e-9


class Net(nn.Module):
    """Words that look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).unsqueeze(1)
        x = scaled_dot_product_attention(x, x, x).squeeze(1)
        y: Tensor = self.down(self.up(x).relu())
        return y


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Samples that tell which they are; notes which were read."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        tokens = (torch.arange(LENGTH) * 7 + index) % WORDS
        return tokens, (tokens * 3 + index // WORDS) % WORDS


class Noisy(Numbers):
    """Draws from every generator there is."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(WORDS, (LENGTH,)) + random.randrange(WORDS) + int(np.random.randint(WORDS))
        return (drawn + index) % WORDS, (drawn * 2) % WORDS


def make_model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double().train()


@cache
def plan_for(strategy: str, num_ranks: int) -> Plan:
    batch = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    _model()  # ranks in threads would draw it at the same time, from one generator
    return make_plan(capture(make_model(), (batch, batch), loss_of), parse_machine(f"local:{num_ranks}"), strategy)


_model = cache(make_model)


def part_of(plan: Plan, communicator: Communicator, state: dict[str, Tensor] | None = None) -> ParallelModule:
    store = Store(plan, communicator.rank, torch.device("cpu"))
    store.fill(_model())
    step = ParallelModule(plan, store, communicator)
    if state is not None:
        step.load_state_dict(state)
    return step


def plain_batches(dataset: Dataset[Any], shuffle: bool, epochs: int, drop_last: bool = True) -> Iterator[list[Tensor]]:
    """What a plain DataLoader gives in one process, in the order of torch's own sampler."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=SEED)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield from DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=drop_last)


PLANS = [("single", 1), ("fsdp", 2), ("data-parallel", 3), ("fsdp", 4), ("megatron", 2), ("context:cp=2,dp=2", 4),
         ("data-parallel+micro=3", 2), ("data-parallel+micro=2", 2)]  # fmt: skip


@pytest.mark.parametrize(("strategy", "num_ranks"), PLANS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_parts_of_all_ranks_are_the_batches_of_one_process(strategy: str, num_ranks: int, shuffle: bool) -> None:
    plan = plan_for(strategy, num_ranks)

    def program(communicator: Communicator) -> tuple[list[Any], list[Any], list[int]]:
        step, dataset = part_of(plan, communicator), Numbers()
        loader = Loader(dataset, step, shuffle=shuffle, seed=SEED)
        assert len(loader) == 5 and loader.batch_size == BATCH
        batches = [batch for _ in range(2) for batch in loader]
        return [part.region for part in step.input_parts()], batches, dataset.read

    found = run_ranks(plan.mesh, program)
    for i, wanted in enumerate(plain_batches(Numbers(), shuffle, 2)):
        for place, whole in enumerate(wanted):
            joined = torch.full_like(whole, -1)
            for regions, batches, _ in found:
                part = joined[tuple(slice(*span) for span in regions[place])]
                assert ((part == -1) | (part == batches[i][place])).all(), "ranks that hold the same have the same"
                part.copy_(batches[i][place])
            assert torch.equal(joined, whole)
    for regions, _, read in found:
        rows = {span for region in regions for span in range(*region[0])}
        assert len(read) == 10 * len(rows), "a rank reads the samples of its parts and no others"


def sgd(step: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(step.parameters(), lr=0.3)


def train(step: Callable[..., Tensor], optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> list[float]:
    losses = []
    for batch in batches:
        loss = step(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def plain_losses() -> list[float]:
    """Of three epochs in one process with a plain DataLoader."""
    model = make_model()
    return train(lambda x, y: loss_of(model(x), y), sgd(model), plain_batches(Numbers(), True, 3))


def first_of(loader: Loader, count: int) -> Iterator[Any]:
    """Some batches, over the ends of epochs; the loop stands after the last of them."""
    while count:
        for batch in loader:
            yield batch
            count -= 1
            if not count:
                break


def _train_from(
    plan: Plan, state: dict[str, Tensor] | None, kept: str | None, count: int, communicator: Communicator
) -> tuple[list[float], dict[str, Tensor], str]:
    step = part_of(plan, communicator, state)
    loader = Loader(Numbers(), step, shuffle=True, seed=SEED if kept is None else 99)
    if kept is not None:
        loader.load_state_dict(json.loads(kept))
    losses = train(step, sgd(step), first_of(loader, count))
    return losses, full_state_dict(step, everywhere=True), json.dumps(loader.state_dict())


@pytest.mark.parametrize("stops", [(3, 8), (5, 9), (1, 10)])
@pytest.mark.parametrize("ranks", [(2, 4, 1), (1, 2, 4), (4, 1, 2)])
def test_losses_go_on_on_other_ranks(stops: tuple[int, int], ranks: tuple[int, int, int]) -> None:
    """Three runs on other numbers of ranks, each from the state of the one before, are one plain run."""
    state: dict[str, Tensor] | None = None
    kept: str | None = None
    losses: list[float] = []
    for num_ranks, count in zip(ranks, (stops[0], stops[1] - stops[0], 15 - stops[1]), strict=True):
        plan = plan_for("fsdp" if num_ranks > 1 else "single", num_ranks)

        results = run_ranks(plan.mesh, partial(_train_from, plan, state, kept, count))
        assert len({result[2] for result in results}) == 1, "the state is the same on every rank"
        found, state, kept = results[0]
        losses += found
    assert losses == pytest.approx(plain_losses(), rel=TOLERANCE, abs=TOLERANCE)


def test_a_checkpoint_of_processes_goes_on_in_one(tmp_path: Path) -> None:
    plan = plan_for("fsdp", 2)

    def program() -> list[float]:
        step = load(plan, _model())
        loader = Loader(Numbers(), step, shuffle=True, seed=SEED)
        optimizer = sgd(step)
        losses = train(step, optimizer, first_of(loader, 7))
        save_checkpoint(tmp_path / "kept", step, optimizer, extra={"data": loader.state_dict()})
        return losses

    first = in_processes(2, tmp_path / "ranks", program)
    step = run_ranks(plan_for("single", 1).mesh, lambda ranks: part_of(plan_for("single", 1), ranks))[0]
    optimizer = sgd(step)
    loader = Loader(Numbers(), step, shuffle=True)
    loader.load_state_dict(load_checkpoint(tmp_path / "kept", step, optimizer)["data"])
    assert (loader.epoch, loader.state_dict()["samples"]) == (1, 2 * BATCH)
    losses = first[0] + train(step, optimizer, first_of(loader, 8))
    assert first[0] == first[1] and losses == pytest.approx(plain_losses(), rel=TOLERANCE, abs=TOLERANCE)


def test_what_samples_draw_depends_on_their_place_alone() -> None:
    """The same noise on one rank and on two, with workers and without, resumed and not; nobody else's draws change."""

    def drawn(num_ranks: int, num_workers: int = 0, skip: int = 0) -> list[list[Tensor]]:
        plan = plan_for("data-parallel" if num_ranks > 1 else "single", num_ranks)

        def program(communicator: Communicator) -> list[list[Tensor]]:
            loader = Loader(Noisy(), part_of(plan, communicator), shuffle=True, seed=SEED, num_workers=num_workers)
            loader.load_state_dict({**loader.state_dict(), "samples": skip * BATCH})
            return list(loader)

        parts = run_ranks(plan.mesh, program)
        return [[torch.cat(pieces) for pieces in zip(*batches, strict=True)] for batches in zip(*parts, strict=True)]

    _model()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    whole = drawn(1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    for other in (drawn(2), drawn(1, num_workers=2), [*whole[:2], *drawn(1, skip=2)]):
        pairs = [pair for mine, theirs in zip(whole, other, strict=True) for pair in zip(mine, theirs, strict=True)]
        assert all(torch.equal(x, y) for x, y in pairs)
    assert not torch.equal(whole[0][0] - whole[0][0][:1], whole[1][0] - whole[1][0][:1])


def alone(**arguments: Any) -> Loader:
    plan = plan_for("single", 1)
    step = run_ranks(plan.mesh, lambda ranks: part_of(plan, ranks))[0]
    return Loader(arguments.pop("dataset", Numbers()), step, **arguments)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_last_batch_is_kept_whole_where_that_is_asked_for(shuffle: bool) -> None:
    plan = plan_for("fsdp", 2)
    found = run_ranks(
        plan.mesh,
        lambda ranks: list(Loader(Numbers(), part_of(plan, ranks), shuffle=shuffle, seed=SEED, drop_last=False)),
    )
    wanted = list(plain_batches(Numbers(), shuffle, 1, drop_last=False))
    assert len(alone(drop_last=False)) == len(found[0]) == len(wanted) == 6
    assert all(
        torch.equal(batches[-1][i], wanted[-1][i]) and len(wanted[-1][i]) == 2 for batches in found for i in (0, 1)
    )


def test_a_loop_that_is_left_begins_anew_and_a_state_at_the_end_is_the_next_epoch() -> None:
    loader = alone(shuffle=True, seed=SEED)
    first = next(iter(loader))
    assert torch.equal(first[0], next(iter(loader))[0]) and loader.epoch == 0
    for batch in loader:
        last, at_the_end = batch, loader.state_dict()
    assert loader.epoch == 1 and at_the_end["epoch"] == 0
    other = alone(shuffle=True)
    other.load_state_dict(at_the_end)
    assert other.epoch == 1 and torch.equal(next(iter(other))[0], next(iter(loader))[0])
    assert not torch.equal(last[0], first[0])


def test_a_state_goes_on_with_another_batch_size() -> None:
    loader = alone()
    loader.load_state_dict({**loader.state_dict(), "samples": 4})
    found = [batch[0][:, 0].tolist() for batch in loader]
    assert found == [[index % WORDS for index in range(start, start + BATCH)] for start in (4, 10, 16, 22)]


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_batches_come_as_names_too() -> None:
    def named(samples: list[Any]) -> dict[str, Tensor]:
        return {"target": torch.stack([y for _, y in samples]), "tokens": torch.stack([x for x, _ in samples])}

    batch = next(iter(alone(collate_fn=named)))
    assert list(batch) == ["target", "tokens"] and torch.equal(batch["tokens"], next(iter(alone()))[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: alone(dataset=_Stream()), "A _Stream was given"),
        (lambda: alone(dataset=Numbers(5)), "5 samples was given for batches of 6"),
        (lambda: Loader(Numbers(0), plan_for("single", 1)), "A Plan was given"),
        (lambda: alone().load_state_dict({}), "seed=None"),
        (lambda: alone().load_state_dict(alone(dataset=Numbers(40)).state_dict()), "num_samples=40"),
        (lambda: alone().load_state_dict(alone(shuffle=True).state_dict()), "shuffle=True"),
        (lambda: list(alone(collate_fn=lambda samples: [torch.stack(x).T for x in zip(*samples, strict=True)])),
         "tokens of shape (4, 6)"),
        (lambda: list(alone(collate_fn=lambda samples: torch.zeros(6, 4))), "with other inputs"),
        (lambda: alone(dataset=[]), "Its __len__ is 0"),
        (lambda: list(alone(dataset=[(x.double(), y) for x, y in map(Numbers(6).__getitem__, range(6))])),
         "The plan takes torch."),
        (lambda: list(alone(dataset=[(torch.zeros(4 + i % 2), i) for i in range(6)])), "(4,), int; (5,), int."),
        (lambda: list(alone(dataset=[(*Numbers(6)[i], "name") for i in range(6)])), "Tensor, Tensor, tuple) came"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConjoinError) as caught:
        make()
    assert_three_sentences(caught.value)
    assert words in str(caught.value)
