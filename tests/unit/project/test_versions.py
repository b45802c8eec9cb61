"""Tests of the supported versions and of the pages on front-ends.

All files of the project agree on the supported releases of Python and torch, and the table in ``docs/versions.md`` is
read as it was written. The page of each front-end has every argument, and every DeepSpeed key that is used.
"""

import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest

import shardwise.pytorch
from shardwise.booster import plugin
from shardwise.core.checkpoint import Checkpointer
from shardwise.deepspeed.schema import KEYS
from tests.matrix import environment, table
from tests.matrix.cells import ROOT, cells, constraints, dotted, minor_of, pins, supported
from tests.matrix.table import Row, read, written

PYTHONS, TORCHES = supported()
FIRST, LAST = dotted(PYTHONS[0]), dotted(PYTHONS[-1])


def text_of(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


# ---- files of the project


def test_this_python_and_torch_are_supported() -> None:
    import torch

    assert sys.version_info[:2] in PYTHONS and minor_of(torch.__version__) in TORCHES


def test_makefile_has_the_supported_versions() -> None:
    makefile = text_of("Makefile")
    low, high = PYTHONS[0], PYTHONS[-1]
    assert f"sys.exit(not {low} <= sys.version_info[:2] <= {high})" in makefile
    names = re.search(r"(?m)^PYTHONS := (.+)$", makefile)
    assert names is not None and names[1].split() == [f"python{dotted(python)}" for python in reversed(PYTHONS)]
    release = re.search(r"(?m)^TORCH \?= (.+)$", makefile)
    assert release is not None and minor_of(release[1]) in TORCHES


@pytest.mark.parametrize("path", ["Makefile", "README.md", "CONTRIBUTING.md", "docs/versions.md"])
def test_pages_have_the_supported_versions(path: str) -> None:
    said = re.findall(r"Python (3\.\d+) (?:to|or) (3\.\d+)", text_of(path))
    assert said and set(said) == {(FIRST, LAST)}
    releases = set(re.findall(r"torch (2\.\d+) to (2\.\d+)", text_of(path)))
    assert releases or path in ("Makefile", "CONTRIBUTING.md")
    assert releases <= {(dotted(TORCHES[0]), dotted(TORCHES[-1]))}


def test_mypy_and_ruff_use_the_oldest_python_and_ci_runs_all() -> None:
    tools = tomllib.loads(text_of("pyproject.toml"))["tool"]
    assert tools["mypy"]["python_version"] == FIRST and tools["ruff"]["target-version"] == f"py{FIRST.replace('.', '')}"
    found = re.search(r"python: \[(.+)\]", text_of(".github/workflows/ci.yml"))
    assert found is not None and found[1].replace('"', "").split(", ") == [dotted(python) for python in PYTHONS]


def test_every_release_of_torch_has_its_constraints() -> None:
    there = {path.name for path in (ROOT / "constraints").glob("torch-*.txt")}
    assert there == {constraints(torch).name for torch in TORCHES}
    for torch in TORCHES:
        found = pins(constraints(torch))
        assert minor_of(found["torch"]) == torch and {"setuptools", "numpy", "pytest", "lightning"} <= found.keys()


def test_table_has_every_version_and_none_failed() -> None:
    rows = read(table.PAGE.read_text("utf-8"))
    assert rows.keys() <= set(cells())
    assert [row for row in rows.values() if not row.good] == [], "raise a bound when its cells pass"
    for minor in (*PYTHONS, *TORCHES):
        assert any(minor in (cell.python, cell.torch) for cell in rows), f"{minor} was not tried"


def test_short_set_exists() -> None:
    for name in environment.SHORT_SET:
        path, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}" in text_of(path)


# ---- tests.matrix.table


PAGE = f"# Versions\n\nBefore.\n\n{table.BEGIN}\n{table.HEAD}{table.END}\n\nAfter.\n"
DONE = Row("3.12.1", "2.13.0+cpu", "2026-01-02", 812, 0)


def test_rows_are_written_and_read() -> None:
    later = Row("3.14.0", "2.11.0", "2026-01-02")
    text = written(PAGE, {row.cell: row for row in (later, DONE)})
    assert read(text) == {DONE.cell: DONE, later.cell: later}
    assert text.index("3.12.1") < text.index("3.14") and text.startswith("# Versions") and text.endswith("\n\nAfter.\n")
    assert written(text, read(text)) == text
    assert DONE.good and not later.good
    assert not Row("3.12.1", "2.13.0", "2026-01-02", 1, 1).good


DOCS = Path(__file__).parents[3] / "docs"


def section(page: str, name: str) -> str:
    """Return the text below a second-level heading."""
    text = (DOCS / page).read_text("utf-8")
    begin = text.index(f"\n## {name}\n")
    end = text.find("\n## ", begin + 1)
    return text[begin:] if end < 0 else text[begin:end]


def missing(names: Iterable[str], text: str) -> list[str]:
    return [name for name in names if name not in ("self", "args", "kwargs") and not re.search(rf"\b{name}\b", text)]


PLUGINS = "booster-plugins.md"
ZERO = "LowLevelZeroPlugin"
"""Its section describes the loss scale, which the sections of the other plugins do not repeat."""
PLANS = ("plan_of_ddp", "plan_of_fsdp", "plan_of_fully_shard")
PAGES: list[tuple[Callable[..., object], Callable[[], str]]] = [
    *((getattr(plugin, n), partial(section, PLUGINS, n)) for n in (ZERO, "TorchDDPPlugin", "TorchFSDPPlugin")),
    (plugin.GeminiPlugin, lambda: section(PLUGINS, "GeminiPlugin") + section(PLUGINS, ZERO)),
    (plugin.HybridParallelPlugin, lambda: section(PLUGINS, "HybridParallelPlugin") + section(PLUGINS, ZERO)),
    *((getattr(shardwise.pytorch, name), partial(section, "from-torch.md", f"`{name}`")) for name in PLANS),
    *((call, lambda: section("checkpoints.md", "Arguments")) for call in (Checkpointer.save, Checkpointer.load)),
]


@pytest.mark.parametrize(("function", "text"), PAGES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_page_of_a_front_end_has_its_arguments(function: Callable[..., object], text: Callable[[], str]) -> None:
    arguments = set(inspect.signature(function).parameters) - {"model", "module"}
    assert len(arguments) > 5 and missing(arguments, text()) == []


def test_deepspeed_page_has_every_used_key() -> None:
    used = [path.rpartition(".")[2] for path, key in KEYS.items() if key.role == "used"]
    text = "".join((DOCS / page).read_text("utf-8") for page in ("deepspeed-keys.md", "deepspeed-rare.md"))
    assert len(used) > 50 and missing(used, text) == []


@pytest.mark.parametrize("name", ["ColossalAIStrategy", "DeepSpeedStrategy", "DDPFullyShardedStrategy"])
def test_lightning_page_has_all_arguments(name: str) -> None:
    pytest.importorskip("lightning")
    strategy = getattr(importlib.import_module("shardwise.lightning"), name)
    page = "lightning.md" if name == "DeepSpeedStrategy" else "lightning-strategies.md"
    own = (DOCS / "lightning.md").read_text("utf-8").partition("\n## Training with the Trainer")[0]  # of all three
    assert missing(inspect.signature(strategy).parameters, own + section(page, name)) == []
