"""``shardwise port``: programs written for other libraries, with our imports, and what becomes of each name."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.errors import BadInput
from shardwise.printable import in_a_line, printable

if TYPE_CHECKING:
    from shardwise.port import Finding

__all__ = ["add_parser", "main"]

EXAMPLES = """
  shardwise port train.py                what becomes of each name and argument
  shardwise port --diff src/             and what would be changed, in every program below a folder
  shardwise port --write train.py        change it
  shardwise port --table colossalai      all names of a library, as a page in Markdown

Exit status: 0 where every name works, 1 where one is missing, 2 for files that cannot be read.
"""

NOTEBOOK = "notebooks are not changed; save it as a program (jupyter nbconvert --to script), and port that"


def add_parser(commands: Any) -> None:
    """Add ``port`` to the command's subparsers."""
    parser = commands.add_parser(
        "port",
        help="make a program for ColossalAI, DeepSpeed or Lightning one for shardwise",
        description="Say of every foreign name and argument in programs what becomes of it, and rewrite their imports.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", type=Path, nargs="*", metavar="FILE", help="programs, or folders of them")
    add("--write", action="store_true", help="change the files")
    add("--diff", action="store_true", help="show what is changed")
    add("--missing", action="store_true", help="show only what does not work as it stands")
    add("--table", nargs="+", metavar="LIBRARY", help="print the names of libraries instead")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Print, and write if asked to; 0, 1 where something is missing, 2 for bad input."""
    from shardwise.port import Program, findings, rewritten, worlds

    if options.table is not None:
        return _table(options)
    if not options.files:
        raise BadInput("no FILE: name programs or folders of them")
    # All are read before any is written.
    unread: list[str] = []
    programs = {path: Program(text, worlds()) for path, text in _texts(options.files, unread)}
    changes = {path: new for path, program in programs.items() if (new := rewritten(program)) != program.text}
    if options.write:
        for path in changes:
            _check_writable(path)
        for path, text in changes.items():  # all of them, also where nobody reads what is printed to its end
            _write(path, text)
    total: Counter[str] = Counter()
    for path, program in programs.items():
        found = findings(program)
        total.update(each.verdict.value for each in found)
        _print(path, found, options.missing)
        if path in changes and options.diff:
            sys.stdout.writelines(_difference(path, program.text, changes[path]))
    counts = ": " + ", ".join(f"{number} {verdict}" for verdict, number in total.most_common()) if total else ""
    done = "changed" if options.write else "to change (--write does)"
    print(f"{total.total()} names and arguments{counts}; {len(changes)} of {len(programs)} files {done}")
    for problem in unread:
        print(f"shardwise port: not read: {printable(problem)}", file=sys.stderr)
    return 2 if unread else 1 if total["missing"] else 0


def _table(options: argparse.Namespace) -> int:
    from shardwise.port import markdown, worlds

    known = {world.foreign: world for world in worlds()}
    for name in options.table:
        if name not in known:
            raise BadInput(f"--table {name}: give one of {', '.join(known)}")
    print(markdown([known[name] for name in options.table]), end="")
    return 0


def _texts(paths: Iterable[Path], unread: list[str]) -> Iterator[tuple[Path, str]]:
    """Programs with their texts. What cannot be read is an error where it was named, and is told of in a folder."""
    seen: set[Path] = set()
    for given in paths:
        for path in _programs(given, unread):
            if (real := path.resolve()) in seen:
                continue
            seen.add(real)
            try:
                text = _text(path)
            except BadInput as problem:
                if path == given:
                    raise
                unread.append(str(problem))
            else:
                yield path, text


def _text(path: Path) -> str:
    import ast
    import tokenize
    import warnings

    try:
        with path.open("rb") as raw:
            encoding, _ = tokenize.detect_encoding(raw.readline)
        with path.open(encoding=encoding, newline="") as file:  # line ends stay as they are
            text = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is odd in a program, which is its author's
            ast.parse(text)
    except OSError as problem:
        raise BadInput(f"{path}: {problem.strerror}") from None
    except (SyntaxError, ValueError, UnicodeError, RecursionError) as problem:
        line = f" line {problem.lineno}:" if isinstance(problem, SyntaxError) and problem.lineno else ""
        raise BadInput(f"{path}:{line} is not Python ({in_a_line(str(problem))})") from None
    return text


def _programs(given: Path, unread: list[str]) -> list[Path]:
    if given.is_dir():
        below = [path for path in sorted(given.rglob("*")) if _is_own(path, given)]
        unread.extend(f"{path}: {NOTEBOOK}" for path in below if path.suffix == ".ipynb")
        found = [path for path in below if path.suffix == ".py" and not path.is_dir()]
        if not found and not unread:
            raise BadInput(f"{given}: no program (*.py) below it")
        return found
    if not given.exists():
        raise BadInput(f"{given}: no such file")
    if given.suffix == ".ipynb":
        raise BadInput(f"{given}: {NOTEBOOK}")
    if given.suffix not in (".py", ""):
        raise BadInput(f"{given}: give Python programs (*.py)")
    return [given]


def _is_own(path: Path, folder: Path) -> bool:
    """Whether a file below a folder belongs to it: neither hidden, nor in a virtual environment with its libraries."""
    parts = path.relative_to(folder).parts
    above = (folder.joinpath(*parts[:number]) for number in range(1, len(parts)))
    return not any(part.startswith(".") for part in parts) and not any((each / "pyvenv.cfg").exists() for each in above)


def _print(path: Path, found: list[Finding], only_missing: bool) -> None:
    shown = [each for each in found if not only_missing or each.text]
    if not shown:
        return
    print(in_a_line(str(path)))
    width = min(max(len(each.name) for each in shown), 72)
    for each in shown:
        lines = ",".join(str(line) for line in each.lines[:3]) + ("..." if len(each.lines) > 3 else "")
        text = f": {each.text}" if each.text else ""
        print(f"  {lines:>9}  {each.name:<{width}}  {each.verdict.value}{text}")


def _difference(path: Path, old: str, new: str) -> Iterator[str]:
    name = in_a_line(str(path))
    return difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), name, name, n=1)


def _check_writable(path: Path) -> None:
    """Before any file is written.

    Raises:
        BadInput: the file, or where it is, may not be changed.
    """
    real = path.resolve()
    if not real.stat().st_mode & 0o222 or not os.access(real, os.W_OK):
        raise BadInput(f"{path}: is read-only; nothing was changed")
    if not os.access(real.parent, os.W_OK):
        raise BadInput(f"{path}: no file can be made in {real.parent}; nothing was changed")


def _write(path: Path, text: str) -> None:
    """In one piece: whoever reads the file sees the old text or the new one. A link stays one."""
    import tokenize

    real = path.resolve()
    with real.open("rb") as file:
        encoding, _ = tokenize.detect_encoding(file.readline)
    try:
        handle, name = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.")
        try:
            with os.fdopen(handle, "w", encoding=encoding, newline="") as file:
                file.write(text)
            os.chmod(name, real.stat().st_mode)
            os.replace(name, real)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as problem:
        raise BadInput(f"{path}: {problem.strerror}; it is as it was") from None
