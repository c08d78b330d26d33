"""Network namespaces that play nodes: made without names, so that they end with the processes that hold them.

A node has the address `address_of(node)` on the interface `INTERFACE`. That is a TUN device: what the node sends to
other nodes can be read from its file, and what is written to the file arrives at the node. Nothing in the host's own
network changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "link"
MAX_MTU = 65_000
_SUBNET = "10.77.0"

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x20000, 0x4000000, 0x10000000, 0x40000000  # linux/sched.h
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # linux/if_tun.h: IFF_TUN | IFF_NO_PI
_SET_FLAGS, _SET_ADDRESS, _SET_NETMASK = 0x8914, 0x8916, 0x891C  # linux/sockios.h
_SET_MTU, _SET_QUEUE_LENGTH = 0x8922, 0x8943
_IS_UP = 0x1 | 0x40  # linux/if.h: IFF_UP | IFF_RUNNING
_PARENT_DEATH_SIGNAL, _TIMER_SLACK = 1, 29  # linux/prctl.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 2**30
_QUEUE_LENGTH = 4_000
"""Frames a device may hold for its reader: more than TCP ever has on its way here, so that none is dropped."""
_SOCKET_BYTES = 8 * 2**20
_BURST_SECONDS = 2e-3

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Node:
    """One namespace and its link, as open files."""

    namespace: int
    device: int


def address_of(node: int) -> str:
    """The address of a node.

    >>> address_of(0)
    '10.77.0.1'
    """
    return f"{_SUBNET}.{node + 1}"


def make_nodes(rates: Sequence[float], mtu: int) -> list[Node]:
    """Move this process into new namespaces, one for each rate in bytes per second; it ends up in the last."""
    return [_make_node(address_of(node), mtu, rate) for node, rate in enumerate(rates)]


def become_root_of_a_user_namespace() -> None:
    """Without root: a user namespace in which this user is root, for the namespaces made in it."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="utf-8")


def enter(namespaces: list[int], node: int, num_nodes: int) -> None:
    """Move this process, which has one thread, into namespaces, in order, where it is on a host of its own name."""
    for namespace in namespaces:
        _call("setns", namespace, 0)
    _call("unshare", _CLONE_NEWUTS | _CLONE_NEWNS)
    socket.sethostname(f"node{node}")
    with contextlib.suppress(OSError):  # without names torch warns that it has none to show, and works
        _name_nodes(num_nodes)


def end_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when the parent is gone."""
    _call("prctl", _PARENT_DEATH_SIGNAL, signal_number, 0, 0, 0)


def keep_memory() -> None:
    """Keep what is freed for the next one who asks, as a GPU's allocator does; else every step pays for new pages."""
    for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        with contextlib.suppress(AttributeError):  # C libraries without it
            _libc.mallopt(parameter, _KEPT_BYTES)


def keep_exact_time() -> None:
    """Wake this process when it asked to, not up to 50 µs later as is the kernel's habit."""
    _call("prctl", _TIMER_SLACK, 1, 0, 0, 0)


def processes_in(namespaces: set[int]) -> list[int]:
    """The processes that are in one of some network namespaces, given by inode; those of other users are not seen."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended, or is somebody else's
                if (process / "ns" / "net").stat().st_ino in namespaces:
                    found.append(int(process.name))
    return found


def _make_node(address: str, mtu: int, bytes_per_second: float) -> Node:
    _call("unshare", _CLONE_NEWNET)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, _request(INTERFACE, struct.pack("H", _TUN_WITHOUT_HEADER)))
    with _control_socket() as control:
        fcntl.ioctl(control, _SET_QUEUE_LENGTH, _request(INTERFACE, struct.pack("i", _QUEUE_LENGTH)))
        fcntl.ioctl(control, _SET_MTU, _request(INTERFACE, struct.pack("i", mtu)))
        fcntl.ioctl(control, _SET_ADDRESS, _request(INTERFACE, _address(address)))
        fcntl.ioctl(control, _SET_NETMASK, _request(INTERFACE, _address("255.255.255.0")))
        for interface in ("lo", INTERFACE):
            fcntl.ioctl(control, _SET_FLAGS, _request(interface, struct.pack("H", _IS_UP)))
    _keep_sending()
    _hold_back(bytes_per_second, mtu)
    return Node(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC), device)


def _name_nodes(num_nodes: int) -> None:
    """Let this process alone see another /etc/hosts: a file that has no name any more and ends with the process."""
    _mount(None, "/", _MS_REC | _MS_PRIVATE)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as hosts:
        hosts.write("127.0.0.1 localhost\n")
        for node in range(num_nodes):
            hosts.write(f"{address_of(node)} node{node}\n::ffff:{address_of(node)} node{node}\n")
        hosts.flush()
        _mount(hosts.name, "/etc/hosts", _MS_BIND)


def _mount(source: str | None, target: str, flags: int) -> None:
    _call("mount", None if source is None else source.encode(), target.encode(), None, flags, None)


def _keep_sending() -> None:
    """Leave the rate to the link alone.

    On a link that drops nothing Reno just sends; others, as BBR, look for a rate and slow down by what they find. With
    large buffers a receiver that a busy host keeps waiting does not stop its sender.
    """
    settings = Path("/proc/sys/net/ipv4")
    (settings / "tcp_congestion_control").write_text("reno", encoding="utf-8")  # the one every namespace may choose
    for name in ("tcp_rmem", "tcp_wmem"):
        (settings / name).write_text(f"4096 {_SOCKET_BYTES} {_SOCKET_BYTES}", encoding="utf-8")


def _hold_back(bytes_per_second: float, mtu: int) -> None:
    """Let waiting frames wait where the sender sees them.

    TCP keeps little in a queue of its own card, so that acknowledgements are not stuck behind what it sends itself. It
    would believe that a TUN device has sent what it has taken, and fill the queue in front of the reader: both
    directions at once would then get three quarters of their rate. A burst bounds how far it may be ahead.
    """
    burst = int(bytes_per_second * _BURST_SECONDS) + 2 * mtu
    tc = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "tc"
    queue = ["tbf", "rate", f"{8 * bytes_per_second:.0f}bit", "burst", str(burst), "limit", str(8 * _SOCKET_BYTES)]
    done = subprocess.run([tc, "qdisc", "add", "dev", INTERFACE, "root", *queue], capture_output=True, encoding="utf-8")
    if done.returncode:
        raise OSError(f"{' '.join(done.args)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _control_socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        yield control


def _request(interface: str, content: bytes) -> bytes:
    """A struct ifreq: a name and up to 24 bytes."""
    return struct.pack("16s24s", interface.encode(), content)


def _address(address: str) -> bytes:
    return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(address))


def _call(name: str, *args: int | bytes | None) -> None:
    if getattr(_libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
