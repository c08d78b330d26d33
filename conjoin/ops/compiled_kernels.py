"""The kernels of `aggregation.c`, compiled at first use where there is a C compiler; without one torch does it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from conjoin.environment import cache_directory
from conjoin.errors import ConjoinError

_log = logging.getLogger("conjoin")
_SOURCE = Path(__file__).with_name("aggregation.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math",
          "-fopenmp", "-shared", "-fPIC")  # fmt: skip
"""Sums may be taken in another order, so that they are taken several at a time; numbers that are none stay none."""
_SECONDS = 120
_OTHERS_WRITE = 0o022
_NAMES = {torch.float32: "float", torch.float64: "double"}


@lru_cache(maxsize=1)
def compiled_kernels() -> ctypes.CDLL | None:
    """The library, compiled by the first process that asks for it; None where that cannot be done."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _log.info("There is no C compiler: graphs are aggregated by torch, which takes longer.")
        return None
    try:
        said = "\n".join((_SOURCE.read_text(encoding="utf-8"), compiler, *_FLAGS, platform.platform(), _processor()))
        folder = cache_directory() / "kernels"
        _make_closed(folder)
        return _loaded(compiler, folder / f"aggregation-{hashlib.sha256(said.encode()).hexdigest()[:16]}.so")
    except (OSError, subprocess.SubprocessError, ConjoinError) as error:
        _log.info("Kernels for graphs could not be compiled, so that torch aggregates, which takes longer. %s", error)
        return None


def _processor(told: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor can do: a home directory may be that of several computers, and the library is for one kind."""
    if not told.exists():
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU implementer", "CPU part", "isa")
    lines = told.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _make_closed(folder: Path) -> None:
    """A folder that nobody else writes to: what is loaded from it is run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix" and not _is_closed(folder):
        folder.chmod(folder.stat().st_mode & ~_OTHERS_WRITE)  # refused where it is somebody else's
        if not _is_closed(folder):
            raise PermissionError(f"Others may write to {folder}.")


def _is_closed(path: Path) -> bool:
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & _OTHERS_WRITE


def _loaded(compiler: str, path: Path) -> ctypes.CDLL:
    """The library at a place, compiled where there is none that may be trusted and read."""
    try:
        if path.exists() and (os.name != "posix" or _is_closed(path)):
            return ctypes.CDLL(str(path))
    except OSError as error:
        _log.info("Kernels for graphs are compiled again. %s", error)
    _compile(compiler, path)
    return ctypes.CDLL(str(path))


def _compile(compiler: str, path: Path) -> None:
    """Compile beside the place and move there, so that no other process sees half a file."""
    handle, made = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", made]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
        Path(made).chmod(0o700)
        Path(made).replace(path)
    finally:
        Path(made).unlink(missing_ok=True)


def is_compiled_for(*tensors: Tensor) -> bool:
    """Whether the kernels take these: on the CPU, all of one dtype that there are kernels for."""
    dtypes = {tensor.dtype for tensor in tensors}
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return on_cpu and len(dtypes) == 1 and dtypes <= set(_NAMES) and compiled_kernels() is not None


def run_kernel(name: str, *args: Tensor | int | None) -> None:
    """Call a kernel with tensors, whose dtype is that of the first, and numbers."""
    library, first = compiled_kernels(), args[0]
    assert library is not None and isinstance(first, Tensor)
    assert all(arg.is_contiguous() for arg in args if isinstance(arg, Tensor))
    kernel = getattr(library, f"{name}_{_NAMES[first.dtype]}")
    kernel.restype = None
    kernel(*map(_as_c, args), ctypes.c_int(torch.get_num_threads()))


def new_in_large_pages(like: Tensor, *shape: int) -> Tensor:
    """New memory for numbers as some are, in large pages where the system has them: whoever reads here and there finds
    them sooner, and fewer pages are made."""
    made, library = like.new_empty(shape), compiled_kernels()
    if library is not None:
        library.ask_for_large_pages(ctypes.c_void_p(made.data_ptr()), ctypes.c_int64(made.nbytes))
    return made


def _as_c(arg: Tensor | int | None) -> ctypes.c_void_p | ctypes.c_int64:
    if arg is None:
        return ctypes.c_void_p()
    return ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, Tensor) else ctypes.c_int64(arg)
