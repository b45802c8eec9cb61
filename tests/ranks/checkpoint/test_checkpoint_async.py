"""Asynchronous saves beside training; how much a load reads and holds; in which order a save flushes and renames."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.checkpoint import Checkpointer, CheckpointError, NativeSource, restore, verify
from shardwise.core.checkpoint.atomic import FileSystem
from shardwise.core.checkpoint.format import PIECE_BYTES
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.checkpoint_setup import Held
from tests.support.counters import forget_peak, resident_bytes
from tests.support.engine_setup import one_mesh
from tests.support.on_ranks import on_ranks


@on_ranks(2)
def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
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
        assert saver.saving and not os.path.exists(os.path.join(tmp_path, "a"))
        memory = saver._saver._image._memory.data_ptr()
        threading.Timer(0.2, files.go.set).start()
        saver.save(tmp_path, "b", use_async=True)  # waits for the first
        assert os.path.exists(os.path.join(tmp_path, "a")), "a save that still runs is waited for"
        assert saver._saver._image._memory.data_ptr() == memory, "the snapshot's memory is used again"
        saver.wait_for_saves()
        assert not saver.saving
        mesh.world.barrier()
        for tag in ("a", "b"):
            assert verify(os.path.join(tmp_path, tag)) == []
        with NativeSource(os.path.join(tmp_path, "a")) as source:
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


# ---- what a load costs

WIDTH = 3000


def large(root: str, load: bool) -> tuple[int, int, int]:
    """Bytes read, bytes that peak host memory rose by, bytes of this rank's shards."""
    with one_mesh(zero(3)) as mesh:
        model = nn.Linear(WIDTH, WIDTH)
        session = build(model, torch.optim.AdamW(model.parameters(), lr=0.1), zero(3), mesh)
        saver = Checkpointer(session)
        own = session.engine.shards.chunks[0].shard_numel * 4
        if not load:
            session.backward(session.module(torch.ones(1, WIDTH)).square().mean())
            session.optimizer.step()
            saver.save(root, "a")
            session.close()
            return 0, 0, own
        sources: list[NativeSource] = []

        class Counting(NativeSource):
            def __init__(self, path: Any) -> None:
                super().__init__(path)
                sources.append(self)

        restore.NativeSource = Counting  # type: ignore[misc]
        try:
            is_new = forget_peak()
            before = resident_bytes("VmRSS")
            saver.load(root)
            rise = resident_bytes("VmHWM") - before if is_new else 0
        finally:
            restore.NativeSource = NativeSource  # type: ignore[misc]
        session.close()
        return sources[0].bytes_read, rise, own


def test_a_load_reads_what_it_needs_and_holds_little_more(tmp_path: Path) -> None:
    run_ranks(2, large, str(tmp_path), False)
    total = 12 * WIDTH * (WIDTH + 1)
    for read, rise, own in run_ranks(3, large, str(tmp_path), True):
        # Three tensors, each begun and ended inside a piece; small ones and headers in the slack.
        assert 3 * own <= read + 4096 and read <= 3 * own + 6 * PIECE_BYTES + (1 << 20), (read, own)
        # The moments are new memory; weights are there already.
        assert rise <= 3 * own + 4 * PIECE_BYTES + (8 << 20) < total, (rise, own, total)


# ---- the order of a save


class Recording(FileSystem):
    """Notes what is flushed and renamed."""

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
        kind = "hidden" if ".saving-" in path else "root"
        self.log.append(("sync", kind))
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


def test_everything_is_flushed_before_it_gets_its_name(tmp_path: Path) -> None:
    files = Recording()
    session = build(nn.Linear(3, 2), None, zero(3))
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
    session.close()
