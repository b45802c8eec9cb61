"""``python -m tests.structure``: print the package's size and structure, one line for each room; ``make arch`` runs it.

A room is a folder of the package. Docstrings, blank lines and comments are not lines of code. Fan-out is the number of
the package's modules that one module imports. A private site is a use of a private name of torch, or an assignment to a
tensor's ``.data``.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from tests.sources import PACKAGE, Source, functions, imports, ours

NOTE = re.compile(r"\[Note: ([^]]+)\]")
"""The name of a note, at the note itself and in references to it."""

PRIVATE_NAMES = {"_cdata", "_version", "_use_count", "_backward_hooks", "_post_accumulate_grad_hooks"}
"""Private attributes of tensors and storages, on any variable."""
STRUCTURES = {"iocb"}
"""Names of variables whose ``data`` is not a tensor's."""
SEAM = (f"{PACKAGE}.core.base.torch_internals",)
"""The module that may use private names."""


@dataclass
class Room:
    """Sums over the files of a package, and its largest parts."""

    files: int = 0
    code: int = 0
    comments: int = 0
    private: int = 0
    function: tuple[int, str] = (0, "")
    cls: tuple[int, str] = (0, "")
    fan_out: tuple[int, str] = (0, "")
    imported: set[str] = field(default_factory=set)


def comment_lines(text: str) -> int:
    """Return the number of lines with comments for readers; comments for checkers do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    quiet = ("# type:", "# noqa", "# ruff:", "# pragma")
    return len({t.start[0] for t in tokens if t.type == tokenize.COMMENT and not t.string.startswith(quiet)})


def notes(text: str) -> tuple[list[str], set[str]]:
    """Return the names of the notes in a file, and the names that it refers to.

    A note begins with a comment line that has only its name, and continues in the next line. References may be broken
    over
    two lines.
    """
    made = re.findall(r"(?m)^ *# \[Note: ([^]\n]+)\]\n *# ", text)
    found = NOTE.findall(re.sub(r"\n *#? *", " ", text))
    for name in made:
        found.remove(name)
    return made, set(found)


def note_complaints(texts: Mapping[str, str]) -> list[str]:
    """Return notes that are in two files, and references without a note, in the files of ``texts``."""
    found = {where: notes(text) for where, text in texts.items()}
    places: dict[str, list[str]] = {}
    for where, (made, _) in found.items():
        for name in made:
            places.setdefault(name, []).append(where)
    twice = [f"[Note: {name}] is in {wheres}" for name, wheres in places.items() if len(wheres) > 1]
    return twice + [
        f"{where} refers to [Note: {name}], which is nowhere"
        for where, (_, names) in found.items()
        for name in sorted(names - places.keys())
    ]


def code_lines(source: Source) -> int:
    """Return the number of lines of code, without docstrings and comments."""
    skipped = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and n not in skipped for n, line in lines)


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for an attribute of names; an inner expression of another kind becomes a question mark."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ".".join(["?", *reversed(parts)])


def private_sites(source: Source) -> Iterator[tuple[int, str]]:
    """Yield ``(line, name)`` of each use of a private name of torch."""
    inner: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            inner |= {id(each) for each in ast.walk(node.value)}
            name = dotted(node)
            parts = name.split(".")
            in_torch = parts[0] in ("torch", "dist", "distributed_c10d") and any(
                part.startswith("_") and not part.startswith("__") for part in parts[1:]
            )
            if in_torch or parts[-1] in PRIVATE_NAMES:
                yield node.lineno, name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            module = node.module or ""
            for alias in node.names:
                if "._" in module or (alias.name.startswith("_") and not alias.name.startswith("__")):
                    yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                name = dotted(target) if isinstance(target, ast.Attribute) else ""
                if name.endswith(".data") and name.removesuffix(".data") not in STRUCTURES:
                    yield node.lineno, f"{name} ="


def room_of(name: str) -> str:
    """Return the folder of a module, below ``core`` without that name."""
    return name.removeprefix(PACKAGE).lstrip(".").removeprefix("core.").partition(".")[0] or "(top)"


@cache
def rooms() -> dict[str, Room]:
    """Return the rooms by name, the largest first."""
    found: dict[str, Room] = {}
    for source in ours():
        room = found.setdefault(room_of(source.name), Room())
        short = source.name.removeprefix(PACKAGE + ".")
        room.files += 1
        room.code += code_lines(source)
        room.comments += comment_lines(source.text)
        room.private += 0 if source.name in SEAM else sum(1 for _ in private_sites(source))
        others = {target for _, target in imports(source) if target not in (PACKAGE, source.name)}
        room.fan_out = max(room.fan_out, (len(others), short))
        room.imported |= {room_of(other) for other in others} - {room_of(source.name)}
        for name, node in functions(source.tree):
            room.function = max(room.function, ((node.end_lineno or 0) - node.lineno + 1, f"{short}.{name}"))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                room.cls = max(room.cls, ((node.end_lineno or 0) - node.lineno + 1, f"{short}.{node.name}"))
    return dict(sorted(found.items(), key=lambda item: -item[1].code))


def repeated_names() -> Counter[str]:
    """Return for each public method name the number of classes that have it."""
    names: Counter[str] = Counter()
    for source in ours():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                names.update({n.name for n in node.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"})
    return names


def main() -> None:
    """Print the table."""
    found = rooms()
    print(f"{'room':18}{'files':>6}{'code':>7}{'comments':>9}{'/100':>6}{'private':>8}{'rooms':>6}  largest")
    total = Room()
    for name, room in found.items():
        share = 100 * room.comments / max(room.code, 1)
        largest = f"class {room.cls[0]} {room.cls[1]}; function {room.function[0]}; fan-out {room.fan_out[0]}"
        line = f"{name:18}{room.files:6}{room.code:7}{room.comments:9}{share:6.1f}{room.private:8}"
        print(f"{line}{len(room.imported):6}  {largest} ({room.fan_out[1]})")
        total.files, total.code = total.files + room.files, total.code + room.code
        total.comments, total.private = total.comments + room.comments, total.private + room.private
    share = 100 * total.comments / total.code
    print(f"{'all':18}{total.files:6}{total.code:7}{total.comments:9}{share:6.1f}{total.private:8}")
    often = ", ".join(f"{name} {count}" for name, count in repeated_names().most_common(8))
    print(f"method names in most classes: {often}")


if __name__ == "__main__":
    main()
