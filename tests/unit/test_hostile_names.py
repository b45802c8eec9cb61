"""Names, sizes and counts that no file can mean: refused in words that can be shown, before they cost anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.core.checkpoint.bounds import checked_name
from shardwise.core.checkpoint.formats.deepspeed import find_step
from shardwise.core.checkpoint.formats.detect import open_checkpoint
from shardwise.core.checkpoint.formats.native import write_native
from shardwise.core.checkpoint.schedulers import fitting_state
from shardwise.core.checkpoint.source import CheckpointDamage
from shardwise.core.checkpoint.write import agree
from shardwise.deepspeed.saving import _place as parts_place
from tests.faults.fuzz.changes import apply_change
from tests.unit.formats_setup import odd_source

LONG = ["a" * 256, "ä" * 200, "a/" * 600 + "a", "x" * 100_000]
"""Names that no file can have, by their length in bytes."""


@pytest.mark.parametrize("name", LONG, ids=[0, 1, 2, 3])
def test_names_that_no_file_can_have_are_damage(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointDamage, match="not a plain name"):
        checked_name(name, "an index")
    shards, parts = tmp_path / "shards", tmp_path / "parts"
    for folder in (shards, parts):
        folder.mkdir()
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    index = {"weight_map": {}, "metadata": {"param_groups": name}}
    (parts / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
    saved = write_native(odd_source(), tmp_path / "saved")
    edit = {"op": "tree", "file": "manifest.json", "do": "set", "path": ["files", 0, 0], "value": name}
    apply_change(saved, edit)
    for folder in (shards, parts, saved):
        with pytest.raises(CheckpointDamage, match=r"not a plain name|does not name a file"):
            open_checkpoint(folder)
    step = tmp_path / "step"
    step.mkdir()
    (step / "latest").write_text(name)
    assert find_step(step) is None


def test_the_latest_of_an_engine_stays_in_its_directory(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root" / "mine").mkdir(parents=True)
    latest = tmp_path / "root" / "latest"
    assert parts_place(tmp_path / "root", None, "latest") is None
    latest.write_text("mine\n")
    assert parts_place(tmp_path / "root", None, "latest") == str(tmp_path / "root" / "mine")
    for name in ("../outside", str(outside), "a\0b", *LONG, "\x1b[2J"):
        latest.write_text(name)
        with pytest.raises(CheckpointDamage, match=r"not a plain name|no name has") as caught:
            parts_place(tmp_path / "root", None, "latest")
        assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()
    latest.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointDamage):
        parts_place(tmp_path / "root", None, "latest")


def test_what_a_file_says_is_shown_printable_in_every_error(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    torch.save({**scheduler.state_dict(), "a\0b\x1b[2J": 1}, tmp_path / "s.pt")
    with pytest.raises(ValueError, match=r"a\\x00b\\x1b\[2J") as caught:
        fitting_state(scheduler, tmp_path / "s.pt")
    assert str(caught.value).isprintable()

    def raising() -> None:
        raise ValueError("a\0b\x1b[2J\nand more")

    with pytest.raises(ValueError, match=r"a\\x00b\\x1b\[2J\nand more"):
        agree(lambda value: [value], "load it", raising)
