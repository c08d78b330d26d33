"""Links between devices, switches and network cards, and the kinds of nodes they make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conjoin.errors import UsageError
from conjoin.machine.devices import DeviceType
from conjoin.machine.limits import check_count, check_label, shown, suggestion
from conjoin.machine.quantities import GIGABYTES_PER_SECOND, MICROSECONDS

NETWORK = "network"
"""The vertex at which a node meets the others."""
MAX_LINKS = 4_096
"""In one node kind, and between nodes: enough for any drawing of a machine, few enough to search for paths."""
MAX_DEVICES_OF_KIND = 4_096


@dataclass(frozen=True, slots=True)
class Link:
    """A wire between two vertices, each a device ("0", "1" …), a named switch or network card, or `network`.

    A shared link divides its bandwidth among the messages on it; of one that is not, every message has all. A duplex
    link carries as much in each direction at the same time; else both directions take turns.
    """

    ends: tuple[str, str]
    bandwidth: float
    """Bytes per second, in one direction."""
    latency: float
    """Seconds."""
    kind: str = ""
    shared: bool = True
    duplex: bool = True

    def __post_init__(self) -> None:
        what = f"link between {shown(self.ends[0])} and {shown(self.ends[1])}"
        for end in self.ends:
            check_label("end of a link", end)
        if self.kind:
            check_label(f"kind of the {what}", self.kind)
        GIGABYTES_PER_SECOND.check(f"bandwidth of the {what}", self.bandwidth)
        MICROSECONDS.check(f"latency of the {what}", self.latency)
        if self.ends[0] == self.ends[1]:
            raise UsageError(f"A {what} was described. Its ends are the same. Name two different ends.")


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes that are alike: how many follow each other, the device at each position, the links inside one.

    A kind without links says what computes and not what communicates. Switches are whatever passes messages on: PCIe
    switches, CPUs, network cards.
    """

    name: str
    count: int
    devices: tuple[DeviceType, ...]
    links: tuple[Link, ...] = ()
    switches: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_label("name of a node kind", self.name)
        check_count("count", self.count, f"node kind {self.name}'s")
        _check_num_devices(self.name, len(self.devices))
        check_links(f"node kind {self.name}", self.links)
        check_switches(f"node kind {self.name}", self.switches)
        check_ends(f"node kind {self.name}", self.links, len(self.devices), (*self.switches, NETWORK))


def _check_num_devices(name: str, num_devices: int) -> None:
    if not 1 <= num_devices <= MAX_DEVICES_OF_KIND:
        raise UsageError(
            f"The node kind {name} has {num_devices:,} devices. Speeds can be told for nodes of 1 to "
            f"{MAX_DEVICES_OF_KIND:,}. Describe the machine as more nodes of fewer devices."
        )


def check_links(what: str, links: Sequence[Link]) -> None:
    """Refuse more links than a search for paths can bear, and two between the same ends."""
    if len(links) > MAX_LINKS:
        raise UsageError(
            f"The {what} has {len(links):,} links. The limit is {MAX_LINKS:,}. Draw what is alike as one switch."
        )
    for ends, times in Counter(frozenset(link.ends) for link in links).most_common(1):
        if times > 1:
            raise UsageError(
                f"The {what} has {times} links between {' and '.join(map(shown, sorted(ends)))}. A message takes one "
                f"link, and several wires side by side are one with their rates added. Describe them as one link."
            )


def check_switches(what: str, switches: Sequence[str]) -> None:
    """Refuse switches whose names are taken, or are numbers, which stand for devices and nodes."""
    if len(switches) > MAX_LINKS:
        raise UsageError(
            f"The {what} has {len(switches):,} switches. The limit is {MAX_LINKS:,}. Draw what is alike as one switch."
        )
    for switch, times in Counter(switches).items():
        check_label(f"name of a switch of the {what}", switch)
        if switch == NETWORK or switch.isdecimal() or times > 1:
            raise UsageError(
                f"The {what} has a switch named {shown(switch)}. Switches have names of their own; numbers stand for "
                f"devices and nodes, and {NETWORK!r} for where nodes meet. Choose another name."
            )


def check_ends(what: str, links: Iterable[Link], count: int, others: Sequence[str], noun: str = "device") -> None:
    """Refuse a link to something that is not there: the ends are numbers below `count` and a few names."""
    names = set(others)
    for end in (end for link in links for end in link.ends):
        if end in names or is_number_below(end, count):
            continue
        hint = suggestion(end, others) if others and not end.isdecimal() else "Correct the number."
        raise UsageError(
            f"The {what} has a link to {shown(end)}, which is not there. An end is a {noun}, 0 to {count - 1}, or the "
            f"name of a switch that is listed in switches. {hint}"
        )


def is_number_below(text: str, count: int) -> bool:
    """Whether a text is one of "0" to "count-1", written as Python writes them."""
    return text.isascii() and text.isdecimal() and len(text) <= 9 and str(int(text)) == text and int(text) < count


def check_connected(what: str, links: Sequence[Link], wanted: Sequence[str]) -> None:
    """Refuse links that leave out some of the vertices that must reach each other."""
    beside: dict[str, list[str]] = {}
    for first, second in (link.ends for link in links):
        beside.setdefault(first, []).append(second)
        beside.setdefault(second, []).append(first)
    reached, ahead = {wanted[0]}, [wanted[0]]
    while ahead:
        found = [vertex for vertex in beside.get(ahead.pop(), ()) if vertex not in reached]
        reached.update(found)
        ahead += dict.fromkeys(found)
    lost = [vertex for vertex in wanted if vertex not in reached]
    if lost:
        raise UsageError(
            f"The {what} has links, and none of them lead from {shown(wanted[0])} to {shown(lost[0])}. All devices of "
            f"a machine reach each other, and nodes meet at {NETWORK!r}. Add the links that are missing there."
        )
