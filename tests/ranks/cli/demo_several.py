"""Several runs of the demo, one after another, on ranks of one pool: each costs what it trains.

Between runs ``flip FOLDER`` changes a byte in the newest checkpoint of a run, and ``halve FOLDER`` removes part of its
files.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
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


def _run(command: list[str], full: bool) -> str:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    config = demo.check(parser.parse_args(command))
    Path(config.out).mkdir(parents=True, exist_ok=True)
    shown = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(shown))
        stack.enter_context(patch("shardwise.cli.demo_train.shutdown"))  # the group is the pool's
        if full:
            stack.enter_context(_full_disk())
        try:
            assert train(config, StopRequest()) == 0
        except BadInput as problem:
            print(f"refused: {problem}")
    dist.barrier()  # no rank damages what another still reads or writes
    return shown.getvalue()


def trained(commands: list[list[str]], full: bool = False) -> list[str]:
    """Run them in order on this rank; what each printed here, and ``refused: ...`` of one that was refused.

    ``full``: rank 0 finds the disk full when it saves.
    """
    first, shown = dist.get_rank() == 0, []
    for command in commands:
        if command[0] == "demo":
            shown.append(_run(command, full and first))
            continue
        if first:
            _damage(*command)
        dist.barrier()
        shown.append("")
    return shown
