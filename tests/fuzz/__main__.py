"""Many random models: `python -m tests.fuzz --count 20000 --workers 16 --seed-from 0 --out findings.jsonl`.

Every finding is a line of the file. Seeds that it has already are not drawn again, so a run that was stopped goes on.
Each model has a time limit, and one that ends its worker is a fault.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.comparing import STEPS, examine
from tests.fuzz.cover import forms, small_cover
from tests.fuzz.random_models import draw

LIMIT = 120
"""Seconds for a model."""


def _stop(*_: Any) -> None:
    raise TimeoutError(f"not done after {LIMIT} s")


def _examine(seed: int, steps: int, strategies: tuple[str, ...]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(LIMIT)
    try:
        return asdict(examine(seed, steps, strategies=strategies))
    except Exception as error:  # whatever goes wrong is what is looked for
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {str(error)[:300]} at {place.filename}:{place.lineno}"
        return {"seed": seed, "error": told}
    finally:
        signal.alarm(0)


def _known(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def _figures(found: list[dict[str, Any]], seconds: float) -> str:
    rules: Counter[str] = Counter()
    for finding in found:
        rules.update(finding.get("rules", {}))
    lines = [
        f"{len(found)} models, {seconds / max(len(found), 1):.2f} s each on the wall",
        f"{sum(bool(f.get('refused')) for f in found)} refused by capture",
        f"{sum(f.get('splits', 0) for f in found)} plans split something, "
        f"{sum(f.get('rewrites', 0) for f in found)} have a substitution, {len(rules)} different rules",
        f"largest difference: {max((f.get('worst', 0.0) for f in found), default=0.0):.3g} of what is allowed",
    ]
    wrong = [f for f in found if f.get("fault") or f.get("error")]
    lines += [f"{len(wrong)} differ or fail"]
    return "\n".join([*lines, *(f"  seed {f['seed']}: {f.get('fault') or f.get('error')}" for f in wrong)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed-from", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a search")
    parser.add_argument("--strategy", action="append", default=[], help="named, instead of a search; several times")
    parser.add_argument("--cover", type=int, help="print small models of so many that have every pattern, instead")
    parser.add_argument("--out", type=Path, default=Path("findings.jsonl"))
    given = parser.parse_args()
    if given.cover is not None:
        print(small_cover({seed: forms(draw(seed)) for seed in range(given.cover)}))
        return 0
    wanted = range(given.seed_from, given.seed_from + given.count)
    known = {f["seed"]: f for f in _known(given.out) if f["seed"] in wanted}
    start = time.perf_counter()
    gc.freeze()  # what is imported is looked through by none of the workers
    gc.set_threshold(200_000)
    context = multiprocessing.get_context("fork")
    with context.Pool(given.workers, maxtasksperchild=200) as pool, given.out.open("a") as file:
        left = [seed for seed in wanted if seed not in known]
        work = partial(_examine, steps=given.steps, strategies=tuple(given.strategy))
        for finding in pool.imap_unordered(work, left):
            known[finding["seed"]] = finding
            file.write(json.dumps(finding) + "\n")
            file.flush()
    print(_figures(list(known.values()), time.perf_counter() - start))
    return int(any(f.get("fault") or f.get("error") for f in known.values()))


if __name__ == "__main__":
    sys.exit(main())
