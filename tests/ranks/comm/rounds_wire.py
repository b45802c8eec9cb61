"""A wire between two network namespaces that carries packets in rounds, and counts these (Linux).

``python rounds_wire.py PID PID NAME DELAY RATE``, as ``tests.support.wire``, whose devices it takes; delay and rate
mean nothing. Packets cross at once until there is a line on standard input, and again from the next one on. In between
they are held until both hosts have nothing left to do; then all cross together, which is a round. So of messages that
wait for each other each takes a round, however slow the machine is.

Hosts have nothing left to do when this process, which does not sleep, has had :data:`QUIET_S` of the processor since
the last packet came: as much as any thread that has something to do has had by then.

``ROUNDS_FILE`` names a file of two 64-bit numbers: rounds so far, and how often nothing was held since the last packet.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import select
import struct
import sys
import time
from typing import Any

QUIET_S = 0.1
WORDS = struct.Struct("=qq")


def words_of(path: str) -> mmap.mmap:
    """The two numbers, as they change."""
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), WORDS.size)


class Way:
    """Packets from one end to the other."""

    def __init__(self, source: int, target: int, most_bytes: int) -> None:
        self.source, self._target, self._most_bytes = source, target, most_bytes
        self.held: list[bytes] = []

    def take(self) -> None:
        """What has come since."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.held.append(os.read(self.source, self._most_bytes))

    def deliver(self) -> None:
        """What is held."""
        for packet in self.held:
            with contextlib.suppress(OSError):  # the device is down
                os.write(self._target, packet)
        self.held = []


def relay(ways: list[Way], words: mmap.mmap) -> None:
    """Carry packets both ways until standard input ends."""
    counting, rounds, empty, last = False, 0, 0, 0.0
    while True:
        ready, _, _ = select.select([*(way.source for way in ways), sys.stdin], [], [], 0.0 if counting else None)
        if sys.stdin in ready:
            if not sys.stdin.readline():
                return
            counting = not counting
            print("ready", flush=True)
        for way in ways:
            if way.source in ready:
                way.take()
        if ready:
            last, empty = time.process_time(), 0
        elif time.process_time() - last >= QUIET_S:
            last, held = time.process_time(), any(way.held for way in ways)
            rounds, empty = rounds + held, 0 if held else empty + 1
        elif counting:
            continue
        WORDS.pack_into(words, 0, rounds, empty)
        if not counting or not ready:
            for way in ways:
                way.deliver()


def main() -> None:
    """See the module."""
    spec = importlib.util.spec_from_file_location("wire", os.environ["WIRE_FILE"])
    assert spec is not None and spec.loader is not None
    wire: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wire)
    one, other, name, _, _ = sys.argv[1:]
    ends = (wire.opened(int(one), name), wire.opened(int(other), name))
    print("ready", flush=True)
    relay([Way(*each, wire.PACKET_BYTES) for each in (ends, ends[::-1])], words_of(os.environ["ROUNDS_FILE"]))


if __name__ == "__main__":
    main()
