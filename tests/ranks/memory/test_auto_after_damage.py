"""What ``"auto"`` says and does where damage shows only after values of a checkpoint were taken over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError
from shardwise.testing import run_ranks
from tests.faults.fuzz.changes import apply_change
from tests.faults.fuzz.subjects import EngineSubject
from tests.support.sets import full

TAKEN = "already loaded (load another checkpoint before going on)"


def save(root: str, tags: list[str]) -> None:
    subject = EngineSubject()
    for tag in tags:
        subject.step()
        subject.save(Path(root), tag)
    subject.session.close()


def loaded(root: str, strict: bool) -> tuple[str, str]:
    """The class and text of what a load raised, or the tag that it took and nothing."""
    subject = EngineSubject()
    subject.step()
    try:
        restored = subject.saver.load(root, "auto", strict=strict, lr_schedulers=[subject.scheduler])
        return (restored.tag, "") if restored is not None else ("", "")
    except (CheckpointError, ValueError) as error:
        return type(error).__name__, str(error)
    finally:
        subject.session.close()


def damage(folder: Path, name: str) -> None:
    """Another byte in the last piece of a tensor."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    file, offset, *_ = manifest["tensors"][name]["pieces"][-1]
    path = folder / manifest["files"][file][0]
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def without(folder: Path, name: str) -> None:
    """The checkpoint lacks a parameter, as that of a smaller model does."""
    path = ["tensors", f"model/{name}"]
    apply_change(folder, {"op": "tree", "file": "manifest.json", "do": "drop", "path": path})


@pytest.mark.parametrize("ranks", [1, *full(2)])
def test_auto_says_that_values_were_replaced_as_an_explicit_load_does(tmp_path: Path, ranks: int) -> None:
    run_ranks(ranks, save, str(tmp_path), ["old", "new"])
    damage(tmp_path / "new", "model/second.bias")
    assert run_ranks(ranks, loaded, str(tmp_path), True) == [("old", "")] * ranks
    damage(tmp_path / "old", "model/second.bias")
    for kind, text in run_ranks(ranks, loaded, str(tmp_path), True):
        assert kind == CheckpointDamage.__name__
        assert f"{tmp_path}/new, {tmp_path}/old were already loaded); load another copy" in text


def test_auto_does_not_go_on_with_what_a_damaged_checkpoint_left(tmp_path: Path) -> None:
    run_ranks(1, save, str(tmp_path), ["old", "new"])
    without(tmp_path / "old", "narrow")
    assert run_ranks(1, loaded, str(tmp_path / "old"), False) == [("old", "")]
    damage(tmp_path / "new", "model/second.bias")
    ((kind, text),) = run_ranks(1, loaded, str(tmp_path), False)
    assert kind == CheckpointError.__name__
    assert f"{tmp_path}/old does not replace narrow, which a damaged checkpoint changed" in text and TAKEN in text
