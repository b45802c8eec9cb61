"""Python files of this repository, parsed once for all tests that read code: :func:`ours` and :func:`around`."""

import ast
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "shardwise"
Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file: its dotted name, text and tree. ``modules`` are all dotted names of the package."""

    name: str
    text: str
    modules: frozenset[str] = frozenset()
    is_package: bool = False
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", ast.parse(self.text))


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.name.split(".")
    base = parts[: len(parts) - node.level + (1 if source.is_package else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _type_checking_nodes(tree: ast.Module) -> set[int]:
    hidden: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            hidden |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    return hidden


def imports(source: Source, at_run_time: bool = False) -> Iterator[tuple[int, str]]:
    """Yield ``(line, dotted module)`` of each import of the package, with ``from package import module`` resolved."""
    hidden = _type_checking_nodes(source.tree) if at_run_time else set()
    for node in ast.walk(source.tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            inner = {alias.name: f"{base}.{alias.name}" for alias in node.names}
            found = [path if path in source.modules else base for path in inner.values()]
        else:
            continue
        for name in dict.fromkeys(found):
            if name == PACKAGE or name.startswith(PACKAGE + "."):
                yield node.lineno, name


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield each function with its qualified name, methods and nested functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def read(folder: Path, prefix: str) -> list[Source]:
    """Return the Python files under ``folder`` with dotted names that start with ``prefix``."""
    paths = [p for p in sorted(folder.rglob("*.py")) if "__pycache__" not in p.parts]
    parts = {p: p.relative_to(folder).with_suffix("").parts for p in paths}
    names = {p: ".".join((prefix, *(q[:-1] if q[-1] == "__init__" else q))) for p, q in parts.items()}
    modules = frozenset(names.values())
    # A million nodes are kept; freezing them keeps garbage collections from looking through them.
    gc.disable()
    try:
        return [Source(names[p], p.read_text("utf-8"), modules, p.name == "__init__.py") for p in paths]
    finally:
        gc.freeze()
        gc.enable()


@cache
def ours() -> list[Source]:
    """Return the package's files; parsed when first used, since each worker collects all tests."""
    return read(ROOT / PACKAGE, PACKAGE)


@cache
def around() -> list[Source]:
    """Return the files of tests, examples and benchmarks."""
    return [source for name in ("tests", "examples", "benchmarks") for source in read(ROOT / name, name)]


def bound_names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds at its top level, in any branch."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def assert_none(complaints: Iterable[str]) -> None:
    """Fail with one line for each complaint."""
    found = list(complaints)
    assert not found, "\n" + "\n".join(found)
