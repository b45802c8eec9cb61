"""Calls that fail, and a save at its most delicate points; ``make faults`` has the full campaign.

A few ranks killed at random moments of saves; ``make faults`` kills many.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import deepspeed
from shardwise.core.checkpoint import CheckpointDamage, Checkpointer, CheckpointError, verify
from shardwise.core.checkpoint.atomic import sync_path
from shardwise.lightning import to_single_file
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.faults import io_errors, kills, soak
from tests.faults.system import in_place_of_the_system
from tests.support.launching import forked, start
from tests.support.on_ranks import raises
from tests.support.sets import campaign, full


def test_a_soak_names_what_grows() -> None:
    steady = {"memory": 100 << 20, "objects": 1000, **dict.fromkeys(soak.EXACT, 7)}
    assert soak.judge([steady] * 50) == []
    for name in steady:
        step = 50 if name == "objects" else 50 << 10 if name == "memory" else 1
        (grown,) = soak.judge([{**steady, name: steady[name] + step * cycle // 2} for cycle in range(500)])
        assert grown.startswith(name), grown
    early = [{**steady, "memory": steady["memory"] - (100 << 20) // (1 + cycle)} for cycle in range(50)]
    assert soak.judge(early[10:]) != [], "what still rises in the second fifth is found"


@pytest.mark.parametrize("use_async", [False, True])
def test_a_save_that_ends_before_it_writes_does_not_keep_out_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_async: bool
) -> None:
    """The second Ctrl-C, and a thread's communicator that cannot be made."""
    session = build(nn.Linear(3, 2), None, zero(3))
    saver = Checkpointer(session)
    place, error = ("snapshot.Ranks", RuntimeError) if use_async else ("session.SavePlan", KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(f"shardwise.core.checkpoint.{place}", mock.Mock(side_effect=error))
        raises(error, None, lambda: saver.save(tmp_path, "a", use_async=use_async))
    assert os.listdir(tmp_path) == []
    saver.save(tmp_path, "a", use_async=use_async)
    saver.close()
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]
    session.close()


def test_purging_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    """A file is missing or cut off, or a load found the damage: none of these is one of those that remain."""
    session = build(nn.Linear(3, 2), None, zero(3))

    def save(tag: str, keep: int | None = None, saver: Checkpointer | None = None) -> list[str]:
        (saver or Checkpointer(session)).save(tmp_path, tag, user_state=tag, keep=keep)
        return sorted(set(os.listdir(tmp_path)) - {"latest"})

    def pieces(tag: str) -> Path:
        return tmp_path / tag / "pieces-0.safetensors"

    for tag in "abc":
        save(tag)
    os.truncate(pieces("c"), 8)
    assert save("d", 2) == ["b", "c", "d"]
    pieces("d").unlink()
    assert save("e", 2) == ["b", "c", "d", "e"]
    assert save("f", 2) == ["e", "f"]
    with open(pieces("f"), "r+b") as file:  # a wrong byte, which only a load can find
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    saver = Checkpointer(session)
    restored = saver.load(tmp_path, "auto")
    assert restored is not None and restored.tag == "e"
    assert save("g", 2, saver) == ["e", "f", "g"]
    assert save("f", 2, saver) == ["f", "g"], "what is saved again is whole"
    assert save("h", 2, saver) == ["f", "h"]
    session.close()


@pytest.mark.parametrize("file", ["manifest.json", "pieces-0.safetensors"])
def test_auto_among_damaged_checkpoints_says_once_what_to_load(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    session = build(nn.Linear(3, 2), None, zero(3))
    saver = Checkpointer(session)
    for tag in "ab":
        saver.save(tmp_path, tag)
        damaged = bytearray((tmp_path / tag / file).read_bytes())
        damaged[-5] ^= 1
        (tmp_path / tag / file).write_bytes(damaged)
    capsys.readouterr()
    error = raises(CheckpointDamage, None, lambda: saver.load(tmp_path, "auto"))
    said = capsys.readouterr().out
    assert said.count("checkpoint skipped: ") == 2 and "load another" not in said
    assert error.count("load ") == 1 and error.endswith("; load another copy")
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


def test_wrong_uses_are_errors(tmp_path: Path) -> None:
    session = build(nn.Linear(3, 2), None, zero(3))
    saver = Checkpointer(session)
    for tag in ("", "a/b", ".hidden", "latest", "auto"):
        raises(ValueError, "tag", saver.save, tmp_path, tag)
    raises(ValueError, "keep=0", lambda: saver.save(tmp_path, "a", keep=0))
    (tmp_path / "mine").mkdir()
    raises(ValueError, "not a checkpoint", lambda: saver.save(tmp_path, "mine"))
    raises(CheckpointError, "TypeError: user_state is a set", lambda: saver.save(tmp_path, "a", user_state={1}))
    assert sorted(os.listdir(tmp_path)) == ["mine"]
    raises(FileNotFoundError, "no checkpoint in", lambda: saver.load(tmp_path))
    saver.save(tmp_path, "a")
    raises(FileNotFoundError, "it has a", lambda: saver.load(tmp_path, "b"))
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


def _each_call_fails(save: Callable[[], object], path: Path, failing: bool, closes: bool = False) -> int:
    """``save`` replaces ``path`` while each of its calls fails in turn, on this rank if ``failing``; how many do.

    ``closes``: it reads files as well, the last of which may fail to close.
    """
    count = 0
    with in_place_of_the_system(True) as system:
        for number in (errno.EIO, errno.ENOSPC):
            for at in range(100):
                if failing:
                    path.write_bytes(b"old")
                system.arm(at if failing else None, number)
                error = ""
                try:
                    save()
                except (OSError, CheckpointError) as raised:
                    error = str(raised)
                reached, called = system.at is None, system.failed
                system.arm(None)
                posts: list[Any] = [(error, reached, called)]
                if dist.is_initialized():
                    dist.broadcast_object_list(posts)
                    assert (error == "") == (posts[0][0] == "")
                error, reached, called = posts[0]
                if not reached:
                    break
                count += 1
                named = errno.errorcode[number] in error or os.strerror(number) in error
                harmless = called in io_errors.HARMLESS or (closes and called == "close of a file")
                assert named or (not error and harmless), (called, error)
                # Another rank may look when the next save is under way.
                assert not failing or os.listdir(path.parent) == [path.name] or called == "unlink", called
                assert not failing or (path.read_bytes() == b"old") == bool(error), called
            else:
                raise AssertionError("more than 100 calls: the loop does not end")
    save()
    assert os.listdir(path.parent) == [path.name]
    return count


def _weights_of_deepspeed(folder: str) -> int:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    engine = deepspeed.initialize(model=nn.Linear(40, 30), config=config)[0]
    rank = dist.get_rank()
    count = _each_call_fails(
        lambda: engine.save_16bit_model(folder, "weights.bin"), Path(folder) / "weights.bin", rank == 0
    )
    if rank == 0:
        assert torch.load(f"{folder}/weights.bin", weights_only=True)["weight"].shape == (30, 40)
    engine.destroy()
    return count


def test_weights_that_deepspeed_saves_replace_the_old_ones_whole_or_not(tmp_path: Path) -> None:
    assert run_ranks(2, _weights_of_deepspeed, str(tmp_path))[0] > 15


def test_a_single_file_replaces_the_old_one_whole_or_not(tmp_path: Path) -> None:
    session = build(nn.Linear(40, 30), None, zero(3))
    Checkpointer(session).save(tmp_path, "a")
    session.close()
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "one.ckpt"
    assert _each_call_fails(lambda: to_single_file(tmp_path / "a", file), file, True, closes=True) > 15
    assert torch.load(file, weights_only=True)["state_dict"]["weight"].shape == (30, 40)


def test_a_directory_that_cannot_be_flushed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the file system says that it has no such call."""

    def failing(number: int) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(number, os.strerror(number))

        return sync

    for number in (errno.EINVAL, errno.EOPNOTSUPP, errno.EIO, errno.ENOSPC):
        monkeypatch.setattr("shardwise.core.checkpoint.atomic.os.fsync", failing(number))
        refused = number in (errno.EIO, errno.ENOSPC)
        with pytest.raises(OSError, match=os.strerror(number)) if refused else contextlib.nullcontext():
            sync_path(tmp_path)


def kill(count: int, seed: int, directory: str, answers: Connection) -> None:
    os.setsid()  # its ranks end with it
    found = kills.campaign(count, seed, directory)
    answers.send({"lost": found.lost, **found.counts})


def run(count: int, seed: int, directory: Path) -> dict[str, object]:
    """In a process of its own: ranks are forked, which needs one that never used torch's threads."""
    answer, answers = multiprocessing.Pipe(duplex=False)
    process = start(forked(kill, count, seed, str(directory), answers))
    answers.close()
    try:
        assert answer.poll(300), "no answer within 300 s"
        found: dict[str, object] = answer.recv()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return found


@pytest.mark.parametrize("count", [*full(6), *campaign(40)])
def test_kills_lose_nothing(tmp_path: Path, count: int) -> None:
    found = run(count, 20, tmp_path)
    assert found["lost"] == [], found
    assert found["kills"] == count and int(str(found["saves"])) > count, found
