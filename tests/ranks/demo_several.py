"""Several runs of the demo in one launch, since starting ranks takes longer than what they train here.

Run as ``shardwise run --nproc N demo_several.py OPTIONS OPTIONS ...``, each a run's options in one argument. The runs
print what the demo prints, each after a line ``== OPTIONS``, and ``refused: ...`` on every rank that refuses. Between
runs ``flip FOLDER`` changes a byte in the newest checkpoint of a run, ``halve FOLDER`` removes part of its files, and
``full OPTIONS`` is a run whose rank 0 finds the disk full when it saves.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from shardwise.checkpoint.directory import scan
from shardwise.cli import demo
from shardwise.cli.demo_train import train
from shardwise.cli.errors import BadInput
from shardwise.cli.stop import StopRequest
from shardwise.mesh import shutdown


def _damage(how: str, folder: str) -> None:
    newest = Path(scan(folder)[0].path)
    if how == "halve":
        (newest / "manifest.json").unlink()
        (newest / "pieces-1.safetensors").unlink()
        return
    with (newest / "pieces-0.safetensors").open("r+b") as file:
        middle = file.seek(0, os.SEEK_END) // 2
        file.seek(middle)
        changed = file.read(1)[0] ^ 1
        file.seek(middle)
        file.write(bytes([changed]))


def _full_disk() -> AbstractContextManager[Any]:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return patch("shardwise.checkpoint.file_system.FileSystem.allocate", side_effect=full)


def _run(options: str, first: bool) -> None:
    full, options = options.startswith("full "), options.removeprefix("full ")
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    config = demo.check(parser.parse_args(["demo", *shlex.split(options)]))
    Path(config.out).mkdir(parents=True, exist_ok=True)
    if first:
        print(f"== {options}", flush=True)
    # The ranks of a launch meet once: torch cannot make a second process group through the same store.
    with patch("shardwise.cli.demo_train.shutdown"), _full_disk() if full and first else contextlib.nullcontext():
        try:
            status = train(config, StopRequest())
        except BadInput as problem:
            status = 0
            print(f"refused: {problem}\n", end="", flush=True)  # in one write: all ranks share one pipe
    dist.barrier()  # what a rank prints belongs to its run: no one begins the next before
    if status:
        sys.exit(status)


def main() -> None:
    """Run them in order; stop at the first that fails."""
    first = os.environ["RANK"] == "0"
    for argument in sys.argv[1:]:
        how, _, folder = argument.partition(" ")
        if how not in ("flip", "halve"):
            _run(argument, first)
        elif first:
            _damage(how, folder)
    shutdown()


if __name__ == "__main__":
    main()
