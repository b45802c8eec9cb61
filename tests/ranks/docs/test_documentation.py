"""Every code block of README.md and docs/**/*.md runs as printed, or is listed with the reason why it does not."""

import ast
import contextlib
import io
import re
import shlex
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from documentation_setup import PAGES
from page_blocks import ROOT, Block, Fence, Names, fences

from shardwise.cli import main
from shardwise.strategies.lightning_packages import LIGHTNING
from shardwise.testing import run_ranks
from tests.support.lightning_setup import _environment
from tests.support.sets import full

RANKS = 2
EVERY_PAGE = sorted(["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))])
TRAINER_PAGES = ("README.md", "docs/huggingface.md")
QUICK = "docs/quickstart.md"
"""The page that the quick set runs; tests/ranks/docs/test_examples.py runs the program of README.md."""


def _has(how: str) -> list[str]:
    return [page for page, blocks in PAGES.items() if any(block.how == how for block in blocks)]


def _rows(pages: list[str], quick: str) -> list[Any]:
    """Return the pages as test rows; all but ``quick`` are in the full set."""
    assert quick in pages
    return [row for page in pages for row in ([page] if page == quick else full(page))]


TOLD = "tests/ranks/docs/documentation_setup.py says what becomes of each block: "


def matched(page: str) -> list[tuple[Fence, Block]]:
    """Return the blocks of a page with their entries in PAGES."""
    printed, listed = fences(page), list(PAGES.get(page, []))
    pairs: list[tuple[Fence, Block]] = []
    for fence in printed:
        found = next((block for block in listed if fence.first.startswith(block.first)), None)
        assert found is not None, (
            f"{page}:{fence.line}: nothing is said of the block that begins with {fence.first!r}. {TOLD}add "
            "Block(first=<how it begins>) at its place, with before= where it is a fragment, or how='shown' and why="
        )
        listed.remove(found)
        pairs.append((fence, found))
    assert not listed, f"{page} has no block that begins with {listed[0].first!r}. {TOLD}change or remove that one"
    order = [PAGES[page].index(block) for _, block in pairs]
    assert order == sorted(order), f"{page}: its blocks stand in another order than in the table. {TOLD}sort them"
    return pairs


def blocks(how: str, *pages: str) -> list[tuple[Fence, Block]]:
    """Return the blocks of these pages that are treated so."""
    return [(fence, block) for page in pages for fence, block in matched(page) if block.how == how]


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_every_block_runs_or_has_a_reason(page: str) -> None:
    for fence, block in matched(page):
        assert block.how in ("run", "main", "shell", "make", "shown"), block
        assert bool(block.why) == (block.how == "shown"), f"{page}:{fence.line}: {block}"
        runs = block.how in ("run", "main")
        assert not runs or fence.language == "python", f"{page}:{fence.line} is {fence.language or 'no language'}"
        assert runs or fence.language != "python" or block.why, f"{page}:{fence.line}: Python that is not run"


def _place(fence: Fence, text: str) -> Any:
    """Compile so that a traceback has the line numbers of the page."""
    return compile("\n" * fence.line + text, fence.page, "exec", dont_inherit=True)


def run_page(page: str) -> list[str]:
    """Run the Python blocks of a page with one set of names, inside a rank, in an empty folder."""
    names: Names = {"__name__": "documentation", "environment": lambda: _environment(LIGHTNING)()}
    done = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        warnings.filterwarnings("error", module="documentation$")  # readers would see the warnings of a page's lines
        if page in TRAINER_PAGES:
            from tests.support.huggingface_setup import launched

            stack.enter_context(launched())
        for fence, block in blocks("run", page):
            text = fence.text
            for printed, instead in block.instead:
                assert printed in text, (page, fence.line, printed)
                text = text.replace(printed, instead)
            block.before(names)
            if not block.alone or not dist.is_initialized() or dist.get_rank() == 0:
                exec(_place(fence, text), names)
            block.after(names)
            done.append(block.first)
        for name in ("booster", "engine", "session", "trainer", "accelerator"):
            _close(names.get(name))
    return done


def _close(what: Any) -> None:
    """Close what a page leaves open and would disturb the next test."""
    strategy = getattr(what, "strategy", None)
    for owner, name in ((strategy, "unshard"), (getattr(what, "accelerator", None), "close"), (what, "close")):
        close: Callable[[], None] | None = getattr(owner, name, None)
        if close is not None:
            close()
            return


@pytest.mark.parametrize("page", _rows(_has("run"), QUICK))
def test_python_runs_as_it_is_printed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = [block.first for block in PAGES[page] if block.how == "run"]
    assert run_ranks(RANKS, run_page, page, timeout=300.0) == [wanted] * RANKS


@pytest.mark.full
def test_modules_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks import each block as a module; the part under ``__main__`` runs here.

    A comment after a ``print`` is its output, up to the words after the first comma.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for ran, (fence, block) in enumerate(blocks("main", *PAGES), 1):
        named = re.match(r"# (\w+)\.py$", fence.first)
        name = f"page_{named[1] if named else ran}"
        Path(f"{name}.py").write_text(fence.text, "utf-8")
        module = types.ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
        exec(_place(fence, fence.text), module.__dict__)
        for node in ast.parse(fence.text).body:
            if isinstance(node, ast.If):  # if __name__ == "__main__"
                exec(_place(fence, "\n".join(ast.unparse(each) for each in node.body)), module.__dict__)
        block.after(module.__dict__)
        out = capsys.readouterr().out
        for said in re.findall(r"^ *print\(.*\)  # (.*)$", fence.text, re.MULTILINE):
            first = said.split(", some")[0].split(": ")[0] if not said.startswith("'") else said.split(", some")[0]
            assert first in out, (fence.page, fence.line, first, out)
    assert ran == sum(block.how == "main" for page in PAGES.values() for block in page) > 4


def _commands(text: str) -> list[str]:
    """Return the lines without comments and prompts, and without the output after a prompt."""
    prompted = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    return [line for line in prompted or text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", _rows(_has("shell"), "docs/porting.md"))
def test_commands_run_as_they_are_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    for fence, block in blocks("shell", page):
        assert run_ranks(1, _prepare, page, block.first) == [None]
        lines = fence.text.splitlines() if fence.text.startswith("$ ") else []
        printed = [line for line in lines if not line.startswith(("$ ", "..."))]
        for line in _commands(fence.text):
            words = shlex.split(line, comments=True)
            assert words[0] == "shardwise", f"{page}:{fence.line}: {line}"
            if block.left_out is not None and line.startswith(block.left_out):
                continue
            capsys.readouterr()
            assert main.main(words[1:]) == 0, f"{page}:{fence.line}: {line}\n{capsys.readouterr().err}"
            out = re.sub(r"\s+", " ", capsys.readouterr().out)
            for shown in printed:
                assert re.sub(r"\s+", " ", shown) in out, f"{page}:{fence.line} prints something else: {shown!r}\n{out}"


def _prepare(page: str, first: str) -> None:
    next(block for block in PAGES[page] if block.first == first).before({})


def test_make_targets_and_variables_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"^(\w+):", makefile, re.MULTILINE)
    variables = set(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE))
    checked = 0
    for fence, _ in blocks("make", *PAGES):
        for line in _commands(fence.text):
            command, target, *given = shlex.split(line, comments=True)
            names = {word.partition("=")[0] for word in given}
            assert command == "make" and target in targets and names <= variables, f"{fence.page}:{fence.line}: {line}"
            checked += 1
    assert checked >= 7
