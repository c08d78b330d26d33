"""Weights that are saved: other libraries read them, and a kill or a full disk leaves what was there."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from conjoin.runtime import full_state_dict, load, save_weights
from conjoin.runtime.parallel import ParallelModule
from tests.runtime.weight_cases import (
    PLANS,
    Net,
    assert_is_source,
    equal,
    loaded,
    on_meta,
    one_of_each,
    other_source,
    plan_for,
    read_by_library,
    save_by,
    source,
    told,
    written,
)


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
    assert equal(one_of_each(model), source())


def test_files_by_their_endings_and_another_dtype(tmp_path: Path) -> None:
    path, plan = written(tmp_path, "weights.pth"), plan_for("fsdp", 2)
    save_by(plan, path, tmp_path / "x.safetensors", max_shard_bytes=1, dtype=torch.bfloat16)
    narrow = {name: x.bfloat16() if x.is_floating_point() else x for name, x in source().items()}
    assert equal(safetensors.torch.load_file(tmp_path / "x.safetensors"), narrow)
    save_by(plan, path, tmp_path / "x.pt")
    model = Net()
    model.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    assert equal(one_of_each(model), source())
    assert {entry.name for entry in tmp_path.iterdir()} == {"weights.pth", "x.pt", "x.safetensors"}


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
