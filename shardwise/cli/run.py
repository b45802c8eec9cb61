"""``shardwise run --nproc N script.py ...``: a thin front on torch's elastic launcher, on one host or several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardwise.cli.errors import BadInput
from shardwise.cli.launch import launch

__all__ = ["add_parser", "launcher_arguments", "main"]

EXAMPLES = """
one host:     shardwise run --nproc 4 train.py --lr 0.1
two hosts:    shardwise run --nproc 8 --nnodes 2 --node-rank 0 --rdzv-endpoint host0:29500 train.py    (on host0)
              shardwise run --nproc 8 --nnodes 2 --node-rank 1 --rdzv-endpoint host0:29500 train.py    (on host1)
"""


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
    if options.nproc < 1:
        raise BadInput(f"--nproc {options.nproc}: give the number of ranks on this host, at least 1")
    if options.max_restarts < 0:
        raise BadInput(f"--max-restarts {options.max_restarts}: give 0 or more")
    if not options.module and not Path(options.script).is_file():
        raise BadInput(f"{options.script}: no such file; give a Python script (or -m and a module name)")
    arguments = [f"--nproc-per-node={options.nproc}", f"--max-restarts={options.max_restarts}"]
    if options.nnodes == "1" and not options.rdzv_endpoint:
        arguments.append("--standalone")
    elif not options.rdzv_endpoint:
        raise BadInput(f"--nnodes {options.nnodes}: give --rdzv-endpoint HOST:PORT, the same on every host")
    else:
        arguments += [f"--nnodes={options.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={options.rdzv_endpoint}"]
        arguments.append(f"--rdzv-id={options.rdzv_id or 'shardwise'}")
        if options.node_rank is not None:
            arguments.append(f"--node-rank={options.node_rank}")
            # The first host opens the meeting place; torch would otherwise guess it from host names.
            arguments.append(f"--rdzv-conf=is_host={int(options.node_rank == 0)}")
    if options.module:
        arguments.append("--module")
    return arguments


def main(options: argparse.Namespace) -> int:
    """Start the script on every rank of this host, and return its exit status (2: bad input)."""
    return launch(launcher_arguments(options), [options.script, *options.arguments], options.nproc)
