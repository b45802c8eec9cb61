"""``python -m tests.foreign.upstream.programs_colossalai CHECKOUT``: do ColossalAI's programs get past their imports?

Programs are the files of its examples and applications that import it and have a ``__main__``. They are copied with the
modules beside them, ported by ``shardwise port``, and what each imports is imported, in a process of its own. What is
wanting of packages that are not installed does not count. A program's own modules are run as they are.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch  # noqa: F401  so that processes that are forked have it

import shardwise  # noqa: F401
from shardwise.compat import alias_table
from shardwise.compat.port import rewritten

FOLDERS = ("examples", "applications")
SECONDS = 300


def main() -> int:
    """Print a line for each program, and how many get past their imports."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign.upstream.programs_colossalai", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of hpcaitech/ColossalAI")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="parts of their paths (default: all)")
    args = parser.parse_args()
    if not all((args.checkout / name).is_dir() for name in FOLDERS):
        parser.error(f"{args.checkout} has no {' and '.join(FOLDERS)}: give a checkout of the repository")
    with tempfile.TemporaryDirectory(prefix="programs-") as name:
        folder = Path(name)
        every = ported(args.checkout, folder)
        chosen = [each for each in every if not args.programs or any(part in str(each) for part in args.programs)]
        stops = [each for each in chosen if not _said(folder, each)]
    print(f"{len(chosen) - len(stops)} of {len(chosen)} get past their imports")
    return 0


def ported(checkout: Path, folder: Path) -> list[Path]:
    """Copy and port everything; paths of the programs, below ``folder``."""
    programs, among = [], [alias_table("colossalai")]
    for name in (*FOLDERS, "tests"):  # some take functions from its tests
        shutil.copytree(checkout / name, folder / name, ignore_dangling_symlinks=True)
        for path in (folder / name).rglob("*.py"):
            text = path.read_text("utf-8")
            if not re.search(r"^\s*(from|import) colossalai\b", text, re.MULTILINE):
                continue
            path.write_text(rewritten(text, among), "utf-8")
            if name in FOLDERS and "__main__" in text and "tests" not in path.relative_to(folder).parts:
                programs.append(path.relative_to(folder))
    return sorted(programs)


def _said(folder: Path, program: Path) -> bool:
    """Import what the program imports, in a process of its own, and print what came of it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.write(writing, _tried(folder, program).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read() or f"no end after {SECONDS} s"
    os.waitpid(child, 0)
    print(f"{program}: {found}", flush=True)
    return found.startswith("past")


def _tried(folder: Path, program: Path) -> str:
    path, rel, absent = folder / program, program.parts, set[str]()
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # theirs is meant
    sys.path[:0] = [str(path.parent), str(folder)]
    if rel[0] == "applications":  # their own packages
        sys.path.append(str(folder / rel[0] / rel[1]))
    os.chdir(path.parent)
    sys.argv = [str(path)]
    for statement in _imports(ast.parse(path.read_text("utf-8"))):
        try:
            code = compile(ast.Module([statement], []), str(path), "exec")
            exec(code, {"__name__": "imported", "__file__": str(path)})
        except BaseException as error:
            top = (getattr(error, "name", None) or "").partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and top and find_spec(top) is None:
                absent.add(top)
                continue
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(folder))]
            where = f" ({Path(frames[-1].filename).relative_to(folder)}:{frames[-1].lineno})" if frames else ""
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"
    return "past" + (f", without {', '.join(sorted(absent))}" if absent else "")


def _imports(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements of the module that import, also under ``try`` and ``if``."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield each
        elif isinstance(each, ast.Try | ast.If) and "__main__" not in ast.unparse(each):
            yield from _imports(each)


if __name__ == "__main__":
    sys.exit(main())
