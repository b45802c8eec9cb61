"""Checkpointer and its files under failing system calls, kills, damage and asynchronous saves.

``make faults`` runs the full campaign of kills.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import deepspeed
from shardwise.core.checkpoint import CheckpointDamage, Checkpointer, CheckpointError, NativeSource, load, verify
from shardwise.core.checkpoint.atomic import FileSystem, sync_path
from shardwise.core.checkpoint.native_format import PIECE_BYTES
from shardwise.core.checkpoint.training_run import Ranks
from shardwise.lightning import to_single_file
from shardwise.plan import zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.faults import io_errors, kills, soak
from tests.faults.system import in_place_of_the_system
from tests.support.checkpoint_setup import Held
from tests.support.counters import forget_peak, resident_bytes
from tests.support.engine_setup import one_mesh, sharded
from tests.support.formats_setup import flip
from tests.support.launching import forked, start
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full


def test_soak_judge_names_growing_values() -> None:
    steady = {"memory": 100 << 20, "objects": 1000, **dict.fromkeys(soak.EXACT, 7)}
    assert soak.judge([steady] * 50) == []
    for name in steady:
        step = 50 if name == "objects" else 50 << 10 if name == "memory" else 1
        (grown,) = soak.judge([{**steady, name: steady[name] + step * cycle // 2} for cycle in range(500)])
        assert grown.startswith(name), grown
    early = [{**steady, "memory": steady["memory"] - (100 << 20) // (1 + cycle)} for cycle in range(50)]
    assert soak.judge(early[10:]) != [], "what still rises in the second fifth is found"


@pytest.mark.parametrize("use_async", [False, True])
def test_interrupted_save_does_not_block_the_next_one(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_async: bool
) -> None:
    """The causes: a second Ctrl-C, and a communicator of the writing thread that cannot be created."""
    saver = Checkpointer(session)
    place, error = ("async_save.Ranks", RuntimeError) if use_async else ("checkpointer.SavePlan", KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(f"shardwise.core.checkpoint.{place}", mock.Mock(side_effect=error))
        raises(error, None, lambda: saver.save(tmp_path, "a", use_async=use_async))
    assert os.listdir(tmp_path) == []
    saver.save(tmp_path, "a", use_async=use_async)
    saver.close()
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


def test_keep_counts_complete_checkpoints_only(session: Session, tmp_path: Path) -> None:
    """``keep`` does not count checkpoints with a missing or truncated file, or with damage that a load detected."""

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
    flip(pieces("f"), -1)  # only a load can detect it
    saver = Checkpointer(session)
    restored = saver.load(tmp_path, "auto")
    assert restored is not None and restored.tag == "e"
    assert save("g", 2, saver) == ["e", "f", "g"]
    assert save("f", 2, saver) == ["f", "g"], "what is saved again is whole"
    assert save("h", 2, saver) == ["f", "h"]


@pytest.mark.parametrize("file", ["manifest.json", "pieces-0.safetensors"])
def test_auto_with_damaged_checkpoints_names_what_to_load_once(
    session: Session, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = Checkpointer(session)
    for tag in "ab":
        saver.save(tmp_path, tag)
        flip(tmp_path / tag / file, -5)
    capsys.readouterr()
    error = raises(CheckpointDamage, None, lambda: saver.load(tmp_path, "auto"))
    said = capsys.readouterr().out
    assert said.count("checkpoint skipped: ") == 2 and "load another" not in said
    assert error.count("load ") == 1 and error.endswith("; load another copy")


def test_link_to_a_checkpoint_is_replaced_and_its_target_is_unchanged(session: Session, tmp_path: Path) -> None:
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


def test_invalid_checkpointer_calls_raise(session: Session, tmp_path: Path) -> None:
    saver = Checkpointer(session)
    for tag in ("", "a/b", ".hidden", "latest", "auto"):
        raises(ValueError, "tag", saver.save, tmp_path, tag)
    raises(ValueError, "keep=0", lambda: saver.save(tmp_path, "a", keep=0))
    (tmp_path / "mine").mkdir()
    raises(ValueError, "not a checkpoint", lambda: saver.save(tmp_path, "mine"))
    alone = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1)]))
    raises(TypeError, "lr_schedulers=.*: give a list", lambda: saver.save(tmp_path, "a", lr_schedulers=alone))
    raises(CheckpointError, "TypeError: user_state is a set", lambda: saver.save(tmp_path, "a", user_state={1}))
    assert sorted(os.listdir(tmp_path)) == ["mine"]
    raises(FileNotFoundError, "no checkpoint in", lambda: saver.load(tmp_path))
    saver.save(tmp_path, "a")
    raises(FileNotFoundError, "it has a", lambda: saver.load(tmp_path, "b"))
    other = build(nn.Linear(3, 5), None, zero(3))
    words = r"model/weight: \(2, 3\) in the checkpoint, \(5, 3\) in the model"
    raises(ValueError, words, Checkpointer(other).load, tmp_path)
    third = build(nn.Sequential(nn.Linear(3, 2)), None, zero(3))
    words = r"missing from the checkpoint: 0.weight, 0.bias\n  not in the model: bias, weight"
    raises(ValueError, words, Checkpointer(third).load, tmp_path)
    restored = Checkpointer(third).load(tmp_path, strict=False)
    assert restored is not None and restored.missing == ("0.weight", "0.bias")
    for each in (other, third):
        each.close()


def _each_call_fails(save: Callable[[], object], path: Path, failing: bool, closes: bool = False) -> int:
    """Call ``save``, which replaces ``path``, and let each of its system calls fail in turn; return how many failed.

    Calls fail on this rank only if ``failing``. With ``closes``, ``save`` also reads files; closing the last one may
    fail without an error.
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
                # The next save may be running when another rank looks.
                assert not failing or os.listdir(path.parent) == [path.name] or called == "unlink", called
                assert not failing or (path.read_bytes() == b"old") == bool(error), called
            else:
                raise AssertionError("more than 100 calls: the loop does not end")
    save()
    assert os.listdir(path.parent) == [path.name]
    return count


@on_ranks(2)
def test_save_16bit_model_is_atomic_under_io_errors(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    engine = deepspeed.initialize(model=nn.Linear(40, 30), config=config)[0]
    first, file = dist.get_rank() == 0, tmp_path / "weights.bin"
    assert _each_call_fails(lambda: engine.save_16bit_model(str(tmp_path), file.name), file, first) > 15
    assert not first or torch.load(file, weights_only=True)["weight"].shape == (30, 40)
    engine.destroy()


def test_to_single_file_is_atomic_under_io_errors(session: Session, tmp_path: Path) -> None:
    Checkpointer(session).save(tmp_path, "a")
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "one.ckpt"
    assert _each_call_fails(lambda: to_single_file(tmp_path / "a", file), file, True, closes=True) > 15
    assert torch.load(file, weights_only=True)["state_dict"]["weight"].shape == (2, 3)


def test_failed_flush_of_a_directory_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error if the file system does not support the call."""
    for number in (errno.EINVAL, errno.EOPNOTSUPP, errno.EIO, errno.ENOSPC):
        failing = mock.Mock(side_effect=OSError(number, os.strerror(number)))
        monkeypatch.setattr("shardwise.core.checkpoint.atomic.os.fsync", failing)
        refused = number in (errno.EIO, errno.ENOSPC)
        with pytest.raises(OSError, match=os.strerror(number)) if refused else contextlib.nullcontext():
            sync_path(tmp_path)
        assert failing.called


def kill(count: int, seed: int, directory: str, answers: Connection) -> None:
    os.setsid()  # the kill below ends its ranks, too
    found = kills.campaign(count, seed, directory)
    answers.send({"lost": found.lost, **found.counts})


def run(count: int, seed: int, directory: Path) -> dict[str, object]:
    """Run the campaign in a separate process: it forks its ranks, so it must not have started torch's threads."""
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


@on_ranks(2)
def test_training_continues_during_an_asynchronous_save(tmp_path: Path) -> None:
    with one_mesh(zero(3)) as mesh:
        model = nn.Linear(64, 64)
        session = build(model, torch.optim.AdamW(model.parameters(), lr=0.1), zero(3), mesh)
        files = Held()
        saver = Checkpointer(session, files)

        def step() -> None:
            session.backward(session.module(torch.ones(2, 64)).square().mean())
            session.optimizer.step()

        step()
        kept = session.module.state_dict()["weight"].clone()
        saver.save(tmp_path, "a", use_async=True)
        for _ in range(3):
            step()
        assert saver.saving and not (tmp_path / "a").exists()
        memory = saver._saver._image._memory.data_ptr()
        threading.Timer(0.2, files.go.set).start()
        saver.save(tmp_path, "b", use_async=True)  # waits for the first save
        assert (tmp_path / "a").exists(), "a save that still runs is waited for"
        assert saver._saver._image._memory.data_ptr() == memory, "the snapshot's memory is used again"
        saver.wait_for_saves()
        assert not saver.saving
        mesh.world.barrier()
        assert verify(tmp_path / "a") == verify(tmp_path / "b") == []
        with NativeSource(tmp_path / "a") as source:
            assert torch.equal(source.read("model/weight", 0, 4096).reshape(64, 64), kept), "as when the save began"
        files.fail = mesh.rank == 1
        saver.save(tmp_path, "c", use_async=True)
        with pytest.raises(CheckpointError, match=r"asynchronous save failed: .*rank 1.*ENOSPC"):
            saver.save(tmp_path, "d")
        files.fail = False
        step()
        saver.save(tmp_path, "d", use_async=True)
        saver.close()
        mesh.world.barrier()
        assert sorted(n for n in os.listdir(tmp_path) if not n.startswith(".")) == ["a", "b", "d", "latest"]
        session.close()


# ---- bytes read and memory used by a load

WIDTH = 3000


class Counting(NativeSource):
    made: ClassVar[list[NativeSource]] = []

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.made.append(self)


def saved(root: str) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with sharded(model, torch.optim.AdamW(model.parameters(), lr=0.1), zero(3)) as session:
        session.backward(session.module(torch.ones(1, WIDTH)).square().mean())
        session.optimizer.step()
        Checkpointer(session).save(root, "a")


@mock.patch.object(load, "NativeSource", Counting)
def loaded(root: str) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with sharded(model, torch.optim.AdamW(model.parameters(), lr=0.1), zero(3)) as session:
        saver, own = Checkpointer(session), session._engine.shards.chunks[0].shard_numel * 4
        is_new = forget_peak()
        before = resident_bytes("VmRSS")
        saver.load(root)
        rise = resident_bytes("VmHWM") - before if is_new else 0
    read = Counting.made.pop().bytes_read
    # Three tensors, each of which starts and ends inside a piece; the slack covers small tensors and headers.
    assert 3 * own <= read + 4096 and read <= 3 * own + 6 * PIECE_BYTES + (1 << 20), (read, own)
    # Only the moments are allocated; the weights exist already.
    total = 12 * WIDTH * (WIDTH + 1)
    assert rise <= 3 * own + 4 * PIECE_BYTES + (8 << 20) < total, (rise, own, total)


def test_load_reads_and_allocates_only_this_ranks_part(tmp_path: Path) -> None:
    run_ranks(2, saved, str(tmp_path))
    run_ranks(3, loaded, str(tmp_path))


# ---- the order of flushes and renames


class Recording(FileSystem):
    """Record the creations, flushes, renames and removals of files."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str]] = []
        self.names: dict[int, str] = {}

    def create(self, path: str) -> int:
        fd = super().create(path)
        self.names[fd] = os.path.basename(path)
        self.log.append(("create", self.names[fd]))
        return fd

    def sync(self, fd: int) -> None:
        self.log.append(("sync", self.names[fd]))
        super().sync(fd)

    def sync_directory(self, path: str) -> None:
        self.log.append(("sync", "hidden" if ".saving-" in path else "root"))
        super().sync_directory(path)

    def rename(self, old: str, new: str) -> None:
        self.log.append(("rename", os.path.basename(new)))
        super().rename(old, new)

    def exchange(self, one: str, other: str) -> bool:
        self.log.append(("rename", os.path.basename(other)))
        return super().exchange(one, other)

    def remove(self, path: str) -> None:
        self.log.append(("remove", os.path.basename(path)))
        super().remove(path)


def test_files_are_flushed_before_the_commit_rename(session: Session, tmp_path: Path) -> None:
    files = Recording()
    saver = Checkpointer(session, files)
    for again in (False, True):
        files.log.clear()
        saver.save(tmp_path, "a")
        named = files.log.index(("rename", "a"))
        before, after = files.log[:named], files.log[named + 1 :]
        assert [what for what in before if what[0] in ("create", "sync")] == [
            ("create", "pieces-0.safetensors"),
            ("sync", "pieces-0.safetensors"),
            ("create", "manifest.json"),
            ("sync", "manifest.json"),
            ("sync", "hidden"),
        ]
        assert after[0] == ("sync", "root"), "the name itself, before anything old is removed"
        assert (("remove", "manifest.json") in after) == again and ("remove", "manifest.json") not in before


@on_ranks(2)
def test_groups_that_are_dropped_at_once() -> None:
    """``Booster(plugin=plugin).boost(model)`` drops the Booster, and its group, while peers may still connect."""
    assert {Ranks(own=True).size for _ in range(100)} == {2}
