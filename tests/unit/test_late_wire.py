"""Two hosts of ``shardwise.testing`` with a wire that is late and slow, and with files of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.testing.hosts import ADDRESSES, TwoHosts

SERVER = f"""
import socket
server = socket.create_server(("{ADDRESSES[0]}", 5000))
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(5):
    peer.sendall(peer.recv(1))
left = 4_000_000
while left:
    left -= len(peer.recv(1 << 20))
peer.sendall(b"x")
"""
CLIENT = f"""
import json, socket, time
while True:
    try:
        peer = socket.create_connection(("{ADDRESSES[0]}", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(5):
    began = time.perf_counter()
    peer.sendall(b"a")
    peer.recv(1)
    trips.append(time.perf_counter() - began)
began = time.perf_counter()
peer.sendall(bytes(4_000_000))
peer.recv(1)
print(json.dumps([min(trips), time.perf_counter() - began]))
"""


def needs(late: bool) -> pytest.MarkDecorator:
    return pytest.mark.skipif(TwoHosts.why_not(late) is not None, reason=str(TwoHosts.why_not(late)))


def timed(hosts: TwoHosts) -> list[float]:
    """Seconds of the shortest round trip, and of 4 MB and a byte back."""
    server = hosts.start(0, [sys.executable, "-c", SERVER])
    client = hosts.start(1, [sys.executable, "-c", CLIENT], stdout=subprocess.PIPE)
    seconds: list[float] = json.loads(client.communicate(timeout=60)[0])
    assert server.wait(30) == 0
    return seconds


@needs(late=True)
def test_packets_take_their_time_both_ways_and_bytes_theirs() -> None:
    """A wire may be later than it is asked to be, on a busy machine, and never earlier."""
    with TwoHosts(delay_s=0.05, bits_per_s=64e6) as hosts:
        trip, carried = timed(hosts)
        hosts.change(0.2, None)
        later, sooner = timed(hosts)
        with pytest.raises(ValueError, match="delay_s=-1"):
            hosts.change(-1.0, None)
    assert 0.1 <= trip < 1.0
    assert 0.1 + 4e6 * 8 / 64e6 <= carried < 10.0
    assert 0.4 <= later < 4.0 and sooner >= 0.4, "another wire under the same hosts"


@needs(late=False)
def test_a_wire_without_a_delay_has_none() -> None:
    with TwoHosts() as hosts:
        trip, _ = timed(hosts)
        with pytest.raises(ValueError, match="a wire without a delay or a rate"):
            hosts.change(0.1, None)
    assert trip < 0.1


@needs(late=False)
def test_a_folder_that_is_apart_has_other_files_on_each_host(tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    with TwoHosts(apart=tmp_path) as hosts:
        for host, name in enumerate(hosts.names):
            assert hosts.start(host, ["touch", str(tmp_path / name)]).wait(10) == 0
        listed = [hosts.start(host, ["ls", str(tmp_path)], stdout=subprocess.PIPE).communicate()[0] for host in (0, 1)]
    assert [each.split() for each in listed] == [[name] for name in TwoHosts.names]
    assert [each.name for each in tmp_path.iterdir()] == ["outside"]


def test_what_is_no_wire_is_refused(tmp_path: Path) -> None:
    for given in ({"delay_s": -1.0}, {"delay_s": float("nan")}, {"bits_per_s": 0.0}, {"apart": tmp_path / "none"}):
        ((name, value),) = given.items()
        with pytest.raises(ValueError, match=rf"{name}='?{value}"):
            TwoHosts(**given)  # type: ignore[arg-type]
