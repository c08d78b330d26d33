"""Files of weights: any region is read as slicing gives it, and what is damaged, foreign or too much is refused."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from conjoin.runtime import load, run_ranks
from conjoin.runtime.state import safetensors_file
from conjoin.runtime.state.safetensors_file import Reader, read_header
from conjoin.runtime.state.weight_files import find_weights
from conjoin.runtime.state.weights import Weights
from tests.runtime.weight_cases import on_meta, part_of, plan_for, source, told, written


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
