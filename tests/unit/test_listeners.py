"""Which addresses ranks of several hosts cannot reach each other at, and what is said then."""

from __future__ import annotations

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


def test_an_interface_that_is_named_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert own_listener(0, "eth0").address is None and own_listener(0, "lo, eth0").interfaces == ["eth0"]
    message = r"GLOO_SOCKET_IFNAME='eth7', but .* has no network interface 'eth7': it has lo, eth0; set it"
    with pytest.raises(ValueError, match=message):
        own_listener(0, "eth7")
