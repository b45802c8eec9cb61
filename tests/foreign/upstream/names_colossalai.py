"""``python -m tests.foreign.upstream.names_colossalai CHECKOUT``: can each of ColossalAI's names be imported here?

Its modules are read, not imported. Names are those that a public module defines, that a public package exports, and
that its examples, applications, tests and pages import. Missing names are printed, one per line; the exit status is 1
if its own modules have some of these.
"""

import argparse
import ast
import re
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

FOREIGN, HOME = "colossalai", "shardwise.colossalai"
BESIDE = ("examples", "applications", "tests", "docs/source/en")
Name = tuple[str, str]


def main() -> int:
    """Print the missing names, and how many there are."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign.upstream.names_colossalai", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of hpcaitech/ColossalAI")
    args = parser.parse_args()
    if not (args.checkout / FOREIGN).is_dir():
        parser.error(f"{args.checkout} has no {FOREIGN}: give a checkout of the repository")
    warnings.simplefilter("ignore")
    own, used = shown(args.checkout), imported(args.checkout)
    gone, strange = missing(own), missing(used - own)
    for title, names in (("of its own", gone), ("that programs and pages import, and that it has not", strange)):
        print(f"{len(names)} missing {title}{''.join(f'{chr(10)}  {path}.{name}' for path, name in sorted(names))}")
    print(f"of {len(own)} public names, and {len(used)} that programs and pages import")
    return int(bool(gone))


def shown(checkout: Path) -> set[Name]:
    """Return ``(module, name)`` of what public modules define, and of what public packages import from their
    submodules."""
    found: set[Name] = set()
    for file in sorted((checkout / FOREIGN).rglob("*.py")):
        module = ".".join(file.relative_to(checkout).with_suffix("").parts).removesuffix(".__init__")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        top = ast.parse(file.read_text("utf-8")).body
        defined = {node.name for node in top if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        if file.name == "__init__.py":
            defined |= set(_from_below(module, top))
        found |= {(module, name) for name in defined if not name.startswith("_")}
    return found


def _from_below(module: str, top: list[ast.stmt]) -> Iterator[str]:
    for node in top:
        if isinstance(node, ast.ImportFrom) and (node.level == 1 or (node.module or "").startswith(f"{module}.")):
            yield from (alias.asname or alias.name for alias in node.names if alias.name != "*")


def imported(checkout: Path) -> set[Name]:
    """Return ``(module, name)`` of what programs, tests, and Python code on pages import by ``from ... import``."""
    found: set[Name] = set()
    for file in (file for folder in BESIDE for file in (checkout / folder).rglob("*") if file.is_file()):
        if file.suffix not in (".py", ".md"):
            continue
        text = file.read_text("utf-8", "replace")
        for block in [text] if file.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            try:
                nodes = list(ast.walk(ast.parse(block)))
            except SyntaxError:
                continue
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == FOREIGN:
                    found |= {(str(node.module), alias.name) for alias in node.names if alias.name != "*"}
    return found


def missing(names: set[Name]) -> set[Name]:
    """Return the names that cannot be imported."""
    return {each for each in names if not _is_there(*each)}


def _is_there(module: str, name: str) -> bool:
    here = module.replace(FOREIGN, HOME, 1)
    try:
        if hasattr(import_module(here), name):
            return True
        import_module(f"{here}.{name}")
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
