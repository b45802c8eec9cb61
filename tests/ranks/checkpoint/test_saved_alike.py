"""Ranks that save under different names, or in different directories, are told so; hosts may have their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engine_setup import PLANS, one_mesh
from sets import full
from test_checkpoint_apart import begin, on_host, stop

from shardwise.checkpoint import hosts
from shardwise.testing import run_ranks


def saves(folder: str, of: list[int], given: list[tuple[str, str | None, int | None]]) -> Any:
    """On one rank: save as ``given``, then all the same. What was raised, what was returned, and what is there."""
    with one_mesh(PLANS["zero3"]) as mesh, on_host(folder, of[mesh.rank]):
        run = begin(mesh)
        run.saver.apart = True
        root, tag, step = given[mesh.rank]
        said = path = ""
        try:
            path = run.saver.save(root, tag, step=step)
        except ValueError as error:
            said = str(error)
        there = [name for each in ("one", "two") if os.path.isdir(each) for name in os.listdir(each)]
        there = [name for name in there if name != "latest"]
        after = run.saver.save("all", "after")
        stop(run)
        return said, path, there, sorted(os.listdir(after))


CASES: dict[str, tuple[list[tuple[str, str | None, int | None]], str]] = {
    "tags": ([("one", "a", None), ("one", "b", None)], "tag='b' on rank 1, and 'a' on rank 0"),
    "steps": ([("one", None, 5), ("one", None, 6)], "tag='step-6' on rank 1, and 'step-5' on rank 0"),
    "roots": ([("one", "a", None), ("two", "a", None)], "{0}/two' on rank 1, and '{0}/one' on rank 0"),
}


@pytest.mark.parametrize("case", ["tags", "roots", *full("steps")])
def test_ranks_of_one_host_that_name_different_checkpoints_save_none(case: str, tmp_path: Path) -> None:
    given, wanted = CASES[case]
    wanted = wanted.format(os.path.realpath(tmp_path / "host-0"))
    for said, _, there, after in run_ranks(2, saves, str(tmp_path), [0, 0], given):
        assert wanted in said and "give the same on every rank" in said, said
        assert there == [] and "manifest.json" in after, (there, after)


def test_hosts_with_directories_of_their_own_may_name_them_differently_but_not_the_tag(tmp_path: Path) -> None:
    found = run_ranks(2, saves, str(tmp_path / "roots"), [0, 1], [("one", "a", None), ("two", "a", None)])
    assert [row[:3] for row in found] == [("", "one/a", ["a"]), ("", "two/a", ["a"])], found
    for said, _, there, _ in run_ranks(2, saves, str(tmp_path / "tags"), [0, 1], CASES["tags"][0]):
        assert "tag='b' on rank 1, and 'a' on rank 0" in said and there == [], (said, there)


def test_a_link_to_the_directory_is_that_directory(tmp_path: Path) -> None:
    (tmp_path / "host-0" / "one").mkdir(parents=True)
    (tmp_path / "host-0" / "two").symlink_to("one")
    for said, path, there, _ in run_ranks(2, saves, str(tmp_path), [0, 0], [("one", "a", None), ("two", "a", None)]):
        assert said == "" and os.path.basename(path) == "a" and "a" in there, (said, path, there)


def test_what_tells_the_places_of_two_hosts_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = hosts.place_of("runs")
    monkeypatch.setattr(hosts, "here", lambda: ("other", "other"))
    assert hosts.place_of("runs") == ["other", here[1]] and here[1] == os.path.realpath("runs")
