"""Hosts that share no directory: each keeps its part of a checkpoint, and loading brings the parts together.

A host is a folder here, in which its ranks stand; what only real hosts show is in test_checkpoint_hosts.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_setup import Run, differences, everything, start
from engine_setup import PLANS, one_mesh
from sets import full

from shardwise.build import build
from shardwise.checkpoint import hosts
from shardwise.checkpoint.file_system import FileSystem
from shardwise.checkpoint.find import Candidate, find_checkpoints, opening
from shardwise.checkpoint.format import encode_manifest, read_manifest
from shardwise.checkpoint.parts import list_parts
from shardwise.checkpoint.read import NativeSource, verify
from shardwise.checkpoint.session import Checkpointer
from shardwise.checkpoint.source import CheckpointDamage
from shardwise.cli.main import main
from shardwise.mesh import Mesh
from shardwise.testing import run_ranks

ROOT = "runs"


@contextmanager
def on_host(folder: str, number: int) -> Iterator[None]:
    """This rank is on that host, which has a folder of its own."""
    before, name = os.getcwd(), f"host-{number}"
    os.makedirs(os.path.join(folder, name), exist_ok=True)
    os.chdir(os.path.join(folder, name))
    patch = pytest.MonkeyPatch()
    patch.setattr(hosts, "here", lambda: (name, name))
    try:
        yield
    finally:
        patch.undo()
        os.chdir(before)


def begin(mesh: Mesh, seed: int = 0, plan: str = "zero3") -> Run:
    return start(lambda m, o, p: build(m, o, p, mesh), "gpt", "adamw", PLANS[plan], seed=seed)


def stop(run: Run) -> None:
    run.saver.close()
    run.session.close()


def goes_on(folder: str, of: Sequence[int], use_async: bool, plan: str) -> dict[str, Any]:
    """On one rank: train, save on hosts ``of`` ranks, go on; then from other weights restore and go on."""
    with one_mesh(PLANS[plan]) as mesh, on_host(folder, of[mesh.rank]), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        first = begin(mesh, plan=plan)
        first.steps(0, 1)
        first.saver.save(ROOT, "old", lr_schedulers=first.schedulers, user_state="old")
        first.steps(1, 2)
        position = {"rank": mesh.rank}
        how = {"lr_schedulers": first.schedulers, "data_position": position, "user_state": "new"}
        first.saver.save(ROOT, "new", keep=2, use_async=use_async, **how)
        first.saver.wait_for_saves()
        saved, losses = everything(first.session), first.steps(2, 4)
        state = everything(first.session)
        stop(first)
        second = begin(mesh, 5, plan)
        restored = second.saver.load(ROOT, "auto", lr_schedulers=second.schedulers)
        assert restored is not None and (restored.tag, restored.data_position, restored.skipped) == (
            "new",
            position,
            (),
        )
        resumed = second.steps(2, 4)
        wrong = differences(everything(second.session), state)
        stop(second)
        told = [str(each.message) for each in heard if "one directory" in str(each.message)]
        return {"wrong": wrong, "same": resumed == losses, "told": told, "saved": saved}


@pytest.mark.parametrize(("use_async", "plan"), [(True, "zero3"), *full((False, "zero3"), (False, "zero2"))])
def test_hosts_that_keep_their_parts_go_on_bit_for_bit(tmp_path: Path, use_async: bool, plan: str) -> None:
    found = run_ranks(4, goes_on, str(tmp_path), [0, 1, 0, 1], use_async, plan)
    assert [row["wrong"] for row in found] == [[]] * 4 and all(row["same"] for row in found)
    (told,) = found[0]["told"]
    assert "host-0, host-1 keeps its part" in told and "checkpoints.apart=True" in told
    assert [row["told"] for row in found[1:]] == [[], [], []]
    for tag in ("old", "new"):
        parts = [tmp_path / f"host-{host}" / ROOT / tag for host in (0, 1)]
        contents = [(part / "manifest.json").read_bytes() for part in parts]
        assert contents[0] == contents[1], "the manifest is the same on all hosts"
        manifest = read_manifest(str(parts[0]))
        assert manifest.head.hosts == ("host-0", "host-1")
        for host, part in enumerate(parts):
            names = {fact.name for fact in manifest.files if fact.host == host}
            assert {path.name for path in part.iterdir()} == {"manifest.json", *names} and len(names) == 2
        assert "host-1 wrote it" in verify(parts[0])[0]
        with NativeSource(parts[1], partly=True) as source:
            assert source.elsewhere.keys() == {0} and source.state()["user_state"] == tag
        whole = tmp_path / "whole" / tag
        for part in parts:
            shutil.copytree(part, whole, dirs_exist_ok=True)
        assert verify(whole) == [], "parts that are copied into one directory are a checkpoint"
    assert sorted(path.name for path in (tmp_path / "host-1" / ROOT).iterdir()) == ["latest", "new", "old"]


def flip(directory: Path, name: str) -> None:
    """A bit of a weight in that file."""
    manifest = read_manifest(str(directory))
    (number,) = (n for n, fact in enumerate(manifest.files) if fact.name == name)
    held = (p for n, pieces in manifest.pieces.items() for p in pieces if p.file == number and n.startswith("model/"))
    content = bytearray((directory / name).read_bytes())
    content[next(held).offset] ^= 4
    (directory / name).write_bytes(content)


def loads(folder: str, of: Sequence[int], root: str, tag: str | None) -> dict[str, Any]:
    """What is loaded on hosts ``of`` ranks; or why not, and whether anything changed."""
    with one_mesh(PLANS["zero3"]) as mesh, on_host(folder, of[mesh.rank]):
        run = begin(mesh, 7)
        before = everything(run.session)
        try:
            restored = run.saver.load(root, tag)
        except Exception as error:
            changed = differences(everything(run.session), before)
            stop(run)
            return {"error": f"{type(error).__name__}: {error}", "changed": changed}
        found = {"values": everything(run.session), "restored": None if restored is None else restored.user_state}
        stop(run)
        return found


@pytest.fixture(scope="module")
def by_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folders of two hosts with the parts of two ranks each, and what was saved."""
    folder = tmp_path_factory.mktemp("hosts")
    return folder, run_ranks(4, goes_on, str(folder), [0, 0, 1, 1], False, "zero3")[0]["saved"]


@pytest.fixture
def saved_by_four(by_four: tuple[Path, dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """A copy of them is in ``tmp_path``."""
    shutil.copytree(by_four[0], tmp_path, dirs_exist_ok=True)
    return by_four[1]


def test_other_ranks_and_hosts_load_whatever_is_among_them(tmp_path: Path, saved_by_four: dict[str, Any]) -> None:
    """A rank a host, hosts in another order, one more that has nothing, and one that has everything."""
    values = saved_by_four
    for host in (0, 1):
        shutil.copytree(tmp_path / f"host-{host}" / ROOT, tmp_path / "host-9" / ROOT, dirs_exist_ok=True)
    cases = [([0, 1], ROOT, None), ([2, 1, 0], ROOT, "auto"), ([1, 0, 2], f"{ROOT}/new", None), ([9, 9], ROOT, "new")]
    for of, root, tag in [*cases, ([2, 9], ROOT, "auto"), ([2, 0, 1], ROOT, "new")]:
        for row in run_ranks(len(of), loads, str(tmp_path), of, root, tag):
            assert row.get("restored") == "new", (of, root, tag, row.get("error"))
            assert differences(row["values"], values) == [], (of, root, tag)
    nothing = run_ranks(2, loads, str(tmp_path), [5, 6], ROOT, "auto")
    assert [row["restored"] for row in nothing] == [None, None], "hosts that have nothing begin anew"


@pytest.mark.usefixtures("saved_by_four")
def test_what_is_missing_or_damaged_is_named_with_its_host_on_every_rank(tmp_path: Path) -> None:
    for of in ([0, 0], [0, 2]):
        for tag in (None, "new", "auto"):
            for row in run_ranks(2, loads, str(tmp_path), of, ROOT, tag):
                assert row["error"].startswith("CheckpointDamage") and row["changed"] == [], (of, tag, row)
                if tag != "auto":
                    assert "pieces-2.safetensors" in row["error"] and "pieces-3.safetensors" in row["error"], row
                    assert "host-1" in row["error"]
    for row in run_ranks(2, loads, str(tmp_path), [0, 1], ROOT, "none"):
        assert row["error"].startswith("FileNotFoundError: no checkpoint 'none' in runs"), row
    for row in run_ranks(2, loads, str(tmp_path), [2, 3], ROOT, None):
        assert row["error"].startswith("FileNotFoundError: no checkpoint in runs"), row
    flip(tmp_path / "host-1" / ROOT / "new", "pieces-2.safetensors")
    for row in run_ranks(2, loads, str(tmp_path), [0, 1], ROOT, None):
        assert row["error"].startswith("CheckpointDamage") and "new/pieces-2.safetensors" in row["error"], row
        assert "are not what was written" in row["error"] and "taken over already" in row["error"]
    for row in run_ranks(2, loads, str(tmp_path), [0, 1], ROOT, "auto"):
        assert row["restored"] == "old", row
    for row in run_ranks(2, loads, str(tmp_path), [0, 2], ROOT, "auto"):
        assert "every checkpoint in runs is damaged" in row["error"]


def remote_damage(folder: str) -> str:
    """What the rank that asks another host for a damaged piece says."""
    with one_mesh(PLANS["zero3"]) as mesh, on_host(folder, mesh.rank):
        run = begin(mesh, 7)
        run.saver.save(ROOT, "new")
        if mesh.rank == 1:
            flip(Path(ROOT, "new"), "pieces-1.safetensors")
        mesh.everyone.exchange_object(0)
        peers = run.saver._peers
        (found,) = find_checkpoints(peers, ROOT, "new")
        assert isinstance(found, Candidate) and found.parts is not None
        with opening(peers, found) as open_it:
            source = open_it()
            problems: list[str] = source.problems()
            mesh.everyone.exchange_object(0)
        stop(run)
        return "\n".join(problems)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.usefixtures("saved_by_four")
def test_the_commands_say_what_is_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = tmp_path / "host-0" / ROOT / "new"
    code, told = run(capsys, "inspect", part)
    assert code == 0 and "host-0 wrote pieces-0.safetensors, pieces-1.safetensors (" in told, told
    assert re.search(r"host-1 wrote pieces-2.safetensors, pieces-3.safetensors \(.*\), not here", told), told
    code, told = run(capsys, "inspect", part, "--json")
    assert [(each["host"], each["here"]) for each in json.loads(told)["hosts"]] == [("host-0", True), ("host-1", False)]
    code, told = run(capsys, "verify", part)
    assert code == 1 and "pieces-2.safetensors is missing" in told and "host-1 wrote it" in told
    code, told = run(capsys, "verify", "--part", part)
    assert code == 0 and "every byte is as written of what is here; host-1 wrote the rest, and has it" in told
    flip(part, "pieces-1.safetensors")
    code, told = run(capsys, "verify", "--part", part)
    assert code == 1 and "pieces-1.safetensors" in told and "are not what was written" in told
    code, told = run(capsys, "convert", part, tmp_path / "out", "--to", "huggingface")
    assert code == 2 and "host-1 wrote it" in told and not (tmp_path / "out").exists()
    shutil.copytree(tmp_path / "host-1" / ROOT / "old", tmp_path / "host-0" / ROOT / "old", dirs_exist_ok=True)
    code, told = run(capsys, "verify", tmp_path / "host-0" / ROOT / "old")
    assert code == 0 and "wrote the rest" not in told, "brought together it is an ordinary one"


@pytest.mark.usefixtures("saved_by_four")
def test_hosts_in_a_manifest_are_checked(tmp_path: Path) -> None:
    part = tmp_path / "host-0" / ROOT / "new"
    manifest = read_manifest(str(part))
    for hosts_, numbers in ((("a", "b"), [0, 0, 1, 2]), (("a", "b"), [0, 0, 1, -1]), (("a", "b" * 300), [0, 0, 1, 1])):
        files = tuple(replace(fact, host=number) for fact, number in zip(manifest.files, numbers, strict=True))
        changed = replace(manifest, head=replace(manifest.head, hosts=hosts_), files=files)
        (part / "manifest.json").write_bytes(encode_manifest(changed))
        with pytest.raises(CheckpointDamage, match=r"manifest\.json"):
            read_manifest(str(part))
        assert list_parts(str(part.parent), "new")[0].damage


def test_a_piece_that_another_host_sends_is_checked_here(tmp_path: Path) -> None:
    for rank, text in enumerate(run_ranks(2, remote_damage, str(tmp_path))):
        where = "runs/new/pieces-1.safetensors" if rank == 1 else "host-1:runs/new/pieces-1.safetensors"
        assert f"{where}: bytes" in text and "are not what was written" in text and text.count("\n") == 0, text


def saves(folder: str, apart: bool | None, failing: str, host: int, keep: int | None) -> dict[str, Any]:
    """A save of a tag that is there, in which a call fails on one host; then what is loaded, and another save."""

    class Failing(FileSystem):
        armed = False

        def __getattribute__(self, name: str) -> Any:
            if name == failing and type(self).armed:
                raise OSError(28, "No space left on device", "here")
            return super().__getattribute__(name)

    with one_mesh(PLANS["zero3"]) as mesh, on_host(folder, mesh.rank):
        run = begin(mesh, 7)
        saver = Checkpointer(run.session, Failing() if mesh.rank == host else FileSystem())
        saver.apart, said = apart, ""
        saver.save(ROOT, "same", user_state=1)
        Path(ROOT, "same", "note").write_text(f"of host {mesh.rank}")
        Failing.armed = True
        try:
            saver.save(ROOT, "same", user_state=2)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        Failing.armed = False
        restored = saver.load(ROOT, "auto")
        assert restored is not None
        left = sorted(os.listdir(ROOT))
        for number in (3, 4, 5):
            saver.save(ROOT, f"v{number}", user_state=number, keep=keep)
        after = saver.load(ROOT, "auto")
        assert after is not None
        note = Path(ROOT, "same", "note")
        stop(run)
        saver.close()
        return {
            "said": said,
            "restored": restored.user_state,
            "left": left,
            "after": after.user_state,
            "there": sorted(os.listdir(ROOT)),
            "note": note.read_text() if note.exists() else None,
        }


FAILING = ("write_file", "exchange", "create", "sync")
QUICK = [(number % 2, failing) for number, failing in enumerate(FAILING)]


@pytest.mark.parametrize(("host", "failing"), [*QUICK, *full(*((1 - host, failing) for host, failing in QUICK))])
def test_a_call_that_fails_on_one_host_leaves_all_as_they_were(tmp_path: Path, failing: str, host: int) -> None:
    rows = run_ranks(2, saves, str(tmp_path), True, failing, host, None)
    for rank, row in enumerate(rows):
        assert row["said"].startswith(f"CheckpointError: rank {host} could not"), row
        assert "no space" in row["said"].lower() and row["restored"] == 1, row
        assert row["left"] == ["latest", "same"], row
        assert row["after"] == 5 and row["there"] == ["latest", "same", "v3", "v4", "v5"], row
        assert row["note"] == f"of host {rank}", "files of the user's are each host's own"


def test_what_is_older_goes_on_all_hosts(tmp_path: Path) -> None:
    for row in run_ranks(2, saves, str(tmp_path), True, "nothing", 0, 2):
        assert row["said"] == "" and row["restored"] == 2 and row["after"] == 5, row
        assert row["there"] == ["latest", "v4", "v5"] and row["note"] is None, row


def saves_twice(folder: str) -> None:
    """``same`` of two versions; the first is beside it as ``first``."""
    with one_mesh(PLANS["zero3"]) as mesh, on_host(folder, mesh.rank):
        run = begin(mesh, 7)
        run.saver.save(ROOT, "same", user_state="first")
        shutil.copytree(Path(ROOT, "same"), "first")
        run.saver.save(ROOT, "same", user_state="second")
        stop(run)


def saves_again(folder: str) -> list[Any]:
    with one_mesh(PLANS["zero3"]) as mesh, on_host(folder, mesh.rank):
        run = begin(mesh, 7)
        run.saver.save(ROOT, "third", user_state="third")
        restored = run.saver.load(ROOT, "same")
        assert restored is not None
        stop(run)
        return [restored.user_state, sorted(os.listdir(ROOT))]


@pytest.mark.parametrize("renamed", [0, *full(1)])
def test_a_kill_between_the_renames_of_two_hosts_loses_neither_save(tmp_path: Path, renamed: int) -> None:
    """One host shows the new one and has the old one hidden, the other the reverse; the next save finishes that."""
    run_ranks(2, saves_twice, str(tmp_path))
    for host in (0, 1):
        root = tmp_path / f"host-{host}" / ROOT
        hidden = root / ".same.saving-0123456789abcdef"
        if host == renamed:
            (root.parent / "first").rename(hidden)
        else:
            (root / "same").rename(hidden)
            (root.parent / "first").rename(root / "same")
    loaded = run_ranks(2, loads, str(tmp_path), [0, 1], ROOT, "auto")
    assert [row.get("restored") for row in loaded] == ["second", "second"], loaded[0].get("error")
    assert run_ranks(2, saves_again, str(tmp_path)) == [["second", ["latest", "same", "third"]]] * 2


def refused(folder: str) -> list[str]:
    with one_mesh(PLANS["zero3"]) as mesh, on_host(folder, mesh.rank):
        run = begin(mesh, 7)
        run.saver.apart = False
        try:
            run.saver.save(ROOT, "one")
        except Exception as error:
            return [f"{type(error).__name__}: {error}", *(os.listdir(ROOT) if os.path.exists(ROOT) else [])]
        finally:
            stop(run)
        return []


def test_whoever_wants_one_directory_has_an_error_that_names_the_host(tmp_path: Path) -> None:
    for row in run_ranks(2, refused, str(tmp_path)):
        assert "CheckpointError: rank 1 could not write its part" in row[0] and "(host-1)" in row[0], row
        assert row[1:] == [], "nothing is left"
