"""Tests of ``shardwise port``: the report on a program's foreign names, and the program rewritten with ours."""

import ast
import stat
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.compat import alias_tables
from shardwise.compat.port import findings, markdown, rewritten
from shardwise.compat.table import parse_table

WHOLE = parse_table(
    "foreignlib",
    "ours.foreignlib",
    """
version = "1.0"
[here."shardwise.core.mesh:init_distributed"]
"" = ["launch"]
[here."torch.optim"]
optim = ["SGD"]
[here."torch.nn"]
nn = ["Linear"]
"nn.modules" = ["Linear"]
[here."torch.nn:Bilinear"]
nn = ["Wide"]
[here."torch.nn:Linear"]
"tools.start" = ["go"]
[differs."Bilinear: its inputs differ"]
nn = ["Wide"]
[absent."use Linear"]
"nn.old" = ["Odd"]
[absent."trace with torch.fx"]
tracing = ["*"]
[absent."call it by hand"]
tools = ["start"]
[absent."leave it out"]
parts = ["*", "Odd"]
[absent."use parts.Odd"]
parts = ["Other"]
[ignored."it is always fast"]
"nn:Linear" = ["fast"]
[missing."leave it out"]
"nn:Linear" = ["magic"]
""",
)
PARTIAL = parse_table(
    "stays.inner",
    "ours.stays",
    """
version = "2.0"
partial = true
[also]
"stays.Trainer" = "stays.inner.Trainer"
[here."."]
strategies = ["Deep"]
[here."ours.more:New"]
strategies = ["Old"]
[absent."use Deep"]
strategies = ["Gone"]
[values."write kind='ours_{value}' after `import {home}`"]
unless = "{home}"
":Trainer(kind=)" = ["deep_3"]
[values."leave it out"]
":Trainer(file=)" = ["*"]
""",
)
TABLES = (WHOLE, PARTIAL)

REWRITTEN = [
    ("import foreignlib\n", "import ours.foreignlib as foreignlib\n"),
    ("import os, foreignlib.nn, sys\n", "import os, ours.foreignlib.nn, ours.foreignlib as foreignlib, sys\n"),
    ("from foreignlib import nn\n", "from ours.foreignlib import nn\n"),
    ("if 'é': from foreignlib.nn import (Linear,  # why\n  Wide)\n",
     "if 'é': from ours.foreignlib.nn import (Linear,  # why\n  Wide)\n"),
    ("from \\\n  foreignlib.nn import Linear\r\nx = 1\r\n", "from \\\n  ours.foreignlib.nn import Linear\r\nx = 1\r\n"),
    ("import foreignlibrary\nfrom . import foreignlib\nfrom foreign import lib\n", None),
    ("from ours.foreignlib.nn import Linear\n", None),
    # A library that stays installed: our names are replaced, and other imports stay.
    ("from stays.inner.strategies import Other\n", None),
    ("import stays.inner\n", None),
    ("from stays.inner.strategies import Deep\n", "from ours.stays import Deep\n"),
    ("from stays.inner.strategies import Deep as D, Old\n",
     "from ours.stays import Deep as D\nfrom ours.more import New as Old\n"),
    ("def f():\n    from stays.inner.strategies import Deep, Other\n",
     "def f():\n    from ours.stays import Deep\n    from stays.inner.strategies import Other\n"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), REWRITTEN, ids=[repr(old)[:50] for old, _ in REWRITTEN])
def test_imports_are_rewritten(old: str, new: str | None) -> None:
    expected = old if new is None else new
    got = rewritten(old, TABLES)
    assert got == expected
    ast.parse(got)
    assert rewritten(got, TABLES) == got  # idempotent


JUDGED = [
    ("from foreignlib import launch", ("foreignlib.launch", "same", "")),
    ("import foreignlib\nforeignlib.nn.Linear.from_float()", ("foreignlib.nn.Linear", "same", "")),
    ("from foreignlib.nn import Wide", ("foreignlib.nn.Wide", "another name", "Bilinear: its inputs differ")),
    ("from foreignlib import nn as n\nn.old.Odd()", ("foreignlib.nn.old.Odd", "missing", "use Linear")),
    ("from foreignlib.tracing.deep import T", ("foreignlib.tracing.deep.T", "missing", "trace with torch.fx")),
    ("from foreignlib.nn import Linaer", ("foreignlib.nn.Linaer", "missing", "there is no such name; did you mean")),
    ("from foreignlib.nn import *", ("foreignlib.nn.*", "differs", "import names one by one")),
    ("from foreignlib.nn.modules import Linear as L\nm = L(in_features=1, fast=True, magic=0)",
     ("foreignlib.nn.modules.Linear", "same", ""),
     ("foreignlib.nn.modules.Linear(fast=)", "ignored", "it is always fast"),
     ("foreignlib.nn.modules.Linear(magic=)", "missing", "leave it out")),
    ("from foreignlib.parts import Odd, Other, Third",
     ("foreignlib.parts.Odd", "missing", "leave it out"),
     ("foreignlib.parts.Other", "missing", "use parts.Odd"),
     ("foreignlib.parts.Third", "missing", "leave it out")),
    ("from stays.inner.strategies import Other, Gone", ("stays.inner.strategies.Gone", "missing", "use Deep")),
    ("import stays.inner as s\ns.strategies.Old, s.strategies.Other",
     ("stays.inner.strategies.Old", "missing", "import New from ours.more; --write changes no attributes")),
    ("import foreignlib\nforeignlib.tools.start(1)\nfrom foreignlib.tools.start import go",
     ("foreignlib.tools.start", "missing", "call it by hand"), ("foreignlib.tools.start.go", "same", "")),
    # Argument values that have another name here, and those of a class that two packages export.
    ("from stays import Trainer\nimport stays.inner as s\nTrainer(kind='deep_3', file=1)\n"
     "s.Trainer(kind='a' if x else 'deep_3', file=None)\nTrainer(kind='plain')",
     ("stays.inner.Trainer(kind='deep_3')", "missing", "write kind='ours_deep_3' after `import ours.stays`"),
     ("stays.inner.Trainer(file=)", "missing", "leave it out")),
    ("import ours.stays\nfrom stays.inner import Trainer\nTrainer(kind='deep_3')",),
    # A program whose imports are rewritten; other names of ours are not those of the library.
    ("import ours.foreignlib as foreignlib\nfrom ours.foreignlib import own\nfrom ours.foreignlib.nn.old import Odd",
     ("foreignlib.nn.old.Odd", "missing", "use Linear")),
]  # fmt: skip


@pytest.mark.parametrize("row", JUDGED, ids=[text[:50] for text, *_ in JUDGED])
def test_verdict_of_each_name(row: tuple[Any, ...]) -> None:
    text, *expected = row
    got = findings(text, TABLES)
    assert [(each.name, each.verdict) for each in got] == [(name, verdict) for name, verdict, _ in expected]
    for each, (_, _, start) in zip(got, expected, strict=True):
        assert each.text.startswith(start) and bool(each.text) == bool(start)
        assert each.lines and all(each.lines)


def test_markdown_table_has_every_name() -> None:
    text = markdown([WHOLE])
    assert text.startswith("# Names of `foreignlib`\n") and "imported as before" in markdown([PARTIAL])
    assert "| `foreignlib.nn` | `Linear`, `Wide` |" in text
    assert "| use Linear | `foreignlib.nn.old.Odd` |" in text and "| `foreignlib.tracing.*` |" in text
    assert "`foreignlib.parts` (all other names)" in text
    assert "| `foreignlib.nn.Linear(fast=)` | ignored: it is always fast |" in text


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.compat.alias_tables", lambda: TABLES)


def test_diff_and_write(known: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, other = tmp_path / "train.py", tmp_path / "deep" / "other.py"
    for name in ("deep", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "other.py").write_text("import os\n")
    old = "# -*- coding: latin-1 -*-\r\n# \xe9\r\nfrom foreignlib.nn import Linear, Odd\r\n".encode("latin-1")
    program.write_bytes(old)
    program.chmod(0o750)

    assert main(["port", "--diff", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "train.py" in shown and "foreignlib.nn.Odd" in shown and "missing: there is no such name" in shown
    assert "+from ours.foreignlib.nn import Linear, Odd" in shown
    assert "2 names and arguments: 1 same, 1 missing; 1 of 2 files to change" in shown
    assert program.read_bytes() == old

    assert main(["port", "--write", "--missing", str(program)]) == 1
    assert "Linear " not in capsys.readouterr().out
    assert program.read_bytes() == old.replace(b"foreignlib", b"ours.foreignlib")
    assert stat.S_IMODE(program.stat().st_mode) == 0o750 and other.read_text() == "import os\n"


def test_invalid_input(known: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port", str(tmp_path)]) == 2 and "no Python file in" in capsys.readouterr().err
    for content, name, message in (
        (b'{{"cells": null', "a.ipynb", "a.ipynb: not Python"),
        (b"x = '\xe9'\n", "latin.py", "latin.py: not Python (invalid or missing encoding"),
        (b"x = 1\nimport = 2\n", "bad.py", "bad.py: not Python (invalid syntax"),
        (b"x = 1\0", "zeros.py", "zeros.py: not Python"),
        (b"", "", "no FILE"),
        (b"", "/nowhere.py", "port: error: /nowhere.py: No such file"),
        (b"", "--table nothing", "--table nothing: no such library; give one of colossalai, deepspeed"),
    ):
        if content:
            (tmp_path / name).write_bytes(content)
        assert main(["port", *([str(tmp_path / name)] if content else name.split())]) == 2
        assert message in capsys.readouterr().err


def test_version_attributes_are_aliases() -> None:
    text = "import colossalai, deepspeed\nprint(colossalai.__version__, deepspeed.__version__)\n"
    found = [(each.name, each.verdict) for each in findings(text, alias_tables())]
    assert found == [("colossalai.__version__", "same"), ("deepspeed.__version__", "same")]
