"""Files of another origin in a directory that a save replaces: taken along at once, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from shardwise.core.checkpoint.atomic import FileSystem, atomic_directory
from shardwise.core.checkpoint.directory import scan
from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.core.checkpoint.formats.native import verify, write_native
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.plan import zero
from shardwise.session import Session, build
from tests.support.launching import forked, start
from tests.support.sets import full


@pytest.fixture
def session() -> Iterator[Session]:
    made = build(nn.Linear(3, 2), None, zero(3))
    yield made
    made.close()


def put(folder: Path) -> dict[str, bytes]:
    """A user's files: plain, in folders of folders, empty folders, links to something, to nothing and to a folder, a
    hidden one, one of another mode, and names that nearly are the checkpoint's."""
    (folder / "logs" / "deep" / "er").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "pieces-7.safetensors").mkdir()
    names = ["notes", ".hidden", "logs/a", "logs/deep/er/b", "pieces-x.safetensors", "pieces-7.safetensors/mine"]
    for name in names:
        (folder / name).write_text(name)
    (folder / "secret").write_bytes(b"1")
    (folder / "secret").chmod(0 if os.geteuid() == 0 else 0o400)  # which root alone can read, and copy
    (folder / "logs" / "deep" / "er").chmod(0o500)
    (folder / "to-notes").symlink_to("notes")
    (folder / "to-nothing").symlink_to("/no/such/file")
    (folder / "to-logs").symlink_to("logs", target_is_directory=True)
    return user_files(folder)


def user_files(folder: Path) -> dict[str, Any]:
    """What is in ``folder`` and not the checkpoint's: by path its kind, mode and content."""
    found: dict[str, Any] = {}
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(place, name)
            short = str(path.relative_to(folder))
            if short == "manifest.json" or (short.startswith("pieces-0") and not path.is_dir()):
                continue
            content: Any = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
            found[short] = (path.lstat().st_mode, content)
    return found


class NoLinks(FileSystem):
    """A file system without hard links copies; one without an exchange of names renames twice."""

    def link(self, path: str, place: str) -> None:
        shutil.copy2(path, place, follow_symlinks=False)

    def exchange(self, one: str, other: str) -> bool:
        return False


@pytest.mark.parametrize("files", [FileSystem(), NoLinks()], ids=["links", "copies"])
def test_a_tag_that_is_saved_again_keeps_what_is_not_the_checkpoints(
    session: Session, tmp_path: Path, files: FileSystem
) -> None:
    saver = Checkpointer(session, files)
    saver.save(tmp_path, "best", user_state=1)
    before = put(tmp_path / "best")
    for version in (2, 3):
        saver.save(tmp_path, "best", user_state=version, use_async=version == 3)
        saver.wait_for_saves()
        assert user_files(tmp_path / "best") == before
        assert sorted(os.listdir(tmp_path)) == ["best", "latest"], "nothing hidden stays"
    assert verify(tmp_path / "best") == []
    restored = saver.load(tmp_path, "best")
    assert restored is not None and restored.user_state == 3
    saver.save(tmp_path, "other", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "other"], "keep removes a checkpoint with all that is in it"


def test_files_that_change_during_a_save_are_kept_as_they_are_last(session: Session, tmp_path: Path) -> None:
    """Between the moment at which they are taken along and that at which the directory is replaced."""

    class Busy(FileSystem):
        armed = False

        def exchange(self, one: str, other: str) -> bool:
            if self.armed:
                late = Path(other)
                (late / "new").write_text("new")
                (late / "logs" / "new").write_text("new")
                (late / "folder" / "inner").mkdir(parents=True)
                (late / "folder" / "inner" / "new").write_text("new")
                (late / "appended").open("a").write(" and more")
                (late / "partial").write_text("replaced")
                os.utime(late / "partial", (2e9, 2e9))
                os.rename(late / "partial", late / "replaced")
                (late / "gone-in-a-moment").write_text("")
                (late / "gone-in-a-moment").unlink()
            return super().exchange(one, other)

    files = Busy()
    saver, best = Checkpointer(session, files), tmp_path / "best"
    saver.save(tmp_path, "best")
    (best / "logs").mkdir()
    (best / "appended").write_text("first")
    (best / "replaced").write_text("old")
    files.armed = True
    saver.save(tmp_path, "best")
    found = {name: content for name, (_, content) in user_files(best).items()}
    assert found == {
        "appended": b"first and more",
        "replaced": b"replaced",
        "new": b"new",
        "logs": None,
        "logs/new": b"new",
        "folder": None,
        "folder/inner": None,
        "folder/inner/new": b"new",
    }
    assert sorted(os.listdir(tmp_path)) == ["best", "latest"]


class Killed(BaseException):
    """As good as: nothing is put back or tidied up after it."""


class Dying(FileSystem):
    """The process ends before the call number ``left``; ``change`` runs when names were exchanged."""

    def __init__(self, exchanging: bool) -> None:
        super().__init__()
        self.left, self.exchanging = -1, exchanging
        self.dead, self.lock = False, -1

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("left", "exchanging", "dead", "lock") or name.startswith("_") or not callable(found):
            return found

        def call(*args: Any) -> Any:
            if name == "exchange" and not self.exchanging:
                return False
            if self.left == 0:
                self.dead = True
            if self.dead and name != "close":  # the system closes what a process had open
                raise Killed
            self.left -= 1
            result = found(*args)
            if name == "lock_directory":
                self.lock = result
            return result

        return call


@pytest.mark.parametrize(
    ("exchanging", "every"),
    [
        pytest.param(True, 3, id="True-some"),
        pytest.param(False, 3, id="False-some"),
        *full(pytest.param(True, 1, id="True"), pytest.param(False, 1, id="False")),
    ],
)
@mock.patch.object(os, "fsync", lambda fd: None)  # it is called and counted, and takes no time
def test_a_kill_at_any_call_loses_neither_checkpoint_nor_files(
    session: Session, tmp_path: Path, exchanging: bool, every: int
) -> None:
    """Before every call of a save in turn, or some; the save that follows has them all where they were."""
    at, visible = 0, 0
    root, best = tmp_path / "run", tmp_path / "run" / "best"
    Checkpointer(session).save(root, "best", user_state=0)
    (best / "logs").mkdir()
    (best / "logs" / "a").write_text("a")
    (best / "notes").write_text("notes")
    before = user_files(best)
    while True:
        files = Dying(exchanging)
        files.left = at
        with contextlib.suppress(Killed):
            Checkpointer(session, files).save(root, "best", user_state=at + 1)
        if not files.dead:
            break
        with contextlib.suppress(OSError):
            os.close(files.lock)
        (found,) = scan(str(root))
        assert found.tag == "best" and verify(found.path) == [], f"killed at call {at}"
        assert user_files(Path(found.path)) == before, f"killed at call {at}"
        restored = Checkpointer(session).load(root)
        assert restored is not None and restored.user_state in (0, at + 1), f"killed at call {at}"
        visible += restored.user_state == at + 1
        Checkpointer(session).save(root, "best", user_state=0)
        assert user_files(best) == before and sorted(os.listdir(root)) == ["best", "latest"], f"killed at call {at}"
        at += every
    assert at > 20 and 0 < visible < at // every, (at, visible)


def test_what_a_killed_save_left_goes_without_what_is_the_users(session: Session, tmp_path: Path) -> None:
    """What appeared in the old directory just before a kill is in the one that stepped aside, and comes back."""
    saver = Checkpointer(session)
    saver.save(tmp_path, "best", user_state=1)
    aside = tmp_path / f".best.replaced-{'0' * 16}"
    (tmp_path / "best").rename(aside)
    (aside / "late").write_text("late")
    saver.save(tmp_path, "other", user_state=2)
    assert sorted(os.listdir(tmp_path)) == ["best", "latest", "other"] and verify(tmp_path / "best") == []
    shutil.copytree(tmp_path / "best", aside)
    (aside / "logs").mkdir()
    (aside / "logs" / "late").write_text("late")
    saver.save(tmp_path, "other", user_state=3)
    assert sorted(os.listdir(tmp_path)) == ["best", "latest", "other"]
    assert (tmp_path / "best" / "logs" / "late").read_text() == (tmp_path / "best" / "late").read_text() == "late"
    unfinished = tmp_path / f".new.saving-{'1' * 16}"  # of a tag that never was
    (unfinished / "logs").mkdir(parents=True)
    saver.save(tmp_path, "other")
    assert sorted(os.listdir(tmp_path)) == ["best", "latest", "other"]


def test_what_a_save_had_not_moved_when_it_was_killed_is_moved_by_the_next(session: Session, tmp_path: Path) -> None:
    """Files that appear in the old directory after the others were taken along, where names are exchanged."""

    class Dying(FileSystem):
        def exchange(self, one: str, other: str) -> bool:
            done = super().exchange(one, other)
            if done:
                for name in ("early", "tokens"):
                    Path(one, name).write_text(name)
            return done

        def rename(self, old: str, new: str) -> None:
            if os.path.basename(old) == "tokens":
                raise KeyboardInterrupt  # as good as dead
            super().rename(old, new)

    Checkpointer(session).save(tmp_path, "best")
    with pytest.raises(KeyboardInterrupt):
        Checkpointer(session, Dying()).save(tmp_path, "best")
    (left,) = tmp_path.glob(".best.saving-*")
    assert (left / "tokens").exists()
    Checkpointer(session).save(tmp_path, "other")
    assert sorted(os.listdir(tmp_path)) == ["best", "latest", "other"] and verify(tmp_path / "best") == []
    assert [(tmp_path / "best" / name).read_text() for name in ("early", "tokens")] == ["early", "tokens"]


def _refusing(path: str, place: str) -> None:
    raise PermissionError(1, "Operation not permitted", path)


def test_what_cannot_be_taken_along_is_an_error_and_the_old_checkpoint_stays(session: Session, tmp_path: Path) -> None:
    files = FileSystem()
    saver, best = Checkpointer(session, files), tmp_path / "best"
    saver.save(tmp_path, "best", user_state=1)
    (best / "logs").mkdir()
    (best / "logs" / "mine").write_text("mine")
    files.link = _refusing  # type: ignore[method-assign]
    with pytest.raises(
        CheckpointError, match="best/logs/mine does not belong to the checkpoint and cannot be kept: EPERM"
    ):
        saver.save(tmp_path, "best", user_state=2)
    del files.link  # type: ignore[attr-defined]
    (best / "manifest.json").rename(best / "kept.json")
    (best / "manifest.json").mkdir()
    with pytest.raises(ValueError, match=r"best/manifest\.json is a folder, and the checkpoint needs a file"):
        saver.save(tmp_path, "best", user_state=2)
    (best / "manifest.json").rmdir()
    (best / "kept.json").rename(best / "manifest.json")
    assert sorted(os.listdir(tmp_path)) == ["best", "latest"] and sorted(os.listdir(best / "logs")) == ["mine"]
    restored = saver.load(tmp_path, "best")
    assert restored is not None and restored.user_state == 1


def _as_another_user(root: Path, answers: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:  # what it imports may be where the other user cannot read
        rehearsal = build(nn.Linear(3, 2), None, zero(3))
        for _ in range(2):
            Checkpointer(rehearsal).save(folder, "best")
        Checkpointer(rehearsal).load(folder, "best")
        rehearsal.close()
    os.umask(0o022)
    os.setgid(65534)
    os.setuid(65534)
    session = build(nn.Linear(3, 2), None, zero(3))
    saver, best = Checkpointer(session), root / "best"
    saver.save(root, "best", user_state=1)
    (best / "own").write_text("own")
    (best / "own").chmod(0)
    (best / "ended").mkdir()
    (best / "ended" / "a").write_text("a")
    (best / "ended").chmod(0o500)
    saver.save(root, "best", user_state=2)
    kept = [*os.listdir(root), *os.listdir(best), *os.listdir(best / "ended")]
    (best / "closed").mkdir()
    (best / "closed").chmod(0)
    error = ""
    try:
        saver.save(root, "best", user_state=3)
    except CheckpointError as raised:
        error = str(raised)
    restored = saver.load(root, "best")
    answers.send((sorted(kept), error, restored is not None and restored.user_state, sorted(os.listdir(root))))
    session.close()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_files_that_this_user_cannot_read_are_kept_or_named() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        answer, answers = multiprocessing.Pipe(duplex=False)
        process = start(forked(_as_another_user, Path(folder, "run"), answers))
        answers.close()
        assert answer.poll(120), "no answer within 120 s"
        kept, error, version, there = answer.recv()
        process.join()
    assert kept == ["a", "best", "ended", "latest", "manifest.json", "own", "pieces-0.safetensors"]
    assert "best/closed does not belong to the checkpoint and cannot be kept: EACCES" in error
    assert version == 2 and there == ["best", "latest"]


def _is_weights(name: str) -> bool:
    return name.startswith("model.safetensors")


def test_a_save_leaves_alone_what_is_converted_beside_it(session: Session, tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "hf", _is_weights) as fresh:
        (fresh / "model.safetensors").write_text("new")
        Checkpointer(session).save(tmp_path, "a")
    assert sorted(os.listdir(tmp_path)) == ["a", "hf", "latest"]
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]


def test_a_save_does_not_settle_what_a_killed_conversion_left(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take old weights for a user's file, and move them beside the new index."""

    def write(name: str) -> None:
        with atomic_directory(tmp_path / "model", _is_weights) as fresh:
            (fresh / name).write_text("weights")

    write("model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr("shardwise.core.checkpoint.atomic.DISK.exchange", lambda one, other: False)
        patch.setattr("shardwise.core.checkpoint.atomic._settle", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write("model.safetensors.index.json")
    Checkpointer(session).save(tmp_path, "a")
    assert os.listdir(tmp_path / "model") == ["model.safetensors.index.json"]
    write("model.safetensors.index.json")
    assert sorted(os.listdir(tmp_path)) == ["a", "latest", "model"]
    assert os.listdir(tmp_path / "model") == ["model.safetensors.index.json"]


def test_conversions_and_other_formats_take_them_along_too(session: Session, tmp_path: Path) -> None:
    Checkpointer(session).save(tmp_path / "runs", "a")
    for _ in range(2):
        with open_checkpoint(tmp_path / "runs" / "a") as source:
            write_native(source, tmp_path / "out" / "a")
        if not (tmp_path / "out" / "a" / "notes").exists():
            before = put(tmp_path / "out" / "a")
    assert user_files(tmp_path / "out" / "a") == before and os.listdir(tmp_path / "out") == ["a"]

    model = tmp_path / "models" / "model"
    model.mkdir(parents=True)
    before = put(model)

    def write(more: Callable[[], object]) -> None:
        with atomic_directory(model, lambda name: name == "weights") as fresh:
            (fresh / "weights").write_text("new")
            (fresh / "config").write_text("new")
            more()

    write(lambda: None)
    (model / "config").write_text("mine")
    write(lambda: (model / "late").write_text("late"))
    assert set(user_files(model)) == {*before, "late", "weights", "config"}
    assert (model / "config").read_text() == "new" and os.listdir(tmp_path / "models") == ["model"]
