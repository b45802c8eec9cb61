"""A file system that fails at any call on any rank: all ranks raise, the old checkpoint stays, training goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_setup import one_mesh
from torch import nn

from shardwise.build import build
from shardwise.checkpoint.directory import CheckpointRoot, scan
from shardwise.checkpoint.file_system import FileSystem
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.read import NativeSource, verify
from shardwise.checkpoint.session import Checkpointer
from shardwise.plan import zero
from shardwise.testing import run_ranks

CALLS = (
    "make_directory",
    "create",
    "allocate",
    "write",
    "sync",
    "close",
    "sync_directory",
    "rename",
    "exchange",
    "remove",
    "remove_directory",
    "lock_directory",
)
NUMBERS = (errno.ENOSPC, errno.EACCES, errno.EIO)


class Failing(FileSystem):
    """The system's, but for the call number ``at`` from now (None: none), which fails with ``number``."""

    def __init__(self, can_exchange: bool = True) -> None:
        super().__init__()
        self.at: int | None = None
        self.number, self.failed, self.can_exchange = errno.EIO, "", can_exchange

    def arm(self, at: int | None, number: int = errno.EIO) -> None:
        self.at, self.number, self.failed = at, number, ""

    def reach(self, name: str) -> None:
        if self.at is not None:
            self.at -= 1
            if self.at < 0:
                self.at, self.failed = None, name
                raise OSError(self.number, os.strerror(self.number), "a file")


def _failing(name: str) -> Any:
    def call(self: Failing, *args: Any) -> Any:
        self.reach(name)
        return False if name == "exchange" and not self.can_exchange else getattr(FileSystem, name)(self, *args)

    return call


for _name in CALLS:
    setattr(Failing, _name, _failing(_name))


def content(path: str) -> tuple[int, torch.Tensor]:
    assert verify(path) == [], path
    with NativeSource(path) as source:
        fact = source.tensors()["model/weight"]
        return source.state()["user_state"], source.read("model/weight", 0, fact.numel).reshape(fact.shape)


def fail_everywhere(root: str, failing_rank: int, use_async: bool, can_exchange: bool) -> dict[str, int]:
    """Save the same tag with each call failing in turn, until there is none left to fail; counts by call."""
    counts: dict[str, int] = {}
    with one_mesh(zero(3)) as mesh:
        model = nn.Linear(40, 30)
        nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(1))
        session = build(model, torch.optim.AdamW(model.parameters(), lr=0.1), zero(3), mesh)
        files = Failing(can_exchange)
        saver = Checkpointer(session, files)
        version = 0

        def save() -> torch.Tensor:
            nonlocal version
            version += 1
            session.backward(session.module(torch.full((2, 40), 0.1 * version)).square().mean())
            session.optimizer.step()
            weight = session.module.state_dict()["weight"]
            saver.save(root, "same", user_state=version, keep=1, use_async=use_async)
            saver.wait()
            return weight

        old = (1, save())
        for at in range(1000):
            files.arm(at if mesh.rank == failing_rank else None, NUMBERS[at % len(NUMBERS)])
            error = ""
            try:
                save()
            except CheckpointError as raised:
                error = str(raised)
            called = mesh.world.exchange_object(files.failed)[failing_rank]
            errors = mesh.world.exchange_object(error)
            still_armed = mesh.world.exchange_object(files.at is not None)[failing_rank]
            files.arm(None)
            if still_armed:
                assert not error
                break
            assert errors[0] == errors[1], "every rank gets the same error"
            counts[str(called)] = counts.get(str(called), 0) + 1
            now = content(os.path.join(root, "same"))
            if error and "is saved and complete" not in error:
                assert errno.errorcode[NUMBERS[at % len(NUMBERS)]] in error, error
                assert f"rank {failing_rank}" in error, error
                assert now[0] == old[0] and torch.equal(now[1], old[1]), (called, at, error)
            else:  # what failed came after the commit, or did not matter
                assert now[0] == version
                assert error or called in ("remove", "remove_directory", "close", "lock_directory", "exchange"), called
            mesh.world.barrier()
            old = (version + 1, save())
            now = content(os.path.join(root, "same"))
            assert now[0] == old[0] and torch.equal(now[1], old[1])
            mesh.world.barrier()
            assert [n for n in os.listdir(root) if n.startswith(".")] == [], "leftovers are removed by the next save"
            assert [each.tag for each in scan(root)] == ["same"]
        saver.close()
        session.close()
    return counts


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_every_call_may_fail(tmp_path: Path, failing_rank: int, use_async: bool, can_exchange: bool) -> None:
    counts = run_ranks(2, fail_everywhere, str(tmp_path), failing_rank, use_async, can_exchange, timeout=120.0)[0]
    assert {"create", "allocate", "write", "sync", "close"} <= counts.keys(), counts
    if failing_rank == 0:
        assert {"make_directory", "sync_directory", "rename", "remove", "remove_directory"} <= counts.keys(), counts


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """Where names cannot be exchanged, the old checkpoint steps aside; if its successor never comes, it is found."""

    class Dying(FileSystem):
        renames = 0

        def exchange(self, one: str, other: str) -> bool:
            return False

        def rename(self, old: str, new: str) -> None:
            self.renames += 1
            if self.renames > 1:
                raise KeyboardInterrupt  # as good as dead: nothing is put back either
            super().rename(old, new)

    root = str(tmp_path)
    session = build(nn.Linear(3, 2), None, zero(3))
    Checkpointer(session).save(root, "same", user_state=1)
    owner = CheckpointRoot(root, Dying())
    owner._files.renames = 0
    hidden, _ = owner.prepare("same")
    (Path(hidden) / "x").write_text("x")
    with pytest.raises(KeyboardInterrupt):
        owner.commit(hidden, "same", b"{}")
    assert not (tmp_path / "same").exists()
    (found,) = scan(root)
    assert found.tag == "same" and verify(found.path) == []
    restored = Checkpointer(session).load(root)
    assert restored is not None and restored.user_state == 1
    owner.discard("nowhere")  # the lock of the dead process
    Checkpointer(session).save(root, "other", user_state=2)
    assert sorted(os.listdir(root)) == ["latest", "other", "same"]
    assert verify(tmp_path / "same") == []
    session.close()


def test_wrong_uses_are_errors(tmp_path: Path) -> None:
    session = build(nn.Linear(3, 2), None, zero(3))
    saver = Checkpointer(session)
    for tag in ("", "a/b", ".hidden", "latest", "auto"):
        with pytest.raises(ValueError, match="tag"):
            saver.save(tmp_path, tag)
    with pytest.raises(ValueError, match="keep=0"):
        saver.save(tmp_path, "a", keep=0)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="not a checkpoint"):
        saver.save(tmp_path, "mine")
    with pytest.raises(CheckpointError, match="TypeError: user_state is a set"):
        saver.save(tmp_path, "a", user_state={1})
    assert sorted(os.listdir(tmp_path)) == ["mine"]
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        saver.load(tmp_path)
    saver.save(tmp_path, "a")
    with pytest.raises(FileNotFoundError, match="there: a"):
        saver.load(tmp_path, "b")
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
