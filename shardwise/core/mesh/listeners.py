"""Whether ranks of several hosts reach each other at the addresses that gloo gives out, and what to set where not.

Small messages go over gloo, on GPUs as well. Each rank listens at one address and tells it to the others: that of the
network interface that ``GLOO_SOCKET_IFNAME`` names, otherwise what its host's name stands for. On many systems that is
127.0.1.1 (Debian's /etc/hosts), on others nothing, and then gloo takes 127.0.0.1: addresses at which another host finds
itself. Ranks that connect to one wait for a minute and more, and the error names no cause. So they are compared before.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["INTERFACE", "Listener", "check_listeners", "own_listener"]

INTERFACE = "GLOO_SOCKET_IFNAME"
NO_ADDRESS = "127.0.0.1"  # what gloo takes where the host's name stands for none of its addresses
SIOCGIFADDR = 0x8915  # Linux: the address of an interface, or of one of its aliases


@dataclass(frozen=True)
class Listener:
    """Where one rank listens.

    Attributes:
        rank: its number.
        host: its host's name.
        network: what tells the network that it sees from that of any other host, or of another namespace.
        address: the one that gloo will give out; ``None``: that of an interface that was named.
        interfaces: the names of those that lead elsewhere.
    """

    rank: int
    host: str
    network: str
    address: str | None
    interfaces: Sequence[str]


def own_listener(rank: int, interface: str | None) -> Listener:
    """What this rank tells the others; ``interface`` is the value of ``GLOO_SOCKET_IFNAME``.

    Raises:
        ValueError: this host has no such interface.
    """
    try:
        there = [name for _, name in socket.if_nameindex()]
    except OSError:  # not everywhere may a process list them (sandboxes); then none can be called unknown
        there = []
    named = [name.strip() for name in (interface or "").split(",") if name.strip()]
    unknown = [name for name in named if there and name not in there and not _is_alias(name)]
    if unknown:
        raise ValueError(
            f"{INTERFACE}={interface!r}, but {socket.gethostname()} has no network interface "
            f"{', '.join(map(repr, unknown))}: it has {', '.join(there)}; set it to one by which the hosts reach each "
            "other"
        )
    address = None if named else _address()
    return Listener(rank, socket.gethostname(), _network(), address, [name for name in there if name != "lo"])


def check_listeners(listeners: Sequence[Listener]) -> None:
    """All ranks can reach each other, as far as their addresses tell; the same on each, so that all raise.

    Raises:
        ValueError: a rank would give out an address that means another host there.
    """
    if len({listener.network for listener in listeners}) < 2:
        return
    have = {each.host: ", ".join(each.interfaces) or "none that can be listed" for each in listeners}
    for each in listeners:
        if each.address is not None and _is_loopback(each.address):
            raise ValueError(
                f"rank {each.rank} on {each.host} would tell ranks of other hosts to find it at {each.address}, where "
                f"each host finds itself: {each.host!r} stands for that in its /etc/hosts, or for nothing. On every "
                f"rank set {INTERFACE} (on GPUs NCCL_SOCKET_IFNAME, too) to the network interface by which the hosts "
                f"reach each other ({'; '.join(f'{host} has {names}' for host, names in have.items())})"
            )


def _is_alias(name: str) -> bool:
    """Whether ``name`` is a further address of an interface under a label of its own (``eth0:1``), which gloo finds by
    that label and which the list of interfaces leaves out."""
    if ":" not in name or len(name.encode()) > 15:
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
    except OSError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    # ::ffff:127.0.1.1 is 127.0.1.1; ipaddress says so from Python 3.13 on.
    return ((found.version == 6 and found.ipv4_mapped) or found).is_loopback


def _address() -> str:
    """What gloo takes where no interface is named: the first address of the host's name that is the host's own."""
    try:
        # As bytes: Python would refuse names that are no host names by the letter (a part of 64 characters), which the
        # system may know all the same.
        found = socket.getaddrinfo(os.fsencode(socket.gethostname()), None, type=socket.SOCK_STREAM)
    except OSError:
        return NO_ADDRESS
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
        except OSError:
            continue
        return str(address[0]).partition("%")[0]  # link-local ones have a scope
    return NO_ADDRESS


def _network() -> str:
    """Processes that see the same one have the same 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
