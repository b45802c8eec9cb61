"""The tables of foreign names: each is in order, what works is there, and what cannot says what to do when used."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

import shardwise.compat
from shardwise.cli.main import main
from shardwise.compat import Alias, Unsupported, UnsupportedName, alias_table
from shardwise.compat.table import ANY_NAME, HOMES

FILES = sorted(Path(shardwise.compat.__file__).parent.glob("*.toml"))
KEYS = {"version", "partial", "also", "here", "differs", "absent", "ignored", "refused", "values"}
OLDER = {
    "ColossalAIPrecisionPlugin",
    "ColossalAIStrategy",
    "DDPFullyShardedPlugin",
    "DDPFullyShardedStrategy",
    "DeepSpeedPlugin",
}
"""Names of Lightning 1.x, which later releases do not have."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_in_order(file: Path) -> None:
    table = tomllib.loads(file.read_text("utf-8"))
    assert Version(table["version"]) and table.keys() <= KEYS
    for section in KEYS & table.keys() - {"version", "partial", "also"}:
        assert list(table[section]) == sorted(table[section]), section
        seen = set[tuple[str, str]]()
        for said, rows in table[section].items():
            rows.pop("unless", None)
            assert said.strip() and rows and list(rows) == sorted(rows), said
            for place, names in rows.items():
                assert names and names == sorted(names), (said, place)
                told = {(place, name) for name in names}
                assert not seen & told, (said, place)
                seen |= told
        table[section] = seen
    assert not table["here"] & table.get("absent", set())  # one of them would win in silence
    assert table.get("differs", set()) <= table["here"]


@pytest.mark.parametrize("foreign", HOMES)
def test_every_name_is_here_or_says_what_to_do_when_it_is_used(foreign: str) -> None:
    table = alias_table(foreign)
    for path, name, entry in table.entries():
        if isinstance(entry, Alias):
            ours = getattr(import_module(entry.module), entry.name)
            if table.partial and name not in OLDER:  # which stays beside us
                assert hasattr(import_module(table.full_name(path)), name), (path, name)
        if table.home == "shardwise.huggingface":  # whose modules nobody imports under ours
            continue
        module: Any = import_module(f"{table.home}.{path}".rstrip("."))
        found = getattr(module, "anything" if name == ANY_NAME else name)
        if isinstance(entry, Alias):
            assert found is ours or isinstance(found, ModuleType), (path, name)  # a file of ours goes before a name
            continue
        assert isinstance(entry, Unsupported) and not isinstance(object(), found)
        with pytest.raises(UnsupportedName) as caught:
            found(1, key=2)
        assert str(caught.value).startswith(f"{foreign}.") and entry.instead in str(caught.value)


@pytest.mark.parametrize("foreign", HOMES)
def test_arguments_and_values_are_of_names_that_work(foreign: str) -> None:
    table = alias_table(foreign)
    for place in {*table.ignored, *table.refused}:
        path, name = place.split(":")
        assert isinstance(table.find(path, name.split(".")[0]), Alias), place
    for place in table.values:
        path, name = place.partition("(")[0].split(":")
        assert hasattr(import_module(table.full_name(path)), name), place


PAGES = {
    "porting-colossalai.md": ["colossalai"],
    "porting-deepspeed.md": ["deepspeed"],
    "porting-lightning.md": [
        "lightning.pytorch",
        "pytorch_lightning",
        "lightning.fabric",
        "lightning_fabric",
        "lightning_colossalai",
    ],
    "porting-huggingface.md": ["transformers", "accelerate"],
}


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_tables(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port", "--table", *PAGES[page]]) == 0
    text = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8")
    assert capsys.readouterr().out == text, (
        f"write it anew: shardwise port --table {' '.join(PAGES[page])} > docs/{page}"
    )
