"""Generate rules: enumerate, pair by fingerprint, test, prune, generalize, prove (TASO, chapter 2; Unity, section 4).

    enumerate_graphs      graphs of equal fingerprint                        Algorithm 1
    distinct_candidates   pruning by renaming and by common subgraphs        section 2.5
    Chooser               the second test; pruning by rewriting with smaller rules

What is left are candidates: nothing here decides what is true (`selection.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conjoin.rules.generator.candidates import Counts, Reader, distinct_candidates
from conjoin.rules.generator.choice import Chooser
from conjoin.rules.generator.enumeration import Progress
from conjoin.rules.generator.pruning import Equation
from conjoin.rules.generator.resumed_enumeration import enumerate_graphs, state_of
from conjoin.rules.generator.trials import Trial, float_trials, residue_trial
from conjoin.rules.generator.vocabulary import Vocabulary
from conjoin.rules.operators import BY_NAME
from conjoin.rules.patterns import Apply, Expr, Parameter, Rule

_INPUT_NAMES = ["x", "y", "z", "w", "u", "v", "t", "r", "q", "p"]


@dataclass(frozen=True, slots=True)
class Selection:
    """The candidates of one vocabulary that are left to prove."""

    vocabulary: str
    num_graphs: int
    counts: Counts
    refuted: int
    """Candidates that the second test dropped."""
    derived: int
    """Candidates that follow from smaller ones."""
    rules: tuple[Rule, ...]
    seconds: float
    """Of the process."""


def generate(
    vocabulary: Vocabulary,
    most_ops: int,
    *,
    directory: Path | None = None,
    workers: int = 1,
    progress: Progress = print,
) -> Selection:
    """Candidates over a vocabulary, of at most so many operators on each side, tested and pruned."""
    start = time.process_time()
    found = enumerate_graphs(vocabulary, most_ops, directory=directory, workers=workers, progress=progress)
    reader = Reader(found)
    counts, pairs = distinct_candidates(reader)
    progress(f"{vocabulary.name}: {counts}")
    state = None if directory is None else state_of(directory, vocabulary, most_ops) / "chosen.json"
    chosen = Chooser(reader, pairs, progress, workers).choose(state)
    rules = tuple(_rules_of(reader, chosen.accepted))
    seconds = time.process_time() - start
    return Selection(vocabulary.name, found.num_graphs, counts, chosen.refuted, chosen.derived, rules, seconds)


# Rules.


def _rules_of(reader: Reader, equations: Sequence[Equation]) -> Iterator[Rule]:
    vocabulary = reader.found.vocabulary
    grouped = float_trials(reader, vocabulary.grouped_sizes) if vocabulary.grouped_sizes else ()
    base = residue_trial(reader)
    for equation in equations:
        places = list(dict.fromkeys(_inputs_in_order(*equation.left, *equation.right)))
        names = {place: _input_name(i) for i, place in enumerate(places)}
        one_group = bool(grouped) and not all(trial.holds(equation) for trial in grouped)

        def expr(term: tuple[int, ...], names: dict[int, str] = names, one_group: bool = one_group) -> Expr:
            return _written(reader, term, names, base if one_group else None)

        yield Rule("", tuple(map(expr, equation.left)), tuple(map(expr, equation.right)))


def _inputs_in_order(*terms: tuple) -> Iterator[int]:  # type: ignore[type-arg]
    for term in terms:
        if term[0] == -1:
            yield term[1]
        else:
            yield from _inputs_in_order(*term[1:])


def _input_name(place: int) -> str:
    return _INPUT_NAMES[place] if place < len(_INPUT_NAMES) else f"x{place}"


def _written(reader: Reader, term: tuple, names: dict[int, str], base: Trial | None) -> Expr:  # type: ignore[type-arg]
    """The expression of a term; with a trial given, convolutions that have one group there say so."""
    if term[0] < 0:
        return reader.expr(term, names)
    made = reader.found.vocabulary.choices[term[0]]
    args = tuple(_written(reader, arg, names, base) for arg in term[1:])
    params = _without_defaults(made.op, made.params)
    if made.op == "conv" and base is not None:
        x, weight = (base.type_of(arg) for arg in term[1:])
        if x is not None and weight is not None and x.shape[1] == weight.shape[1]:
            params = (*params, ("groups", 1))
    return Apply(made.op, params, args)


def _without_defaults(op: str, params: tuple[tuple[str, Parameter], ...]) -> tuple[tuple[str, Parameter], ...]:
    defaults = dict(BY_NAME[op].params)
    return tuple((name, value) for name, value in params if defaults[name] != value)
