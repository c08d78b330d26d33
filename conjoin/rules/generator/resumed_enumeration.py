"""An enumeration run to its end, level by level, its last level in parts over processes, its state in a directory."""

from __future__ import annotations

import multiprocessing
import os
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from conjoin.rules.generator.enumeration import Enumeration, Found, Progress
from conjoin.rules.generator.values import Nodes
from conjoin.rules.generator.vocabulary import Vocabulary

_BLOCKS_IN_PART = 200
"""Of the last level: what is lost at most when a run is stopped."""


def enumerate_graphs(
    vocabulary: Vocabulary,
    most_ops: int,
    *,
    directory: Path | None = None,
    workers: int = 1,
    progress: Progress = print,
) -> Found:
    """All graphs of at most so many operators, paired by value; continues what the directory has of the same run."""
    if directory is None:
        with TemporaryDirectory() as aside:
            return enumerate_graphs(vocabulary, most_ops, directory=Path(aside), workers=workers, progress=progress)
    directory = state_of(directory, vocabulary, most_ops)
    directory.mkdir(parents=True, exist_ok=True)
    run = Enumeration(vocabulary)
    for level in range(1, most_ops):
        _run_level(run, level, directory / f"level{level}.npz")
        progress(f"{vocabulary.name}: {len(run.values):,} values of at most {level} operators")
    made = _last_level(run, most_ops, directory, workers, progress)
    run.pair_last(made, most_ops)
    progress(f"{vocabulary.name}: {run.num_graphs:,} graphs, {len(run.others):,} with the value of another")
    return run.found()


def state_of(directory: Path, vocabulary: Vocabulary, most_ops: int) -> Path:
    """Where the state of a run is."""
    return directory / f"{vocabulary.name.replace(' ', '-')}-{most_ops}-{vocabulary.digest}"


def _run_level(run: Enumeration, level: int, path: Path) -> None:
    if not path.exists():
        before, others = len(run.values), len(run.others)
        graphs = run.num_graphs
        run.build(level)
        new, rest = run.values.nodes[np.arange(before, len(run.values))], run.others[np.arange(others, len(run.others))]
        facts = {"commutes": np.array(sorted(run.commutes)), "graphs": np.array(run.num_graphs - graphs)}
        _save(path, **_columns("new", new), **_columns("rest", rest), **facts)
        return
    with np.load(path, allow_pickle=False) as saved:
        run.store(_nodes("new", saved), level)
        run.note_others(_nodes("rest", saved))
        run.commutes = frozenset(saved["commutes"].tolist())
        run.num_graphs += int(saved["graphs"])


def _last_level(run: Enumeration, level: int, directory: Path, workers: int, progress: Progress) -> Nodes:
    """Every process goes through all blocks and evaluates those of its parts; this one is the first of them."""
    context = multiprocessing.get_context("fork")
    others = [
        context.Process(target=_run_parts, args=(run, level, directory, (worker, workers), _silent))
        for worker in range(1, workers)
    ]
    for process in others:
        process.start()
    num_parts = _run_parts(run, level, directory, (0, workers), progress)
    for process in others:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a worker of the enumeration ended with exit code {process.exitcode}")
    made = []
    for part in range(num_parts):
        with np.load(directory / f"last{part}.npz", allow_pickle=False) as saved:
            made.append(_nodes("made", saved))
    return Nodes.joined(made)


def _silent(line: str) -> None:
    """Only one of several processes tells how far it is."""


def _run_parts(run: Enumeration, level: int, directory: Path, share: tuple[int, int], progress: Progress) -> int:
    """Evaluate every part of the last level that is this process's and is not there yet; returns how many there are."""
    worker, workers = share
    part, num_graphs = 0, 0
    blocks = run.blocks(level, is_last=True)
    while some := list(islice(blocks, _BLOCKS_IN_PART)):
        path = directory / f"last{part}.npz"
        num_graphs += sum(len(block.left) for block in some)
        if part % workers == worker and not path.exists():
            _save(path, **_columns("made", Nodes.joined([run.fingerprint(block) for block in some])))
            progress(f"{run.vocabulary.name}: {level} operators, {num_graphs:,} graphs")
        part += 1
    return part


def _columns(name: str, nodes: Nodes) -> dict[str, np.ndarray]:
    return {
        f"{name}_hashes": nodes.hashes, f"{name}_choice": nodes.choice, f"{name}_left": nodes.left,
        f"{name}_right": nodes.right,
    }  # fmt: skip


def _nodes(name: str, saved: np.lib.npyio.NpzFile) -> Nodes:
    return Nodes(*(saved[f"{name}_{column}"] for column in ("hashes", "choice", "left", "right")))


def _save(path: Path, **columns: np.ndarray) -> None:
    """Written aside, then renamed."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with aside.open("wb") as file:
        np.savez(file, allow_pickle=False, **columns)
    aside.replace(path)
