"""A step that is too large for its device, as a chain of segments: which are kept, made again, or lie on the host.

What a segment makes is there while it runs, forward and backward. In between its option says what stays on the device,
how much longer its backward pass takes since it is made again, and what is copied to the host and back. Copies go one
after the other in each direction, beside what is computed; memory is free for the third segment on the host when the
copy of the first is done, so that

    T(i) = T(i-1) + seconds(i),   D(i) = max(T(i), D(last on the host)) + copy(i),   T(i) >= D(last but two)

The longest path of the backward pass is that of the same pass reversed, in which copies come after what they are for:
the same recursion, with the seconds of the backward pass. So one sweep over the segments decides both. A state knows
the bytes that stay, both clocks, and when the last two copies of each are done; what is no better than another in any
of these is dropped, and so the result is exact. Beyond `MAX_STATES` only the fastest of about as many bytes are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

MAX_STATES = 200
"""After each segment: then a chain of 40 takes about a second."""


@dataclass(frozen=True, slots=True)
class Option:
    """What may be done with what a segment makes."""

    name: str
    kept_bytes: int
    """On the device between its forward and its backward pass."""
    again_seconds: float = 0.0
    """More in its backward pass."""
    copied_bytes: int = 0
    """To the host and back."""


@dataclass(frozen=True, slots=True)
class Link:
    """A segment of a step."""

    forward: float
    backward: float
    inside_bytes: int
    """What is there while it runs."""
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """An option for every segment, and what the step takes with them."""

    options: tuple[Option, ...]
    seconds: float
    peak_bytes: int
    is_exact: bool
    """Whether no state was dropped that might have been better."""


Clock = tuple[float, float]
"""How much later than what is computed the last copy but one and the last are done."""


@dataclass(frozen=True, slots=True)
class _State:
    kept: int
    seconds: float
    forward: Clock
    backward: Clock
    copied: tuple[int, int]
    """Bytes of the last two segments on the host, which may not have left."""
    peak: int
    before: _State | None
    option: Option | None

    @property
    def figures(self) -> tuple[float, ...]:
        return self.kept, self.seconds, *self.forward, *self.backward, *self.copied


_START = _State(0, 0.0, (0.0, 0.0), (0.0, 0.0), (0, 0), 0, None, None)


def find_choice(links: Sequence[Link], capacity: int, copy_seconds: Callable[[int], float]) -> Choice | None:
    """The options with which a step fits into a capacity and takes least; None where it never fits.

    >>> host, again = Option("host", 0, copied_bytes=4), Option("again", 0, again_seconds=3.0)
    >>> links = [Link(1.0, 2.0, 4, (Option("keep", 4), again, host))] * 4
    >>> for capacity in (16, 12, 8):
    ...     found = find_choice(links, capacity, lambda size: size / 4)
    ...     print(found.seconds, [option.name for option in found.options])
    12.0 ['keep', 'keep', 'keep', 'keep']
    12.0 ['host', 'host', 'host', 'keep']
    18.0 ['keep', 'again', 'again', 'keep']
    """
    states, is_exact = [_START], True
    for link in links:
        more = [_after(state, link, option, copy_seconds) for state in states for option in link.options]
        states = _undominated([state for state in more if state.peak <= capacity])
        if len(states) > MAX_STATES:
            states, is_exact = _thinned(states), False
    best = min(states, key=lambda state: (state.seconds, state.peak), default=None)
    if best is None:
        return None
    options = _kept_where_free(links, _way(best), capacity, copy_seconds)
    end = _end(links, options, copy_seconds)
    return Choice(tuple(options), end.seconds, end.peak, is_exact)


def _kept_where_free(
    links: Sequence[Link], options: list[Option], capacity: int, copy_seconds: Callable[[int], float]
) -> list[Option]:
    """The same without copies that save nothing: what takes as long and fits without them is kept."""
    seconds = _end(links, options, copy_seconds).seconds
    for i in reversed(range(len(options))):
        for option in links[i].options:
            tried = [*options[:i], option, *options[i + 1 :]]
            if option.copied_bytes < options[i].copied_bytes:
                end = _end(links, tried, copy_seconds)
                options = tried if end.seconds <= seconds and end.peak <= capacity else options
    return options


def _end(links: Sequence[Link], options: Sequence[Option], copy_seconds: Callable[[int], float]) -> _State:
    state = _START
    for link, option in zip(links, options, strict=True):
        state = _after(state, link, option, copy_seconds)
    return state


def _after(state: _State, link: Link, option: Option, copy_seconds: Callable[[int], float]) -> _State:
    copied = option.copied_bytes
    seconds = copy_seconds(copied) if copied else 0.0
    there, forward = _advance(state.forward, link.forward, seconds)
    back, backward = _advance(state.backward, link.backward + option.again_seconds, seconds)
    peak = max(state.peak, state.kept + sum(state.copied) + link.inside_bytes)
    last = (state.copied[1], copied) if copied else state.copied
    kept = state.kept + option.kept_bytes
    return _State(kept, state.seconds + there + back, forward, backward, last, peak, state, option)


def _advance(clock: Clock, seconds: float, copy: float) -> tuple[float, Clock]:
    """Compute for some seconds, then start a copy where there is one: how long that takes, and the clock after it."""
    first, last = (max(0.0, late - seconds) for late in clock)
    if not copy:
        return seconds, (first, last)
    return seconds + first, (max(0.0, last - first), last + copy - first)


def _undominated(states: list[_State]) -> list[_State]:
    """Those of which no other is as good in everything."""
    if not states:
        return []
    states = sorted(states, key=lambda state: state.figures)
    figures = np.array([state.figures for state in states], np.float64)
    as_good = (figures[:, None] <= figures[None]).all(axis=2)
    is_worse = np.triu(as_good, 1).sum(axis=0).tolist()
    return [state for state, worse in zip(states, is_worse, strict=True) if not worse]


def _thinned(states: list[_State]) -> list[_State]:
    """The fastest of every so many bytes."""
    step = max(1, max(state.kept for state in states) // MAX_STATES)
    fastest: dict[int, _State] = {}
    for state in sorted(states, key=lambda state: state.seconds):
        fastest.setdefault(state.kept // step, state)
    return list(fastest.values())


def _way(state: _State) -> list[Option]:
    found = []
    at: _State | None = state
    while at is not None and at.option is not None:
        found.append(at.option)
        at = at.before
    return found[::-1]
