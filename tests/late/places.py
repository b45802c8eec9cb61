"""The library's waits: a list from its sources, with functions that remove one of them or record which ones run."""

import ast
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import shardwise

ROOT = Path(shardwise.__file__).parent
CALLS = {
    "Lent",
    "behind_current",
    "land",
    "record_event",
    "record_stream",
    "recorded",
    "settle",
    "synchronize",
    "wait",
    "wait_event",
    "wait_for_first",
    "wait_stream",
}
"""Functions that wait, that are waited for, or that keep memory alive; each call of such a name, in any file, is a
place."""
RECEIVERS = {"drop": "self._lent"}
"""Names that other objects have, too: these count only on this object."""

DISK = "the host waits for a disk"
PROGRAM = "the host waits for processes, threads or files"
BEGINS = "begins a second operation, which would otherwise begin later"
TAKES_BACK = "releases memory of passes; the update that follows waits for gathers itself"
SENT = "the transport owns sent memory until delivery, and nothing writes to it: the call releases it or reports a loss"
DROPPED = "gradients that are dropped on their way to the host: the program may assign others to the same memory next"
SEEN = "the host knows that it is done; the call reports a loss"
MESSAGES = "groups of CPU ranks, and small messages between hosts"
ELSEWHERE: tuple[tuple[str, str, str, str], ...] = (
    ("testing/", "", "", "pools of ranks, which have no device"),
    ("core/base/device.py", "Runtime.", "", "torch's device itself; the late device replaces it"),
    ("core/base/device.py", "synchronize", "", "the host's wait itself; its calls are removed one by one"),
    ("core/base/device.py", "recorded", "", "record_stream itself; its calls are removed one by one"),
    ("cli/", "", "", PROGRAM),
    ("core/mesh/launch.py", "", "", PROGRAM),
    ("core/checkpoint/atomic.py", "", "settle(files", PROGRAM),
    ("booster/checkpoint_io.py", "CheckpointIO.", "", PROGRAM),
    ("core/checkpoint/portable_files.py", "PortableFiles._load", "", TAKES_BACK),
    ("core/memory/disk/", "", "", DISK),
    ("core/optim/disk_moments.py", "", "", DISK),
    ("core/update/master_weights.py", "ChunkState.", "", DISK),
    ("core/update/disk_tiles.py", "", "", DISK),
    ("core/shards/shard_memory.py", "DiskSource.", "reading.wait", DISK),
    ("core/shards/shard_memory.py", "DiskSource.", "self.store.write", DISK),
    ("core/shards/shard_memory.py", "_FromDisk.", "", DISK),
    ("core/comm/compressed.py", "CompressedGroup._reduce", "steps.wait_for_first() (1)", MESSAGES),
    ("core/comm/compressed.py", "CompressedGroup._reduce", "steps.wait_for_first() (2)", BEGINS),
    ("core/comm/compressed.py", "_Steps.finished", "", SEEN),
    ("core/comm/control.py", "", "", MESSAGES),
    ("core/comm/gloo.py", "", "", MESSAGES),
    ("core/comm/shared_memory.py", "", "", MESSAGES),
    ("core/comm/link.py", "Message.wait", "at_most)", MESSAGES),
    ("core/parallel/pipeline/run.py", "StageRun.step", "self._wire.settle", SENT),
    ("core/parallel/pipeline/run.py", "_Step._settle", "", SENT),
    ("core/parallel/pipeline/shared.py", "SharedGradients.summed", "self._wire.settle", SENT),
    ("core/parallel/sequence/ring.py", "Rotation.around", "axis.wire.settle", SENT),
    ("core/parallel/sequence/ring.py", "_Homeward.home", "wire.settle", SENT),
    ("core/grads/chunk_grads.py", "ChunkGrads.reduced", "self.land() (2)", DROPPED),
    ("core/grads/reducer.py", "ThenReplicas.wait_for_first", "self._first.wait", MESSAGES),
    ("core/engine/full_values.py", "LazyGather.", "", "groups in shared memory, which have no device but the CPU"),
)
"""Calls that are not places: beginnings of file and function, a part of the text, and the reason."""


@dataclass(frozen=True)
class Place:
    """One call.

    Attributes:
        file: path below the package.
        inside: the function or method, dotted.
        begins: the line where that begins, with its decorators.
        line, column: of the call.
        text: of the call.
        number: among calls of the same text in the function, from 1.
    """

    file: str
    inside: str
    begins: int
    line: int
    column: int
    text: str
    number: int

    def __str__(self) -> str:
        again = "" if self.number == 1 else f" ({self.number})"
        return f"{self.file} {self.inside}: {self.text}{again}"

    @property
    def called(self) -> str:
        """The name of the called function."""
        return _called(ast.parse(self.text, mode="eval").body)

    @property
    def why_not(self) -> str:
        """Why it does not count; empty if it does."""
        for entry in ELSEWHERE:
            if elsewhere(self, entry):
                return entry[-1]
        return ""


def elsewhere(place: Place, entry: tuple[str, str, str, str]) -> bool:
    """Return whether an entry of :data:`ELSEWHERE` is about ``place``."""
    file, inside, text, _ = entry
    below = not inside or inside[-1] == "."
    where = place.inside.startswith(inside) if below else place.inside == inside
    return place.file.startswith(file) and where and text in f"{place.text} ({place.number})"


def _called(node: ast.AST) -> str:
    """Return the name of the called function if it is one that counts."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    on = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    return str(name) if name in CALLS or RECEIVERS.get(name) == on else ""


def _functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{above}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{above}{node.name}", node
        elif isinstance(node, ast.stmt):
            yield from _functions(node, above)


def _in_file(path: Path) -> Iterator[Place]:
    source, texts = path.read_text("utf-8"), list[tuple[str, str]]()
    if not any(f"{name}(" in source for name in (*CALLS, *RECEIVERS)):
        return  # to read all of the package as a tree takes seconds
    for inside, function in _functions(ast.parse(source)):
        begins = min([function.lineno, *(each.lineno for each in function.decorator_list)])
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _called(node)]
        for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
            text, where = ast.unparse(node), path.relative_to(ROOT).as_posix()
            texts.append((inside, text))
            yield Place(where, inside, begins, node.lineno, node.col_offset, text, texts.count((inside, text)))


@functools.cache
def places(counted: bool = True) -> list[Place]:
    """Return all places that count, in the order of files; or (``counted=False``) those that do not.

    Reading the package takes seconds.
    """
    every = (place for path in sorted(ROOT.rglob("*.py")) for place in _in_file(path))
    return [place for place in every if bool(place.why_not) is not counted]


# ---- changing a function


class _Without(ast.NodeTransformer):
    """Removes one call from the tree: its statement, or, if its value is used, its effect."""

    def __init__(self, place: Place) -> None:
        self._place, self.changes = place, 0

    def _is(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not _called(node):
            return False
        # Two calls of one chain begin at one place; they differ in their texts.
        at = (node.lineno, node.col_offset) == (self._place.line, self._place.column)
        return at and ast.unparse(node) == self._place.text

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not self._is(node.value):
            return self.generic_visit(node)
        self.changes += 1
        function = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(function, ast.Attribute) and any(isinstance(each, ast.Call) for each in ast.walk(function.value)):
            return ast.copy_location(ast.Expr(function.value), node)  # begun, and not waited for
        return ast.copy_location(ast.Pass(), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not self._is(node):
            return self.generic_visit(node)
        self.changes += 1
        if _called(node) == "behind_current":  # on the same stream, without an order
            device = "__import__('shardwise.core.base.device', fromlist=['on_stream'])"
            made = f"{device}.on_stream({ast.unparse(node.args[1])})"
        elif _called(node) == "Lent":
            made = "__import__('tests.late.places').late.places.NothingLent()"
        else:
            made = "__import__('tests.support.late').support.late.long_ago()"
        return _expression(made, node)


class _Noted(ast.NodeTransformer):
    """Inserts a note before each of the given calls."""

    def __init__(self, numbered: dict[tuple[int, int], dict[str, int]]) -> None:
        self._numbered = numbered

    def visit_Call(self, node: ast.Call) -> ast.AST:
        here = self._numbered.get((node.lineno, node.col_offset))
        number = here.get(ast.unparse(node)) if here is not None else None
        node = self.generic_visit(node)  # type: ignore[assignment]
        if number is None:
            return node
        note = _expression(f"__import__('tests.late.places').late.places.reached({number})", node)
        both = ast.Tuple([note, node], ast.Load())
        chosen = ast.Subscript(both, ast.Constant(1), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(chosen, node))


class NothingLent:
    """Replaces lent memory without keeping it alive."""

    def drop(self) -> None:
        """Do nothing."""


def _expression(text: str, at: ast.AST) -> ast.expr:
    made = ast.parse(text, mode="eval").body
    for node in ast.walk(made):
        ast.copy_location(node, at)
    return made


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _function(place: Place) -> FunctionType:
    """Return the function inside its decorators."""
    found: Any = importlib.import_module("shardwise." + place.file.removesuffix(".py").replace("/", "."))
    for name in place.inside.split("."):
        found = found.__dict__[name]
    ways = [found.fget, found.fset, found.fdel] if isinstance(found, property) else [found]
    for each in ways:
        each = getattr(each, "__func__", each)
        while hasattr(each, "__wrapped__"):
            each = each.__wrapped__
        if isinstance(each, FunctionType) and each.__code__.co_firstlineno == place.begins:
            return each
    raise RuntimeError(f"{place}: no function begins in line {place.begins}; look at the script")


@contextmanager
def _changed(codes: dict[FunctionType, CodeType]) -> Iterator[None]:
    """Replace functions inside this context, in this process."""
    before = {function: function.__code__ for function in codes}
    try:
        for function, code in codes.items():
            function.__code__ = code
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def _compiled(file: str, tree: ast.AST, inside: Sequence[Place]) -> dict[FunctionType, CodeType]:
    """Return the functions that contain those places, as in the tree of their file."""
    module = compile(ast.fix_missing_locations(tree), str(ROOT / file), "exec")  # type: ignore[arg-type]
    known = {(code.co_qualname, code.co_firstlineno): code for code in _codes(module)}
    functions = {_function(place) for place in inside}
    return {each: known[each.__code__.co_qualname, each.__code__.co_firstlineno] for each in functions}


@contextmanager
def taken_out(place: Place) -> Iterator[None]:
    """Remove the place from the library inside this context, in this process."""
    without = _Without(place)
    tree = without.visit(ast.parse((ROOT / place.file).read_text("utf-8")))
    if without.changes != 1:
        raise RuntimeError(f"{place}: {without.changes} calls were taken out; look at the script")
    with _changed(_compiled(place.file, tree, [place])):
        yield


_NUMBERS: set[int] = set()
"""Numbers of the places that this process has reached."""
_NOTING: dict[FunctionType, CodeType] = {}
"""Functions, with their code that records places."""
reached: Callable[[int], None] = _NUMBERS.add


@contextmanager
def noted(chosen: Sequence[Place]) -> Iterator[set[int]]:
    """Yield the numbers of those of ``chosen`` (always the same in a process) that the program reaches inside this
    context."""
    _NUMBERS.clear()
    for file in {place.file for place in chosen if not _NOTING}:
        here, own = dict[tuple[int, int], dict[str, int]](), [place for place in chosen if place.file == file]
        for number, place in enumerate(chosen):
            if place.file == file:
                here.setdefault((place.line, place.column), {})[place.text] = number
        tree = _Noted(here).visit(ast.parse((ROOT / file).read_text("utf-8")))
        _NOTING.update(_compiled(file, tree, own))
    with _changed(_NOTING):
        yield _NUMBERS
