"""Every model of the zoo by name: `build("bert-large")`, `build("bert-large:tiny")`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module

from zoo.workload import Entry, Workload, build_entry, sizes_of

_FAMILIES = (
    "mlp", "convnets", "resnet", "inception", "nasnet", "vit",
    "rnn", "nmt", "bert", "gpt", "llama", "moe", "u_transformer", "recommendation", "gnn",
)  # fmt: skip
_TINY = ":tiny"


def _entries() -> dict[str, Entry]:
    return {name: entry for family in _FAMILIES for name, entry in import_module(f"zoo.{family}").MODELS.items()}


def names() -> tuple[str, ...]:
    """The names `build` accepts, without the `:tiny` that each of them also takes."""
    return tuple(sorted(_entries()))


def sizes(name: str) -> tuple[str, ...]:
    """The sizes that `build` takes for a model: `length`, `layers` ..."""
    return sizes_of(_entries()[name.removesuffix(_TINY)], tiny=name.endswith(_TINY))


def build(
    name: str,
    *,
    batch_size: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
) -> Workload:
    """Build a model and a batch by name; `device="meta"` costs no memory whatever the size.

    Other `sizes` than the published ones may be asked for, as `{"length": 8192}`.
    """
    base = name.removesuffix(_TINY)
    entries = _entries()
    if base not in entries:
        near = get_close_matches(base, entries, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Known names: {', '.join(sorted(entries))}."
        raise KeyError(f"The zoo has no model named {name!r}. {hint}")
    tiny = name.endswith(_TINY)
    return build_entry(entries[base], tiny=tiny, batch_size=batch_size, device=device, seed=seed, sizes=sizes)
