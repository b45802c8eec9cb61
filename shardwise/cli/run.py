"""Start a script on several ranks, with torch's elastic launcher. It exits with the status of the script.

one host:
  shardwise run --nproc 4 train.py --lr 0.1
  shardwise run --nproc 4 --as deepspeed train.py --deepspeed_config ds.json

two hosts (the same command on each):
  shardwise run --nproc 8 --nnodes 2 --rdzv-endpoint host0:29500 train.py
"""

# torchrun runs inside this process. It starts every rank in its own session, so Ctrl-C reaches only the launcher, which
# passes the signal on, waits up to 30 seconds for the ranks to end, and then kills them. If the launcher itself is
# killed, the system kills the ranks (shardwise.cli.end_with_parent).

from __future__ import annotations

import argparse
import importlib
import logging
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.cli.end_with_parent import command_that_follows
from shardwise.cli.errors import BadInput, option
from shardwise.cli.parser import texts
from shardwise.compat.import_hooks import REPLACEABLE
from shardwise.core.base.validate import MOST_RANKS, integer

MOMENT_S = 1.0
MOST_PER_CORE = 16
"""Ranks per core without a note."""
_ENDING = (signal.SIGINT, signal.SIGTERM)


def status_of(exit_code: int) -> int:
    """Return a process's exit code as a shell reports it: ``-9`` (killed by signal 9) is 137."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def threads_per_rank(ranks: int) -> int:
    """Return the number of usable cores divided by ``ranks``, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, ranks))


def launch(arguments: Sequence[str], script: Sequence[str], ranks: int) -> int:
    """Run torchrun with ``arguments`` (its own) on ``script`` (its name, then its arguments).

    Return the exit status: that of the first rank that failed, 128 plus the number of a signal that ended the run,
    or 0.

    Each rank gets an equal part of the cores as OpenMP threads, unless the user has set OMP_NUM_THREADS.
    """
    # A signal during the import of torch must not be lost or print a traceback.
    earlier = {number: signal.signal(number, _stop) for number in _ENDING}
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    try:
        with _heard_at_once():
            return _run(arguments, script)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)


@contextmanager
def _heard_at_once() -> Iterator[None]:
    """Let a signal end this process even if torch waits for other hosts and runs no Python code for minutes.

    The system writes each signal's number into a pipe. If :func:`_stop` is still its handler a moment later, no rank
    was started, and no cleanup is needed.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            for number in os.read(read, 1):
                if number in _ENDING and not over.wait(MOMENT_S) and signal.getsignal(number) is _stop:
                    os._exit(128 + number)

    earlier = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="shardwise-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        over.set()
        os.write(write, b"\0")
        thread.join()
        os.close(read)
        os.close(write)


def _run(arguments: Sequence[str], script: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun: Any = importlib.import_module("torch.distributed.run")  # untyped
    # The elastic launcher's log of a failure has less information than the exit status and the ranks' own output.
    for name in ("torch.distributed.run", "torch.distributed.elastic", "torch.distributed.launcher.api"):
        for known in [n for n in logging.root.manager.loggerDict if n == name or n.startswith(name + ".")]:
            logging.getLogger(known).setLevel(logging.CRITICAL)
    try:
        options = torchrun.parse_args([*arguments, script[0]])
        command = [sys.executable, "-u", *(["-m"] if options.module else []), *script]
        # Not parsed together: torchrun would treat `--nproc 9` of the script as an ambiguous option of its own.
        options.training_script, *options.training_script_args = command_that_follows(command)
        options.no_python, options.module = True, False
        torchrun.run(options)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        status = status_of(failure.exitcode)
        if status not in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM):
            why = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {status}"
            print(f"shardwise: rank {rank} ended with {why}; its output, if any, is above", file=sys.stderr)
        return status
    return 0


RESOLVE_S = 10.0
"""Seconds until an unknown host name is an error; name service may be late if hosts start together."""

NPROC = """ranks on this host: a number, gpu (one for each GPU), cpu (one for each core) or auto (gpu if there is one,
otherwise cpu); default: one for each GPU, or 1 without GPUs"""
NODE_RANK = """index of this host, from 0; host 0 opens the rendezvous. If it is left out, the host that has the name or
address of --rdzv-endpoint opens it. Torch decides which ranks a host gets"""

FOREIGN = dict.fromkeys(("num-gpus", "num-processes"), "use --nproc")
FOREIGN |= dict.fromkeys(("standalone", "rdzv-backend"), "leave it out: it is the default")
FOREIGN |= dict.fromkeys(("master-addr", "master-port"), "for several hosts use --rdzv-endpoint HOST:PORT")
"""Options of other launchers, and what to do instead."""


def add_parser(commands: Any) -> None:
    """Add ``run`` to the command's subparsers."""
    parser = commands.add_parser("run", **texts(__doc__))
    add = parser.add_argument
    add("--nproc", "--nproc-per-node", metavar="N", help=NPROC)
    add("--max-restarts", type=int, default=0, metavar="N", help="restart all ranks up to N times after a failure")
    add("--as", dest="world", choices=REPLACEABLE, help="every import of this library imports shardwise instead")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    add("script", metavar="SCRIPT", help="a Python file; with -m a module")
    arguments = add("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="arguments of the script")
    arguments.required = False  # may be empty; the error about a missing script should not mention these arguments
    add = parser.add_argument_group("several hosts").add_argument
    add("--nnodes", default="1", metavar="N[:M]", help="number of hosts, or its minimum and maximum")
    add("--node-rank", type=int, metavar="R", help=NODE_RANK)
    add("--rdzv-endpoint", metavar="HOST:PORT", help="address and port of the first host, the same on every host")
    add("--rdzv-id", metavar="NAME", help="name of the run, if several use one endpoint")
    parser.set_defaults(main=main, foreign=FOREIGN, known={*parser._option_string_actions} - {"-m", "-h", "--help"})


def launcher_arguments(options: argparse.Namespace) -> list[str]:
    """Return the options as torchrun's arguments, without the script.

    Raises:
        BadInput: a number out of range, several hosts without a rendezvous endpoint, or no such script.
    """
    option("--max-restarts", integer, options.max_restarts, 0)
    hosts = _most_hosts(options.nnodes)
    if options.node_rank is not None:
        option("--node-rank", integer, options.node_rank, 0)
        if options.node_rank >= hosts:
            known = f"--nnodes {options.nnodes} has hosts 0 to {hosts - 1}"
            raise BadInput(f"--node-rank {options.node_rank}: {known}; give one of them, or another --nnodes")
    if not options.module and not (Path(options.script).is_file() and os.access(options.script, os.R_OK)):
        wrong = "cannot be read" if Path(options.script).is_file() else "no such file"
        wrong = "is a folder" if Path(options.script).is_dir() else wrong
        raise BadInput(f"{options.script}: {wrong}; give a Python script (or -m and a module name)")
    arguments = [f"--nproc-per-node={ranks_of_host(options.nproc)}", f"--max-restarts={options.max_restarts}"]
    if options.nnodes == "1" and not options.rdzv_endpoint:
        # By address, because the name of this host, which torch would use, may not be resolvable.
        arguments += ["--standalone", "--local-addr=127.0.0.1"]
    elif not options.rdzv_endpoint:
        raise BadInput(f"--nnodes {options.nnodes}: give --rdzv-endpoint HOST:PORT, the same on every host")
    else:
        arguments += [f"--nnodes={options.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={options.rdzv_endpoint}"]
        arguments.append(f"--rdzv-id={options.rdzv_id or 'shardwise'}")
        if options.node_rank is not None:
            arguments.append(f"--node-rank={options.node_rank}")
            # The first host opens the rendezvous; torch would guess the host from names.
            arguments.append(f"--rdzv-conf=is_host={int(options.node_rank == 0)}")
    if options.module or options.world:
        arguments.append("--module")
    return arguments


def ranks_of_host(text: str | None) -> int:
    """Return the number of ranks that ``--nproc`` asks for.

    Args:
        text: a number, ``gpu``, ``cpu`` (one a core) or ``auto`` (one a GPU, or one a core without GPUs), as in
            torchrun; ``None``: one a GPU, or 1.

    Raises:
        BadInput: another text, a number out of range, or ``gpu`` without a GPU.
    """
    if text == "cpu":
        return threads_per_rank(1)
    if text not in (None, "gpu", "auto"):
        if not re.fullmatch(r"-?[0-9]{1,9}", text):
            raise BadInput(f"--nproc {text}: give a number of ranks, or gpu, cpu or auto")
        return int(option("--nproc", integer, int(text), 1, MOST_RANKS, "the number of ranks on this host,"))
    import torch

    gpus = torch.cuda.device_count()
    if text == "gpu" and not gpus:
        raise BadInput("--nproc gpu: torch finds no GPU here; give a number of ranks, or see `shardwise env`")
    return gpus or (threads_per_rank(1) if text == "auto" else 1)


def _most_hosts(text: str) -> int:
    """Return the largest number of hosts in ``N`` or ``N:M``.

    Raises:
        BadInput: the text has another form, or the number is too large.
    """
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise BadInput(f"--nnodes {text}: give a number of hosts >= 1, or the fewest and the most of them, such as 2:4")
    return most


def program(options: argparse.Namespace) -> list[str]:
    """Return the command of every rank: the program, then its arguments."""
    own = [options.script, *options.arguments]
    if not options.world:
        return own
    from shardwise.cli.run_as_library import MODULE

    return [MODULE, options.world, *(["-m"] if options.module else []), *own]


def check_hosts(options: argparse.Namespace) -> None:
    """Check that the rendezvous endpoint and the first host's name can be resolved; torch would wait for minutes.

    Raises:
        BadInput: an invalid port, or a name that is unknown for :data:`RESOLVE_S`.
    """
    endpoint = options.rdzv_endpoint
    if not endpoint:
        return
    host, colon, port = endpoint.rpartition(":")
    if not colon or "]" in port:
        host, port = endpoint, "29400"  # torch's default port
    if not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise BadInput(f"--rdzv-endpoint {endpoint}: {port!r} is no port; give HOST:PORT, the same on every host")
    _resolve(host.strip("[]"), f"--rdzv-endpoint {endpoint}", "give a name or address that every host knows")
    if options.node_rank in (None, 0):
        own = socket.getfqdn()
        _resolve(own, f"the name of this host, {own}", "add it to /etc/hosts or the name service: the ranks meet there")


def _resolve(host: str, what: str, advice: str) -> None:
    until, printed = time.monotonic() + RESOLVE_S, False
    while True:
        problem = _look_up(host)
        if not problem:
            return
        if time.monotonic() >= until:
            raise BadInput(f"{what}: host name {host!r} cannot be resolved ({problem}); {advice}")
        if not printed:
            print(f"shardwise run: {what}: {problem}; waiting {RESOLVE_S:g} s for it", file=sys.stderr, flush=True)
            printed = True
        time.sleep(min(1.0, max(until - time.monotonic(), 0.0)))


def _look_up(host: str) -> str:
    """Return the error of a host name's look-up. A slow look-up runs in a thread, so that signals do not wait."""
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
    for name in sorted(options.known & {each.partition("=")[0].replace("_", "-") for each in options.arguments}):
        print(f"shardwise run: warning: {name} after the script is passed to it; put it before", file=sys.stderr)
    ranks, cores = ranks_of_host(options.nproc), threads_per_rank(1)
    if ranks > MOST_PER_CORE * cores:
        print(f"shardwise run: note: {ranks} ranks share {cores} cores, which is slow", file=sys.stderr, flush=True)
    return launch(arguments, program(options), ranks)
