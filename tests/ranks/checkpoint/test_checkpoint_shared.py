"""One directory for all ranks: who does not see it is named, other tags are told, and one save at a time goes in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwise.core.checkpoint.directory import scan
from shardwise.core.checkpoint.portable import PortableFiles
from shardwise.core.checkpoint.run import EngineRun
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.mesh import Mesh
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.checkpoint_setup import Held, Run, differences, everything, start
from tests.support.engine_setup import PLANS, one_mesh
from tests.support.sets import full

ROOT = "runs"


@contextmanager
def inside(folder: str, host: int) -> Iterator[None]:
    """A relative path is one of that host's own."""
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


def apart(folder: str, of: list[int]) -> dict[str, Any]:
    """What ranks that do not see one directory hear, and what is left of it."""
    with one_mesh(PLANS["zero3"]) as mesh, inside(folder, of[mesh.rank]):
        run = begin(mesh)
        before, said = everything(run.session), []
        files = PortableFiles()
        for act in (
            lambda: run.saver.save(ROOT, "one"),
            lambda: run.saver.load("kept", "one"),
            lambda: run.saver.load("kept", "auto"),
            lambda: files.load_model(EngineRun(run.session), "kept/one", strict=True),
        ):
            try:
                act()
                said.append("done")
            except CheckpointError as error:
                said.append(str(error))
        files.close()
        left = os.listdir(ROOT) if os.path.isdir(ROOT) else []
        changed = differences(everything(run.session), before)
        run.steps(0, 1)
        stop(run)
        return {"said": said, "left": left, "changed": changed}


@pytest.mark.parametrize("of", [[0, 1, 0, 1], *full([0, 0, 0, 1])])
def test_ranks_that_do_not_see_the_directory_are_named_on_every_rank(tmp_path: Path, of: list[int]) -> None:
    session = build(nn.Linear(3, 2), None, zero(3))
    Checkpointer(session).save(tmp_path / "host-0" / "kept", "one")
    session.close()
    ranks = "ranks 1, 3 of 4 do" if sum(of) == 2 else "rank 3 of 4 does"
    for row in run_ranks(4, apart, str(tmp_path), of):
        assert len(row["said"]) == 4 and row["left"] == [] and row["changed"] == [], row
        for said in row["said"]:
            assert f"{ranks} not see " in said and "on storage that all of them share" in said, said


def differ(folder: str, given: list[tuple[str, str | None, int | None]]) -> Any:
    """Save as ``given``, then all the same: what was raised, what was returned, and what is there."""
    with one_mesh(PLANS["zero3"]) as mesh, inside(folder, 0):
        run = begin(mesh)
        root, tag, step = given[mesh.rank]
        said = path = ""
        try:
            path = run.saver.save(root, tag, step=step)
        except (CheckpointError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        mesh.mesh_group.exchange_object(0)  # rank 0 removes what it had made
        there = [name for each in ("one", "two") if os.path.isdir(each) for name in os.listdir(each)]
        after = run.saver.save("all", "after")
        stop(run)
        return said, path, [name for name in there if name != "latest"], sorted(os.listdir(after))


CASES: dict[str, tuple[list[tuple[str, str | None, int | None]], str]] = {
    "tags": (
        [("one", "a", None), ("one", "b", None)],
        "ValueError: rank 0 could not .*tag='b' on rank 1 differs from 'a' on",
    ),
    "steps": ([("one", None, 5), ("one", None, 6)], "ValueError: rank 0 could not .*tag='step-6' on rank 1 differs"),
    "roots": ([("one", "a", None), ("two", "a", None)], "CheckpointError: .*: rank 1 of 2 does not see "),
}


@pytest.mark.parametrize("case", ["tags", "roots", *full("steps")])
def test_ranks_that_name_different_checkpoints_save_none(case: str, tmp_path: Path) -> None:
    given, wanted = CASES[case]
    for said, _, there, after in run_ranks(2, differ, str(tmp_path), given):
        assert pytest.raises(AssertionError, match=wanted).matches(AssertionError(said)), said
        assert there == [] and "manifest.json" in after, (there, after)


@pytest.mark.parametrize("fail", [False, True])
def test_a_second_save_into_the_directory_is_refused_while_one_is_written(tmp_path: Path, fail: bool) -> None:
    """Of another process or of another model; the one that is under way ends as if nothing had been tried."""
    first, second = (build(nn.Linear(3, 2), None, zero(3)) for _ in range(2))
    files = Held()
    saver = Checkpointer(first, files)
    saver.save(tmp_path, "one", use_async=True)
    for tag in ("one", "two"):
        with pytest.raises(ValueError, match=r"\.one\.saving-.* is being written by another process"):
            second.checkpoints.save(tmp_path, tag)
    files.fail = fail
    files.go.set()
    if fail:
        with pytest.raises(CheckpointError, match="No space left"):
            saver.wait_for_saves()
    else:
        saver.wait_for_saves()
    assert [each.tag for each in scan(str(tmp_path))] == ["one"] * (not fail)
    second.checkpoints.save(tmp_path, "two")
    assert sorted(set(os.listdir(tmp_path)) - {"latest"}) == [*["one"] * (not fail), "two"], "nothing hidden stays"
    saver.close()
    for each in (first, second):
        each.close()
