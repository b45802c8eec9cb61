"""Report which names of another library work here; rewrite the imports with --write. Arguments are reported, too.

examples:
  shardwise port train.py             report each name and argument
  shardwise port --diff src/          also show the changes, for a folder
  shardwise port --write train.py     report, and change the file
  shardwise port --table colossalai   print all names of a library as Markdown

Exit status: 0 if every name works, 1 if a name is missing, 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.errors import BadInput, writing
from shardwise.cli.parser import texts
from shardwise.core.base.validate import did_you_mean, in_a_line, printable

if TYPE_CHECKING:
    from shardwise.compat.port import Finding


def add_parser(commands: Any) -> None:
    """Add ``port`` to the command's subparsers."""
    parser = commands.add_parser("port", **texts(__doc__))
    add = parser.add_argument
    add("files", type=Path, nargs="*", metavar="FILE", help="Python files, or folders")
    add("--write", action="store_true", help="change the files")
    add("--diff", action="store_true", help="show the changes as a diff")
    add("--missing", action="store_true", help="report only names that do not work unchanged")
    add("--table", nargs="+", metavar="LIBRARY", help="print all names of these libraries instead of reading files")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Print, and write if requested; return 0, 1 if a name is missing, 2 for bad input."""
    from shardwise.compat import alias_table, alias_tables
    from shardwise.compat.port import findings, markdown, rewritten
    from shardwise.compat.table import HOMES

    if options.table is not None:
        for name in options.table:
            if name not in HOMES:
                hint = did_you_mean(name, HOMES, f"give one of {', '.join(HOMES)}")
                raise BadInput(f"--table {name}: no such library; {hint}")
        print(markdown([alias_table(name) for name in options.table]), end="")
        return 0
    if not options.files:
        raise BadInput("no FILE: name programs or folders of them")
    tables = alias_tables()
    unread: list[str] = []
    programs: dict[Path, tuple[str, str, list[Finding]]] = {}
    for path in _programs(options.files):  # read all programs before any is written
        try:
            text = path.read_bytes().decode(_encoding(path))  # without changes of line ends
            programs[path] = (text, rewritten(text, tables), findings(text, tables))
        except OSError as problem:
            unread.append(f"{path}: {problem.strerror}")
        except (SyntaxError, ValueError, RecursionError) as problem:
            unread.append(f"{path}: not Python ({in_a_line(str(problem).replace('<unknown>, ', ''))})")
    if not programs and not unread:
        raise BadInput(f"no Python file in {', '.join(map(str, options.files))}: name programs or folders of them")
    changed = {path for path, (old, new, _) in programs.items() if new != old}
    if options.write:
        for path in changed:  # write all of them, even if standard output was closed
            with writing(path):
                path.write_bytes(programs[path][1].encode(_encoding(path)))
    total: Counter[str] = Counter()
    for path, (old, new, names) in programs.items():
        total.update(each.verdict for each in names)
        _print(path, [each for each in names if each.text or not options.missing])
        if options.diff:
            before, after = (text.splitlines(keepends=True) for text in (old, new))
            sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path), n=1))
    counts = ": " + ", ".join(f"{number} {verdict}" for verdict, number in total.most_common()) if total else ""
    done = "changed" if options.write else "to change (--write does)" if changed else "to change"
    what, files = ("names and arguments", "name or argument")[total.total() == 1], "file" + "s" * (len(programs) != 1)
    if programs:
        print(f"{total.total()} {what}{counts}; {len(changed)} of {len(programs)} {files} {done}")
    for message in unread:
        print(f"shardwise port: error: {printable(message)}", file=sys.stderr)
    return 2 if unread else 1 if total["missing"] else 0


def _programs(paths: Iterable[Path]) -> Iterator[Path]:
    """Iterate over the given files, and those of folders except hidden ones and installed libraries."""
    for path in paths:
        below = ((each, each.relative_to(path).parts) for each in sorted(path.rglob("*.py")))
        programs = [p for p, parts in below if "site-packages" not in parts and not any(x[0] == "." for x in parts)]
        yield from programs if path.is_dir() else [path]


def _encoding(path: Path) -> str:
    with path.open("rb") as raw:
        return tokenize.detect_encoding(raw.readline)[0]


def _print(path: Path, names: list[Finding]) -> None:
    if not names:
        return
    print(in_a_line(str(path)))
    width = min(max(len(each.name) for each in names), 72)
    for each in names:
        lines = ",".join(str(line) for line in each.lines[:3]) + ("..." if len(each.lines) > 3 else "")
        text = f": {each.text}" if each.text else ""
        print(f"  {lines:>9}  {each.name:<{width}}  {each.verdict}{text}")
