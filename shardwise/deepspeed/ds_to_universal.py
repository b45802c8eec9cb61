"""``ds_to_universal``: a checkpoint of DeepSpeed's ``save_checkpoint``, or of ours, as a universal one.

Nothing has to be converted to be loaded here, at any stage and number of ranks. What is written is for DeepSpeed
itself, and for tools that read its layout: every parameter whole, with its optimizer state, in files of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardwise.checked import as_path
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.formats.deepspeed_universal_output import write_universal
from shardwise.checkpoint.formats.detect import open_checkpoint
from shardwise.checkpoint.formats.output import one_at_a_time
from shardwise.remarks import warn_user

__all__ = ["enable_universal_checkpoint", "main", "parse_arguments"]

_NO_EFFECT = "taken, and of no effect: one process reads, and what is missing is what no reader needs"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """DeepSpeed's options; by default those of the command line."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=__doc__.partition("\n")[0])
    parser.add_argument("--input_folder", required=True, help="one checkpoint: the directory with its tag")
    parser.add_argument("--output_folder", required=True, help="the directory to write")
    for name, default in (("num_extract_workers", 4), ("num_merge_workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help=_NO_EFFECT)
    parser.add_argument("--keep_temp_folder", action="store_true", help=_NO_EFFECT)
    parser.add_argument("--no_strict", dest="strict", action="store_false", help=_NO_EFFECT)
    parser.add_argument("--inject_missing_state", action="store_true", help=_NO_EFFECT)
    return parser.parse_args(arguments)


def main(args: Any = None) -> None:
    """Convert ``args.input_folder`` into ``args.output_folder``, and name that in ``latest_universal`` beside it.

    Several ranks may do it at once: each waits for those before it, and writes the same.

    Args:
        args: what :func:`parse_arguments` returns, or anything with these two attributes. Without it the command line
            is read.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged or of no known format, or has no optimizer's state.
        OSError: the directory cannot be written; what stood there is still there.
    """
    given = parse_arguments() if args is None else args
    source_folder = as_path("input_folder", given.input_folder, "a directory with a checkpoint")
    target = as_path("output_folder", given.output_folder, "a directory to write")
    with open_checkpoint(source_folder) as source, one_at_a_time(Path(target)):
        notes = [*getattr(source, "notes", ()), *write_universal(source, target)]
    if notes:
        warn_user(f"{target} was written, but not all of {source_folder} is in it:\n" + "\n".join(notes))


def enable_universal_checkpoint(param_list: Iterable[Any]) -> None:
    """Nothing: engines load whatever checkpoint there is, into parameters as they are."""


def _program() -> None:
    given = parse_arguments()
    try:
        main(given)
    except (CheckpointError, OSError, ValueError) as error:
        raise SystemExit(f"ds_to_universal: {error}") from error


if __name__ == "__main__":
    _program()
