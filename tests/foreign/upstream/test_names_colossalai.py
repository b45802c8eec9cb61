"""``names_colossalai`` finds the names of a checkout of ColossalAI and reports missing ones; the checkout here is made
up."""

import sys
from pathlib import Path

import pytest

from tests.foreign.upstream import names_colossalai
from tests.foreign.upstream.names_colossalai import imported, missing, shown


@pytest.mark.filterwarnings("ignore")
def test_missing_names_of_a_checkout_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "colossalai/__init__.py": "from .initialize import launch\nfrom .initialize import *",
        "colossalai/initialize.py": "import os\nclass Unheard: pass\ndef launch(): pass\ndef _own(): pass",
        "colossalai/_private.py": "def hidden(): pass",
        "colossalai/booster/__init__.py": "from colossalai.booster.booster import Booster\nfrom os import path",
        "docs/source/en/page.md": "```python\nfrom colossalai.zero import GeminiDDP\n```\n```python\n...(\n```",
        "examples/a.py": "from colossalai.nn import HybridAdam, Nothing\nfrom .colossalai import x\nimport colossalai",
        "tests/data.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    own = {("colossalai", "launch"), ("colossalai.initialize", "Unheard"), ("colossalai.initialize", "launch")}
    assert shown(tmp_path) == own | {("colossalai.booster", "Booster")}
    used = {("colossalai.zero", "GeminiDDP"), ("colossalai.nn", "HybridAdam"), ("colossalai.nn", "Nothing")}
    assert imported(tmp_path) == used
    assert missing(shown(tmp_path) | used) == {("colossalai.initialize", "Unheard"), ("colossalai.nn", "Nothing")}
    monkeypatch.setattr(sys, "argv", ["names_colossalai", str(tmp_path)])
    assert names_colossalai.main() == 1
    told = capsys.readouterr().out
    assert "1 missing of its own\n  colossalai.initialize.Unheard\n" in told, told
    assert "colossalai.nn.Nothing\nof 4 public names, and 3 that programs and pages import" in told
    monkeypatch.setattr(sys, "argv", ["names_colossalai", str(tmp_path / "docs")])
    with pytest.raises(SystemExit, match="2"):
        names_colossalai.main()
