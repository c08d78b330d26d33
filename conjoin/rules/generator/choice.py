"""Choose among distinct candidates, from the smallest on: those that hold at other sizes and do not follow from others.

What was chosen is saved from time to time, so that a run that was stopped goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, nsmallest
from pathlib import Path
from typing import Any

from conjoin.rules.generator.candidates import Pair, Reader
from conjoin.rules.generator.enumeration import Progress
from conjoin.rules.generator.forks import forked
from conjoin.rules.generator.pruning import (
    INPUT,
    Equation,
    Rewriter,
    Term,
    Terms,
    inputs_in,
    num_operators,
    num_special,
    with_input,
)
from conjoin.rules.generator.trials import float_trials, residue_trial

_AHEAD = (64, 4)
"""Of how many candidates it is seen together whether they follow: so many, and one for so many looked at."""
_SAVED_EACH = 5000
"""Candidates between two savings, and lines of progress: half a minute."""

Queued = tuple[tuple[int, int, int], int, bool]
"""A candidate with its rank before it, and whether it is looked at as it was found."""


@dataclass(slots=True)
class Chosen:
    """How far a choice is."""

    looked_at: int = 0
    refuted: int = 0
    derived: int = 0
    accepted: list[Equation] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    """Candidates that were made too general, to be looked at as they were found."""


class Chooser:
    """Takes candidates from the smallest on."""

    def __init__(self, reader: Reader, pairs: Sequence[Pair], progress: Progress = print, workers: int = 1) -> None:
        self._reader, self._pairs, self._progress, self._workers = reader, pairs, progress, workers
        self._residues = residue_trial(reader)
        self._floats = float_trials(reader, reader.found.vocabulary.other_sizes)
        self._rewriter = Rewriter(reader.found.commutes)
        self._chosen = Chosen()

    def choose(self, state: Path | None = None) -> Chosen:
        """Look at all candidates; continues what the file has of the same candidates."""
        saved = _loaded(state, len(self._pairs))
        for equation in saved.accepted:
            self._accept(equation)
        chosen = self._chosen
        chosen.refuted, chosen.derived, known_again = saved.refuted, saved.derived, set(saved.again)
        queue = [(self._rank(place, False), place, False) for place in range(len(self._pairs))]
        heapify(queue)
        seen: dict[tuple[int, bool], bool] = {}
        while queue:
            is_known = chosen.looked_at < saved.looked_at
            if not is_known and queue[0][1:] not in seen:
                seen = self._look_ahead(queue)
            _, place, is_bare = heappop(queue)
            follows = seen.get((place, is_bare), False)
            again = (place in known_again and not is_bare) if is_known else self._take(place, is_bare, follows)
            if again:
                chosen.again.append(place)
                heappush(queue, (self._rank(place, True), place, True))
            chosen.looked_at += 1
            if chosen.looked_at % _SAVED_EACH == 0 and not is_known:
                self._tell(state, len(queue))
        self._drop_instances()
        return chosen

    def _look_ahead(self, queue: list[Queued]) -> dict[tuple[int, bool], bool]:
        """Which of the next candidates follow from what is accepted by now; the others are looked at in their turn.

        How far is looked does not depend on how many processes do it, so that neither does what is chosen.
        """
        least, share = _AHEAD
        items = [item[1:] for item in nsmallest(least + self._chosen.looked_at // share, queue)]
        found = forked(lambda item: self._is_derived(self._pair(*item)), items, self._workers)
        return dict(zip(items, found, strict=True))

    def _is_derived(self, pair: Pair) -> bool:
        equation = _oriented(self._reader.equation(pair))
        if equation is None:
            return False
        plain = self._plain(equation)
        if plain.left == plain.right:
            return equation.size > (1, 2)
        return self._rewriter.follows(plain, self._residues.agree)

    def _tell(self, state: Path | None, num_left: int) -> None:
        name, chosen = self._reader.found.vocabulary.name, self._chosen
        counts = f"{chosen.looked_at:,} of {chosen.looked_at + num_left:,} candidates looked at"
        self._progress(f"{name}: {counts}, {len(chosen.accepted):,} accepted")
        if state is not None:
            _save(state, chosen, len(self._pairs))

    def _rank(self, place: int, is_bare: bool) -> tuple[int, int, int]:
        """The small first, among them those about nothing special."""
        equation = self._reader.equation(self._pair(place, is_bare))
        return *equation.size, num_special(*equation.left, *equation.right)

    def _pair(self, place: int, is_bare: bool) -> Pair:
        """A candidate, bare: with common subgraphs as they were found."""
        pair = self._pairs[place]
        return replace(pair, cut=frozenset()) if is_bare else pair

    def _take(self, place: int, is_bare: bool, follows: bool) -> bool:
        """Accept a candidate or not; True where it was made too general."""
        pair = self._pair(place, is_bare)
        equation = _oriented(self._reader.equation(pair))
        if equation is None:
            return False
        if follows or self._is_derived(pair):
            self._chosen.derived += 1
            return False
        if not all(trial.holds(equation) for trial in self._floats) or not self._is_general(equation):
            self._chosen.refuted += not pair.cut
            return bool(pair.cut)
        self._accept(equation)
        return False

    def _is_general(self, equation: Equation) -> bool:
        """Whether inputs that stand for common subgraphs may be other tensors of the same rank as well.

        `conv(concat(x, x), y) = conv(x, y)` holds for a `y` that is a concatenation: it has an even number of features.
        The parts of a split need no such test: what they are parts of gives their sizes.
        """
        if len(equation.left) > 1:
            return True
        trial = self._floats[0]
        cut = sorted(i for i in inputs_in(*equation.left, *equation.right) if i >= self._reader.num_inputs)
        for value in cut:
            for other in range(self._reader.num_inputs):
                if trial.is_of_same_rank((INPUT, value), (INPUT, other)):
                    changed = with_input(equation, value, other)
                    fits = {trial.type_of(term) is not None for term in (*changed.left, *changed.right)}
                    if len(fits) > 1 or (fits == {True} and not trial.holds(changed)):
                        return False
        return True

    def _accept(self, equation: Equation) -> None:
        self._chosen.accepted.append(equation)
        plain = self._plain(equation)
        if plain.left != plain.right:
            self._rewriter.add(plain)

    def _plain(self, equation: Equation) -> Equation:
        return Equation(*(tuple(map(self._rewriter.normal, side)) for side in (equation.left, equation.right)))

    def _drop_instances(self) -> None:
        """Once more, now that larger and more general ones are known too; special ones go first."""
        dropped = set()
        for equation in sorted(self._chosen.accepted, key=lambda each: -num_special(*each.left, *each.right)):
            plain = self._plain(equation)
            if plain.left == plain.right:
                continue
            self._rewriter.remove(plain)
            if self._rewriter.follows(plain, self._residues.agree):
                dropped.add(equation)
            else:
                self._rewriter.add(plain)
        self._chosen.derived += len(dropped)
        self._chosen.accepted = [equation for equation in self._chosen.accepted if equation not in dropped]


def _oriented(equation: Equation) -> Equation | None:
    """The larger side first, unless the other has inputs that it has not; several outputs: the separate ones first."""
    left, right = (inputs_in(*side) for side in (equation.left, equation.right))
    if len(equation.left) > 1:
        return Equation(equation.right, equation.left)
    if right < left or (right == left and num_operators(*equation.left) >= num_operators(*equation.right)):
        return equation
    return Equation(equation.right, equation.left) if left <= right else None


def _save(path: Path, chosen: Chosen, num_pairs: int) -> None:
    """Written aside, then renamed."""
    facts = {
        "candidates": num_pairs, "looked_at": chosen.looked_at, "refuted": chosen.refuted, "derived": chosen.derived,
        "again": chosen.again, "accepted": [[equation.left, equation.right] for equation in chosen.accepted],
    }  # fmt: skip
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(facts), encoding="utf-8")
    aside.replace(path)


def _loaded(path: Path | None, num_pairs: int) -> Chosen:
    """What was saved about as many candidates; nothing where there is none."""
    if path is None or not path.exists():
        return Chosen()
    facts = json.loads(path.read_text(encoding="utf-8"))
    if facts["candidates"] != num_pairs:
        return Chosen()
    accepted = [Equation(_terms(left), _terms(right)) for left, right in facts["accepted"]]
    return Chosen(facts["looked_at"], facts["refuted"], facts["derived"], accepted, facts["again"])


def _terms(written: list[Any]) -> Terms:
    return tuple(map(_term, written))


def _term(written: list[Any]) -> Term:
    return tuple(_term(each) if isinstance(each, list) else each for each in written)
