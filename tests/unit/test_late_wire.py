"""Two hosts of ``tests.support`` with a wire that is late and slow, and with files of their own."""

from __future__ import annotations

import contextlib
import math
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from program_setup import SECONDS

from tests.support import wire
from tests.support.hosts import ADDRESSES, TwoHosts

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
import socket, time
while True:
    try:
        peer = socket.create_connection(("{ADDRESSES[0]}", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = 0
for _ in range(5):
    peer.sendall(b"a")
    trips += len(peer.recv(1))
peer.sendall(bytes(4_000_000))
print(trips, peer.recv(1).decode())
"""


def needs(late: bool) -> pytest.MarkDecorator:
    return pytest.mark.skipif(TwoHosts.why_not(late) is not None, reason=str(TwoHosts.why_not(late)))


def carried(hosts: TwoHosts) -> str:
    """What came back of five round trips, and of 4 MB and a byte back."""
    server = hosts.start(0, [sys.executable, "-S", "-c", SERVER])
    client = hosts.start(1, [sys.executable, "-S", "-c", CLIENT], stdout=subprocess.PIPE)
    found: str = client.communicate(timeout=SECONDS)[0]
    assert server.wait(SECONDS) == 0
    return found.strip()


class Line:
    """A direction of a wire whose ends are pairs of sockets, each of which keeps packets apart."""

    def __init__(self, delay_s: float, bits_per_s: float) -> None:
        self.ends = [*socket.socketpair(type=socket.SOCK_DGRAM), *socket.socketpair(type=socket.SOCK_DGRAM)]
        for end in self.ends:
            end.setblocking(False)
        self.way = wire.Direction(self.ends[1].fileno(), self.ends[2].fileno(), delay_s, bits_per_s)

    def send(self, now: float, *sizes: int) -> None:
        """Packets of that many bytes, and the header of each."""
        for size in sizes:
            self.ends[0].send(bytes(wire.HEADER_BYTES + size))
        self.way.take(now)

    def arrived(self, now: float) -> tuple[list[int], float]:
        """Sizes of what is there by then, and seconds until there is more."""
        more, found = self.way.deliver(now), list[int]()
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(len(self.ends[3].recv(wire.PACKET_BYTES)) - wire.HEADER_BYTES)
        return found, more

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture
def lines() -> Iterator[Callable[[float, float], Line]]:
    """Makes them, and closes them at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda delay_s, bits_per_s: stack.enter_context(contextlib.closing(Line(delay_s, bits_per_s)))


def test_packets_and_bytes_take_their_time(lines: Callable[[float, float], Line]) -> None:
    """By a clock of the test's: not before what they take, and then at once."""
    late = lines(0.25, 0.0)
    late.send(10.0, 1, 60_000, 2)
    assert late.arrived(10.125) == ([], 0.125)
    late.send(10.125, 3)
    assert late.arrived(10.25) == ([1, 60_000, 2], 0.125), "a delay is of each packet, and bytes take none of it"
    assert late.arrived(10.5) == ([3], math.inf)

    slow = lines(0.5, 8.0 * 1024)
    slow.send(20.0, 1024, 512)
    assert slow.arrived(21.0) == ([], 0.5), "the last bit has left"
    assert slow.arrived(21.5) == ([1024], 0.5), "one packet leaves behind the other"
    slow.send(21.75, 256)
    assert slow.arrived(22.0) == ([512], 0.5)
    slow.way.change(0.0, 0.0)
    slow.send(22.125, 7)
    assert slow.arrived(22.125) == ([], 0.375), "what was under way keeps its time and its place"
    assert slow.arrived(22.5) == ([256, 7], math.inf)


def test_no_direction_takes_all_that_there_is_at_once(lines: Callable[[float, float], Line]) -> None:
    line = lines(0.0, 0.0)
    for _ in range(2):
        line.ends[0].send(bytes(wire.HEADER_BYTES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "AT_ONCE", 1)
        for _ in range(2):
            line.way.take(1.0)
            assert line.arrived(1.0) == ([0], math.inf)


@needs(late=True)
def test_a_late_wire_carries_everything_both_ways() -> None:
    with TwoHosts(delay_s=0.01, bits_per_s=64e6) as hosts:
        assert list(hosts._holders[2].args)[-2:] == ["0.01", "64000000.0"]
        assert carried(hosts) == "5 x"
        hosts.change(0.02, None)
        assert carried(hosts) == "5 x", "another wire under the same hosts"
        with pytest.raises(ValueError, match="delay_s=-1"):
            hosts.change(-1.0, None)


@needs(late=False)
def test_a_wire_without_a_delay_is_the_kernels() -> None:
    with TwoHosts() as hosts:
        assert len(hosts._holders) == 2, "no process of ours between them"
        assert carried(hosts) == "5 x"
        with pytest.raises(ValueError, match="a wire without a delay or a rate"):
            hosts.change(0.1, None)


def test_what_is_no_wire_is_refused() -> None:
    for given in ({"delay_s": -1.0}, {"delay_s": float("nan")}, {"bits_per_s": 0.0}):
        ((name, value),) = given.items()
        with pytest.raises(ValueError, match=rf"{name}={value}"):
            TwoHosts(**given)  # type: ignore[arg-type]
