"""What is said of a program's foreign names, and its text with ours."""

from __future__ import annotations

import ast
import os
import re
import stat
from importlib import import_module
from pathlib import Path

import pytest
from program_setup import forked_python, python
from sets import campaign

from shardwise.cli.main import main
from shardwise.port import Program, findings, markdown, rewritten, worlds
from shardwise.worlds.table import parse_world

WHOLE = parse_world(
    "foreignlib",
    "ours.foreignlib",
    """
version = "1.0"
[here."shardwise.mesh:init_distributed"]
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
[refused."leave it out"]
"nn:Linear" = ["magic"]
""",
)
PARTIAL = parse_world(
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
WORLDS = (WHOLE, PARTIAL)

REWRITTEN = [
    ("import foreignlib\n", "import ours.foreignlib as foreignlib\n"),
    ("import foreignlib as f\n", "import ours.foreignlib as f\n"),
    ("import os, foreignlib.nn, sys\n", "import os, ours.foreignlib.nn, ours.foreignlib as foreignlib, sys\n"),
    ("import foreignlib.nn as n  # é\n", "import ours.foreignlib.nn as n  # é\n"),
    ("from foreignlib import nn\n", "from ours.foreignlib import nn\n"),
    ("if 'é': from foreignlib.nn import (Linear,  # why\n  Wide)\n",
     "if 'é': from ours.foreignlib.nn import (Linear,  # why\n  Wide)\n"),
    ("from \\\n  foreignlib.nn import Linear\r\nx = 1\r\n", "from \\\n  ours.foreignlib.nn import Linear\r\nx = 1\r\n"),
    ("import foreignlibrary\nfrom . import foreignlib\nfrom foreign import lib\n", None),
    ("mock.patch('foreignlib.nn.Linear', 'foreignlib.nn')\nopen('foreignlib.nn')\nd['foreignlib.nn']\n",
     "mock.patch('ours.foreignlib.nn.Linear', 'foreignlib.nn')\nopen('foreignlib.nn')\nd['foreignlib.nn']\n"),
    ("import_module('foreignlib')\nimport_module('foreignlib.nn')\nimport_module('foreignlib.x')\n",
     "import_module('ours.foreignlib')\nimport_module('ours.foreignlib.nn')\nimport_module('foreignlib.x')\n"),
    ("from ours.foreignlib.nn import Linear\n", None),
    ("from importlib import import_module as load\nload('foreignlib.nn')\n",
     "from importlib import import_module as load\nload('ours.foreignlib.nn')\n"),
    # A library that stays: what is ours moves, and the rest stays.
    ("from stays.inner.strategies import Other\n", None),
    ("from stays.inner.strategies import Deep\n", "from ours.stays import Deep\n"),
    ("from stays.inner.strategies import Deep as D, Old\n",
     "from ours.more import New as Old\nfrom ours.stays import Deep as D\n"),
    ("def f():\n    from stays.inner.strategies import Deep, Other\n",
     "def f():\n    from ours.stays import Deep\n    from stays.inner.strategies import Other\n"),
    ("from stays.inner.strategies import (\n    Other,  # one\n    Deep,\n    More,  # two\n    Old,\n)\n",
     "from ours.stays import Deep\nfrom ours.more import New as Old\n"
     "from stays.inner.strategies import (\n    Other,  # one\n    More,\n)\n"),
    ("x = 1; from stays.inner.strategies import Deep, Other\n",
     "x = 1; from ours.stays import Deep; from stays.inner.strategies import Other\n"),
    ("import stays.inner as s\na = s.strategies.Deep(s.Trainer)\nb = s.strategies.Deep\n",
     "import ours.stays\nimport stays.inner as s\na = ours.stays.Deep(s.Trainer)\nb = ours.stays.Deep\n"),
    ("from stays import inner as s\nfrom stays.inner import strategies as t\na = s.strategies.Deep, t.Old\n",
     "import ours.more\nimport ours.stays\nfrom stays import inner as s\nfrom stays.inner import strategies as t\n"
     "a = ours.stays.Deep, ours.more.New\n"),
    ("'Text.'\nfrom __future__ import annotations\ndef f():\n    import stays.inner as s\n    s.strategies.Deep\n"
     "def g():\n    import stays.inner as s\n    s.strategies.Deep\n",
     "'Text.'\nfrom __future__ import annotations\nimport ours.stays\ndef f():\n    import stays.inner as s\n"
     "    ours.stays.Deep\ndef g():\n    import stays.inner as s\n    ours.stays.Deep\n"),
    ("try:\n    import stays.inner as s\nexcept ImportError:\n    import other as s\ns.strategies.Deep\n", None),
    ("import stays.inner.strategies\na = stays.inner.strategies.Old().x\n",
     "import ours.more\nimport stays.inner.strategies\na = ours.more.New().x\n"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), REWRITTEN, ids=[repr(old)[:50] for old, _ in REWRITTEN])
def test_imports_are_ours_and_all_else_stays(old: str, new: str | None) -> None:
    expected = old if new is None else new
    got = rewritten(Program(old, WORLDS))
    assert got == expected
    ast.parse(got)
    assert rewritten(Program(got, WORLDS)) == got  # a second time there is nothing to do


JUDGED = [
    ("from foreignlib import launch", [("foreignlib.launch", "same", "")]),
    ("import foreignlib\nforeignlib.nn.Linear.from_float()", [("foreignlib.nn.Linear", "same", "")]),
    ("from foreignlib.nn import Wide", [("foreignlib.nn.Wide", "another name", "Bilinear: its inputs differ")]),
    ("from foreignlib import nn as n\nn.old.Odd()", [("foreignlib.nn.old.Odd", "missing", "use Linear")]),
    ("from foreignlib.tracing.deep import T", [("foreignlib.tracing.deep.T", "missing", "trace with torch.fx")]),
    ("import foreignlib.tracing", [("foreignlib.tracing", "missing", "trace with torch.fx")]),
    ("from foreignlib.nn import Linaer", [("foreignlib.nn.Linaer", "missing", "nothing of that name here; 'Linear'")]),
    ("from foreignlib import Linear", [("foreignlib.Linear", "missing", "import it from foreignlib.nn or ")]),
    ("from foreignlib.nn import *", [("foreignlib.nn.*", "differs", "import names one by one")]),
    (
        "from foreignlib.nn import Linear as L\nm = L(in_features=1, out=2, fast=True, magic=0)",
        [
            ("foreignlib.nn.Linear", "same", ""),
            ("foreignlib.nn.Linear(fast=)", "ignored", "it is always fast"),
            ("foreignlib.nn.Linear(in_features=)", "same", ""),
            ("foreignlib.nn.Linear(magic=)", "missing", "leave it out"),
            ("foreignlib.nn.Linear(out=)", "missing", "no argument of that name here"),
        ],
    ),
    (
        "from foreignlib.nn.modules import Linear\nLinear(1, 2, fast=True)",
        [
            ("foreignlib.nn.modules.Linear", "same", ""),
            ("foreignlib.nn.modules.Linear(fast=)", "ignored", "it is always fast"),
        ],
    ),
    (
        "from foreignlib.optim import SGD\nm = SGD(p)\nm.step()\nm.state\nm.fly()",
        [
            ("foreignlib.optim.SGD", "same", ""),
            ("foreignlib.optim.SGD().step", "same", ""),
            ("foreignlib.optim.SGD().state", "same", ""),
            ("foreignlib.optim.SGD().fly", "missing", "SGD has none of that name here"),
        ],
    ),
    ("from foreignlib.optim import SGD\nm = SGD(p)\nn, m = wrap(m)\nm.fly()", [("foreignlib.optim.SGD", "same", "")]),
    ("from foreignlib.nn import Linear\nm = Linear(1, 2)\nm.weights_of_mine", [("foreignlib.nn.Linear", "same", "")]),
    (
        "import foreignlib as f\nimport stays.other as s\nif f:\n    import stays.inner.strategies as s\ns.Deep",
        [("stays.inner.strategies.Deep", "missing", "the name is imported from two libraries; take ours.stays.Deep")],
    ),
    (
        "import_module(f'foreignlib.{x}')\n__import__('foreignlib.nn')\nimport_module('other')",
        [
            ("import_module(f'foreignlib.{x}')", "differs", "the name of a module is made"),
            ("__import__('foreignlib.nn')", "differs", "the name of a module is made"),
        ],
    ),
    ("from stays.inner.strategies import Other, Gone", [("stays.inner.strategies.Gone", "missing", "use Deep")]),
    ("from ours.foreignlib.nn import Linear", [("foreignlib.nn.Linear", "same", "")]),
    ("import os\nos.path.join('a')\nfrom . import x", []),
    ("import foreignlib.nn\nforeignlib.nn.__name__, foreignlib.__path__, foreignlib.__file__",
     [("foreignlib.__file__", "missing", "nothing of that name here")]),
    # Names that are reached in other ways.
    (
        "from importlib import import_module as load\nm = load('foreignlib.nn')\nm.Linear(1, fast=True)\nm.old.Odd",
        [
            ("foreignlib.nn.Linear", "same", ""),
            ("foreignlib.nn.Linear(fast=)", "ignored", "it is always fast"),
            ("foreignlib.nn.old.Odd", "missing", "use Linear"),
        ],
    ),
    ("import foreignlib\ngetattr(foreignlib.nn.old, 'Odd')()", [("foreignlib.nn.old.Odd", "missing", "use Linear")]),
    (
        "from foreignlib.nn import *\nimport x as Wide\nLinear(fast=True)\nWide, start",
        [
            ("foreignlib.nn.*", "differs", "import names one by one"),
            ("foreignlib.nn.Linear", "same", ""),
            ("foreignlib.nn.Linear(fast=)", "ignored", "it is always fast"),
        ],
    ),
    (
        "import foreignlib as f, functools\nfunctools.partial(f.nn.Linear, magic=1)\nf.launch().run()\n"
        "f.optim.SGD(p).fly()",
        [
            ("foreignlib.nn.Linear", "same", ""),
            ("foreignlib.nn.Linear(magic=)", "missing", "leave it out"),
            ("foreignlib.launch", "same", ""),
            ("foreignlib.optim.SGD", "same", ""),
            ("foreignlib.optim.SGD().fly", "missing", "SGD has none of that name here"),
        ],
    ),
    (
        "import sys, importlib.metadata as m\nm.version('foreignlib')\nsys.modules['foreignlib.nn']\n"
        "'foreignlib' in sys.modules\nsys.modules.get('foreignlib')\nm.version('other'), sys.modules['stays.inner']",
        [
            ("m.version('foreignlib')", "missing", "nothing of that name is there; take ours.foreignlib.__version__"),
            ("sys.modules['foreignlib.nn']", "missing", "nothing of that name is there; take 'ours.foreignlib.nn'"),
            ("'foreignlib' in sys.modules", "missing", "nothing of that name is there; take 'ours.foreignlib'"),
            ("sys.modules.get('foreignlib')", "missing", "nothing of that name is there; take 'ours.foreignlib'"),
        ],
    ),
    ("from stays.inner import strategies as s\ngetattr(s, 'Deep')",
     [("stays.inner.strategies.Deep", "missing", "the name is in quotes; take ours.stays.Deep")]),
    (
        "import foreignlib\nforeignlib.Odd, foreignlib.old",
        [
            ("foreignlib.Odd", "missing", "use Linear"),
            ("foreignlib.old", "missing", "its names are in foreignlib.nn.old"),
        ],
    ),
    (
        "import foreignlib\nforeignlib.tools.start(1)\nfrom foreignlib.tools.start import go\n"
        "import foreignlib.tools.start",
        [("foreignlib.tools.start", "missing", "call it by hand"), ("foreignlib.tools.start.go", "same", "")],
    ),
    # Values that mean something here under another name, and those of a name that another package shows again.
    (
        "from stays import Trainer\nimport stays.inner as s\nkind = 'deep_3'\nTrainer(kind=kind, file=1)\n"
        "s.Trainer(kind='a' if x else 'deep_3', file=None)\nTrainer(kind='plain')",
        [
            ("stays.inner.Trainer(file=)", "missing", "leave it out"),
            ("stays.inner.Trainer(kind='deep_3')", "missing", "write kind='ours_deep_3' after `import ours.stays`"),
        ],
    ),
    *(
        (
            f"from stays import Trainer\n{before}Trainer({given})",
            [
                ("stays.inner.Trainer(file=)", "missing", "leave it out"),
                ("stays.inner.Trainer(kind='deep_3')", "missing", "write kind='ours_deep_3' after `import ours.stays`"),
            ],
        )
        for before, given in [
            ("kw = {'kind': 'deep_3', 'file': 1}\n", "**kw"),
            ("kw: dict[str, object] = dict(kind='deep_3', file=1)\n", "**kw"),
            ("name = 'deep_3'\ncommon = {'kind': name}; kw = {**common, 'file': 1}\n", "other=2, **kw"),
            ("", "**{'kind': 'deep_3', 'file': 1}"),
            ("kw = {}\nif x:\n    kw['file'] = 1\nkw['kind'] = 'deep_3'\n", "**kw"),
            ("kw = {'file': 1}\nkw.update({'kind': 'deep_3'}, other=2)\n", "**kw"),
            ("kw = dict(file=1)\nkw |= {'kind': 'deep_3'}\n", "**kw"),
            ("kw = made()\nkw.setdefault('kind', 'deep_3'); kw.update(file=1)\n", "**{**kw}"),
        ]
    ),
    ("from stays import Trainer\nkw, kw = {}, {}\nkw['kind'] = 'deep_3'\nTrainer(**kw)", []),
    ("from stays import Trainer\nkw = {}\nkw[made()] = kw.a['kind'] = 'deep_3'\nTrainer(**kw)", []),
    ("from stays import Trainer\nkw = {**kw, 'other': 'deep_3', 1: 2}\nTrainer(**kw, **made())", []),
    ("import ours.stays\nfrom stays.inner import Trainer\nTrainer(kind='deep_3')", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), JUDGED, ids=[text[:50] for text, _ in JUDGED])
def test_each_name_is_judged(text: str, expected: list[tuple[str, str, str]]) -> None:
    got = findings(Program(text, WORLDS))
    assert [(each.name, each.verdict.value) for each in got] == [(name, verdict) for name, verdict, _ in expected]
    for each, (_, _, start) in zip(got, expected, strict=True):
        assert each.text.startswith(start) and bool(each.text) == bool(start)
        assert each.lines and all(each.lines)


def test_the_table_of_a_page_has_every_name() -> None:
    text = markdown([WHOLE])
    assert text.startswith("# Names of foreignlib\n") and "names stay" in markdown([PARTIAL])
    assert "| `foreignlib.nn` | `Linear`, `Wide` |" in text
    assert "| `foreignlib.nn.old.Odd` | use Linear |" in text and "| `foreignlib.tracing.*` |" in text
    assert "| `foreignlib.nn.Linear(fast=)` | ignored: it is always fast |" in text


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.port.worlds", lambda: WORLDS)


def test_files_are_changed_when_asked_and_whole(
    known: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, other = tmp_path / "train.py", tmp_path / "deep" / "other.py"
    other.parent.mkdir()
    old = "# -*- coding: latin-1 -*-\r\n# \xe9\r\nfrom foreignlib.nn import Linear, Odd\r\n".encode("latin-1")
    program.write_bytes(old)
    other.write_text("import os\n")
    program.chmod(0o750)

    assert main(["port", "--diff", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "train.py" in shown and "foreignlib.nn.Odd" in shown and "missing: import it from" not in shown
    assert "+from ours.foreignlib.nn import Linear, Odd" in shown
    assert "2 names and arguments: 1 same, 1 missing; 1 of 2 files to change" in shown
    assert program.read_bytes() == old

    assert main(["port", "--write", "--missing", str(program)]) == 1
    assert "Linear " not in capsys.readouterr().out
    assert program.read_bytes() == old.replace(b"foreignlib", b"ours.foreignlib")
    assert stat.S_IMODE(program.stat().st_mode) == 0o750 and sorted(p.name for p in tmp_path.iterdir()) == [
        "deep",
        "train.py",
    ]


def test_a_folder_is_walked_as_its_author_means_it(
    known: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither hidden files nor libraries in it; what cannot be read is told of, and does not stop the rest."""
    home = tmp_path / ".hidden" / "project"
    for name in ("", "venv/lib", ".git", "deep"):
        (home / name).mkdir(parents=True, exist_ok=True)
        (home / name / "train.py").write_bytes(b"\xef\xbb\xbfimport foreignlib.nn as n\r\npattern = '\\d'\r\n")
    (home / "venv" / "pyvenv.cfg").touch()
    (home / "old.py").write_text("print 'two'\n")
    (home / "note.ipynb").write_text("{}")
    (home / "again.py").symlink_to("deep/train.py")
    monkeypatch.chdir(home / "deep")
    assert main(["port", "--write", ".."]) == 2
    told = capsys.readouterr()
    assert "2 of 2 files changed" in told.out and "SyntaxWarning" not in told.err
    assert "not read: ../note.ipynb: notebooks are not changed" in told.err
    assert "not read: ../old.py: line 1: is not Python" in told.err
    for name, changed in (("", True), ("deep", True), ("venv/lib", False), (".git", False)):
        text = (home / name / "train.py").read_bytes()
        start = b"ours.foreignlib" if changed else b"foreignlib"
        assert text == b"\xef\xbb\xbfimport " + start + b".nn as n\r\npattern = '\\d'\r\n"
    assert (home / "again.py").is_symlink()


TO_NOBODY = """
import os, runpy, sys
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 1)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_whoever_stops_reading_has_all_files_changed(whole: bool, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.py" for name in "abc"]
    for file in files:
        file.write_text("import deepspeed\ndeepspeed.init_distributed()\n")
    command = ["shardwise", "port", "--write", str(tmp_path)]
    if whole:
        reading, writing = os.pipe()
        os.close(reading)
        done = python("-u", "-m", *command, stdout=writing)
        os.close(writing)
    else:
        done = forked_python("-c", TO_NOBODY, *command)
    assert (done.returncode, done.stderr) == (141, "")
    assert all("shardwise.deepspeed" in file.read_text() for file in files)


def test_a_link_to_another_folder_stays_and_a_failed_write_leaves_the_file(
    known: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real" / "a.py", tmp_path / "links" / "b.py"
    for path in (real, link):
        path.parent.mkdir()
    real.write_text("import foreignlib\n")
    link.symlink_to(real)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        assert main(["port", "--write", str(link)]) == 2
    assert "b.py: No space left on device; it is as it was" in capsys.readouterr().err
    assert real.read_text() == "import foreignlib\n" and [each.name for each in real.parent.iterdir()] == ["a.py"]
    assert main(["port", "--write", str(link)]) == 0
    assert link.is_symlink() and real.read_text() == "import ours.foreignlib as foreignlib\n"
    assert [each.name for each in link.parent.iterdir()] == ["b.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no FILE"),
        (["/nowhere.py"], "/nowhere.py: no such file"),
        (["{tmp}/a.ipynb"], "a.ipynb: notebooks are not changed; save it as a program"),
        (["{tmp}/a.txt"], "a.txt: give Python programs"),
        (["{tmp}/good.py", "{tmp}/latin.py", "--write"], "latin.py: is not Python (invalid or missing encoding"),
        (["{tmp}/good.py", "{tmp}/fixed.py", "--write"], "fixed.py: is read-only; nothing was changed"),
        (["{tmp}/empty"], "no program"),
        (["{tmp}/good.py", "{tmp}/bad.py", "--write"], "bad.py: line 2: is not Python"),
        (["{tmp}/zeros.py"], "zeros.py: is not Python"),
        (["--table", "nothing"], "--table nothing: give one of foreignlib, stays.inner"),
    ],
)
def test_bad_input_changes_nothing(
    known: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.ipynb").write_text("{}")
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "fixed.py").write_text("import foreignlib\n")
    (tmp_path / "fixed.py").chmod(0o444)
    (tmp_path / "good.py").write_text("import foreignlib\n")
    (tmp_path / "bad.py").write_text("x = 1\nimport = 2\n")
    (tmp_path / "zeros.py").write_bytes(b"x = 1\0")
    assert main(["port", *(each.format(tmp=tmp_path) for each in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "good.py").read_text() == "import foreignlib\n"


def test_every_library_has_its_version() -> None:
    names = ("colossalai", "deepspeed")
    text = "".join(f"import {name}\nprint({name}.__version__)\n" for name in names)
    assert [(each.name, each.verdict.value) for each in findings(Program(text, worlds()))] == [
        (f"{name}.__version__", "same") for name in names
    ]


def test_names_of_strategies_that_are_advised_are_registered() -> None:
    """After the import that is advised with them."""
    advised = 0
    for world in worlds():
        for values in world.values.values():
            for value, said in values.items():
                match = re.match(r"write strategy='(\w+)', after `import ([\w.]+)`", said.instead)
                if match or said.unless == world.home:
                    name = match[1] if match else value
                    package = import_module(match[2] if match else world.home)
                    assert package.__name__ == world.home
                    registry = import_module(f"{world.foreign}.strategies")
                    known = getattr(registry, "StrategyRegistry", None) or registry.STRATEGY_REGISTRY
                    assert name in known.available_strategies(), (world.foreign, value)
                    advised += 1
    assert advised > 30
