"""Two simulated machines on one: programs in separate network namespaces, connected by a simulated link (Linux)."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.support import wire

NAMESPACES = ("--net", "--mount", "--uts", "--ipc")
NAMES, ADDRESSES, WIRE = ("host-a", "host-b"), ("10.213.7.1", "10.213.7.2"), "wire"
# It ends with its standard input, so also when this process is killed.
HOLDS = (
    'mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && hostname "$2" && '
    "ip link set lo up && echo ready && exec cat"
)


class TwoHosts:
    """A context with two hosts, each with its own name, network, ``/dev/shm`` and semaphores, and the same files.

    It needs namespaces and a pair of virtual devices of the kernel, so the program has to run as root; for a delay or a
    rate ``/dev/net/tun`` as well. Such a link is a process of this machine: a few Gbit/s keep a core busy.

    Args:
        delay_s: seconds that a packet takes from one host to the other, in addition to the time of its bytes.
        bits_per_s: the rate of the link in each direction; ``None``: as fast as the kernel can.

    Raises:
        ValueError: the delay or the rate is invalid.
        OSError: this machine lacks something; the text says what.

    Attributes:
        names: the host names, known on both hosts.
    """

    names = NAMES

    @staticmethod
    @functools.cache
    def why_not(late: bool = False) -> str | None:
        """Return why they are not available here, with a link that is ``late``; ``None`` if they are."""
        missing = [tool for tool in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(tool) is None]
        if missing:
            return f"no {', '.join(missing)} here"
        try:
            with TwoHosts(delay_s=1e-3 if late else 0.0):
                return None
        except OSError as error:
            return str(error)

    def __init__(self, delay_s: float = 0.0, bits_per_s: float | None = None) -> None:
        _check(delay_s, bits_per_s)
        self._delay_s, self._bits_per_s = delay_s, bits_per_s or 0.0
        self._holders: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="hosts-")

    def __enter__(self) -> Self:
        try:
            hosts = Path(self._folder.name, "hosts")
            lines = ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in zip(ADDRESSES, NAMES, strict=True))]
            hosts.write_text("\n".join(lines) + "\n", encoding="utf-8")
            for name in NAMES:
                inside = ["unshare", *NAMESPACES, "sh", "-c", HOLDS, "sh", str(hosts), name]
                self._holders.append(_ready(inside, "no namespaces"))
            one, other = (str(holder.pid) for holder in self._holders)
            if self._delay_s or self._bits_per_s:
                relay = [sys.executable, wire.__file__, one, other, WIRE, str(self._delay_s), str(self._bits_per_s)]
                self._holders.append(_ready(relay, "no late wire"))
            else:
                pair = ["type", "veth", "peer", WIRE, "netns", other]
                _done(["nsenter", "-t", one, "-n", "ip", "link", "add", WIRE, *pair])
            for pid, address in zip((one, other), ADDRESSES, strict=True):
                inside = ["nsenter", "-t", pid, "-n", "ip"]
                _done([*inside, "addr", "add", f"{address}/24", "dev", WIRE])
                # The queue is as long as a sender's window, so that a burst is delayed and not dropped.
                _done([*inside, "link", "set", WIRE, "txqueuelen", "10000", "up"])
        except BaseException:
            self.close()
            raise
        return self

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **popen: object
    ) -> subprocess.Popen[str]:
        """Start a command on one of the two hosts.

        Args:
            host: 0 or 1.
            command: the arguments.
            env: the full environment; ``None``: this process's.
            popen: for :class:`subprocess.Popen`.
        """
        inside = ["nsenter", "-t", str(self._holders[host].pid), "-n", "-m", "-u", "-i", f"--wd={Path.cwd()}", "--"]
        return subprocess.Popen([*inside, *command], text=True, env=env, **popen)  # type: ignore[call-overload, no-any-return]

    def cut(self) -> None:
        """Cut the link: packets are lost, and connections are not closed."""
        for holder in self._holders[:2]:
            _done(["nsenter", "-t", str(holder.pid), "-n", "ip", "link", "set", WIRE, "down"])

    def change(self, delay_s: float, bits_per_s: float | None) -> None:
        """Change the delay and the rate of the link while programs run.

        Raises:
            ValueError: the delay or the rate is invalid, or the hosts were connected without either.
            OSError: the link is gone.
        """
        _check(delay_s, bits_per_s)
        if len(self._holders) < 3:
            raise ValueError(f"change({delay_s}, {bits_per_s}) of a wire without a delay or a rate: give TwoHosts one")
        wire = self._holders[2]
        wire.stdin.write(f"{delay_s} {bits_per_s or 0.0}\n")
        wire.stdin.flush()
        if wire.stdout.readline().strip() != "ready":
            raise OSError("the wire between the hosts is gone")

    def close(self) -> None:
        """Remove the hosts, except for processes that still run on them."""
        for holder in self._holders:
            if holder.stdin is not None:
                holder.stdin.close()
            holder.wait(60)
            if holder.stdout is not None:
                holder.stdout.close()
        self._holders = []
        self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(delay_s: float, bits_per_s: float | None) -> None:
    if not 0.0 <= delay_s < 60.0:
        raise ValueError(f"delay_s={delay_s}: give seconds from 0 to 60")
    if bits_per_s is not None and not bits_per_s > 0.0:
        raise ValueError(f"bits_per_s={bits_per_s}: give a number above 0, or None")


def _ready(command: Sequence[str], otherwise: str) -> subprocess.Popen[str]:
    """Start a program that reports when it is ready, and that ends with its standard input."""
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    said = holder.stdout.readline().strip()
    if said != "ready":
        holder.stdin.close()
        last = [said, *holder.stdout.read().splitlines()][-1]
        holder.wait(60)
        holder.stdout.close()
        raise OSError(f"{otherwise} here: {' '.join(command[:5])} said {last!r:.200}")
    return holder


def _done(command: Sequence[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if ended.returncode:
        raise OSError(f"no wire here: {' '.join(command)} said {ended.stderr.strip()!r:.200}")


def check_program(program: Path, port: int) -> None:
    """Run a program by torchrun, with two ranks per host, which all print that they equal plain PyTorch."""
    tests = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]), "OMP_NUM_THREADS": "1"}
    with TwoHosts() as hosts:
        where = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={hosts.names[0]}", f"--master-port={port}"]
        command = [sys.executable, "-m", "torch.distributed.run", *where]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        runs = [hosts.start(host, [*command, f"--node-rank={host}", str(program)], env, **pipes) for host in (0, 1)]
        told = [run.communicate(timeout=300)[0] for run in runs]
    for host, (run, text) in enumerate(zip(runs, told, strict=True)):
        assert run.returncode == 0, text
        assert text.count(f"on host-{'ab'[host]}: equal to plain PyTorch") == 2
