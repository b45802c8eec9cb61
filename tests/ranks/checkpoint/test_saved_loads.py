"""What is saved can be loaded: what a reader would refuse the save refuses, on every rank, and leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_shared import ROOT, begin, inside, stop

from shardwise.core.checkpoint import bounds, format
from shardwise.core.checkpoint.bounds import MAX_DEPTH
from shardwise.core.checkpoint.format import read_manifest
from shardwise.core.checkpoint.formats import output
from shardwise.core.checkpoint.formats.lazy import entry_of_tensor
from shardwise.core.checkpoint.formats.output import write_text, write_torch
from shardwise.core.checkpoint.formats.safetensors_file import SafetensorsFile, write_safetensors_stream
from shardwise.core.checkpoint.formats.torch_file import load_torch
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.testing import run_ranks
from tests.support.checkpoint_setup import differences, everything
from tests.support.engine_setup import PLANS, one_mesh
from tests.support.sets import full


def nested(levels: int, kind: Callable[[list[Any]], Any] = list) -> Any:
    value: Any = kind([])
    for _ in range(levels):
        value = kind([value])
    return value


CASES: dict[str, tuple[str, int, Any, str]] = {
    "manifest": ("format.MOST_MANIFEST_BYTES", 1000, "x" * 5000, "its manifest has"),
    "levels": ("", 0, nested(MAX_DEPTH), f"more than {MAX_DEPTH} levels"),
    "tuples": ("", 0, {"a": nested(60, tuple)}, f"more than {MAX_DEPTH} levels"),
    "values": ("bounds.MOST_VALUES", 20_000, list(range(20_000)), "more than 20000 values"),
    "name": ("", 0, {"a\nb": torch.ones(2)}, "a tensor named"),
    "dtype": ("", 0, {"a": torch.ones(0, dtype=torch.complex128)}, "is 'complex128', which a checkpoint cannot"),
    "header": ("format.MAX_HEADER_BYTES", 30_000, {f"{n:0100}": torch.ones(1) for n in range(200)}, "need a header of"),
}
"""A bound and what it is set to (of a manifest: above what it has), what a save is given that is beyond it, and what
the error says."""
HOMES = {"format": format, "bounds": bounds}


def saves(folder: str, name: str, use_async: bool) -> list[Any]:
    bound, number, given, _ = CASES[name]
    patch = pytest.MonkeyPatch()
    with one_mesh(PLANS["zero3"]) as mesh, inside(folder, 0):
        run = begin(mesh)
        run.saver.save(ROOT, "same", user_state="before")
        saved, said = everything(run.session), ""
        if bound:
            home, _, attribute = bound.partition(".")
            there = os.path.getsize(os.path.join(ROOT, "same", format.MANIFEST)) if name == "manifest" else 0
            patch.setattr(HOMES[home], attribute, there + number)
        run.steps(0, 1)
        try:
            run.saver.save(ROOT, "same", user_state=given, use_async=use_async)
            run.saver.wait_for_saves()
        except (CheckpointError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        mesh.mesh_group.exchange_object(0)  # rank 0 removes what there is
        left = sorted(os.listdir(ROOT))
        restored = run.saver.load(ROOT)
        assert restored is not None
        found = [said, left, restored.user_state, differences(everything(run.session), saved)]
        run.saver.save(ROOT, "same", user_state="after")
        again = run.saver.load(ROOT)
        assert again is not None
        stop(run)
        patch.undo()
        return [*found, again.user_state]


@pytest.mark.parametrize("name", [*list(CASES)[::2], *full(*list(CASES)[1::2])])
def test_what_no_load_would_take_is_not_saved(tmp_path: Path, name: str) -> None:
    for said, left, before, wrong, after in run_ranks(2, saves, str(tmp_path), name, name == "levels"):
        assert "rank 0 could not" in said and CASES[name][3] in said, said
        assert "checkpoint 'same'" in said and ("no load would accept it" in said) == (name != "header"), said
        assert (left, before, wrong, after) == (["latest", "same"], "before", [], "after")


def at_the_bound(folder: str) -> None:
    with one_mesh(PLANS["zero3"]) as mesh, inside(folder, 0):
        run = begin(mesh)
        most = nested(MAX_DEPTH - 2)  # the state and its entry are a level each
        run.saver.save(ROOT, "deep", user_state=most)
        restored = run.saver.load(ROOT)
        assert restored is not None and restored.user_state == most
        run.saver.save(ROOT, "large", user_state="x" * 10_000)
        nbytes = os.path.getsize(os.path.join(ROOT, "large", format.MANIFEST))
        patch = pytest.MonkeyPatch()
        patch.setattr(format, "MOST_MANIFEST_BYTES", nbytes)
        run.saver.save(ROOT, "large", user_state="x" * 10_000)
        assert read_manifest(f"{ROOT}/large").state["user_state"] == "x" * 10_000
        assert (again := run.saver.load(ROOT, "large")) is not None and again.tag == "large"
        patch.setattr(format, "MOST_MANIFEST_BYTES", nbytes - 1)
        with pytest.raises(CheckpointError, match="its manifest has"):
            run.saver.save(ROOT, "large", user_state="x" * 10_000)
        patch.undo()
        stop(run)


def test_what_is_as_large_as_may_be_is_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(1, at_the_bound, str(tmp_path))


def test_other_files_that_no_reader_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_torch(tmp_path / "a.pt", {"a": nested(MAX_DEPTH - 1)})
    assert load_torch(tmp_path / "a.pt") == {"a": nested(MAX_DEPTH - 1)}
    with pytest.raises(CheckpointError, match=r"b\.pt is not saved.*more than 100 levels"):
        write_torch(tmp_path / "b.pt", {"a": nested(MAX_DEPTH)})
    entries = {f"layer{n}": entry_of_tensor(torch.ones(2)) for n in range(9)}
    write_safetensors_stream(tmp_path / "c.safetensors", entries, {})
    SafetensorsFile(tmp_path / "c.safetensors").close()
    monkeypatch.setattr(format, "MAX_HEADER_BYTES", 500)
    with pytest.raises(CheckpointError, match=r"d\.safetensors is not saved: its 9 tensors need a header"):
        write_safetensors_stream(tmp_path / "d.safetensors", entries, {})
    monkeypatch.setattr(output, "MOST_INDEX_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"e\.json is not saved: it would have 11 bytes, of at most 10"):
        write_text(tmp_path / "e.json", "x" * 11)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.pt", "c.safetensors"]
