"""`conjoin run` as a trainer, judged by the same loop written by hand in plain torch on one device."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import conjoin
from conjoin.cli.trainer.recipe import Schedule
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
Plans = Callable[..., str]
LENGTH, WORDS, BATCH = 6, 300, 4
NETS = f"""\
import numpy as np
import torch
from torch import nn


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix, self.drop = nn.Embedding({WORDS}, 8), nn.Linear(8, 8), nn.Dropout(0.0)
        self.out = nn.Linear(8, {WORDS})

    def forward(self, tokens):
        return self.out(self.drop(torch.tanh(self.mix(self.words(tokens).cumsum(1)))))


def loss(scores, following):
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def writer(batch_size={BATCH}):
    tokens = torch.zeros(batch_size, {LENGTH}, dtype=torch.int64)
    return Writer().double(), (tokens, tokens), loss


def dropping():
    model, batch, loss = writer()
    model.drop.p = 0.5
    return model, batch, loss


class Flaky(torch.utils.data.Dataset):
    # tokens that can be read so many times
    def __init__(self):
        self.tokens = torch.from_numpy(np.load("train.npy"))
        self.left = int(np.loadtxt("reads"))

    def __len__(self):
        return (len(self.tokens) - 1) // {LENGTH}

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk is gone")
        found = self.tokens[index * {LENGTH} : (index + 1) * {LENGTH} + 1]
        return found[:-1], found[1:]


def flaky():
    return Flaky()


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        x = torch.linspace(0, index / 22, 64)
        return x, x.sum().view(1)


def points():
    return Points()


def line():
    batch = (torch.zeros(8, 64), torch.zeros(8, 1))
    return nn.Linear(64, 64, bias=False), batch, lambda out, y: nn.functional.mse_loss(out.mean(1, True), y)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    tokens = torch.zeros(4, 12, dtype=torch.int64)
    config = LlamaConfig(vocab_size=256, use_cache=False, **sizes)
    return LlamaForCausalLM(config), dict(input_ids=tokens, labels=tokens)


def nothing():
    return 3
"""


@pytest.fixture(autouse=True)
def _files(folder: Path) -> None:
    (folder / "nets.py").write_text(NETS)
    generator = np.random.default_rng(0)
    np.save(folder / "train.npy", generator.integers(0, WORDS, 50 * LENGTH + 1))
    generator.integers(0, WORDS, 7 * LENGTH + 3).astype("<u2").tofile(folder / "eval.bin")


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """The plans that are made already, as text."""
    return {}


@pytest.fixture
def plan(run: Run, folder: Path, made: dict[str, str]) -> Plans:
    def make(model: str, ranks: int, strategy: str, *more: str) -> str:
        name = f"{strategy}{ranks}.json"
        if model + name not in made:
            where = ("--machine", "laptop" if ranks == 1 else f"local:{ranks}")
            assert run("plan", f"nets.py:{model}", *where, "--strategy", strategy, *more, "-o", name).code == 0
            made[model + name] = (folder / name).read_text()
        (folder / name).write_text(made[model + name])
        return name

    return make


RECIPE = ("--optimizer", "adamw", "--lr", "3e-2", "--weight-decay", "0.1", "--schedule", "cosine:3", "--clip", "0.5")
AROUND = ("--accumulate", "2", "--eval-data", "eval.bin", "--seed", "5", "--json")


def by_hand(folder: Path, num_steps: int, evaluated: tuple[int, ...]) -> tuple[list[float], list[float], nn.Module]:
    """Losses of the steps and of evaluation: what somebody would write with torch and transformers' schedules."""
    from transformers import get_scheduler

    names: dict[str, Any] = {}
    exec(NETS, names)
    torch.manual_seed(5)
    model, _, loss = names["writer"]()
    tokens = torch.from_numpy(np.load(folder / "train.npy"))
    samples = [tokens[i : i + LENGTH + 1] for i in range(0, len(tokens) - LENGTH, LENGTH)]
    others = torch.from_numpy(np.fromfile(folder / "eval.bin", "<u2").astype(np.int64))
    held_out = torch.stack([others[i : i + LENGTH + 1] for i in range(0, len(others) - LENGTH, LENGTH)])
    sampler: Any = DistributedSampler(samples, num_replicas=1, rank=0, seed=5)  # type: ignore[arg-type]
    loader = DataLoader(samples, batch_size=BATCH, sampler=sampler, drop_last=True)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.1)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=3, num_training_steps=num_steps)
    losses, evals, batches, epoch = [], [], iter(loader), 0
    for step in range(num_steps):
        total = 0.0
        for _ in range(2):
            try:
                batch = next(batches)
            except StopIteration:
                epoch += 1
                sampler.set_epoch(epoch)
                batches = iter(loader)
                batch = next(batches)
            value = loss(model(batch[:, :-1]), batch[:, 1:]) / 2
            value.backward()
            total += value.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
        if step + 1 in evaluated:
            with torch.no_grad():
                evals.append(loss(model(held_out[:, :-1]), held_out[:, 1:]).item())
    return losses, evals, model


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


def test_it_trains_as_a_loop_by_hand_does(run: Run, plan: Plans, folder: Path) -> None:
    losses, evals, model = by_hand(folder, 100, (40, 80, 100))
    made, files = plan("writer", 1, "single"), ("--data", "train.npy", "--log", "log.jsonl", "-o", "trained.pt")
    whole = run("run", made, "nets.py:writer", "--steps", "100", "--eval-every", "40", *RECIPE, *AROUND, *files)
    assert whole.code == 0, whole.err
    assert json.loads(whole.out)["losses"] == pytest.approx(losses, rel=1e-9)
    assert [entry["loss"] for entry in logged(folder, "eval")] == pytest.approx(evals, rel=1e-9)
    trained = torch.load(folder / "trained.pt")
    assert all(torch.allclose(trained[name], x, rtol=1e-7) for name, x in model.state_dict().items())
    steps = logged(folder, "step")
    assert [entry["step"] for entry in steps] == [*range(1, 101)] and [entry["loss"] for entry in steps] == losses
    assert [entry["lr"] for entry in steps[:4]] == pytest.approx([0, 0.01, 0.02, 0.03])
    assert all(entry["norm"] > 0 and entry["samples_per_second"] > 0 and entry["mfu"] is None for entry in steps)


def test_it_goes_on_after_a_fault_on_other_numbers_of_ranks(run: Run, plan: Plans, folder: Path) -> None:
    losses, evals, _ = by_hand(folder, 24, (24,))
    command = ("nets.py:writer", "--steps", "24", *RECIPE, *AROUND, "--data", "nets.py:flaky")
    kept = ("--checkpoint", "kept", "--save-every", "4", "--log", "log.jsonl", "--resume")
    for ranks, strategy, reads in ((4, "data-parallel", 17), (2, "fsdp", 41)):  # in step 9, and 10 steps after the 8th
        (folder / "reads").write_text(str(reads))
        failed = run("run", plan("writer", ranks, strategy), *command, *kept).refused()
        assert "failed with OSError: the disk is gone" in failed and "nets.py:" in failed
    (folder / "reads").write_text("1000")
    done = run("run", plan("writer", 1, "single"), *command, *kept)
    assert done.code == 0 and json.loads(done.out)["losses"] == pytest.approx(losses[16:], rel=1e-9)
    assert [entry["step"] for entry in logged(folder, "start")] == [0, 8, 16]
    assert [entry["step"] for entry in logged(folder, "checkpoint")] == [4, 8, 12, 16, 20, 24]
    by_step = {entry["step"]: entry["loss"] for entry in logged(folder, "step")}
    assert [by_step[step + 1] for step in range(24)] == pytest.approx(losses, rel=1e-9)
    assert [entry["loss"] for entry in logged(folder, "eval")] == pytest.approx(evals, rel=1e-9)

    again = run("run", "single1.json", *command, *kept[:-1])
    assert "There is one already" in again.refused()
    assert json.loads(run("run", "single1.json", *command, *kept).out)["losses"] == [], "all steps are done"
    other = run("run", "single1.json", "nets.py:writer", "--checkpoint", "kept", "--resume").refused()
    assert "It has a training on data" in other


def test_what_is_drawn_does_not_hang_on_where_a_training_was_stopped(run: Run, plan: Plans) -> None:
    made = plan("dropping", 1, "single")
    command = ("run", made, "nets.py:dropping", "--json", "--data", "train.npy")
    whole = json.loads(run(*command, "--steps", "4").out)["losses"]
    first = json.loads(run(*command, "--steps", "2", "--checkpoint", "kept").out)["losses"]
    rest = json.loads(run(*command, "--steps", "4", "--checkpoint", "kept", "--resume").out)["losses"]
    assert first + rest == whole and len(set(whole)) == 4


def test_a_dataset_of_ones_own_and_how_much_of_the_device_is_used(run: Run, plan: Plans, folder: Path) -> None:
    made = plan("line", 1, "single")
    command = ("run", made, "nets.py:line", "--steps", "5", "--data", "nets.py:points", "--eval-data", "nets.py:points")
    told = json.loads(run(*command, "--machine", "laptop", "--json", "--log", "log.jsonl").out)
    work = 2 * (2 * 8 * 64 * 64)  # forward, and for the gradient of the weights; the inputs need none
    peak = conjoin.machine.parse_machine("laptop", folder).device_type(0).flops_of("float32")
    for mfu, seconds in (("mfu", "median_seconds_per_step"), ("predicted_mfu", "predicted_seconds_per_step")):
        assert told[mfu] == pytest.approx(work / peak / told[seconds], rel=0.1)
    assert told["samples_per_second"] == pytest.approx(8 / told["median_seconds_per_step"])
    (found,) = logged(folder, "eval")  # 22 samples: batches of 8, 8 and 6
    names: dict[str, Any] = {}
    exec(NETS, names)
    torch.manual_seed(0)
    model, _, loss = names["line"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    points = names["Points"]()
    sampler: Any = DistributedSampler(points, num_replicas=1, rank=0)
    batches = [*DataLoader(points, 8, sampler=sampler, drop_last=True)]
    sampler.set_epoch(1)
    batches += [*DataLoader(points, 8, sampler=sampler, drop_last=True)]
    sampler.set_epoch(2)
    batches += [*DataLoader(points, 8, sampler=sampler, drop_last=True)]
    for x, y in batches[:5]:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    x, y = next(iter(DataLoader(points, 22)))
    assert found["loss"] == pytest.approx(loss(model(x), y).item(), rel=1e-5)
    lines = run(*command, "--machine", "laptop").out.splitlines()
    assert re.match(r"step    5   loss \S+ +\S+ ms   lr 1.00e-03   \S+ samples/s$", lines[-4])
    assert re.match(r"eval    5   loss \S+", lines[-3]) and "of the peak rate (MFU), predicted" in lines[-2]


def test_text_for_a_model_of_transformers_in_half_precision(run: Run, plan: Plans, folder: Path) -> None:
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times. " * 4)
    made = plan("llama", 1, "single", "--precision", "fp16-mixed")
    command = ("run", made, "nets.py:llama", "--json", "--data", "book.txt", "--lr", "1e-2", "--checkpoint", "kept")
    first = json.loads(run(*command, "--steps", "8").out)["losses"]
    rest = json.loads(run(*command, "--steps", "12", "--resume").out)["losses"]
    assert first[0] == pytest.approx(np.log(256), rel=0.1) and min(rest) < 0.8 * first[0]
    assert conjoin.runtime.has_checkpoint("kept")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--schedule", "cosin"), "Did you mean cosine?"),
        (("--schedule", "cosine:ten"), "as cosine:100"),
        (("--schedule", "linear:10"), "A warmup of 10 steps"),
        (("--eval-every", "2"), "without --eval-data"),
        (("--resume",), "without --checkpoint"),
        (("--data", "nowhere.npy"), "No such file"),
        (("--data", "nets.py"), "it is named .py"),
        (("--data", "float.npy"), "not one row of whole numbers"),
        (("--data", "short.npy"), "They have 3 tokens"),
        (("--data", "large.npy"), "have the token 300"),
        (("--data", "nets.py:nothing"), "__len__ and __getitem__"),
        (("--data", "nets.py:points"), "of shape (4, 64)"),
        (("--data", "nets.py:pints"), "Did you mean points?"),
        (("--checkpoint", "nets.py/kept"), "is not a directory"),
        (("--log", "nowhere/log"), "there is no directory"),
    ],
)
def test_what_cannot_be_trained_on(run: Run, plan: Plans, folder: Path, options: tuple[str, ...], why: str) -> None:
    np.save(folder / "float.npy", np.ones(100))
    np.save(folder / "short.npy", np.ones(3, np.int32))
    np.save(folder / "large.npy", np.full(100, WORDS))
    assert why in run("run", plan("writer", 1, "single"), "nets.py:writer", *options, "--json").refused()


def test_schedules_are_those_of_transformers() -> None:
    from transformers import get_scheduler

    for name in ("constant", "linear", "cosine"):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = get_scheduler(
            name if name != "constant" else "constant_with_warmup", optimizer, num_warmup_steps=4, num_training_steps=17
        )
        ours = Schedule.parse(f"{name}:4")
        for step in range(17):
            assert ours.factor(step, 17) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
            optimizer.step()
            theirs.step()
