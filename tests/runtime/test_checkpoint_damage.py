"""What is saved comes back or is refused; damage is noticed, and a kill at any moment loses nothing."""

from __future__ import annotations

import copy
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from conjoin.errors import CheckpointError
from conjoin.frontends import capture
from conjoin.machine import parse_machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.checkpoint import INDEX, save_checkpoint
from conjoin.runtime.state.checkpoint_loading import load_checkpoint
from conjoin.runtime.state.pieces import full_state_dict
from conjoin.runtime.state.storage import Store
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.runtime.checkpoint_cases import BATCH, STEPS, Net, adam, alone, make_model, on_threads, train
from tests.waiting import HUNG_SECONDS

SETTINGS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([torch.tensor(0.5), torch.tensor([3], dtype=torch.uint16), torch.tensor(True), {1: 2}, 1j])
    | st.sampled_from([torch.tensor(torch.nan), torch.tensor(1.5).to(torch.float8_e4m3fn), torch.tensor(1j)]),
    lambda some: st.lists(some, max_size=2) | st.tuples(some) | st.dictionaries(st.text(max_size=3), some, max_size=2),
    max_leaves=4,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")  # torch, of complex state of a real weight
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    setting=SETTINGS,
    key=st.text(max_size=4) | st.integers(),
    value=SETTINGS.filter(lambda value: "'" not in repr(value)),  # torch's load_state_dict makes generators of text
    extra=SETTINGS,
)
def test_what_is_saved_can_be_loaded(tmp_path_factory: Any, setting: Any, key: Any, value: Any, extra: Any) -> None:
    """Whatever settings and state an optimizer has: a checkpoint of it is refused when it is saved, or comes back."""
    step = alone()
    parameter = next(step.parameters())
    optimizer = torch.optim.SGD([{"params": [parameter], "odd": setting}], lr=0.1, momentum=0.9)
    optimizer.state[parameter][key] = value
    path = tmp_path_factory.mktemp("odd") / "checkpoint"
    try:
        save_checkpoint(path, step, optimizer, extra={"odd": extra})
    except CheckpointError as error:
        assert_three_sentences(error)
        assert not path.exists() and not list(path.parent.iterdir())
        return
    loaded = torch.optim.SGD([{"params": [parameter], "odd": 0}], lr=0.2, momentum=0.9)
    found = load_checkpoint(path, step, loaded)
    assert repr(found["odd"]) == repr(json.loads(json.dumps(extra)))
    assert repr(loaded.param_groups[0]["odd"]) == repr(setting)
    judge = torch.optim.SGD([{"params": [parameter], "odd": 0}], lr=0.2, momentum=0.9)
    judge.load_state_dict(optimizer.state_dict())  # which gives state the dtype of its parameter
    assert repr(loaded.state[parameter][key]) == repr(judge.state[parameter][key])


def test_keys_that_are_the_same_as_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the same as text") as told:
        save_checkpoint(tmp_path / "checkpoint", alone(), extra={"names": {1: "a", "1": "b"}})
    assert_three_sentences(told.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by one process."""
    path = tmp_path_factory.mktemp("one") / "checkpoint"
    step = alone()
    optimizer = adam(step.parameters())
    train(step, optimizer)
    save_checkpoint(path, step, optimizer, extra={"step": STEPS})
    return path


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))


def refused(path: Path, step: ParallelModule | None = None, optimizer: Optimizer | None = None) -> str:
    """The message with which a checkpoint is refused; nothing may have changed."""
    step = step or alone(5)
    optimizer = optimizer or adam(step.parameters())
    before = copy.deepcopy(full_state_dict(step)), str(optimizer.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, step, optimizer)
    assert_three_sentences(caught.value)
    after = full_state_dict(step)
    assert all(torch.equal(after[name], tensor) for name, tensor in before[0].items())
    assert str(optimizer.state_dict()) == before[1]
    return str(caught.value)


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "nothing")


def test_damaged_data_is_refused(copied: Path) -> None:
    (data,) = copied.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:-100])
    assert "bytes instead of" in refused(copied)
    data.write_bytes(content[:-100] + b"\xff" * 100)
    assert "has other content than was saved" in refused(copied)
    data.unlink()
    assert "is missing" in refused(copied)


def test_a_missing_index_is_refused(copied: Path) -> None:
    (copied / INDEX).unlink()
    assert f"has no {INDEX}" in refused(copied)


def test_torch_metadata_is_not_read(copied: Path) -> None:
    (copied / ".metadata").write_bytes(b"not a pickle")
    step = alone(5)
    assert load_checkpoint(copied, step) == {"step": STEPS}


class Other(Net):
    """The same with other sizes, another dtype and other names."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(10, 6, bias=False)
        self.extra = nn.Parameter(torch.zeros(2))
        self.register_buffer("kept", torch.rand(1, 6))


def test_another_model_is_refused(copied: Path) -> None:
    torch.manual_seed(0)
    model = Other().double().train()
    model.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
    plan = make_plan(capture(model, BATCH, cross_entropy), parse_machine("local:1"), "data-parallel")

    def build(communicator: Communicator) -> ParallelModule:
        store = Store(plan, communicator.rank, torch.device("cpu"))
        store.fill(model)
        return ParallelModule(plan, store, communicator)

    (step,) = run_ranks(plan.mesh, build)
    message = refused(copied, step, torch.optim.SGD(step.parameters(), lr=1.0))
    for part in ("it does not have extra", "it has down.bias, which the module has not",
                 "kept is torch.float64 (6,) there, torch.float64 (1, 6) in the module",
                 "frozen is torch.float64 (6,) there, torch.float32 (6,) in the module",
                 "it has the state of AdamW, the optimizer is SGD"):  # fmt: skip
        assert part in message


def test_a_checkpoint_without_an_optimizer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", alone())
    assert "saved without an optimizer" in refused(tmp_path / "checkpoint")
    step = alone(5)
    assert load_checkpoint(tmp_path / "checkpoint", step) == {}
    assert torch.equal(full_state_dict(step)["up.weight"], make_model(0).up.weight)


def test_what_is_not_a_checkpoint_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    step = alone()
    mine = tmp_path / "mine"
    shutil.copytree(checkpoint, mine)
    (mine / "notes.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for path in (mine, tmp_path / "file", tmp_path / "no" / "folder"):
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(path, step)
        assert_three_sentences(caught.value)
    assert (mine / "notes.txt").read_text() == (tmp_path / "file").read_text() == "precious"


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    step = alone()
    odd = adam(step.parameters())
    odd.param_groups[0]["lr"] = lambda: 1.0
    for arguments in ({"extra": {"a": {1, 2}}}, {"optimizer": odd}):
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path / "checkpoint", step, **arguments)
        assert_three_sentences(caught.value)
    (other, _) = on_threads("fsdp", 2, lambda step: step)
    with pytest.raises(CheckpointError, match="2 ranks was to be saved by 1 process"):
        save_checkpoint(tmp_path / "checkpoint", other)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_previous_checkpoint(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        save_checkpoint(copied, alone(5))
    assert_three_sentences(caught.value)
    assert [entry.name for entry in copied.parent.iterdir()] == [copied.name]
    assert load_checkpoint(copied, alone(5)) == {"step": STEPS}


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_what_ends_a_program_stays_what_it_is(
    copied: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """Torch's writer makes an error of its own of Ctrl-C, and of the exit of a handler of SIGTERM."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise end

    with monkeypatch.context() as patched, pytest.raises(type(end)) as caught:
        patched.setattr(torch, "save", interrupted)
        save_checkpoint(copied, alone(5))
    assert caught.value.args == end.args
    assert load_checkpoint(copied, alone(5)) == {"step": STEPS}
    save_checkpoint(copied, alone(5), extra={"step": "interrupted"})
    assert [entry.name for entry in copied.parent.iterdir()] == [copied.name]
    assert load_checkpoint(copied, alone(5)) == {"step": "interrupted"}


# Fuzz of the index.


def signed(data: dict[str, Any]) -> str:
    body = {key: value for key, value in data.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()})


JUNK: list[Any] = [None, -1, 0, 2**70, 1.5, "", "model", "../x.distcp", [], {}, [[]], {"tuple": 3}, True, float("nan")]


def mutated(data: Any, random_state: random.Random) -> Any:
    """The data with one entry replaced, removed or doubled, somewhere."""
    if not isinstance(data, dict | list) or not data or random_state.random() < 0.15:
        return random_state.choice(JUNK)
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    key = random_state.choice(keys)
    made = data.copy()
    if random_state.random() < 0.15:
        del made[key]
    else:
        made[key] = mutated(data[key], random_state)
    return made


def test_no_index_makes_anything_but_a_checkpoint_error(copied: Path) -> None:
    index = copied / INDEX
    text = index.read_text()
    data = json.loads(text)
    random_state = random.Random(0)
    step = alone(5)
    optimizer = adam(step.parameters())
    refusals = 0
    for turn in range(150):
        changed = mutated(data, random_state)
        index.write_text(signed(changed) if isinstance(changed, dict) and turn % 5 else json.dumps(changed))
        try:
            load_checkpoint(copied, step, optimizer)
        except CheckpointError as error:
            refusals += 1
            assert_three_sentences(error)
    assert refusals > 100
    index.write_text(text)
    load_checkpoint(copied, step, optimizer)


def test_no_changed_byte_goes_unnoticed(copied: Path) -> None:
    index = copied / INDEX
    content = index.read_bytes()
    random_state = random.Random(1)
    step = alone(5)
    for _ in range(100):
        place = random_state.randrange(len(content) - 1)  # the last is the end of the line
        byte = (content[place] + random_state.randrange(1, 256)) % 256
        index.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
        with pytest.raises(CheckpointError):
            load_checkpoint(copied, step)
    for end in (0, 1, len(content) // 2, len(content) - 2):
        index.write_bytes(content[:end])
        assert INDEX in refused(copied)


# kill -9.


def kill_self(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_save(path: Path, function: tuple[Any, str], call: int) -> None:
    """Save another state over a checkpoint in a process that is killed when it calls a function for the n-th time."""

    def program() -> None:
        torch.set_num_threads(1)
        owner, name = function
        real, calls = getattr(owner, name), 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return (kill_self if calls == call else real)(*args, **kwargs)

        setattr(owner, name, counted)
        step = alone(5)
        save_checkpoint(path, step, adam(step.parameters()), extra={"step": 99})

    process = multiprocessing.get_context("fork").Process(target=program, daemon=True)
    process.start()
    process.join(HUNG_SECONDS)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("function", "call", "survivor"),
    [((torch, "save"), 3, STEPS), ((os, "fsync"), 1, STEPS), ((hashlib, "file_digest"), 1, STEPS),
     ((os, "rename"), 1, STEPS), ((os, "rename"), 2, STEPS), ((shutil, "rmtree"), 2, 99)],
    ids=["in the data", "before sync", "before index", "before renaming", "between renames", "before removing"],
)  # fmt: skip
def test_a_killed_save_leaves_a_checkpoint(copied: Path, function: tuple[Any, str], call: int, survivor: int) -> None:
    killed_save(copied, function, call)
    step = alone(7)
    assert load_checkpoint(copied, step) == {"step": survivor}
    wanted = make_model(5).state_dict() if survivor == 99 else None
    if wanted is not None:
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in full_state_dict(step).items())
    save_checkpoint(copied, step, extra={"step": 100})  # the next save cleans up
    assert load_checkpoint(copied, step) == {"step": 100}
    assert [entry.name for entry in copied.parent.iterdir()] == [copied.name]


def test_saves_killed_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    random_state = random.Random(0)

    def program() -> None:
        torch.set_num_threads(1)
        step = alone()
        for value in range(10_000):
            step.load_state_dict({name: torch.full_like(t, value) for name, t in full_state_dict(step).items()})
            save_checkpoint(path, step, extra={"value": value})

    for _ in range(4):
        process = multiprocessing.get_context("fork").Process(target=program, daemon=True)
        process.start()
        time.sleep(0.5 + random_state.random() / 2)
        os.kill(process.pid, signal.SIGKILL)
        process.join(HUNG_SECONDS)
        if list(tmp_path.glob("*checkpoint*")) == []:
            continue  # a slow machine: not one save was done
        step = alone()
        value = load_checkpoint(path, step)["value"]
        assert all((tensor == value).all() for tensor in full_state_dict(step).values())
