"""A share of the fault campaign (calls that fail, bytes that flip), and a save at its most delicate points."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from torch import nn

from shardwise.build import build
from shardwise.checkpoint.directory import CheckpointRoot, scan
from shardwise.checkpoint.file_system import FileSystem
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.formats.output import output_directory
from shardwise.checkpoint.read import verify
from shardwise.checkpoint.session import Checkpointer
from shardwise.plan import zero

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the campaign is a package beside these tests

from tests.faults import flips, io_errors, soak  # noqa: E402


def test_calls_that_fail_lose_nothing(tmp_path: Path) -> None:
    """Some of the system calls of each action, on either rank, with each error; ``make faults`` takes them all."""
    report = io_errors.campaign(12, str(tmp_path))
    assert report.lost == []
    kinds = {"open", "pwrite", "fsync of a file", "close of a file", "fsync of a directory", "rename", "preadv"}
    assert kinds <= report.counts.keys() and report.counts["injected"] > 70, report


def test_damage_of_every_kind_is_found() -> None:
    """Some bytes of every region, and some of the other faults; ``make faults`` takes them all."""
    report = flips.campaign(stride=151, bits=1)
    assert report.lost == []
    kinds = {"flipped in manifest", "flipped in header", "flipped in data", "swapped files", "missing file"}
    assert kinds <= report.counts.keys(), report


def test_a_soak_names_what_grows() -> None:
    steady = {"memory": 100 << 20, "objects": 1000, **dict.fromkeys(soak.EXACT, 7)}
    assert soak.judge([steady] * 50) == []
    for name in steady:
        step = 50 if name == "objects" else 50 << 10 if name == "memory" else 1
        (grown,) = soak.judge([{**steady, name: steady[name] + step * cycle // 2} for cycle in range(500)])
        assert grown.startswith(name), grown
    early = [{**steady, "memory": steady["memory"] - (50 << 20) // (1 + cycle)} for cycle in range(50)]
    assert soak.judge(early[10:]) != [], "what still rises in the second fifth is found"


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """Where names cannot be exchanged, the old checkpoint steps aside; if its successor never comes, it is found."""

    class Dying(FileSystem):
        renames = 0

        def exchange(self, one: str, other: str) -> bool:
            return False

        def rename(self, old: str, new: str) -> None:
            self.renames += 1
            if self.renames > 1:
                raise KeyboardInterrupt  # as good as dead: nothing is put back either
            super().rename(old, new)

    root = str(tmp_path)
    session = build(nn.Linear(3, 2), None, zero(3))
    Checkpointer(session).save(root, "same", user_state=1)
    owner = CheckpointRoot(root, Dying())
    owner._files.renames = 0
    hidden, _ = owner.prepare("same")
    (Path(hidden) / "x").write_text("x")
    with pytest.raises(KeyboardInterrupt):
        owner.commit(hidden, "same", b"{}")
    assert not (tmp_path / "same").exists()
    (found,) = scan(root)
    assert found.tag == "same" and verify(found.path) == []
    restored = Checkpointer(session).load(root)
    assert restored is not None and restored.user_state == 1
    owner.discard("nowhere")  # the lock of the dead process
    Checkpointer(session).save(root, "other", user_state=2)
    assert sorted(os.listdir(root)) == ["latest", "other", "same"]
    assert verify(tmp_path / "same") == []
    session.close()


def test_a_link_to_a_checkpoint_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    session = build(nn.Linear(3, 2), None, zero(3))
    saver, root, elsewhere = Checkpointer(session), tmp_path / "runs", tmp_path / "elsewhere"
    saver.save(elsewhere, "best", user_state=1)
    root.mkdir()
    for tag in ("resaved", "purged"):
        (root / tag).symlink_to(elsewhere / "best")
    saver.save(root, "resaved", user_state=2)
    saver.save(root, "last", keep=2)
    assert sorted(os.listdir(root)) == ["last", "latest", "resaved"] and not (root / "resaved").is_symlink()
    assert verify(elsewhere / "best") == []
    restored = saver.load(elsewhere, "best")
    assert restored is not None and restored.user_state == 1
    session.close()


def test_a_link_to_a_model_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "notes").write_text("mine")
    (tmp_path / "model").symlink_to(tmp_path / "best")
    for text in ("one", "two"):
        with output_directory(tmp_path / "model", lambda name: name == "weights") as fresh:
            (fresh / "weights").write_text(text)
    assert sorted(os.listdir(tmp_path)) == ["best", "model"] and not (tmp_path / "model").is_symlink()
    assert sorted(os.listdir(tmp_path / "model")) == ["notes", "weights"]
    assert os.listdir(tmp_path / "best") == ["notes"]


def test_wrong_uses_are_errors(tmp_path: Path) -> None:
    session = build(nn.Linear(3, 2), None, zero(3))
    saver = Checkpointer(session)
    for tag in ("", "a/b", ".hidden", "latest", "auto"):
        with pytest.raises(ValueError, match="tag"):
            saver.save(tmp_path, tag)
    with pytest.raises(ValueError, match="keep=0"):
        saver.save(tmp_path, "a", keep=0)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="not a checkpoint"):
        saver.save(tmp_path, "mine")
    with pytest.raises(CheckpointError, match="TypeError: user_state is a set"):
        saver.save(tmp_path, "a", user_state={1})
    assert sorted(os.listdir(tmp_path)) == ["mine"]
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        saver.load(tmp_path)
    saver.save(tmp_path, "a")
    with pytest.raises(FileNotFoundError, match="there: a"):
        saver.load(tmp_path, "b")
    other = build(nn.Linear(3, 5), None, zero(3))
    with pytest.raises(ValueError, match=r"model/weight: \(2, 3\) in the checkpoint, \(5, 3\) in the model"):
        Checkpointer(other).load(tmp_path)
    third = build(nn.Sequential(nn.Linear(3, 2)), None, zero(3))
    with pytest.raises(
        ValueError, match=r"missing from the checkpoint: 0.weight, 0.bias\n  not in the model: bias, weight"
    ):
        Checkpointer(third).load(tmp_path)
    restored = Checkpointer(third).load(tmp_path, strict=False)
    assert restored is not None and restored.missing == ("0.weight", "0.bias")
    for each in (session, other, third):
        each.close()
