"""Where the compiled kernels lie: what others may have written is not run, and what cannot be read is made again."""

from __future__ import annotations

import multiprocessing
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from conjoin.ops import compiled_kernels as kernels

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    cache = tmp_path / "a cache"
    monkeypatch.setenv("CONJOIN_CACHE", str(cache))
    monkeypatch.setattr(kernels, "_FLAGS", ("-O0", "-fopenmp", "-shared", "-fPIC"))
    kernels.compiled_kernels.cache_clear()
    yield cache / "kernels"
    kernels.compiled_kernels.cache_clear()


def load() -> bool:
    kernels.compiled_kernels.cache_clear()
    return kernels.compiled_kernels() is not None


def test_only_the_owner_may_write_to_what_is_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert load()
    (library,) = folder.glob("*.so")
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o022 for path in (folder, library))


@pytest.mark.parametrize(("said", "mode"), [("not a library", 0o700), ("", 0o700), ("by others", 0o766)])
def test_a_library_that_others_may_write_to_or_that_is_none_is_made_again(tmp_path: Path, said: str, mode: int) -> None:
    library = tmp_path / "some.so"
    library.write_text(said)
    library.chmod(mode)
    compiler = shutil.which("cc")
    assert compiler is not None and kernels._loaded(compiler, library).sum_float
    assert not stat.S_IMODE(library.stat().st_mode) & 0o022


def test_another_kind_of_processor_has_its_own_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processor in ("flags: avx2", "flags: avx2 avx512f"):
        monkeypatch.setattr(kernels, "_processor", lambda said=processor: said)
        assert load()
    assert len(list(folder.glob("*.so"))) == 2


def test_what_a_processor_can_do_is_read(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor: 0\nflags\t: sse avx\ncpu MHz: 1\n\nprocessor: 1\nflags\t: sse avx\ncpu MHz: 2\n")
    assert kernels._processor(told) == "flags\t: sse avx"


@pytest.mark.parametrize("hindered", ["a file in its place", "no source", "no home"])
def test_without_a_place_torch_does_it(folder: Path, hindered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hindered == "a file in its place":
        folder.parent.write_text("")
    elif hindered == "no source":
        monkeypatch.setattr(kernels, "_SOURCE", folder / "missing.c")
    else:
        for name in ("CONJOIN_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert not load()


def test_two_processes_compile_at_once(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    with fork.Pool(3) as pool:
        assert pool.map(_load, range(3)) == [True] * 3
    assert len(list(folder.iterdir())) == 1  # nothing half made is left


def _load(_: int) -> bool:
    return load()
