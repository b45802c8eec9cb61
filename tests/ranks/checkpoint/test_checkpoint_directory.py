"""The directory of a checkpoint: shared by all ranks, one save at a time, with a user's own files in it.

* Errors name the ranks that do not see the directory, or that give another tag.
* A save that replaces a tag keeps the files in it that are not the checkpoint's, even if the process is killed.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from shardwise.core.checkpoint import Checkpointer, CheckpointError, EngineRun, PortableFiles
from shardwise.core.checkpoint.atomic import FileSystem, atomic_directory
from shardwise.core.checkpoint.directory import scan
from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.core.checkpoint.formats.native import verify, write_native
from shardwise.core.mesh import Mesh
from shardwise.plan import zero
from shardwise.session import Session, build
from tests.support.checkpoint_setup import Held, Run, differences, everything, start
from tests.support.engine_setup import PLANS, one_mesh, told
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

ROOT = "runs"


@contextlib.contextmanager
def inside(folder: str, host: int) -> Iterator[None]:
    """Change to a directory of this host, so that relative paths differ between hosts."""
    before, place = os.getcwd(), os.path.join(folder, f"host-{host}")
    os.makedirs(place, exist_ok=True)
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def begin(mesh: Mesh, seed: int = 0) -> Run:
    return start(lambda m, o, p: build(m, o, p, mesh), "gpt", "adamw", PLANS["zero3"], seed=seed)


def stop(run: Run) -> None:
    run.saver.close()
    run.session.close()


@on_ranks(4)
@pytest.mark.parametrize("of", [[0, 1, 0, 1], *full([0, 0, 0, 1])])
def test_all_ranks_name_the_ranks_that_do_not_see_the_directory(tmp_path: Path, of: list[int]) -> None:
    ranks = "ranks 1, 3 of 4 do" if sum(of) == 2 else "rank 3 of 4 does"
    with one_mesh(PLANS["zero3"]) as mesh, inside(str(tmp_path), of[mesh.rank]):
        run, files = begin(mesh), PortableFiles()
        run.saver.save(tmp_path / "host-0" / "kept", "one")
        run.steps(0, 1)
        before = everything(run.session)
        for act in (
            lambda: run.saver.save(ROOT, "one"),
            lambda: run.saver.load("kept", "one"),
            lambda: run.saver.load("kept", "auto"),
            lambda: files.load_model(EngineRun(run.session), "kept/one", strict=True),
        ):
            said = told(act, CheckpointError)
            assert f"{ranks} not see " in said and "on storage that all of them share" in said, said
        files.close()
        assert not os.path.isdir(ROOT) or os.listdir(ROOT) == []
        assert not differences(everything(run.session), before)
        run.steps(1, 2)
        stop(run)


A, B = ("one", "a", None), ("one", "b", None)


@on_ranks(2)
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((A, B), "rank 0 could not .*tag='b' on rank 1 differs from 'a' on"),
        ((A, ("two", "a", None)), ".*: rank 1 of 2 does not see "),
        *full(((("one", None, 5), ("one", None, 6)), "rank 0 could not .*tag='step-6' on rank 1 differs")),
    ],
    ids=["tags", "roots", "steps"],
)
def test_different_tags_on_ranks_are_refused(
    given: tuple[tuple[str, str | None, int | None], ...], wanted: str, tmp_path: Path
) -> None:
    with one_mesh(PLANS["zero3"]) as mesh, inside(str(tmp_path), 0):
        run = begin(mesh)
        root, tag, step = given[mesh.rank]
        error = ValueError if given[0][0] == given[1][0] else CheckpointError
        raises(error, wanted, run.saver.save, root, tag, step=step)
        mesh.mesh_group.exchange_object(0)  # rank 0 removes its unfinished files
        there = [name for each in ("one", "two") if os.path.isdir(each) for name in os.listdir(each)]
        assert set(there) <= {"latest"}
        assert "manifest.json" in os.listdir(run.saver.save("all", "after"))
        stop(run)


@pytest.mark.parametrize("fail", [False, True])
def test_concurrent_save_into_the_same_directory_is_refused(tmp_path: Path, fail: bool) -> None:
    """The second save is another process's or another model's; it does not affect the first one."""
    first, second = (build(nn.Linear(3, 2), None, zero(3)) for _ in range(2))
    files = Held()
    saver = Checkpointer(first, files)
    saver.save(tmp_path, "one", use_async=True)
    for tag in ("one", "two"):
        raises(
            ValueError, r"\.one\.saving-.* is being written by another process", second.checkpoints.save, tmp_path, tag
        )
    files.fail = fail
    files.go.set()
    with pytest.raises(CheckpointError, match="No space left") if fail else contextlib.nullcontext():
        saver.wait_for_saves()
    assert [each.tag for each in scan(str(tmp_path))] == ["one"] * (not fail)
    second.checkpoints.save(tmp_path, "two")
    assert sorted(set(os.listdir(tmp_path)) - {"latest"}) == [*["one"] * (not fail), "two"], "nothing hidden stays"
    saver.close()
    for each in (first, second):
        each.close()


def put(folder: Path) -> dict[str, bytes]:
    """Create files of a user and return them: nested and empty folders, links to a file, a folder and nothing, a hidden
    file, other modes, and names similar to the checkpoint's.
    """
    (folder / "logs" / "deep" / "er").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "pieces-7.safetensors").mkdir()
    names = ["notes", ".hidden", "logs/a", "logs/deep/er/b", "pieces-x.safetensors", "pieces-7.safetensors/mine"]
    for name in names:
        (folder / name).write_text(name)
    (folder / "secret").write_bytes(b"1")
    (folder / "secret").chmod(0 if os.geteuid() == 0 else 0o400)  # only root can read and copy it
    (folder / "logs" / "deep" / "er").chmod(0o500)
    (folder / "to-notes").symlink_to("notes")
    (folder / "to-nothing").symlink_to("/no/such/file")
    (folder / "to-logs").symlink_to("logs", target_is_directory=True)
    return user_files(folder)


def user_files(folder: Path) -> dict[str, Any]:
    """Return mode and content of everything in ``folder`` that is not the checkpoint's, by path."""
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
    """A file system without hard links and without an exchange of names."""

    def link(self, path: str, place: str) -> None:
        shutil.copy2(path, place, follow_symlinks=False)

    def exchange(self, one: str, other: str) -> bool:
        return False


@pytest.mark.parametrize("files", [FileSystem(), NoLinks()], ids=["links", "copies"])
def test_replaced_tag_keeps_user_files(session: Session, tmp_path: Path, files: FileSystem) -> None:
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


class Killed(BaseException):
    """A simulated kill: no cleanup runs after it."""


class Dying(FileSystem):
    """End the process before its system call number ``left``."""

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
            if self.dead and name != "close":  # the kernel closes the files of a process that ends
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
@mock.patch.object(os, "fsync", lambda fd: None)  # still called and counted, but fast
def test_kill_at_any_call_keeps_checkpoint_and_user_files(
    session: Session, tmp_path: Path, exchanging: bool, every: int
) -> None:
    """Kill a save before each call, or before some; the next save has checkpoint and files in place."""
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


def _refusing(path: str, place: str) -> None:
    raise PermissionError(1, "Operation not permitted", path)


def test_user_files_that_cannot_be_kept_raise_and_the_old_checkpoint_stays(session: Session, tmp_path: Path) -> None:
    files = FileSystem()
    saver, best = Checkpointer(session, files), tmp_path / "best"
    saver.save(tmp_path, "best", user_state=1)
    (best / "logs").mkdir()
    (best / "logs" / "mine").write_text("mine")
    files.link = _refusing  # type: ignore[method-assign]
    words = "best/logs/mine does not belong to the checkpoint and cannot be kept: EPERM"
    raises(CheckpointError, words, saver.save, tmp_path, "best", user_state=2)
    del files.link  # type: ignore[attr-defined]
    (best / "manifest.json").rename(best / "kept.json")
    (best / "manifest.json").mkdir()
    words = r"best/manifest\.json is a folder, and the checkpoint needs a file"
    raises(ValueError, words, saver.save, tmp_path, "best", user_state=2)
    (best / "manifest.json").rmdir()
    (best / "kept.json").rename(best / "manifest.json")
    assert sorted(os.listdir(tmp_path)) == ["best", "latest"] and sorted(os.listdir(best / "logs")) == ["mine"]
    restored = saver.load(tmp_path, "best")
    assert restored is not None and restored.user_state == 1


def test_conversions_and_other_formats_keep_user_files(session: Session, tmp_path: Path) -> None:
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
