"""The one place where the environment is read: where conjoin keeps what it may recompute, where machines are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from conjoin.errors import UsageError


def machines_directory() -> Path | None:
    """`CONJOIN_MACHINES`, a directory of machine files of the user's own; None where it is not set."""
    given = os.environ.get("CONJOIN_MACHINES")
    return Path(given) if given else None


def cache_directory() -> Path:
    """`CONJOIN_CACHE`, else `conjoin` under the user's cache directory; it is not created here."""
    given = os.environ.get("CONJOIN_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "conjoin"
    except RuntimeError as error:
        raise UsageError(
            "The cache directory was asked for, and there is no place for it. This account has no home directory. "
            "Set CONJOIN_CACHE to a directory that may be written to."
        ) from error


def costs_path() -> Path:
    """`CONJOIN_COSTS`, else `costs.sqlite` in the cache directory: where measured seconds are kept."""
    given = os.environ.get("CONJOIN_COSTS")
    return Path(given) if given else cache_directory() / "costs.sqlite"


def patience_seconds() -> float | None:
    """`CONJOIN_PATIENCE`, how many seconds a rank may make no progress while others wait for it; None where not set."""
    given = os.environ.get("CONJOIN_PATIENCE")
    if not given:
        return None
    try:
        return float(given)
    except ValueError:
        raise UsageError(
            f"CONJOIN_PATIENCE is set to {given[:60]!r}. It is how many seconds a rank may make no progress while "
            f"others wait for it. Set it to a number."
        ) from None


def is_launched() -> bool:
    """Whether a launcher has told this process which of the ranks it is, and where they meet."""
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def installed_version() -> str:
    """The version of this package that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("conjoin")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


def whole_environment() -> dict[str, str]:
    """All variables, to start another process as this one was."""
    return dict(os.environ)


def take_environment(variables: Mapping[str, str]) -> None:
    """Have these variables, and no others."""
    os.environ.clear()
    os.environ.update(variables)
