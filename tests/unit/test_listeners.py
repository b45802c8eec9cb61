"""Which addresses ranks of several hosts cannot reach each other at, and what is said then."""

from __future__ import annotations

import socket

import pytest

from shardwise.core.mesh import listeners
from shardwise.core.mesh.listeners import Listener, check_listeners, own_listener


def listener(rank: int, host: str, address: str | None, network: str | None = None) -> Listener:
    return Listener(rank, host, network or host, address, ["eth0", "docker0"])


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", "::1", "::ffff:127.0.1.1"])
def test_an_address_that_means_another_host_there_is_an_error_that_names_the_variable(address: str) -> None:
    found = [listener(0, "one", "10.0.0.1"), listener(1, "two", address)]
    with pytest.raises(ValueError) as error:
        check_listeners(found)
    for part in ("rank 1 on two", address, "set GLOO_SOCKET_IFNAME (", "NCCL_SOCKET_IFNAME", "one has eth0, docker0;"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "found",
    [
        [listener(0, "one", "10.0.0.1"), listener(1, "two", "10.0.0.2")],
        [listener(0, "one", None), listener(1, "two", None)],
        [listener(0, "one", "::ffff:10.0.0.1"), listener(1, "two", "fe80::1")],
        [listener(0, "one", "127.0.1.1"), listener(1, "one", "127.0.1.1")],
        # Two names and one network, as containers with the network of their host have.
        [listener(0, "one", "127.0.0.1", "net"), listener(1, "two", "127.0.0.1", "net")],
    ],
)
def test_addresses_that_can_be_reached_are_no_error(found: list[Listener]) -> None:
    assert check_listeners(found) is None  # type: ignore[func-returns-value]


def test_a_rank_tells_what_its_name_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners.socket, "gethostname", lambda: "localhost")
    own = own_listener(3, None)
    assert (own.rank, own.host) == (3, "localhost") and own.address in ("127.0.0.1", "::1")
    assert own.network == own_listener(4, None).network and "lo" not in own.interfaces
    monkeypatch.setattr(listeners.socket, "gethostname", lambda: "no-such-host.invalid")

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(listeners.socket, "getaddrinfo", unknown)
    assert own_listener(0, None).address == "127.0.0.1"


def test_an_interface_that_is_named_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert own_listener(0, "eth0").address is None and own_listener(0, "lo, eth0").interfaces == ["eth0"]
    message = r"GLOO_SOCKET_IFNAME='eth7', but .* has no network interface 'eth7': it has lo, eth0; set it"
    with pytest.raises(ValueError, match=message):
        own_listener(0, "eth7")


def test_an_alias_of_an_interface_is_named_by_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo finds ``eth0:1`` among addresses; the list of interfaces has only ``eth0``."""
    asked = []

    def ioctl(_: object, request: int, name: bytes) -> None:
        asked.append((request, name.rstrip(b"\0")))
        if not name.startswith(b"eth0:1\0"):
            raise OSError(19, "No such device")

    monkeypatch.setattr(listeners.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(listeners.fcntl, "ioctl", ioctl)
    assert own_listener(0, "eth0:1").address is None and asked == [(0x8915, b"eth0:1")]
    for name in ("eth0:2", "eth0:a-label-that-is-too-long"):
        with pytest.raises(ValueError, match=f"no network interface '{name}'"):
            own_listener(0, name)
    assert len(asked) == 2


def test_interfaces_that_cannot_be_listed_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(listeners.socket, "if_nameindex", forbidden)
    own = own_listener(0, "eth7")
    assert own.address is None and own.interfaces == []
    with pytest.raises(ValueError, match="one has none that can be listed; two has eth0"):
        check_listeners([Listener(0, "one", "one", "127.0.0.1", []), listener(1, "two", "10.0.0.2")])


def test_a_part_of_64_characters_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def known(host: bytes, *_: object, **__: object) -> list[object]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(listeners.socket, "gethostname", lambda: "h" * 64)
    assert own_listener(0, None).address == "127.0.0.1"  # unknown: what gloo takes then
    monkeypatch.setattr(listeners.socket, "getaddrinfo", known)
    assert own_listener(0, None).address == "127.0.0.1" and asked == [b"h" * 64]
