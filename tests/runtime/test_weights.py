"""Pretrained weights: what other libraries wrote arrives in the pieces of every plan, and what is saved, with them."""

from __future__ import annotations

import json
import logging
import pickle
import resource
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from conjoin.errors import CheckpointError, ConjoinError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import parse_machine
from conjoin.runtime import full_state_dict, load, run_ranks, save_weights
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.state import safetensors_file
from conjoin.runtime.state.initialization import initialise
from conjoin.runtime.state.safetensors_file import Reader, read_header
from conjoin.runtime.state.storage import Store
from conjoin.runtime.state.weight_files import find_weights
from conjoin.runtime.state.weights import Weights, check_weights, read_weights
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.runtime.checkpoint_cases import in_processes

CPU = torch.device("cpu")
PLANS = [("data-parallel", 1), ("fsdp", 3), ("fsdp", 4), ("megatron", 2)]


class Net(nn.Module):
    """Tied weights, statistics, buffers saved and not saved, sizes that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.rand(6))
        self.register_buffer("derived", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.derived.fill_(2.0)
        self.kept.fill_(3.0)

    def forward(self, i: Tensor) -> Tensor:
        x = self.norm(self.up(self.embed(i) * self.kept)).relu()
        y: Tensor = self.head(self.down(x) * self.derived)
        return y


BATCH = (torch.arange(8) % 11, torch.arange(8) * 3 % 11)


def on_meta(build: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return build().train()


@cache
def graph() -> Graph:
    return capture(on_meta(), BATCH, cross_entropy)


@cache
def plan_for(strategy: str, num_ranks: int) -> Plan:
    return make_plan(graph(), parse_machine(f"local:{num_ranks}"), strategy)


@cache
def source() -> dict[str, Tensor]:
    """Values to be loaded, under all names."""
    torch.manual_seed(7)
    return {name: torch.rand_like(x) if x.is_floating_point() else x + 5 for name, x in _one_of_each(Net()).items()}


def _one_of_each(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    del state["head.weight"]
    return state


def part_of(plan: Plan, communicator: Communicator, weights: Weights, model: nn.Module) -> ParallelModule:
    """A rank's module of a model on the meta device, with weights."""
    checked = check_weights(weights, model)
    store = Store(plan, communicator.rank, CPU)
    initialise(store, model, given=checked.names)
    read_weights(checked, store)
    return ParallelModule(plan, store, communicator)


def loaded(plan: Plan, path: Path, **arguments: Any) -> dict[str, Tensor]:
    """The whole state after every rank has read its pieces."""
    found = run_ranks(
        plan.mesh,
        lambda ranks: full_state_dict(part_of(plan, ranks, Weights(path, **arguments), on_meta()), everywhere=True),
    )
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in found[0])
    return found[0]


def assert_is_source(state: dict[str, Tensor]) -> None:
    assert state.keys() == Net().state_dict().keys()
    for name, tensor in source().items():
        assert torch.equal(state[name], tensor), name
    assert torch.equal(state["head.weight"], source()["embed.weight"])


def sharded(folder: Path, ending: str, save: Callable[[dict[str, Tensor], Path], None]) -> Path:
    """Two shards and their index, as Hugging Face's folders have them."""
    stem = "model" if ending == "safetensors" else "pytorch_model"
    shards: list[dict[str, Tensor]] = [{}, {}]
    for i, (name, tensor) in enumerate(source().items()):
        shards[i % 2][name] = tensor
    files = [f"{stem}-0000{i + 1}-of-00002.{ending}" for i in range(2)]
    for file, shard in zip(files, shards, strict=True):
        save(shard, folder / file)
    named = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return folder


def written(folder: Path, form: str) -> Path:
    """The values to be loaded in a form, by the libraries that define it."""
    match form:
        case "model.safetensors":
            safetensors.torch.save_file(source(), folder / form)
            return folder
        case "safetensors" | "bin":
            return sharded(folder, form, safetensors.torch.save_file if form == "safetensors" else torch.save)
        case "nested.pt":
            torch.save({"epoch": 3, "model": source(), "optimizer": {"lr": 0.1}}, folder / form)
        case "transposed.pt":
            torch.save(
                {name: x.mT.contiguous().mT if x.dim() == 2 else x for name, x in source().items()}, folder / form
            )
        case _:
            torch.save(source(), folder / form)
    return folder / form


@pytest.mark.parametrize(
    "form",
    ["model.safetensors", "safetensors", "bin", "weights.pth", "nested.pt", "transposed.pt", "pytorch_model.bin"],
)
def test_every_form_arrives(tmp_path: Path, form: str) -> None:
    assert_is_source(loaded(plan_for("fsdp", 3), written(tmp_path, form)))


@pytest.mark.parametrize(("strategy", "num_ranks"), PLANS)
def test_every_plan_gets_its_pieces(tmp_path: Path, strategy: str, num_ranks: int) -> None:
    assert_is_source(loaded(plan_for(strategy, num_ranks), written(tmp_path, "safetensors")))


def test_buffers_that_files_do_not_hold_are_initialised(tmp_path: Path) -> None:
    plan = plan_for("fsdp", 2)
    weights = Weights(written(tmp_path, "model.safetensors"))
    for step in run_ranks(plan.mesh, lambda ranks: part_of(plan, ranks, weights, on_meta())):
        assert (dict(step.named_buffers())["derived"] == 2).all()


# ---------------------------------------------------------------------------------------------------------- by regions


@pytest.mark.parametrize("block_bytes", [8, 100, 2**20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_any_region_is_what_slicing_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(block_bytes)
    shapes = [(), (7,), (5, 6), (1, 9, 4), (3, 1, 2, 5), (0, 3)]
    tensors = {str(i): torch.rand(shape, generator=generator).to(dtype) for i, shape in enumerate(shapes)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("rb") as file:
        reader = Reader(file)
        for name, whole in tensors.items():
            for _ in range(6):
                cuts = [sorted(torch.randint(0, n + 1, (2,), generator=generator).tolist()) for n in whole.shape]
                region = tuple((first, last) for first, last in cuts)
                wanted = whole[tuple(slice(*span) for span in region)].float()
                found = torch.full_like(wanted, -1.0)
                reader.read(entries[name], region, found)
                assert torch.equal(found, wanted)


def test_a_rank_reads_no_more_than_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = Reader._fill
    monkeypatch.setattr(
        Reader, "_fill", lambda self, part, start: read.append(len(part)) or original(self, part, start)
    )
    plan = plan_for("fsdp", 4)
    path = written(tmp_path, "model.safetensors")
    steps = run_ranks(plan.mesh, lambda ranks: part_of(plan, ranks, Weights(path), on_meta()))
    held = sum(x.nbytes for step in steps for x in (*step.parameters(), *step.buffers()))
    assert sum(read) == held - 4 * dict(steps[0].named_buffers())["derived"].nbytes


# ----------------------------------------------------------------------------------------------------------- what fits


def given(tmp_path: Path, **changes: Tensor | None) -> Path:
    """The values to be loaded with some changed, left out (None) or added."""
    state = {**source(), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    return path


def told(action: Callable[[], object]) -> str:
    with pytest.raises(ConjoinError) as caught:
        action()
    assert_three_sentences(caught.value)
    return str(caught.value)


def test_floats_are_converted_and_that_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = given(tmp_path, up__weight=source()["up.weight"].bfloat16(), down__weight=source()["down.weight"].double())
    plan = plan_for("data-parallel", 1)
    with caplog.at_level(logging.WARNING, "conjoin"):
        step = load(plan, on_meta(), weights=path)
    assert torch.equal(dict(step.named_parameters())["up.weight"], source()["up.weight"].bfloat16().float())
    assert "1 tensors converted from torch.bfloat16 to torch.float32" in caplog.text
    assert "1 tensors converted from torch.float64 to torch.float32" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"up__weight": None}, ["up.weight is not in the files"]),
        (
            {"up__weight": None, "up__weigth": torch.ones(10, 6)},
            [
                "up.weight is not in the files; the nearest is up.weigth",
                "up.weigth is no tensor of the model; the nearest is up.weight",
            ],
        ),
        ({"more": torch.ones(2)}, ["more is no tensor of the model"]),
        ({"up__weight": torch.ones(6, 10)}, ["up.weight is f32[6,10] in the files and f32[10,6] in the model"]),
        ({"up__bias": torch.ones(10, dtype=torch.int64)}, ["up.bias is i64[10] in the files and f32[10] in the model"]),
        ({"norm__num_batches_tracked": torch.ones(())}, ["norm.num_batches_tracked is f32[] in the files and i64[]"]),
        ({"embed__weight": None}, ["embed.weight is not in the files"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Tensor | None], words: list[str]) -> None:
    message = told(lambda: check_weights(Weights(given(tmp_path, **changes)), on_meta()))
    assert all(word in message for word in words), message


def test_new_and_unused_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = given(tmp_path, kept=None, old__gate=torch.ones(2), derived=torch.ones(6))
    message = told(lambda: check_weights(Weights(path), on_meta()))
    assert "kept is not in the files" in message and "old.gate is no tensor" in message and "derived" not in message
    weights = Weights(path, new=("kep*",), unused=("old",))
    with caplog.at_level(logging.WARNING, "conjoin"):
        step = load(plan_for("data-parallel", 1), on_meta(), weights=weights)
    assert (dict(step.named_buffers())["kept"] == 3).all() and (dict(step.named_buffers())["derived"] == 2).all()
    assert "2 of the files not used: old.gate, derived" in caplog.text and "begin anew: kept" in caplog.text
    assert "text is not one" in told(lambda: Weights(path, new="kept"))


def test_a_tied_weight_under_either_name_or_twice(tmp_path: Path) -> None:
    table = source()["embed.weight"]
    assert_is_source(loaded(plan_for("fsdp", 2), given(tmp_path, embed__weight=None, head__weight=table)))
    assert_is_source(loaded(plan_for("fsdp", 2), given(tmp_path, head__weight=table.clone())))
    message = told(
        lambda: load(plan_for("data-parallel", 1), on_meta(), weights=given(tmp_path, head__weight=table + 1))
    )
    assert "embed.weight and head.weight with other values" in message


@pytest.mark.parametrize("longer", [True, False])
def test_one_prefix_more_or_less(tmp_path: Path, longer: bool) -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Net()

        def forward(self, i: Tensor) -> Tensor:
            y: Tensor = self.body(i)
            return y

    state = source() if longer else {f"body.{name}": x for name, x in source().items()}
    path = tmp_path / "x.pt"
    torch.save(state, path)
    model = on_meta(Headed) if longer else on_meta()
    checked = check_weights(Weights(path), model)
    assert len(checked.names) == len(source())
    assert any("body." in note for note in checked.pairing.notes)


def test_two_prefixes_that_fit_are_not_guessed(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "x.pt")
    twins = nn.ModuleDict({"left": nn.Linear(3, 3), "right": nn.Linear(3, 3)})
    assert "left.weight is not in the files" in told(lambda: check_weights(Weights(tmp_path / "x.pt"), twins))


# ---------------------------------------------------------------------------------------------------------- bad files


def _file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


BAD = {
    "empty.safetensors": b"",
    "short.safetensors": b"\x08\x00",
    "huge header.safetensors": _file({}, length=2**62),
    "header beyond.safetensors": _file({}, length=100),
    "no json.safetensors": _file(b"{]      "),
    "deep.safetensors": _file(b"[" * 100_000),
    "a list.safetensors": _file([]),
    "twice.safetensors": _file(b'{"a":1,"a":2}'),
    "no table.safetensors": _file({"a": 3}),
    "dtype.safetensors": _file({"a": _entry(dtype="F31")}, bytes(8)),
    "negative.safetensors": _file({"a": _entry(shape=[-2, -1])}, bytes(8)),
    "a large shape.safetensors": _file({"a": _entry(shape=[2**61, 2**61])}, bytes(8)),
    "a boolean.safetensors": _file({"a": _entry(shape=[True, 2])}, bytes(8)),
    "sizes.safetensors": _file({"a": _entry(shape=[3])}, bytes(8)),
    "backwards.safetensors": _file({"a": _entry(offsets=[8, 0])}, bytes(8)),
    "cut short.safetensors": _file({"a": _entry()}, bytes(7)),
    "too long.safetensors": _file({"a": _entry()}, bytes(9)),
    "overlap.safetensors": _file({"a": _entry(), "b": _entry(offsets=[4, 12])}, bytes(12)),
    "a gap.safetensors": _file({"a": _entry(), "b": _entry(offsets=[12, 20])}, bytes(20)),
    "pointer.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "code.pt": pickle.dumps(_Runs()),
    "text.bin": b"<html>not found</html>",
    "empty.pt": b"",
    "other.gguf": b"GGUF",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / name).write_bytes(BAD[name])
    assert name in told(lambda: find_weights(tmp_path / name))
    assert not capsys.readouterr().out


def test_a_torch_file_of_more_than_weights_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"up.weight": torch.ones(2), "more": _Runs()}, tmp_path / "x.pt")
    assert "more than weights" in told(lambda: find_weights(tmp_path / "x.pt"))
    torch.save({"a": {"x": torch.ones(2)}, "b": {"x": torch.ones(2)}}, tmp_path / "x.pt")
    assert "2 tables of tensors: 'a', 'b'" in told(lambda: find_weights(tmp_path / "x.pt"))
    torch.save([torch.ones(2)], tmp_path / "x.pt")
    assert "no table of tensors" in told(lambda: find_weights(tmp_path / "x.pt"))
    torch.save(source(), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert "before 1.6" in told(lambda: find_weights(tmp_path / "x.pt"))
    torch.save(source(), tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(content[: len(content) // 2])
    told(lambda: find_weights(tmp_path / "x.pt"))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "no table weight_map"),
        ({"weight_map": {"a": "../x.safetensors"}}, "no file beside it"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no file beside it"),
        ({"weight_map": {"a": 3}}, "no file beside it"),
        ({"weight_map": {"a": "gone.safetensors"}}, "not there"),
        ({"weight_map": {"a": "x.safetensors"}}, "does not have it"),
        ({"weight_map": {"up.weight": "x.safetensors"}}, "not in the index"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: Any, words: str) -> None:
    (tmp_path / "in").mkdir()
    for folder in (tmp_path, tmp_path / "in"):
        safetensors.torch.save_file(source(), folder / "x.safetensors")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert words in told(lambda: find_weights(tmp_path / "in"))


def test_a_folder_without_weights_or_with_too_many(tmp_path: Path) -> None:
    assert "it has none" in told(lambda: find_weights(tmp_path))
    for name in ("a.pt", "b.pt"):
        torch.save(source(), tmp_path / name)
    assert "it has 2, as a.pt, b.pt" in told(lambda: find_weights(tmp_path))
    assert "nothing is downloaded" in told(lambda: find_weights(tmp_path / "gpt2"))
    assert "A int was given" in told(lambda: load(plan_for("data-parallel", 1), on_meta(), weights=3))


# --------------------------------------------------------------------------------------------------------------- saving


def save_by(plan: Plan, source_path: Path, target: Path, **arguments: Any) -> None:
    """Load on the ranks of a plan, and save."""
    run_ranks(
        plan.mesh,
        lambda ranks: save_weights(target, part_of(plan, ranks, Weights(source_path), on_meta()), **arguments),
    )


def read_by_library(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(safetensors.torch.load_file(file))
    return found


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("strategy", "num_ranks"), PLANS)
def test_what_is_saved_the_library_reads(tmp_path: Path, strategy: str, num_ranks: int) -> None:
    path = written(tmp_path, "weights.pth")
    save_by(plan_for(strategy, num_ranks), path, tmp_path / "one")
    assert [entry.name for entry in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert equal(read_by_library(tmp_path / "one"), source())
    save_by(plan_for(strategy, num_ranks), path, tmp_path / "many", max_shard_bytes=300)
    assert equal(read_by_library(tmp_path / "many"), source())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == source().keys() and len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in source().values())
    assert_is_source(loaded(plan_for("fsdp", 2), tmp_path / "many"))
    model = Net()
    safetensors.torch.load_model(model, tmp_path / "one" / "model.safetensors")  # strict, and knows of tied weights
    assert equal(_one_of_each(model), source())


def test_files_by_their_endings_and_another_dtype(tmp_path: Path) -> None:
    path, plan = written(tmp_path, "weights.pth"), plan_for("fsdp", 2)
    save_by(plan, path, tmp_path / "x.safetensors", max_shard_bytes=1, dtype=torch.bfloat16)
    narrow = {name: x.bfloat16() if x.is_floating_point() else x for name, x in source().items()}
    assert equal(safetensors.torch.load_file(tmp_path / "x.safetensors"), narrow)
    save_by(plan, path, tmp_path / "x.pt")
    model = Net()
    model.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    assert equal(_one_of_each(model), source())
    assert {entry.name for entry in tmp_path.iterdir()} == {"weights.pth", "x.pt", "x.safetensors"}


def other_source() -> dict[str, Tensor]:
    return {name: x + 1 for name, x in source().items()}


class _Killed(BaseException):
    pass


def _alone(path: Path) -> ParallelModule:
    return load(plan_for("data-parallel", 1), on_meta(), weights=path)


@pytest.mark.parametrize("before", [10**6, 300])
@pytest.mark.parametrize("after", [10**6, 300])
def test_a_kill_at_any_moment_leaves_one_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """Every call that changes the folder is the last one once; readers find the old weights or the new ones."""
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save(source(), old)
    torch.save(other_source(), new)
    first, second = _alone(old), _alone(new)
    originals = {name: getattr(Path, name) for name in ("replace", "rename", "unlink", "open")}
    left, seen = 0, set()

    def counted(name: str) -> Callable[..., Any]:
        def call(self: Path, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if name != "open" or "b" in str(args) + str(kwargs):
                left -= 1
                if left < 0:
                    raise _Killed
            return originals[name](self, *args, **kwargs)

        return call

    for allowed in range(60):
        folder = tmp_path / str(allowed)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_weights(folder, first, max_shard_bytes=before)
        left = allowed
        with monkeypatch.context() as patch:
            for name in originals:
                patch.setattr(Path, name, counted(name))
            try:
                save_weights(folder, second, max_shard_bytes=after)
                is_over = True
            except _Killed:
                is_over = False
        state = full_state_dict(_alone(folder))
        state.pop("head.weight")
        assert equal(state, source()) or equal(state, other_source())
        seen.add("new" if equal(state, other_source()) else "old")
        if is_over:
            break
    assert is_over and seen == {"old", "new"}
    assert (folder / "config.json").exists() and equal(read_by_library(folder), other_source())


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = _alone(written(tmp_path, "weights.pth"))
    save_weights(tmp_path / "x", step, max_shard_bytes=300)
    before = sorted(entry.name for entry in (tmp_path / "x").iterdir())

    def full(tensor: Tensor) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("conjoin.runtime.state.weight_export.data_of", full)
    assert "No space left" in told(lambda: save_weights(tmp_path / "x", step))
    assert sorted(entry.name for entry in (tmp_path / "x").iterdir()) == before
    assert equal(read_by_library(tmp_path / "x"), source())


def test_a_file_of_torch_on_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    step = _alone(written(tmp_path, "weights.pth"))
    save_weights(tmp_path / "x.pt", step)
    before, there = (tmp_path / "x.pt").read_bytes(), sorted(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        assert "File too large" in told(lambda: save_weights(tmp_path / "x.pt", step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "x.pt").read_bytes() == before and sorted(tmp_path.iterdir()) == there


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    step = _alone(written(tmp_path, "weights.pth"))
    assert "no folder" in told(lambda: save_weights(tmp_path / "no" / "x", step))
    (tmp_path / "x.safetensors").mkdir()
    assert "something else" in told(lambda: save_weights(tmp_path / "x.safetensors", step))
    assert "0 bytes" in told(lambda: save_weights(tmp_path / "y", step, max_shard_bytes=0))
    assert "only floats" in told(lambda: save_weights(tmp_path / "y", step, dtype=torch.int8))


# ----------------------------------------------------------------------------------------- Hugging Face, real processes


def llama(tied: bool = True) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


TOKENS = torch.arange(16).view(4, 4) * 5 % 48


def test_from_pretrained_and_back_on_processes(tmp_path: Path) -> None:
    """Transformers writes shards, two processes load their pieces, train a step and save; transformers reads that."""
    torch.manual_seed(1)
    plain = llama().train()
    plain.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    meta = on_meta(llama)
    plan = make_plan(capture(meta, {"input_ids": TOKENS, "labels": TOKENS}), parse_machine("local:2"), "fsdp")

    def program() -> list[Any]:
        step = load(plan, meta, weights=tmp_path / "theirs")
        refused = []
        for bad in (tmp_path / "none", tmp_path / f"only-{step.communicator.rank}"):
            (tmp_path / "only-0").mkdir(exist_ok=True)
            try:
                load(plan, meta, weights=bad)
            except CheckpointError as error:
                refused.append(str(error))
        optimizer = torch.optim.SGD(step.parameters(), lr=0.5)
        loss = step(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        save_weights(tmp_path / "ours", step, max_shard_bytes=4000)
        return [loss.item(), refused]

    (loss, refused), other = in_processes(2, tmp_path / "ranks", program)
    assert other == [loss, refused] and len(refused) == 2
    wanted = plain(input_ids=TOKENS, labels=TOKENS).loss
    wanted.backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    plain.config.save_pretrained(tmp_path / "ours")
    again, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, tensor), (_, expected) in zip(again.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(tensor, expected, msg=name)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_what_a_published_model_says_of_names_is_heard(tmp_path: Path) -> None:
    """Files of GPT-2 have masks that its attention does not keep any more, and no prefix."""
    config = transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    state = {**model.transformer.state_dict(), "h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    torch.save(state, tmp_path / "x.bin")
    notes = check_weights(Weights(tmp_path / "x.bin"), model).pairing.notes
    assert notes == (
        "names in the files are taken with transformer. before them", "1 of the files not used: h.0.attn.bias"
    )  # fmt: skip


def test_a_model_with_values_keeps_those_that_are_new(tmp_path: Path) -> None:
    model = Net().train()
    own = model.up.weight.detach().clone()
    weights = Weights(given(tmp_path, up__weight=None), new=("up.weight",))
    step = load(plan_for("data-parallel", 1), model, weights=weights)
    state = dict(step.named_parameters())
    assert torch.equal(state["up.weight"], own) and torch.equal(state["down.weight"], source()["down.weight"])


def test_a_base_model_under_a_head(tmp_path: Path) -> None:
    """As `from_pretrained` does it: names get the prefix, the head begins anew; here that is said by hand."""
    torch.manual_seed(1)
    base = llama().model
    base.save_pretrained(tmp_path)
    config = base.config
    config.num_labels, config.pad_token_id = 3, 0
    headed = on_meta(lambda: transformers.LlamaForSequenceClassification(config))
    assert "score.weight is not in the files" in told(lambda: check_weights(Weights(tmp_path), headed))
    plan = make_plan(capture(headed, {"input_ids": TOKENS, "labels": torch.zeros(4, dtype=torch.int64)}),
                     parse_machine("local:1"), "single")  # fmt: skip
    step = load(plan, headed, weights=Weights(tmp_path, new=("score",)))
    theirs = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path)
    state = dict(step.named_parameters())
    for name, tensor in theirs.named_parameters():
        assert name == "score.weight" or torch.equal(state[name], tensor), name
    assert 0 < state["score.weight"].std() < 0.05  # as its `_init_weights` draws it
