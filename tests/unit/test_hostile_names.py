"""Names, sizes and counts that no file can mean: refused in words that can be shown, before they cost anything."""

from __future__ import annotations

import contextlib
import json
import zipfile
from pathlib import Path

import pytest
import torch

from shardwise.core.checkpoint.bounds import checked_name, reading
from shardwise.core.checkpoint.formats.deepspeed import find_step
from shardwise.core.checkpoint.formats.detect import open_checkpoint
from shardwise.core.checkpoint.formats.native import write_native
from shardwise.core.checkpoint.formats.torch_file import RefusedPickle
from shardwise.core.checkpoint.schedulers import fitting_state, read_lr_scheduler
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError
from shardwise.core.checkpoint.write import agree
from shardwise.deepspeed.saving import _place as parts_place
from tests.faults.fuzz.changes import apply_change
from tests.unit.formats_setup import odd_source


def test_expanded_tensors_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    large = torch.zeros(1).expand(2**45)
    optimizer = {"state": {}, "param_groups": [{"params": [], "capturable": large}]}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, tmp_path / "m.pt")
    torch.save({"last_epoch": [large]}, tmp_path / "s.pt")
    torch.save({"w": large}, tmp_path / "w.pt")
    for name in ("m.pt", "w.pt"):
        with pytest.raises(CheckpointDamage, match="expanded tensors would be"):
            open_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointDamage, match="expanded tensors would be"):
        read_lr_scheduler(tmp_path / "s.pt")
    tied = torch.zeros(100).expand(20_000, 100)  # 8 MB, under many names
    torch.save({f"w{number}": tied for number in range(10)} | {"own": torch.ones(3)}, tmp_path / "tied.pt")
    source = open_checkpoint(tmp_path / "tied.pt")
    assert torch.equal(source.read("model/w0", 100, 5), torch.zeros(5))
    source.close()


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


def test_a_path_that_is_too_long_with_its_directory_is_damage() -> None:
    with pytest.raises(CheckpointDamage, match="too long"), reading("an index"):
        Path("a" * 300).is_file()


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


def test_a_number_of_ranks_is_compared_and_not_counted_out(tmp_path: Path) -> None:
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    optimizer = {"optimizer_state_dict": {"partition_count": [2**62, 2**62], "zero_stage": 1}}
    torch.save(optimizer, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointDamage, match=f"{2**62} ranks saved"):
        open_checkpoint(tmp_path)


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


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_name_with_line_ends_is_told_in_one_line(tmp_path: Path) -> None:
    # GLOBAL's arguments end with their lines; those of STACK_GLOBAL are texts.
    names = b"\x8c\x05torch\x8c\x09float3\n\x1b[\x93"
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + names + b".")
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x04" + names + b".")
        archive.writestr("m/version", "3\n")
    for path in (tmp_path, tmp_path / "m.pt"):
        with pytest.raises(RefusedPickle) as caught:
            open_checkpoint(path)
        assert str(caught.value).isprintable(), str(caught.value)
        assert path != tmp_path or r"torch.float3\n\x1b[" in str(caught.value)


BAD = "w\nshardwise: all is well\x1b["


def test_names_in_an_index_are_looked_at_before_they_are_told(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {BAD: "m.safetensors"}}))
    with pytest.raises(CheckpointDamage, match="which is not printable text"):
        open_checkpoint(tmp_path)
    torch.save({BAD: torch.eye(2).to_sparse()}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "m.pt")
    assert str(caught.value).isprintable()


def test_a_note_is_one_line(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), BAD: "text"}, tmp_path / "m.pt")
    with contextlib.closing(open_checkpoint(tmp_path / "m.pt")) as source:
        notes = getattr(source, "notes", ())
    assert len(notes) == 1 and notes[0].isprintable() and r"w\nshardwise: all is well\x1b[" in notes[0]
