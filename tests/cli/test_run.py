"""`run` and `verify`: what they print, their exit codes, that a wrong plan cannot pass; alone and under torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import conjoin
import conjoin.comm.route
from tests.cli.conftest import Ran, check_machine
from tests.cli.processes import Forked
from tests.ir.wording import assert_three_sentences
from tests.waiting import HUNG_SECONDS

Run = Callable[..., Ran]
NETS = """\
import torch
from torch import nn


def mlp(batch_size=8, classes=4):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, classes))
    return model, (torch.randn(batch_size, 6), torch.randn(batch_size, classes)), nn.functional.mse_loss


def announced():
    print("made", flush=True)
    return mlp()


def wider():
    return mlp(classes=6)


def without_loss():
    return nn.Linear(6, 4), torch.ones(8, 6)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(6, 4), nn.Dropout(0.5)

    def forward(self, x, labels=None):
        logits = self.drop(self.fc(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def named():
    return Named(), {"x": torch.randn(8, 6), "labels": torch.randint(4, (8,))}, lambda found: found["loss"]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x, y):
        logits = self.fc(x)
        return logits, nn.functional.cross_entropy(logits, y)


def pair():
    return Pair(), (torch.randn(8, 6), torch.randint(4, (8,)))


def compiled():
    model, batch, loss = mlp()
    return torch.compile(model, backend="eager"), batch, loss


def frozen():
    model, batch, loss = mlp()
    return model.requires_grad_(False), batch, loss


def empty():
    return nn.ReLU(), (torch.randn(8, 6), torch.randn(8, 6)), nn.functional.mse_loss


def detached():
    model, batch, loss = mlp()
    return model, batch, lambda out, target: loss(out, target).detach()


def without_values():
    model, batch, loss = mlp()
    return model.to("meta"), batch, loss


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, device="meta"))

    def forward(self, x):
        return x * self.weight


def bare():
    return Bare(), (torch.randn(8, 6), torch.randn(8, 6)), nn.functional.mse_loss


def diverging():
    model, batch, _ = mlp()
    return model, batch, lambda out, target: (out - target).square().sum() * float("inf")
"""


@pytest.fixture(autouse=True)
def _nets(folder: Path) -> None:
    (folder / "nets.py").write_text(NETS)


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, int, str], str]:
    """The plans that are made already, as text."""
    return {}


@pytest.fixture
def plan(run: Run, folder: Path, made: dict[tuple[str, int, str], str]) -> Callable[..., str]:
    """A plan in a file."""

    def make(model: str = "nets.py:mlp", ranks: int = 2, strategy: str = "data-parallel") -> str:
        name, key = f"{strategy}{ranks}.json", (model, ranks, strategy)
        if key not in made:
            shown = run("plan", model, "--machine", f"local:{ranks}", "--strategy", strategy, "-o", name)
            assert shown.code == 0, shown.err
            made[key] = (folder / name).read_text()
        (folder / name).write_text(made[key])
        return name

    return make


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def expected_losses(
    num_steps: int,
    optimize: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    batch_size: int = 8,
) -> list[float]:
    """What plain torch gives for the same seed, model, batch and optimizer."""
    names: dict[str, Any] = {}
    exec(NETS, names)
    torch.manual_seed(0)
    model, (x, target), loss = names["mlp"](batch_size)
    optimizer = optimize(model.parameters())
    losses = []
    for _ in range(num_steps):
        value = loss(model(x), target)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def losses_in(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^step +\d+   loss (\S+) +\S+ ms   lr ", text, re.MULTILINE)]


# Run.


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "data-parallel"), (2, "fsdp"), (1, "single")])
def test_run_trains_like_one_device(run: Run, plan: Callable[..., str], ranks: int, strategy: str) -> None:
    shown = run("run", plan(ranks=ranks, strategy=strategy), "nets.py:mlp", "--steps", "2")
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert len(lines) == 3, "rank 0 alone prints"
    where = f"{ranks} ranks" if ranks > 1 else "one device"
    assert lines[0].startswith(strategy) and f"plan of Sequential for {where}" in lines[0]
    assert losses_in(shown.out) == pytest.approx(expected_losses(2), abs=2e-6)


def test_run_takes_an_optimizer_and_tells_what_was_predicted(run: Run, plan: Callable[..., str]) -> None:
    made, command = plan(ranks=1, strategy="single"), ("--steps", "3", "--optimizer", "sgd-momentum", "--lr", "0.1")
    shown = run("run", made, "nets.py:mlp", *command, "--machine", "laptop")
    expected = expected_losses(3, lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9))
    assert losses_in(shown.out) == pytest.approx(expected, abs=2e-6)
    assert re.fullmatch(r"predicted .+s, measured .+s a step: [+-]\d+%", shown.out.splitlines()[-1])
    told = json.loads(run("run", made, "nets.py:mlp", *command, "--machine", "laptop", "--json").out)
    assert told["losses"] == pytest.approx(expected, abs=2e-6) and len(told["seconds"]) == 3
    assert told["predicted_seconds_per_step"] > 0 and told["median_seconds_per_step"] > 0
    assert "sgd-momentum, adam" in run("run", made, "nets.py:mlp", "--optimizer", "lion").refused()


def test_run_begins_with_weights(run: Run, plan: Callable[..., str], folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(NETS, names)
    torch.manual_seed(0)
    torch.save(names["mlp"]()[0].state_dict(), folder / "mlp.pt")
    made = plan(ranks=2, strategy="fsdp")
    shown = run("run", made, "nets.py:without_values", "--steps", "2", "--weights", "mlp.pt")
    assert losses_in(shown.out) == pytest.approx(expected_losses(2), abs=2e-6)
    assert "nothing is downloaded" in run("run", made, "nets.py:mlp", "--weights", "gpt2").refused()
    (folder / "mlp.pt").write_text("damaged")
    assert "mlp.pt cannot be read" in run("run", made, "nets.py:mlp", "--weights", "mlp.pt").refused()


def test_who_is_not_initialised_is_told_before_training(run: Run, plan: Callable[..., str]) -> None:
    made = plan("nets.py:bare", ranks=1, strategy="single")
    told = run("run", made, "nets.py:bare").refused()
    assert "the model itself (Bare) with weight" in told and "weights=" in told


def test_run_takes_a_batch_of_names_and_a_number_of_samples(run: Run, plan: Callable[..., str]) -> None:
    shown = run("run", plan("nets.py:named"), "nets.py:named", "--steps", "3")
    assert shown.code == 0 and len(set(losses_in(shown.out))) == 3, "dropout draws anew in every step"
    small = ("plan", "nets.py:mlp", "--machine", "local:2", "--strategy", "data-parallel", "--batch", "4")
    assert run(*small, "-o", "small.json").code == 0
    assert run("run", "small.json", "nets.py:mlp", "--batch", "4", "--steps", "1").code == 0
    assert "fingerprint" in run("run", "small.json", "nets.py:mlp", "--steps", "1").refused()


def test_a_plan_without_a_loss_cannot_train(run: Run, plan: Callable[..., str]) -> None:
    name = plan("nets.py:without_loss")
    assert "has no loss, and was asked to train" in run("run", name, "nets.py:without_loss").refused()
    assert run("verify", name, "nets.py:without_loss", "--steps", "1").code == 0


def events_in(path: Path) -> dict[str, set[str]]:
    """The streams of every process of a trace that something happened on."""
    entries = json.loads(path.read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["ph"] == "M"}
    found: dict[str, set[str]] = {}
    for event in (entry for entry in entries if entry["ph"] == "X"):
        assert event["ts"] >= 0 and event["dur"] >= 0
        device = names["process_name", event["pid"], 0]
        found.setdefault(device, set()).add(names["thread_name", event["pid"], event["tid"]])
    return found


def test_run_records_one_more_step_of_every_rank(run: Run, plan: Callable[..., str], folder: Path) -> None:
    shown = run("run", plan(), "nets.py:mlp", "--steps", "1", "--trace", "trace.json")
    assert (shown.code, shown.err) == (0, "")
    assert losses_in(shown.out) == pytest.approx(expected_losses(1), abs=2e-6)
    assert shown.out.splitlines()[-1] == "trace of one step: trace.json; open it in ui.perfetto.dev"
    streams = {"compute", "links"}
    assert events_in(folder / "trace.json") == {"measured: rank 0": streams, "measured: rank 1": streams}


def test_run_records_one_device(run: Run, plan: Callable[..., str], folder: Path) -> None:
    shown = run("run", plan(ranks=1, strategy="single"), "nets.py:mlp", "--steps", "1", "--trace", "trace.json")
    assert shown.code == 0 and events_in(folder / "trace.json") == {"measured: rank 0": {"compute"}}


# Verify.


@pytest.mark.parametrize("arguments", [(), ("--ranks",)], ids=["in this process", "on real ranks"])
def test_verify_passes_a_right_plan(run: Run, plan: Callable[..., str], arguments: tuple[str, ...]) -> None:
    shown = run("verify", plan(), "nets.py:mlp", "--steps", "3", *arguments)
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0] == "data-parallel:dp=2 plan of Sequential for 2 ranks (d0:2)"
    assert [line.split()[0] for line in lines[1:5]] == ["step", "1", "2", "3"]
    for line in lines[2:5]:
        _, alone, planned = line.split()
        assert float(alone) == pytest.approx(float(planned), rel=1e-9)
    assert lines[5].startswith("largest difference: ") and len(lines) == 8
    assert lines[6].startswith("the captured graph trains like the model itself: 3 step(s) in double precision")
    assert lines[7] == "verified: the plan trains exactly like one device (relative tolerance 1e-09)"


def test_verify_prints_json(run: Run, plan: Callable[..., str]) -> None:
    shown = run("verify", plan(strategy="fsdp"), "nets.py:mlp", "--steps", "2", "--json")
    found = json.loads(shown.out)
    assert shown.code == 0 and found["passed"] is True and found["ranks"] == 2
    assert found["worst"] < found["tolerance"] == 1e-9
    assert found["losses"] == pytest.approx(found["plan_losses"], rel=1e-9) and len(found["losses"]) == 2
    assert set(found["differences"][0]) == {"what", "rank", "relative", "allowed"}
    judged = found["against_model"]
    assert judged["passed"] and judged["batches"] == "other values within the same range"


@pytest.mark.parametrize("model", ["nets.py:named", "nets.py:mlp"])
def test_verify_a_plan_of_one_rank(run: Run, plan: Callable[..., str], model: str) -> None:
    name = plan(model, ranks=1, strategy="single")
    assert run("verify", name, model, "--steps", "2", "--ranks").code == 0


@pytest.fixture
def copies_read_as_copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that brings the wrong algebra with it, to every rank: a copy's gradient is taken for the value's."""
    monkeypatch.setattr("conjoin.comm.route.dual", conjoin.comm.route.dual)  # put back when the test is over
    wrong = "import conjoin.comm.route\nconjoin.comm.route.dual = lambda placement: placement\n"
    (folder / "wrong.py").write_text((folder / "nets.py").read_text() + wrong)
    return "wrong.py:mlp"


@pytest.mark.parametrize("arguments", [(), ("--ranks",)], ids=["in this process", "on real ranks"])
def test_verify_refutes_a_wrong_gradient(
    run: Run, plan: Callable[..., str], copies_read_as_copies: str, arguments: tuple[str, ...]
) -> None:
    name = plan()
    shown = run("verify", name, copies_read_as_copies, "--steps", "2", *arguments)
    assert (shown.code, shown.err) == (1, "")
    assert shown.out.splitlines()[-1].startswith("refuted: the plan does NOT train like one device")
    told = [line for line in shown.out.splitlines() if line.startswith("largest difference: ")]
    assert len(told) > 3 and "gradient of 0.weight on rank" in "\n".join(told)
    as_json = run("verify", name, copies_read_as_copies, "--steps", "2", "--json", *arguments)
    found = json.loads(as_json.out)
    assert as_json.code == 1 and found["passed"] is False and found["worst"] > 0.01
    sizes = [difference["relative"] for difference in found["differences"]]
    assert sizes == sorted(sizes, reverse=True)


# What cannot be done.


@pytest.mark.parametrize("command", ["run", "verify"])
def test_another_model_is_refused(run: Run, plan: Callable[..., str], command: str) -> None:
    message = run(command, plan(), "nets.py:wider", "--steps", "1").refused()
    assert re.search(r"made for Sequential with fingerprint \w{12}, and the model given has \w{12}", message)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "PLAN", "graph.json"), "The saved graph graph.json was given to be run"),
        (("verify", "PLAN", "graph.json"), "The saved graph graph.json was given to be run"),
        (("verify", "PLAN", "graph.json", "--ranks"), "The saved graph graph.json was given to be run"),
        (("run", "missing.json", "nets.py:mlp"), "missing.json could not be read"),
        (("verify", "missing.json", "nets.py:mlp"), "missing.json could not be read"),
        (("run", "nets.py", "nets.py:mlp"), "nets.py is not JSON"),
        (("verify", "nets.py", "nets.py:mlp"), "nets.py is not JSON"),
        (("run", "PLAN", "nets.py:nothing"), "has no function 'nothing'"),
        (("run", "PLAN", "nets.py:without_loss", "--batch", "3"), "takes no batch_size"),
        (("run", "PLAN", "nets.py:mlp", "--steps", "0"), "--steps"),
        (("verify", "PLAN", "nets.py:mlp", "--steps", "-3"), "--steps"),
        (("verify", "PLAN", "no-such-model"), "no model named 'no-such-model'"),
        (("run", "PLAN"), "MODEL"),
        (("run", "PLAN", "nets.py:mlp", "--trace", "missing/trace.json"), "there is no directory"),
        (("run", "PLAN", "nets.py:mlp", "--trace", "."), "The trace could not be written to .: it is a directory"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_message(
    run: Run, plan: Callable[..., str], arguments: tuple[str, ...], told: str
) -> None:
    name = plan()
    assert told in run(*(name if item == "PLAN" else item for item in arguments)).refused()


@pytest.mark.parametrize("command", ["run", "verify"])
def test_an_illegal_plan_is_refused(run: Run, plan: Callable[..., str], folder: Path, command: str) -> None:
    path = folder / plan()
    path.write_text(path.read_text().replace("param:0.weight f32[8,6]", "param:0.weight f32[8,6]{d0:B}", 1))
    message = run(command, path.name, "nets.py:mlp").refused()
    assert "is not legal" in message and "param:0.weight: is stored as B on axis d0" in message


@pytest.mark.parametrize("model", ["pair", "compiled"])
def test_models_as_people_have_them_run_and_are_verified(run: Run, plan: Callable[..., str], model: str) -> None:
    name = plan(f"nets.py:{model}", 1, "single")
    ran = run("run", name, f"nets.py:{model}", "--steps", "3")
    first, *_, last = losses_in(ran.out)
    assert ran.code == 0 and last < first, "it learns"
    assert run("verify", name, f"nets.py:{model}", "--steps", "1").code == 0


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("without_loss", "has no loss, and was asked to train"),
        ("frozen", "all of them are frozen"),
        ("empty", "no parameter that is trained: it has none"),
        ("detached", "No parameter reaches its loss with a gradient"),
    ],
)
def test_what_cannot_be_trained(run: Run, plan: Callable[..., str], model: str, told: str) -> None:
    name = plan(f"nets.py:{model}", 1, "single")
    stopped = run("run", name, f"nets.py:{model}")
    assert stopped.code == 2 and stopped.err.count("error: ") == 1 and told in stopped.err
    assert_three_sentences(stopped.err)
    assert run("verify", name, f"nets.py:{model}", "--steps", "1").code == 0, "what it computes can be compared"


@pytest.mark.parametrize("command", ["run", "verify"])
def test_ctrl_c_in_a_terminal_stops_all_of_it(
    plan: Callable[..., str], fork: Callable[..., Forked], command: str
) -> None:
    """A terminal interrupts every process of its group: the command, and the ranks that it started."""
    process = fork(command, plan(), "nets.py:announced", "--steps", "1000000")
    if command == "run":
        assert "plan of Sequential" in process.stdout.readline() and process.stdout.readline().startswith("step ")
    else:
        assert process.stderr.readline() == "made\n"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=HUNG_SECONDS)
    assert (process.returncode, err.replace("made\n", "")) == (130, "stopped\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_loss_that_is_no_number_is_not_verified(run: Run, plan: Callable[..., str]) -> None:
    message = run("verify", plan("nets.py:diverging"), "nets.py:diverging", "--steps", "1").refused()
    assert "its loss there is inf in step 1" in message


def test_the_error_of_the_users_own_model_is_told(run: Run, plan: Callable[..., str], folder: Path) -> None:
    name = plan()
    (folder / "broken.py").write_text("def make():\n    raise KeyError('data')\n")
    for command in (("run", name), ("verify", name, "--ranks")):
        message = run(*command, "broken.py:make").refused()
        assert "broken.py:make() failed with KeyError" in message and "broken.py:2: raise KeyError('data')" in message


# The same from Python.


def test_verify_plan_from_python() -> None:
    model, batch = nn.Linear(6, 4), (torch.randn(8, 6), torch.randn(8, 4))
    made = conjoin.plan(model, batch, "local:2", loss=nn.functional.mse_loss, strategy="fsdp")
    before = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    found = conjoin.verify_plan(made, model, batch, loss=nn.functional.mse_loss, num_steps=2)
    assert found.passed and found.num_ranks == 2 and len(found.losses) == 2
    assert torch.equal(before[0], torch.get_rng_state()), "the caller's generator is as it was"
    assert all(torch.equal(p, q) for p, q in zip(before[1], model.parameters(), strict=True))
    with pytest.raises(conjoin.PlanError, match="fingerprint"):
        conjoin.verify_plan(made, model, batch, loss=nn.functional.l1_loss)


# Under torchrun.


COMMANDS = """\
import shlex, sys
from conjoin.cli import main

refused, *others, last = map(shlex.split, sys.argv[1:])
assert main(refused) == 2 and all(main(other) == 0 for other in others)
sys.exit(main(last))
"""


def test_under_torchrun(run: Run, plan: Callable[..., str], folder: Path, fork: Callable[..., Forked]) -> None:
    """One group is refused a plan for one rank, runs one for its two as `plan` tells to, verifies it, is calibrated."""
    alone, name, ask = plan(ranks=1, strategy="single"), "my plan.json", ("nets.py:mlp", "--batch", "6")
    printed = run("plan", *ask, "--machine", "local:2", "--strategy", "data-parallel", "-o", name).out.splitlines()[-1]
    title, torchrun, *options, command = printed.split(None, 6)
    assert (title, torchrun, options) == ("next", "torchrun", ["--nproc-per-node", "2", "-m", "conjoin"])
    (folder / "commands.py").write_text(COMMANDS)
    commands = [
        f"run {alone} nets.py:mlp --steps 1",
        f"{command} --steps 2 --trace trace.json",
        f"verify '{name}' {' '.join(ask)} --steps 2",
        "calibrate --seconds 0.5 -o machine.toml",
    ]
    launcher = fork("--standalone", *options[:2], "commands.py", *commands, module="torch.distributed.run")
    out, err = launcher.communicate(timeout=HUNG_SECONDS)
    assert launcher.returncode == 0, err
    assert "error: The plan of Sequential is for 1 ranks and 2 are running." in err
    assert losses_in("\n".join(out.splitlines()[:4])) == pytest.approx(expected_losses(2, batch_size=6), abs=2e-6)
    assert set(events_in(folder / "trace.json")) == {"measured: rank 0", "measured: rank 1"}
    for once in ("verified: the plan trains exactly like one device", "saved        machine.toml"):
        assert out.count(once) == 1, "rank 0 alone prints"
    machine = conjoin.Machine.load(folder / "machine.toml")
    check_machine(machine)
    assert (machine.name, machine.num_devices, len(machine.fits)) == ("detected", 2, 5)


def test_fewer_ranks_than_planned_under_torchrun(
    plan: Callable[..., str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = plan(ranks=2, strategy="data-parallel")
    for variable, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    told = run("run", name, "nets.py:mlp", "--steps", "1").refused()
    assert "The plan of Sequential is for 2 ranks and 1 are running." in told
