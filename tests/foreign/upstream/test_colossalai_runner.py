"""The runners of ColossalAI's own programs and tests, on a checkout that is made up."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.upstream import names_colossalai
from tests.foreign.upstream.names_colossalai import imported, missing, shown

Run = Callable[..., tuple[int, str]]


def write(checkout: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``python -m`` of a runner, in this process: the exit status, and what it printed."""

    def called(runner: Any, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [runner.__name__, *arguments])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                status = runner.main()
            except SystemExit as ended:
                status = int(ended.code or 0)
        return status, "".join(capsys.readouterr())

    return called


def test_names_that_a_checkout_has_and_we_have_not_are_told(tmp_path: Path, run: Run) -> None:
    files = {
        "colossalai/__init__.py": "from .initialize import launch\nfrom .initialize import *",
        "colossalai/initialize.py": "import os\nclass Unheard: pass\ndef launch(): pass\ndef _own(): pass",
        "colossalai/_private.py": "def hidden(): pass",
        "colossalai/booster/__init__.py": "from colossalai.booster.booster import Booster\nfrom os import path",
        "docs/source/en/page.md": "```python\nfrom colossalai.zero import GeminiDDP\n```\n```python\n...(\n```",
        "examples/a.py": "from colossalai.nn import HybridAdam, Nothing\nfrom .colossalai import x\nimport colossalai",
        "tests/data.json": "{}",
    }
    write(tmp_path, files)
    assert shown(tmp_path) == {
        ("colossalai", "launch"),
        ("colossalai.initialize", "Unheard"),
        ("colossalai.initialize", "launch"),
        ("colossalai.booster", "Booster"),
    }
    used = {("colossalai.zero", "GeminiDDP"), ("colossalai.nn", "HybridAdam"), ("colossalai.nn", "Nothing")}
    assert imported(tmp_path) == used
    assert missing(shown(tmp_path) | used) == {("colossalai.initialize", "Unheard"), ("colossalai.nn", "Nothing")}
    status, told = run(names_colossalai, str(tmp_path))
    assert status == 1 and "1 missing of its own\n  colossalai.initialize.Unheard\n" in told, told
    assert "colossalai.nn.Nothing\nof 4 public names, and 3 that programs and pages import" in told
    assert run(names_colossalai, str(tmp_path / "docs"))[0] == 2
