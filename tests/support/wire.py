"""A simulated link with a delay and a rate between two network namespaces (Linux): ``python wire.py PID PID NAME DELAY
RATE``.

Each namespace gets a tun device; packets wait here, in user space, until they may arrive, so the kernel needs no netem.
Segments have the form in which the kernel would pass them to a network card (up to 64 KiB after a header that says how
to split them), so few packets carry much data.

The program prints ``ready`` and ends with its standard input. A line there, ``DELAY RATE``, changes the link, and it
prints ``ready`` again. It imports nothing of the library, to start quickly.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
CHECKSUMS_AND_SEGMENTS = 0x01 | 0x02 | 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
CLONE_NEWNET = 0x40000000
PR_SET_TIMERSLACK = 29
HEADER_BYTES = 10  # virtio_net_hdr
PACKET_BYTES = 1 << 17
AT_ONCE = 64


def opened(pid: int, name: str) -> int:
    """Return a new tun device called ``name`` in the network namespace of process ``pid``, as a file descriptor."""
    c = ctypes.CDLL(None, use_errno=True)
    where = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if c.setns(where, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into the network of process {pid}")
    finally:
        os.close(where)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(end, TUNSETOFFLOAD, CHECKSUMS_AND_SEGMENTS)
    return end


class Direction:
    """The packets in one direction, in order.

    Args:
        source: file descriptor that they come from.
        target: file descriptor that they go to.
        delay_s: seconds from the departure of the last bit to its arrival.
        bits_per_s: rate at which bits depart; 0: all at once.
    """

    def __init__(self, source: int, target: int, delay_s: float, bits_per_s: float) -> None:
        self.source, self._target = source, target
        self.change(delay_s, bits_per_s)
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._idle_at = 0.0

    def change(self, delay_s: float, bits_per_s: float) -> None:
        """Change delay and rate from the next packet on."""
        self._delay_s, self._s_per_byte = delay_s, 8 / bits_per_s if bits_per_s else 0.0

    def take(self, now: float) -> None:
        """Take some of the packets that have come since, so that the other direction has its turn, too."""
        for _ in range(AT_ONCE):
            try:
                packet = os.read(self.source, PACKET_BYTES)
            except BlockingIOError:
                return
            self._idle_at = max(self._idle_at, now) + (len(packet) - HEADER_BYTES) * self._s_per_byte
            self._under_way.append((self._idle_at + self._delay_s, packet))

    def deliver(self, now: float) -> float:
        """Deliver the packets that are due; return the seconds until the next one, infinite if there is none."""
        while self._under_way:
            due, packet = self._under_way[0]
            if due > now:
                return due - now
            self._under_way.popleft()
            with contextlib.suppress(OSError):  # the device is down: the packet is lost, as on a cut link
                os.write(self._target, packet)
        return float("inf")


def relay(ends: tuple[int, int], delay_s: float, bits_per_s: float) -> None:
    """Carry packets both ways until standard input ends."""
    ways = [Direction(*each, delay_s, bits_per_s) for each in (ends, ends[::-1])]
    while True:
        wait = min(way.deliver(time.perf_counter()) for way in ways)
        ready, _, _ = select.select([*ends, sys.stdin], [], [], None if wait == float("inf") else wait)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            for way in ways:
                way.change(*map(float, line.split()))
            print("ready", flush=True)
        for way in ways:
            if way.source in ready:
                way.take(time.perf_counter())


def main() -> None:
    """Run the program; see the docstring of the module."""
    one, other, name, delay_s, bits_per_s = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # waits are as short as requested
    ends = (opened(int(one), name), opened(int(other), name))
    print("ready", flush=True)
    relay(ends, float(delay_s), float(bits_per_s))


if __name__ == "__main__":
    main()
