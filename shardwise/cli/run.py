"""``shardwise run --nproc N script.py ...``: a thin front on torch's elastic launcher, on one host or several."""

from __future__ import annotations

import argparse
import queue
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shardwise.cli.errors import BadInput, option
from shardwise.cli.launch import launch
from shardwise.core.base.checked import MOST_RANKS, whole

__all__ = ["add_parser", "check_hosts", "launcher_arguments", "main", "program"]

EXAMPLES = """
one host:     shardwise run --nproc 4 train.py --lr 0.1
two hosts:    shardwise run --nproc 8 --nnodes 2 --node-rank 0 --rdzv-endpoint host0:29500 train.py    (on host0)
              shardwise run --nproc 8 --nnodes 2 --node-rank 1 --rdzv-endpoint host0:29500 train.py    (on host1)
"""
RESOLVE_S = 10.0
"""How long a name may be unknown: where hosts start together, name service may lag behind."""


def add_parser(commands: Any) -> None:
    """Add ``run`` to the command's subparsers."""
    parser = commands.add_parser(
        "run",
        help="start a script on every rank",
        description="Start a script once a rank, with torch's elastic launcher. The exit status is the script's.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an option of the script must not be taken for a short form of ours
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks on this host (default 1)")
    parser.add_argument("--nnodes", default="1", metavar="N[:M]", help="hosts, or the fewest and most of them")
    parser.add_argument("--node-rank", type=int, metavar="R", help="number of this host, from 0")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where the hosts meet: the same on each")
    parser.add_argument("--rdzv-id", metavar="NAME", help="name of the run, where several meet at one place")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="start all ranks anew so often")
    parser.add_argument(
        "--as",
        dest="world",
        metavar="LIBRARY",
        help="shardwise in place of LIBRARY (deepspeed, ...) in the script and all that it imports",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name (python -m)")
    parser.add_argument("script", help="a Python file")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # there may be none, and the complaint that no script was given should not name them
    parser.set_defaults(main=main)


def launcher_arguments(options: argparse.Namespace) -> list[str]:
    """The options as torchrun's arguments, without the script.

    Raises:
        BadInput: a number out of range, hosts without a meeting place, or no such script.
    """
    option("--nproc", whole, options.nproc, 1, MOST_RANKS, "the number of ranks on this host,")
    option("--max-restarts", whole, options.max_restarts, 0)
    hosts = _most_hosts(options.nnodes)
    if options.node_rank is not None:
        option("--node-rank", whole, options.node_rank, 0)
        if options.node_rank >= hosts:
            raise BadInput(f"--node-rank {options.node_rank}: --nnodes {options.nnodes} has hosts 0 to {hosts - 1}")
    if not options.module and not Path(options.script).is_file():
        raise BadInput(f"{options.script}: no such file; give a Python script (or -m and a module name)")
    arguments = [f"--nproc-per-node={options.nproc}", f"--max-restarts={options.max_restarts}"]
    if options.nnodes == "1" and not options.rdzv_endpoint:
        # By address: the name of this host, which torch would tell the ranks, need not be known anywhere.
        arguments += ["--standalone", "--local-addr=127.0.0.1"]
    elif not options.rdzv_endpoint:
        raise BadInput(f"--nnodes {options.nnodes}: give --rdzv-endpoint HOST:PORT, the same on every host")
    else:
        arguments += [f"--nnodes={options.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={options.rdzv_endpoint}"]
        arguments.append(f"--rdzv-id={options.rdzv_id or 'shardwise'}")
        if options.node_rank is not None:
            arguments.append(f"--node-rank={options.node_rank}")
            # The first host opens the meeting place; torch would otherwise guess it from host names.
            arguments.append(f"--rdzv-conf=is_host={int(options.node_rank == 0)}")
    if options.world:
        from shardwise.compat.impersonation import WHOLE

        if options.world not in WHOLE:
            raise BadInput(f"--as {options.world}: give one of {', '.join(WHOLE)}")
    if options.module or options.world:
        arguments.append("--module")
    return arguments


def _most_hosts(text: str) -> int:
    """Of ``N`` or ``N:M``.

    Raises:
        BadInput: something else, or more than the most.
    """
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise BadInput(f"--nnodes {text}: give a number of hosts >= 1, or the fewest and the most of them, such as 2:4")
    return most


def program(options: argparse.Namespace) -> list[str]:
    """What every rank runs: its name, then its arguments."""
    own = [options.script, *options.arguments]
    if not options.world:
        return own
    from shardwise.cli.as_world import MODULE

    return [MODULE, options.world, *(["-m"] if options.module else []), *own]


def check_hosts(options: argparse.Namespace) -> None:
    """The meeting place can be found, and the first host under its own name; torch would wait for them for minutes.

    Raises:
        BadInput: no number of a port, or a name that is not known within :data:`RESOLVE_S`.
    """
    endpoint = options.rdzv_endpoint
    if not endpoint:
        return
    host, colon, port = endpoint.rpartition(":")
    if not colon or "]" in port:
        host, port = endpoint, "29400"  # torch's
    if not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise BadInput(f"--rdzv-endpoint {endpoint}: {port!r} is no port; give HOST:PORT, the same on every host")
    _resolve(host.strip("[]"), f"--rdzv-endpoint {endpoint}", "give a name or address that every host knows")
    if options.node_rank in (None, 0):
        own = socket.getfqdn()
        _resolve(own, f"the name of this host, {own}", "add it to /etc/hosts or the name service: the ranks meet there")


def _resolve(host: str, what: str, advice: str) -> None:
    until, told = time.monotonic() + RESOLVE_S, False
    while True:
        problem = _look_up(host)
        if not problem:
            return
        if time.monotonic() >= until:
            raise BadInput(f"{what}: host name {host!r} cannot be resolved ({problem}); {advice}")
        if not told:
            print(f"shardwise run: {what}: {problem}; waiting {RESOLVE_S:g} s for it", file=sys.stderr, flush=True)
            told = True
        time.sleep(min(1.0, max(until - time.monotonic(), 0.0)))


def _look_up(host: str) -> str:
    """What is wrong with a host's name. In a thread: the look-up may take long, and signals should not wait for it."""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
            answers.put("")
        except (OSError, UnicodeError) as error:
            answers.put(str(error) or type(error).__name__)

    threading.Thread(target=ask, daemon=True).start()
    return answers.get()


def main(options: argparse.Namespace) -> int:
    """Start the script on every rank of this host, and return its exit status (2: bad input)."""
    arguments = launcher_arguments(options)
    check_hosts(options)
    return launch(arguments, program(options), options.nproc)
