"""A cluster on one Linux host: nodes are network namespaces, joined by links with a rate and a delay.

    with Cluster(num_nodes=2, ranks_per_node=2, bytes_per_second=25e6, delay_seconds=200e-6) as cluster:
        answers = cluster.run(program, timeout=120)

The ranks of a node reach each other through its own loopback, as fast as the host is.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks.emulated_cluster import namespaces
from benchmarks.emulated_cluster.priorities import go_ahead, put_switch_first
from benchmarks.emulated_cluster.switch import Link, Switch, Traffic
from conjoin.errors import UsageError
from conjoin.machine import Machine
from conjoin.runtime import Site, launch

MAX_NODES = 16
MAX_RANKS = 64
MAX_TIMEOUT_SECONDS = 3600.0
FRAME_SECONDS = 500e-6
"""How long the largest frame takes: short enough for small messages to slip between, long enough to cost little."""
_MIN_MTU = 1500
_START_SECONDS = 30.0
_OK = b"ready"


class Cluster:
    """Nodes on this host, from `with` to its end; nothing of them is left afterwards, however it ends.

    On a host that others use too, `ahead_of_others` makes the ranks go before all normal work; it takes root.
    """

    def __init__(
        self,
        num_nodes: int,
        ranks_per_node: int,
        bytes_per_second: float | Sequence[float],
        delay_seconds: float | Sequence[float] = 0.0,
        *,
        ahead_of_others: bool = False,
    ) -> None:
        _check_counts(num_nodes, ranks_per_node)
        self.num_nodes, self.ranks_per_node, self.ahead_of_others = num_nodes, ranks_per_node, ahead_of_others
        rates, delays = _each(num_nodes, bytes_per_second), _each(num_nodes, delay_seconds)
        self.links = tuple(_checked(Link(rate, delay)) for rate, delay in zip(rates, delays, strict=True))
        self._switch: Any = None
        self._control: socket.socket | None = None
        self._namespaces: list[int] = []
        self._inodes: set[int] = set()

    @property
    def num_ranks(self) -> int:
        """How many ranks there are on all nodes together."""
        return self.num_nodes * self.ranks_per_node

    @property
    def machine(self) -> Machine:
        """What a plan for this cluster is made for."""
        shown = [f"{link.bytes_per_second:.3g} B/s, {link.delay_seconds:.3g} s" for link in dict.fromkeys(self.links)]
        about = f"Emulated on one host. Links between nodes: {'; '.join(shown)}."
        return Machine("emulated", self.num_nodes, self.ranks_per_node, "cpu", about)

    def __enter__(self) -> Self:
        self._control, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside torch's own idle threads
            context = multiprocessing.get_context("fork")
            self._switch = context.Process(target=_carry, args=(theirs, self._control, self.links), daemon=True)
            self._switch.start()
        theirs.close()
        try:
            self._meet()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, program: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Run `program(rank, *args)` on every rank, in its node; what each returned.

        The ranks form a process group on Gloo, with one thread each. A rank that fails, or is not done
        in time, ends the run with an error.
        """
        if self._control is None:
            raise UsageError(
                "A program was given to a cluster that is not there. Its nodes exist only inside `with Cluster(...)`. "
                "Call run inside it."
            )
        if not 0 < timeout <= MAX_TIMEOUT_SECONDS:
            raise UsageError(
                f"A run of at most {timeout} s was asked for. A run may take up to {MAX_TIMEOUT_SECONDS:g} s. "
                f"Give a timeout in between."
            )
        above, nodes = self._namespaces[: -self.num_nodes], self._namespaces[-self.num_nodes :]
        entrance = _Entrance(os.getpid(), tuple(above), tuple(nodes), self.ranks_per_node, self.ahead_of_others)
        site = Site(namespaces.address_of(0), entrance, timeout)
        return launch(self.num_ranks, program, *args, site=site)

    def traffic(self) -> Traffic:
        """What went over the links so far, and how punctually."""
        assert self._control is not None
        self._control.sendall(b"?")
        return Traffic(**json.loads(self._control.recv(4096)))

    def processes(self) -> list[int]:
        """The processes inside the nodes, the switch among them; none once the cluster is closed."""
        return namespaces.processes_in(self._inodes)

    def close(self) -> None:
        """End the switch and whatever still runs inside the nodes; the nodes end with them."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._switch is not None:
            self._switch.join(2)
            self._switch.kill()
            self._switch.join()
            self._switch = None
        for namespace in self._namespaces:
            os.close(namespace)
        self._namespaces = []
        for process in self.processes():
            os.kill(process, signal.SIGKILL)

    def _meet(self) -> None:
        """Take over the files of the namespaces; without one of them none is left."""
        assert self._control is not None
        self._control.settimeout(_START_SECONDS)
        said, files, _, _ = socket.recv_fds(self._control, 4096, self.num_nodes + 1)
        self._namespaces = files
        if said != _OK:
            why = said.decode() or "the switch ended"
            raise UsageError(
                f"A cluster of {self.num_nodes} nodes was asked for. This host does not let us make network namespaces "
                f"with TUN devices ({why}). Run as root, or where user namespaces and /dev/net/tun are open to users."
            )
        self._inodes = {os.fstat(file).st_ino for file in files[-self.num_nodes :]}


@dataclass(frozen=True, slots=True)
class _Entrance:
    """The way of a rank's process to its node, by files that the process of the cluster holds."""

    owner: int
    above: tuple[int, ...]
    """The user namespace, where there is one."""
    nodes: tuple[int, ...]
    ranks_per_node: int
    ahead_of_others: bool

    def __call__(self, rank: int) -> None:
        node = rank // self.ranks_per_node
        held = (*self.above, self.nodes[node])
        files = [os.open(f"/proc/{self.owner}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC) for file in held]
        namespaces.enter(files, node, len(self.nodes))
        for file in files:
            os.close(file)
        namespaces.end_with_parent(signal.SIGKILL)
        if self.ahead_of_others:
            go_ahead()
        os.environ["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
        torch.set_num_threads(1)
        namespaces.keep_memory()


def frame_bytes(links: Sequence[Link]) -> int:
    """The largest frame of a cluster: what the slowest link carries in half a millisecond, within bounds."""
    slowest = min(link.bytes_per_second for link in links)
    return int(min(namespaces.MAX_MTU, max(_MIN_MTU, slowest * FRAME_SECONDS)))


def _carry(control: socket.socket, parents: socket.socket, links: tuple[Link, ...]) -> None:
    """The process of the switch: make the nodes, hand them to the parent, carry frames until the parent goes."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    gc.freeze()
    gc.disable()
    try:
        user, nodes = _make_nodes(links)
    except OSError as error:
        control.sendall(str(error).encode())
        return
    namespaces.keep_exact_time()
    switch = Switch(links, [node.device for node in nodes], control, real_time=put_switch_first())
    socket.send_fds(control, [_OK], [*user, *(node.namespace for node in nodes)])
    with contextlib.suppress(ConnectionError):  # the parent is gone: so is the need for a network
        switch.run()


def _make_nodes(links: Sequence[Link]) -> tuple[list[int], list[namespaces.Node]]:
    """Root makes nodes as it is; others first become root of a user namespace, which the ranks must enter too."""
    rates, mtu = [link.bytes_per_second for link in links], frame_bytes(links)
    try:
        return [], namespaces.make_nodes(rates, mtu)
    except PermissionError:
        namespaces.become_root_of_a_user_namespace()
        user = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        return [user], namespaces.make_nodes(rates, mtu)


def _each(num_nodes: int, given: float | Sequence[float]) -> tuple[float, ...]:
    values = (float(given),) * num_nodes if isinstance(given, int | float) else tuple(given)
    if len(values) != num_nodes:
        raise UsageError(
            f"{len(values)} rates or delays were given for {num_nodes} nodes. Every node has one link. Give one number "
            f"for all, or {num_nodes}."
        )
    return values


def _check_counts(num_nodes: int, ranks_per_node: int) -> None:
    if num_nodes < 1 or ranks_per_node < 1 or num_nodes > MAX_NODES or num_nodes * ranks_per_node > MAX_RANKS:
        raise UsageError(
            f"A cluster of {num_nodes} nodes × {ranks_per_node} ranks was asked for. One host plays 1 to {MAX_NODES} "
            f"nodes and up to {MAX_RANKS} ranks. Ask for fewer."
        )


def _checked(link: Link) -> Link:
    if not (1e4 <= link.bytes_per_second <= 1e10 and 0 <= link.delay_seconds <= 1):
        raise UsageError(
            f"A link of {link.bytes_per_second:g} bytes/s and {link.delay_seconds:g} s was asked for. Links have 1e4 "
            f"to 1e10 bytes/s and a delay of 0 to 1 s. Check the units."
        )
    return link
