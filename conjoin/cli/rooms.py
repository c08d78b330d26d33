"""The rooms that commands work in, each loaded when it is first asked for: help and completion are there at once."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from conjoin import api, comm, cost, frontends, ir, machine, report, rules, runtime, search, sim
    from conjoin.cli import device_probe, models
    from conjoin.cli.trainer import training
else:

    class _Later:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(_load(self._name), attribute)

    def _load(name: str) -> ModuleType:
        """Import without looking for garbage meanwhile, nor ever again in what was imported, which stays."""
        if name in sys.modules or not gc.isenabled():
            return import_module(name)
        gc.disable()
        try:
            return import_module(name)
        finally:
            gc.freeze()
            gc.enable()

    torch, dist = _Later("torch"), _Later("torch.distributed")
    api, comm, cost, frontends, ir, machine, report = (
        _Later(f"conjoin.{room}") for room in ("api", "comm", "cost", "frontends", "ir", "machine", "report")
    )
    rules, runtime, search, sim = (_Later(f"conjoin.{room}") for room in ("rules", "runtime", "search", "sim"))
    models, device_probe, training = (
        _Later(f"conjoin.cli.{file}") for file in ("models", "device_probe", "trainer.training")
    )

__all__ = [
    "api", "comm", "cost", "device_probe", "dist", "frontends", "ir", "machine", "models", "report", "rules", "runtime",
    "search", "sim", "torch", "training",
]  # fmt: skip
