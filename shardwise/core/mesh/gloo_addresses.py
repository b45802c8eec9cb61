"""A check that ranks of several hosts can reach each other at the addresses that gloo advertises.

Small messages use gloo, also on GPUs. Each rank listens at one address and advertises it: that of the network interface
in ``GLOO_SOCKET_IFNAME``, otherwise the address of its host name. On many systems that is 127.0.1.1 (Debian's
/etc/hosts); on others, the name has no address, and gloo uses 127.0.0.1. Every host reaches itself at these addresses.
Ranks that connect to one wait for more than a minute, and the error names no cause, so the addresses are compared
first.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

INTERFACE = "GLOO_SOCKET_IFNAME"
NO_ADDRESS = "127.0.0.1"  # gloo's choice if the host's name resolves to none of its addresses
SIOCGIFADDR = 0x8915  # Linux: the address of an interface, or of one of its aliases


@dataclass(frozen=True)
class Listener:
    """The address at which one rank listens.

    Attributes:
        rank: the rank.
        host: the name of its host.
        network: identifies its host and network namespace.
        address: the address that gloo will advertise; ``None``: that of an interface that the user named.
        interfaces: the names of its network interfaces, without the loopback.
    """

    rank: int
    host: str
    network: str
    address: str | None
    interfaces: Sequence[str]


def own_listener(rank: int, interface: str | None) -> Listener:
    """Return the address at which this rank listens; ``interface`` is the value of ``GLOO_SOCKET_IFNAME``.

    Raises:
        ValueError: this host has no such interface.
    """
    try:
        there = [name for _, name in socket.if_nameindex()]
    except OSError:  # sandboxes may forbid the list; then no name can be rejected as unknown
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
    """Check that all ranks can reach each other, judging by their addresses. Every rank gets the same result.

    Raises:
        ValueError: a rank would advertise a loopback address to other hosts.
    """
    if len({listener.network for listener in listeners}) < 2:
        return
    have = {each.host: ", ".join(each.interfaces) or "none that can be listed" for each in listeners}
    for each in listeners:
        if each.address is not None and _is_loopback(each.address):
            raise ValueError(
                f"rank {each.rank} on {each.host} would advertise {each.address} to other hosts, which is a loopback "
                f"address: {each.host!r} has that address in its /etc/hosts, or none. On every rank set "
                f"{INTERFACE} (on GPUs NCCL_SOCKET_IFNAME, too) to the network interface by which the hosts reach each "
                f"other ({'; '.join(f'{host} has {names}' for host, names in have.items())})"
            )


def _is_alias(name: str) -> bool:
    """Return whether ``name`` is an alias of an interface (``eth0:1``), which gloo accepts and the list leaves out."""
    if ":" not in name or len(name.encode()) > 15:
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
    except OSError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    # ::ffff:127.0.1.1 is 127.0.1.1; ipaddress handles it from Python 3.13 on.
    return ((parsed.version == 6 and parsed.ipv4_mapped) or parsed).is_loopback


def _address() -> str:
    """Return what gloo uses if no interface is named: the first address of the host name that is the host's own."""
    try:
        # As bytes: Python refuses names that are formally invalid (a part of 64 characters), which the system may know.
        addresses = socket.getaddrinfo(os.fsencode(socket.gethostname()), None, type=socket.SOCK_STREAM)
    except OSError:
        return NO_ADDRESS
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
        except OSError:
            continue
        return str(address[0]).partition("%")[0]  # link-local ones have a scope
    return NO_ADDRESS


def _network() -> str:
    """Return the identity of this process's network: equal for processes with the same 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
