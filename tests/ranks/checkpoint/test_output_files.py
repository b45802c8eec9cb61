"""Model directories that are written in place: after an error at any call the old model is there, after a kill at any
call the old one or the new one (or, where both have an index, none), and never parts of both."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from shardwise.core.checkpoint.formats.output import output_files, write_text
from shardwise.testing import run_ranks
from tests.faults.system import in_place_of_the_system
from tests.support.sets import campaign, full

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KINDS: dict[str, list[str]] = {
    "one": [WHOLE],
    "two": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX],
    "three": [*(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), INDEX],
}
CHANGES = {
    True: [("one", "one"), ("one", "two"), ("two", "two"), ("", "one")],
    False: [("one", "one"), ("two", "one"), ("three", "two"), ("", "two")],
}
SOME = {True: CHANGES[True][:2], False: CHANGES[False][1::2]}
OTHERS = {True: [("two", "one"), ("three", "two"), ("", "two")], False: [("one", "two"), ("two", "two"), ("", "one")]}
"""What was there and what is written, where names can be exchanged and where not: every change once, and the rest."""
NO_SYNC = mock.patch.object(os, "fsync", lambda fd: None)  # it is called and counted, and takes no time
NAMES = {"mkdir", "link", "rename", "renameat2", "unlink", "rmdir"}
HARMLESS = {"flock", "link", "unlink", "rmdir", "close of a directory"}


def _is_weights(name: str) -> bool:
    return name.startswith("model")


def _write(directory: Path, kind: str, version: str) -> None:
    for name in [*KINDS[kind], "config.json"]:
        is_index = name == INDEX
        text = json.dumps([version, KINDS[kind][:-1]]) if is_index else version
        write_text(directory / name, text)


def _save(path: Path, kind: str, version: str) -> None:
    with output_files(path, _is_weights) as fresh:
        _write(fresh, kind, version)


def _found(path: Path) -> str:
    """Which model ``from_pretrained`` would find: it looks for one file first."""
    if (path / WHOLE).exists():
        return (path / WHOLE).read_text()
    if not (path / INDEX).exists():
        return "none"
    version, names = json.loads((path / INDEX).read_text())
    parts = {(path / name).read_text() if (path / name).exists() else "missing" for name in names}
    return str(version) if parts == {version} else f"{version} of {sorted(parts)}"


def _content(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}


def _start(path: Path, kind: str) -> dict[str, str]:
    """A run's directory with an old model in it; or nothing, where there is no ``kind``."""
    shutil.rmtree(path, ignore_errors=True)
    if kind:
        (path / "checkpoint-3").mkdir(parents=True)
        (path / "checkpoint-3" / WHOLE).write_text("not ours")
        (path / "events.log").write_text("somebody writes here")
        _write(path, kind, "old")
    return _content(path)


def _finish(path: Path, kind: str, before: dict[str, str]) -> None:
    """The next save leaves the new model, what is not its own, and nothing else."""
    _save(path, kind, "new")
    others = {name: text for name, text in before.items() if not _is_weights(name)}
    assert _found(path) == "new"
    assert set(_content(path)) == {*others, *KINDS[kind], "config.json"}
    assert others.items() <= (_content(path) | {"config.json": "old"}).items()
    assert os.listdir(path.parent) == [path.name]


def _errors(folder: str, before: str, after: str, can_exchange: bool) -> set[str]:
    """The calls that failed."""
    path, failing = Path(folder) / "run", set()
    with NO_SYNC, in_place_of_the_system(can_exchange) as system:
        for at in range(100):
            old = _start(path, before)
            system.arm(at, errno.EIO)
            failed = False
            try:
                _save(path, after, "new")
            except OSError as error:
                failed = True
                assert error.errno == errno.EIO
            reached, called = system.at is None, system.failed
            system.arm(None)
            if not reached:
                break
            failing.add(called)
            assert failed or called in HARMLESS, called
            assert _content(path) == old if failed else _found(path) == "new", (called, _content(path))
            _finish(path, after, old)
        else:
            raise AssertionError("more than 100 calls: the loop does not end")
    return failing


def _dying(at: int) -> Callable[[str], bool]:
    """In the place of ``System.reached``: the process ends before the call number ``at`` of those that change names."""
    left = iter(range(at, -1, -1))

    def die(name: str) -> bool:
        if name in NAMES and next(left) == 0:
            os._exit(9)
        return False

    return die


@NO_SYNC
def _kills(folder: str, before: str, after: str, can_exchange: bool) -> list[str]:
    """What is found after a kill just before each call that changes names, and at the end."""
    path, found = Path(folder) / "run", []
    for at in range(100):
        old = _start(path, before)
        child = os.fork()
        if not child:
            with in_place_of_the_system(can_exchange) as system:
                system.reached = _dying(at)  # type: ignore[method-assign]
                _save(path, after, "new")
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append(_found(path))
        assert found[-1] != "new" or (path / "config.json").read_text() == "new", "weights come last"
        others = {name: text for name, text in old.items() if not _is_weights(name) and name != "config.json"}
        assert others.items() <= _content(path).items()
        _finish(path, after, old)
        if status == 0:
            return found
        assert status == 9
    raise AssertionError("more than 100 calls: the loop does not end")


@pytest.mark.parametrize("changes", [SOME, *full(CHANGES), *campaign(OTHERS)], ids=["some", "each once", "others"])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_model_replaces_the_old_one_whole_or_not(
    can_exchange: bool, changes: dict[bool, list[tuple[str, str]]], tmp_path: Path
) -> None:
    for before, after in changes[can_exchange]:
        (failing,) = run_ranks(1, _errors, str(tmp_path), before, after, can_exchange)
        changing = "renameat2" if can_exchange and before == after else "rename"
        assert {"mkdir", "pwrite", "fsync of a file", "fsync of a directory", changing} <= failing
        (found,) = run_ranks(1, _kills, str(tmp_path), before, after, can_exchange)
        start, end = found[0], found[-1]
        assert (start, end) == ("old" if before else "none", "new")
        both_have_an_index = "one" not in (before, after)
        assert set(found) <= {start, end} | ({"none"} if both_have_an_index else set()), (before, after, found)
        assert sorted(found, key=[start, "none", end].index) == found


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file is a file; give a directory"):
        _save(tmp_path / "file", "one", "new")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_stays_one_and_its_directory_the_same(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "volume")
    (tmp_path / "later").symlink_to(tmp_path / "elsewhere" / "deep")
    number = (tmp_path / "volume").stat().st_ino
    for name in ("out", "later"):
        _save(tmp_path / name, "two", "new")
        assert (tmp_path / name).is_symlink() and _found(tmp_path / name) == "new"
    assert (tmp_path / "volume").stat().st_ino == number
