"""What a search has tried, in words and numbers that can be kept: a later search goes on from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

_MAX_ENTRIES = 200_000
_MAX_LENGTH = 400


@dataclass
class Notes:
    """Trials by their names. What is in here is not tried again."""

    tried: dict[str, float] = field(default_factory=dict)
    """Trials that were finished, each with the seconds of the best plan it found; infinite where it found none."""
    sums: dict[str, float] = field(default_factory=dict)
    """Least sums that were worked out."""
    rounds: int = 0
    """How often random changes were tried: the next time with another seed."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Substitutions that something else came of than they promise, and what."""

    def __len__(self) -> int:
        return len(self.tried) + len(self.sums) + self.rounds

    def to_json(self) -> dict[str, Any]:
        """As plain data; numbers that JSON has no word for are left out."""
        return {
            "tried": {name: value if isfinite(value) else None for name, value in self.tried.items()},
            "sums": {name: value for name, value in self.sums.items() if isfinite(value)},
            "rounds": self.rounds,
            "dropped": dict(self.dropped),
        }


def notes_from_json(data: Any) -> Notes:
    """Read what `Notes.to_json` wrote; ValueError says what is wrong.

    >>> notes_from_json(Notes({"2×4": 0.5}, {}, 1).to_json())
    Notes(tried={'2×4': 0.5}, sums={}, rounds=1, dropped={})
    """
    if not isinstance(data, dict) or data.keys() != {"tried", "sums", "rounds", "dropped"}:
        raise ValueError("the notes are not trials, sums, rounds and what was dropped")
    rounds = data["rounds"]
    if type(rounds) is not int or not 0 <= rounds < 1 << 31:
        raise ValueError("the rounds are not a number")
    return Notes(_numbers(data["tried"]), _numbers(data["sums"]), rounds, _reasons(data["dropped"]))


def _reasons(data: Any) -> dict[str, str]:
    if not isinstance(data, dict) or len(data) > _MAX_ENTRIES:
        raise ValueError("what was dropped is not names with reasons")
    if any(not isinstance(reason, str) or len(name) + len(reason) > _MAX_LENGTH for name, reason in data.items()):
        raise ValueError("a reason is not a sentence")
    return dict(data)


def _numbers(data: Any) -> dict[str, float]:
    if not isinstance(data, dict) or len(data) > _MAX_ENTRIES or any(len(name) > _MAX_LENGTH for name in data):
        raise ValueError("the notes are not names with numbers")
    for value in data.values():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError("a note is not a number")
    return {name: float("inf") if value is None else float(value) for name, value in data.items()}
