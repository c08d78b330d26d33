"""What a machine may be: bounds on its numbers and texts, since descriptions come from strangers' files too."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from difflib import get_close_matches
from itertools import islice

from conjoin.errors import UsageError

MAX_DEVICES = 2**20
"""More than any machine has, and few enough to list every rank."""
MAX_NAME_LENGTH = 100
MAX_DESCRIPTION_LENGTH = 1_000
MAX_WORDS = 50
"""Known words that a message may name."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Which torch.distributed backend talks between devices of a kind."""


def check_count(what: str, value: object, owner: str = "machine's") -> None:
    """Refuse what is not a number of nodes or devices; truth values are no numbers."""
    if type(value) is not int or not 1 <= value <= MAX_DEVICES:
        raise UsageError(
            f"The {owner} {what} is {shown(value)}. It must be a whole number from 1 to {MAX_DEVICES:,}. Change {what}."
        )


def check_total(num_nodes: int, devices_per_node: int) -> None:
    """Refuse more devices than any machine has."""
    if num_nodes * devices_per_node > MAX_DEVICES:
        raise UsageError(
            f"The machine has {num_nodes:,} nodes of {devices_per_node:,} devices each. That makes "
            f"{num_nodes * devices_per_node:,} devices, the limit is {MAX_DEVICES:,}. "
            f"Lower num_nodes or devices_per_node."
        )


def check_label(what: str, label: object) -> None:
    """Refuse a name of a part that does not fit into one line, or is made of blanks."""
    if type(label) is not str or not 1 <= len(label) <= MAX_NAME_LENGTH or not label.isprintable() or label.isspace():
        raise UsageError(
            f"The {what} is {shown(label)}. "
            f"It must be one line of 1 to {MAX_NAME_LENGTH} printable characters. Choose another name."
        )


def check_description(description: object) -> None:
    """Refuse a description that could not be shown or written to a file."""
    good = type(description) is str and len(description) <= MAX_DESCRIPTION_LENGTH
    if not good or not str(description).replace("\n", "").isprintable():
        raise UsageError(
            f"The machine's description is {shown(description)}. It must be text of at most "
            f"{MAX_DESCRIPTION_LENGTH:,} printable characters. Shorten it, or leave it out."
        )


def check_device(device: object) -> None:
    """Refuse a kind of device that no backend is known for."""
    if type(device) is not str or device not in BACKENDS:
        raise UsageError(
            f"The machine's device is {shown(device)}. Known kinds are {', '.join(sorted(BACKENDS))}. "
            f"{suggestion(str(device), BACKENDS) if type(device) is str else 'Name one of them in quotes.'}"
        )


def shown(value: object) -> str:
    """A value from a file in a few words: it may be a huge number, or nested too deeply to print.

    >>> shown(7), shown(True), shown("x" * 100)[:5], shown([]), shown(10**5000)
    ('7', 'true', "'xxxx", 'of type list', 'a number of more than 15 digits')
    """
    match value:
        case bool():
            return str(value).lower()
        case Decimal():
            return "of type float"
        case int():
            return f"{value}" if abs(value) < 10**15 else "a number of more than 15 digits"
        case str():
            return repr(value) if len(value) <= 60 else f"{value[:60]!r}… ({len(value):,} characters)"
    return f"of type {type(value).__name__}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """A sentence that names the known word nearest to the one given, or all of them where none is near.

    >>> suggestion("Sumit", ["summit", "laptop"]), suggestion("?", ["summit", "laptop"])
    ('Did you mean summit?', 'Use one of summit, laptop.')
    """
    words = list(islice(known, MAX_WORDS))
    near = get_close_matches(word[:60].lower(), words, n=1)
    return f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(words)}."
