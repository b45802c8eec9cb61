"""Files that a save writes and a load reads:

* a save refuses on every rank what a reader would refuse, and leaves no files;
* a load refuses on all ranks a manifest with invalid values, before the run changes;
* model directories are replaced atomically: after an error at any call the old model is there, after a kill the old or
  the new one (or none, if both have an index), and never parts of both.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_checkpoint_directory import ROOT, begin, inside, stop

from shardwise.core.checkpoint import CheckpointError, native_format
from shardwise.core.checkpoint.formats import atomic_files
from shardwise.core.checkpoint.formats.atomic_files import output_files, write_text, write_torch
from shardwise.core.checkpoint.formats.lazy_tensors import entry_of_tensor
from shardwise.core.checkpoint.formats.safetensors_file import SafetensorsFile, write_safetensors_stream
from shardwise.core.checkpoint.formats.torch_file import load_torch
from shardwise.core.checkpoint.input_checks import MAX_DEPTH
from shardwise.testing import run_ranks
from tests.faults.fuzz.changes import apply_change
from tests.faults.fuzz.subjects import EngineSubject
from tests.faults.fuzz.trial import differing
from tests.faults.system import in_place_of_the_system
from tests.support.checkpoint_setup import differences, everything
from tests.support.engine_setup import PLANS, one_mesh, told
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full


def nested(levels: int, kind: Callable[[list[Any]], Any] = list) -> Any:
    value: Any = kind([])
    for _ in range(levels):
        value = kind([value])
    return value


CASES: dict[str, tuple[str, int, Any, str]] = {
    "manifest": ("native_format.MOST_MANIFEST_BYTES", 1000, "x" * 5000, "its manifest has"),
    "levels": ("", 0, nested(MAX_DEPTH), f"more than {MAX_DEPTH} levels"),
    "tuples": ("", 0, {"a": nested(60, tuple)}, f"more than {MAX_DEPTH} levels"),
    "values": ("input_checks.MOST_VALUES", 20_000, list(range(20_000)), "more than 20000 values"),
    "name": ("", 0, {"a\nb": torch.ones(2)}, "a tensor named"),
    "dtype": ("", 0, {"a": torch.ones(0, dtype=torch.complex128)}, "is 'complex128', which a checkpoint cannot"),
    "header": (
        "native_format.MAX_HEADER_BYTES",
        30_000,
        {f"{n:0100}": torch.ones(1) for n in range(200)},
        "need a header of",
    ),
}
"""A limit, the value to which it is set (for a manifest: above its size), a state that exceeds it, and words of the
error."""


@on_ranks(2)
@pytest.mark.parametrize("name", [*list(CASES)[::2], *full(*list(CASES)[1::2])])
def test_saves_refuse_what_no_load_would_accept(tmp_path: Path, name: str) -> None:
    bound, number, given, words = CASES[name]
    with one_mesh(PLANS["zero3"]) as mesh, inside(str(tmp_path), 0), pytest.MonkeyPatch.context() as patch:
        run = begin(mesh)
        run.saver.save(ROOT, "same", user_state="before")
        saved = everything(run.session)
        if bound:
            there = os.path.getsize(os.path.join(ROOT, "same", native_format.MANIFEST)) if name == "manifest" else 0
            patch.setattr(f"shardwise.core.checkpoint.{bound}", there + number)
        run.steps(0, 1)
        with pytest.raises((CheckpointError, ValueError)) as error:
            run.saver.save(ROOT, "same", user_state=given, use_async=name == "levels")
            run.saver.wait_for_saves()
        said = str(error.value)
        assert "rank 0 could not" in said and words in said, said
        assert "checkpoint 'same'" in said and ("no load would accept it" in said) == (name != "header"), said
        mesh.mesh_group.exchange_object(0)  # rank 0 removes its unfinished files
        assert sorted(os.listdir(ROOT)) == ["latest", "same"]
        assert run.saver.load(ROOT).user_state == "before"  # type: ignore[union-attr]
        assert not differences(everything(run.session), saved)
        run.saver.save(ROOT, "same", user_state="after")
        assert run.saver.load(ROOT).user_state == "after"  # type: ignore[union-attr]
        stop(run)


@on_ranks(1)
def test_states_at_the_limits_are_saved_and_loaded(tmp_path: Path) -> None:
    with one_mesh(PLANS["zero3"]) as mesh, inside(str(tmp_path), 0), pytest.MonkeyPatch.context() as patch:
        run = begin(mesh)
        most = nested(MAX_DEPTH - 2)  # the state and its entry add two levels
        run.saver.save(ROOT, "deep", user_state=most)
        assert run.saver.load(ROOT).user_state == most  # type: ignore[union-attr]
        text = "x" * 10_000
        run.saver.save(ROOT, "large", user_state=text)
        nbytes = os.path.getsize(os.path.join(ROOT, "large", native_format.MANIFEST))
        patch.setattr(native_format, "MOST_MANIFEST_BYTES", nbytes)
        run.saver.save(ROOT, "large", user_state=text)
        assert run.saver.load(ROOT, "large").user_state == text  # type: ignore[union-attr]
        patch.setattr(native_format, "MOST_MANIFEST_BYTES", nbytes - 1)
        raises(CheckpointError, "its manifest has", run.saver.save, ROOT, "large", user_state=text)
        stop(run)


def test_other_writers_refuse_what_no_reader_would_accept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_torch(tmp_path / "a.pt", {"a": nested(MAX_DEPTH - 1)})
    assert load_torch(tmp_path / "a.pt") == {"a": nested(MAX_DEPTH - 1)}
    entries = {f"layer{n}": entry_of_tensor(torch.ones(2)) for n in range(9)}
    write_safetensors_stream(tmp_path / "c.safetensors", entries, {})
    SafetensorsFile(tmp_path / "c.safetensors").close()
    monkeypatch.setattr(native_format, "MAX_HEADER_BYTES", 500)
    monkeypatch.setattr(atomic_files, "MOST_INDEX_BYTES", 10)
    for words, write, name, *given in (
        ("more than 100 levels", write_torch, "b.pt", {"a": nested(MAX_DEPTH)}),
        ("its 9 tensors need a header", write_safetensors_stream, "d.safetensors", entries, {}),
        ("it would have 11 bytes, of at most 10", write_text, "e.json", "x" * 11),
    ):
        raises(CheckpointError, f"{re.escape(name)} is not saved.*{words}", write, tmp_path / name, *given)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.pt", "c.safetensors"]


GROUP = ["state", "optimizers", 0, "groups", 0, "options"]
SMALL = ["state", "optimizers", 0, "small", "first.weight", "step"]
HOSTILE: dict[str, tuple[str, list[Any], Any]] = {
    "a text for a learning rate": ("set", [*GROUP, "lr"], "many"),
    "one beta": ("set", [*GROUP, "betas"], {"$tuple": [0.9]}),
    "an option that is no value": ("set", [*GROUP, "eps"], {"$tensor": "none"}),
    "parameters as an option": ("rename", [*GROUP, "weight_decay"], "params"),
    "a loss scale of nothing": ("set", ["state", "scaler", "scale"], 0.0),
    "a text for a count": ("set", ["state", "updates"], "many"),
    "a text for a step": ("set", SMALL, "many"),
    "a step of a type that is none": ("set", [*SMALL, "dtype"], "load"),
    "a text for a step size": ("set", ["state", "lr_schedulers", 0, "step_size"], "many"),
    "a method of the scheduler": ("rename", ["state", "lr_schedulers", 0, "step_size"], "step"),
    "a scheduler that is none": ("set", ["state", "lr_schedulers", 0], [1]),
    "rank 1's generator": ("set", ["state", "rng", 1, "torch"], {"$tensor": "none"}),
    "rank 1's generator's version": ("set", ["state", "rng", 1, "python", "version"], 7),
    "rank 1's position": ("set", ["state", "data_position", 1], {"$float": "x"}),
    "extra state": ("set", ["state", "extra", "_extra_state", "more"], {"$tensor": "none"}),
}


def save(root: str) -> None:
    subject = EngineSubject()
    subject.step()
    subject.save(Path(root), "t")
    subject.session.close()


def refuse(folders: dict[str, str]) -> None:
    """Check that each load raises and changes nothing."""
    subject = EngineSubject()
    subject.step()
    for name, folder in folders.items():
        before = subject.state()
        raised = told(lambda folder=folder: subject.load(Path(folder), "all"), (CheckpointError, ValueError))
        assert not differing(before, subject.state()), f"{name}: changed before {raised}"
        assert "TypeError: " not in raised.split("could not")[0], raised
    subject.step()
    subject.session.close()


@pytest.mark.parametrize("ranks", [2, *full(1)])
def test_refused_manifests_change_nothing(tmp_path: Path, ranks: int) -> None:
    run_ranks(ranks, save, str(tmp_path / "whole"))
    folders = {}
    for number, (name, (do, path, value)) in enumerate(HOSTILE.items()):
        if ranks == 2 or "rank 1" not in name:
            folder = tmp_path / str(number) / "t"
            shutil.copytree(tmp_path / "whole" / "t", folder)
            apply_change(folder, {"op": "tree", "file": "manifest.json", "do": do, "path": path, "value": value})
            folders[name] = str(folder)
    run_ranks(ranks, refuse, folders)


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
"""Kinds of the old and the new model, by whether names can be exchanged: each change once, and the remaining ones."""
NO_SYNC = mock.patch.object(os, "fsync", lambda fd: None)  # still called and counted, but fast
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
    """Return the version that ``from_pretrained`` would load; it looks for a single file first."""
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
    """Create a run's directory with an old model of ``kind``, or nothing if ``kind`` is empty."""
    shutil.rmtree(path, ignore_errors=True)
    if kind:
        (path / "checkpoint-3").mkdir(parents=True)
        (path / "checkpoint-3" / WHOLE).write_text("not ours")
        (path / "events.log").write_text("somebody writes here")
        _write(path, kind, "old")
    return _content(path)


def _finish(path: Path, kind: str, before: dict[str, str]) -> None:
    """Save again: the directory has the new model and files that are not the model's, and nothing else."""
    _save(path, kind, "new")
    others = {name: text for name, text in before.items() if not _is_weights(name)}
    assert _found(path) == "new"
    assert set(_content(path)) == {*others, *KINDS[kind], "config.json"}
    assert others.items() <= (_content(path) | {"config.json": "old"}).items()
    assert os.listdir(path.parent) == [path.name]


def _errors(folder: str, before: str, after: str, can_exchange: bool) -> set[str]:
    """Let each call of a save fail in turn; return the names of the calls that failed."""
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
    """Return a ``System.reached`` that ends the process before the call number ``at`` that changes names."""
    left = iter(range(at, -1, -1))

    def die(name: str) -> bool:
        if name in NAMES and next(left) == 0:
            os._exit(9)
        return False

    return die


@NO_SYNC
def _kills(folder: str, before: str, after: str, can_exchange: bool) -> list[str]:
    """Return the versions found after a kill before each call that changes names, and after a complete save."""
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
def test_model_directory_is_replaced_atomically(
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


def test_file_instead_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file is a file; give a directory"):
        _save(tmp_path / "file", "one", "new")
    assert (tmp_path / "file").read_text() == "mine"


def test_linked_directory_is_kept(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "volume")
    (tmp_path / "later").symlink_to(tmp_path / "elsewhere" / "deep")
    number = (tmp_path / "volume").stat().st_ino
    for name in ("out", "later"):
        _save(tmp_path / name, "two", "new")
        assert (tmp_path / name).is_symlink() and _found(tmp_path / name) == "new"
    assert (tmp_path / "volume").stat().st_ino == number
