"""Takes one wait, event or ``record_stream`` out of the library at a time, and has the late device find it.

``python -m tests.late.mutations`` prints the table of docs/inside/late-device.md; with words, for the places that have
one of them in their names. A place is found by itself: whatever calls one of :data:`CALLS` in :data:`FILES`.
"""

from __future__ import annotations

import ast
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import shardwise
from shardwise.testing import RankError, RankPool

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "helpers"))
import late_setup  # noqa: E402
from late_setup import Found  # noqa: E402

__all__ = ["FILES", "NOT_OF_STREAMS", "Site", "scenarios", "sites", "verdict"]

ROOT = Path(shardwise.__file__).parent
FILES = (
    "device/streams.py",
    "device/ahead.py",
    "chunk/chunk.py",
    "chunk/secondary.py",
    "chunk/source.py",
    "gather/pool.py",
    "reduce/landing.py",
    "reduce/norm.py",
    "reduce/reducer.py",
    "reduce/reductions.py",
    "comm/compressed.py",
    "comm/native.py",
    "engine/staging.py",
    "engine/values.py",
    "deepspeed/activations.py",
)
CALLS = {"wait", "wait_stream", "wait_event", "record_event", "recorded", "synchronize", "wait_for_first", "drop"}
ALONE = (
    "written_after_forward",
    "side_copies",
    "lent_memory",
    "later_values",
    "activations",
    "locked_memory",
)
RECEIVERS = {"drop": "self._lent"}
"""A name that others have too counts on this object alone."""
NOT_OF_STREAMS = {
    ("chunk/source.py", "DiskSource"): "the host waits for a disk",
    ("chunk/source.py", "_FromDisk"): "the host waits for a disk",
    ("engine/staging.py", "WhenAsked"): "of groups in shared memory, which have no device but the CPU",
    ("device/streams.py", "synchronize"): "is the host's wait itself; its calls are taken out one by one",
}


@dataclass(frozen=True)
class Site:
    """One call that is taken out.

    Attributes:
        file: below the package.
        inside: the function or method, dotted.
        line, column: of the call.
        text: of it.
    """

    file: str
    inside: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.file} {self.inside}: {self.text}"


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in RECEIVERS and not (
        isinstance(function, ast.Attribute) and ast.unparse(function.value) == RECEIVERS[name]
    ):
        return ""
    return str(name)


def _functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{above}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{above}{node.name}", node


def sites() -> list[Site]:
    """All of them, in order."""
    found = []
    for file in FILES:
        for inside, function in _functions(ast.parse((ROOT / file).read_text())):
            if (file, inside.split(".")[0]) in NOT_OF_STREAMS:
                continue
            for node in ast.walk(function):
                if _called(node) in CALLS or (_called(node) == "behind_current" and inside != "behind_current"):
                    found.append(Site(file, inside, node.lineno, node.col_offset, ast.unparse(node)))
    return found


class _Without(ast.NodeTransformer):
    """The tree without one call: the statement, or, where its value is used, an event that has long happened."""

    def __init__(self, site: Site) -> None:
        self._site, self.changes = site, 0

    def _is(self, node: ast.AST) -> bool:
        return _called(node) != "" and (node.lineno, node.col_offset) == (self._site.line, self._site.column)  # type: ignore[attr-defined]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if self._is(node.value):
            self.changes += 1
            function = node.value.func if isinstance(node.value, ast.Call) else None
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
                return ast.copy_location(ast.Expr(function.value), node)  # begun, and not waited for
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not self._is(node) or node.func is None:
            return self.generic_visit(node)
        self.changes += 1
        if _called(node) == "behind_current":  # on the same stream, behind nothing
            made = ast.parse(f"__import__('shardwise.device').device.on_stream({ast.unparse(node.args[1])})").body[0]
        else:
            made = ast.parse("__import__('shardwise.testing.late').testing.late.long_ago()").body[0]
        assert isinstance(made, ast.Expr)
        return ast.fix_missing_locations(ast.copy_location(made.value, node))


def _code_in(code: CodeType, path: Sequence[str]) -> CodeType:
    for name in path:
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code


@contextmanager
def _taken_out(site: Site) -> Iterator[None]:
    """Inside the block the library is without it, in this process."""
    path = ROOT / site.file
    without = _Without(site)
    tree = ast.fix_missing_locations(without.visit(ast.parse(path.read_text())))
    if without.changes != 1:
        raise RuntimeError(f"{site}: {without.changes} calls were taken out; look at the script")
    module = importlib.import_module("shardwise." + site.file.removesuffix(".py").replace("/", "."))
    function: Any = module
    for name in site.inside.split("."):
        function = function.__dict__[name]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    before = function.__code__
    function.__code__ = _code_in(compile(tree, str(path), "exec"), site.inside.split("."))
    try:
        yield
    finally:
        function.__code__ = before


def run_without(site: Site | None, name: str, arguments: tuple[Any, ...]) -> Found:
    """A function of ``late_setup`` on this rank, with one call taken out (``None``: as it is)."""
    function: Callable[..., Found] = getattr(late_setup, name)
    if site is None:
        return function(*arguments)
    with _taken_out(site):
        return function(*arguments)


def scenarios(directory: str, seeds: Sequence[int]) -> list[tuple[int, str, tuple[Any, ...]]]:
    """Ranks, function and arguments of what is run until something is found."""
    one = ["host", "early_host", "mixed", "clipped", "zero2_state_host", "zero3"]
    two = ["host", "ahead", "zero1", "zero2", "eight_bits", "early_host", "mixed", "ddp", "on_use"]
    four = ["replicas", "replicas_host", "secondary", "replicas_eight_bits"]
    found: list[tuple[int, str, tuple[Any, ...]]] = []
    for seed in seeds:
        found += [(1, name, ("alone", seed)) for name in ALONE]
        found += [(1, "train", (name, seed)) for name in one]
        found += [(1, "train", (name, seed, "mlp", True)) for name in ("host", "mixed")]
        found += [(1, "train_and_save", ("host", seed, directory))]
    found += [(2, "late_norm", ("alone", seed)) for seed in seeds]
    found += [(2, "train", (name, seed)) for seed in seeds for name in two]
    found += [(2, "train", ("ahead", seed, "mlp", True)) for seed in seeds]
    found += [(2, "train", ("zero3", seed, "mixture")) for seed in seeds]
    found += [(4, "train", (name, seed)) for seed in seeds for name in four]
    found += [(4, "train", ("replicas", seed, "gpt")) for seed in seeds]
    found += [(4, "secondary_twice", ("alone", seed)) for seed in seeds]
    return found


def verdict(site: Site, pools: dict[int, RankPool], seeds: Sequence[int]) -> str:
    """What found it, or the empty text."""
    with tempfile.TemporaryDirectory() as directory:
        for ranks, name, arguments in scenarios(directory, seeds):
            where = " ".join(str(each) for each in (name, *arguments[:2])).replace("train ", "") + f", {ranks} ranks"
            try:
                found = pools[ranks].run(run_without, site, name, arguments, timeout=40.0)
            except RankError as error:
                return f"{'no end' if 'did not finish' in str(error) else 'an error'}: {where}"
            kinds = [
                kind
                for kind, has in (("order", any(f.races for f in found)), ("values", any(f.wrong for f in found)))
                if has
            ]
            if kinds:
                return f"{' and '.join(kinds)}: {where}"
    return ""


def main(words: Sequence[str]) -> int:
    """Print the table; 1 where something was not found."""
    missed = 0
    with RankPool(1) as one, RankPool(2) as two, RankPool(4) as four:
        print("| Taken out | Found by |\n|---|---|", flush=True)
        for site in sites():
            if words and not any(word in str(site) for word in words):
                continue
            found = verdict(site, {1: one, 2: two, 4: four}, (0, 1))
            missed += not found
            print(f"| `{site.file}` `{site.inside}`: `{site.text}` | {found or '**not found**'} |", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    # By its name, so that ranks find its functions.
    from tests.late import mutations

    sys.exit(mutations.main(sys.argv[1:]))
