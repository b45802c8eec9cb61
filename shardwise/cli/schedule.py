"""Draw the schedule of a pipeline and compute its bubble. The picture is one step, with idle time and the number of
stored activations of each rank.

examples:
  shardwise schedule --pp 4 --microbatches 8 --style interleaved --svg p.svg
  shardwise schedule --pp 4 --microbatches 8 --style zbv --times 1 1.2 0.8
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.cli.errors import BadInput, check_writable, option, writing
from shardwise.cli.parser import texts
from shardwise.core.base.validate import integer

STYLES = ("1f1b", "interleaved", "zbv")
MOST = 4096
"""Largest product of ranks, stages per rank and micro-batches."""
MOST_TIMES = 1000.0
"""Largest ratio of times: the shortest time is one column of the text."""


def add_parser(commands: Any) -> None:
    """Add ``schedule`` to the command's subparsers."""
    parser = commands.add_parser("schedule", **texts(__doc__))
    add = parser.add_argument
    add("--pp", type=int, required=True, metavar="N", help="number of pipeline ranks")
    add("--microbatches", type=int, required=True, metavar="N", help="number of micro-batches in a step")
    add("--style", choices=STYLES, default="1f1b", help="schedule; zbv is zero bubble")
    add("--chunks", type=int, metavar="N", help="number of stages of each rank (default: 1 for 1f1b, otherwise 2)")
    times = "relative times of forward, gradient of the input, gradient of the weights (default: 1 1 1)"
    add("--times", type=float, nargs=3, default=(1, 1, 1), metavar=("F", "B", "W"), help=times)
    width = shutil.get_terminal_size((160, 24)).columns
    add("--width", type=int, default=width, metavar="COLUMNS", help="width of the text (default: that of the terminal)")
    add("--svg", type=Path, metavar="FILE", help="also write the picture as SVG")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Print and write; return 0, or 2 for bad input."""
    chunks = options.chunks if options.chunks is not None else (1 if options.style == "1f1b" else 2)
    numbers = {"--pp": options.pp, "--microbatches": options.microbatches, "--chunks": chunks, "--width": options.width}
    for name, value in numbers.items():
        option(name, integer, value, 1)
    if options.pp * chunks * options.microbatches > MOST:
        raise BadInput(
            f"--pp {options.pp} --chunks {chunks} --microbatches {options.microbatches}: a picture shows at most "
            f"{MOST} passes; give smaller numbers"
        )
    times = _times(options.times)
    path = options.svg
    if path is not None:
        check_writable(path)

    from shardwise.core.parallel.pipeline.picture import draw_schedule, schedule_text
    from shardwise.core.parallel.pipeline.schedule import make_schedule

    try:
        schedule = make_schedule(options.style, options.pp, chunks, options.microbatches)
    except ValueError as problem:
        raise BadInput(f"--chunks {chunks}: {str(problem).replace('schedule=', '--style ')}") from None
    if path is not None:
        with writing(path):
            path.write_text(draw_schedule(schedule, times))
    print(schedule_text(schedule, times, options.width))
    if path is not None:
        print(f"picture: {path}")
    return 0


def _times(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Return times in multiples of the shortest, so that sums of them are short numbers."""
    shown, shortest = " ".join(map(str, numbers)), min(numbers)
    if not all(math.isfinite(time) and time > 0 for time in numbers):
        raise BadInput(f"--times {shown}: give three numbers above 0")
    if max(numbers) / shortest > MOST_TIMES:
        raise BadInput(f"--times {shown}: give numbers of which none is more than {MOST_TIMES:g} times another")
    forward, backward, weight = (time / shortest for time in numbers)
    return forward, backward, weight
