"""The best options of a chain are those that trying all of them finds, timed by the simulator's own engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

from conjoin.memory import Choice, Link, Option, find_choice
from conjoin.sim.engine import COMPUTE, FROM_HOST, NUM_STREAMS, TO_HOST, Instruction, run

RATE = 1
"""Seconds of a copy for a byte."""


def random_link(rng: Random) -> Link:
    inside, given = rng.randint(1, 9), rng.randint(1, 4)
    forward = rng.randint(1, 9)
    options = (
        Option("keep", inside + given),
        Option("again", given, forward),
        Option("host", 0, copied_bytes=inside + given),
        Option("again from host", 0, forward, given),
    )
    return Link(forward, rng.randint(1, 18), inside + given, options)


def timed(links: Sequence[Link], options: Sequence[Option]) -> int:
    """A step on three streams: forward with copies to the host, then backward with copies that were started ahead."""
    moved = [i for i, option in enumerate(options) if option.copied_bytes]
    sent = {i: NUM_STREAMS + 2 * k for k, i in enumerate(moved)}
    tasks: list[Instruction] = []
    for i, link in enumerate(links):
        tasks.append(Instruction("forward", COMPUTE, int(link.forward)))
        if i in sent:
            tasks.append(Instruction("send", TO_HOST, RATE * options[i].copied_bytes, waits=(COMPUTE,), event=sent[i]))
            earlier = moved[: moved.index(i)][-2:-1]
            tasks += (Instruction("wait", COMPUTE, 0, waits=(sent[j],)) for j in earlier)
    there = {*moved[-2:]}
    for i in reversed(range(len(links))):
        k = moved.index(i) if i in sent else -1
        for j in moved[max(k - 2, 0) : k][::-1] if k >= 0 else ():
            if j not in there:
                there.add(j)
                wait = (COMPUTE, sent[j])
                seconds = RATE * options[j].copied_bytes
                tasks.append(Instruction("bring", FROM_HOST, seconds, waits=wait, event=sent[j] + 1))
        if i in sent:
            tasks.append(Instruction("wait", COMPUTE, 0, waits=(sent[i] + 1,)))
        tasks.append(Instruction("backward", COMPUTE, int(links[i].backward + options[i].again_seconds)))
    return int(run([tuple(tasks)], 2 * len(moved)).computed[-1])


def fits(links: Sequence[Link], options: Sequence[Option], capacity: int) -> bool:
    for i, link in enumerate(links):
        window = [option.copied_bytes for option in options[:i] if option.copied_bytes][-2:]
        if sum(option.kept_bytes for option in options[:i]) + sum(window) + link.inside_bytes > capacity:
            return False
    return True


def test_nothing_that_can_be_tried_is_better() -> None:
    rng = Random(5)
    found_some = 0
    for _ in range(60):
        links = [random_link(rng) for _ in range(rng.randint(1, 5))]
        most = sum(link.inside_bytes for link in links)
        capacity = rng.randint(most // 3, most)
        ways = product(*(link.options for link in links))
        best = min((timed(links, way) for way in ways if fits(links, way, capacity)), default=None)
        found = find_choice(links, capacity, lambda size: RATE * size)
        assert (found is None) == (best is None)
        if found is not None:
            assert found.is_exact and found.seconds == best == timed(links, found.options)
            assert fits(links, found.options, capacity) and found.peak_bytes <= capacity
            found_some += isinstance(found, Choice) and any(option.copied_bytes for option in found.options)
    assert found_some > 10
