"""``python -m tests.matrix``: run the short set of tests with each supported Python and torch; ``make matrix``.

For each cell it makes a fresh environment, installs the package and its test requirements from the cell's constraints,
runs the set, writes a row of the table in ``docs/versions.md`` and deletes the environment. Pythons that are not on the
machine are skipped. The exit status is 1 if a cell failed or none could be tried.
"""

import argparse
import fnmatch
import functools
import sys
from collections.abc import Mapping, Sequence

from tests.matrix import environment, table
from tests.matrix.cells import Cell, cells, dotted, interpreters


def chosen(patterns: Sequence[str]) -> list[Cell]:
    """Return the cells that match any of the patterns, or all cells if there are none.

    Raises:
        ValueError: a pattern matches no cell.
    """
    every = cells()
    for pattern in patterns:
        if not fnmatch.filter(map(str, every), pattern):
            raise ValueError(f"--only {pattern!r}: no such cell; there are {' '.join(map(str, every))}")
    return [cell for cell in every if not patterns or any(fnmatch.fnmatch(str(cell), p) for p in patterns)]


_say = functools.partial(print, flush=True)


def run(wanted: Sequence[Cell], found: Mapping[tuple[int, int], str], folder: str | None, cache: str) -> int:
    """Run the cells one after the other and return the exit status."""
    tried = failed = 0
    for cell in wanted:
        row, text = None, f"no Python {dotted(cell.python)} on the machine"
        if cell.python in found:
            row, text = environment.run(cell, found[cell.python], folder, cache, _say)
        if row is None:
            _say(f"{cell!s:10} not tried: {text}")
            continue
        tried += 1
        table.add(row)
        _say(f"{cell!s:10} {row}")
        if not row.good:
            failed += 1
            _say(text)
    _say(f"{tried} cells tried, {failed} failed, {len(wanted) - tried} not tried")
    return int(failed > 0 or tried == 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the cells; return 2 if the command line is invalid."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--list", action="store_true", help="the cells with their Pythons and rows; nothing is run")
    parser.add_argument("--only", action="append", default=[], metavar="CELL", help="as 3.12:2.13, or '3.12:*'")
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="an interpreter to use")
    parser.add_argument("--folder", help="where environments are made (default: the system's for temporary files)")
    parser.add_argument("--cache", default="", metavar="FOLDER", help="pip's cache (default: its own)")
    args = parser.parse_args(arguments)
    try:
        wanted = chosen(args.only)
        found = interpreters(args.python, dict.fromkeys(cell.python for cell in wanted))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        rows = table.read(table.PAGE.read_text("utf-8"))
        for cell in wanted:
            print(f"{cell!s:10} {found.get(cell.python, 'no such Python here'):40} {rows.get(cell, 'no row')}")
        return 0
    return run(wanted, found, args.folder, args.cache)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # the environment and its processes are gone
